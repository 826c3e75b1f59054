"""Circuit breakers of tasks and calls, on both ledgers, in one process and in a fleet."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import towpath
from tests.support import handlers
from towpath import App, Breaker, Rate, Retry, Snooze, State
from towpath.commands import Claim, Claimed, Settle, Want
from towpath.core.breaker import Phase
from towpath.core.checks import SECOND
from towpath.core.job import Release
from towpath.errors import InvalidInput, NotInJob
from towpath.events import BreakerChanged, Collected
from towpath.operations.breakers import BreakerControls, attempt
from towpath.tasks.outcomes import BreakerOpen
from towpath.testing import ManualClock
from towpath.testing.app import Bench

X = Breaker("platform-x", failures=3, window=60, cooldown=30, probes=2)


class Platform:
    """A service that can be down."""

    def __init__(self) -> None:
        self.down = False
        self.calls = 0

    def call(self) -> int:
        self.calls += 1
        if self.down:
            raise ConnectionError("down")
        return self.calls


@pytest.fixture
def platform() -> Platform:
    return Platform()


@pytest.fixture(params=[False, True], ids=["memory", "sqlite"])
def bench(request: pytest.FixtureRequest, platform: Platform) -> Iterator[Bench]:
    app = App("memory://")

    @app.task(name="fetch", breaker=X, backoff=1, max_attempts=50)
    def fetch(n: int) -> None:
        platform.call()

    @app.task(name="mixed", backoff=1, max_attempts=50)
    async def mixed(n: int) -> None:
        async with towpath.breaker("platform-x"):
            platform.call()

    @app.task(name="other")
    def other(n: int) -> None:
        """Shares the queue."""

    with app.testing(database=request.param) as bench:
        yield bench
        assert bench.ledger.check() == []


def test_an_outage_touches_no_job_that_waits(bench: Bench, platform: Platform) -> None:
    app, platform.down = bench.app, True
    fetch, other = app.tasks["fetch"], app.tasks["other"]
    jobs = [fetch.enqueue(n) for n in range(20)]
    neighbours = [other.enqueue(n) for n in range(5)]
    with app.bus.collect(BreakerChanged) as changed:
        bench.drain()
        assert platform.calls == 3
        assert app.breakers.phase("platform-x") is Phase.OPEN
        waiting = [job.status() for job in jobs[3:]]
        assert {(job.state, job.attempts, job.failures) for job in waiting} == {(State.READY, 0, 0)}
        assert {each.status().state for each in neighbours} == {State.DONE}
        assert str(jobs[9].explain()).endswith(
            "breaker platform-x is open until 2023-11-14T22:13:50.000Z (3 failures in 60 s)"
        )
        # Two probes: the first failure opens it again.
        bench.advance(30)
        assert platform.calls == 4
        platform.down = False
        bench.advance(31)
    assert {job.status().state for job in jobs} == {State.DONE}
    assert max(job.status().attempts for job in jobs[3:]) <= 2
    states = [event.state for event in changed.events]
    assert states == ["open", "half-open", "open", "half-open", "closed"]
    part = bench.ledger.parts("default")["breaker:platform-x"]
    assert (part.cap, part.next_at, part.why, part.running) == (None, 0, None, 0)


def test_limits_set_by_hand_outlive_an_outage(bench: Bench, platform: Platform) -> None:
    part = bench.app.queue("default").part("breaker:platform-x")
    part.configure(cap=7, rate=Rate(1000, 1, 1000), weight=3)
    platform.down = True
    for n in range(5):
        bench.app.tasks["fetch"].enqueue(n)
    bench.drain()
    assert (part.stats().cap, part.stats().why) == (2, "breaker platform-x: 3 failures in 60 s")
    platform.down = False
    bench.advance(60)
    assert (part.stats().cap, part.stats().why, part.stats().rate) == (7, None, Rate(1000, 1, 1000))
    # A limit that is set meanwhile stays, too.
    bench.app.breakers.open("platform-x")
    part.configure(cap=5)
    bench.app.breakers.close("platform-x")
    assert part.stats().cap == 5


def test_a_claimed_job_goes_back_without_spending_anything(bench: Bench, platform: Platform) -> None:
    app, platform.down = bench.app, True
    jobs = [app.tasks["fetch"].enqueue(n) for n in range(8)]
    answer = app.engine.call(Claim(owner="w", wants=(Want("default", 5),), lease=60 * SECOND))
    assert isinstance(answer, Claimed)
    settles = []
    for claim in answer.claims:
        made = attempt(app._registry, claim, app.tasks["fetch"])
        settles.append(made if isinstance(made, Settle) else made.run())
        app.engine.call(settles[-1])
    assert platform.calls == 3
    assert [settle.outcome for settle in settles[3:]] == [Release(), Release()]
    assert [(job.status().state, job.status().attempts) for job in jobs[3:]] == [(State.READY, 0)] * 5


def test_a_job_that_came_another_way_waits_as_well(bench: Bench, platform: Platform) -> None:
    app, platform.down = bench.app, True
    fetch = app.tasks["fetch"].options(queue="elsewhere")
    jobs = [fetch.enqueue(n) for n in range(6)]
    app.breakers.open("platform-x", for_=50)
    assert bench.drain() == 1
    assert platform.calls == 0
    assert [gate.queue for gate in app.breakers.list()[0].gates] == ["default", "elsewhere"]
    platform.down = False
    bench.advance(51)
    assert {job.status().state for job in jobs} == {State.DONE}
    assert {job.status().attempts for job in jobs} == {1}


def test_a_call_inside_a_handler(bench: Bench, platform: Platform) -> None:
    app, platform.down = bench.app, True
    jobs = [app.tasks["mixed"].enqueue(n) for n in range(6)]
    bench.drain()
    assert platform.calls == 3
    assert app.breakers.phase("platform-x") is Phase.OPEN
    last = jobs[5].status()
    assert (last.state, last.reason, last.attempts, last.failures) == (State.SCHEDULED, "refused", 0, 0)
    assert "breaker platform-x lets nothing through for another 30.0 s" in str(jobs[5].explain())
    # It is the breaker of the task as well.
    app.tasks["fetch"].enqueue(0)
    assert bench.drain() == 0
    platform.down = False
    bench.advance(60)
    assert {job.state for job in bench.jobs()} == {State.DONE}
    assert app.breakers.phase("platform-x") is Phase.CLOSED


def test_words_of_the_handler_are_no_verdict(platform: Platform) -> None:
    app = App("memory://")
    errors: list[Exception] = []
    one = Breaker("one", failures=1)

    @app.task(breaker=one, max_attempts=50)
    def by_task() -> None:
        if errors:
            raise errors.pop()

    @app.task(name="by_call", max_attempts=50)
    def by_call() -> None:
        with towpath.breaker(Breaker("two", failures=1)):
            if errors:
                raise errors.pop()

    with app.testing() as bench:
        for task, name in ((by_task, "one"), (by_call, "two")):
            for word in (Snooze(1), towpath.Cancel(), towpath.Fail()):
                errors.append(word)
                task.enqueue()
                bench.drain()
            assert [each.name for each in app.breakers.list() if each.trips] == []
            errors.append(Retry(after=1))
            task.enqueue()
            bench.drain()
            assert app.breakers.phase(name) is Phase.OPEN
            app.breakers.reset(name)


def test_jobs_with_parts_have_the_queue_as_the_gate(platform: Platform) -> None:
    app, platform.down = App("memory://"), True

    @app.task(queue="reports", part="tenant:{tenant}", breaker=X, max_attempts=50)
    def report(tenant: str) -> None:
        platform.call()

    with app.testing() as bench:
        jobs = [report.enqueue(tenant) for tenant in "abcdef"]
        assert bench.drain() == 3
        assert "breaker platform-x is open until" in str(jobs[5].explain())
        assert bench.ledger.queues()["reports"].cap == 2
        platform.down = False
        bench.advance(600)
        assert {job.status().state for job in jobs} == {State.DONE}
        assert bench.ledger.queues()["reports"].cap is None

    with pytest.raises(InvalidInput, match=r"share queue .* needs a queue of its own"):

        @app.task(queue="reports")
        def stranger() -> None: ...


def test_bad_input(bench: Bench) -> None:
    app = bench.app
    for verb in (app.breakers.phase, app.breakers.open, app.breakers.close, app.breakers.reset):
        with pytest.raises(
            InvalidInput, match=r"breaker is 'y'; it must be the name of a breaker \(platform-x\)"
        ):
            verb("y")
    with pytest.raises(InvalidInput, match=r"breaker is Breaker.*; it must be set as at task fetch"):
        app.task(name="twice", breaker="platform-x")(lambda: None)
    with pytest.raises(InvalidInput, match="failures is 0"):
        app.task(breaker=Breaker("y", failures=0))
    with pytest.raises(InvalidInput, match="breaker is 'no name'"):
        app.task(name="y", breaker="no name")(lambda: None)
    with pytest.raises(InvalidInput, match="task fetch takes no part here"):
        app.tasks["fetch"].options(part="p")
    with pytest.raises(InvalidInput, match="for_ is -1"):
        app.breakers.open("platform-x", for_=-1)
    with pytest.raises(NotInJob):
        towpath.breaker("platform-x")
    seen: list[Exception] = []

    @app.task(name="typo")
    def typo() -> None:
        try:
            towpath.breaker("platform-z")
        except InvalidInput as error:
            seen.append(error)

    typo.enqueue()
    bench.drain()
    assert (
        "breaker is 'platform-z'; it must be the breaker of a task of this app (platform-x), "
        "or a Breaker(...)" in str(seen[0])
    )


def test_by_hand(bench: Bench, platform: Platform) -> None:
    app = bench.app
    job = app.tasks["fetch"].enqueue(1)
    app.breakers.open("platform-x", "a migration")
    assert bench.advance(3600 * 24 * 400) == 0
    assert str(job.explain()).endswith(
        "breaker platform-x is open until it is closed by hand (by hand: a migration)"
    )
    app.breakers.close("platform-x")
    assert bench.drain() == 1
    app.breakers.open("platform-x", for_=10)
    app.tasks["fetch"].enqueue(2)
    assert bench.advance(9) == 0
    assert bench.advance(1) == 1
    app.breakers.reset("platform-x")
    assert app.breakers.list() == []
    assert bench.ledger.parts("default")["breaker:platform-x"].cap is None


def test_by_hand_from_an_event_loop(bench: Bench) -> None:
    app = bench.app

    async def run() -> None:
        opened = await app.breakers.aopen("platform-x", "a migration", for_=10)
        assert (opened.why, await app.breakers.aphase("platform-x")) == (
            "by hand: a migration",
            Phase.OPEN,
        )
        assert [each.trips for each in await app.breakers.alist()] == [1]
        assert (await app.breakers.aclose("platform-x")).until is None
        await app.breakers.areset("platform-x")
        with pytest.raises(InvalidInput, match="there is none"):
            await app.breakers.aphase("platform-x")

    asyncio.run(run())


def test_both_forms_have_the_same_signature() -> None:
    methods = dict(inspect.getmembers(BreakerControls, inspect.isfunction))
    plain = [name for name in methods if not name.startswith(("_", "a"))]
    assert sorted(plain) == ["close", "list", "open", "phase", "reset"]
    for name in plain:
        assert inspect.signature(methods[name]) == inspect.signature(methods[f"a{name}"])
        assert inspect.iscoroutinefunction(methods[f"a{name}"])


def test_probes_that_never_report_cannot_wedge_it(bench: Bench, platform: Platform) -> None:
    app, platform.down = bench.app, True
    for n in range(10):
        app.tasks["fetch"].enqueue(n)
    bench.drain()
    bench.clock.advance(31)
    stuck = app.engine.call(Claim(owner="stuck", wants=(Want("default", 9),), lease=24 * 3600 * SECOND))
    assert isinstance(stuck, Claimed)
    assert len(stuck.claims) == 2
    platform.down = False
    assert bench.drain() == 0
    bench.advance(60)
    assert app.breakers.phase("platform-x") is Phase.CLOSED
    assert len(bench.jobs(state="done")) == 8


# A fleet


def _app(url: str, clock: ManualClock, platform: Platform) -> App:
    app = App(url, clock=clock)

    @app.task(name="fetch", breaker=X, backoff=1, max_attempts=50)
    def fetch(n: int) -> None:
        platform.call()

    return app


def _one(app: App, most: int = 1) -> list[object]:
    answer = app.engine.call(Claim(owner=app.engine.owner, wants=(Want("default", most),), lease=60 * SECOND))
    assert isinstance(answer, Claimed)
    outcomes: list[object] = []
    for claim in answer.claims:
        made = attempt(app._registry, claim, app.tasks["fetch"])
        settle = made if isinstance(made, Settle) else made.run()
        app.engine.call(settle)
        outcomes.append(type(settle.outcome).__name__)
    return outcomes


def test_a_fleet_opens_and_closes_together(tmp_path: Path, platform: Platform) -> None:
    url, clock, platform.down = f"sqlite:///{tmp_path / 'work.db'}", ManualClock(), True
    changed: Collected[BreakerChanged] = Collected()
    with _app(url, clock, platform) as a, _app(url, clock, platform) as b:
        for app in (a, b):
            app.bus.subscribe(BreakerChanged, changed.add)
        for n in range(12):
            a.tasks["fetch"].enqueue(n)
        assert _one(a) == _one(b) == _one(a) == ["RetryOutcome"]
        changed.expect(1)
        assert (a.breakers.phase("platform-x"), b.breakers.phase("platform-x")) == (Phase.OPEN, Phase.OPEN)
        assert _one(a) == _one(b) == []
        clock.advance(30)
        platform.down = False
        assert _one(a) + _one(b) == ["Done", "Done"]
        changed.expect(2)
        assert (a.breakers.phase("platform-x"), b.breakers.phase("platform-x")) == (
            Phase.CLOSED,
            Phase.CLOSED,
        )
        assert _one(a, 50) + _one(b) == ["Done"] * 10
        assert [event.state for event in changed.events] == ["open", "closed"]
        assert a.ledger.check() == []


def test_many_at_once_count_every_failure_once(tmp_path: Path, platform: Platform) -> None:
    url, clock = f"sqlite:///{tmp_path / 'work.db'}", ManualClock()
    many = Breaker("many", failures=41, window=60, cooldown=30)
    apps = [App(url, clock=clock) for _ in range(2)]
    starting = threading.Barrier(4)

    def fail(app: App, first: int) -> None:
        starting.wait()
        for n in range(10):
            app.engine.components.breakers.report(
                many, ("q", "breaker:many"), False, clock.now(), clock.now() + first + n
            )

    def failed(app: App) -> tuple[int, ...]:
        return next((each.status.failed for each in app.engine.components.breakers.all()), ())

    with apps[0], apps[1]:
        threads = [threading.Thread(target=fail, args=(app, 10 * n)) for n, app in enumerate(apps * 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(200):
            seen = apps[0].ledger.version()
            if len(failed(apps[0])) >= 40:
                break
            apps[0].ledger.wait(seen, 1)
        assert sorted(failed(apps[1])) == [clock.now() + n for n in range(40)]
        clock.advance(1)
        app = apps[1]
        assert app.breakers.phase("many") is Phase.CLOSED
        with app.bus.collect(BreakerChanged) as changed:
            app.engine.components.breakers.report(many, None, False, clock.now(), clock.now())
            changed.expect(1, where=lambda event: event.state == "open")
        assert app.breakers.phase("many") is Phase.OPEN
        part = app.ledger.parts("q")["breaker:many"]
        assert (part.cap, part.next_at) == (2, clock.now() + 30 * SECOND)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("breaker", [Breaker("x"), Breaker("x", ratio=0.5)], ids=["in a row", "ratio"])
def test_failures_among_many_successes_do_not_open_it(
    kind: str, breaker: Breaker, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Real workers, two Apps: eight failures in the window, never five in a row."""
    url = (
        request.getfixturevalue("postgres_url") if kind == "postgres" else f"sqlite:///{tmp_path / 'work.db'}"
    )
    failed: set[int] = set()

    def fetch(n: int) -> None:
        if n % 50 == 25 and n not in failed:
            failed.add(n)
            raise ConnectionError("once")

    with App(url) as app:
        task = app.task(name="fetch", breaker=breaker, backoff=0)(fetch)
        task.enqueue_many([task.of(n) for n in range(400)])
        app.run(burst=True, concurrency=2)
        assert len(failed) == 8
        [record] = app.breakers.list()
        assert (record.state, record.trips) == (Phase.CLOSED, 0)


