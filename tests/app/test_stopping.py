"""A handler that saw a request to stop and returns has stopped: the job is not done, and nothing that it
collected is written."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import worked
from tests.support.shell import Shell
from tests.support.waiting import WAIT, until
from towpath import App, State, current
from towpath.commands import Query
from towpath.errors import JobCanceled
from towpath.tasks.handles import JobHandle
from towpath.tasks.outcomes import StopRequested

pytestmark = pytest.mark.ledgers("sqlite", "postgres")

STEPS = 200

SHIPPING = """
import asyncio, os, threading
from towpath import App, current

app = App(os.environ["LEDGER"])
TABLE = "shipped" if app.engine.url.startswith("sqlite") else "public.shipped"

@app.task(name="leaf", queue="leaves")
def leaf() -> None: ...

def collect(job):
    job.commit(lambda db: db.execute("INSERT INTO " + TABLE + " VALUES ('" + job.job.kind + "')"))
    job.spawn(leaf.of())

def steps(job):
    for n in range(job.cursor or 0, 200):
        job.progress(n + 1, 200)
        job.checkpoint(n + 1)
        if n == 33:
            job.state.save({"at": n + 1})
            os.write(1, f"{job.job.kind} waits\\n".encode())
        yield n

@app.task(name="looks")
def looks() -> int:
    job = current()
    began = job.cursor or 0
    collect(job)
    for n in steps(job):
        while n == 33:
            threading.Event().wait(0.005)
            if job.cancelled:
                return began
    return began

@app.task(name="checks")
def checks() -> int:
    job = current()
    began = job.cursor or 0
    collect(job)
    for n in steps(job):
        while n == 33:
            threading.Event().wait(0.005)
            try:
                job.check()
            except Exception:
                pass
    return began

@app.task(name="swallows")
async def swallows() -> int:
    job = current()
    began = job.cursor or 0
    collect(job)
    for n in steps(job):
        if n == 33:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return began
    return began

@app.task(name="insists")
def insists() -> int:
    job = current()
    collect(job)
    os.write(1, b"insists waits\\n")
    while not job.cancelled:
        threading.Event().wait(0.005)
    return job.finished(34)
"""


def test_an_orderly_stop_of_a_worker_releases_what_is_unfinished(url: str, tmp_path: Path) -> None:
    (tmp_path / "shipping.py").write_text(SHIPPING)
    shell = Shell(tmp_path)
    names = ("looks", "checks", "swallows", "insists")
    with App(url) as app:
        tasks = {name: app.task(name=name)(_nothing) for name in names}
        jobs: dict[str, JobHandle[Any]] = {name: task.enqueue() for name, task in tasks.items()}
        shipped = _Shipped(app)
        worker = shell.start(
            "worker", "shipping:app", "--grace", "0", env={"LEDGER": url, "PYTHONPATH": str(tmp_path)}
        )
        assert worker.stdout is not None
        waiting: set[str] = set()
        while len(waiting) < len(names):
            line = worker.stdout.readline()
            assert line, worker.communicate()
            if line.endswith("waits\n"):
                waiting.add(line.split()[0])
        worker.send_signal(signal.SIGTERM)
        _, output = worker.communicate(timeout=WAIT)
        assert worker.returncode == 0, output
        for name in names[:3]:
            job = jobs[name].status()
            assert (job.state, job.reason, job.attempts, job.failures, job.losses) == (
                State.READY,
                "released",
                0,
                0,
                0,
            ), name
            assert (job.progress_done, job.cursor) == (34, 34), name
            assert app.engine.document(f"state/{job.id}").value == {"at": 34}
        assert jobs["insists"].status().state is State.DONE
        assert shipped.rows() == ["insists"]
        assert _leaves(app) == 1
        shell.run("worker", "shipping:app", "--burst", env={"LEDGER": url, "PYTHONPATH": str(tmp_path)})
        assert [jobs[name].result(0) for name in names] == [34, 34, 34, 34]
        assert shipped.rows() == sorted(names)
        assert _leaves(app) == len(names)
        assert app.engine.document(f"state/{jobs['looks'].id}").value is None
        assert app.ledger.check() == []


def _nothing() -> int:
    return 0


def _leaves(app: App) -> int:
    """The number of child jobs."""
    counts = app.ledger.queues()["leaves"].counts if "leaves" in app.ledger.queues() else None
    return 0 if counts is None else counts.ready + counts.running + counts.done


class _Shipped:
    """A table of the user's in the ledger's database."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._do("CREATE TABLE shipped (kind TEXT)")

    def rows(self) -> list[str]:
        return sorted(row[0] for row in self._do("SELECT kind FROM shipped"))

    def _do(self, statement: str) -> list[Any]:
        app = self._app
        app.ledger.queues()
        if app.engine.url.startswith("sqlite"):
            import apsw

            connection = apsw.Connection(app.engine.url.removeprefix("sqlite:///"))
            found: list[Any] = connection.execute(statement).fetchall()
            connection.close()
            return found
        import psycopg

        with psycopg.connect(
            app.engine.url,
            autocommit=True,
        ) as other:
            cursor = other.execute(statement)
            return cursor.fetchall() if cursor.description else []


Stop = Callable[[App, JobHandle[Any]], Any]


def _superseded(app: App, job: JobHandle[Any]) -> None:
    app.tasks["work"].options(key="k", on_conflict="replace").enqueue(False)


