"""Backoff. The worker computes the delay and sends it; the ledger never draws a random number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from towpath.core import checks
from towpath.core.checks import SECOND
from towpath.errors import InvalidInput

Chance = Callable[[], float]
"""A source of numbers in [0, 1), such as `random.Random(seed).random`."""


class Exponential(msgspec.Struct, frozen=True, tag="exponential"):
    """`base * factor**(n-1)`, at most `cap`, spread by plus or minus `jitter` of itself."""

    base: int = SECOND
    factor: float = 2.0
    cap: int = 3600 * SECOND
    jitter: float = 0.1

    def __post_init__(self) -> None:
        checks.whole("backoff.base", self.base)
        checks.whole("backoff.cap", self.cap)
        if not 1 <= self.factor <= 100:
            raise InvalidInput(field="backoff.factor", value=self.factor, expected="a number from 1 to 100")
        if not 0 <= self.jitter <= 1:
            raise InvalidInput(field="backoff.jitter", value=self.jitter, expected="a number from 0 to 1")

    def delay(self, failures: int, chance: Chance) -> int:
        # 2**64 seconds are beyond every cap; the bound keeps the power finite.
        plain = min(float(self.cap), self.base * self.factor ** min(failures - 1, 64))
        return min(self.cap, max(0, round(plain * (1 + self.jitter * (2 * chance() - 1)))))


class Fixed(msgspec.Struct, frozen=True, tag="fixed"):
    wait: int = SECOND

    def __post_init__(self) -> None:
        checks.whole("backoff.wait", self.wait)

    def delay(self, failures: int, chance: Chance) -> int:
        return self.wait


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """One delay per failure; the last one repeats."""

    waits: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.waits:
            raise InvalidInput(field="backoff.waits", value=self.waits, expected="at least one delay")
        for wait in self.waits:
            checks.whole("backoff.waits", wait)

    def delay(self, failures: int, chance: Chance) -> int:
        return self.waits[min(failures, len(self.waits)) - 1]


Backoff = Exponential | Fixed | Listed


class RetryAfter(Exception):
    """Raised by a handler that knows when to come back. `after` is in microseconds."""

    def __init__(self, after: int) -> None:
        checks.whole("after", after)
        super().__init__(f"retry after {after / SECOND} s")
        self.after = after


class Policy(msgspec.Struct, frozen=True):
    """Which backoff follows which exception: what the handler says, then the nearest class listed, then the
    default."""

    default: Backoff = Exponential()
    by_error: Mapping[type[BaseException], Backoff] = {}

    def delay(self, error: BaseException, failures: int, chance: Chance) -> int:
        """The delay after the `failures`-th failure (counted from 1)."""
        if isinstance(error, RetryAfter):
            return error.after
        for kind in type(error).__mro__:
            if (backoff := self.by_error.get(kind)) is not None:
                return backoff.delay(failures, chance)
        return self.default.delay(failures, chance)
