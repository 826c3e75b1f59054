"""One process of a fleet: a worker that records every run of a handler, and enqueues jobs for FEED seconds.

    python member.py URL FOLDER NAME FEED SKEW LEASE

FEED: seconds for which it enqueues. SKEW: seconds by which its clock is wrong. LEASE: seconds. It runs until
SIGTERM. `<name>.runs` gets a line when a run begins and one when it ends, `<name>.asked` one for each
acknowledged job, `<name>.fed` is there when the feeding is over. Lines are JSON; their times are of the clock
that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import towpath
from towpath import App, JobHandle
from towpath.clock import SystemClock

PATIENCE = 60.0
CAPS = {"one": 1, "two": 2}
"""Parts with a cap."""
KEYS = ("unique", "replace", "serial")


class Line(msgspec.Struct):
    """A run of a handler began or ended. `label`: the name that the feeder gave to the job."""

    id: str
    fence: int
    what: str
    at: int
    label: str = ""


class Acknowledged(msgspec.Struct):
    """An acknowledged job. `after`: the jobs that must end before it starts."""

    id: str
    label: str = ""
    after: tuple[str, ...] = ()


class LineFile:
    """A file that one process appends to, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: Line | Acknowledged) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")


class Skewed(SystemClock):
    """A clock that is wrong by so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._off = round(seconds * 1_000_000)

    def now(self) -> int:
        return super().now() + self._off


class Tasks:
    """The tasks of a fleet. A process that only enqueues needs no folder."""

    def __init__(self, app: App, folder: Path | None = None, name: str = "") -> None:
        self._folder = folder
        self._runs = None if folder is None else LineFile(folder / f"{name}.runs")

        async def step(label: str, fails: int = 0) -> str:
            with self._recorded(label):
                await asyncio.sleep(0.002)
                if towpath.current().attempt <= fails:
                    raise RuntimeError("as the feeder requested")
                return label

        def thread(label: str) -> str:
            with self._recorded(label):
                return label

        def hold(label: str) -> str:
            """Runs until the file `go` exists, in every state of the ledger."""
            with self._recorded(label):
                assert self._folder is not None
                until = time.monotonic() + PATIENCE
                while not (self._folder / "go").exists() and time.monotonic() < until:
                    time.sleep(0.01)
                return label

        how: Any = {"queue": "fleet", "max_attempts": 3, "backoff": 0.01}
        self.step: Any = app.task(name="step", **how)(step)
        self.thread: Any = app.task(name="thread", **how)(thread)
        self.hold: Any = app.task(name="hold", queue="hold")(hold)

    @contextlib.contextmanager
    def _recorded(self, label: str) -> Iterator[None]:
        running = towpath.current()
        self._write(running.id, running.fence, "began", label)
        how = "raised"
        try:
            yield
            how = "returned"
        finally:
            self._write(running.id, running.fence, how, label)

    def _write(self, id: str, fence: int, what: str, label: str) -> None:
        assert self._runs is not None
        self._runs.write(Line(id, fence, what, time.monotonic_ns(), label))


class Feeder:
    """Enqueues jobs of every kind, in rounds."""

    def __init__(self, app: App, tasks: Tasks, folder: Path, name: str) -> None:
        self._app, self._tasks = app, tasks
        self._dice = random.Random(name)
        self._asked = LineFile(folder / f"{name}.asked")
        self._last = ""

    def feed(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._plain()
            self._keys()
            self._diamond()
            self._group()
            self._ends_without_success()
            # A larger backlog would not test more.
            self._app.job(self._last).finished(PATIENCE)

    def _plain(self) -> None:
        parts = [f"part {part}" for part in (*CAPS, "free") for _ in range(5)]
        with self._app.batch():
            jobs = [
                self._tasks.step.options(part=label.removeprefix("part ")).enqueue(label) for label in parts
            ]
        for job, label in zip(jobs, parts, strict=True):
            self._note(job, label)
        self._note(self._tasks.thread.enqueue("thread"))
        self._note(self._tasks.step.options(delay=0.02).enqueue("late"))

    def _keys(self) -> None:
        for policy, words in zip(KEYS, ("keep", "replace", "serial"), strict=True):
            label = f"{policy} {self._dice.randrange(4)}"
            self._note(self._tasks.step.options(key=label, on_conflict=words).enqueue(label), label)

    def _diamond(self) -> None:
        step = self._tasks.step
        with self._app.batch():
            top = step.options(priority="low").enqueue("top")
            sides = [
                step.options(after=top, priority=self._dice.randrange(10)).enqueue("side") for _ in range(3)
            ]
            bottom = step.options(after=sides).enqueue("bottom")
        self._note(top)
        for side in sides:
            self._note(side, after=[top])
        # The second one may be finished long before.
        self._note(bottom, after=sides)
        self._note(
            step.options(after=[bottom, self._last]).enqueue("tail"),
            after=[bottom, self._app.job(self._last)],
        )

    def _group(self) -> None:
        calls = [self._tasks.step.of("member", fails=int(n == 0)) for n in range(4)]
        group = self._app.group(calls, then=self._tasks.step.of("then"))
        for member in group.jobs:
            self._note(member)
        assert group.then is not None
        self._note(group.then, after=group.jobs)

    def _ends_without_success(self) -> None:
        dead = self._tasks.step.options(max_attempts=1).enqueue("dead", fails=9)
        self._note(dead, "dead")
        self._note(self._tasks.step.options(after=dead).enqueue("orphan"), "orphan")
        doomed = self._tasks.step.options(delay=3600).enqueue("doomed")
        assert doomed.cancel()
        self._note(doomed, "doomed")

    def _note(self, job: JobHandle[Any], label: str = "", after: Any = ()) -> None:
        self._asked.write(Acknowledged(job.id, label, tuple(each.id for each in after)))
        if label not in ("dead", "orphan", "doomed") and not label.startswith(KEYS):
            self._last = job.id


def main() -> None:
    url, folder, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    feed, skew, lease = map(float, sys.argv[4:])
    app = App(url, name=name, clock=Skewed(skew) if skew else None)
    tasks = Tasks(app, folder, name)

    def feeding() -> None:
        try:
            Feeder(app, tasks, folder, name).feed(feed)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        (folder / f"{name}.fed").touch()

    if feed:
        threading.Thread(target=feeding).start()
    with app:
        app.run(concurrency=8, lease=lease)


if __name__ == "__main__":
    main()
