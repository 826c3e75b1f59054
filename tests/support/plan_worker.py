"""A worker of plans that kills itself: `python plan_worker.py URL LOG PLAN POINT NTH`.

POINT is `before` or `after`: at the NTH batch that changes something of a plan, the process is killed before
or after the commit. POINT `never` runs to the end. Steps write to LOG, which is the state of the world: a
step with effect appends a line, a step that finds its effect does nothing. The process ends when the plan has
ended."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from towpath import App, StepRetry
from towpath.commands import Abort, Append, Command, Note, Open, Seal, Settle
from towpath.core.retry import Fixed
from towpath.operations.plans import PlanBuilder

QUICK = StepRetry(attempts=2, check_attempts=3, backoff=Fixed(0.01))


class World:
    """The tasks of the steps, and the log that they write."""

    def __init__(self, app: App, log: Path) -> None:
        self.log = log
        self._lock = threading.Lock()
        self.put: Any = app.task(name="put")(self._put)
        self.drop: Any = app.task(name="drop")(self._drop)
        self.has: Any = app.task(name="has")(self._has)
        self.refuse: Any = app.task(name="refuse")(self._refuse)

    def _is_put(self, name: str) -> bool:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return next((line.startswith("put") for line in reversed(lines) if line.split()[1] == name), False)

    def _write(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(line + "\n")

    def _put(self, name: str) -> None:
        with self._lock:
            if not self._is_put(name):
                self._write(f"put {name}")

    def _drop(self, name: str) -> None:
        with self._lock:
            if self._is_put(name):
                self._write(f"drop {name}")

    def _has(self, name: str) -> bool:
        with self._lock:
            return self._is_put(name)

    async def _refuse(self, name: str) -> None:
        raise RuntimeError(f"{name} never works")


EDGES = {"a": "", "b": "a", "c": "a", "d": "bc", "e": "b", "f": "de", "g": "c", "h": "fg"}


def build(app: App, world: World, ending: str) -> PlanBuilder:
    """A plan of eight steps on three nodes and a cleanup. `ending`: `done`, `rolled_back` (h fails) or
    `pivot` (f is the pivot, g and h come after it)."""
    plan = app.plans.new(ending)
    for n, (name, after) in enumerate(EDGES.items()):
        action = world.refuse if name == "h" and ending == "rolled_back" else world.put
        kind = "pivot" if (name, ending) == ("f", "pivot") else "reversible"
        if ending == "pivot" and name in "gh":
            kind, after = "forward", f"{after}f"
        plan.step(
            name,
            f"n{n % 3}",
            action.of(name),
            undo=world.drop.of(name) if kind == "reversible" else None,
            check=world.has.of(name) if n % 2 or kind == "pivot" else None,
            after=sorted(set(after)),
            kind=kind,
            retry=QUICK,
        )
    plan.step("z", "n0", world.put.of("z"), kind="cleanup", retry=QUICK)
    return plan


def _concerns_plans(command: Command) -> bool:
    return isinstance(command, Settle | Append | Open | Seal | Abort) or (
        isinstance(command, Note) and command.key.startswith("plan")
    )


def arm(app: App, point: str, nth: int) -> None:
    """Kill the process at the nth batch that changes something of a plan."""
    passed, apply = itertools.count(1), app.ledger.apply

    def counted(commands: Sequence[Command], now: int | None = None) -> Any:
        here = any(map(_concerns_plans, commands)) and next(passed) == nth
        if here and point == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answers = apply(commands, now)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers

    app.ledger.apply = counted  # type: ignore[method-assign]


def main() -> None:
    url, log, plan, point, nth = sys.argv[1:]
    app = App(url)
    World(app, Path(log))
    if point != "never":
        arm(app, point, int(nth))

    def end() -> None:
        app.plans.get(plan).wait(timeout=60)
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()
    app.run(queues=("node/*",), concurrency=4)


if __name__ == "__main__":
    main()
