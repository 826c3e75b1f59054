"""Waiting jobs stay in the ledger: a fleet shares a short queue, and memory does not grow with the queue."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from towpath import App, State
from towpath.commands import Append, Purge, Query, Selector, Spec
from towpath.errors import InvalidInput, LedgerBusy, QueueFull
from towpath.events import QueueDeep
from towpath.runtime.caretaker import DepthMonitor
from towpath.runtime.commit.feedback import RetryHints
from towpath.runtime.worker.prefetch import AHEAD_PER_SLOT, PrefetchLimit
from towpath.testing.clock import ManualClock

ROOT = Path(__file__).resolve().parent.parent.parent

WORKER = """
import asyncio, os, sys
from towpath import App
from towpath.events import WorkerStarted

app = App(sys.argv[1])

@app.task(name="piece")
async def piece(number: int) -> int:
    await asyncio.sleep(float(sys.argv[3]))
    return os.getpid()

app.bus.subscribe(WorkerStarted, lambda event: print("ready", flush=True))
app.run(concurrency=int(sys.argv[2]))
"""


@pytest.mark.parametrize(("slots", "pieces"), [(1, 40), (8, 160)])
def test_a_fleet_of_four_shares_a_short_queue(slots: int, pieces: int, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    app = App(url)

    @app.task(name="piece")
    async def piece(number: int) -> int:
        raise NotImplementedError

    with app, ExitStack() as stack:
        app.ledger.version()
        command = [sys.executable, "-c", WORKER, url, str(slots), "0.05"]
        workers = [
            stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            for _ in range(4)
        ]
        try:
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "ready\n"
            handles = piece.enqueue_many(piece.of(number) for number in range(pieces))
            shares = Counter(handle.result(timeout=30) for handle in handles)
        finally:
            for worker in workers:
                worker.terminate()
    assert set(shares) == {worker.pid for worker in workers}
    assert max(shares.values()) <= 1.4 * pieces / 4, shares
    assert min(shares.values()) >= 0.6 * pieces / 4, shares


def test_memory_does_not_grow_with_what_waits() -> None:
    """The small version of `make soak-memory`: 20,000 jobs would be 30 MB if they were kept."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    peaks = []
    for jobs in ("2000", "22000"):
        command = [sys.executable, str(ROOT / "bench" / "soak.py"), jobs]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = json.loads(ended.stdout.splitlines()[-1])
        assert found["ran"] + found["waiting"] + found["running"] >= int(jobs)
        assert found["running"] <= 8 + 8 * AHEAD_PER_SLOT
        peaks.append(found["peak_mb"])
    assert peaks[1] < peaks[0] + 15, peaks


def test_a_worker_holds_little_more_than_it_runs(tmp_path: Path) -> None:
    """Jobs of half a second: within two commits, even slow ones, none of them starts, so at most one is
    prefetched."""
    url = f"sqlite:///{tmp_path}/one.db"
    app = App(url)

    @app.task(name="piece")
    async def piece(number: int) -> int:
        raise NotImplementedError

    with app:
        handles = piece.enqueue_many(piece.of(number) for number in range(40))
        with subprocess.Popen(
            [sys.executable, "-c", WORKER, url, "4", "0.5"], stdout=subprocess.PIPE
        ) as worker:
            handles[12].result(timeout=30)
            held = app.ledger.find(Query(states=(State.RUNNING,), limit=100)).jobs
            worker.terminate()
    assert len(held) <= 4 + 2


