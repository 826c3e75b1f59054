"""`on_failure` and `on_dead`: their calls, arguments and own failures."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import towpath
from tests.support import hooked
from tests.support.traced import Pool, Session, Traced, with_pool
from towpath import App, Cancel, Fail, Hooks, JobFailure, Retry, Running, Snooze, current, provided
from towpath.commands import Append, Appended, Claim, Claimed, Want
from towpath.core.job import Spec
from towpath.errors import InvalidInput


class Failures:
    """The failures that the hooks of an app were called with."""

    def __init__(self, hooks: Hooks) -> None:
        self.failed: list[JobFailure] = []
        self.dead: list[JobFailure] = []
        hooks.on_failure(self.failed.append)
        hooks.on_dead(self.dead.append)


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    with traced.app:
        yield traced


def test_each_failed_attempt_and_the_dead_letter(url: str) -> None:
    hooks = Hooks()
    failures = Failures(hooks)
    with App(url, hooks=hooks) as app:

        @app.task(name="broken", queue="shop", max_attempts=3, backoff=0)
        def broken() -> None:
            raise ValueError(f"no {current().attempt}")

        job = broken.enqueue()
        app.run(burst=True)
        assert [(each.attempt, each.dead, str(each.exception)) for each in failures.failed] == [
            (1, False, "no 1"),
            (2, False, "no 2"),
            (3, True, "no 3"),
        ]
        [dead] = failures.dead
        assert dead is failures.failed[-1]
        assert (dead.kind, dead.queue, dead.job.id) == ("broken", "shop", job.id)
        assert dead.error.startswith("ValueError: no 3\n\nTraceback")
        dead.job.retry()


def test_outcomes_that_are_no_failures(traced: Traced) -> None:
    failures = Failures(traced.hooks)

    @traced.app.task
    def handler(how: str) -> None:
        if how != "done":
            raise {"snooze": Snooze(60), "cancel": Cancel("enough")}[how]

    for how in ("done", "snooze", "cancel"):
        handler.enqueue(how)
    traced.app.run(burst=True)
    assert (failures.failed, failures.dead) == ([], [])


@pytest.mark.parametrize("error", [Fail("never"), Retry("later", after=60)])
def test_failures_that_the_handler_asks_for(traced: Traced, error: Exception) -> None:
    failures = Failures(traced.hooks)

    @traced.app.task
    def handler() -> None:
        raise error

    handler.enqueue()
    traced.app.run(burst=True)
    assert [each.exception for each in failures.failed] == [error]
    assert [each.exception for each in failures.dead] == ([error] if isinstance(error, Fail) else [])


def test_hooks_of_a_task_are_called_before_hooks_of_the_app(traced: Traced) -> None:
    with_pool(traced.hooks, [])

    @traced.hooks.on_failure
    async def of_app(failure: JobFailure, pool: Pool = provided) -> None:
        assert pool.name == f"on {id(asyncio.get_running_loop())}"
        traced.trace.append(f"app {failure.kind}")

    def of_task(failure: JobFailure, *, pool: Pool = provided) -> None:
        assert pool.name.startswith("on ")
        assert threading.current_thread().name == "towpath-failure hooks"
        traced.trace.append(f"task {failure.kind}")

    @traced.app.task(name="own", max_attempts=1, on_failure=of_task, on_dead=of_task)
    async def own() -> None:
        raise ValueError

    @traced.app.task(name="other", max_attempts=1)
    def other() -> None:
        raise ValueError

    for task in (own, other):
        task.enqueue()
        traced.app.run(burst=True)
    assert traced.trace == ["task own", "app own", "task own", "app other"]


def test_a_hook_that_raises_is_logged_and_the_next_one_is_called(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    @traced.hooks.on_dead
    def broken(failure: JobFailure) -> None:
        raise OSError("no mail")

    @traced.hooks.on_dead
    async def also(failure: JobFailure) -> None:
        raise OSError("no chat")

    failures = Failures(traced.hooks)

    @traced.app.task(name="handler")
    def handler() -> None:
        raise Fail("never")

    job = handler.enqueue()
    traced.app.run(burst=True)
    assert len(failures.dead) == 1
    logged = [record.getMessage() for record in caplog.records if record.name == "towpath.worker"]
    for hook in (broken, also):
        assert f"on_dead {__name__}.{hook.__qualname__} failed for job {job.id} (handler)" in logged


def test_a_hook_may_enqueue_and_the_burst_goes_on(traced: Traced) -> None:
    @traced.app.task
    def repair(id: str) -> None:
        traced.trace.append(id)

    def enqueue_repair(failure: JobFailure) -> None:
        repair.enqueue(failure.job.id)

    @traced.app.task(on_dead=enqueue_repair)
    def broken() -> None:
        raise Fail("never")

    job = broken.enqueue()
    traced.app.run(burst=True)
    assert traced.trace == [job.id]


def test_a_commit_function_that_fails_is_a_failed_attempt(sqlite_url: str) -> None:
    hooks = Hooks()
    failures = Failures(hooks)
    with App(sqlite_url, hooks=hooks) as app:

        @app.task(max_attempts=1)
        def handler() -> None:
            current().commit(lambda connection: connection.execute("SELECT * FROM absent"))

        handler.enqueue()
        app.run(burst=True)
    for each in (failures.failed, failures.dead):
        assert ["no such table" in str(failure.exception) for failure in each] == [True]


def test_a_failure_in_a_process_has_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hooked.TRACE, str(tmp_path / "trace"))
    monkeypatch.setenv(hooked.BROKEN, "1")
    with hooked.app:
        hooked.failures.clear()
        hooked.sync.enqueue()
        hooked.app.run(burst=True)
        [failure] = hooked.failures
    assert "OSError: no route to the database" in failure.error
    assert failure.exception is None


def test_a_failure_hook_needs_values_of_a_lifespan(traced: Traced) -> None:
    @traced.hooks.on_dead
    def alert(failure: JobFailure, session: Session = provided) -> None: ...

    with pytest.raises(InvalidInput, match=r"alert\(session\) needs Session, which no lifespan"):
        traced.app.run(burst=True)


def test_the_bench_calls_them(traced: Traced) -> None:
    failures = Failures(traced.hooks)

    @traced.hooks.on_failure
    async def later(failure: JobFailure) -> None:
        await asyncio.sleep(0)
        traced.trace.append(str(failure.exception))

    @traced.app.task(max_attempts=2, backoff=60)
    def broken() -> None:
        raise ValueError("no")

    with traced.app.testing() as bench:
        broken.enqueue()
        bench.advance(120)
    assert [each.dead for each in failures.failed] == [False, True]
    assert len(failures.dead) == 1

    async def main() -> None:
        async with traced.app.testing() as bench:
            await broken.aenqueue()
            await bench.adrain()
        with traced.app.testing() as bench:
            await broken.aenqueue()
            await bench.adrain()

    asyncio.run(main())
    assert traced.trace == ["no"] * 4


def test_what_is_no_failure_hook_is_refused() -> None:
    app, hooks = App("memory://"), Hooks()

    def two(failure: JobFailure, other: int) -> None: ...

    def generator(failure: JobFailure) -> Iterator[None]:
        yield

    for wrong, message in ((two, "a function of one parameter"), (generator, "without `yield`")):
        with pytest.raises(InvalidInput, match=message):
            hooks.on_dead(wrong)
        with pytest.raises(InvalidInput, match=message):
            app.task(on_dead=wrong)(print)


def test_a_job_that_lost_its_lease_for_good_is_dead(url: str) -> None:
    hooks = Hooks()
    failures = Failures(hooks)
    with App(url, hooks=hooks) as app:

        @app.task(name="handler", max_attempts=1)
        def handler() -> None: ...

        job = handler.enqueue()
        unknown = app.engine.call(Append((Spec(id="u", queue="default", kind="unknown", max_attempts=1),)))
        assert isinstance(unknown, Appended)
        answer = app.engine.call(Claim(owner="killed", wants=(Want("*", 2),), lease=1))
        assert isinstance(answer, Claimed)
        assert len(answer.claims) == 2
        app.run(burst=True)
    assert failures.failed == []
    [dead] = failures.dead
    assert (dead.job.id, dead.kind, dead.attempt, dead.dead) == (job.id, "handler", 1, True)
    assert (dead.error, dead.exception) == ("its lease was lost; losses: 1", None)


@pytest.mark.parametrize("style", ["sync", "async", "async hook"])
def test_the_traceback_of_a_failure_has_only_lines_of_the_user(style: str) -> None:
    """The frames of the engine and of the middleware layers would hide the line that failed."""
    hooks = Hooks()
    app = App("memory://", hooks=hooks)

    if style == "async hook":

        @hooks.middleware
        async def around_async(job: Running) -> AsyncIterator[None]:
            yield
    else:

        @hooks.middleware
        def around(job: Running) -> Iterator[None]:
            yield

    def divide(n: int) -> float:
        return 1 / n

    async def adivide(n: int) -> float:
        return divide(n)

    failing = app.task(max_attempts=1)(adivide if style == "async" else divide)
    with app.testing() as bench:
        job = failing.enqueue(0)
        bench.drain()
        error = job.status().error
    assert error is not None
    files = re.findall(r'File "(.*?)", line \d+, in (\w+)', error)
    assert files[-1] == (__file__, "divide")
    package = str(Path(towpath.__file__).parent)
    assert [name for path, name in files if path.startswith(package)] == []


def test_the_traceback_shows_where_a_call_of_towpath_failed() -> None:
    app = App("memory://")

    @app.task(max_attempts=1)
    def wrong() -> None:
        current().progress(-1)

    with app.testing() as bench:
        job = wrong.enqueue()
        bench.drain()
        error = job.status().error
    names = re.findall(r"line \d+, in (\w+)", error or "")
    assert names[:2] == ["wrong", "progress"]
