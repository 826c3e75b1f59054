"""The sentence for every gate."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from towpath.core import admission
from towpath.core.checks import FOREVER, SECOND
from towpath.core.commands import GroupState, OnFailure
from towpath.core.explain import AHEAD, SHOWN, GateName, JobFacts, explain, when
from towpath.core.facts import AppendFacts
from towpath.core.fleet import LaneView, LimitView, WorkerView, among_workers
from towpath.core.job import Job, Reason, Spec, State
from towpath.core.limits import Rate
from towpath.core.views import Counts, GroupView, PartView, QueueView

NOW = 1_700_000_000 * SECOND
LATER = NOW + SECOND
AT, THEN = "2023-11-14T22:13:20.000Z", "2023-11-14T22:13:21.000Z"


def job(**changes: Any) -> Job:
    (made,) = admission.admit([Spec(id="a", queue="q", part="p", group=None)], AppendFacts(), NOW, 1).jobs
    return replace(made, **changes)


def queue(**changes: Any) -> QueueView:
    return replace(
        QueueView("q", Counts(ready=1), NOW, False, None, None, None, None, 0, None, None), **changes
    )


def part(**changes: Any) -> PartView:
    return replace(PartView("q", "p", 1, 0, False, None, None, None, 0, 1, 0), **changes)


def group(**changes: Any) -> GroupView:
    return replace(
        GroupView("g", GroupState.OPEN, None, OnFailure.CONTINUE, 1, 1, 0, 0, 0, 0, NOW, None), **changes
    )


FINISHED = job(state=State.DONE, finished_at=NOW)
RUNNING = job(state=State.RUNNING, owner="w", lease_until=LATER)
BLOCKED = job(state=State.BLOCKED, waits=1)
MEMBER = job(state=State.BLOCKED, group="g")
NAMES = tuple("bcdefgh")

CASES: list[tuple[JobFacts, GateName, str]] = [
    (JobFacts(job=FINISHED, queue=queue()), GateName.FINISHED, f"finished: done at {AT}"),
    (
        JobFacts(job=replace(FINISHED, state=State.FAILED, reason=Reason.LOST), queue=queue()),
        GateName.FINISHED,
        f"finished: failed (lost) at {AT}",
    ),
    (
        JobFacts(
            job=replace(FINISHED, state=State.FAILED, reason=Reason.DEPENDENCY),
            queue=queue(),
            culprit=job(
                id="b", kind="mail", state=State.FAILED, reason=Reason.FATAL, error="ValueError: no\n\ntrace"
            ),
        ),
        GateName.FINISHED,
        f"finished: failed (dependency) at {AT}, because job b (mail) failed (fatal): ValueError: no",
    ),
    (
        JobFacts(
            job=replace(FINISHED, state=State.CANCELED, reason=Reason.DEPENDENCY),
            queue=queue(),
            culprit=job(id="b", state=State.CANCELED, reason=Reason.REQUESTED),
        ),
        GateName.FINISHED,
        f"finished: canceled (dependency) at {AT}, because job b was canceled (requested)",
    ),
    (JobFacts(job=RUNNING, queue=queue()), GateName.RUNNING, f"leased by w until {THEN}"),
    (
        JobFacts(job=replace(RUNNING, cancel_requested=Reason.ABORTED), queue=queue()),
        GateName.RUNNING,
        f"leased by w until {THEN}, asked to stop (aborted)",
    ),
    (
        JobFacts(job=job(expires_at=NOW), queue=queue(paused=True)),
        GateName.EXPIRED,
        f"expired at {AT} and will not run",
    ),
    (JobFacts(job=BLOCKED, queue=queue(), open_jobs=("b",)), GateName.WAITS, "waits for 1 job: b"),
    (JobFacts(job=BLOCKED, queue=queue(), open_groups=("g",)), GateName.WAITS, "waits for 1 group: g"),
    (
        JobFacts(job=replace(BLOCKED, waits=2), queue=queue(), open_jobs=("b",), open_groups=("g",)),
        GateName.WAITS,
        "waits for 2 job or groups: b, g",
    ),
    (
        JobFacts(job=replace(BLOCKED, waits=7), queue=queue(), open_jobs=NAMES),
        GateName.WAITS,
        "waits for 7 jobs: b, c, d, e, f and 2 more",
    ),
    (
        JobFacts(job=replace(MEMBER, waits=1), queue=queue(), group=group()),
        GateName.UNSEALED,
        "group g is not sealed",
    ),
    (
        JobFacts(job=replace(MEMBER, waits=1), queue=queue(), group=group(paused=True)),
        GateName.GROUP_PAUSED,
        "group g is paused; resume it with `towpath groups resume g`",
    ),
    (
        JobFacts(
            job=replace(MEMBER, waits=2), queue=queue(), open_jobs=("b",), group=group(paused=True, why="x")
        ),
        GateName.WAITS,
        "waits for 1 job: b, and group g is paused: x",
    ),
    (
        JobFacts(
            job=replace(MEMBER, waits=1),
            queue=queue(),
            open_jobs=("b",),
            group=group(state=GroupState.SEALED),
        ),
        GateName.WAITS,
        "waits for 1 job: b",
    ),
    (
        JobFacts(job=replace(MEMBER, waits=2), queue=queue(), open_jobs=("b",), group=group()),
        GateName.WAITS,
        "waits for 1 job: b, and group g is not sealed",
    ),
    (
        JobFacts(job=job(state=State.SCHEDULED, reason=Reason.RETRY, ready_at=LATER), queue=queue()),
        GateName.SCHEDULED,
        f"scheduled (retry) until {THEN}",
    ),
    (
        JobFacts(job=job(state=State.SCHEDULED, reason=Reason.LOST, losses=3, ready_at=LATER), queue=queue()),
        GateName.SCHEDULED,
        (
            f"scheduled (lost) until {THEN}: its lease was lost 3 times, which makes it a suspect, so it is"
            " claimed again after a random delay"
        ),
    ),
    (
        JobFacts(job=job(losses=2), queue=queue(), ahead=4),
        GateName.SUSPECT,
        (
            "ready, 4 ahead of it in queue q: its lease was lost 2 times, which makes it a suspect, and a"
            " worker runs one suspect at a time"
        ),
    ),
    (
        JobFacts(job=job(losses=2), queue=queue(paused=True)),
        GateName.QUEUE_PAUSED,
        "queue q is paused by hand",
    ),
    (
        JobFacts(job=job(), queue=queue(paused=True), part=part(paused=True)),
        GateName.QUEUE_PAUSED,
        "queue q is paused by hand",
    ),
    (
        JobFacts(job=job(), queue=queue(paused=True, why="x")),
        GateName.QUEUE_PAUSED,
        "queue q is paused by hand: x",
    ),
    (
        JobFacts(job=job(), queue=queue(next_at=LATER, why="x")),
        GateName.QUEUE_HELD,
        f"queue q is held until {THEN}: x",
    ),
    (
        JobFacts(job=job(), queue=queue(next_at=LATER, rate=Rate(3, 60))),
        GateName.QUEUE_RATE,
        "rate limit of queue q (3/m): next permit in 1 s",
    ),
    (
        JobFacts(job=job(), queue=queue(cap=2, counts=Counts(running=2)), holders=("b", "c")),
        GateName.QUEUE_CAP,
        "cap 2 of queue q reached by b, c",
    ),
    (
        JobFacts(job=job(), queue=queue(), part=part(paused=True, why="x")),
        GateName.PART_PAUSED,
        "part p of queue q is paused by hand: x",
    ),
    (
        JobFacts(job=job(), queue=queue(), part=part(next_at=LATER)),
        GateName.PART_HELD,
        f"part p of queue q is held until {THEN}",
    ),
    (
        JobFacts(job=job(), queue=queue(), part=part(next_at=NOW + 230_000, rate=Rate(2, 1, 3))),
        GateName.PART_RATE,
        "rate limit of part p of queue q (2/s:3): next permit in 0.23 s",
    ),
    (
        # Further ahead than the rate can set it.
        JobFacts(job=job(), queue=queue(), part=part(next_at=LATER, rate=Rate(2), why="x")),
        GateName.PART_HELD,
        f"part p of queue q is held until {THEN}: x",
    ),
    (
        JobFacts(
            job=job(),
            queue=queue(),
            part=part(next_at=LATER, rate=Rate(2), why="breaker b: 5 failures in 60 s"),
        ),
        GateName.BREAKER,
        f"breaker b is open until {THEN} (5 failures in 60 s)",
    ),
    (
        JobFacts(job=job(), queue=queue(next_at=FOREVER, why="breaker b: by hand: a migration")),
        GateName.BREAKER,
        "breaker b is open until it is closed by hand (by hand: a migration)",
    ),
    (
        JobFacts(
            job=job(),
            queue=queue(),
            part=part(cap=2, running=2, why="breaker b: a probe failed"),
            holders=("b", "c"),
        ),
        GateName.BREAKER,
        "breaker b is half open (a probe failed): 2 probes allowed, 2 running: b, c",
    ),
    (JobFacts(job=job(), queue=queue(cap=0)), GateName.QUEUE_CAP, "cap 0 of queue q allows no job to run"),
    (
        JobFacts(
            job=job(
                state=State.SCHEDULED, reason=Reason.REFUSED, ready_at=LATER, error="breaker b is open\nmore"
            ),
            queue=queue(),
        ),
        GateName.SCHEDULED,
        f"scheduled (refused) until {THEN}: breaker b is open",
    ),
    (
        JobFacts(job=job(), queue=queue(), part=part(cap=1, running=1), holders=("b",)),
        GateName.PART_CAP,
        "cap 1 of part p of queue q reached by b",
    ),
    (
        JobFacts(job=job(), queue=queue(), part=part()),
        GateName.NEXT,
        "ready, first in queue q: the next claim takes it",
    ),
    (JobFacts(job=job(), queue=queue(), ahead=3), GateName.NEXT, "ready, 3 ahead of it in queue q"),
    (
        JobFacts(job=job(state=State.SCHEDULED, ready_at=NOW), queue=queue()),
        GateName.NEXT,
        "ready, first in queue q: the next claim takes it",
    ),
]


@pytest.mark.parametrize(("facts", "gate", "sentence"), CASES)
def test_the_sentence(facts: JobFacts, gate: GateName, sentence: str) -> None:
    found = explain(facts, NOW)
    assert (found.gate, str(found)) == (gate, f"job a: {sentence}")
    assert len(found.by) <= SHOWN


# The workers of its queue

LANE = LaneView(name="bulk", queues=("q",), reserved=2, running=0)
API = LimitView(name="resource api", queues=("q",), limit=4, running=4)


def worker(**changes: Any) -> WorkerView:
    plain = WorkerView(
        name="w",
        owner="w#1",
        host="h",
        pid=1,
        queues=("q", "x/*"),
        concurrency=8,
        running=0,
        started_at=NOW,
        seen_at=NOW,
    )
    return replace(plain, **changes)


HELD = replace(API, running=0, until=LATER)
AMONG: list[tuple[list[WorkerView], GateName, str]] = [
    ([worker()], GateName.NEXT, ": the next claim takes it"),
    ([], GateName.NO_WORKER, ", but no running worker consumes queue q"),
    (
        [worker(queues=("r", "x/*")), worker(draining=True)],
        GateName.NO_WORKER,
        ", but no running worker consumes queue q",
    ),
    (
        [worker(paused=True, why="x")],
        GateName.WORKERS_PAUSED,
        ", but every worker that consumes queue q is paused: x",
    ),
    ([worker(paused=True), worker()], GateName.NEXT, ": the next claim takes it"),
    ([worker(lanes=(LANE,))], GateName.LANE_PAUSED, ", but lane bulk is paused by hand: a new disk"),
    ([worker(lanes=(LANE,)), worker()], GateName.NEXT, ": the next claim takes it"),
    ([worker(lanes=(replace(LANE, name="other"),))], GateName.NEXT, ": the next claim takes it"),
    ([worker(limits=(API,))], GateName.LIMIT, ", but resource api is at its limit: 4 of 4 run"),
    ([worker(limits=(replace(API, running=3),))], GateName.NEXT, ": the next claim takes it"),
    ([worker(limits=(replace(API, queues=("r",)),))], GateName.NEXT, ": the next claim takes it"),
    ([worker(limits=(API,)), worker()], GateName.NEXT, ": the next claim takes it"),
    ([worker(limits=(replace(HELD, until=NOW),))], GateName.NEXT, ": the next claim takes it"),
    (
        [worker(limits=(HELD,)), worker(limits=(replace(HELD, until=LATER + SECOND),))],
        GateName.LIMIT,
        f", but resource api is held until {THEN}: the service is throttling",
    ),
]


@pytest.mark.parametrize(("workers", "gate", "rest"), AMONG)
def test_the_workers_that_would_run_it(workers: list[WorkerView], gate: GateName, rest: str) -> None:
    found = among_workers(
        explain(JobFacts(job=job(), queue=queue()), NOW), "q", workers, {"bulk": "a new disk"}, NOW
    )
    assert (found.gate, str(found)) == (gate, f"job a: ready, first in queue q{rest}")


def running(owner: str, count: int, queue: str = "q") -> list[Job]:
    return [job(state=State.RUNNING, owner=owner, queue=queue, kind="mail")] * count


OTHER = LaneView(name="other", queues=("r",), reserved=2, running=0)
BUSY: list[tuple[list[WorkerView], list[Job], int, str | None]] = [
    (
        [worker(concurrency=4, running=4)],
        [],
        0,
        "all 4 slots of 1 worker on queue q are busy; no job is ahead",
    ),
    (
        [worker(concurrency=1)],
        running("w#1", 1),
        1,
        "the slot of 1 worker on queue q is busy; 1 job is ahead",
    ),
    (
        [worker(concurrency=2), worker(owner="w#2", concurrency=2, running=2)],
        running("w#1", 2),
        17,
        "all 4 slots of 2 workers on queue q are busy; 17 jobs are ahead",
    ),
    (
        [worker(concurrency=1)],
        running("w#1", 1),
        AHEAD,
        "the slot of 1 worker on queue q is busy; 1,000 or more jobs are ahead",
    ),
    ([worker(concurrency=2), worker(owner="w#2", concurrency=2)], running("w#1", 2), 0, None),
    ([worker(concurrency=2)], running("x#1", 2), 0, None),
    (
        [worker(lanes=(replace(LANE, name="own"), OTHER))],
        running("w#1", 6),
        0,
        "all 6 slots of 1 worker on queue q are busy; no job is ahead",
    ),
    ([worker(lanes=(replace(LANE, name="own"), OTHER))], running("w#1", 1) + running("w#1", 6, "r"), 0, None),
    (
        [worker(limits=(API,)), worker(owner="w#2", concurrency=1, running=1)],
        [],
        0,
        "the slot of 1 worker on queue q is busy; no job is ahead",
    ),
]


@pytest.mark.parametrize(("workers", "held", "ahead", "rest"), BUSY)
def test_busy_slots(workers: list[WorkerView], held: list[Job], ahead: int, rest: str | None) -> None:
    found = explain(JobFacts(job=job(), queue=queue(), ahead=ahead), NOW)
    explained = among_workers(found, "q", workers, {}, NOW, held)
    assert (explained.gate, explained.count) == (GateName.NEXT if rest is None else GateName.BUSY, ahead)
    assert str(explained) == (str(found) if rest is None else f"job a: ready; {rest}")


def test_every_gate_is_here() -> None:
    assert {gate for _, gate, _ in CASES} | {gate for _, gate, _ in AMONG} | {GateName.BUSY} == set(GateName)


def test_an_unknown_time() -> None:
    assert when(None) == "an unknown time"
    assert when(NOW + 1500) == "2023-11-14T22:13:20.001Z"
