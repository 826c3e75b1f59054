"""The commonest batch of all, one plain spec, in one statement: a user waits for it.

Whatever is not plain (a key, a dependency, a group, a part, headers, a queue with a capacity, an id that is known) is left to the
general way. What this writes is what that would have written; the suite runs over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towpath.core.commands import Append, Command
from towpath.core.job import Spec


def plain_spec(commands: Sequence[Command]) -> Spec | None:
    """The one spec of a batch that is nothing but its append, if it looks plain."""
    if len(commands) != 1 or type(commands[0]) is not Append or len(commands[0].specs) != 1:
        return None
    spec = commands[0].specs[0]
    plain = not spec.after and spec.group is None and spec.key is None and spec.part is None and not spec.headers
    return spec if plain else None


def plain_row(spec: Spec) -> tuple[Any, ...]:
    """The arguments of the statement `append_plain`, as far as they are the spec's."""
    # fmt: off
    return (
        spec.id, spec.queue, spec.kind, spec.priority, spec.delay, spec.ready_at, spec.ttl, spec.max_attempts, spec.max_losses,
        spec.timeout, spec.retention, spec.parent, spec.generation, spec.correlation_id, spec.content_type, spec.payload,
    )
    # fmt: on
