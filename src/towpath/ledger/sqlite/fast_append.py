"""The commonest batches of all, the shortest way: plain specs for one queue, and one plain spec with the
claim of a worker that waits for it. Users wait for them, so what they cost beside the disk counts.

Whatever is not plain (a key, a dependency, a group, a part, a queue that is new or would be full, an id that
is known) is left to the general way. What this writes is what that would have written; the suite runs over
both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import apsw
from msgspec.structs import replace

from towpath.core.admission import new_job
from towpath.core.commands import Append, Appended, Claim, Claimed, Command, Placed
from towpath.core.job import READY, RUNNING, Spec, runs_of
from towpath.core.job import Claim as ClaimedJob
from towpath.core.lanes import narrowed
from towpath.ledger import Answer
from towpath.ledger.sqlite import rows as jobs
from towpath.ledger.sqlite.statements import SqliteDb, insert, named
from towpath.ledger.tables.database import array
from towpath.ledger.tables.fast_path import FastPathRefused

PATH = "append"
Begin = Callable[[int, int, int], None]


def plain_specs(commands: Sequence[Command]) -> Sequence[Spec]:
    """The specs of a batch that is nothing but their appends, or one of them and a claim, if they look plain;
    else none."""
    if not commands:
        return ()
    # The last one first: beside a busy worker that is a claim, and nothing else has to be looked at.
    last = commands[-1]
    if type(last) is Append and len(commands) == 1:
        specs = last.specs
    elif type(last) is Claim and len(commands) == 2 and not last.token:
        first = commands[0]
        specs = first.specs if type(first) is Append and len(first.specs) == 1 else ()
    elif type(last) is Append:
        appends = [command.specs for command in commands if type(command) is Append]
        specs = tuple(chain.from_iterable(appends)) if len(appends) == len(commands) else ()
    else:
        specs = ()
    for spec in specs:
        if (
            spec.after
            or spec.group is not None
            or spec.key is not None
            or spec.part is not None
            or spec.queue != specs[0].queue
        ):
            return ()
    return specs


def append(
    db: apsw.Connection, commands: Sequence[Any], specs: Sequence[Spec], now: int, begin: Begin
) -> list[Answer]:
    """Inside a transaction. Raises `FastPathRefused` before anything is written. `begin` is called first with
    the schema, the least schema and the ledger's time, and may raise."""
    if type(commands[-1]) is Claim:
        return _append_and_claim(db, commands[-1], specs[0], now, begin)
    queue, count = specs[0].queue, len(specs)
    if count == 1 and jobs.is_bare(specs[0]):
        return _append_one(db, specs[0], now, begin)
    ids = [spec.id for spec in specs]
    ground = db.execute(named("plain_ground"), (queue, count, min(ids), max(ids)))
    ((schema, min_schema, seq, version, last, takes_all, perhaps_known),) = ground
    # New ids are later than all others. So it is seldom that there is one between them, and each has to be
    # looked for.
    if not takes_all:
        raise FastPathRefused("queue")
    if len(set(ids)) < count or (perhaps_known and db.execute(named("any_known"), (array(ids),)).get):
        raise FastPathRefused("known_id")
    now = max(now, last)
    begin(schema, min_schema, now)
    ready = count
    if not all(map(jobs.is_bare, specs)):
        new = [new_job(spec, at, now) for at, spec in enumerate(specs, seq)]
        SqliteDb(db).add_jobs(new)
        ready = sum([job.state is READY for job in new])
    else:
        if len(runs_of(specs)) == 1:
            rows = [(spec.id, at, len(spec.payload)) for at, spec in enumerate(specs, seq)]
            insert(db, jobs.INSERT_JOB, rows, jobs.ALIKE_JOB, jobs.shared_columns(specs[0], now))
        else:
            insert(
                db,
                jobs.INSERT_JOB,
                [jobs.own_columns(spec, at, now) for at, spec in enumerate(specs, seq)],
                jobs.READY_JOB,
            )
        insert(db, jobs.INSERT_BODY, [(at * jobs.SLOTS, spec.payload) for at, spec in enumerate(specs, seq)])
    if ready:
        db.execute(named("count_plain_ready"), (ready, queue))
    if ready < count:
        db.execute(named("count_plain_scheduled"), (count - ready, queue))
    db.execute(named("write_meta"), (seq + count, version, now))
    if len(commands) == count:
        return [Appended((Placed(spec.id, at),)) for at, spec in enumerate(specs, seq)]
    placed = iter([Placed(spec.id, at) for at, spec in enumerate(specs, seq)])
    return [Appended(tuple(islice(placed, len(command.specs)))) for command in commands]


def _append_one(db: apsw.Connection, spec: Spec, now: int, begin: Begin) -> list[Answer]:
    """The same for one that is ready at once, without a detour."""
    ground = db.execute(named("plain_ground"), (spec.queue, 1, spec.id, spec.id))
    ((schema, min_schema, seq, version, last, takes_it, known),) = ground
    if not takes_it:
        raise FastPathRefused("queue")
    if known:
        raise FastPathRefused("known_id")
    now = max(now, last)
    begin(schema, min_schema, now)
    jobs.insert_bare(db, spec, seq, now)
    db.execute(named("count_plain_ready"), (1, spec.queue))
    db.execute(named("write_meta"), (seq + 1, version, now))
    return [Appended((Placed(spec.id, seq),))]


def _append_and_claim(db: apsw.Connection, claim: Claim, spec: Spec, now: int, begin: Begin) -> list[Answer]:
    """A worker waits, and there is nothing for it but this: the job begins as one that it holds."""
    names = ",".join([want.queue for want in claim.wants]).split(",")
    if not _takes(claim, spec):
        raise FastPathRefused("claim")
    ground = db.execute(named("claim_ground"), (spec.queue, spec.id, array(names), now))
    ((schema, min_schema, seq, version, last, is_all, known),) = ground
    now = max(now, last)
    job = new_job(spec, seq, now)
    if not is_all or known or job.state is not READY or not jobs.is_plain(job):
        raise FastPathRefused("claim")
    begin(schema, min_schema, now)
    held = replace(
        job,
        state=RUNNING,
        attempts=1,
        fence=1,
        owner=claim.owner,
        lease_until=now + claim.lease,
        lease_len=claim.lease,
        started_at=now,
    )
    jobs.insert_plain(db, held)
    db.execute(named("count_plain_running"), (spec.queue,))
    db.execute(named("write_meta"), (seq + 1, version, now))
    return [Appended((Placed(job.id, seq),)), Claimed((ClaimedJob(held),))]


def _takes(claim: Claim, spec: Spec) -> bool:
    """Is there room for the spec in a want of its queue by name? No want is for queues by pattern."""
    if spec.ttl is not None or [want for want in claim.wants if "*" in want.queue]:
        return False
    for each in claim.wants:
        if spec.queue in each.queue.split(","):
            want = narrowed(claim, each, ())
            if want is not None and (spec.max_attempts > 1 or want.once is None or want.once > 0):
                return True
    return False
