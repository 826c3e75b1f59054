"""What a handler raises to say how its attempt ends. Anything else it raises is a failure and follows the task's backoff."""

from __future__ import annotations

from datetime import timedelta

from towpath.core import checks

Span = float | timedelta
"""Seconds, or a timedelta."""


class Control(Exception):
    """The root of what a handler may raise on purpose."""


class Retry(Control):
    """The attempt failed; try again after `after` seconds (else as the task's backoff says), unless it was the last."""

    def __init__(self, reason: str = "", *, after: Span | None = None) -> None:
        super().__init__(reason or "retry")
        self.after: int | None = None if after is None else checks.micros(after, "after")


class Snooze(Control):
    """Not a failure: come back after `for_` seconds. Costs nothing of `max_attempts`."""

    def __init__(self, for_: Span) -> None:
        self.for_ = checks.micros(for_, "for_")
        super().__init__(f"snooze for {self.for_ / checks.SECOND:g} s")


class BreakerOpen(Control):
    """A breaker that the handler wanted to pass is open (see `towpath.breaker`). The job goes back and comes again later, without
    spending anything; a handler may catch it and do without."""

    def __init__(self, name: str, after: Span) -> None:
        self.name = name
        self.after = checks.micros(after, "after")
        super().__init__(f"breaker {name} lets nothing through for another {self.after / checks.SECOND:.1f} s")


class Cancel(Control):
    """Stop here for good, without a failure: the job ends as canceled."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "canceled by its handler")


class Fail(Control):
    """Never try again: the job ends as failed, a dead letter."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "failed by its handler")
