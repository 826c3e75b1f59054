"""The commonest batch of all, one plain spec, the shortest way. A user waits for it, so what it costs beside the disk counts.

Whatever is not plain (a key, a dependency, a group, a part, a queue that is new or has a capacity, an id that is known) is left
to the general way. What this writes is what that would have written; the suite runs over both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import apsw

from towpath.core.admission import new_job
from towpath.core.commands import Append, Appended, Command, Placed
from towpath.core.job import READY, Spec
from towpath.ledger.sqlite import jobs
from towpath.ledger.sqlite.db import named


def lone_spec(commands: Sequence[Command]) -> Spec | None:
    """The one spec of a batch that is nothing but its append, if it looks plain."""
    if len(commands) != 1 or type(commands[0]) is not Append or len(commands[0].specs) != 1:
        return None
    spec = commands[0].specs[0]
    plain = not spec.after and spec.group is None and spec.key is None and spec.part is None
    return spec if plain else None


def append(db: apsw.Connection, spec: Spec, now: int, begin: Callable[[int, int, int], None]) -> Appended | None:
    """Inside a transaction; None if it is not plain after all, and then nothing is written. `begin` hears of the schema,
    the least schema and the ledger's time first, and may raise."""
    ((schema, min_schema, seq, version, last, takes_all, known),) = db.execute(named("plain_ground"), (spec.queue, spec.id))
    if not takes_all or known:
        return None
    now = max(now, last)
    begin(schema, min_schema, now)
    job = new_job(spec, seq, now)
    if not jobs.is_plain(job):
        return None
    jobs.insert_plain(db, job)
    db.execute(named("count_plain_ready") if job.state is READY else named("count_plain_scheduled"), (spec.queue,))
    db.execute(named("write_meta"), (seq + 1, version, now))
    return Appended((Placed(job.id, seq),))
