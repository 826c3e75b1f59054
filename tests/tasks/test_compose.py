"""Chains, groups, batches and the fan-in of results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.running import work
from towpath import App, State, commands, current
from towpath.commands import Query
from towpath.errors import InvalidInput, JobCanceled, JobFailed, QueueFull, UnknownDependency


def add(a: int, b: int = 0) -> int:
    if a < 0:
        raise ValueError("negative")
    return a + b


def total(errors: bool = False) -> list[Any]:
    return [
        type(each).__name__ if isinstance(each, Exception) else each
        for each in current().results(errors=errors)
    ]


def test_a_chain(app: App) -> None:
    task, last = app.task(add), app.task(total)
    handle = app.chain(task.of(1), task.of(2), last.of())
    assert handle.status().state is State.BLOCKED
    assert work(app) == 3
    assert handle.result() == [2]
    assert asyncio.run(app.achain(task.of(5))).status().state is State.READY


def test_a_chain_ends_with_its_first_failure(app: App) -> None:
    task = app.task(max_attempts=1)(add)
    handle = app.chain(task.of(-1), task.of(2), task.of(3))
    assert work(app) == 1
    with pytest.raises(JobFailed, match="dependency"):
        handle.result(1)


def test_a_chain_may_wait_for_others(app: App) -> None:
    task, last = app.task(add), app.task(total)
    first, second = task.enqueue(1), task.enqueue(2)
    handle = app.chain(task.of(3), last.options(after=[second, first]).of())
    work(app)
    assert handle.result() == [2, 1, 3]


def test_an_empty_chain_and_an_empty_group(app: App) -> None:
    with pytest.raises(InvalidInput, match="chain"):
        app.chain()
    with pytest.raises(InvalidInput, match="group"):
        app.group([])
    with pytest.raises(InvalidInput, match="on_failure"):
        app.group([app.task(add).of(1)], on_failure="explode")  # type: ignore[arg-type]


def test_a_group(app: App) -> None:
    task, last = app.task(add), app.task(total)
    group = app.group((task.of(n) for n in range(4)), then=last.of())
    assert group.status().total == 4
    assert group.then is not None
    assert group.then.status().state is State.BLOCKED
    assert work(app) == 5
    assert group.result(1) == [0, 1, 2, 3]
    assert group.then.result(1) == [0, 1, 2, 3]
    assert group.closed().outcome is State.DONE


def test_an_async_group(app: App) -> None:
    task = app.task(add)

    async def main() -> list[int]:
        group = await app.agroup([task.of(1), task.of(2)])
        await asyncio.to_thread(work, app)
        await group.aclosed(1)
        return await group.aresult(1)

    assert asyncio.run(main()) == [1, 2]


def test_then_runs_however_the_group_ends(app: App) -> None:
    task, last = app.task(max_attempts=1)(add), app.task(total)
    group = app.group([task.of(1), task.of(-1), task.of(3)], then=last.of(errors=True))
    work(app)
    assert group.then is not None
    assert group.then.result(1) == [1, "JobFailed", 3]
    with pytest.raises(JobFailed, match="negative"):
        group.result(1)


def test_then_by_ending(app: App) -> None:
    task, last = app.task(max_attempts=1)(add), app.task(total)
    good = app.group([task.of(1)], then={"done": last.of(), "failed": task.of(100)})
    bad = app.group([task.of(-1)], then={"done": task.of(200), "failed": last.of(errors=True)})
    assert work(app) == 4
    assert (good.then, bad.then) == (None, None)
    finished = [job for job in app.ledger.find(every_job()).jobs if job.kind == last.kind]
    assert sorted(job.result or b"" for job in finished) == [b'["JobFailed"]', b"[1]"]


def every_job() -> Query:

    return Query(limit=100)


def test_abort(app: App) -> None:
    task = app.task(max_attempts=1)(add)
    group = app.group([task.options(priority="high").of(-1), task.of(2)], on_failure="abort")
    assert work(app) == 1
    assert group.status().outcome is State.FAILED
    with pytest.raises(JobCanceled, match="aborted"):
        group.jobs[1].result(1)


def test_cancel_a_group(app: App) -> None:
    group = app.group([app.task(add).of(1)])
    group.cancel()
    assert group.closed(1).outcome is State.CANCELED
    asyncio.run(group.acancel())
    assert repr(group) == f"<group {group.id}>"


def test_a_group_made_twice_is_made_once(app: App) -> None:
    task = app.task(add)
    first = app.group([task.of(1), task.of(2)], id="g")
    second = app.group([task.of(1), task.of(2)], id="g")
    assert [each.id for each in first.jobs] == [each.id for each in second.jobs]
    assert second.status().total == 2


@pytest.mark.parametrize("by_ending", [False, True])
def test_a_refused_group_runs_nothing(app: App, by_ending: bool) -> None:
    task, last = app.task(add), app.task(total)
    app.engine.call(commands.SetQueue(queue="default", capacity=2))
    with pytest.raises(QueueFull):
        app.group([task.of(n) for n in range(5)], then={"done": last.of()} if by_ending else last.of())
    assert work(app) == 0
    assert app.ledger.queues()["default"].counts.waiting == 0


def test_a_job_after_a_group(app: App) -> None:
    task, last = app.task(add), app.task(total)
    group = app.group([task.of(1), task.of(2)])
    handle = last.options(after=[group, task.enqueue(9)]).enqueue()
    work(app)
    assert handle.result(1) == [1, 2, 9]


# Batches


def test_two_calls_with_one_id_in_a_batch_are_an_error(app: App) -> None:
    task = app.task(add)
    batch = app.batch()
    batch.__enter__()
    for n in (1, 2):
        task.options(id="twice").enqueue(n)
    with pytest.raises(InvalidInput, match=r"twice.*used once"):
        batch.__exit__(None, None, None)
    with pytest.raises(InvalidInput, match=r"twice.*used once"):
        task.enqueue_many([task.options(id="twice").of(1), task.options(id="twice").of(2)])
    assert app.ledger.queues() == {}


def test_two_children_with_one_id_are_an_error(app: App) -> None:
    task = app.task(add)

    @app.task(max_attempts=1)
    def parent() -> None:
        current().spawn(task.options(id="child").of(1))
        current().spawn(task.options(id="child").of(2))

    handle = parent.enqueue()
    work(app)
    with pytest.raises(JobFailed, match="child"):
        handle.result(1)
    assert app.ledger.get("child") is None


def test_a_batch_is_one_append(app: App) -> None:
    task = app.task(add)
    with app.batch() as batch:
        first = batch.add(task.of(1))
        second = task.options(after=[first]).enqueue(2)
        third, fourth = task.enqueue_many([task.of(3), task.of(4)])
        assert app.ledger.queues() == {}
    assert work(app) == 4
    assert [each.result(1) for each in (first, second, third, fourth)] == [1, 2, 3, 4]


def test_a_batch_that_raises_writes_nothing(app: App) -> None:
    task = app.task(add)
    with pytest.raises(ZeroDivisionError), app.batch():  # noqa: PT012
        task.enqueue(1)
        raise ZeroDivisionError
    assert app.ledger.queues() == {}
    task.enqueue(1)
    assert app.ledger.queues()["default"].counts.ready == 1


def test_a_refused_batch_writes_nothing(app: App) -> None:
    task = app.task(add)
    with pytest.raises(UnknownDependency), app.batch():  # noqa: PT012
        task.enqueue(1)
        task.options(after=["nowhere"]).enqueue(1)
    assert app.ledger.queues() == {}


def test_an_empty_batch(app: App) -> None:
    with app.batch():
        pass
    assert app.ledger.queues() == {}


def test_an_async_batch_and_its_neighbours(app: App) -> None:
    task = app.task(add)

    async def outside() -> str:
        return (await task.aenqueue(7)).id

    async def main() -> None:
        neighbour = asyncio.create_task(outside())
        async with app.batch():
            one = await task.aenqueue(1)
            many = await task.aenqueue_many([task.of(2)])
            assert app.ledger.get(await neighbour) is not None
            assert app.ledger.get(one.id) is None
        assert one.status().state is State.READY
        assert many[0].status().state is State.READY

    asyncio.run(main())


def test_a_handle_of_a_batch_has_the_id_of_the_holder_of_its_key(app: App) -> None:
    task = app.task(unique=True)(add)
    first = task.enqueue(1)
    with app.batch():
        second = task.enqueue(1)
        assert second.id != first.id
    assert second.id == first.id


def test_a_batch_of_one_app_is_not_another_s(app: App) -> None:
    with App("memory://") as other:
        task = other.task(add)
        with app.batch():
            assert task.enqueue(1).status().state is State.READY
