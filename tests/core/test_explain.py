"""The sentence for every gate."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from towpath.core import admission
from towpath.core.checks import FOREVER, SECOND
from towpath.core.commands import GroupState, OnFailure
from towpath.core.explain import AHEAD, SHOWN, Facts, Gate, explain, when
from towpath.core.fleet import LaneView, LimitView, WorkerView, among_workers
from towpath.core.job import Job, Reason, Spec, State
from towpath.core.limits import Rate
from towpath.core.views import Counts, GroupView, PartView, QueueView

NOW = 1_700_000_000 * SECOND
LATER = NOW + SECOND
AT, THEN = "2023-11-14T22:13:20.000Z", "2023-11-14T22:13:21.000Z"


def job(**changes: Any) -> Job:
    (made,) = admission.admit([Spec(id="a", queue="q", part="p", group=None)], admission.Facts(), NOW, 1).jobs
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

CASES: list[tuple[Facts, Gate, str]] = [
    (Facts(job=FINISHED, queue=queue()), Gate.FINISHED, f"finished: done at {AT}"),
    (
        Facts(job=replace(FINISHED, state=State.FAILED, reason=Reason.LOST), queue=queue()),
        Gate.FINISHED,
        f"finished: failed (lost) at {AT}",
    ),
    (
        Facts(
            job=replace(FINISHED, state=State.FAILED, reason=Reason.DEPENDENCY),
            queue=queue(),
            culprit=job(
                id="b", kind="mail", state=State.FAILED, reason=Reason.FATAL, error="ValueError: no\n\ntrace"
            ),
        ),
        Gate.FINISHED,
        f"finished: failed (dependency) at {AT}, because job b (mail) failed (fatal): ValueError: no",
    ),
    (
        Facts(
            job=replace(FINISHED, state=State.CANCELED, reason=Reason.DEPENDENCY),
            queue=queue(),
            culprit=job(id="b", state=State.CANCELED, reason=Reason.REQUESTED),
        ),
        Gate.FINISHED,
        f"finished: canceled (dependency) at {AT}, because job b was canceled (requested)",
    ),
    (Facts(job=RUNNING, queue=queue()), Gate.RUNNING, f"leased by w until {THEN}"),
    (
        Facts(job=replace(RUNNING, cancel_requested=Reason.ABORTED), queue=queue()),
        Gate.RUNNING,
        f"leased by w until {THEN}, asked to stop (aborted)",
    ),
    (
        Facts(job=job(expires_at=NOW), queue=queue(paused=True)),
        Gate.EXPIRED,
        f"expired at {AT} and will not run",
    ),
    (Facts(job=BLOCKED, queue=queue(), open_jobs=("b",)), Gate.WAITS, "waits for 1 job: b"),
    (Facts(job=BLOCKED, queue=queue(), open_groups=("g",)), Gate.WAITS, "waits for 1 group: g"),
    (
        Facts(job=replace(BLOCKED, waits=2), queue=queue(), open_jobs=("b",), open_groups=("g",)),
        Gate.WAITS,
        "waits for 2 job or groups: b, g",
    ),
    (
        Facts(job=replace(BLOCKED, waits=7), queue=queue(), open_jobs=NAMES),
        Gate.WAITS,
        "waits for 7 jobs: b, c, d, e, f and 2 more",
    ),
    (
        Facts(job=replace(MEMBER, waits=1), queue=queue(), group=group()),
        Gate.UNSEALED,
        "group g is not sealed",
    ),
    (
        Facts(job=replace(MEMBER, waits=1), queue=queue(), group=group(paused=True)),
        Gate.GROUP_PAUSED,
        "group g is paused; `towpath groups resume g` lets it go on",
    ),
    (
        Facts(
            job=replace(MEMBER, waits=2), queue=queue(), open_jobs=("b",), group=group(paused=True, why="x")
        ),
        Gate.WAITS,
        "waits for 1 job: b, and group g is paused: x",
    ),
    (
        Facts(
            job=replace(MEMBER, waits=1),
            queue=queue(),
            open_jobs=("b",),
            group=group(state=GroupState.SEALED),
        ),
        Gate.WAITS,
        "waits for 1 job: b",
    ),
    (
        Facts(job=replace(MEMBER, waits=2), queue=queue(), open_jobs=("b",), group=group()),
        Gate.WAITS,
        "waits for 1 job: b, and group g is not sealed",
    ),
    (
        Facts(job=job(state=State.SCHEDULED, reason=Reason.RETRY, ready_at=LATER), queue=queue()),
        Gate.SCHEDULED,
        f"scheduled (retry) until {THEN}",
    ),
    (
        Facts(job=job(state=State.SCHEDULED, reason=Reason.LOST, losses=3, ready_at=LATER), queue=queue()),
        Gate.SCHEDULED,
        (
            f"scheduled (lost) until {THEN}: its lease was lost 3 times, which makes it a suspect, so it is"
            " claimed again after a random delay"
        ),
    ),
    (
        Facts(job=job(losses=2), queue=queue(), ahead=4),
        Gate.SUSPECT,
        (
            "ready, 4 ahead of it in q: its lease was lost 2 times, which makes it a suspect, and a worker"
            " runs one suspect at a time"
        ),
    ),
    (Facts(job=job(losses=2), queue=queue(paused=True)), Gate.QUEUE_PAUSED, "queue q is paused by hand"),
    (
        Facts(job=job(), queue=queue(paused=True), part=part(paused=True)),
        Gate.QUEUE_PAUSED,
        "queue q is paused by hand",
    ),
    (Facts(job=job(), queue=queue(paused=True, why="x")), Gate.QUEUE_PAUSED, "queue q is paused by hand: x"),
    (
        Facts(job=job(), queue=queue(next_at=LATER, why="x")),
        Gate.QUEUE_HELD,
        f"queue q is held until {THEN}: x",
    ),
    (
        Facts(job=job(), queue=queue(next_at=LATER, rate=Rate(3, 60 * SECOND))),
        Gate.QUEUE_RATE,
        "rate limit of queue q (3/m): next permit in 1 s",
    ),
    (
        Facts(job=job(), queue=queue(cap=2, counts=Counts(running=2)), holders=("b", "c")),
        Gate.QUEUE_CAP,
        "cap 2 of queue q reached by b, c",
    ),
    (
        Facts(job=job(), queue=queue(), part=part(paused=True, why="x")),
        Gate.PART_PAUSED,
        "part p of queue q is paused by hand: x",
    ),
    (
        Facts(job=job(), queue=queue(), part=part(next_at=LATER)),
        Gate.PART_HELD,
        f"part p of queue q is held until {THEN}",
    ),
    (
        Facts(job=job(), queue=queue(), part=part(next_at=NOW + 230_000, rate=Rate(2, SECOND, 3))),
        Gate.PART_RATE,
        "rate limit of part p of queue q (2/s:3): next permit in 0.23 s",
    ),
    (
        # Further ahead than the rate can put it.
        Facts(job=job(), queue=queue(), part=part(next_at=LATER, rate=Rate(2, SECOND), why="x")),
        Gate.PART_HELD,
        f"part p of queue q is held until {THEN}: x",
    ),
    (
        Facts(
            job=job(),
            queue=queue(),
            part=part(next_at=LATER, rate=Rate(2, SECOND), why="breaker b: 5 failures in 60 s"),
        ),
        Gate.BREAKER,
        f"breaker b is open until {THEN} (5 failures in 60 s)",
    ),
    (
        Facts(job=job(), queue=queue(next_at=FOREVER, why="breaker b: by hand: a migration")),
        Gate.BREAKER,
        "breaker b is open until somebody closes it (by hand: a migration)",
    ),
    (
        Facts(
            job=job(),
            queue=queue(),
            part=part(cap=2, running=2, why="breaker b: a probe failed"),
            holders=("b", "c"),
        ),
        Gate.BREAKER,
        "breaker b is half open (a probe failed): 2 may try, 2 running: b, c",
    ),
    (Facts(job=job(), queue=queue(cap=0)), Gate.QUEUE_CAP, "cap 0 of queue q lets nothing run"),
    (
        Facts(
            job=job(
                state=State.SCHEDULED, reason=Reason.REFUSED, ready_at=LATER, error="breaker b is open\nmore"
            ),
            queue=queue(),
        ),
        Gate.SCHEDULED,
        f"scheduled (refused) until {THEN}: breaker b is open",
    ),
    (
        Facts(job=job(), queue=queue(), part=part(cap=1, running=1), holders=("b",)),
        Gate.PART_CAP,
        "cap 1 of part p of queue q reached by b",
    ),
    (
        Facts(job=job(), queue=queue(), part=part()),
        Gate.NEXT,
        "ready, first in line in q: the next claim takes it",
    ),
    (Facts(job=job(), queue=queue(), ahead=3), Gate.NEXT, "ready, 3 ahead of it in q"),
    (
        Facts(job=job(state=State.SCHEDULED, ready_at=NOW), queue=queue()),
        Gate.NEXT,
        "ready, first in line in q: the next claim takes it",
    ),
]


@pytest.mark.parametrize(("facts", "gate", "sentence"), CASES)
def test_the_sentence(facts: Facts, gate: Gate, sentence: str) -> None:
    found = explain(facts, NOW)
    assert (found.gate, str(found)) == (gate, f"job a: {sentence}")
    assert len(found.by) <= SHOWN


# Who would run it

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
AMONG: list[tuple[list[WorkerView], Gate, str]] = [
    ([worker()], Gate.NEXT, ": the next claim takes it"),
    ([], Gate.NO_WORKER, ", but no worker that is there takes from q"),
    (
        [worker(queues=("r", "x/*")), worker(draining=True)],
        Gate.NO_WORKER,
        ", but no worker that is there takes from q",
    ),
    (
        [worker(paused=True, why="x")],
        Gate.WORKERS_PAUSED,
        ", but every worker that takes from q is paused: x",
    ),
    ([worker(paused=True), worker()], Gate.NEXT, ": the next claim takes it"),
    ([worker(lanes=(LANE,))], Gate.LANE_PAUSED, ", but lane bulk is paused by hand: a new disk"),
    ([worker(lanes=(LANE,)), worker()], Gate.NEXT, ": the next claim takes it"),
    ([worker(lanes=(replace(LANE, name="other"),))], Gate.NEXT, ": the next claim takes it"),
    ([worker(limits=(API,))], Gate.LIMIT, ", but resource api is at its limit: 4 of 4 run"),
    ([worker(limits=(replace(API, running=3),))], Gate.NEXT, ": the next claim takes it"),
    ([worker(limits=(replace(API, queues=("r",)),))], Gate.NEXT, ": the next claim takes it"),
    ([worker(limits=(API,)), worker()], Gate.NEXT, ": the next claim takes it"),
    ([worker(limits=(replace(HELD, until=NOW),))], Gate.NEXT, ": the next claim takes it"),
    (
        [worker(limits=(HELD,)), worker(limits=(replace(HELD, until=LATER + SECOND),))],
        Gate.LIMIT,
        f", but resource api is held until {THEN}: the service was asked too much",
    ),
]


@pytest.mark.parametrize(("workers", "gate", "rest"), AMONG)
def test_who_would_run_it(workers: list[WorkerView], gate: Gate, rest: str) -> None:
    found = among_workers(
        explain(Facts(job=job(), queue=queue()), NOW), "q", workers, {"bulk": "a new disk"}, NOW
    )
    assert (found.gate, str(found)) == (gate, f"job a: ready, first in line in q{rest}")


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
    found = explain(Facts(job=job(), queue=queue(), ahead=ahead), NOW)
    told = among_workers(found, "q", workers, {}, NOW, held)
    assert (told.gate, told.count) == (Gate.NEXT if rest is None else Gate.BUSY, ahead)
    assert str(told) == (str(found) if rest is None else f"job a: ready; {rest}")


def test_every_gate_is_here() -> None:
    assert {gate for _, gate, _ in CASES} | {gate for _, gate, _ in AMONG} | {Gate.BUSY} == set(Gate)


def test_an_unknown_time() -> None:
    assert when(None) == "an unknown time"
    assert when(NOW + 1500) == "2023-11-14T22:13:20.001Z"
