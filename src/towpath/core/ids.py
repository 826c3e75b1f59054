"""Identifiers: monotonic UUIDv7 for new jobs, derived ids for jobs that follow from another one."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterator

_GROWING_END = 1 << 48
_DRAWN = 256
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SHORT = re.compile(r"([1-9][0-9]{0,17})-([0-9a-f]{4})")
MIN_PREFIX = 6
"""Characters: a shorter beginning of an id denotes no job."""


class IdSource:
    """Makes UUIDv7 strings that only ever grow. Not safe for several threads at once: the owner locks."""

    __slots__ = ("_entropy", "_growing", "_head", "_last_ms", "_steps")

    def __init__(self, entropy: Callable[[int], bytes]) -> None:
        self._entropy = entropy
        self._last_ms = -1
        self._head = ""
        """The text of the milliseconds, the version, and the 26 random bits that ids of one millisecond
        share."""
        self._growing = 0
        """The other 48 random bits, which grow."""
        self._steps: Iterator[int] = iter(())
        """The increments of these bits: random numbers of 32 bits, drawn many at a time."""

    def new(self, now: int) -> str:
        """The next id at `now` (microseconds); later than every earlier one even if time stands still or goes
        back."""
        ms = now // 1000
        if ms > self._last_ms:
            self._begin(ms)
        else:
            self._growing += 1 + (next(self._steps, None) or self._draw())
            if self._growing >= _GROWING_END:
                self._begin(self._last_ms + 1)
        return f"{self._head}{self._growing:012x}"

    def _draw(self) -> int:
        self._steps = iter(struct.unpack(f">{_DRAWN}I", self._entropy(4 * _DRAWN)))
        return next(self._steps)

    def _begin(self, ms: int) -> None:
        self._last_ms = ms
        drawn = int.from_bytes(self._entropy(10), "big")
        time = f"{ms >> 16:08x}-{ms & 0xFFFF:04x}"
        self._head = f"{time}-7{drawn >> 62 & 0xFFF:03x}-{drawn >> 48 & 0x3FFF | 0x8000:04x}-"
        # The top bit stays clear, so that a millisecond has room for at least 2**47 / 2**32 ids.
        self._growing = drawn & (_GROWING_END >> 1) - 1


def is_new(id: str) -> bool:
    """Does the id have the form that `IdSource` creates, so that it is new?"""
    return len(id) == 36 and id[14] == "7"


def short_id(seq: int, id: str) -> str:
    """The short id of a job: its seq and the last four characters of its id, such as `48213-3f9a`. An id that
    is not a UUID, because the user chose it, is its own short id.

    Ids of one minute begin with the same characters, so that a beginning of an id is not distinctive, and its
    end has no index. The seq has one; the four characters detect a wrong number."""
    return f"{seq}-{id[-4:]}" if _UUID.fullmatch(id) else id


def short_seq(text: str) -> int | None:
    """The seq of a short id, or None if the text does not have the form of one."""
    found = _SHORT.fullmatch(text)
    return None if found is None else int(found[1])


def denotes(text: str, seq: int, id: str) -> bool:
    """Does `text` denote this job: its id, its short id, or the beginning of its id?"""
    return id == text or (len(text) >= MIN_PREFIX and id.startswith(text)) or short_id(seq, id) == text


def prefix_range(text: str) -> tuple[str, str]:
    """(first, end) of the ids that `text` denotes as an id or the beginning of one, ordered by bytes. The end
    is excluded."""
    return text, text + ("\U0010ffff" if len(text) >= MIN_PREFIX else "\x01")


def callback_id(group: str, outcome: str, n: int = 0) -> str:
    """The id of the n-th job that follows a group which ends with this outcome."""
    return derived(group, f"then:{outcome}", n)


def derived(parent: str, role: str, n: int = 0) -> str:
    """The id of the n-th `role` of `parent`: equal arguments give the same id."""
    digest = hashlib.blake2b(f"{parent}\0{role}\0{n}".encode(), digest_size=16, person=b"towpath-id").digest()
    value = int.from_bytes(digest, "big")
    value = value & ~(0xF << 76) | 8 << 76
    value = value & ~(0x3 << 62) | 2 << 62
    return _text(value)


def _text(value: int) -> str:
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
