"""The fast paths of the SQLite ledger: plain specs for one queue, and one plain spec together with the claim
of a worker that waits for it. Callers wait for both, so their CPU time beside the disk counts.

A spec with a key, a dependency, a group or a part, a queue that is new or would be full, and a known id are
refused before anything is written; the general path applies such a batch. Both paths write the same rows:
tests/ledger/sqlite/test_fast_paths.py compares every column with the model. docs/adr/0015 has the figures
that justify these paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import apsw

from towpath.core.admission import new_job
from towpath.core.commands import Append, Appended, Claim, Claimed, Command, Placed, Want
from towpath.core.facts import is_plain
from towpath.core.job import READY, ClaimedJob, Spec
from towpath.core.lanes import narrowed
from towpath.core.lifecycle import take
from towpath.ledger import Answer
from towpath.ledger.sqlite import rows as jobs
from towpath.ledger.sqlite.statements import SqliteDb, insert, named, one_row
from towpath.ledger.tables.database import FastPathRefused, array

APPEND, APPEND_CLAIM = "append", "append_claim"
CheckStart = Callable[[int, int, int], None]


def path_of(commands: Sequence[Command]) -> str:
    """The fast path by the form of the batch: only appends, or an append of one spec and a claim; else ""."""
    # The last command first: beside a busy worker it is a claim, and most batches are longer than two.
    last = commands[-1] if commands else None
    if type(last) is Claim:
        first = commands[0]
        fits = len(commands) == 2 and not last.token and type(first) is Append and len(first.specs) == 1
        return APPEND_CLAIM if fits else ""
    if type(last) is not Append or [command for command in commands if type(command) is not Append]:
        return ""
    return APPEND


def plain_specs(path: str, commands: Sequence[Any]) -> Sequence[Spec]:
    """The specs of a batch of this form. Raises `FastPathRefused` if one of them is not plain."""
    if len(commands) == 1 or path == APPEND_CLAIM:
        specs: Sequence[Spec] = commands[0].specs
    else:
        specs = tuple(chain.from_iterable([command.specs for command in commands]))
    queue = specs[0].queue if specs else None
    for spec in specs:
        if not is_plain(spec):
            raise FastPathRefused("spec")
        if spec.queue != queue:
            raise FastPathRefused("queues")
    if not specs:
        raise FastPathRefused("spec")
    return specs


def append(
    db: apsw.Connection, commands: Sequence[Any], specs: Sequence[Spec], now: int, check_start: CheckStart
) -> list[Answer]:
    """Append plain specs inside a transaction. Raises `FastPathRefused` before anything is written.
    `check_start` is called with the schema, the least schema and the ledger's time, and may raise."""
    queue, count = specs[0].queue, len(specs)
    if count == 1 and jobs.is_ready_at_once(specs[0]):
        return _append_one(db, specs[0], now, check_start)
    ids = [spec.id for spec in specs]
    start = db.execute(named("append_start"), (queue, count, min(ids), max(ids)))
    ((schema, min_schema, seq, version, last, takes_all, perhaps_known),) = start
    if not takes_all:
        raise FastPathRefused("queue")
    # New ids sort after all others, so an id in their range is rare; only then is each of them looked up.
    if len(set(ids)) < count or (perhaps_known and db.execute(named("any_known"), (array(ids),)).get):
        raise FastPathRefused("known_id")
    now = max(now, last)
    check_start(schema, min_schema, now)
    ready = _insert(db, specs, seq, now)
    db.execute(named("finish_append"), (ready, count - ready, 0, queue, seq + count, version, now))
    placed = [Placed(spec.id, at) for at, spec in enumerate(specs, seq)]
    if len(commands) == count:
        return [Appended((each,)) for each in placed]
    rest = iter(placed)
    return [Appended(tuple(islice(rest, len(command.specs)))) for command in commands]


def _append_one(db: apsw.Connection, spec: Spec, now: int, check_start: CheckStart) -> list[Answer]:
    """The same for one spec that is ready at once: without lists, and by one cursor."""
    id, queue, execute = spec.id, spec.queue, db.cursor().execute
    start = execute(named("append_start"), (queue, 1, id, id))
    ((schema, min_schema, seq, version, last, takes_it, is_known),) = start
    if not takes_it:
        raise FastPathRefused("queue")
    if is_known:
        raise FastPathRefused("known_id")
    now = max(now, last)
    check_start(schema, min_schema, now)
    columns = jobs.ready_columns(spec, seq, now)
    execute(one_row(jobs.INSERT_JOB, len(columns), jobs.READY_JOB), columns)
    execute(one_row(jobs.INSERT_BODY, 2), (seq * jobs.SLOTS, spec.payload))
    execute(named("finish_append"), (1, 0, 0, queue, seq + 1, version, now))
    return [Appended((Placed(id, seq),))]


def _insert(db: apsw.Connection, specs: Sequence[Spec], seq: int, now: int) -> int:
    """Insert the jobs. Returns how many of them are ready; the others are scheduled."""
    if all(map(jobs.is_ready_at_once, specs)):
        values = [jobs.ready_columns(spec, at, now) for at, spec in enumerate(specs, seq)]
        insert(db, jobs.INSERT_JOB, values, jobs.READY_JOB)
        insert(db, jobs.INSERT_BODY, [(at * jobs.SLOTS, spec.payload) for at, spec in enumerate(specs, seq)])
        return len(specs)
    new = [new_job(spec, at, now) for at, spec in enumerate(specs, seq)]
    SqliteDb(db).add_jobs(new)
    return sum([job.state is READY for job in new])


def append_and_claim(
    db: apsw.Connection, commands: Sequence[Any], specs: Sequence[Spec], now: int, check_start: CheckStart
) -> list[Answer]:
    """Append one plain spec as a running job of the worker that claims, if the claim finds no other job."""
    claim, spec = commands[1], specs[0]
    want = _want_for(claim, spec)
    if want is None:
        raise FastPathRefused("claim")
    names = ",".join([want.queue for want in claim.wants]).split(",")
    start = db.execute(named("append_claim_start"), (spec.queue, spec.id, array(names), now))
    ((schema, min_schema, seq, version, last, is_all, known),) = start
    now = max(now, last)
    job = new_job(spec, seq, now)
    if known:
        raise FastPathRefused("known_id")
    if not is_all or job.state is not READY:
        raise FastPathRefused("other_jobs")
    check_start(schema, min_schema, now)
    owner, lease = claim.terms(want)
    held = take(job, owner, lease, now)
    SqliteDb(db).add_jobs([held])
    db.execute(named("finish_append"), (0, 0, 1, spec.queue, seq + 1, version, now))
    return [Appended((Placed(job.id, seq),)), Claimed((ClaimedJob(held),))]


def _want_for(claim: Claim, spec: Spec) -> Want | None:
    """The first want that names the queue of the spec and has room for the spec. Queue patterns are
    refused."""
    if spec.ttl is not None or [want for want in claim.wants if "*" in want.queue]:
        return None
    for each in claim.wants:
        if spec.queue in each.queue.split(","):
            want = narrowed(claim, each, ())
            if want is not None and (spec.max_attempts > 1 or want.once is None or want.once > 0):
                return want if spec.kind not in want.without else None
    return None


RUN = {APPEND: append, APPEND_CLAIM: append_and_claim}
