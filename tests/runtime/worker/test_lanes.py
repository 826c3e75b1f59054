"""Lanes and resources in a real worker on a real ledger. Handlers and tests synchronize by events."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from msgspec.structs import replace

import towpath
from tests.support.running import working
from tests.support.waiting import WAIT
from towpath import App, JobHandle, Lane, State, Throttled
from towpath.commands import Query
from towpath.core.commands import Claim as ClaimCommand
from towpath.core.commands import Claimed, Want
from towpath.errors import InvalidInput
from towpath.events import JobSettled, JobStarted, LimitChanged
from towpath.operations.service import RunOptions, worker_options

pytestmark = pytest.mark.ledgers("sqlite", "postgres")

INTERACTIVE = Lane(queues=("interactive",), reserved=2)
BULK = Lane(queues=("bulk",), reserved=2)
LANES = {"interactive": INTERACTIVE, "bulk": BULK}
LENDING = {name: replace(lane, lends=True) for name, lane in LANES.items()}


class Gate:
    """A task of an app with handlers that wait, each for one `let(1)`."""

    def __init__(self, app: App) -> None:
        self._passes = threading.Semaphore(0)

        @app.task(name="held", timeout=60)
        def held(n: int) -> int:
            assert self._passes.acquire(timeout=WAIT)
            return n

        self.task = held

    def let(self, count: int) -> None:
        self._passes.release(count)

    def put(self, queue: str, count: int) -> None:
        task = self.task.options(queue=queue)
        task.enqueue_many([task.of(n) for n in range(count)])


def running(app: App) -> Counter[str]:
    return Counter(job.queue for job in app.ledger.find(Query(states=(State.RUNNING,))).jobs)


def test_an_empty_lane_that_lends_gets_its_own_back(app: App) -> None:
    gate = Gate(app)
    gate.put("bulk", 30)
    with app.bus.collect(JobStarted) as started, working(app, lanes=LENDING, concurrency=6):
        started.expect(6)
        assert running(app) == {"bulk": 6}
        gate.put("interactive", 30)
        ended = 0
        while [event.queue for event in started.events].count("interactive") < 2:
            gate.let(1)
            ended += 1
            started.expect(6 + ended)
        # A bulk job or two may have been prefetched before there were other jobs.
        assert ended <= 6
        gate.let(60)
        started.expect(60)


def test_the_reserved_slots_of_an_empty_lane_stay_free(app: App) -> None:
    gate = Gate(app)

    @app.task(queue="interactive")
    async def quick(n: int) -> int:
        return n

    gate.put("bulk", 30)
    with app.bus.collect(JobStarted) as started, working(app, lanes=LANES, concurrency=6):
        started.expect(4)
        # No bulk job ends meanwhile.
        assert [quick.enqueue(n).result(WAIT) for n in range(5)] == list(range(5))
        assert running(app) == {"bulk": 4}
        gate.let(30)
        started.expect(35)


@pytest.mark.parametrize(("flooded", "other"), [("bulk", "interactive"), ("interactive", "bulk")])
def test_a_flood_does_not_stop_the_other_lane(app: App, flooded: str, other: str) -> None:
    gate = Gate(app)

    @app.task(queue=other)
    async def quick(n: int) -> int:
        return n

    lanes = {
        name: Lane(queues=lane.queues, reserved=2, lends=name == flooded) for name, lane in LANES.items()
    }
    gate.put(flooded, 200)
    with app.bus.collect(JobStarted) as started, working(app, lanes=lanes, concurrency=6):
        started.expect(4)
        # All handlers of the flood wait, and none of them ends.
        assert [quick.enqueue(n).result(WAIT) for n in range(20)] == list(range(20))
        assert running(app)[flooded] == 4
        gate.let(200)
        started.expect(220)


def test_priorities_inside_a_lane_over_all_its_queues(app: App) -> None:
    order: list[str] = []

    @app.task
    async def note(name: str) -> None:
        order.append(name)

    for queue, priority in [("a", "low"), ("b", "normal"), ("a", "high"), ("b", "high"), ("a", "normal")]:
        note.options(queue=queue, priority=priority).enqueue(f"{queue} {priority}")
    with (
        app.bus.collect(JobSettled) as settled,
        working(app, lanes={"one": Lane(queues=("a", "b"))}, concurrency=1),
    ):
        settled.expect(5)
    assert order == ["a high", "b high", "b normal", "a normal", "a low"]


def test_many_quick_jobs_in_two_lanes_all_end(app: App) -> None:
    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    tasks = [
        add.options(queue=queue, max_attempts=1 + n % 2) for n, queue in enumerate(("interactive", "bulk"))
    ]
    with working(app, lanes=LANES, concurrency=8):
        handles = [task.enqueue_many([task.of(n, 1) for n in range(700)]) for task in tasks]
        for each in handles:
            assert [handle.result(WAIT) for handle in each] == [n + 1 for n in range(700)]


def test_with_ageing_low_is_not_starved(app: App) -> None:
    ran, unfinished = threading.Event(), list[int]()

    @app.task(queue="bulk", priority="high")
    def breed() -> None:
        if not ran.is_set():
            breed.enqueue_many([breed.of(), breed.of()])

    @app.task(queue="bulk", priority="low")
    def low() -> str:
        counts = app.queue("bulk").stats().counts
        unfinished.append(counts.ready + counts.running)
        ran.set()
        return "ran"

    breed.enqueue()
    handle = low.enqueue()
    with (
        app.bus.collect(JobSettled) as settled,
        working(app, lanes={"one": Lane(queues=("bulk",), ageing=1)}, concurrency=1),
    ):
        settled.expect(1)
        assert handle.result(WAIT) == "ran"
    assert handle.status().priority == 0
    assert unfinished[0] > 1, "it did not just come last"


def test_a_burst_ends_with_lanes(app: App) -> None:
    done: list[int] = []

    @app.task(queue="bulk")
    async def one(n: int) -> None:
        done.append(n)

    one.enqueue_many([one.of(n) for n in range(50)])
    app.run(lanes=LANES, concurrency=4, burst=True)
    assert sorted(done) == list(range(50))


def test_what_was_claimed_and_not_started_is_given_back(app: App) -> None:
    gate = Gate(app)
    gate.put("bulk", 10)
    with app.bus.collect(JobStarted) as started, working(app, lanes=LENDING, concurrency=4, grace=0.1):
        started.expect(4)
        gate.let(4)
        started.expect(8)
        gate.let(4)
    jobs = app.ledger.find(Query()).jobs
    assert {job.failures for job in jobs} == {0}


def test_a_burst_ends_although_a_lane_is_paused(app: App) -> None:
    done: list[int] = []

    @app.task
    async def one(n: int) -> None:
        done.append(n)

    app._configuration.settings = replace(app.settings, lanes=LANES)
    app.workers.lanes.pause("bulk", "a new disk")
    held = one.options(queue="bulk").enqueue(1)
    one.options(queue="interactive").enqueue(2)
    app.run(concurrency=4, burst=True)
    assert done == [2]
    assert (held.status().state, held.status().attempts) == (State.READY, 0)
    app.workers.lanes.resume("bulk")
    app.run(concurrency=4, burst=True)
    assert done == [2, 1]


def test_a_paused_lane_lends_its_slots(app: App) -> None:
    gate = Gate(app)
    app._configuration.settings = replace(app.settings, lanes=LANES)
    app.workers.lanes.pause("bulk")
    gate.put("bulk", 10)
    gate.put("interactive", 10)
    with app.bus.collect(JobStarted) as started, working(app, concurrency=4):
        started.expect(4)
        assert running(app) == {"interactive": 4}
        app.workers.lanes.resume("bulk")
        gate.let(20)
        started.expect(20)
    assert {job.attempts for job in app.ledger.find(Query(queue="bulk")).jobs} == {1}


def test_an_adaptive_lane_learns(app: App) -> None:
    lock, inside, most = threading.Lock(), [0], [0]

    @app.task(queue="bulk", backoff=0, max_attempts=1000)
    def call(n: int) -> int:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            too_many = inside[0] > 5
        threading.Event().wait(0.002)
        with lock:
            inside[0] -= 1
        if too_many:
            raise Throttled("429")
        return n

    lanes = {"interactive": INTERACTIVE, "bulk": Lane(queues=("bulk",), reserved=2, adaptive=(1, 8))}
    with app.bus.collect(LimitChanged) as changes, working(app, lanes=lanes, concurrency=16):
        handles = call.enqueue_many([call.of(n) for n in range(300)])
        assert [handle.result(WAIT) for handle in handles] == list(range(300))
    assert {event.resource for event in changes.events} == {"lane bulk"}
    assert any(event.limit < event.before for event in changes.events)
    assert most[0] <= 8


def test_what_was_asked_for_before_the_options_changed_goes_back(app: App) -> None:
    @app.task(queue="interactive")
    async def one() -> None: ...

    with app.bus.collect(JobSettled) as settled, working(app, lanes=LANES, concurrency=4) as service:
        worker = service._worker
        one.options(queue="bulk").enqueue()
        settled.expect(1)

        def change() -> None:
            before = worker.buffer
            worker.change(
                worker_options(app._registry, app.settings, {"lanes": {"bulk": BULK}, "concurrency": 4})
            )
            late.append(one.enqueue())
            reply = app.engine.call(
                ClaimCommand(owner=app.engine.owner, wants=(Want("interactive", 1),), lease=30_000_000)
            )
            assert isinstance(reply, Claimed)
            worker._accept(before, list(reply.claims), time.monotonic())

        late: list[JobHandle[None]] = []
        service._loop.call_soon_threadsafe(change)
        settled.expect(1, where=lambda event: event.outcome == "release")
        job = late[0].status()
        assert (job.state, job.attempts) == (State.READY, 0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lanes": {"a": Lane(queues=("x",), reserved=5)}, "concurrency": 4}, "lanes.a.reserved"),
        ({"lanes": {"a": Lane(queues=("x",)), "b": Lane(queues=("x",))}}, "lanes.b.queues"),
        ({"lanes": LANES, "queues": ("bulk",)}, "queues"),
        ({"lanes": {"a": "x"}}, "lanes.a"),
    ],
)
def test_bad_lanes_are_refused_at_the_start(app: App, options: RunOptions, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        app.run(**options)
    assert refused.value.details["field"] == field


# Routes


def test_a_route_chooses_the_queue(app: App) -> None:
    def by_size(path: str, size: int = 0) -> str:
        return "bulk" if size >= 10_000_000 else "interactive"

    @app.task(route=by_size)
    def copy(path: str, size: int = 0) -> None: ...

    @app.task(route="tenant/{tenant}")
    def sync(tenant: str) -> None: ...

    assert copy.enqueue("a").status().queue == "interactive"
    assert copy.enqueue("a", size=10_000_000).status().queue == "bulk"
    assert copy.options(queue="mine").enqueue("a", 10_000_000).status().queue == "mine"
    assert sync.enqueue("acme").status().queue == "tenant/acme"
    with pytest.raises(InvalidInput, match="route"):
        sync.enqueue("not a name")
    with pytest.raises(InvalidInput, match="route"):
        app.task(route=3)(lambda: None)  # type: ignore[call-overload]


# Resources


def test_a_resource_holds_back_its_own_jobs_only(app: App) -> None:
    app.resource("api", min=2, max=2)
    go = threading.Event()

    @app.task(queue="api", resource="api")
    def call(n: int) -> int:
        assert go.wait(WAIT)
        return n

    @app.task
    def other(n: int) -> int:
        return n

    calls = call.enqueue_many([call.of(n) for n in range(20)])
    with app.bus.collect(JobStarted) as started, working(app, concurrency=8):
        started.expect(2)
        assert [other.enqueue(n).result(WAIT) for n in range(10)] == list(range(10))
        assert running(app) == {"api": 2}
        go.set()
        assert [handle.result(WAIT) for handle in calls] == list(range(20))
    assert {job.attempts for job in app.ledger.find(Query(queue="api")).jobs} == {1}, (
        "nothing was claimed in vain"
    )


def test_throttling_halves_and_success_raises_the_limit(app: App) -> None:
    app.resource("api", max=8)
    lock, inside, most = threading.Lock(), [0], [0]

    @app.task(queue="api", resource="api", backoff=0, max_attempts=1000)
    def call(n: int) -> int:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            too_many = inside[0] > 5
        threading.Event().wait(0.002)
        with lock:
            inside[0] -= 1
        if too_many:
            raise Throttled("429")
        return n

    with app.bus.collect(LimitChanged) as changes, working(app, concurrency=16):
        handles = call.enqueue_many([call.of(n) for n in range(400)])
        assert [handle.result(WAIT) for handle in handles] == list(range(400))
    limits = [event.limit for event in changes.events]
    assert (changes.events[0].limit, changes.events[0].before) == (4, 0)
    assert any(event.limit < event.before for event in changes.events)
    assert any(event.limit > event.before for event in changes.events)
    assert min(limits) >= 1
    assert most[0] <= 8


class Answered(Exception):
    """An error as HTTP clients raise it."""

    class Response:
        status_code = 429
        headers: dict[str, str] = {"Retry-After": "2"}

    response = Response()


@pytest.mark.parametrize("form", ["429", "throttled", "retry"])
def test_retry_after_is_for_all_jobs_of_the_resource(app: App, form: str) -> None:
    app.resource("api")
    errors: dict[str, Exception] = {
        "429": Answered(),
        "throttled": Throttled(after=2),
        "retry": towpath.Retry("busy", after=2, throttled=True),
    }
    first = threading.Event()

    @app.task(queue="api", resource="api", backoff=0)
    def call(n: int) -> int:
        if not first.is_set():
            first.set()
            raise errors[form]
        return n

    @app.task
    def other() -> str:
        return "done"

    with app.bus.collect(JobSettled, JobStarted) as seen, working(app, concurrency=4):
        handle = call.enqueue(1)
        seen.expect(1, where=lambda event: isinstance(event, JobSettled) and event.outcome == "retry")
        more = call.enqueue_many([call.of(n) for n in range(5)])
        assert other.enqueue().result(WAIT) == "done"
        assert running(app)["api"] == 0
        starts = [event for event in seen.events if isinstance(event, JobStarted) and event.queue == "api"]
        assert len(starts) == 1
        assert handle.result(WAIT) == 1
        assert [each.result(WAIT) for each in more] == list(range(5))


def test_a_job_in_a_strange_queue_is_put_off_without_cost(app: App) -> None:
    app.resource("api", max=1)
    go = threading.Event()

    @app.task(queue="api", resource="api")
    def call() -> None:
        assert go.wait(WAIT)

    @app.task
    def other() -> None: ...

    with (
        app.bus.collect(JobStarted, JobSettled) as seen,
        working(app, queues=("api", "default"), concurrency=4),
    ):
        call.enqueue()
        seen.expect(1)
        strange = call.options(queue="default").enqueue()
        seen.expect(1, where=lambda event: isinstance(event, JobSettled) and event.outcome == "refuse")
        other.enqueue().result(WAIT)
        go.set()
        strange.result(WAIT)
        assert strange.status().failures == 0


def test_bad_resources_are_refused(app: App) -> None:
    with pytest.raises(InvalidInput, match="min"):
        app.resource("x", min=5, max=4)
    app.resource("api")
    with pytest.raises(InvalidInput, match=r"has a resource .* already"):
        app.resource("api")

    @app.task(queue="api", resource="apy")
    def wrong() -> None: ...

    with pytest.raises(InvalidInput, match=r"resource of .*apy.*declares: api"):
        worker_options(app._registry, app.settings, {})
    app._registry.tasks.clear()

    @app.task(resource="api")
    def uses() -> None: ...

    @app.task
    def shares() -> None: ...

    with pytest.raises(InvalidInput, match="a queue of its own"):
        worker_options(app._registry, app.settings, {})
    del app._registry.tasks[shares.kind]
    with pytest.raises(InvalidInput, match="names instead of a pattern"):
        worker_options(app._registry, app.settings, {"queues": ("*",)})
    assert worker_options(app._registry, app.settings, {}).sources == {"default": "api"}
