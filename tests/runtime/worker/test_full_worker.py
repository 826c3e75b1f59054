"""The claims of a worker: not started, running, and ended without a settle. All are bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import handlers, idler
from tests.support.gated import Gated
from tests.support.running import working
from tests.support.waiting import WAIT, until
from towpath import App, Lane, current
from towpath.commands import Query
from towpath.core.commands import Append, Command, Progress, Settle
from towpath.ledger import Answer
from towpath.runtime.worker.prefetch import MAX_AHEAD, max_unsettled

pytestmark = pytest.mark.ledgers("sqlite", "postgres")

SLOTS = 8
ENDED = max_unsettled(SLOTS)


class Counted(Gated):
    """Counts the running jobs of the ledger after every batch."""

    def __init__(self, app: App) -> None:
        super().__init__(app.ledger)
        self.running: list[int] = []
        app.engine.components.committer._ledger = self

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        answers = super().apply(commands, now)
        self.running.append(sum(queue.counts.running for queue in self._ledger.queues().values()))
        return answers


class Handlers:
    """Tasks of every kind that do nothing, and how many of them have ended."""

    def __init__(self, app: App) -> None:
        self.ended = 0

        @app.task
        async def loop(n: int) -> None:
            self.ended += 1

        @app.task
        def thread(n: int) -> None:
            self.ended += 1

        @app.task
        async def progress(n: int) -> None:
            for at in range(3):
                current().progress(at, 3)
            self.ended += 1

        @app.task
        async def commit(n: int) -> None:
            current().commit(lambda connection: None)
            self.ended += 1

        self.tasks = {"loop": loop, "thread": thread, "progress": progress, "commit": commit}

    def put(self, kind: str, count: int) -> None:
        task: Any = self.tasks[kind]
        task.enqueue_many([task.of(n) for n in range(count)])


def done(app: App) -> int:
    return sum(queue.counts.done for queue in app.ledger.queues().values())


LANES = {"other": Lane(queues=("other",)), "all": Lane(queues=("default",))}


@pytest.mark.parametrize(
    ("kind", "lanes"),
    [
        ("loop", None),
        ("thread", None),
        ("progress", None),
        ("commit", None),
        ("loop", LANES),
        ("commit", LANES),
    ],
    ids=["loop", "thread", "progress", "commit", "lanes", "lanes-commit"],
)
def test_a_slow_commit_stops_the_handlers(app: App, kind: str, lanes: dict[str, Lane] | None) -> None:
    """No further handlers start while nothing is settled, and few jobs are claimed."""
    tasks, ledger = Handlers(app), Counted(app)
    # A function of `commit` may cost a transaction.
    count = 200 if kind == "commit" else 3000
    most = SLOTS + (4 * SLOTS if kind == "commit" else MAX_AHEAD)
    tasks.put(kind, count)
    options = {"lanes": lanes} if lanes else {}
    with working(app, concurrency=SLOTS, **options):
        until(lambda: done(app) > count // 5)
        ledger.hold()
        assert ledger.inside.wait(WAIT)
        (worker,) = app.engine.local_workers
        until(lambda: worker.held.running == 0 and (worker.held.ended == ENDED or worker.held.claimed == 0))
        assert worker.held.ended <= ENDED
        assert tasks.ended - done(app) <= ENDED
        assert sum(worker.held) <= most
        ledger.let_go()
        until(lambda: done(app) == count)
    assert max(ledger.running) <= most
    assert tasks.ended == count


def test_jobs_with_progress_are_not_claimed_faster_than_they_are_settled(app: App) -> None:
    tasks, ledger = Handlers(app), Counted(app)
    tasks.put("progress", 3000)
    most = 0
    with working(app, concurrency=SLOTS):
        until(lambda: done(app) > 0)
        (worker,) = app.engine.local_workers
        while done(app) < 3000:
            most = max(most, worker.held.ended)
    assert most <= ENDED
    assert max(ledger.running) <= SLOTS + MAX_AHEAD
    sent = [command for batch in ledger.batches for command in batch if isinstance(command, Progress)]
    assert {command.done for command in sent} <= {0, 1, 2}
    assert len({command.id for command in sent if command.done == 2}) == 3000, (
        "the last one of each job arrives"
    )
    for batch in ledger.batches:
        settled = {command.id: at for at, command in enumerate(batch) if isinstance(command, Settle)}
        reported = {command.id: at for at, command in enumerate(batch) if isinstance(command, Progress)}
        assert all(at < settled.get(id, len(batch)) for id, at in reported.items()), "never after the settle"


def test_processes_too(url: str) -> None:
    app = handlers.app
    before, app.engine.url = app.engine.url, url
    try:
        with app:
            ledger = Counted(app)
            handlers.pid.enqueue_many([handlers.pid.of(n) for n in range(60)])
            with working(app, concurrency=2):
                until(lambda: done(app) == 60)
            assert max(ledger.running) <= 2 + MAX_AHEAD
            assert {job.progress_done for job in app.ledger.find(Query(limit=100)).jobs} == set(range(60))
    finally:
        app.engine.url = before


def test_a_checkpoint_is_not_lost_with_the_attempt(app: App) -> None:
    """The last progress is committed before a retry: the next attempt reads it."""
    ledger = Counted(app)
    seen: list[Any] = []

    @app.task(max_attempts=2, backoff=0)
    def walk() -> None:
        job = current()
        seen.append(job.cursor)
        if job.attempt == 1:
            ledger.hold()
            for at in range(5):
                job.progress(at, 5)
                job.checkpoint(at)
            ledger.let_go()
            raise ValueError("not yet")

    with working(app, concurrency=1):
        walk.enqueue().result(WAIT)
    assert seen == [None, 4]


def test_an_enqueue_beside_a_busy_worker_is_in_the_next_batch(app: App) -> None:
    """However many settles wait, and however large the append is."""
    tasks, ledger = Handlers(app), Counted(app)
    tasks.put("loop", 6000)
    with working(app, concurrency=400):
        until(lambda: done(app) > 500)
        for count in (1, 1000):
            ledger.hold()
            assert ledger.inside.wait(WAIT)
            at = len(ledger.batches)
            committer = app.engine.components.committer
            task: Any = tasks.tasks["loop"]
            specs = tuple([task.options(queue="later").of(n).spec() for n in range(count)])
            committer.post([Append(specs)], lambda replies: None)
            ledger.let_go()
            until(lambda at=at: len(ledger.batches) > at)  # type: ignore[misc]
            assert any(isinstance(each, Append) for each in ledger.batches[at])
        until(lambda: done(app) >= 6000)


# Real processes


@contextmanager
def workers(url: str, count: int, *options: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "towpath", "worker", "tests.support.idler:app", *options]
    started = [subprocess.Popen(command, env={**os.environ, "TOWPATH_URL": url}) for _ in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture
def fleet(url: str) -> Iterator[App]:
    before, idler.app.engine.url = idler.app.engine.url, url
    with idler.app:
        yield idler.app
    idler.app.engine.url = before


def test_little_runs_again_after_a_kill(url: str, fleet: App, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    idler.mark.enqueue_many([idler.mark.of(str(marks)) for _ in range(8000)])
    with workers(url, 1, "--concurrency", str(SLOTS)) as (worker,):
        until(lambda: done(fleet) > 1000)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert marks.stat().st_size - done(fleet) <= ENDED


def test_a_full_worker_leaves_jobs_to_an_idle_one(url: str, fleet: App, tmp_path: Path) -> None:
    """A long job has one of two workers for itself. The other worker runs all jobs that this worker has
    prefetched or could claim."""
    with workers(url, 2, "--concurrency", "1"):
        for number in range(3):
            # Both run quick jobs, and prefetch.
            for handle in idler.quick.enqueue_many([idler.quick.of(n) for n in range(300)]):
                handle.result(60)
            gate = tmp_path / f"gate {number}"
            with idler.app.batch() as batch:
                batch.add(idler.wait_for.of(str(gate)))
                ahead = [batch.add(idler.quick.of(n)) for n in range(100)]
            until(lambda gate=gate: Path(f"{gate}.begun").exists())  # type: ignore[misc]
            later = [idler.quick.enqueue(n) for n in range(10)]
            assert [handle.result(WAIT) for handle in [*ahead, *later]] == [*range(100), *range(10)]
            assert not gate.exists()
            gate.touch()


def test_claims_that_waited_for_half_a_lease_do_not_start(app: App) -> None:
    """As after a SIGSTOP: other workers may have claimed the jobs, which then ran twice."""
    lease, began = 3.0, threading.Event()

    @app.task
    async def block(n: int) -> None:
        if n == 300:
            time.sleep(0.55 * lease)  # like a process that is stopped
            began.set()

    block.enqueue_many([block.of(n) for n in range(600)])
    with working(app, concurrency=8, lease=lease):
        assert began.wait(WAIT)
        until(lambda: done(app) == 600)
    fences = [job.fence for job in app.ledger.find(Query(limit=1000)).jobs]
    assert set(fences) > {1}, "some were given back and claimed again"
