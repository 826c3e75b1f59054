"""Durable functions with undos: the rollback of a job that failed or was canceled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from tests.support.running import working
from tests.support.waiting import WAIT, until
from towpath import App, State, current, step
from towpath.core.commands import Command
from towpath.core.lanes import FLOWS
from towpath.core.steps import SagaJob, StepRecord, UndoRecord, decode_saga
from towpath.core.views import NoteQuery, Query
from towpath.errors import InvalidInput, JobCanceled, JobFailed
from towpath.flows.kinds import PlanState
from towpath.flows.plan import Plan
from towpath.flows.saga import end_saga, plan_id, rollback_steps
from towpath.operations.flows import EngineDoor
from towpath.tasks.task import Task


class Trip:
    """The task `book` with three steps and their undos; `log` has the effects in their order."""

    def __init__(self, app: App, **options: Any) -> None:
        self.app = app
        self.log: list[str] = []
        self.fails = True
        self.undo_fails: set[str] = set()

        @app.task(name="cancel", max_attempts=1)
        def cancel(what: str) -> None:
            self.log.append(f"undo {what}")
            if what in self.undo_fails:
                raise ValueError(what)

        @app.task(name="acancel")
        async def acancel(what: str) -> None:
            self.log.append(f"undo {what}")

        @app.task(name="__main__.book", **{"max_attempts": 1, **options})
        def book() -> str:
            step(self.reserve, "hotel", undo=cancel.of("hotel"))
            step(self.reserve, "map")
            step(self.reserve, "flight", undo=acancel.of("flight"))
            step(self.last, "car", undo=cancel.of("car"))
            if self.fails:
                raise ConnectionError("no car")
            return "booked"

        self.book: Task[[], str] = book
        self.cancel = cancel

    def reserve(self, what: str) -> str:
        self.log.append(what)
        return what

    def last(self, what: str) -> str:
        return self.reserve(what)

    @property
    def undone(self) -> list[str]:
        return [each for each in self.log if each.startswith("undo")]


ALL = ["undo car", "undo flight", "undo hotel"]


def kept(app: App) -> list[str]:
    return [note.key for prefix in ("step/", "saga/") for note in _notes(app, prefix)]


def _notes(app: App, prefix: str) -> Any:
    return app.ledger.notes(NoteQuery(prefix=prefix)).notes


def only_plan(app: App) -> Any:
    [plan] = app.plans.list(prefix="saga-")
    return plan


def test_a_failure_undoes_the_steps_in_reverse_order(app: App) -> None:
    trip = Trip(app)
    with working(app):
        job = trip.book.options(correlation_id="trip 7").enqueue()
        with pytest.raises(JobFailed, match="no car"):
            job.result(timeout=WAIT)
        until(lambda: app.plans.list(prefix=f"saga-{job.id}"))
        plan = app.plans.get(only_plan(app).id).wait(timeout=WAIT)
    assert trip.log == ["hotel", "map", "flight", "car", *ALL]
    assert (plan.state, plan.name, plan.left) == (PlanState.ROLLED_BACK, "main__.book", ())
    assert plan.why == f"job {job.id} is failed (exhausted)"
    steps = app.plans.get(plan.id).steps()
    assert [(each.name, each.state, each.undo) for each in steps] == [
        (name, State.DONE, State.DONE)
        for name in ("0001-Trip.reserve", "0003-Trip.reserve", "0004-Trip.last")
    ]
    seq = app.ledger.get(job.id).seq  # type: ignore[union-attr]
    assert (plan.id, kept(app)) == (plan_id(job.id, seq), [f"saga/{seq}"])
    undos = app.ledger.find(Query(correlation_id="trip 7", oldest_first=True)).jobs
    assert [each.id.rpartition("/")[2] for each in undos] == [job.id, "undo", "undo", "undo"]


def test_an_async_function_is_a_saga_too(app: App) -> None:
    trip = Trip(app)

    async def areserve(what: str) -> str:
        return trip.reserve(what)

    @app.task(max_attempts=1)
    async def abook() -> None:
        await asyncio.gather(
            *[step(areserve, what, undo=trip.cancel.of(what)) for what in ("hotel", "flight")]
        )
        raise ConnectionError

    with working(app):
        job = abook.enqueue()
        until(lambda: app.plans.list(prefix=f"saga-{job.id}"))
        plan = app.plans.get(only_plan(app).id).wait(timeout=WAIT)
    assert (plan.state, trip.undone) == (PlanState.ROLLED_BACK, ["undo flight", "undo hotel"])


@pytest.mark.ledgers("memory", "sqlite")
def test_a_job_that_is_done_has_no_rollback(app: App) -> None:
    trip = Trip(app)
    trip.fails = False
    with app.testing(database=True) as bench:
        job = trip.book.enqueue()
        bench.drain()
        assert (job.result(), trip.undone, app.plans.list(), kept(app)) == ("booked", [], [], [])


@pytest.mark.ledgers("memory")
def test_a_retry_keeps_the_undos_of_earlier_attempts(app: App) -> None:
    trip = Trip(app, max_attempts=2, backoff=[10])
    with app.testing() as bench:
        job = trip.book.enqueue()
        bench.drain()
        assert (job.status().state, trip.undone) == (State.SCHEDULED, [])
        bench.advance(10)
        assert job.status().state is State.FAILED
        assert trip.log == ["hotel", "map", "flight", "car", *ALL]


@pytest.mark.ledgers("memory")
def test_a_step_that_may_have_taken_effect_is_undone(app: App) -> None:
    trip = Trip(app)

    def last(what: str) -> str:
        raise ConnectionError(what)

    trip.last = last  # type: ignore[method-assign]
    with app.testing() as bench:
        trip.book.enqueue()
        bench.drain()
        assert trip.log == ["hotel", "map", "flight", *ALL]


@pytest.mark.ledgers("memory")
def test_the_undo_is_durable_before_the_function_is_called(app: App) -> None:
    trip = Trip(app)
    found: list[list[str]] = []

    def last(what: str) -> str:
        found.append([note.key.rpartition("/")[2] for note in _notes(app, "step/") if b"undo" in note.value])
        return what

    trip.last = last  # type: ignore[method-assign]
    with app.testing() as bench:
        trip.book.enqueue()
        bench.drain()
    assert found == [["0001", "0003", "0004"]]


@pytest.mark.ledgers("memory", "sqlite")
def test_a_canceled_job_is_rolled_back(app: App) -> None:
    """Canceled while it runs: no further step begins."""
    trip = Trip(app)
    begun, go = threading.Event(), threading.Event()

    def last(what: str) -> str:
        begun.set()
        go.wait(WAIT)
        return trip.reserve(what)

    trip.last = last  # type: ignore[method-assign]
    with working(app):
        job = trip.book.enqueue()
        begun.wait(WAIT)
        job.cancel()
        go.set()
        with pytest.raises((JobCanceled, JobFailed)):
            job.result(timeout=WAIT)
        until(lambda: app.plans.list(prefix=f"saga-{job.id}"))
        app.plans.get(only_plan(app).id).wait(timeout=WAIT)
    assert trip.undone == ALL


@pytest.mark.ledgers("memory")
def test_a_job_that_is_canceled_between_attempts_is_rolled_back(app: App) -> None:
    trip = Trip(app, max_attempts=5, backoff=[100])
    with app.testing() as bench:
        job = trip.book.enqueue()
        bench.drain()
        job.cancel()
        bench.drain()
        assert (job.status().state, trip.undone) == (State.CANCELED, ALL)
        assert only_plan(app).why == f"job {job.id} is canceled (requested)"


@pytest.mark.ledgers("memory", "sqlite")
def test_a_failing_undo_does_not_stop_the_others(app: App) -> None:
    trip = Trip(app)
    trip.undo_fails = {"car"}
    with app.testing(database=True) as bench:
        trip.book.enqueue()
        bench.drain()
        bench.advance(600)
        plan = only_plan(app)
        assert trip.undone == ALL
        assert (plan.state, plan.left) == (PlanState.ROLLBACK_FAILED, ("0004-Trip.last",))
        # A person repairs the cause.
        trip.undo_fails.clear()
        app.plans.get(plan.id).retry(by="ada")
        bench.drain()
        bench.advance(600)
        assert trip.undone == [*ALL, "undo car"]
        assert only_plan(app).state is PlanState.ROLLED_BACK


@pytest.mark.ledgers("memory")
def test_different_undos_of_two_attempts_both_run(app: App) -> None:
    trip = Trip(app)

    @app.task(max_attempts=2, backoff=[0])
    def work() -> None:
        step(fail, undo=trip.cancel.of(f"attempt {current().attempt}"))

    def fail() -> None:
        raise ConnectionError

    with app.testing() as bench:
        work.enqueue()
        bench.drain()
        bench.advance(1)
        assert trip.undone == ["undo attempt 2", "undo attempt 1"]


@contextmanager
def flows_paused(app: App) -> Iterator[None]:
    app.queue(FLOWS).pause()
    try:
        yield
    finally:
        app.queue(FLOWS).resume()


@pytest.mark.ledgers("memory")
def test_a_job_that_is_revived_before_its_rollback_goes_on(app: App) -> None:
    trip = Trip(app)
    with app.testing() as bench:
        job = trip.book.enqueue()
        with flows_paused(app):
            bench.drain()
            assert job.status().state is State.FAILED
            trip.fails = False
            job.retry()
            bench.drain()
        bench.drain()
        assert (job.result(), trip.log) == ("booked", ["hotel", "map", "flight", "car"])
        assert (app.plans.list(), kept(app)) == ([], [])


@pytest.mark.ledgers("memory")
def test_the_rollback_waits_for_the_next_end_of_a_revived_job(app: App) -> None:
    trip = Trip(app)
    with app.testing() as bench:
        job = trip.book.enqueue()
        with flows_paused(app):
            bench.drain()
        app.queue("default").pause()
        job.retry()
        bench.drain()
        assert (job.status().state, trip.undone, app.plans.list()) == (State.READY, [], [])
        app.queue("default").resume()
        bench.drain()
        assert (job.status().state, trip.undone) == (State.FAILED, ALL)


@pytest.mark.ledgers("memory")
def test_a_job_that_is_revived_while_its_rollback_begins_is_left_alone(app: App) -> None:
    """Between the first look at the job and the note that forbids further steps."""
    trip = Trip(app)

    class Reviving(EngineDoor):
        def apply(self, commands: Sequence[Command]) -> Any:
            if job.status().state is State.FAILED:
                job.retry()
            return super().apply(commands)

    with app.testing() as bench:
        job = trip.book.enqueue()
        with flows_paused(app):
            bench.drain()
            told = SagaJob(job.id, 1, 1)
            found = end_saga(Reviving(app.engine), told)
        assert [decode_saga(spec.payload) for spec in found.spawn] == [SagaJob(job.id, 1, 1, 1)]
        assert (found.notes, app.plans.list(), _notes(app, "saga/")) == ((), [], ())
        trip.fails = False
        bench.drain()
        assert (job.result(), trip.undone) == ("booked", [])


@pytest.mark.ledgers("memory")
def test_a_job_that_was_rolled_back_does_not_run_again(app: App) -> None:
    trip = Trip(app)
    with app.testing() as bench:
        job = trip.book.enqueue()
        bench.drain()
        job.retry()
        bench.drain()
        assert job.status().state is State.FAILED
        assert f"the steps of job {job.id} were rolled back: enqueue a new job" in (job.status().error or "")
        assert trip.log == ["hotel", "map", "flight", "car", *ALL]


@pytest.mark.ledgers("memory", "sqlite", "postgres")
def test_a_rollback_that_is_begun_twice_is_one_rollback(app: App) -> None:
    """The worker of the job that begins the rollback dies after it has stored the plan."""
    trip = Trip(app)
    app.queue(FLOWS).pause()
    with working(app):
        job = trip.book.enqueue()
        with pytest.raises(JobFailed):
            job.result(timeout=WAIT)
        record = app.ledger.get(job.id)
        assert record is not None
        saga = app.ledger.get(f"saga/{record.seq}/1.0")
        assert saga is not None
        told = decode_saga(saga.payload)
        assert told == SagaJob(job.id, record.seq, 1)
        first, second = (end_saga(EngineDoor(app.engine), told) for _ in range(2))
        assert first == second
        assert len(first.notes) == 4
        app.queue(FLOWS).resume()
        app.plans.get(only_plan(app).id).wait(timeout=WAIT)
    assert trip.undone == ALL


def _apart() -> None: ...


@pytest.mark.ledgers("memory")
def test_wrong_undos_are_refused_before_the_call(app: App) -> None:
    trip = Trip(app)

    apart = app.task(process=True, name="apart")(_apart)

    @app.task(max_attempts=1)
    def work(n: int) -> None:
        undo: Any = [trip.cancel, apart.of(), "cancel"][n]
        step(trip.reserve, "hotel", undo=undo)

    with app.testing() as bench:
        jobs = [work.enqueue(n) for n in range(3)]
        bench.drain()
        errors = [job.status().error or "" for job in jobs]
    assert "cancel.of(...)" in errors[0]
    assert "a call of a task without process=True" in errors[1]
    assert InvalidInput.__name__ in errors[2]
    assert trip.log == []


def test_the_steps_of_a_rollback() -> None:
    """Pure: names that a plan allows, in the order of the steps."""
    undo = UndoRecord("cancel", msgspec.Raw(b'{"what":"x"}'), "shop/mail", 3)
    other = UndoRecord("cancel", msgspec.Raw(b"{}"), "default", 1)
    records = {
        2: StepRecord(7, "Shop.<locals>.ship it!", undo=(undo, other)),
        1: StepRecord(7, "charge", msgspec.Raw(b"1"), (undo,)),
        3: StepRecord(7, "plain", msgspec.Raw(b"1")),
    }
    found = [step for step, _ in rollback_steps(records)]
    assert [(each.name, each.after, each.node, each.description) for each in found] == [
        ("0001-charge", (), "shop-mail", "finished"),
        ("0002-Shop.-locals-.ship-it", ("0001-charge",), "shop-mail", "may have begun"),
        ("0002.1-Shop.-locals-.ship-it", ("0002-Shop.-locals-.ship-it",), "default", "may have begun"),
    ]
    assert Plan("saga", tuple(found)).content_hash == Plan("saga", tuple(found)).content_hash
    assert plan_id("orders/é 17", 5) == "saga-orders-17-5"
    assert plan_id("//", 5) == "saga-job-5"
