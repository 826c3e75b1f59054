"""Types of arguments and options: spans, times, rates, JSON, receipts. An error names a valid example."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from towpath import Rate
from towpath.clock import SystemClock
from towpath.commands import micros
from towpath.errors import InvalidInput
from towpath.queues.receipts import Receipt

_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|m|h|d|w)?")
_UNITS = {"us": 1e-6, "ms": 1e-3, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
NONE = "none"
"""The value that removes a limit."""


def now() -> int:
    return SystemClock().now()


class _ParamType(click.ParamType[Any]):
    def __init__(self, optional: bool = False) -> None:
        self.optional = optional

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if self.optional and value.lower() == NONE:
            return NONE
        try:
            return self.read(value)
        except InvalidInput as error:
            self.fail(f"{error.value}; it must be {error.expected}", param, ctx)

    def read(self, text: str) -> Any:
        raise NotImplementedError


class Span(_ParamType):
    """Microseconds from `30`, `1.5`, `30s`, `5m`, `2h`, `7d`."""

    name = "span"

    def read(self, text: str) -> int:
        found = _SPAN.fullmatch(text.strip())
        if found is None:
            raise InvalidInput(
                field=self.name,
                value=text,
                expected="seconds, or a number with ms, s, m, h, d or w: 30, 1.5s, 2h",
            )
        return micros(float(found[1]) * _UNITS[found[2]], self.name)


class Moment(_ParamType):
    """Ledger time from an ISO 8601 time (UTC unless it has an offset), or a span before (`past`) or after
    now."""

    name = "time"

    def __init__(self, past: bool) -> None:
        super().__init__()
        self.past = past

    def read(self, text: str) -> int:
        if _SPAN.fullmatch(text.strip()):
            span = Span().read(text)
            return max(0, now() - span) if self.past else now() + span
        try:
            when = datetime.fromisoformat(text.strip())
        except ValueError:
            wanted = (
                "a time such as 2026-01-31T12:00Z, or a span such as 2h (ago)"
                if self.past
                else "a time such as 2026-01-31T12:00Z, or a span from now such as 2h"
            )
            raise InvalidInput(field=self.name, value=text, expected=wanted) from None
        return micros(max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()), self.name)


class RateType(_ParamType):
    """`10/s`, `100/m`, `5/10s`; `:20` after it is the burst."""

    name = "rate"

    def read(self, text: str) -> Rate:
        return Rate.of(text)


class Whole(_ParamType):
    """A whole number, or `none`."""

    name = "number"

    def read(self, text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,15}", text.strip()):
            raise InvalidInput(
                field=self.name, value=text, expected="a whole number" + (" or none" if self.optional else "")
            )
        return int(text)


class Priority(_ParamType):
    """high, normal, low, or a number (smaller is sooner)."""

    name = "priority"

    def read(self, text: str) -> int | str:
        return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else text


class Json(_ParamType):
    """JSON, checked but stored as typed; `@file` reads a file."""

    name = "json"

    def __init__(self, object_only: bool = False) -> None:
        super().__init__()
        self.object_only = object_only

    def read(self, text: str) -> bytes:
        raw = os.fsencode(text)
        if text.startswith("@"):
            try:
                with open(text[1:], "rb") as file:
                    raw = file.read()
            except OSError as error:
                raise InvalidInput(
                    field=self.name, value=text, expected=f"a file that can be read ({error.strerror})"
                ) from None
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(field=self.name, value=text, expected=f"JSON ({error})") from None
        if self.object_only and not isinstance(value, dict):
            raise InvalidInput(
                field=self.name, value=text, expected='a JSON object by parameter name, such as {"to": "ada"}'
            )
        return raw


class ReceiptType(_ParamType):
    name = "receipt"

    def read(self, text: str) -> Receipt:
        return Receipt.parse(text)


class Header(_ParamType):
    """`name=value`."""

    name = "header"

    def read(self, text: str) -> tuple[str, str]:
        key, equals, value = text.partition("=")
        if not (equals and key):
            raise InvalidInput(field=self.name, value=text, expected="written as NAME=VALUE")
        return key, value
