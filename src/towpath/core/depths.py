"""Warnings about deep queues: one when a queue reaches its `warn_depth`, and the next only after the queue
was below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from towpath.core import checks
from towpath.core.commands import Note
from towpath.core.records import NoteRecords
from towpath.errors import InvalidInput

DEPTHS: Final = NoteRecords("warn-depth/", int)
"""The `warn_depth` by queue."""


def check_depth(depth: object, capacity: object = None) -> None:
    """Raise InvalidInput if a queue with this capacity cannot have this `warn_depth`."""
    checks.optional_whole("warn_depth", depth, 1)
    if isinstance(depth, int) and isinstance(capacity, int) and depth > capacity:
        raise InvalidInput(field="warn_depth", value=depth, expected=f"at most the capacity of {capacity}")


def depth_note(queue: str, depth: int | None) -> Note:
    """The command that sets or removes the `warn_depth` of a queue."""
    check_depth(depth)
    return DEPTHS.put(queue, depth)


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