@pytest.mark.parametrize("how", ["returns", "checks", "swallows"])
@pytest.mark.parametrize(
    ("stop", "reason"),
    [(lambda _, job: job.cancel(), "requested"), (_superseded, "superseded")],
    ids=["cancel", "replace"],
)
def test_a_canceled_handler_that_returns_is_canceled(url: str, how: str, stop: Stop, reason: str) -> None:
    started = threading.Event()
    with App(url) as app:
        leaf = app.task(name="leaf", queue="leaves")(_nothing)

        def collect(wait: bool) -> None:
            current().spawn(leaf.of())
            if wait:
                current().commit(lambda _: pytest.fail("the function of a stopped handler was called"))
            started.set()

        def returns(wait: bool) -> str:
            collect(wait)
            while wait and not current().cancelled:
                threading.Event().wait(0.005)
            return "unfinished"

        def checks(wait: bool) -> str:
            collect(wait)
            while wait:
                threading.Event().wait(0.005)
                current().check()
            return "unfinished"

        async def swallows(wait: bool) -> str:
            collect(wait)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600 if wait else 0)
            return "unfinished"

        handlers: dict[str, Any] = {"returns": returns, "checks": checks, "swallows": swallows}
        task = app.task(name="work")(handlers[how])

        async def main() -> None:
            job = await task.options(key="k", on_conflict="replace").aenqueue(True)
            assert await asyncio.to_thread(started.wait, WAIT)
            await asyncio.to_thread(stop, app, job)
            with pytest.raises(JobCanceled) as caught:
                await job.aresult(WAIT)
            assert caught.value.reason == reason
            ended = job.status()
            assert (ended.attempts, ended.failures) == (1, 0)
            for newer in app.ledger.find(Query(kind="work", states=(State.READY, State.RUNNING))).jobs:
                await app.job(newer.id).afinished(WAIT)

        worked(app, main, queues=("default",))
        assert _leaves(app) == (1 if reason == "superseded" else 0)


def test_a_handler_past_its_timeout_that_sees_it_and_returns_has_failed(url: str) -> None:
    with App(url) as app:

        @app.task(timeout=0.05, max_attempts=1)
        def slow(insist: bool) -> str:
            until(lambda: current().cancelled)
            return current().finished("complete") if insist else "in the middle"

        async def main() -> None:
            lost, kept = await slow.aenqueue(False), await slow.aenqueue(True)
            assert await kept.aresult(WAIT) == "complete"
            ended = await lost.afinished(WAIT)
            assert (ended.state, ended.reason) == (State.FAILED, "exhausted")
            assert "towpath.errors.TimedOut: it ran longer than 0.05 s" in (ended.error or "")

        worked(app, main)


def test_a_coroutine_that_is_stopped_before_its_first_step_is_released() -> None:
    """The loop is stopped in the turn in which the claims arrive."""
    with App("memory://") as app:

        @app.task
        async def work() -> None:
            pytest.fail("it was stopped before it began")

        job = work.enqueue()

        async def main() -> None:
            service = app._service({"concurrency": 1, "grace": 0})
            start = service._worker._runs.start

            def start_and_stop(run: Any) -> None:
                start(run)
                service._worker._on_stop_request(run.claim.id, "requested")  # type: ignore[arg-type]

            service._worker._runs.start = start_and_stop  # type: ignore[method-assign]
            working = asyncio.create_task(service.arun())
            assert (await job.afinished(WAIT)).state is State.CANCELED
            assert service._worker.running == []
            service.stop()
            await working

        asyncio.run(main())


def test_stopped_in_the_bench() -> None:
    app = App("memory://")
    seen: list[str] = []

    @app.task
    def leaf() -> None: ...

    @app.task
    def work(how: str) -> str:
        job = current()
        job.check()
        job.spawn(leaf.of())
        app.job(job.id).cancel()
        job.progress(1)
        try:
            if how == "checks":
                job.check()
        except StopRequested as error:
            seen.append(str(error))
            raise
        assert job.cancelled
        return job.finished("all") if how == "insists" else "some"

    with app.testing() as bench:
        jobs = [work.enqueue(how) for how in ("returns", "checks", "insists")]
        bench.drain()
        states = [(job.status().state, job.status().reason) for job in jobs]
        assert states == [(State.CANCELED, "requested"), (State.CANCELED, "requested"), (State.DONE, "")]
        assert seen == ["the job was asked to stop (requested)"]
        assert len(bench.jobs(leaf)) == 1


STUCK = """
import os, threading
from towpath import App

app = App(os.environ["LEDGER"])

@app.task(name="work", timeout=0.05, backoff=0, max_attempts=2)
def work() -> int:
    if os.environ.get("HANG"):
        threading.Event().wait()
    return 1
"""


def test_a_worker_with_only_stuck_slots_ends_and_its_jobs_run_elsewhere(url: str, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    shell = Shell(tmp_path)
    environment = {"LEDGER": url, "PYTHONPATH": str(tmp_path)}
    with App(url) as app:
        jobs = [app.task(name="work", timeout=0.05, backoff=0, max_attempts=2)(_nothing).enqueue()]
        jobs += [app.tasks["work"].enqueue()]
        options = ("worker", "stuck:app", "--concurrency", "2", "--grace", "0.1")
        ended = shell.run(*options, env={**environment, "HANG": "1"}, code=5)
        assert (
            ended.err.count("all 2 slots are held by handlers that do not stop 0.1 s after their timeout")
            == 2
        )
        assert ended.err.count(" CRITICAL ") == 1
        assert [(job.status().state, job.status().failures) for job in jobs] == 2 * [(State.READY, 1)]
        shell.run(*options, "--burst", env=environment)
        assert [job.result(0) for job in jobs] == [1, 1]
