"""`app.testing()`: everything inline, and time that you move."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from towpath import App, Snooze, State, commands, current
from towpath.commands import Spec
from towpath.core.checks import DAY, SECOND
from towpath.errors import InvalidInput, JobFailed, Unsupported

app = App("sqlite:////nowhere/at/all.db")
ran: list[str] = []


@app.task(backoff=86_400, max_attempts=30)
def flaky(name: str, size: int = 1) -> None:
    ran.append(name)
    raise ValueError(name)


@app.task
async def hello(name: str) -> str:
    await asyncio.sleep(0)
    ran.append(name)
    return f"hello {name}"


@app.task(queue="letters")
def write(name: str) -> None:
    current().spawn(hello.of(f"{name}'s child"))
    hello.enqueue(f"{name}'s friend")


@app.task
async def nap() -> int:
    if current().attempt < 4:
        raise Snooze(3600)
    return current().attempt


@app.cron("0 6 * * *")
@app.task
def morning() -> None:
    ran.append("morning")


@app.every(3600, name="tick", args={"name": "tick"}, missed="all")
@app.task
def ticking(name: str) -> None:
    ran.append(name)


@pytest.fixture(autouse=True)
def fresh() -> None:
    ran.clear()


def test_drain_runs_all_that_follows() -> None:
    with app.testing() as bench:
        handle = write.enqueue("ada")
        assert bench.drain() == 3
        assert sorted(ran) == ["ada's child", "ada's friend"]
        assert handle.result() is None
        assert bench.drain() == 0
        assert bench.ledger.check() == []


def test_no_file_and_no_thread() -> None:
    before = threading.active_count()
    with app.testing() as bench:
        assert hello.enqueue("x").status().state is State.READY
        assert bench.drain() == 1
        assert threading.active_count() == before


def test_a_month_of_retries_is_short() -> None:
    with app.testing() as bench:
        handle = flaky.enqueue("again")
        began = time.perf_counter()
        bench.advance(30 * 86_400)
        assert time.perf_counter() - began < 20
        assert ran.count("again") == 30
        assert ran.count("morning") == 30
        assert ran.count("tick") == 720
        with pytest.raises(JobFailed, match="ValueError: again"):
            handle.result()
        assert bench.ledger.check() == []


def test_every_job_runs_at_its_own_time() -> None:
    with app.testing() as bench:
        start = bench.clock.now()
        times = {}
        for hours in (5, 1, 3):
            times[hours] = hello.options(delay=hours * 3600).enqueue(str(hours))
        bench.advance(2 * 3600)
        assert [name for name in ran if name != "tick"] == ["1"]
        bench.advance(3 * 3600)
        assert [name for name in ran if name not in ("tick", "morning")] == ["1", "3", "5"]
        assert [(times[hours].record().started_at or 0) - start for hours in (1, 3, 5)] == [
            hours * 3600 * SECOND for hours in (1, 3, 5)
        ]
        assert bench.clock.now() - start == 5 * 3600 * SECOND


def test_snooze() -> None:
    with app.testing() as bench:
        handle = nap.enqueue()
        bench.advance(3600 * 3 - 1)
        with pytest.raises(TimeoutError, match="nothing runs by itself"):
            handle.result()
        bench.advance(1)
        assert handle.result(timeout=5) == 4


def test_assert_enqueued() -> None:
    with app.testing() as bench:
        flaky.options(delay=5).enqueue("x")
        job = bench.assert_enqueued(flaky, name="x", size=1)
        assert job.state is State.SCHEDULED
        bench.assert_enqueued(flaky)
        bench.assert_not_enqueued(flaky, name="y")
        bench.assert_not_enqueued(hello)
        with pytest.raises(AssertionError, match=r"no job of .*flaky with \{'name': 'y'\}; there are 1"):
            bench.assert_enqueued(flaky, name="y")
        with pytest.raises(AssertionError, match="there are 0"):
            bench.assert_enqueued(hello, name="x")
        with pytest.raises(AssertionError, match="1 jobs"):
            bench.assert_not_enqueued(flaky)


def test_jobs() -> None:
    with app.testing() as bench:
        hello.enqueue_many([hello.of(str(n)) for n in range(1500)])
        assert len(bench.jobs()) == 1500
        assert bench.drain() == 1500
        assert [job.id for job in bench.jobs(hello, state="done")] == [job.id for job in bench.jobs()]
        assert bench.jobs(flaky) == []


def test_each_bench_is_fresh_and_the_app_is_given_back() -> None:
    with app.testing():
        hello.enqueue("x")
        with app.testing() as inner:
            assert inner.jobs() == []
        assert app.ledger.queues()["default"].counts.ready == 1
    assert app.engine._components is None


def test_inside_an_event_loop() -> None:
    async def main() -> None:
        with app.testing() as bench:
            handle = await hello.aenqueue("ada")
            with pytest.raises(RuntimeError, match="adrain"):
                bench.drain()
            assert await bench.adrain() == 1
            assert await handle.aresult() == "hello ada"
            await hello.options(delay=DAY / SECOND).aenqueue("later")
            await bench.aadvance(86_400)
            assert "later" in ran

    asyncio.run(main())


def test_groups_and_batches_and_messages() -> None:
    with app.testing() as bench:
        group = app.group([hello.of("a"), hello.of("b")])
        orders = app.queue("orders")
        orders.put({"n": 1})
        with pytest.raises(TimeoutError, match="not closed"):
            group.result()
        assert bench.drain() == 2
        assert group.result() == ["hello a", "hello b"]
        message = orders.get()
        assert message is not None
        message.ack()
        bench.advance(1)
        assert bench.ledger.queues()["orders"].counts.done == 1


def test_commit_in_a_bench_with_a_database() -> None:
    with App("sqlite:////nowhere/at/all.db") as other:

        def pay(n: int) -> None:
            current().commit(lambda db: db.execute("INSERT INTO paid VALUES (?)", (n,)))
            if n == 2:
                current().commit(lambda db: db.execute("INSERT INTO gone VALUES (1)"))
            if n == 3:
                raise ValueError("not paid")
            if n == 4:
                current().commit(lambda db: db.execute("INSERT OR ROLLBACK INTO paid VALUES (1)"))

        task = other.task(max_attempts=2, backoff=[60])(pay)
        with other.testing(database=True) as bench:
            bench.database.execute("CREATE TABLE paid (n INTEGER UNIQUE)")
            handles = [task.enqueue(n) for n in (1, 2, 3, 4)]
            assert bench.drain() == 4
            assert bench.database.execute("SELECT n FROM paid").fetchall() == [(1,)]
            assert [handle.status().state for handle in handles] == [State.DONE, *[State.SCHEDULED] * 3]
            bench.advance(59)
            assert [handle.status().failures for handle in handles] == [0, 1, 1, 1]
            bench.advance(1)
            with pytest.raises(JobFailed, match=r"exhausted.*SQLError: no such table: gone"):
                handles[1].result()
            with pytest.raises(
                JobFailed, match=r"exhausted.*ConstraintError: UNIQUE constraint failed: paid"
            ):
                handles[3].result()
            assert bench.ledger.check() == []
        with other.testing() as bench:
            handle = task.enqueue(1)
            bench.advance(60)
            with pytest.raises(JobFailed, match=r"app\.testing\(database=True\)"):
                handle.result()
            with pytest.raises(Unsupported, match=r"app\.testing\(database=True\)"):
                bench.database.execute("SELECT 1")


def test_an_unknown_task_is_reported() -> None:
    with app.testing() as bench:
        app.engine.call(commands.Append((Spec(id="x", queue="q", kind="gone"),)))
        with pytest.raises(InvalidInput, match="'gone'"):
            bench.drain()


def test_the_clock_of_the_app_is_the_bench_s() -> None:
    before = app.engine.clock
    with app.testing() as bench:
        assert app.engine.clock is bench.clock
    assert app.engine.clock is before


def test_a_handler_that_is_interrupted() -> None:
    with App("memory://") as other:

        def stop() -> None:
            raise KeyboardInterrupt

        async def leave() -> None:
            raise asyncio.CancelledError

        stopping, leaving = other.task(backoff=1)(stop), other.task(max_attempts=1)(leave)
        with other.testing() as bench:
            stopping.enqueue()
            with pytest.raises(KeyboardInterrupt):
                bench.drain()
            handle = leaving.enqueue()
            bench.drain()
            assert handle.status().state is State.FAILED
