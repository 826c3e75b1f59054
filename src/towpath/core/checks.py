"""Checks at the boundary: each raises `InvalidInput` with the field, the value and the expected value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import msgspec

from towpath.errors import Described, InvalidInput, shortened

SECOND = 1_000_000
HOUR = 3600 * SECOND
DAY = 24 * HOUR
FOREVER = 200 * 365 * DAY
"""The longest duration and the latest time that are accepted: the year 2170."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

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
        raise InvalidInput(field=field, value=value, expected="a name of 1 to 255 letters, digits or ._-/:@")


def pattern(field: str, value: object) -> None:
    if not (isinstance(value, str) and _PATTERN.fullmatch(value)):
        raise InvalidInput(
            field=field,
            value=value,
            expected="a name of 1 to 255 letters, digits or ._-/:@, with * for any run of them",
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
    """Each piece between stars is matched at its first position. Without backtracking no pattern is slow."""
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
        raise InvalidInput(field=field, value=value, expected=f"{least} to {limit} characters long")
    if "\0" in value:
        raise InvalidInput(field=field, value=value, expected="text without NUL")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInput(field=field, value=value, expected="text without lone surrogates") from None


def storable(value: str) -> bool:
    """Could any ledger have stored this text? If not, no row has it, and no read is needed."""
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
        raise InvalidInput(
            field=field, value=Described(f"{len(value)} bytes"), expected=f"at most {limit} bytes"
        )


def finite(field: str, value: object, content: bytes, enc_hook: Callable[[Any], Any] | None = None) -> None:
    """Refuse NaN and infinity in `value` with the JSON form `content`; the error has the path of the number.
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
            field="headers",
            value=Described(f"{total} characters long"),
            expected=f"at most {MAX_HEADERS} in all",
        )


def micros(value: float | timedelta, field: str = "time") -> int:
    """Seconds (or a timedelta) as the whole microseconds of ledger times."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise InvalidInput(field=field, value=value, expected="a finite number of seconds, or a timedelta")
    # A huge float would be infinite as microseconds, and infinity cannot be rounded.
    if not -1 <= seconds <= FOREVER // SECOND or (result := round(seconds * SECOND)) < 0:
        expected = "0 or more seconds" if seconds < 0 else f"at most {FOREVER // SECOND} seconds"
        raise InvalidInput(field=field, value=value, expected=expected)
    return result


def some_micros(value: float | timedelta, field: str) -> int:
    """As `micros`, for a span that must not be 0."""
    found = micros(value, field)
    if not found:
        raise InvalidInput(field=field, value=value, expected="more than 0 seconds")
    return found


def seconds(field: str, value: float | timedelta) -> float:
    """A span that a user gives, as seconds."""
    return micros(value, field) / SECOND


def moment(value: object, field: str) -> int:
    """A point in time as the ledger's microseconds. The time zone is required."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidInput(
            field=field, value=value, expected="a datetime with a time zone, such as datetime.now(UTC)"
        )
    return micros(value.timestamp(), field)


def unknown(what: str, name: str, known: Iterable[str], owner: str, hint: str = "") -> InvalidInput:
    """The error of an option or setting `name` that `owner` does not have. `hint` is the right form;
    without it, the most similar of the known names, or all of them."""
    from difflib import get_close_matches

    names = list(known)
    if not hint and (near := get_close_matches(name, names, 1, 0.7)):
        hint = f"did you mean {near[0]}?"
    hint = hint or f"there are {', '.join(names)}"
    return InvalidInput(
        field=what,
        value=name,
        expected=f"one of {', '.join(names)}",
        message=f"{owner} has no {what} {shortened(name)}; {hint}",
    )


def without_key(field: str, value: object, example: str) -> InvalidInput:
    """The error of an option that needs a key."""
    message = f"{field}={shortened(value)} has no effect without a key: {example}"
    return InvalidInput(field=field, value=value, expected="used beside a key", message=message)


def utc(time: int) -> datetime:
    """A time of the ledger for users."""
    return _EPOCH + timedelta(microseconds=time)


def optional_utc(time: int | None) -> datetime | None:
    return None if time is None else utc(time)


def optional_seconds(span: int | None) -> float | None:
    """A duration of the ledger for users."""
    return None if span is None else span / SECOND


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
