"""When a queue is deep enough to say so: once when it passes its `warn_depth`, and again only after it was below."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from towpath.core import checks
from towpath.core.commands import Note
from towpath.core.views import NoteView

KEY = "towpath/warn-depths"
"""The note that has the depths of all queues."""


def depths_of(note: NoteView | None) -> dict[str, int]:
    """Queue -> the depth to warn at."""
    return {} if note is None else msgspec.json.decode(note.value, type=dict[str, int])


def changed(note: NoteView | None, queue: str, depth: int | None) -> Note:
    """The note after `depth` was set for a queue, or lifted; nobody may have written it since."""
    checks.optional_whole("warn_depth", depth, 1)
    depths = depths_of(note)
    depths.pop(queue, None)
    if depth is not None:
        depths[queue] = depth
    return Note(key=KEY, value=msgspec.json.encode(depths), expect=0 if note is None else note.version)


class Alarm:
    """Which queues are above their depth, as far as it was told."""

    def __init__(self) -> None:
        self._above: set[str] = set()

    def passed(self, limits: Mapping[str, int], waiting: Mapping[str, int]) -> list[str]:
        """The queues that have just passed theirs, by name."""
        above = {queue for queue, limit in limits.items() if waiting.get(queue, 0) >= limit}
        new = sorted(above - self._above)
        self._above = above
        return new
