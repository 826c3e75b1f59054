"""The fast path of a worker: plain ends and the next claim as one statement, which commits itself.

Ends that are not plain or affect other jobs take the general path, as do claims from queues with limits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from towpath.core.commands import Claim, Claimed, Command, Settle, Settled, Want, plain_end
from towpath.core.job import DONE, ClaimedJob, Job
from towpath.core.lanes import narrowed
from towpath.core.lifecycle import RETENTION
from towpath.ledger import Answer
from towpath.ledger.postgres.rows import PostgresDb, ReadyScan, received
from towpath.ledger.tables.database import Args, array
from towpath.ledger.tables.fast_path import FastPathRefused

SKIPPED_AFTER_MISS = 16
"""After a miss, skip the fast path for this many batches of the queue, which would pay for both paths."""
MOST_QUEUES = 10_000
Applied = tuple[int, list[Answer]]
"""The ledger's time, and the answers."""


class FastWorker:
    def __init__(self) -> None:
        self._skipped: dict[str, int] = {}
        """Batches to skip, by queue."""

    def apply(self, db: PostgresDb, commands: Sequence[Command], now: int | None) -> Applied:
        """The time, and the answers to all commands or to all but the claim."""
        last = commands[-1]
        claim, settles = (last, commands[:-1]) if type(last) is Claim else (None, commands)
        want = None if claim is None else _single_want(claim)
        ends = _plain_ends(settles)
        queue = "" if want is None else want.queue
        if self._is_skipped(queue):
            raise FastPathRefused("skipped")
        by = ("", 0) if claim is None else (claim.owner, claim.lease)
        found = _settle_and_claim(db, want, by, (now, *ends))
        if found is None:
            if len(self._skipped) >= MOST_QUEUES:
                self._skipped.clear()
            self._skipped[queue] = SKIPPED_AFTER_MISS
            raise FastPathRefused("relations_or_limits")
        present, jobs = found
        answers: list[Answer] = [Settled(command.id, DONE) for command in settles if type(command) is Settle]
        if claim is not None and jobs is not None:
            answers.append(Claimed(tuple([ClaimedJob(job) for job in jobs])))
        if not answers:
            raise FastPathRefused("single_attempt")
        return present, answers

    def _is_skipped(self, queue: str) -> bool:
        left = self._skipped.pop(queue, 0)
        if left > 1:
            self._skipped[queue] = left - 1
        return left > 0


def _settle_and_claim(
    db: PostgresDb, want: Want | None, by: tuple[str, int], ended: Args
) -> tuple[int, list[Job] | None] | None:
    """Run the statement; `by`: owner and lease. The time and the claimed jobs, None for the jobs if the
    general path must choose them; None if the statement refuses."""
    queue, most, single = (
        ("", 0, False) if want is None else (want.queue, want.n, want.once is None or want.once >= want.n)
    )
    look = ReadyScan(queue, most, single, db.positions.spans(queue), time.monotonic())
    suspects = want is not None and want.suspects != 0
    rows = db.rows(
        "settle_and_claim", (queue, most, *by, single, array(look.spans), *ended, suspects, True), tuple
    )
    if not rows:
        return None
    now, oldest, following, picked = rows[0][-4:]
    db.positions.begin(oldest, following)
    if rows[0][0] is None:
        rows.clear()
    return now, None if want is None or (picked and not rows) else received(db, rows, look)


def _single_want(claim: Claim) -> Want:
    """The want of a claim from one queue."""
    if claim.token or len(claim.wants) > 1:
        raise FastPathRefused("not_plain")
    want = narrowed(claim, claim.wants[0], ())
    if want is None or "*" in want.queue or "," in want.queue:
        raise FastPathRefused("not_plain")
    return want


def _plain_ends(settles: Sequence[Command]) -> tuple[object, ...]:
    """Ids, fences, results if there are any, and the retention of plain ends."""
    fences: dict[str, int] = {}
    results: list[bytes | None] = []
    for command in settles:
        if type(command) is not Settle or (done := plain_end(command)) is None:
            raise FastPathRefused("not_plain")
        fences[command.id] = command.fence
        results.append(done.result)
    if len(fences) < len(settles):
        raise FastPathRefused("not_plain")
    if results.count(None) == len(results):
        results.clear()
    return array(fences), array(fences.values()), results, RETENTION
