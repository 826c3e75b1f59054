"""Breakers after outages of the ledger, clocks that are set back, changes of their gates by hand, and
races."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

import towpath
from towpath import App, Breaker, Retry, State, Throttled
from towpath.commands import Append, Claim, Claimed, Note, SetPart, Settle, Spec, Upkeep, Want
from towpath.core import breaker as rules
from towpath.core.breaker import BREAKERS, Phase, Record
from towpath.core.checks import SECOND
from towpath.core.job import Release
from towpath.core.views import MAX_PAGE, NoteQuery
from towpath.errors import LedgerBusy
from towpath.events import BreakerChanged
from towpath.runtime.breakers import Breakers
from towpath.testing.app import Bench

X = Breaker("x", failures=3, window=60, cooldown=30, probes=2)
GEO = Breaker("geo", failures=2, window=60, cooldown=30, probes=1)


class Service:
    def __init__(self) -> None:
        self.error: Exception | None = None
        self.calls = 0

    def call(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture(params=[False, True], ids=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, service: Service) -> Iterator[Bench]:
    app = App("memory://")

    @app.task(name="fetch", breaker=X, backoff=1, max_attempts=50)
    def fetch(n: int = 0) -> None:
        service.call()

    @app.task(name="enrich", backoff=1, max_attempts=50)
    def enrich(n: int = 0) -> None:
        with towpath.breaker(GEO):
            service.call()

    with app.testing(database=request.param) as bench:
        yield bench
        assert bench.ledger.check() == []


def _out(bench: Bench, service: Service, jobs: int = 10) -> None:
    """An outage, and jobs that wait for its end."""
    service.error = ConnectionError("down")
    for n in range(jobs):
        bench.app.tasks["fetch"].enqueue(n)
    bench.drain()
    assert bench.app.breakers.phase("x") is Phase.OPEN
    service.error = None


def _gate(bench: Bench) -> Any:
    return bench.app.queue("default").part("breaker:x")


def test_a_ledger_that_fails_for_a_moment_does_not_silence_it(
    bench: Bench, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports during the outage are lost, later ones are not: the breaker opens one failure later."""
    breakers, service.error = bench.app.engine.components.breakers, ConnectionError("down")
    real, calls = breakers.view, iter([True])

    def view(gate: Any) -> Any:
        if next(calls, False):
            raise LedgerBusy(path="work.db", seconds=5)
        return real(gate)

    monkeypatch.setattr(breakers, "view", view)
    for n in range(10):
        bench.app.tasks["fetch"].enqueue(n)
    bench.drain()
    assert bench.app.breakers.phase("x") is Phase.OPEN
    assert service.calls == 4


