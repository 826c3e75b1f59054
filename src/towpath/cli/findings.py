"""What the doctor has to say."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """`grave` makes the exit code 1; the others are advice."""

    what: str
    advice: str
    grave: bool = False
