"""Backoff. The worker computes the delay and sends it; the ledger never draws a random number."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.core.explain import UNKNOWN_KIND, when
from towpath.core.job import FailOutcome, Refuse
from towpath.errors import InvalidInput

Chance = Callable[[], float]
"""A source of numbers in [0, 1), such as `random.Random(seed).random`."""


class Exponential(msgspec.Struct, frozen=True, tag="exponential"):
    """`base * factor**(n-1)`, at most `cap`, spread by plus or minus `jitter` of itself. `base` and `cap` are
    seconds or timedeltas."""

    base: float | timedelta = 1.0
    factor: float = 2.0
    cap: float | timedelta = 3600.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        force_setattr(self, "base", checks.seconds("backoff.base", self.base))
        force_setattr(self, "cap", checks.seconds("backoff.cap", self.cap))
        if not 1 <= self.factor <= 100:
            raise InvalidInput(field="backoff.factor", value=self.factor, expected="a number from 1 to 100")
        if not 0 <= self.jitter <= 1:
            raise InvalidInput(field="backoff.jitter", value=self.jitter, expected="a number from 0 to 1")

    def delay(self, failures: int, chance: Chance) -> float:
        """Seconds after the `failures`-th failure."""
        base, cap = checks.seconds("backoff.base", self.base), checks.seconds("backoff.cap", self.cap)
        # 2**64 seconds are beyond every cap; the bound keeps the power finite.
        plain = min(cap, base * self.factor ** min(failures - 1, 64))
        return min(cap, max(0.0, plain * (1 + self.jitter * (2 * chance() - 1))))


class Fixed(msgspec.Struct, frozen=True, tag="fixed"):
    """The same delay, in seconds or as a timedelta, after every failure."""

    wait: float | timedelta = 1.0

    def __post_init__(self) -> None:
        force_setattr(self, "wait", checks.seconds("backoff.wait", self.wait))

    def delay(self, failures: int, chance: Chance) -> float:
        return checks.seconds("backoff.wait", self.wait)


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """One delay, in seconds or as a timedelta, per failure; the last one repeats."""

    waits: tuple[float | timedelta, ...]

    def __post_init__(self) -> None:
        if not self.waits:
            raise InvalidInput(
                field="backoff.waits", value=self.waits, expected="a list of at least one delay"
            )
        force_setattr(self, "waits", tuple(checks.seconds("backoff.waits", wait) for wait in self.waits))

    def delay(self, failures: int, chance: Chance) -> float:
        return checks.seconds("backoff.waits", self.waits[min(failures, len(self.waits)) - 1])


Backoff = Exponential | Fixed | Listed


class Policy(msgspec.Struct, frozen=True):
    """A backoff by exception: of the nearest class listed, else the default."""

    default: Backoff = Exponential()
    by_error: Mapping[type[BaseException], Backoff] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.default, Backoff):
            raise InvalidInput(field="default", value=self.default, expected="a backoff, such as Fixed(5)")
        if not isinstance(self.by_error, Mapping) or not all(map(_is_rule, self.by_error.items())):
            expected = "exception classes, each with a backoff: {ConnectionError: Fixed(5)}"
            raise InvalidInput(field="by_error", value=self.by_error, expected=expected)

    def delay(self, error: BaseException, failures: int, chance: Chance) -> float:
        """Seconds after the `failures`-th failure (counted from 1)."""
        for kind in type(error).__mro__:
            if (backoff := self.by_error.get(kind)) is not None:
                return backoff.delay(failures, chance)
        return self.default.delay(failures, chance)


def _is_rule(rule: tuple[object, object]) -> bool:
    error, backoff = rule
    return isinstance(error, type) and issubclass(error, BaseException) and isinstance(backoff, Backoff)


DEPLOY_WINDOW = 3600.0
"""Seconds for which a job with unfit arguments waits for a worker with other code."""
_MISFIT = "the arguments do not fit, since "
_FIRST = "; first refused at "
_SINCE = re.compile(
    rf"(?:{_MISFIT}|{UNKNOWN_KIND}.*, since |[^\n]*{_FIRST}(?=\S*\Z))(\S{{10,40}}Z)", re.DOTALL
)
MAX_UNKNOWN_DELAY = 10 * SECOND


def is_misfit(error: str | None) -> bool:
    """Whether this error of a refused job was made by `misfit`."""
    return error is not None and error.startswith(_MISFIT) and _SINCE.match(error) is not None


def unknown_kind(kind: str, before: str | None, now: int) -> Refuse:
    """The outcome of a claim for which this program has no task. `before` is the stored error of the job. The
    time of its first refusal stays part of the text, as in `misfit`."""
    since = _first_refusal(before, now)
    delay = min(max(SECOND, (now - since) // 4), MAX_UNKNOWN_DELAY)
    return Refuse(delay, error=f"{UNKNOWN_KIND}{kind[:200]!r}, since {when(since)}")


def misfit(why: str, before: str | None, window: int, now: int) -> Refuse | FailOutcome:
    """The outcome of a claim with arguments that do not fit the signature here: during a deployment another
    worker may have the code that fits, so the job waits, without the cost of an attempt. After `window`
    microseconds it fails.

    `before` is the stored error of the job. The time of the first refusal is part of its text, so that it
    survives restarts and is the same for all workers."""
    since = _first_refusal(before, now)
    if now - since >= window:
        text = f"the arguments do not fit: {why}"
        if window:
            text += (
                f". No worker could run the job since {when(since)}; retry it when one has the code that fits"
            )
        return FailOutcome(error=text)
    delay = min(max(2 * SECOND, (now - since) // 4), 60 * SECOND, since + window - now)
    until = f"waiting for a worker with the code that fits, until {when(since + window)}"
    return Refuse(delay, error=f"{_MISFIT}{when(since)}: {why}; {until}")


def refused_again(text: str, before: str | None) -> str:
    """The error of a refusal that counts for no deploy window, with the time of the first refusal in `before`
    (the stored error of the job), so that this refusal does not restart the window."""
    found = _SINCE.match(before or "")
    return text if found is None else f"{text}{_FIRST}{found[1]}"


def _first_refusal(before: str | None, now: int) -> int:
    found = _SINCE.match(before or "")
    try:
        return (
            now if found is None else min(now, round(datetime.fromisoformat(found[1]).timestamp() * SECOND))
        )
    except ValueError:
        return now
