"""The plans of `shards` commands: run them with their progress on stderr, and report how they ended."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from logging import CRITICAL
from typing import TYPE_CHECKING

from towpath.cli.base import INTERRUPTED, LEFT, OK, Failure, Session, print_stderr
from towpath.cli.output import print_result
from towpath.cli.plan_views import advice, code_of
from towpath.errors import PlanRefused
from towpath.escapes import get_logger

if TYPE_CHECKING:
    from towpath.app import App
    from towpath.apps.shards.running import PlanRunner, Seen
    from towpath.apps.shards.service import Shards, Submission
    from towpath.flows.status import PlanStatus, StepStatus

STEP_SECONDS = 2.0
"""A step that runs longer is shown again after each such time."""
_ERROR = re.compile(r"(?:\w+\.)*[A-Z]\w*[a-z]\w*: ")


def execute(session: Session, opened: Shards, work: Sequence[Submission], *, agents: bool) -> int:
    """Run the plans one after the other, in this process or by agents; print the result and return the exit
    code."""
    from towpath.apps.shards.running import PlanRunner

    display = _Display(opened.app)
    report: Callable[[Seen], None] = display.collect if session.json else display.show
    execution = _Execution(opened, display, PlanRunner(opened.app, report))
    ended = asyncio.run(execution.run(work, agents))
    return _result(session, ended, work, display.errors)


def _result(
    session: Session, ended: Sequence[PlanStatus], work: Sequence[Submission], errors: Sequence[str]
) -> int:
    done = [each for each in ended if each.state == "done"]
    data = {"plans": [{"id": each.id, "state": each.state, "why": each.why} for each in ended]}
    if len(done) == len(work):
        print_result(session.json, data, [f"Done: {each.plan.description}." for each in work])
        return OK
    last = ended[-1] if ended else None
    if last is None or last.state == "done":
        raise Failure(f"Interrupted: {len(done)} of {len(work)} plans were done.", INTERRUPTED, "", data)
    lines = [f"Plan {last.id} ended as {last.state}: {last.why or 'no reason'}", *errors[:20]]
    if last.left:
        lines.append(f"Not done: {', '.join(last.left[:20])}{' ...' if last.left_count > 20 else ''}")
    if last.state == "rolled_back":
        step = "Nothing of this plan is left. Correct the reason, then run the command again."
    else:
        step = "\n".join([*advice(last), "`towpath shards agent` then runs the steps."])
    raise Failure("\n".join(lines), code_of(last), step, data)


class _Execution:
    """Runs plans with the progress on stderr. The first Ctrl-C aborts the current plan, the second ends the
    command."""

    def __init__(self, opened: Shards, display: _Display, runner: PlanRunner) -> None:
        self._opened, self.display, self._runner = opened, display, runner
        self._aborting: asyncio.Task[None] | None = None

    async def run(self, work: Sequence[Submission], agents: bool) -> list[PlanStatus]:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None

        def interrupted() -> None:
            if self._aborting is None:
                self._aborting = asyncio.create_task(self._abort())
            else:
                me.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupted)
        # The errors of steps are shown by the display, without tracebacks.
        logger = get_logger("towpath")
        level = logger.level
        logger.setLevel(CRITICAL)
        try:
            if agents:
                return await self._runner.follow(work)
            return await self._runner.run(work, self._opened.nodes)
        except asyncio.CancelledError:
            step = "`towpath shards agent` continues it."
            raise Failure(f"Plan {self.display.plan} has not ended.", LEFT, step) from None
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            logger.setLevel(level)

    async def _abort(self) -> None:
        try:
            answer = await self._runner.abort("Ctrl-C")
        except PlanRefused as refused:
            print_stderr([f"Interrupted: {refused}. No further plan begins."])
            return
        what = {
            True: "Interrupted before the point of no return: rolling back.",
            False: "Interrupted after the point of no return: completing the plan.",
            None: "Interrupted: the point of no return decides between rollback and completion.",
        }[answer]
        print_stderr([what, "Ctrl-C again ends the command; the plan then waits for an agent."])


class _Display:
    """Prints a line for every change of a step. `errors` are the errors of the failed steps of the last
    plan."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._lines: dict[str, str] = {}
        self._shown_at: dict[str, float] = {}
        self.plan = ""
        self.errors: list[str] = []

    def collect(self, seen: Seen) -> None:
        self.plan = seen.status.id
        failed = [step for step in seen.steps if step.state == "failed" and step.started_at is not None]
        self.errors = [f"{step.name} on {step.node}: {_last_line(step.error)}" for step in failed]
        self.errors += [
            f"undo of {step.name} on {step.node}: {_last_line(step.undo_error)}"
            for step in seen.steps
            if step.undo == "failed"
        ]

    def show(self, seen: Seen) -> None:
        lines = []
        if seen.status.id != self.plan:
            self._lines.clear()
            self._shown_at.clear()
            lines.append(f"plan {seen.status.id}: {seen.total} steps")
        self.collect(seen)
        for step in seen.steps:
            line = _line_of(step)
            if line and self._lines.get(step.name) != line:
                self._lines[step.name] = line
                lines.append(line)
            elif step.state == "running":
                lines += self._still_running(step)
        if lines:
            print_stderr(lines)

    def _still_running(self, step: StepStatus) -> Iterator[str]:
        """A line each time that another two seconds have passed, with the progress that the step reports."""
        now = time.monotonic()
        if now - self._shown_at.setdefault(step.name, now) >= STEP_SECONDS:
            self._shown_at[step.name] = now
            jobs = {job.id: job for job in self._app.progress().running}
            found = jobs.get(f"plan/{self.plan}/{step.name}")
            part = ""
            if found is not None and found.done is not None and found.total:
                part = f", {100 * found.done / found.total:.0f} %"
            yield f"  running  {step.name} on {step.node}{part}"


def _line_of(step: StepStatus) -> str:
    """The line of a step that has ended, was undone or waits for another attempt; empty for others."""
    if step.undo is not None:
        word = {"done": "undone", "failed": "not undone"}.get(step.undo, "")
        error = step.undo_error if step.undo == "failed" else None
        return f"  {word:8} {step.name} on {step.node}{_why(error)}" if word else ""
    if step.state == "scheduled" and step.error is not None:
        return f"  retry {step.attempts:<2} {step.name} on {step.node}{_why(step.error)}"
    if step.started_at is None or step.finished_at is None:
        return ""
    spent = "" if step.duration is None else f", {step.duration:.1f} s"
    if isinstance(step.result, dict) and "pause" in step.result:
        spent += f", writes paused for {step.result['pause']:.2f} s"
    error = None if step.state == "done" else step.error
    return f"  {step.state:8} {step.name} on {step.node}{spent}{_why(error)}"


def _why(error: str | None) -> str:
    return "" if error is None else f": {_last_line(error)}"


def _last_line(error: str | None) -> str:
    """The line of a traceback with the error. PostgreSQL adds lines such as `CONTEXT: ...` below it."""
    lines = (error or "").strip().split("\n")
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[-1])
