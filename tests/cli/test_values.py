"""Text from the command line as values, and values as text."""

from __future__ import annotations

import click
import pytest

from towpath import Rate
from towpath.cli import output
from towpath.cli.values import (
    NONE,
    Header,
    Json,
    Moment,
    Priority,
    RateType,
    ReceiptType,
    Span,
    Whole,
    now,
)
from towpath.queues.receipts import Receipt

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        *(("30", 30 * SECOND), ("1.5", 1_500_000), ("250ms", 250_000), ("7us", 7), ("5m", 300 * SECOND)),
        *(
            ("2h", 7200 * SECOND),
            ("1d", 86400 * SECOND),
            ("2w", 1_209_600 * SECOND),
            (" 3 s ", 3 * SECOND),
            ("0", 0),
        ),
    ],
)
def test_spans(text: str, micros: int) -> None:
    assert Span().convert(text, None, None) == micros


@pytest.mark.parametrize("text", ["", "soon", "-5", "5 parsecs", "1e3", "inf", "nan", "9999999999999999999d"])
def test_no_spans(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Span().convert(text, None, None)


def test_moments() -> None:
    noon = 1_769_860_800 * SECOND
    for text in ("2026-01-31T12:00Z", "2026-01-31T12:00", "2026-01-31 13:00+01:00"):
        assert Moment(past=True).convert(text, None, None) == noon
    before, after = (Moment(past=past).convert("1h", None, None) for past in (True, False))
    assert abs(now() - 3600 * SECOND - before) < 60 * SECOND
    assert abs(now() + 3600 * SECOND - after) < 60 * SECOND
    for wrong in ("tomorrow", "2026-13-01"):
        with pytest.raises(click.BadParameter):
            Moment(past=True).convert(wrong, None, None)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("10/s", Rate(10)),
        ("100/m", Rate(100, 60)),
        ("5/10s", Rate(5, 10)),
        ("1/1.5h:4", Rate(1, 5400, 4)),
    ],
)
def test_rates_both_ways(text: str, rate: Rate) -> None:
    assert RateType().convert(text, None, None) == rate
    assert RateType().convert(output.format_rate(rate), None, None) == rate


@pytest.mark.parametrize("text", ["10", "/s", "0/s", "10/year", "ten/s", "2000000/s", "5/us"])
def test_no_rates(text: str) -> None:
    with pytest.raises(click.BadParameter):
        RateType().convert(text, None, None)


def test_none_lifts_only_where_it_may() -> None:
    assert Whole(optional=True).convert("none", None, None) == NONE
    assert Span(optional=True).convert("None", None, None) == NONE
    with pytest.raises(click.BadParameter):
        Whole().convert("none", None, None)


def test_receipts() -> None:
    assert ReceiptType().convert("a:b:3", None, None) == Receipt("a:b", 3)
    for wrong in ("a", "a:", ":1", "a:-1", "a:x", "a:٣", "x" * 256 + ":1"):
        with pytest.raises(click.BadParameter):
            ReceiptType().convert(wrong, None, None)


def test_json_headers_priorities() -> None:
    assert Json().convert("[1]", None, None) == b"[1]"
    assert Header().convert("a==b", None, None) == ("a", "=b")
    assert Priority().convert("-3", None, None) == -3
    assert Priority().convert("high", None, None) == "high"


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (350_000, "350ms"),
        (2_500_000, "2.5s"),
        (119 * SECOND, "119s"),
        (720 * SECOND, "12m"),
        (3 * 3600 * SECOND, "3h"),
    ],
)
def test_spans_for_people(span: int | None, text: str) -> None:
    assert output.format_span(span) == text


def test_times_are_exact() -> None:
    assert output.format_time(1_769_860_800_123_456) == "2026-01-31T12:00:00.123456Z"
    assert output.format_time(None) is None


def test_bodies() -> None:
    assert output.decode_body(b"{}") == ({}, "json")
    assert output.decode_body(b"{}", "text/plain") == ("{}", "text")
    assert output.decode_body(b"{") == ("{", "text")
    assert output.decode_body(b"\xff") == ("/w==", "base64")
    assert output.decode_body(None) == (None, "none")
    assert output.format_body(b"\xff" * 40).startswith("40 bytes: ff ff")
