"""Groups through the App: members that others represent, and groups that are reopened. On every ledger."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.running import work, worked
from towpath import App, State, current
from towpath.errors import JobCanceled, JobFailed, NotRevivable


def total(errors: bool = False) -> list[Any]:
    return [
        type(each).__name__ if isinstance(each, Exception) else each
        for each in current().results(errors=errors)
    ]


def load(n: int) -> int:
    return n * 10


def test_results_have_the_result_of_a_duplicate_in_its_place(app: App) -> None:
    task, last = app.task(unique=True)(load), app.task(total)
    winner = task.enqueue(5)
    chain = app.chain(task.of(5), last.of())
    with app.batch():
        duplicate = task.enqueue(5)
        dependent = last.options(after=[task.enqueue(7), duplicate]).enqueue()
    group = app.group([task.of(6), task.of(5), task.of(8), task.of(6)], then=last.of())
    assert group.status().total == 4
    work(app)
    assert chain.result(1) == [50]
    assert dependent.result(1) == [70, 50]
    assert group.result(1) == [60, 50, 80, 60]
    assert group.then is not None
    assert group.then.result(1) == [60, 50, 80, 60]
    assert (winner.result(1), group.status().done) == (50, 4)


def test_a_group_waits_for_the_job_that_represents_its_member(app: App) -> None:
    task, last = app.task(unique=True)(load), app.task(total)
    winner = task.options(delay=3600).enqueue(5)
    group = app.group([task.of(5), task.of(6)], then={"done": last.of(), "failed": last.of(errors=True)})
    work(app)
    assert (group.status().state, group.status().unfinished) == ("sealed", 1)
    winner.cancel()
    assert group.status().outcome is State.CANCELED


def test_a_canceled_group_does_not_cancel_the_job_that_represents_its_member(app: App) -> None:
    task, last = app.task(unique=True)(load), app.task(total)
    winner = task.enqueue(5)
    group = app.group([task.of(5), task.of(6)], then=last.of(errors=True))
    group.cancel()
    with pytest.raises(JobCanceled, match="aborted"):
        group.result(1)
    work(app)
    assert winner.result(1) == 50


def test_results_have_the_result_of_the_newer_job(app: App) -> None:
    started = asyncio.Event()

    @app.task(name="slow")
    async def slow(n: int) -> int:
        started.set()
        if n == 2:
            await asyncio.sleep(600)
        return n

    last = app.task(total)

    async def main() -> None:
        path = slow.options(key="path:/a", on_conflict="replace")
        first = await path.options(delay=3600).aenqueue(1)
        dependent = await last.options(after=first).aenqueue()
        await path.aenqueue(2)
        await started.wait()
        await path.aenqueue(3)
        assert await dependent.aresult(20) == [3]

    worked(app, main)


def test_a_revived_member_reopens_its_group(app: App) -> None:
    broken = {2}

    @app.task(name="load", max_attempts=1)
    def fragile(n: int) -> int:
        if n in broken:
            raise ValueError("broken")
        return n * 10

    ran: list[str] = []

    @app.task(name="note")
    def note(how: str) -> None:
        ran.append(how)

    last, need = app.task(total), app.task(name="need")(total)
    group = app.group(
        [fragile.of(1), fragile.of(2)], then={"done": note.of("done"), "failed": note.of("failed")}
    )
    plain = last.options(after=group).enqueue()
    work(app)
    assert (group.status().outcome, ran) == (State.FAILED, ["failed"])
    with pytest.raises(JobFailed):
        plain.result(1)
    needs = need.options(after=group).enqueue()
    with pytest.raises(NotRevivable, match=f"revive {group.jobs[1].id} first"):
        needs.retry()
    broken.clear()
    group.jobs[1].retry()
    assert (group.status().state, group.status().failed) == ("sealed", 0)
    assert {plain.status().state, needs.status().state} == {State.BLOCKED}
    work(app)
    assert (group.status().outcome, group.result(1)) == (State.DONE, [10, 20])
    assert (plain.result(1), needs.result(1)) == ([10, 20], [10, 20])
    assert ran == ["failed", "done"]


def test_what_followed_a_group_and_has_not_begun_waits_for_the_new_outcome(app: App) -> None:
    @app.task(name="load", max_attempts=1)
    def fragile(fails: bool) -> int:
        if fails and current().fence == 1:
            raise ValueError("broken")
        return 1

    last = app.task(queue="later")(total)
    group = app.group([fragile.of(True), fragile.of(False)], then=last.of(errors=True))
    assert group.then is not None
    assert work(app, most=2) == 2
    assert group.then.status().state is State.READY
    group.jobs[0].retry()
    assert group.then.status().state is State.BLOCKED
    work(app)
    assert group.then.result(1) == [1, 1]