class ManualTime:
    """A clock moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_jobs_that_end_together_do_not_look_fast() -> None:
    """Eight slots and jobs of 50 ms: 160 a second, however close together they end."""
    clock = ManualTime()
    pace = PrefetchLimit(8, clock)
    pace.supplied()
    for _ in range(10):
        clock.now += 0.049
        pace.ended(4, 4 * 0.05)
        clock.now += 0.001
        pace.ended(4, 4 * 0.05)
        pace.committed(0.010)
    assert pace.ahead() <= 4


def test_short_jobs_are_claimed_ahead_of_their_slots() -> None:
    clock = ManualTime()
    pace = PrefetchLimit(8, clock)
    pace.supplied()
    for _ in range(10):
        clock.now += 0.010
        pace.ended(200, 200 * 0.0004)
        pace.committed(0.010)
    assert 300 <= pace.ahead() <= 500


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    with App("memory://") as app:
        queue = app.queue("small")
        queue.configure(capacity=1)
        queue.put(b"fits")
        with pytest.raises(QueueFull, match=r"1 of 1 waiting, 1 more asked; try again in 1.0 s") as refused:
            queue.put(b"does not")
        assert refused.value.retry_after == 1.0
        assert refused.value.retryable


class Draining:
    """A full queue of 10, and a manual clock."""

    def __init__(self, app: App) -> None:
        self.app, self.now = app, 100.0
        self.queue = app.queue("orders")
        self.queue.configure(capacity=10)
        self.queue.put_many([b"x"] * 10)
        self.drains = RetryHints(app.ledger, lambda: self.now)

    def after(self, seconds: float, done: int, asked: int = 1) -> float:
        """The hint after so many jobs end in so many seconds, new ones fill the queue, and an append is
        refused."""
        for message in self.queue.get_many(done, wait=0) if done else ():
            message.ack()
        self.queue.put_many([b"x"] * done)
        self.now += seconds
        return self.drains.hinted(QueueFull(queue="orders", depth=10, capacity=10, asked=asked)).retry_after


def test_the_hint_is_how_long_the_queue_takes_to_make_room() -> None:
    with App("memory://") as app:
        orders = Draining(app)
        assert orders.after(0, done=0) == 1.0  # no rate is measured yet
        assert orders.after(0.5, done=5) == 1.0  # no second sample so soon
        assert orders.after(1.5, done=5, asked=10) == 2.0  # ten in two seconds
        assert orders.after(8, done=0, asked=10) == 10.0
        assert orders.after(0.1, done=10, asked=1) == 1.0
        assert orders.after(40, done=0) == 1.0  # the last sample is too old


def test_the_hint_has_bounds_and_grows_while_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with App("memory://") as app:
        orders = Draining(app)
        orders.after(0, done=0)
        assert [orders.after(2, done=0) for _ in range(3)] == [2.0, 4.0, 6.0]
        for _ in range(10):
            orders.after(0, done=10)
        assert orders.after(1, done=10) == 0.1
        assert orders.after(1, done=0, asked=5000) == 60.0
        # Retention deletes finished jobs: no rate is better than a wrong one.
        app.engine.call(Purge(where=Selector(queue="orders", states=(State.DONE,))))
        assert orders.after(1, done=1) == 1.0
        monkeypatch.setattr(
            app.ledger, "queues", lambda: (_ for _ in ()).throw(LedgerBusy(path="x", seconds=1))
        )
        assert orders.after(1, done=0) == 1.0


async def _refused(app: App) -> float:
    with pytest.raises(QueueFull) as refused:
        await app.queue("orders").aput(b"x")
    return refused.value.retry_after


def test_every_door_gives_the_hint() -> None:
    with App("memory://") as app:
        orders = Draining(app)
        app.engine.committer._retry_hints = orders.drains
        orders.after(0, done=0)
        orders.after(4, done=2)
        assert asyncio.run(_refused(app)) == 2.0
        with pytest.raises(QueueFull, match=r"try again in 6.0 s"):
            orders.queue.put_many([b"x"] * 3)
        with pytest.raises(QueueFull, match=r"try again in 2.0 s"):
            app.engine.call_all([Append((Spec(id="y", queue="orders"),))])


def test_a_deep_queue_is_reported_once_until_it_was_below(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    with App("memory://", clock=clock) as app, app.bus.collect(QueueDeep) as published:
        queue, depths = app.queue("deep"), DepthMonitor(app.ledger, app.bus)
        assert depths.due(clock.now()) is None
        queue.configure(warn_depth=3, capacity=10)
        assert queue.warn_depth() == 3

        def look() -> list[int]:
            assert depths.due(clock.advance(1)) == clock.now() + 1_000_000
            return [event.depth for event in published.events]

        queue.put_many([b"1", b"2"])
        assert look() == []
        queue.put_many([b"3", b"4"])
        assert look() == [4]
        queue.put(b"5")
        assert look() == [4]
        for message in queue.get_many(3):
            message.ack()
        assert look() == [4]
        queue.put(b"6")
        assert look() == [4, 3]
        assert published.events[-1] == QueueDeep("deep", 3, 3)
        assert [record.getMessage() for record in caplog.records] == [
            "queue deep is deep: 4 waiting, warn_depth 3",
            "queue deep is deep: 3 waiting, warn_depth 3",
        ]
        queue.configure(warn_depth=None)
        assert queue.warn_depth() is None
        assert depths.due(clock.advance(1)) is None


def test_a_worker_publishes_a_deep_queue() -> None:
    with App("memory://") as app, app.bus.collect(QueueDeep) as published:
        app.queue("deep").configure(warn_depth=2)
        app.queue("deep").put_many([b"1", b"2"])
        app.engine.start_caretaker()
        assert published.expect(timeout=10) == [QueueDeep("deep", 2, 2)]


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"warn_depth": 0}, "^warn_depth is 0"),
        ({"warn_depth": 5, "capacity": 4}, "^warn_depth is 5; it must be at most"),
    ],
)
def test_a_bad_warn_depth_changes_nothing(limits: dict[str, int], why: str) -> None:
    with App("memory://") as app:
        with pytest.raises(InvalidInput, match=why):
            app.queue("q").configure(cap=1, **limits)  # type: ignore[arg-type]
        assert app.queue("q").stats().cap is None
