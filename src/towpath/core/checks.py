"""Checks at the boundary: each raises `InvalidInput` with the field, the value and what would be right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

import msgspec

from towpath.errors import InvalidInput

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR
FOREVER = 200 * 365 * DAY
"""The longest duration and the latest time that are accepted: the year 2170."""

MAX_NAME = 255
MAX_KEY = 512
MAX_PAYLOAD = 16 * 1024 * 1024
MAX_HEADERS = 64 * 1024
MAX_NOTE = 256 * 1024
MAX_ERROR = 64 * 1024

_NAME = re.compile(r"[A-Za-z0-9._\-/:@]{1,255}")
_PATTERN = re.compile(r"[A-Za-z0-9._\-/:@*]{1,255}")
MAX_PATTERNS = 1000


@lru_cache(maxsize=8192)
def _is_name(value: str) -> bool:
    return _NAME.fullmatch(value) is not None


def name(field: str, value: object) -> None:
    if not (isinstance(value, str) and _is_name(value)):
        raise InvalidInput(field=field, value=value, expected="1 to 255 letters, digits or ._-/:@")


def pattern(field: str, value: object) -> None:
    if not (isinstance(value, str) and _PATTERN.fullmatch(value)):
        raise InvalidInput(
            field=field,
            value=value,
            expected="1 to 255 letters, digits or ._-/:@, with * for any run of them",
        )


def patterns(field: str, value: object) -> None:
    """One or several patterns with commas between them."""
    if not isinstance(value, str) or value.count(",") >= MAX_PATTERNS:
        raise InvalidInput(
            field=field,
            value=value,
            expected=f"at most {MAX_PATTERNS} queue patterns with commas between them",
        )
    for each in value.split(","):
        pattern(field, each)


def matches(value: str, queue: str) -> bool:
    """Does the queue pattern `value` (or one of several with commas between them) cover `queue`?"""
    if "," in value:
        return any(matches(each, queue) for each in value.split(","))
    return value == queue or ("*" in value and _covers(value.split("*"), queue))


def _covers(pieces: list[str], queue: str) -> bool:
    """The pieces between stars in order, each at its first place: no going back, so no pattern is slow."""
    first, last = pieces[0], pieces[-1]
    if len(queue) < len(first) + len(last) or not (queue.startswith(first) and queue.endswith(last)):
        return False
    at, end = len(first), len(queue) - len(last)
    for piece in pieces[1:-1]:
        found = queue.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def text(field: str, value: object, limit: int = MAX_NAME, least: int = 0) -> None:
    if not isinstance(value, str):
        raise InvalidInput(field=field, value=value, expected="text")
    if not least <= len(value) <= limit:
        raise InvalidInput(field=field, value=value, expected=f"{least} to {limit} characters")
    if "\0" in value:
        raise InvalidInput(field=field, value=value, expected="text without NUL")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(field=field, value=value, expected="text without lone surrogates") from None


def storable(value: str) -> bool:
    """Could any ledger have stored this text? What is not storable is not there."""
    return "\0" not in value and (value.isascii() or value.encode(errors="replace").decode() == value)


def optional_text(field: str, value: object, limit: int = MAX_NAME) -> None:
    if value is not None:
        text(field, value, limit, least=1)


def whole(field: str, value: object, least: int = 0, most: int = FOREVER) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidInput(field=field, value=value, expected=f"a whole number from {least} to {most}")


def optional_whole(field: str, value: object, least: int = 0, most: int = FOREVER) -> None:
    if value is not None:
        whole(field, value, least, most)


def data(field: str, value: object, limit: int) -> None:
    if not isinstance(value, bytes):
        raise InvalidInput(field=field, value=value, expected="bytes")
    if len(value) > limit:
        raise InvalidInput(field=field, value=f"{len(value)} bytes", expected=f"at most {limit} bytes")


def finite(field: str, value: object, content: bytes, enc_hook: Callable[[Any], Any] | None = None) -> None:
    """Refuse NaN and infinity in `value`, whose JSON form is `content`; the error has the path of the number.
    The encoder writes them as null, so content without a null needs no search."""
    if content.find(b"null") < 0:
        return
    found = _not_finite([msgspec.to_builtins(value, str_keys=True, enc_hook=enc_hook)])
    if found is not None:
        steps, number = found
        path = "".join([f".{step}" if isinstance(step, str) else f"[{step}]" for step in steps[1:]])
        where = f"{field}{path}" if field else path.removeprefix(".")
        raise InvalidInput(
            field=where, value=number, expected="a finite number, since JSON has no NaN and no infinity"
        )


def _not_finite(values: dict[str, Any] | list[Any]) -> tuple[list[str | int], float] | None:
    """The first number that is not finite, and the names and places that lead to it."""
    for step, value in values.items() if isinstance(values, dict) else enumerate(values):
        kind = type(value)
        if kind is float:
            if not math.isfinite(value):
                return [step], value
        elif (kind is dict or kind is list or kind is tuple) and (found := _not_finite(value)) is not None:
            return [step, *found[0]], found[1]
    return None


def headers(value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidInput(field="headers", value=value, expected="a mapping of text to text")
    total = 0
    for key, content in value.items():
        text("headers", key, MAX_NAME, least=1)
        text(f"headers[{key}]", content, MAX_HEADERS)
        total += len(key) + len(content)
    if total > MAX_HEADERS:
        raise InvalidInput(
            field="headers", value=f"{total} characters", expected=f"at most {MAX_HEADERS} in all"
        )


def micros(value: float | timedelta, field: str = "time") -> int:
    """Seconds (or a timedelta) as the whole microseconds the ledger speaks."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise InvalidInput(field=field, value=value, expected="a finite number of seconds")
    result = round(seconds * SECOND)
    if not 0 <= result <= FOREVER:
        raise InvalidInput(field=field, value=value, expected=f"0 to {FOREVER // SECOND} seconds")
    return result


def moment(value: object, field: str) -> int:
    """A point in time as the ledger's microseconds. The time zone is required."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidInput(
            field=field, value=value, expected="a datetime with a time zone, such as datetime.now(UTC)"
        )
    return micros(value.timestamp(), field)


def all_of(field: str, values: Iterable[Any], kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    """The values as a tuple, if each is of this kind. A text is not taken for a list of letters."""
    named = " or ".join(each.__name__ for each in kind) if isinstance(kind, tuple) else kind.__name__
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInput(field=field, value=values, expected=f"a tuple of {named}")
    found = tuple(values)
    for each in found:
        if not isinstance(each, kind):
            raise InvalidInput(field=field, value=each, expected=f"a {named}")
    return found
