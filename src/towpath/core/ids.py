"""Identifiers: monotonic UUIDv7 for new jobs, derived ones for what follows from something else."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator

_GROWING_END = 1 << 48
_DRAWN = 256


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
        """The other 48, which grow."""
        self._steps: Iterator[int] = iter(())
        """By how much they do: random numbers of 32 bits, drawn many at a time."""

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
        # The top bit stays clear, so that a millisecond has room for 2**47 / 2**32 more.
        self._growing = drawn & (_GROWING_END >> 1) - 1


def is_new(id: str) -> bool:
    """Does the id have the form that `IdSource` creates, so that it is new?"""
    return len(id) == 36 and id[14] == "7"


def derived(parent: str, role: str, n: int = 0) -> str:
    """The id of the n-th `role` of `parent`: the same question always gives the same id."""
    digest = hashlib.blake2b(f"{parent}\0{role}\0{n}".encode(), digest_size=16, person=b"towpath-id").digest()
    value = int.from_bytes(digest, "big")
    value = value & ~(0xF << 76) | 8 << 76
    value = value & ~(0x3 << 62) | 2 << 62
    return _text(value)


def _text(value: int) -> str:
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
