"""`towpath.step`: calls inside a handler that run once."""

from __future__ import annotations

import asyncio
import functools
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.running import working
from tests.support.waiting import WAIT
from towpath import App, JobHandle, State, current, step
from towpath.commands import NoteView, Progress, Release, Settle
from towpath.core.steps import read_steps
from towpath.core.views import NoteQuery
from towpath.errors import InvalidInput, LedgerBusy, NotInJob, StepsChanged
from towpath.tasks import steps
from towpath.tasks.codec import decode


def kept(app: App) -> list[NoteView]:
    return list(app.ledger.notes(NoteQuery(prefix="step/", limit=1000)).notes)


def error_of(job: JobHandle[Any]) -> str:
    return (job.status().error or "").splitlines()[0]


class Counted:
    """Functions that count their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def twice(self, n: int) -> int:
        self.calls.append(n)
        return 2 * n

    async def atwice(self, n: int) -> int:
        self.calls.append(n)
        return 2 * n

    def fail_once(self, n: int) -> int:
        if n not in self.calls:
            self.calls.append(n)
            raise ConnectionError(n)
        return self.twice(n)


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture(params=["def", "async def"])
def form(request: pytest.FixtureRequest) -> str:
    form: str = request.param
    return form


def test_a_retry_goes_on_after_the_last_finished_step(app: App, counted: Counted, form: str) -> None:
    if form == "def":

        @app.task(max_attempts=3, backoff=[0])
        def work(n: int) -> list[int]:
            found = [step(counted.twice, n), step(counted.twice, n + 1)]
            if current().attempt == 1:
                raise ConnectionError
            return [*found, step(counted.twice, n + 2), current().attempt]

        job = work.enqueue(1)
    else:

        @app.task(max_attempts=3, backoff=[0])
        async def awork(n: int) -> list[int]:
            found = [await step(counted.atwice, n), await step(counted.atwice, n + 1)]
            if current().attempt == 1:
                raise ConnectionError
            return [*found, await step(counted.atwice, n + 2), current().attempt]

        job = awork.enqueue(1)
    with working(app):
        assert job.result(timeout=WAIT) == [2, 4, 6, 2]
    assert counted.calls == [1, 2, 3]
    assert kept(app) == []


@pytest.mark.ledgers("memory")
def test_a_function_that_raises_runs_again(app: App, counted: Counted) -> None:
    @app.task(max_attempts=3, backoff=[10])
    def work() -> list[int]:
        return [step(counted.twice, 1), step(counted.fail_once, 7)]

    with app.testing() as bench:
        job = work.enqueue()
        bench.drain()
        assert [note.key for note in kept(app)] == [f"step/{job.id}/0001"]
        bench.advance(10)
        assert job.result() == [2, 14]
        assert counted.calls == [1, 7, 7]
        assert kept(app) == []


@pytest.mark.ledgers("memory")
def test_an_error_that_the_handler_catches_keeps_the_order(app: App, counted: Counted) -> None:
    """The number of a step that raised is taken."""

    @app.task(max_attempts=3, backoff=[0])
    def work() -> int:
        try:
            step(counted.fail_once, 7)
        except ConnectionError:
            return step(counted.twice, 1, name="instead")
        return 0

    with app.testing() as bench:
        job = work.enqueue()
        bench.drain()
        assert job.result() == 2
        assert counted.calls == [7, 1]


@pytest.mark.ledgers("memory")
def test_the_steps_of_a_failed_job_stay_for_a_revival(app: App, counted: Counted) -> None:
    fails = [True]

    @app.task(max_attempts=1)
    def work() -> int:
        found = step(counted.twice, 4)
        if fails:
            raise ValueError
        return found

    with app.testing() as bench:
        job = work.enqueue()
        bench.drain()
        assert job.status().state is State.FAILED
        [note] = kept(app)
        assert note.expires_at is not None
        fails.clear()
        job.retry()
        bench.drain()
        assert (job.result(), counted.calls, kept(app)) == (8, [4], [])


@pytest.mark.ledgers("sqlite")
def test_a_changed_order_ends_the_job(app: App, counted: Counted) -> None:
    @app.task(max_attempts=5, backoff=[0])
    def work() -> None:
        first, second = ("charge", "ship") if current().attempt == 1 else ("ship", "charge")
        step(counted.twice, 1, name=first)
        if current().attempt == 1:
            raise ConnectionError
        step(counted.twice, 2, name=second)

    with app.testing() as bench:
        job = work.enqueue()
        bench.drain()
        bench.advance(1)
        status = job.status()
        assert (status.state, status.reason, status.attempts) == (State.FAILED, "fatal", 2)
        assert error_of(job) == str(StepsChanged(id=job.id, number=1, recorded="charge", came="ship"))
        assert counted.calls == [1]


@pytest.mark.ledgers("memory")
def test_a_handler_that_catches_the_changed_order_runs_no_further_step(app: App, counted: Counted) -> None:
    @app.task(max_attempts=2, backoff=[0])
    def work() -> int:
        if current().attempt == 1:
            step(counted.twice, 1, name="old")
            raise ConnectionError
        for name in ("new", "newer"):
            with pytest.raises(
                StepsChanged, match="step 1 is new, but an earlier attempt recorded old at this place"
            ):
                step(counted.twice, 2, name=name)
        return len(counted.calls)

    with app.testing() as bench:
        job = work.enqueue()
        bench.drain()
        bench.advance(1)
        assert job.result() == 1


@pytest.mark.ledgers("memory")
def test_the_default_name_is_that_of_the_function(app: App, counted: Counted) -> None:
    @app.task
    def named(n: int) -> int:
        return n

    @app.task(max_attempts=1)
    def work() -> None:
        step(counted.twice, 1)
        step(functools.partial(counted.twice, 2))
        step(lambda: 3)
        step(named, 4)
        raise ValueError

    with app.testing() as bench:
        work.enqueue()
        bench.drain()
        names = [decode(note.value)["name"] for note in kept(app)]
    here = "test_the_default_name_is_that_of_the_function.<locals>"
    assert names == ["Counted.twice", "Counted.twice", f"{here}.work.<locals>.<lambda>", f"{here}.named"]


@dataclass
class Receipt:
    number: int
    lines: tuple[str, ...] = ()


@pytest.mark.ledgers("memory")
def test_results_have_the_annotated_type_in_every_attempt(app: App) -> None:
    def receipt() -> Receipt:
        return Receipt(7, ("a",))

    def plain():  # type: ignore[no-untyped-def]  # noqa: ANN202
        return Receipt(7, ("a",))

    def nothing() -> None:
        return None

    found: list[Any] = []

    @app.task(max_attempts=2, backoff=[0])
    def work() -> None:
        found.append((step(receipt), step(plain), step(nothing)))
        if current().attempt == 1:
            raise ConnectionError

    with app.testing() as bench:
        work.enqueue()
        bench.drain()
        bench.advance(1)
    assert found == [(Receipt(7, ("a",)), {"number": 7, "lines": ["a"]}, None)] * 2


@pytest.mark.ledgers("memory")
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (object, "returned is <object object at"),
        (lambda: float("nan"), "nan"),
        (lambda: "x" * 300_000, "it must be at most 262144 bytes; store it elsewhere"),
    ],
)
def test_a_result_that_cannot_be_kept_ends_the_job(app: App, function: Any, words: str) -> None:
    calls: list[int] = []

    @app.task(max_attempts=5, backoff=[0])
    def work() -> None:
        calls.append(1)
        step(function, name="large")

    with app.testing() as bench:
        job = work.enqueue()
        bench.drain()
        assert (job.status().state, len(calls)) == (State.FAILED, 1)
        assert words in error_of(job)
        assert kept(app) == []


@pytest.mark.ledgers("memory")
def test_a_wrong_annotation_is_found_before_the_call(app: App, counted: Counted) -> None:
    def wrong(n: int) -> threading.Event | int:
        counted.calls.append(n)
        return threading.Event()

    @app.task(max_attempts=1)
    def work() -> None:
        step(wrong, 1)

    with app.testing() as bench:
        job = work.enqueue()
        bench.drain()
        assert "without a JSON form" in error_of(job)
        assert counted.calls == []


@pytest.mark.ledgers("sqlite")
def test_a_job_has_at_most_a_thousand_steps(app: App, counted: Counted) -> None:
    @app.task
    def work(n: int) -> int:
        for each in range(n):
            step(counted.twice, each)
        return len(kept(app))

    with app.testing() as bench:
        most, too_many = work.enqueue(steps.MAX_STEPS), work.enqueue(steps.MAX_STEPS + 1)
        bench.drain()
        assert most.result() == steps.MAX_STEPS
        assert too_many.status().state is State.FAILED
        assert "a job has at most 1000 steps" in error_of(too_many)
        assert {note.key.split("/")[1] for note in kept(app)} == {too_many.id}


@pytest.mark.ledgers("memory")
def test_a_step_inside_a_step_is_refused(app: App, counted: Counted, form: str) -> None:
    if form == "def":

        @app.task(max_attempts=1)
        def work() -> None:
            step(lambda: step(counted.twice, 1), name="outer")

        run = work
    else:

        async def outer() -> None:
            await asyncio.to_thread(step, counted.twice, 1)

        @app.task(max_attempts=1)
        async def awork() -> None:
            await step(outer, name="outer")

        run = awork
    with app.testing() as bench:
        job = run.enqueue()
        bench.drain()
        assert "step Counted.twice is called inside step outer: call its function directly" in error_of(job)
        assert counted.calls == []


@pytest.mark.ledgers("memory")
def test_the_form_follows_the_handler(app: App, counted: Counted) -> None:
    @app.task(max_attempts=1)
    async def blocks() -> None:
        step(counted.twice, 1)

    @app.task(max_attempts=1)
    def awaits() -> None:
        step(counted.atwice, 1)  # type: ignore[unused-coroutine]

    @app.task(max_attempts=1)
    def forgets() -> None:
        step(3)  # type: ignore[call-overload]

    with working(app):
        jobs = [blocks.enqueue(), awaits.enqueue(), forgets.enqueue()]
        for job in jobs:
            with pytest.raises(Exception, match="failed"):
                job.result(timeout=WAIT)
    assert "write `await step(asyncio.to_thread, function, ...)`" in error_of(jobs[0])
    assert "the handler is a plain def: make it an async def" in error_of(jobs[1])
    assert "step is 3; it must be a function and its arguments" in error_of(jobs[2])
    assert counted.calls == []


def test_there_are_no_steps_outside_a_handler(counted: Counted) -> None:
    with pytest.raises(NotInJob):
        step(counted.twice, 1)
    with pytest.raises(InvalidInput):
        steps._name_of("name")


@pytest.mark.ledgers("memory", "sqlite")
def test_steps_side_by_side_have_numbers_in_the_order_of_their_calls(app: App, counted: Counted) -> None:
    """The second step has no result when the others have: only it runs again."""

    async def slow(n: int) -> int:
        if n == 2 and current().attempt == 1:
            await asyncio.Event().wait()
        return await counted.atwice(n)

    @app.task(max_attempts=2, backoff=[0])
    async def work() -> list[int]:
        calls = [asyncio.ensure_future(step(slow, n, name=f"slow {n}")) for n in (1, 2, 3)]
        if current().attempt == 1:
            await asyncio.gather(calls[0], calls[2])
            calls[1].cancel()
            raise ConnectionError
        return [*await asyncio.gather(*calls), await step(asyncio.to_thread, counted.twice, 4)]

    with working(app):
        assert work.enqueue().result(timeout=WAIT) == [2, 4, 6, 8]
    assert sorted(counted.calls[:2]) == [1, 3]
    assert counted.calls[2:] == [2, 4]


@pytest.mark.ledgers("memory", "sqlite")
def test_no_step_begins_after_a_request_to_stop(app: App, counted: Counted) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(n: int) -> int:
        begun.set()
        go.wait(WAIT)
        return counted.twice(n)

    @app.task
    def work() -> None:
        step(wait, 1)
        step(counted.twice, 2)

    with working(app):
        job = work.enqueue()
        begun.wait(WAIT)
        job.cancel()
        go.set()
        with pytest.raises(Exception, match="canceled"):
            job.result(timeout=WAIT)
    assert counted.calls == [1]


@pytest.mark.ledgers("sqlite")
def test_a_lost_claim_keeps_nothing(app: App, counted: Counted, form: str) -> None:
    """A worker whose lease expired in a step finds out when it stores the result."""

    def lose(n: int) -> int:
        app.job(current().id).cancel()
        app.engine.call(Settle(current().id, current().fence, Release()))
        return counted.twice(n)

    async def alose(n: int) -> int:
        return await asyncio.to_thread(lose, n)

    ran: list[str] = []
    if form == "def":

        @app.task
        def work() -> None:
            step(lose, 1)
            ran.append("after")

        job = work.enqueue()
    else:

        @app.task
        async def awork() -> None:
            await step(alose, 1)
            ran.append("after")

        job = awork.enqueue()
    with working(app):
        with pytest.raises(Exception, match="canceled"):
            job.result(timeout=WAIT)
    assert (counted.calls, ran, kept(app)) == ([1], [], [])


@pytest.mark.ledgers("sqlite")
def test_a_result_waits_for_a_ledger_that_is_away(
    app: App, counted: Counted, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function has run and must not run again because of an outage."""
    real, failures = app.ledger.apply, [LedgerBusy(path="x", seconds=0.1) for _ in range(3)]

    def apply(commands: Any, now: int | None = None) -> Any:
        if failures and any(isinstance(each, Progress) for each in commands):
            raise failures.pop()
        return real(commands, now)

    if form == "def":

        @app.task(max_attempts=1)
        def work() -> int:
            return step(counted.twice, 1)

        job = work.enqueue()
    else:

        @app.task(max_attempts=1)
        async def awork() -> int:
            return await step(counted.atwice, 1)

        job = awork.enqueue()
    monkeypatch.setattr(app.ledger, "apply", apply)
    with working(app):
        assert job.result(timeout=WAIT) == 2
    assert (counted.calls, failures) == ([1], [])


@pytest.mark.ledgers("memory")
def test_a_job_with_the_id_of_an_earlier_one_has_its_own_steps(app: App, counted: Counted) -> None:
    """Also where the id of one job begins with that of another."""

    @app.task(max_attempts=2, backoff=[0])
    def work(n: int, fails: bool) -> int:
        found = step(counted.twice, n)
        if fails or current().attempt == 1:
            raise ConnectionError
        return found + step(counted.twice, n + 1)

    with app.testing() as bench:
        for id in ("a", "a/0002"):
            work.options(id=id).enqueue(1, True)
        bench.drain()
        bench.advance(1)
        assert [note.key for note in kept(app)] == ["step/a/0001", "step/a/0002/0001"]
        assert read_steps(app.ledger.notes, "a", 1).keys() == {1}
        assert read_steps(app.ledger.notes, "a", 99) == {}
