"""Checks at the boundary."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath.core import checks
from towpath.core.job import rank
from towpath.errors import InvalidInput

letters = "abAB01._-/:@"


@given(st.text(letters, min_size=1, max_size=255))
def test_good_names(value: str) -> None:
    checks.name("queue", value)
    checks.pattern("queue", value)


@pytest.mark.parametrize("value", ["", "a b", "a\n", "ä", "a*", "a\0", "q" * 256, None, 5, b"q"])
def test_bad_names(value: object) -> None:
    with pytest.raises(InvalidInput, match="queue is "):
        checks.name("queue", value)


@given(st.text("ab*", min_size=1, max_size=6), st.text("ab", min_size=1, max_size=8))
def test_patterns(pattern: str, queue: str) -> None:
    expected = re.fullmatch(pattern.replace("*", ".*"), queue) is not None
    assert checks.matches(pattern, queue) == expected


def test_a_dot_is_a_dot() -> None:
    assert not checks.matches("a.*", "abc")
    assert checks.matches("a.*", "a.c")


@given(st.text())
def test_text_that_can_be_stored(value: str) -> None:
    storable = "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)
    if storable and len(value) <= 255:
        checks.text("kind", value)
    else:
        with pytest.raises(InvalidInput):
            checks.text("kind", value)


@pytest.mark.parametrize("value", ["\0", "a\0b", "\ud800", "ok\udfff"])
def test_text_that_cannot_be_stored(value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checks.text("kind", value)
    assert str(caught.value).isascii()


@pytest.mark.parametrize("value", [True, 1.0, float("nan"), "1", None, -1, checks.FOREVER + 1])
def test_whole_numbers(value: object) -> None:
    with pytest.raises(InvalidInput):
        checks.whole("n", value)


def test_optional_values_may_be_missing() -> None:
    checks.optional_whole("n", None)
    checks.optional_text("t", None)
    with pytest.raises(InvalidInput):
        checks.optional_text("t", "")


@given(st.floats(0, 10**8))
def test_micros(seconds: float) -> None:
    assert checks.micros(seconds) == round(seconds * 1_000_000)


def test_micros_of_other_kinds() -> None:
    assert checks.micros(2) == 2_000_000
    assert checks.micros(timedelta(minutes=1, microseconds=5)) == 60_000_005


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -1, -0.1, True, "5", None, 10**18, timedelta(seconds=-1)]
)
def test_times_that_are_none(value: object) -> None:
    with pytest.raises(InvalidInput, match="delay is "):
        checks.micros(value, "delay")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"": "x"}, "headers"),
        ({"a": 1}, "headers[a]"),
        ({1: "a"}, "headers"),
        ({"a": "\0"}, "headers[a]"),
        ({"a": "x" * 65_536}, "headers"),
        ([("a", "b")], "headers"),
    ],
)
def test_headers(value: object, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checks.headers(value)
    assert caught.value.details["field"] == field


@given(st.integers())
def test_priorities(value: int) -> None:
    if -32_768 <= value <= 32_767:
        assert rank(value) == value
    else:
        with pytest.raises(InvalidInput, match="priority is "):
            rank(value)


def test_named_priorities() -> None:
    assert [rank(name) for name in ("high", "normal", "low")] == [0, 5, 10]
    assert rank("soon", {"soon": 3}) == 3
    with pytest.raises(InvalidInput, match="one of soon"):
        rank("high", {"soon": 3})
