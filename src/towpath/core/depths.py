"""When a queue is deep enough to say so: once when it passes its `warn_depth`, and again only after it was
below."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import msgspec

from towpath.core import checks
from towpath.core.commands import Note
from towpath.core.views import NoteView
from towpath.errors import InvalidInput, NoteConflict

KEY = "towpath/warn-depths"
"""The note that has the depths of all queues."""


def depths_of(note: NoteView | None) -> dict[str, int]:
    """Queue -> the depth to warn at."""
    return {} if note is None else msgspec.json.decode(note.value, type=dict[str, int])


def check_depth(depth: object, capacity: object = None) -> None:
    """May it be the depth to warn at of a queue with this capacity?"""
    checks.optional_whole("warn_depth", depth, 1)
    if isinstance(depth, int) and isinstance(capacity, int) and depth > capacity:
        raise InvalidInput(field="warn_depth", value=depth, expected=f"at most the capacity of {capacity}")


def write_depth(
    read: Callable[[str], NoteView | None], tell: Callable[[Note], object], queue: str, depth: int | None
) -> None:
    """Set or remove the depth of a queue with these two calls of a ledger."""
    while True:
        with contextlib.suppress(NoteConflict):
            tell(changed(read(KEY), queue, depth))
            return


def changed(note: NoteView | None, queue: str, depth: int | None) -> Note:
    """The note that sets or removes the depth of a queue. It is refused if the note has changed since."""
    check_depth(depth)
    depths = depths_of(note)
    depths.pop(queue, None)
    if depth is not None:
        depths[queue] = depth
    return Note(key=KEY, value=msgspec.json.encode(depths), expect=0 if note is None else note.version)


class Alarm:
    """The queues above their depth that have been reported."""

    def __init__(self) -> None:
        self._above: set[str] = set()

    def passed(self, limits: Mapping[str, int], waiting: Mapping[str, int]) -> list[str]:
        """The queues that have just passed theirs, by name."""
        above = {queue for queue, limit in limits.items() if waiting.get(queue, 0) >= limit}
        new = sorted(above - self._above)
        self._above = above
        return new
