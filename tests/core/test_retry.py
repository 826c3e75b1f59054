"""Backoff: the delay for each error."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.core.retry import Exponential, Fixed, Listed, Policy
from towpath.errors import InvalidInput

chances = st.floats(0, 1, exclude_max=True)
bases, factors, jitters = st.integers(0, 3600), st.floats(1, 100), st.floats(0, 1)


def middle() -> float:
    return 0.5


@pytest.mark.parametrize(
    ("failures", "seconds"), [(1, 1), (2, 2), (3, 4), (10, 512), (13, 3600), (10_000, 3600)]
)
def test_exponential(failures: int, seconds: int) -> None:
    assert Exponential().delay(failures, middle) == seconds


def test_jitter_spreads_both_ways() -> None:
    backoff = Exponential(base=10, jitter=0.2)
    assert backoff.delay(1, lambda: 0.0) == 8
    assert backoff.delay(1, lambda: 0.75) == 11


@given(bases, factors, st.integers(0, 36_000), jitters, st.integers(1, 10**9), chances)
def test_exponential_stays_in_its_bounds(
    base: int, factor: float, cap: int, jitter: float, failures: int, chance: float
) -> None:
    backoff = Exponential(base, factor, cap, jitter)
    assert 0 <= backoff.delay(failures, lambda: chance) <= cap


@given(bases, factors, st.integers(1, 80))
def test_without_jitter_it_never_falls(base: int, factor: float, failures: int) -> None:
    backoff = Exponential(base, factor, jitter=0)
    assert backoff.delay(failures, middle) <= backoff.delay(failures + 1, middle)


def test_fixed_and_listed() -> None:
    assert [Fixed(7).delay(n, middle) for n in (1, 2, 99)] == [7, 7, 7]
    assert [Listed((1, 5, 9)).delay(n, middle) for n in (1, 2, 3, 4, 99)] == [1, 5, 9, 9, 9]


def test_spans_are_seconds_or_timedeltas() -> None:
    minutes = Exponential(base=timedelta(minutes=1), cap=timedelta(hours=2), jitter=0)
    assert minutes == Exponential(base=60, cap=7200, jitter=0)
    assert (minutes.base, minutes.delay(2, middle)) == (60.0, 120.0)
    assert (Fixed(timedelta(seconds=7)), Listed((timedelta(seconds=1), 5))) == (Fixed(7), Listed((1, 5)))


def test_the_nearest_class_decides() -> None:
    policy = Policy(Fixed(1), {OSError: Fixed(2), ConnectionError: Fixed(3)})
    assert policy.delay(ValueError(), 1, middle) == 1
    assert policy.delay(FileNotFoundError(), 1, middle) == 2
    assert policy.delay(ConnectionResetError(), 1, middle) == 3


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Exponential(base=-1), "backoff.base"),
        (lambda: Exponential(cap=-1), "backoff.cap"),
        (lambda: Exponential(factor=0.5), "backoff.factor"),
        (lambda: Exponential(factor=float("nan")), "backoff.factor"),
        (lambda: Exponential(jitter=1.5), "backoff.jitter"),
        (lambda: Exponential(jitter=float("nan")), "backoff.jitter"),
        (lambda: Fixed(-1), "backoff.wait"),
        (lambda: Listed(()), "backoff.waits"),
        (lambda: Listed((1, -1)), "backoff.waits"),
        (lambda: Exponential(base=float("nan")), "backoff.base"),
    ],
)
def test_bad_backoffs(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidInput) as caught:
        make()
    assert caught.value.details["field"] == field
