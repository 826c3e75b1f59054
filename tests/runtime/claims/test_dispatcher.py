"""Thousands of waiters: each gets its message, in the order of arrival, and a batch does not get longer by
waiters that it is not for. Operations are counted, not seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.support.engine import BareEngine
from tests.support.gated import Gated
from tests.support.waiting import auntil, until
from towpath import App
from towpath.core.checks import SECOND
from towpath.core.commands import MAX_WANTS, Append, Claim
from towpath.core.job import ClaimedJob, Job, Spec, State
from towpath.errors import LedgerClosed
from towpath.ledger import open_ledger
from towpath.runtime.claims.dispatcher import ALL_LINES, LINE_SHARE, Waiter

MANY = 5000
LEASE = 30 * SECOND


class Watched(Waiter):
    """A waiter for one message of a queue, which counts how often it is considered."""

    considered = 0

    def __init__(self, queue: str, lease: int = LEASE, owner: str | None = None, want: int = 1) -> None:
        super().__init__((queue,), self._take, lease, empty=self._count_empty)
        self.want, self.owner = want, owner
        self.got: list[Job] = []
        self.empties = 0

    def takes(self, job: Job) -> bool:
        Watched.considered += 1
        return super().takes(job)

    def _take(self, claims: list[ClaimedJob]) -> None:
        self.got += [claim.job for claim in claims]

    def _count_empty(self) -> None:
        self.empties += 1


@pytest.fixture
def gate() -> Gated:
    return Gated()


@pytest.fixture
def engine(gate: Gated) -> Iterator[BareEngine]:
    Watched.considered = 0
    with BareEngine(gate) as engine:
        yield engine


def claims(gate: Gated) -> list[Claim]:
    return [command for batch in gate.batches for command in batch if isinstance(command, Claim)]


def put(engine: BareEngine, *queues: str) -> None:
    engine.call(Append(tuple([Spec(id=f"{n}-{queue}", queue=queue) for n, queue in enumerate(queues)])))


def add_all(engine: BareEngine, waiters: list[Watched]) -> None:
    for waiter in waiters:
        engine.dispatcher.add(waiter)
    until(lambda: all(waiter.empties for waiter in waiters))


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_every_waiter_on_a_queue_of_its_own_gets_its_message(kind: str, tmp_path: Path) -> None:
    names = [f"q{n}" for n in range(MANY)]

    async def main(app: App) -> list[str]:
        waits = [asyncio.create_task(app.queue(name).aget(wait=None)) for name in names]
        await auntil(lambda: app.engine.dispatcher.waiting == MANY)
        await app.engine.acall(Append(tuple([Spec(id=f"to-{name}", queue=name) for name in names])))
        return [message.id for message in await asyncio.gather(*waits)]

    with App("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/towpath.db") as app:
        assert asyncio.run(main(app)) == [f"to-{name}" for name in names]


def test_messages_of_another_process_reach_all_of_them(tmp_path: Path) -> None:
    """No batch of this process names their queues."""
    url, names = f"sqlite:///{tmp_path}/towpath.db", [f"q{n}" for n in range(1200)]

    async def main(app: App) -> list[str]:
        waits = [asyncio.create_task(app.queue(name).aget(wait=None)) for name in names]
        await auntil(lambda: app.engine.dispatcher.waiting == len(names))
        with closing(open_ledger(url)) as other:
            other.apply([Append(tuple([Spec(id=f"to-{name}", queue=name) for name in names]))])
        return [message.id for message in await asyncio.gather(*waits)]

    with App(url) as app:
        assert asyncio.run(main(app)) == [f"to-{name}" for name in names]


def test_a_batch_asks_for_the_queues_that_it_appends_to(engine: BareEngine, gate: Gated) -> None:
    waiters = [Watched(f"q{n}") for n in range(MANY)]
    add_all(engine, waiters)
    assert max(len(claim.wants) for claim in claims(gate)) <= MAX_WANTS
    gate.batches.clear()
    put(engine, "q4999", "q3", "elsewhere", "q4000")
    until(lambda: waiters[4999].got and waiters[3].got and waiters[4000].got)
    first = claims(gate)[0]
    assert {"q4999", "q3", "q4000"} <= {want.queue for want in first.wants}
    assert Watched.considered <= 10


def test_claims_are_handed_out_without_a_search(engine: BareEngine) -> None:
    waiters = [Watched(f"q{n}") for n in range(MANY)]
    add_all(engine, waiters)
    put(engine, *[f"q{n}" for n in range(0, MANY, 10)])
    until(lambda: all(waiter.got for waiter in waiters[::10]))
    assert not any(waiter.got for n, waiter in enumerate(waiters) if n % 10)
    assert Watched.considered <= 2 * MANY // 10


def test_waiters_with_different_terms_share_a_claim_in_order_of_arrival(
    engine: BareEngine, gate: Gated
) -> None:
    waiters = [
        Watched("q", lease=LEASE * (1 + n % 3), owner=f"client-{n % 2}" if n % 5 else None) for n in range(30)
    ]
    add_all(engine, waiters)
    gate.batches.clear()
    put(engine, *["q"] * 25)
    until(lambda: sum([len(waiter.got) for waiter in waiters]) == 25)
    assert len({(want.owner, want.lease) for want in claims(gate)[0].wants}) == 9
    assert [waiter.got[0].id for waiter in waiters[:25]] == [f"{n}-q" for n in range(25)]
    for waiter in waiters[:25]:
        assert (waiter.got[0].lease_len, waiter.got[0].owner) == (waiter.lease, waiter.owner or "me")
    assert not any(waiter.got for waiter in waiters[25:])


def test_a_long_line_is_served_from_its_front(engine: BareEngine, gate: Gated) -> None:
    others = [Watched(f"q{n}") for n in range(ALL_LINES)]
    waiters = [Watched("q", owner=f"client-{n}") for n in range(4 * LINE_SHARE)]
    add_all(engine, [*others, *waiters])
    put(engine, *["q"] * (len(waiters) - 1))
    until(lambda: all(waiter.got for waiter in waiters[:-1]))
    assert [waiter.got[0].seq for waiter in waiters[:-1]] == sorted(
        waiter.got[0].seq for waiter in waiters[:-1]
    )
    assert not waiters[-1].got
    late = Watched("q")
    engine.dispatcher.add(late)
    until(lambda: late.empties)


def test_a_worker_that_wants_nothing_in_a_long_line_causes_no_claims(engine: BareEngine, gate: Gated) -> None:
    busy = Waiter(("q",), lambda claims: None, LEASE, demand=lambda: (3, 0))
    busy.suspects = 0
    engine.dispatcher.add(busy)
    waiters = [Watched("q", owner=f"client-{n}") for n in range(2 * LINE_SHARE)]
    add_all(engine, waiters)
    gate.batches.clear()
    for n in range(10):
        engine.call(Append((Spec(id=f"m{n}", queue="elsewhere"),)))
    assert len(gate.batches) <= 12


def test_a_waiter_that_wants_more_goes_behind_the_others(engine: BareEngine) -> None:
    greedy, modest = Watched("q", want=9), Watched("q", want=9)
    add_all(engine, [greedy, modest])
    for n in range(4):
        engine.call(Append((Spec(id=f"m{n}", queue="q"),)))
        until(lambda: len(greedy.got) + len(modest.got) > n)  # noqa: B023
    assert [job.id for job in greedy.got] == ["m0", "m2"]
    assert [job.id for job in modest.got] == ["m1", "m3"]


def test_what_arrives_for_a_waiter_that_has_left_is_given_back(engine: BareEngine, gate: Gated) -> None:
    leaving, staying = Watched("q"), Watched("other")
    add_all(engine, [leaving, staying])
    gate.hold()
    engine.committer.post([Append((Spec(id="a", queue="q"),))], lambda replies: None)
    assert gate.inside.wait(20)
    engine.dispatcher.remove(leaving)
    gate.let_go()

    def released() -> bool:
        job = gate.get("a")
        return job is not None and (job.state, job.fence, job.attempts) == (State.READY, 1, 0)

    until(released)
    assert not leaving.got
    assert engine.dispatcher.waiting == 1


def test_waiters_that_leave_take_nothing_with_them(engine: BareEngine) -> None:
    waiters = [Watched(f"q{n % 100}") for n in range(1000)]
    add_all(engine, waiters)
    for waiter in waiters[:900]:
        engine.dispatcher.remove(waiter)
    put(engine, *[f"q{n}" for n in range(100)])
    until(lambda: all(waiter.got for waiter in waiters[900:]))
    assert not any(waiter.got for waiter in waiters[:900])
    for waiter in waiters[900:]:
        engine.dispatcher.remove(waiter)
    assert engine.dispatcher.waiting == 0
    assert engine.committer._demands == []


def test_closing_the_engine_ends_the_waits() -> None:
    async def main() -> list[BaseException | object]:
        app = App("memory://")
        waits = [asyncio.create_task(app.queue(f"q{n}").aget(wait=None)) for n in range(3)]
        await auntil(lambda: app.engine.dispatcher.waiting == 3)
        await asyncio.to_thread(partial(app.close))
        return list(await asyncio.gather(*waits, return_exceptions=True))

    assert [type(error) for error in asyncio.run(main())] == [LedgerClosed] * 3