@pytest.mark.parametrize("after", ["edit", "read"])
def test_one_that_opens_while_it_is_reset_leaves_no_gate_shut(
    bench: Bench, service: Service, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    _out(bench, service)
    breakers, now = bench.app.engine.components.breakers, bench.clock.now()
    another = Breakers(bench.ledger, bench.app.engine.committer)
    real: Callable[..., Any] = getattr(breakers, after)
    calls = iter([False, True] if after == "read" else [True])

    def once(*args: Any) -> Any:
        answer = real(*args)
        if next(calls, False):
            another.edit("x", lambda old: replace(old, status=rules.opened(X, old.status, now, "again")), now)
        return answer

    monkeypatch.setattr(breakers, after, once)
    bench.app.breakers.reset("x")
    assert next(calls, None) is None
    assert bench.app.breakers.list() == []
    part = _gate(bench).stats()
    assert (part.cap, part.next_at, part.why) == (None, None, None)


def test_a_refused_caller_asks_again_although_the_breaker_is_open_for_ever(
    bench: Bench, service: Service
) -> None:
    """After a close by hand all jobs start soon, also jobs that did not wait in its gate."""
    service.error = ConnectionError("down")
    jobs = [bench.app.tasks["enrich"].enqueue(n) for n in range(4)]
    bench.drain()
    bench.app.breakers.open("geo", "a migration")
    bench.app.breakers.open("x", "a migration")
    old = "from-before-it-had-a-breaker"
    bench.app.engine.call(Append((Spec(id=old, kind="fetch", queue="default", payload=b"{}"),)))
    bench.advance(600)
    assert service.calls == 2
    before = {job.id: job.attempts for job in bench.jobs()}
    service.error = None
    bench.app.breakers.close("geo")
    bench.app.breakers.close("x")
    bench.advance(61)
    assert {job.status().state for job in jobs} == {State.DONE}
    assert bench.app.job(old).status().state is State.DONE
    assert {job.id: job.attempts - 1 for job in bench.jobs()} == before


def test_a_clock_that_is_set_back_while_it_is_half_open(bench: Bench, service: Service) -> None:
    _out(bench, service)
    bench.clock.advance(31)
    bench.app.engine.call(Upkeep())
    bench.clock.set(bench.clock.now() - 3600 * SECOND)
    bench.drain()
    assert bench.app.breakers.phase("x") is Phase.CLOSED
    assert {job.state for job in bench.jobs()} <= {State.DONE, State.SCHEDULED}


def test_a_clock_that_is_set_back_does_not_make_it_blind(bench: Bench, service: Service) -> None:
    """The breaker was closed at a time that is now in the future; later failures count."""
    service.error = ConnectionError("down")
    for n in range(2):
        bench.app.tasks["enrich"].enqueue(n)
    bench.drain()
    bench.app.breakers.close("geo")
    bench.clock.set(bench.clock.now() - 3600 * SECOND)
    for n in range(5):
        bench.app.tasks["enrich"].enqueue(n)
    calls = service.calls
    bench.drain()
    assert service.calls == calls + 2


@pytest.mark.parametrize("kind", ["fetch", "enrich"])
def test_a_service_that_was_asked_too_much_is_not_down(bench: Bench, service: Service, kind: str) -> None:
    for error in (Throttled("429", after=1), Retry(after=1, throttled=True)):
        service.error = error
        for n in range(6):
            bench.app.tasks[kind].enqueue(n)
        bench.drain()
    assert [each.trips for each in bench.app.breakers.list()] == [0]
    assert {job.failures for job in bench.jobs()} >= {1}


def test_a_call_that_does_not_answer_is_a_failure() -> None:
    """A timeout of the handler inside the block is a failure; a cancellation for another reason is not
    reported."""
    app = App("memory://")
    began = asyncio.Event()

    @app.task(name="slow", timeout=0.02, max_attempts=1)
    async def slow() -> None:
        async with towpath.breaker(Breaker("slow", failures=2)):
            await asyncio.sleep(60)

    @app.task(name="canceled")
    async def canceled() -> None:
        async with towpath.breaker(Breaker("canceled", failures=1)):
            began.set()
            await asyncio.sleep(60)

    async def run() -> None:
        working = asyncio.create_task(app.arun(concurrency=4))
        with app.bus.collect(BreakerChanged) as changed:
            job = await canceled.aenqueue()
            await began.wait()
            await job.acancel()
            await job.afinished(20)
            for _ in range(2):
                await slow.aenqueue()
            await changed.aexpect(1, 20)
            assert [(event.name, event.state) for event in changed.events] == [("slow", "open")]
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    with app:
        asyncio.run(run())


def test_new_settings_of_a_call_hold(bench: Bench, service: Service) -> None:
    """The breaker of a call is not declared: the code that uses it has its settings."""
    breakers, now = bench.app.engine.components.breakers, bench.clock.now()
    breakers.report(Breaker("y", failures=9), None, False, now, now)
    breakers.report(Breaker("y", failures=2), None, False, now, now)
    assert bench.app.breakers.phase("y") is Phase.OPEN
    [record] = [each for each in bench.app.breakers.list() if each.name == "y"]
    assert record.failures == 2


def test_every_breaker_is_listed_also_beyond_a_page(bench: Bench, service: Service) -> None:
    """One note for each is all that is stored: no other note has the names."""
    names = [f"b{n:04}" for n in range(MAX_PAGE + 2)]
    bench.app.engine.ledger.apply([BREAKERS.put(name, Record(Breaker(name))) for name in names])
    _out(bench, service)
    assert [each.name for each in bench.app.breakers.list()] == [*names, "x"]
    bench.app.breakers.reset("x")
    assert [each.name for each in bench.app.breakers.list()] == names
    assert bench.app.engine.ledger.notes(NoteQuery(prefix="towpath/breakers")).notes == ()


def test_limits_that_are_set_while_it_is_open_do_not_open_it(bench: Bench, service: Service) -> None:
    """A worker that starts stores the limits of its settings, in any state of a breaker."""
    _out(bench, service, 40)
    for _ in range(2):
        _gate(bench).configure(cap=20)
        bench.clock.advance(1)
        bench.app.engine.components.breaker_upkeep.due(bench.clock.now())
        assert _gate(bench).stats().cap == 2
    bench.app.engine.call(SetPart(queue="default", part="breaker:x", not_before=0))
    bench.clock.advance(1)
    bench.app.engine.components.breaker_upkeep.due(bench.clock.now())
    calls = service.calls
    assert bench.drain() == 0
    assert service.calls == calls
    bench.advance(60)
    assert {job.state for job in bench.jobs()} == {State.DONE}
    assert (_gate(bench).stats().cap, _gate(bench).stats().next_at) == (20, None)


def test_a_gate_that_is_opened_by_hand_does_not_make_jobs_go_round_and_round(
    bench: Bench, service: Service
) -> None:
    _out(bench, service, 20)
    bench.clock.advance(1)
    bench.app.engine.call(SetPart(queue="default", part="breaker:x", not_before=0, cap=None))
    calls = service.calls
    assert bench.drain() == 20
    assert service.calls == calls
    assert {job.attempts for job in bench.jobs()} == {0, 1}
    bench.advance(60)
    assert {job.state for job in bench.jobs()} == {State.DONE}


def test_probes_that_were_stuck_and_end_make_no_room_for_more(bench: Bench, service: Service) -> None:
    _out(bench, service, 40)
    bench.clock.advance(31)
    stuck = bench.app.engine.call(Claim(owner="stuck", wants=(Want("default", 9),), lease=24 * 3600 * SECOND))
    assert isinstance(stuck, Claimed)
    assert len(stuck.claims) == 2
    rounds, limits = bench.app.engine.components.breaker_upkeep, []
    for seconds in (1, 31, 1):
        bench.clock.advance(seconds)
        rounds.due(bench.clock.now())
        limits.append(_gate(bench).stats().cap)
    for claim in stuck.claims:
        bench.app.engine.call(Settle(claim.id, claim.fence, Release()))
    bench.clock.advance(1)
    rounds.due(bench.clock.now())
    limits.append(_gate(bench).stats().cap)
    assert limits == [2, 4, 4, 2]


def test_a_note_that_cannot_be_decoded_is_overwritten(
    bench: Bench, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    bench.app.engine.call(Note(key=BREAKERS.key("x"), value=b"not a record"))
    _out(bench, service)
    [found] = bench.app.breakers.list()
    assert found.name == "x"
    assert "is not a valid breaker and will be overwritten" in caplog.text
