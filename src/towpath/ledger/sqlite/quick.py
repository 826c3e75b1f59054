"""The commonest batch of all, plain specs for one queue, the shortest way. Users wait for it, so what it costs beside the disk counts.

Whatever is not plain (a key, a dependency, a group, a part, a queue that is new or would be full, an id that is known) is left
to the general way. What this writes is what that would have written; the suite runs over both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice

import apsw

from towpath.core.admission import new_job
from towpath.core.commands import Append, Appended, Command, Placed
from towpath.core.job import READY, Spec
from towpath.ledger import Answer
from towpath.ledger.relational.db import array
from towpath.ledger.sqlite import jobs
from towpath.ledger.sqlite.db import SqliteDb, named


def plain_specs(commands: Sequence[Command]) -> Sequence[Spec]:
    """The specs of a batch that is nothing but their appends, if they look plain; else none."""
    # The last one first: beside a worker that is a claim, and nothing else has to be looked at.
    if not commands or type(commands[-1]) is not Append:
        return ()
    specs = commands[-1].specs
    queue = specs[0].queue
    if len(commands) > 1:
        appends = [command.specs for command in commands if type(command) is Append]
        if len(appends) < len(commands):
            return ()
        specs = tuple(chain.from_iterable(appends))
    for spec in specs:
        if spec.after or spec.group is not None or spec.key is not None or spec.part is not None or spec.queue != queue:
            return ()
    return specs


def append(
    db: apsw.Connection, commands: Sequence[Append], specs: Sequence[Spec], now: int, begin: Callable[[int, int, int], None]
) -> list[Answer] | None:
    """Inside a transaction; None if they are not plain after all, and then nothing is written. `begin` hears of the schema,
    the least schema and the ledger's time first, and may raise."""
    queue, count = specs[0].queue, len(specs)
    if count == 1:
        ground = db.execute(named("plain_ground"), (queue, count, specs[0].id))
    else:
        ground = db.execute(named("plain_grounds"), (queue, count, array([spec.id for spec in specs])))
    ((schema, min_schema, seq, version, last, takes_all, known),) = ground
    if not takes_all or known:
        return None
    now = max(now, last)
    begin(schema, min_schema, now)
    new = [new_job(spec, at, now) for at, spec in enumerate(specs, seq)]
    if count == 1 and jobs.is_plain(new[0]):
        jobs.insert_plain(db, new[0])
    else:
        SqliteDb(db).add_jobs(new)
    ready = sum([job.state is READY for job in new])
    if ready:
        db.execute(named("count_plain_ready"), (ready, queue))
    if ready < count:
        db.execute(named("count_plain_scheduled"), (count - ready, queue))
    db.execute(named("write_meta"), (seq + count, version, now))
    if len(commands) == count:
        return [Appended((Placed(job.id, job.seq),)) for job in new]
    placed = iter([Placed(job.id, job.seq) for job in new])
    return [Appended(tuple(islice(placed, len(command.specs)))) for command in commands]
