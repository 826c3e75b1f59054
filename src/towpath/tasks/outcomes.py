"""What a handler raises to say how its attempt ends. Anything else it raises is a failure and follows the
task's backoff."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from towpath.core import checks

Span = float | timedelta
"""Seconds, or a timedelta."""


class Control(Exception):
    """The root of what a handler may raise on purpose."""


class Retry(Control):
    """The attempt failed; try again after `after` seconds (else as the task's backoff says), unless it was the last.
    `throttled`: the service that it uses was asked too much, and `after` is for all jobs of the task's resource."""

    def __init__(self, reason: str = "", *, after: Span | None = None, throttled: bool = False) -> None:
        super().__init__(reason or "retry")
        self.after: int | None = None if after is None else checks.micros(after, "after")
        self.throttled = throttled


class Throttled(Retry):
    """A service was asked too much: `Retry` with `throttled=True`."""

    def __init__(self, reason: str = "", *, after: Span | None = None) -> None:
        super().__init__(reason or "throttled", after=after, throttled=True)


class Snooze(Control):
    """Not a failure: come back after `for_` seconds. Costs nothing of `max_attempts`."""

    def __init__(self, for_: Span) -> None:
        self.for_ = checks.micros(for_, "for_")
        super().__init__(f"snooze for {self.for_ / checks.SECOND:g} s")


class BreakerOpen(Control):
    """A breaker that the handler wanted to pass is open (see `towpath.breaker`). The job goes back and comes
    again later, without spending anything; a handler may catch it and do without."""

    def __init__(self, name: str, after: Span) -> None:
        self.name = name
        self.after = checks.micros(after, "after")
        super().__init__(
            f"breaker {name} lets nothing through for another {self.after / checks.SECOND:.1f} s"
        )


class Cancel(Control):
    """Stop here for good, without a failure: the job ends as canceled."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "canceled by its handler")


class StopRequested(BaseException):
    """`current().check()` raises it once the job was asked to stop. The job then ends as stopped, not as failed. Like
    `asyncio.CancelledError` it is no `Exception`, so that `except Exception` does not swallow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the job was asked to stop ({reason})")


class Fail(Control):
    """Never try again: the job ends as failed, a dead letter."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "failed by its handler")


TOO_MANY_REQUESTS = 429
MAX_RETRY_AFTER = 3600.0
"""Seconds. A service that asks for more is asked again after this."""


def throttling(error: BaseException) -> int | None:
    """Does the error, or what it was raised from, say that a service was asked too much? Microseconds after
    which it wants to be asked again (0: it does not say), else None. Errors of HTTP clients with the status
    429 do (httpx, requests, aiohttp, urllib)."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if isinstance(at, Retry):
            if at.throttled:
                return at.after or 0
        elif _status(at) == TOO_MANY_REQUESTS:
            return _retry_after(at)
        seen.append(at)
        at = at.__cause__
    return None


def _status(error: BaseException) -> Any:
    response = getattr(error, "response", None)
    found = [getattr(response, name, None) for name in ("status_code", "status")]
    return next(
        (each for each in (*found, *[getattr(error, name, None) for name in ("status", "code")]) if each),
        None,
    )


def _retry_after(error: BaseException) -> int:
    """The header in seconds. A date there is as good as nothing: it would be compared with another machine's
    clock."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None) or getattr(
        error, "headers", None
    )
    try:
        said = headers.get("Retry-After") or headers.get("retry-after")
        seconds = min(MAX_RETRY_AFTER, max(0.0, float(said or 0.0)))
    except (AttributeError, TypeError, ValueError):
        return 0
    return checks.micros(seconds) if seconds == seconds else 0
