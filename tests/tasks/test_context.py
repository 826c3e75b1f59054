"""The running job in its handler."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.support.gated import Gated
from tests.support.running import claimed, work
from towpath import App, Retry, State, commands, current
from towpath.core.checks import SECOND
from towpath.core.job import Reason
from towpath.errors import NotInJob, Unsupported
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.runtime.commit.committer import Committer
from towpath.tasks.attempt import Attempt
from towpath.tasks.context import Running


def nothing() -> None: ...


def test_outside_a_job() -> None:
    with pytest.raises(NotInJob, match="no job runs here"):
        current()
    with pytest.raises(RuntimeError):
        current()


def test_its_attributes(app: App) -> None:
    seen: list[Any] = []

    def look() -> None:
        job = current()
        seen.append(
            (job.id, job.attempt, job.fence, job.correlation_id, job.cancelled, job.cursor, job.job.kind)
        )
        raise Retry(after=0)

    handle = app.task(max_attempts=2)(look).options(correlation_id="c").enqueue()
    work(app)
    kind = next(iter(app.tasks))
    assert seen == [(handle.id, n, n, "c", False, None, kind) for n in (1, 2)]
    with pytest.raises(NotInJob):
        current()


def test_it_is_there_in_a_coroutine_and_its_children(app: App) -> None:
    async def child() -> str:
        return current().id

    async def parent() -> bool:
        first, second = await asyncio.gather(child(), asyncio.create_task(child()))
        return first == second == current().id

    handle = app.task(parent).enqueue()
    work(app)
    assert handle.result(1) is True


def test_progress_and_checkpoint(app: App) -> None:
    cursors: list[Any] = []

    def walk() -> None:
        job = current()
        cursors.append(job.cursor)
        for n in range(100):
            job.progress(n, 100)
            job.checkpoint({"at": job.attempt * 1000 + n})
        assert job.cursor == {"at": job.attempt * 1000 + 99}
        if job.attempt == 1:
            raise Retry(after=0)

    handle = app.task(walk).enqueue()
    work(app)
    job = handle.status()
    assert (job.progress_done, job.progress_total, job.cursor) == (99, 100, {"at": 2099})
    assert cursors == [None, {"at": 1099}]


def test_at_most_one_progress_is_on_its_way() -> None:
    gate = Gated(MemoryLedger())
    with App("memory://") as app:
        app.task(name="t")(nothing).enqueue()
        claim = claimed(app)
        gate._ledger = app.ledger
        committer = Committer(gate)
        committer.start()

        running = Running(app._registry, claim, app.tasks["t"], poster=committer)
        gate.hold()
        for n in range(50):
            running.progress(n, 50)
        running.checkpoint("here")
        gate.let_go()
        assert running.outcome_extras() is None
        committer.close()
        sent = [each for batch in gate.batches for each in batch if isinstance(each, commands.Progress)]
        assert 1 <= len(sent) <= 2, "the first may be in a batch already when the others come"
        assert (sent[-1].done, sent[-1].total, sent[-1].cursor) == (49, 50, b'"here"')


def test_asked_to_stop_comes_with_progress(app: App) -> None:
    task = app.task(nothing)
    handle = task.enqueue()
    running = Running(app._registry, claimed(app), task)
    assert running.cancelled is False
    handle.cancel()
    running.progress(1)
    app.engine.call(commands.Upkeep())
    assert running.cancelled is True
    assert running.asked is Reason.REQUESTED


def test_a_lost_claim_is_noticed(app: App) -> None:
    task = app.task(nothing)
    task.enqueue()
    claim = claimed(app)
    app.engine.call(commands.Settle(claim.id, claim.fence, commands.Release()))
    running = Running(app._registry, claim, task)
    running.progress(1)
    app.engine.call(commands.Upkeep())
    assert (running.lost, running.cancelled) == (True, True)


def test_children_come_with_success_and_only_then(app: App) -> None:
    spawned: list[str] = []

    def parent() -> None:
        spawned.append(current().spawn(child.of()).id)
        if current().attempt == 1:
            raise Retry(after=0)

    child = app.task(name="child", queue="children")(nothing)
    handle = app.task(parent).options(correlation_id="c").enqueue()
    work(app)
    assert app.ledger.get(spawned[0]) is None
    made = app.job(spawned[1]).status()
    assert (made.state, made.parent, made.correlation_id) == (State.DONE, handle.id, "c")


def test_results_of_nothing_and_of_what_is_gone(app: App) -> None:
    def look() -> list[Any]:
        return current().results()

    task, first = app.task(look), app.task(nothing).options(retention=0).enqueue()
    assert task.enqueue().status().state is State.READY
    waiting = task.options(after=first, max_attempts=1).enqueue()
    answer = app.engine.call(commands.Claim(owner="me", wants=(commands.Want("*"),), lease=SECOND))
    assert isinstance(answer, commands.Claimed)
    assert answer.claims[0].id == first.id
    app.engine.call_all([commands.Settle(first.id, 1, commands.Done()), commands.Upkeep()])
    work(app)
    assert f"there is no job {first.id}" in (waiting.status().error or "")


def finish(app: App, queue: str) -> None:
    """End all jobs of a queue as done, with their arguments as results."""
    while True:
        answer = app.engine.call(
            commands.Claim(owner="me", wants=(commands.Want(queue, 1000),), lease=60 * SECOND)
        )
        assert isinstance(answer, commands.Claimed)
        if not answer.claims:
            return
        done = [
            commands.Settle(each.id, each.fence, commands.Done(each.job.payload[5:-1]))
            for each in answer.claims
        ]
        app.engine.call_all(done)


def number(n: int) -> int:
    return n


def test_results_of_ten_thousand_in_their_order(app: App) -> None:
    task = app.task(name="number", queue="numbers")(number)
    first = task.enqueue_many([task.of(n) for n in range(10_000)])
    total = app.task(name="total")(lambda: current().results())
    listing = app.task(name="listing")(lambda a, b=0: [a, b, *current().results()])
    handles = [total.options(after=reversed(first)).enqueue(), listing.options(after=first).enqueue(-2, b=-1)]
    finish(app, "numbers")
    work(app)
    assert handles[0].result(5) == list(reversed(range(10_000)))
    assert handles[1].result(5) == list(range(-2, 10_000))


def test_results_of_jobs_with_odd_ids(app: App) -> None:
    task = app.task(name="number", queue="numbers")(number)
    ids = ["a,b", "@c", "@", ",", "x" * 255]
    for n, id in enumerate(ids):
        task.options(id=id).enqueue(n)
    group = app.group([task.of(7), task.of(8)])
    last = app.task(name="total")(lambda: current().results()).options(after=[*ids, group, ids[0]]).enqueue()
    finish(app, "numbers")
    work(app)
    assert last.result(5) == [0, 1, 2, 3, 4, 7, 8, 0]


def test_results_where_a_chain_adds_to_what_is_waited_for(app: App) -> None:
    task = app.task(name="number", queue="numbers")(number)
    first = task.enqueue_many([task.of(n) for n in range(2000)])
    total = app.task(name="total")(lambda: sum(current().results()))
    last = app.chain(task.of(10_000), total.options(after=first).of())
    finish(app, "numbers")
    work(app)
    assert last.result(5) == sum(range(2000)) + 10_000


def test_commit_writes_the_user_s_rows_with_the_settle(tmp_path: Path) -> None:
    path = tmp_path / "work.db"
    with App(f"sqlite:///{path}") as app:
        mine = apsw.Connection(str(path))
        mine.execute("CREATE TABLE paid (n INTEGER)")

        def pay(n: int) -> None:
            current().commit(lambda db: db.execute("INSERT INTO paid VALUES (?)", (n,)))
            current().commit(lambda db: db.execute("UPDATE paid SET n = n + 1"))
            if n < 0:
                raise ValueError

        task = app.task(max_attempts=1)(pay)
        task.enqueue(1)
        task.enqueue(-1)
        work(app)
        assert mine.execute("SELECT n FROM paid").fetchall() == [(2,)]
        mine.close()


def test_commit_without_a_database() -> None:
    with App("memory://") as app:
        app.task(name="t", max_attempts=1)(lambda: current().commit(print)).enqueue()
        claim = claimed(app)
        attempt = Attempt(app._registry, claim, app.tasks["t"])
        app.engine.call(attempt.run())
        assert isinstance(attempt.error, Unsupported)


def test_threads_of_a_handler_may_report(app: App) -> None:
    def many() -> None:
        job = current()
        threads = [threading.Thread(target=job.progress, args=(n, 8)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    handle = app.task(many).enqueue()
    work(app)
    assert handle.status().progress_total == 8


def test_a_base_exception_is_a_failed_attempt(app: App) -> None:
    def leave() -> None:
        raise SystemExit(3)

    handle = app.task(max_attempts=1)(leave).enqueue()
    work(app)
    assert "SystemExit: 3" in (handle.status().error or "")


def test_state_is_kept_as_long_as_the_job(app: App) -> None:
    seen: list[Any] = []

    def remember() -> None:
        state = current().state
        seen.append((state.value, state.version > 0))
        state.save({"attempt": current().attempt})
        if current().attempt < 3:
            raise Retry(after=0)

    handle = app.task(remember).enqueue()
    work(app, 2)
    assert app.ledger.note(f"state/{handle.id}") is not None
    work(app)
    assert seen == [(None, False), ({"attempt": 1}, True), ({"attempt": 2}, True)]
    assert app.ledger.note(f"state/{handle.id}") is None
