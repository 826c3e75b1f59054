"""Exceptions by which a handler chooses the outcome of its attempt. Any other exception is a failure and
follows the task's backoff."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from towpath.core import checks

Span = float | timedelta
"""Seconds, or a timedelta."""


class Control(Exception):
    """The base of the exceptions that a handler raises on purpose."""


class Retry(Control):
    """The attempt failed; retry after `after` seconds (default: the task's backoff), unless it was the last
    attempt. `throttled`: the service that it uses refused because of too many requests, and `after` applies
    to all jobs of the task's resource."""

    __module__ = "towpath"  # the public path, which stored errors show

    def __init__(self, reason: str = "", *, after: Span | None = None, throttled: bool = False) -> None:
        super().__init__(reason or "retry")
        self.after = None if after is None else checks.seconds("after", after)
        self.throttled = throttled


class Throttled(Retry):
    """A service refused because of too many requests: `Retry` with `throttled=True`."""

    __module__ = "towpath"  # the public path, which stored errors show

    def __init__(self, reason: str = "", *, after: Span | None = None) -> None:
        super().__init__(reason or "throttled", after=after, throttled=True)


class Snooze(Control):
    """Not a failure: run again after `for_` seconds. Does not count towards `max_attempts`."""

    def __init__(self, for_: Span) -> None:
        self.for_ = checks.seconds("for_", for_)
        super().__init__(f"snooze for {self.for_:g} s")


class BreakerOpen(Control):
    """The breaker of a block is open (see `towpath.breaker`). The job waits and runs again later, without
    spending an attempt; a handler may catch it and continue without the call."""

    def __init__(self, name: str, after: Span) -> None:
        self.name = name
        self.after = checks.seconds("after", after)
        super().__init__(f"breaker {name} lets nothing through for another {self.after:.1f} s")


class ArgumentsUnfit(Control):
    """Raised before the handler is called: the arguments do not fit its signature, but may fit that of
    another version of the code."""


class Cancel(Control):
    """Stop without a failure: the job ends as canceled."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "canceled by its handler")


class StopRequested(BaseException):
    """Raised by `current().check()` after the job was asked to stop. The job then ends as stopped, not as
    failed. Like `asyncio.CancelledError` it is no `Exception`, so that `except Exception` does not swallow
    it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the job was asked to stop ({reason})")


class Fail(Control):
    """No retry: the job ends as failed, a dead letter."""

    __module__ = "towpath"  # the public path, which stored errors show

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "failed by its handler")


TOO_MANY_REQUESTS = 429
MAX_RETRY_AFTER = 3600.0
"""The longest pause in seconds. After a longer one the service is called again anyway."""


def throttling(error: BaseException) -> int | None:
    """Return the pause in microseconds that a throttling service asks for (0: no time given), or None if
    neither the error nor its cause reports throttling. Errors of HTTP clients with the status 429 do (httpx,
    requests, aiohttp, urllib)."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        if isinstance(at, Retry):
            if at.throttled:
                return checks.micros(at.after or 0)
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
    """The header in seconds. A date is ignored: it would be compared with another machine's clock."""
    headers: Any = getattr(getattr(error, "response", None), "headers", None) or getattr(
        error, "headers", None
    )
    try:
        given = headers.get("Retry-After") or headers.get("retry-after")
        seconds = min(MAX_RETRY_AFTER, max(0.0, float(given or 0.0)))
    except (AttributeError, TypeError, ValueError):
        return 0
    return checks.micros(seconds) if seconds == seconds else 0
