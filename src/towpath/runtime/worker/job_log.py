"""Log lines of a worker's jobs: one for each start and end at low rates, a summary at high rates.

All lines go to the logger `towpath.jobs`, with the same values as attributes of the record (`extra`). While
lines of single jobs are off, a job costs one test of `JobLog.lines`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from towpath.core.commands import Settled
from towpath.core.explain import when
from towpath.core.job import Job, Outcome, Refuse, RetryOutcome, SnoozeOutcome, State
from towpath.core.retry import is_misfit
from towpath.escapes import escape, get_logger

log = get_logger("towpath.jobs")

MAX_LINES = 400
"""Lines of started and done jobs in a second. After that, none is logged until a whole second had fewer than
a fourth as many jobs; a summary replaces them. At the level DEBUG there is no limit."""
MAX_FAILURES = 50
"""Failed attempts that are logged in a second, with their tracebacks."""
SUMMARY = 5.0
"""Seconds between two summaries."""
TICK = 1.0
MAX_KINDS = 1000
"""Kinds that are remembered, so that a warning about a kind is logged once."""


class JobLog:
    """`count` returns the number of handler calls that are settled. `now` returns the ledger time, `running`
    the number of running handlers. `open`, `started` and `close` belong to the worker's loop, `done` and
    `ended` to the committing thread."""

    def __init__(self, count: Callable[[], int], running: Callable[[], int], now: Callable[[], int]) -> None:
        self._count, self._running, self._now = count, running, now
        self.lines = False
        """Whether the start and the success of a single job are logged now."""
        self._timer: asyncio.TimerHandle | None = None
        self._unlimited = False
        self._left, self._failures_left, self._hidden = MAX_LINES, MAX_FAILURES, 0
        self._ends = dict.fromkeys(("retried", "failed", "other"), 0)
        """Ends other than success since the start, by kind."""
        self._misfits: set[str] = set()
        """Kinds with a job that has unfit arguments: the first of each is a warning."""
        self._counted = 0
        """`count` at the last tick."""
        self._summarized: tuple[float, int, dict[str, int]] | None = None
        """Time and counts at the begin of the next summary; None while single jobs are logged."""

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._began = time.monotonic()
        self.lines = log.isEnabledFor(logging.INFO)
        self._unlimited = log.isEnabledFor(logging.DEBUG)
        self._timer = loop.call_later(TICK, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.lines = False
            self._report_hidden()
            self._summarize("worker stopped", (self._began, 0, dict.fromkeys(self._ends, 0)))

    def _tick(self) -> None:
        """Once a second: decide whether single jobs are logged. The level of the logger may have changed."""
        self._timer = self._loop.call_later(TICK, self._tick)
        count = self._count()
        jobs, self._counted = count - self._counted, count
        self._left, self._failures_left = MAX_LINES, MAX_FAILURES
        self._unlimited = log.isEnabledFor(logging.DEBUG)
        self._report_hidden()
        if self._summarized is not None and time.monotonic() - self._summarized[0] >= SUMMARY - TICK / 2:
            self._summarize("jobs", self._summarized)
            self._summarized = self._snapshot()
        if not log.isEnabledFor(logging.INFO):
            self.lines, self._summarized = False, None
        elif not self.lines and (self._unlimited or jobs < MAX_LINES / 4):
            self.lines = True
            if self._summarized is not None:
                self._summarize("jobs", self._summarized)
                self._summarized = None

    def _snapshot(self) -> tuple[float, int, dict[str, int]]:
        return time.monotonic(), self._count(), dict(self._ends)

    def _summarize(self, what: str, since: tuple[float, int, dict[str, int]]) -> None:
        at, count, ends = self._snapshot()
        spent = at - since[0]
        others = {name: ends[name] - since[2][name] for name in ends}
        # The ends are counted in another thread, a moment before the calls.
        done = max(0, count - since[1] - sum(others.values()))
        rate, running = (count - since[1]) / max(spent, 0.001), self._running()
        counts = {"done": done, "failed": others["failed"], "retried": others["retried"]}
        _log(
            logging.INFO,
            "%s: %d done, %d failed, %d retried in %.1f s (%.0f/s), %d running",
            (what, *counts.values(), spent, rate, running),
            {
                "event": "jobs_summary",
                **counts,
                "seconds": round(spent, 3),
                "rate": round(rate, 1),
                "running": running,
            },
        )

    def _report_hidden(self) -> None:
        hidden, self._hidden = self._hidden, 0
        if hidden:
            _log(
                logging.WARNING,
                "%d more attempts failed within a second and are not logged; `towpath dead list` and "
                "`towpath jobs show ID` have the errors",
                (hidden,),
                {"event": "failures_hidden", "count": hidden},
            )

    # Single jobs

    def started(self, job: Job) -> None:
        if self._may_log():
            values = job.kind, job.short_id, _attempt(job)
            _log(logging.INFO, "%s %s started, attempt %s", values, _extra("started", job))

    def done(self, job: Job, spent: float) -> None:
        if self._may_log():
            self._line(logging.INFO, "done", job, spent)

    def ended(
        self, job: Job, outcome: Outcome, reply: Settled, spent: float, error: BaseException | None
    ) -> None:
        """An end other than success. Failures are always logged, up to a rate."""
        first = (getattr(outcome, "error", None) or "").partition("\n")[0]
        if reply.state is State.FAILED or isinstance(outcome, RetryOutcome):
            self._failed(job, outcome, reply, spent, error)
            return
        if not spent:
            # No handler was called: the job was released or refused before.
            return
        self._ends["other"] += 1
        if isinstance(outcome, Refuse) and is_misfit(outcome.error) and job.kind not in self._misfits:
            if len(self._misfits) < MAX_KINDS:
                self._misfits.add(job.kind)
                self._line(logging.WARNING, "refused", job, spent, self._now() + outcome.delay, first)
            return
        if not (self.lines and self._may_log()):
            return
        if reply.state is State.CANCELED:
            self._line(logging.INFO, "canceled", job, spent, why=first)
        elif isinstance(outcome, SnoozeOutcome | Refuse):
            name = "snoozed" if isinstance(outcome, SnoozeOutcome) else "refused"
            self._line(logging.INFO, name, job, spent, self._now() + outcome.delay, first)

    def _failed(
        self, job: Job, outcome: Outcome, reply: Settled, spent: float, error: BaseException | None
    ) -> None:
        final = reply.state is State.FAILED
        self._ends["failed" if final else "retried"] += 1
        if not final and not log.isEnabledFor(logging.INFO):
            return
        if self._failures_left <= 0 and not self._unlimited:
            self._hidden += 1
            return
        self._failures_left -= 1
        text = getattr(outcome, "error", None) or ""
        next_at = None
        if isinstance(outcome, RetryOutcome) and not final:
            next_at = self._now() + outcome.delay
        # The exception of a handler in another process is only here as text, with its traceback.
        why = text.partition("\n")[0] if error is not None else text.replace("\n\n", "\n", 1).rstrip()
        # Not a warning: a program without logging would print the traceback of every retry on stderr.
        level, name = (logging.ERROR, "failed") if final else (logging.INFO, "retried")
        self._line(level, name, job, spent, next_at, why, error)

    def _line(
        self,
        level: int,
        name: str,
        job: Job,
        spent: float,
        next_at: int | None = None,
        why: str = "",
        error: BaseException | None = None,
    ) -> None:
        words = {"failed": "failed for good", "retried": "failed"}.get(name, name)
        values: list[Any] = [job.kind, job.short_id, words, spent, _attempt(job)]
        message = "%s %s %s in %.3f s, attempt %s"
        extra = _extra(name, job) | {"seconds": round(spent, 6)}
        if next_at is not None:
            message, values = f"{message}, next attempt at %s", [*values, when(next_at)]
            extra["next_at"] = when(next_at)
        if why:
            first, _, trace = why.partition("\n")
            message, values = f"{message}: %s", [*values, first]
            # A line break in an argument would be escaped; in the message further lines are indented.
            message += "\n" + trace.replace("%", "%%") if trace else ""
            extra["error"] = escape(first)
        _log(level, message, values, extra, error)

    def _may_log(self) -> bool:
        """Take one line from the budget of this second."""
        self._left -= 1
        if self._left >= 0 or self._unlimited:
            return True
        if self.lines:
            self.lines, self._summarized = False, self._snapshot()
            _log(
                logging.INFO,
                "more than %d jobs a second: only failures are logged one by one, the others in a summary "
                "every %g s. The log level DEBUG logs all.",
                (MAX_LINES // 2, SUMMARY),
                {"event": "jobs_not_logged"},
            )
        return False


def _log(
    level: int, message: str, values: Sequence[Any], extra: dict[str, Any], error: BaseException | None = None
) -> None:
    """Log a line. A filter or handler of the program that raises must not stop a commit or the worker: the
    line is logged again without the exception, and dropped if that raises too."""
    try:
        log.log(level, message, *values, exc_info=error, extra=extra)
    except Exception:
        with contextlib.suppress(Exception):
            log.log(level, message, *values, extra=extra)


def _attempt(job: Job) -> str:
    """This attempt and how many there are. Attempts that were snoozed, released or lost do not count."""
    return f"{job.attempts_used}/{job.max_attempts}"


def _extra(name: str, job: Job) -> dict[str, Any]:
    return {"event": f"job_{name}", **job_fields(job)}


def job_fields(job: Job) -> dict[str, Any]:
    """The job as attributes of a log record."""
    return {
        "job_id": job.id,
        "kind": escape(job.kind),
        "queue": escape(job.queue),
        "attempt": job.attempts_used,
        "max_attempts": job.max_attempts,
    }
