"""The publisher of each event, on a real engine or worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import apsw
import pytest

import towpath
from tests.support.engine import BareEngine, expire
from tests.support.running import working
from tests.support.waiting import WAIT
from towpath import App, commands
from towpath.core.checks import SECOND, utc
from towpath.core.job import Spec
from towpath.core.schedule import Missed, Schedule
from towpath.errors import QueueFull
from towpath.events import (
    BatchCommitted,
    CaretakerElected,
    HandlerBlocked,
    JobsAppended,
    JobsClaimed,
    JobSettled,
    JobStarted,
    LeaseLost,
    QueueFullSeen,
    ScheduleFired,
    UpkeepDone,
)
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.operations.schedules import Scheduler, get_schedule, register
from towpath.runtime.worker.runs import BlockedLoop
from towpath.testing import ManualClock

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


def capacity(app: App, queue: str, most: int) -> None:
    app.engine.call(commands.SetQueue(queue=queue, capacity=most))


class TestCommitter:
    def test_jobs_appended(self, app: App) -> None:
        add = app.task(queue="sums", unique=True)(_add)
        with app.bus.collect(JobsAppended) as published:
            first = add.enqueue(1, 2)
            assert add.enqueue(1, 2).id == first.id
            message = app.queue("mail").put("hello")
            with app.batch():
                second, third = add.enqueue(3, 4), add.options(queue="other").enqueue(5, 6)
        assert published.events == [
            JobsAppended("sums", (first.id,)),
            JobsAppended("mail", (message,)),
            JobsAppended("sums", (second.id,)),
            JobsAppended("other", (third.id,)),
        ]

    def test_children_are_appended_with_the_settle_of_their_parent(self, app: App) -> None:
        child = app.task(_add)

        @app.task
        def parent() -> str:
            return towpath.current().spawn(child.of(1, 2)).id

        with app.bus.collect(JobsAppended) as published, working(app):
            id = parent.enqueue().result(WAIT)
        assert [event.ids for event in published.events][1:] == [(id,)]

    def test_a_full_queue(self, app: App) -> None:
        add = app.task(queue="sums")(_add)
        capacity(app, "sums", 1)
        add.enqueue(1, 2)
        with app.bus.collect(QueueFullSeen, JobsAppended) as published, pytest.raises(QueueFull):
            add.enqueue_many([add.of(1, 2), add.of(3, 4)])
        assert published.events == [QueueFullSeen("sums", depth=1, capacity=1, asked=2)]

    def test_upkeep_that_found_something(self, app: App) -> None:
        add = app.task(_add)
        with app.bus.collect(UpkeepDone) as published:
            app.engine.start_caretaker()
            add.options(delay=0.02).enqueue(1, 2)
            published.expect(timeout=WAIT)
        assert published.events == [UpkeepDone(woken=1)]

    def test_a_batch_counts_what_was_taken_and_no_more(self, app: App) -> None:
        add = app.task(queue="sums")(_add)
        with app.bus.collect(BatchCommitted) as published:
            add.enqueue_many([add.of(n, n) for n in range(3)])
            capacity(app, "sums", 1)
            with pytest.raises(QueueFull):
                add.enqueue(1, 2)
            claimed = app.engine.call(
                commands.Claim(owner="me", wants=(commands.Want("*", 5),), lease=SECOND)
            )
            assert isinstance(claimed, commands.Claimed)
            app.engine.call(commands.Claim(owner="me", wants=(commands.Want("*", 5),), lease=SECOND))
            app.engine.call_all(
                [commands.Settle(claim.id, claim.fence, commands.Done()) for claim in claimed.claims]
            )
        assert [event.jobs for event in published.events] == [3, 0, 0, 3, 3]


def _add(a: int, b: int) -> int:
    return a + b


class TestCaretaker:
    def test_the_election_of_a_caretaker_and_its_successor_is_published(self, app: App) -> None:
        other = App(app.engine.url)
        with other, app.bus.collect(CaretakerElected) as here, other.bus.collect(CaretakerElected) as there:
            owner = other.engine.owner
            other.engine.start_caretaker()
            assert there.expect(timeout=WAIT) == [CaretakerElected(owner)]
            app.engine.start_caretaker()
            other.close()
            assert here.expect(timeout=WAIT) == [CaretakerElected(app.engine.owner)]
        assert len(there.events) == 1, "renewals are no elections"

    def test_a_schedule_that_fires_under_a_worker(self, app: App) -> None:
        done = threading.Event()

        @app.every(0.1, name="tick")
        def tick() -> None:
            done.set()

        with app.bus.collect(ScheduleFired) as published, working(app):
            fired, *_ = published.expect(timeout=WAIT)
            assert done.wait(WAIT)
        job = app.job(fired.id).status()
        assert (fired.name, job.kind) == ("tick", tick.kind)
        assert job.headers["scheduled-at"].startswith("2")
        assert fired.late >= 0

    def test_two_workers_tell_of_a_fire_once_and_of_each_one_that_was_missed(
        self, clock: ManualClock
    ) -> None:
        ledger = MemoryLedger(clock)
        spec = Spec(id="x", queue="q", kind="tick")
        with BareEngine(ledger, clock) as first, BareEngine(ledger, clock) as second:
            register(first, Schedule(name="s", spec=spec, every=60 * SECOND, missed=Missed.ALL))
            due = get_schedule(first, "s").next_at
            clock.set(due + 65 * SECOND)
            with (
                first.committer.bus.collect(ScheduleFired) as one,
                second.committer.bus.collect(ScheduleFired) as two,
            ):
                for host in (first, second):
                    Scheduler(host).due(clock.now())
        published = [*one.events, *two.events]
        assert [(event.due - utc(due), event.late) for event in published] == [
            (timedelta(0), 65.0),
            (timedelta(minutes=1), 5.0),
        ]
        assert {event.id for event in published} == {
            job.id for job in ledger.find(towpath.commands.Query()).jobs
        }

    def test_a_schedule_fires_into_a_full_queue(self, clock: ManualClock) -> None:
        ledger = MemoryLedger(clock)
        with BareEngine(ledger, clock) as engine:
            engine.committer.call(commands.SetQueue(queue="full", capacity=0))
            register(engine, Schedule(name="t", spec=Spec(id="x", queue="full"), every=60 * SECOND))
            clock.advance(60)
            with engine.committer.bus.collect(ScheduleFired, QueueFullSeen) as published:
                Scheduler(engine).due(clock.now())
        assert [type(event) for event in published.events] == [ScheduleFired]


class TestBlocked:
    @pytest.fixture
    def blocked_log(self) -> Iterator[BlockedLoopLog]:
        blocked_log = BlockedLoopLog()
        logger = logging.getLogger("towpath.worker")
        logger.addHandler(blocked_log)
        yield blocked_log
        logger.removeHandler(blocked_log)

    def test_the_blocking_job_is_named(self, app: App, blocked_log: BlockedLoopLog) -> None:
        waiting, over = threading.Event(), asyncio.Event()

        @app.task
        async def innocent() -> None:
            waiting.set()
            await over.wait()

        @app.task
        async def hogs() -> str:
            line = blocked_log.wait()
            over.set()
            return line

        with app.bus.collect(HandlerBlocked) as published, working(app, concurrency=4):
            other = innocent.enqueue()
            assert waiting.wait(WAIT)
            guilty = hogs.enqueue()
            line = guilty.result(WAIT)
            other.result(WAIT)
        assert f"by {hogs.kind} (job {guilty.id}) at " in line
        assert other.id not in line
        assert "line = blocked_log.wait()" in line
        [event] = published.events
        assert (event.id, event.kind) == (guilty.id, hogs.kind)
        assert event.seconds >= 1.0
        assert "threading.py:" in event.where

    def test_a_blocking_task_of_a_handler_may_belong_to_any_job(
        self, app: App, blocked_log: BlockedLoopLog
    ) -> None:
        @app.task
        async def careless() -> str:
            async def helper() -> str:
                return blocked_log.wait()

            return await asyncio.create_task(helper())

        @app.task
        async def patient() -> None:
            await over.wait()

        over = asyncio.Event()
        started = threading.Event()
        app.bus.subscribe(JobStarted, lambda event: started.set())
        with app.bus.collect(HandlerBlocked) as published, working(app, concurrency=4):
            other = patient.enqueue()
            assert started.wait(WAIT)
            guilty = careless.enqueue()
            line = guilty.result(WAIT)
            other.cancel()
            app.engine.leases.renew(0.0)
        assert "by one of " in line
        assert guilty.id in line
        assert other.id in line
        assert [(event.id, event.kind) for event in published.events] == [("", "")]
        assert str(published.events[0]).startswith("something unknown has blocked the event loop for ")

    def test_a_repeated_report_is_only_logged(self, app: App, blocked_log: BlockedLoopLog) -> None:
        with app.bus.collect(HandlerBlocked) as published:
            for again in (False, True):
                BlockedLoop(2.0, None, [], again).report(app.bus, [])
        assert len(blocked_log.lines) == 2
        assert "by code outside of any handler at an unknown place" in blocked_log.lines[0]
        assert len(published.events) == 1


class BlockedLoopLog(logging.Handler):
    """The log lines of a worker about a blocked loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._logged = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "has been blocked" in record.getMessage():
            self.lines.append(record.getMessage())
            self._logged.set()

    def wait(self) -> str:
        assert self._logged.wait(WAIT)
        return self.lines[0]


