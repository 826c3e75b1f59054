"""The sentence for every gate."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from towpath.core import admission
from towpath.core.checks import SECOND
from towpath.core.commands import GroupState
from towpath.core.explain import SHOWN, Facts, Gate, explain, when
from towpath.core.job import Job, Reason, Spec, State
from towpath.core.limits import Rate
from towpath.core.views import Counts, PartView, QueueView

NOW = 1_700_000_000 * SECOND
LATER = NOW + SECOND
AT, THEN = "2023-11-14T22:13:20.000Z", "2023-11-14T22:13:21.000Z"


def job(**changes: Any) -> Job:
    (made,) = admission.admit([Spec(id="a", queue="q", part="p", group=None)], admission.Facts(), NOW, 1).jobs
    return replace(made, **changes)


def queue(**changes: Any) -> QueueView:
    return replace(QueueView("q", Counts(ready=1), NOW, False, None, None, None, None, 0, None, None), **changes)


def part(**changes: Any) -> PartView:
    return replace(PartView("q", "p", 1, 0, False, None, None, None, 0, 1, 0), **changes)


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
    (Facts(job=RUNNING, queue=queue()), Gate.RUNNING, f"leased by w until {THEN}"),
    (
        Facts(job=replace(RUNNING, cancel_requested=Reason.ABORTED), queue=queue()),
        Gate.RUNNING,
        f"leased by w until {THEN}, asked to stop (aborted)",
    ),
    (Facts(job=job(expires_at=NOW), queue=queue(paused=True)), Gate.EXPIRED, f"expired at {AT} and will not run"),
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
        Facts(job=replace(MEMBER, waits=1), queue=queue(), group_state=GroupState.OPEN),
        Gate.UNSEALED,
        "group g is not sealed",
    ),
    (
        Facts(job=replace(MEMBER, waits=2), queue=queue(), open_jobs=("b",), group_state=GroupState.OPEN),
        Gate.WAITS,
        "waits for 1 job: b, and group g is not sealed",
    ),
    (
        Facts(job=job(state=State.SCHEDULED, reason=Reason.RETRY, ready_at=LATER), queue=queue()),
        Gate.SCHEDULED,
        f"scheduled (retry) until {THEN}",
    ),
    (Facts(job=job(), queue=queue(paused=True), part=part(paused=True)), Gate.QUEUE_PAUSED, "queue q is paused"),
    (Facts(job=job(), queue=queue(paused=True, why="x")), Gate.QUEUE_PAUSED, "queue q is paused (x)"),
    (Facts(job=job(), queue=queue(next_at=LATER, why="x")), Gate.QUEUE_HELD, f"queue q is held until {THEN} (x)"),
    (
        Facts(job=job(), queue=queue(next_at=LATER, rate=Rate(3, 60 * SECOND))),
        Gate.QUEUE_RATE,
        f"the rate of queue q (3 per 60 s) allows the next at {THEN}",
    ),
    (
        Facts(job=job(), queue=queue(cap=2, counts=Counts(running=2)), holders=("b", "c")),
        Gate.QUEUE_CAP,
        "queue q runs 2 of at most 2: b, c",
    ),
    (Facts(job=job(), queue=queue(), part=part(paused=True, why="x")), Gate.PART_PAUSED, "part p of q is paused (x)"),
    (Facts(job=job(), queue=queue(), part=part(next_at=LATER)), Gate.PART_HELD, f"part p of q is held until {THEN}"),
    (
        Facts(job=job(), queue=queue(), part=part(next_at=LATER, rate=Rate(1, SECOND // 2))),
        Gate.PART_RATE,
        f"the rate of part p of q (1 per 0.5 s) allows the next at {THEN}",
    ),
    (
        Facts(job=job(), queue=queue(), part=part(cap=1, running=1), holders=("b",)),
        Gate.PART_CAP,
        "part p of q runs 1 of at most 1: b",
    ),
    (Facts(job=job(), queue=queue(), part=part()), Gate.NEXT, "ready, first in line in q: the next claim takes it"),
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


def test_every_gate_is_here() -> None:
    assert {gate for _, gate, _ in CASES} == set(Gate)


def test_an_unknown_time() -> None:
    assert when(None) == "an unknown time"
    assert when(NOW + 1500) == "2023-11-14T22:13:20.001Z"