def test_the_log_has_the_reason_of_a_closed_breaker(
    bench: Bench, platform: Platform, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "towpath.breakers")
    platform.down = True
    for n in range(3):
        bench.app.tasks["fetch"].enqueue(n)
    bench.drain()
    bench.advance(31)
    platform.down = False
    bench.advance(60)
    bench.app.breakers.open("platform-x", "maintenance")
    bench.app.breakers.close("platform-x")
    lines = [record.getMessage() for record in caplog.records if record.name == "towpath.breakers"]
    assert [line for line in lines if "half-open" not in line] == [
        "breaker platform-x is open (3 failures in 60 s)",
        "breaker platform-x is open (a probe failed)",
        "breaker platform-x is closed (2 probes succeeded)",
        "breaker platform-x is open (by hand: maintenance)",
        "breaker platform-x is closed (by hand)",
    ]
    assert "breaker platform-x is half-open (it was opened by: 3 failures in 60 s)" in lines


def test_a_worker_opens_it_and_gives_back_what_it_had_claimed(tmp_path: Path) -> None:
    """A real worker with real time: claimed jobs that have not started are released, and all jobs end as
    done."""
    app = App(f"sqlite:///{tmp_path / 'work.db'}")
    calls: list[int] = []

    @app.task(
        name="fetch", breaker=Breaker("x", failures=4, cooldown=0.3, probes=1), backoff=0.05, max_attempts=5
    )
    async def fetch(n: int) -> None:
        calls.append(n)
        if len(calls) <= 4:
            raise ConnectionError("down")

    with app:
        jobs = fetch.enqueue_many([fetch.of(n) for n in range(200)])

        async def run() -> None:
            with app.bus.collect(BreakerChanged) as changed:
                working = asyncio.create_task(app.arun(concurrency=2))
                await changed.aexpect(1, 20, where=lambda event: event.state == "closed")
                for job in jobs:
                    await job.aresult(20)
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                assert [event.state for event in changed.events if event.state != "half-open"] == [
                    "open",
                    "closed",
                ]

        asyncio.run(run())
        attempts = [job.status().attempts for job in jobs]
        assert sum(attempts) == len(calls) == 204


def test_the_exception_is_for_catching() -> None:
    app = App("memory://")
    caught: list[BreakerOpen] = []

    @app.task(breaker="y")
    def fallback() -> str:
        try:
            with towpath.breaker("y"):
                return "called"
        except BreakerOpen as error:
            caught.append(error)
            return "did without"

    with app.testing() as bench:
        job = fallback.enqueue()
        bench.drain()
        assert job.result() == "called"
        record = app.breakers.open("y", for_=100)
        assert record.trips == 1


def test_attempts_in_processes_count(tmp_path: Path) -> None:
    """A failure that the process reports, and a process that dies without a report."""
    with handlers.app as app:

        async def run() -> None:
            working = asyncio.create_task(app.arun(concurrency=1, queues=("default",)))
            with app.bus.collect(BreakerChanged) as changed:
                first, second = await handlers.dies.aenqueue("raise"), await handlers.dies.aenqueue("exit")
                await first.afinished(60)
                await second.afinished(60)
                await changed.aexpect(1, 60)
            waiting = await handlers.dies.aenqueue("raise")
            assert "breaker processes is open" in str(await asyncio.to_thread(waiting.explain))
            app.breakers.reset("processes")
            await waiting.acancel()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

        asyncio.run(run())