class TestWorker:
    @pytest.mark.parametrize("noticed", ["by the heartbeat", "by the settle"])
    def test_a_lost_lease_is_published_once(self, app: App, noticed: str) -> None:
        started, go_on = threading.Event(), threading.Event()

        @app.task
        def slow() -> None:
            started.set()
            assert go_on.wait(WAIT)

        with app.bus.collect(LeaseLost) as published, working(app) as service:
            handle = slow.enqueue()
            assert started.wait(WAIT)
            app.engine.call(commands.SetQueue(queue="default", paused=True))
            job = handle.record()
            expire(app.ledger, job)
            assert handle.status().state is towpath.State.READY
            if noticed == "by the heartbeat":
                app.engine.leases.renew(0.0)
                published.expect(timeout=WAIT)
            go_on.set()
            published.expect(timeout=WAIT)
            service.stop()
        assert published.events == [LeaseLost(job.id, job.kind, job.queue, 1, job.owner or "")]

    def test_a_job_that_comes_back_while_it_still_runs_here(self, app: App) -> None:
        started, go_on = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
        ended, stopped = threading.Event(), dict[int, bool]()

        @app.task
        def slow() -> int:
            attempt = towpath.current().fence - 1
            started[attempt].set()
            assert go_on[attempt].wait(WAIT)
            stopped[attempt] = towpath.current().cancelled
            ended.set()
            return attempt

        with (
            app.bus.collect(LeaseLost) as published,
            app.bus.collect(JobSettled) as settles,
            working(app, concurrency=4),
        ):
            handle = slow.enqueue()
            assert started[0].wait(WAIT)
            app.engine.call(commands.SetQueue(queue="default", paused=True))
            expire(app.ledger, handle.record())
            app.engine.call(commands.SetQueue(queue="default", paused=False))
            assert started[1].wait(WAIT)
            go_on[0].set()
            published.expect(timeout=WAIT)
            assert ended.wait(WAIT)
            go_on[1].set()
            assert handle.result(WAIT) == 1
        assert stopped == {0: True, 1: False}
        assert [event.id for event in published.events] == [handle.id]
        assert [event.attempt for event in settles.events if event.id == handle.id] == [2]

    def test_how_long_a_job_waited_includes_its_time_in_the_buffer(
        self, tmp_path: Path, clock: ManualClock
    ) -> None:
        with App(f"sqlite:///{tmp_path / 'w.db'}", clock=clock) as app:
            add = app.task(_add)
            handle = add.enqueue(1, 2)
            clock.advance(5)
            app.bus.subscribe(JobsClaimed, lambda event: clock.advance(7), inline=True)
            with app.bus.collect(JobStarted) as published, working(app):
                assert handle.result(WAIT) == 3
        assert [event.waited for event in published.events] == [12.0]

    def test_an_attempt_with_a_refused_settle_has_a_duration(self, app: App) -> None:
        @app.task(max_attempts=1)
        def pays() -> None:
            def write(db: apsw.Connection) -> None:
                raise ValueError("no")

            towpath.current().commit(write)

        with app.bus.collect(JobSettled) as published, working(app):
            pays.enqueue().finished(WAIT)
            [event] = published.expect(timeout=WAIT)
        assert (event.outcome, event.state) == ("retry", "failed")
        assert event.duration > 0
