"""A burst ends when no job is running or could run now, and not before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.waiting import in_thread
from towpath import App, Rate, Retry, Snooze, State, current
from towpath.commands import Append, Claim, Claimed, Done, Query, SetPart, SetQueue, Settle, Spec, Want
from towpath.core.checks import SECOND
from towpath.core.job import ClaimedJob as Given
from towpath.events import BatchCommitted
from towpath.operations.schedules import get_schedule, store_schedules
from towpath.operations.service import is_idle
from towpath.testing.clock import ManualClock


def states(app: App) -> dict[str, int]:
    counts = [view.counts for view in app.ledger.queues().values()]
    return {state.value: found for state in State if (found := sum(getattr(each, state) for each in counts))}


def test_what_runs_may_bring_more(app: App) -> None:
    @app.task
    def split(n: int) -> None:
        for _ in range(2 if n else 0):
            current().spawn(split.of(n - 1))

    @app.task(queue="other")
    async def join() -> int:
        return 1

    for _ in range(20):
        app.group([split.of(3), split.of(3)], then=join.of())
        app.run(burst=True, concurrency=3)
        assert states(app).keys() == {"done"}
    assert states(app) == {"done": 20 * (2 * 15 + 1)}


def test_an_empty_ledger_is_at_rest(app: App) -> None:
    app.task(queue="hall")(print)
    asyncio.run(app.arun(burst=True))


def test_a_burst_on_a_loop_that_goes_on(app: App) -> None:
    @app.task
    async def double(n: int) -> int:
        return 2 * n

    async def main() -> list[int]:
        handles = [await double.aenqueue(n) for n in range(50)]
        await app.arun(burst=True)
        first = [await each.aresult(0) for each in handles]
        again = await double.aenqueue(50)
        await app.arun(burst=True)
        return [*first, await again.aresult(0)]

    assert asyncio.run(main()) == [2 * n for n in range(51)]


def test_what_is_for_later_stays(app: App) -> None:
    @app.task
    def fails() -> None:
        raise Retry(after=600)

    @app.task
    def sleeps() -> None:
        raise Snooze(600)

    @app.task
    def fine() -> None: ...

    waits = fine.options(after=[fails.enqueue()]).enqueue()
    sleeps.enqueue()
    fine.options(delay=600).enqueue()
    fine.enqueue()
    app.run(burst=True)
    assert states(app) == {"blocked": 1, "scheduled": 3, "done": 1}
    assert waits.status().state is State.BLOCKED


def test_a_retry_at_once_is_tried_again(app: App) -> None:
    @app.task
    def second_time() -> None:
        if current().attempt == 1:
            raise Retry(after=0)

    second_time.enqueue()
    app.run(burst=True)
    assert states(app) == {"done": 1}


@pytest.mark.parametrize(
    ("hold", "left"),
    [
        (SetQueue(queue="q", paused=True), 6),
        (SetQueue(queue="q", cap=0), 6),
        (SetQueue(queue="q", not_before=2**52), 6),
        (SetQueue(queue="q", rate=Rate(1000), not_before=2**52), 6),
        (SetPart(queue="q", part="p", paused=True), 2),
        (SetPart(queue="q", part="p", cap=0), 2),
        (SetPart(queue="q", part="p", not_before=2**52), 2),
    ],
)
def test_what_is_held_by_hand_is_left(app: App, hold: SetQueue | SetPart, left: int) -> None:
    @app.task(queue="q")
    def fine() -> None: ...

    app.engine.call(hold)
    for n in range(6):
        fine.options(part=["p", "r", None][n % 3]).enqueue()
    app.run(burst=True)
    assert states(app) == {"ready": left} | ({"done": 6 - left} if left < 6 else {})


def test_a_rate_is_waited_for(app: App) -> None:
    @app.task(queue="q")
    def fine() -> None: ...

    app.engine.call(SetQueue(queue="q", rate=Rate(50)))
    app.engine.call(SetPart(queue="q", part="p", rate=Rate(20)))
    for n in range(10):
        fine.options(part="p" if n % 2 else None).enqueue()
    app.run(burst=True)
    assert states(app) == {"done": 10}


def test_a_serial_key_is_waited_for(app: App) -> None:
    @app.task
    async def fine() -> None:
        await asyncio.sleep(0)

    for _ in range(10):
        fine.options(key="one", on_conflict="serial").enqueue()
    app.run(burst=True)
    assert states(app) == {"done": 10}


def taken(app: App, seconds: float) -> Given:
    answer = app.engine.call(Claim(owner="other", wants=(Want("*"),), lease=round(seconds * SECOND)))
    assert isinstance(answer, Claimed)
    [claim] = answer.claims
    return claim


def test_others_that_work_are_waited_for(app: App) -> None:
    @app.task(queue="q")
    def fine() -> None: ...

    fine.enqueue()
    claim = taken(app, 600)
    with app.bus.collect(BatchCommitted) as batches:
        ended = in_thread(lambda: app.run(burst=True))
        # By now at least one claim was empty, and the end of the burst was checked.
        batches.expect(5, timeout=20)
    more = Spec(id="more", queue="q", kind=fine.kind, payload=b"{}")
    app.engine.call(Settle(claim.id, claim.fence, Done(), spawn=(more,)))
    ended()
    assert states(app) == {"done": 2}


def test_what_the_dead_held_is_waited_for(app: App) -> None:
    @app.task(queue="q")
    def fine() -> None: ...

    fine.enqueue()
    taken(app, 0.3)
    app.run(burst=True)
    assert states(app) == {"done": 1}


def test_other_queues_are_not_its_business(app: App) -> None:
    @app.task(queue="mine")
    def fine() -> None: ...

    app.engine.call(Append((Spec(id="theirs", queue="theirs"),)))
    taken(app, 600)
    app.engine.call(Append((Spec(id="theirs too", queue="theirs"),)))
    fine.enqueue()
    app.run(burst=True)
    assert states(app) == {"ready": 1, "running": 1, "done": 1}


def test_a_job_of_an_unknown_kind_does_not_prolong_it(app: App) -> None:
    @app.task(queue="q")
    def fine() -> None: ...

    app.engine.call(Append((Spec(id="strange", queue="q", kind="strange"),)))
    fine.enqueue()
    app.run(burst=True)
    assert states(app) == {"scheduled": 1, "done": 1}


def test_schedules_that_are_due_belong_to_it() -> None:
    clock = ManualClock()
    with App("memory://", clock=clock) as app:

        @app.every(3600, missed="once")
        def tick() -> None: ...

        store_schedules(app.engine, app._registry.schedules)
        app.run(burst=True)
        assert states(app) == {}
        clock.advance(7200)
        app.run(burst=True)
        assert states(app).keys() == {"done"}
        assert {job.kind for job in app.ledger.find(Query()).jobs} == {tick.kind}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_all_fires_that_were_missed_belong_to_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Also into a full queue. One check fires a hundred missed times."""
    url = (
        request.getfixturevalue("postgres_url") if kind == "postgres" else f"sqlite:///{tmp_path / 'work.db'}"
    )
    clock = ManualClock()
    with App(url, clock=clock) as app:

        @app.every(60, name="minutely", missed="all")
        def tick() -> None: ...

        app.run(burst=True)
        app.queue("default").configure(capacity=1)
        clock.advance(24 * 3600)
        app.run(burst=True)
        assert states(app) == {"done": 1440}
        assert get_schedule(app.engine, "minutely").next_at > clock.now()


def test_rest_is_read_from_the_ledger(app: App) -> None:
    app.engine.call(Append((Spec(id="a", queue="q"),)))
    now = app.engine.clock.now()
    assert not is_idle(app.ledger, "q", now)
    assert is_idle(app.ledger, "other,r*", now)
    claim = taken(app, 600)
    assert not is_idle(app.ledger, "other,q*", now)
    app.engine.call(Settle(claim.id, claim.fence, Done()))
    assert is_idle(app.ledger, "*", now)


def test_a_ledger_that_cannot_be_read_now_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from towpath import errors
    from towpath.operations import service

    asked: list[int] = []

    def sometimes(*args: object) -> bool:
        asked.append(1)
        if len(asked) == 1:
            raise errors.LedgerBusy(path="here", seconds=1)
        return is_idle(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(service, "is_idle", sometimes)
    with App(f"sqlite:///{tmp_path / 'work.db'}") as app:
        app.task(queue="hall")(print)
        app.run(burst=True)
    assert len(asked) == 2
