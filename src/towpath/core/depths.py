"""Warnings about deep queues: one when a queue reaches its `warn_depth`, and the next only after the queue
was below it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import msgspec

from towpath.core import checks
from towpath.core.commands import Note
from towpath.core.views import NoteView
from towpath.errors import InvalidInput, NoteConflict

KEY = "towpath/warn-depths"
"""The note with the `warn_depth` of every queue."""


def depths_of(note: NoteView | None) -> dict[str, int]:
    """The `warn_depth` by queue."""
    return {} if note is None else msgspec.json.decode(note.value, type=dict[str, int])


def check_depth(depth: object, capacity: object = None) -> None:
    """Raise InvalidInput if a queue with this capacity cannot have this `warn_depth`."""
    checks.optional_whole("warn_depth", depth, 1)
    if isinstance(depth, int) and isinstance(capacity, int) and depth > capacity:
        raise InvalidInput(field="warn_depth", value=depth, expected=f"at most the capacity of {capacity}")


def write_depth(
    read: Callable[[str], NoteView | None], write: Callable[[Note], object], queue: str, depth: int | None
) -> None:
    """Set or remove the `warn_depth` of a queue. `read` and `write` access the notes of a ledger."""
    while True:
        with contextlib.suppress(NoteConflict):
            write(changed(read(KEY), queue, depth))
            return


def changed(note: NoteView | None, queue: str, depth: int | None) -> Note:
    """The command that sets or removes the `warn_depth` of a queue. It is refused if the note has changed
    since it was read."""
    check_depth(depth)
    depths = depths_of(note)
    depths.pop(queue, None)
    if depth is not None:
        depths[queue] = depth
    return Note(key=KEY, value=msgspec.json.encode(depths), expect=0 if note is None else note.version)


class Alarm:
    """Remembers the queues that have reached their `warn_depth`, so that each is reported once."""

    def __init__(self) -> None:
        self._above: set[str] = set()

    def passed(self, limits: Mapping[str, int], waiting: Mapping[str, int]) -> list[str]:
        """The names of the queues that have reached their `warn_depth` since the last call."""
        above = {queue for queue, limit in limits.items() if waiting.get(queue, 0) >= limit}
        new = sorted(above - self._above)
        self._above = above
        return new
