"""Towpath's side of the benches: an App with tasks that do nothing, and workloads that need their own
process.

python bench/workload.py enqueue URL COUNT [MS]   enqueue every MS (10) milliseconds for another process
python bench/workload.py idle URL SECONDS         run an idle worker; print the CPU seconds that it used
python bench/workload.py memory URL JOBS          run jobs; print the resident MB after a tenth and at the end
python bench/workload.py work URL                 run a worker until SIGTERM
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import apsw
import psycopg
from ledger import resident
from measure import rate

from towpath import App, current
from towpath.ledger.sqlite.ledger import SqliteLedger
from towpath.operations.service import RunOptions

ARGUMENT = "x" * 100
QUEUE = "bench"
PATIENCE = 120.0
"""Seconds after which a run counts as failed."""
IDLE = 0.005
"""Seconds of rest after which the worker, the disk and the caches are idle."""


class BenchApp:
    """An App and its worker. The worker runs an event loop in its own thread; the measuring thread only
    waits."""

    def __init__(self, url: str) -> None:
        self.app = App(url)
        self.run_options: RunOptions = {}
        self._left: Iterator[int] = iter(())
        self._called = threading.Event()
        self.delays: list[float] = []

        async def noop(argument: str) -> None:
            if next(self._left) == 1:
                self._called.set()

        def noop_sync(argument: str) -> None:
            if next(self._left) == 1:
                self._called.set()

        async def stamp(argument: str) -> None:
            self.delays.append((time.monotonic_ns() - int(argument)) / 1e6)
            if next(self._left) == 1:
                self._called.set()

        async def pay(argument: str) -> None:
            current().commit(self._insert)
            if next(self._left) == 1:
                self._called.set()

        self.pay: Any = self.app.task(name="bench.pay", queue=QUEUE)(pay)
        self.noop: Any = self.app.task(name="bench.noop", queue=QUEUE)(noop)
        self.noop_sync: Any = self.app.task(name="bench.noop_sync", queue=QUEUE)(noop_sync)
        self.stamp: Any = self.app.task(name="bench.stamp", queue=QUEUE)(stamp)

    def make_table(self) -> None:
        """Create the user's table into which the commit function of `pay` inserts."""
        text = "CREATE TABLE paid (id {key} PRIMARY KEY, job text NOT NULL, amount bigint NOT NULL)"
        ledger = self.app.ledger
        if isinstance(ledger, SqliteLedger):
            with contextlib.closing(apsw.Connection(str(ledger.path))) as connection:
                connection.execute(text.format(key="INTEGER"))
        else:
            with psycopg.connect(self.app.engine.url) as theirs:
                theirs.execute(text.format(key="bigserial"))
        mark = "?" if isinstance(ledger, SqliteLedger) else "%s"
        self._text = f"INSERT INTO paid (job, amount) VALUES ({mark}, {mark})"

    def _insert(self, connection: Any) -> None:
        connection.execute(self._text, ("order", 17))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.app.close()

    def put_many(self, task: Any, count: int, chunk: int = 1000) -> None:
        for _ in range(0, count, chunk):
            task.enqueue_many(task.of(ARGUMENT) for _ in range(chunk))

    def put_from_threads(self, count: int, each: int) -> float:
        """Jobs enqueued per second by `count` threads, each one job at a time."""
        ready = threading.Barrier(count + 1)

        def work() -> None:
            ready.wait()
            for _ in range(each):
                self.noop.enqueue(ARGUMENT)

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()

        def run() -> None:
            ready.wait()
            for thread in threads:
                thread.join()

        return rate(count * each, run)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Run a worker while the block runs."""
        started: threading.Event = threading.Event()
        stop: list[Callable[[], object]] = []

        async def main() -> None:
            running = asyncio.ensure_future(self.app.arun(**self.run_options))
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(running.cancel))
            started.set()
            with contextlib.suppress(asyncio.CancelledError):
                await running

        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        started.wait()
        try:
            yield
        finally:
            stop[0]()
            thread.join()

    def complete(self, count: int, *tasks: Any) -> float:
        """Jobs per second, from the start of a worker until the last of `count` waiting jobs is durably done.
        The jobs are divided equally between the tasks."""
        for task in tasks:
            self.put_many(task, count // len(tasks))
        target = self.done() + count
        self._expect(count)
        started = time.perf_counter()
        with self.working():
            self._await_calls()
            # All handlers have been called; wait for the last commit.
            while self.done() < target:
                time.sleep(0.001)
            spent = time.perf_counter() - started
        return count / spent

    def completed_by_others(self, count: int) -> float:
        """Jobs per second of workers in other processes, from the resume of a paused queue."""
        queue = self.app.queue(QUEUE)
        queue.pause()
        self.put_many(self.noop, count)
        target = self.done() + count
        # Longer than the polling interval of the workers.
        time.sleep(0.3)
        started = time.perf_counter()
        queue.resume()
        while left := target - self.done():
            # A read costs the server as much as many jobs, so sleep for half of the estimated time left.
            spent = time.perf_counter() - started
            time.sleep(min(max(spent * left / (count - left + 1) / 2, 0.005), 0.1))
            if spent > PATIENCE:
                raise TimeoutError(f"the jobs did not all run within {PATIENCE:g} s")
        return count / (time.perf_counter() - started)

    def pick_up(self) -> float:
        """Milliseconds from the call of `enqueue` to the start of the handler in an idle worker."""
        time.sleep(IDLE)
        target = self.done() + 1
        self._expect(1)
        self.stamp.enqueue(f"{time.monotonic_ns():<100}")
        self._await_calls()
        while self.done() < target:
            time.sleep(0.001)
        return self.delays[-1]

    def picked_up_from(self, others: Callable[[], object], count: int) -> list[float]:
        """The same for `count` jobs that other processes enqueue; `monotonic_ns` is one clock for all
        processes."""
        self._expect(count)
        before = len(self.delays)
        others()
        self._await_calls()
        return self.delays[before:]

    def _expect(self, calls: int) -> None:
        self._left = itertools.count(calls, -1)
        self._called.clear()

    def _await_calls(self) -> None:
        if not self._called.wait(PATIENCE):
            raise TimeoutError(f"the jobs did not all run within {PATIENCE:g} s")

    def done(self) -> int:
        return sum(view.counts.done for view in self.app.ledger.queues().values())


def enqueue(url: str, count: int, gap: int = 10) -> None:
    with BenchApp(url) as ours:
        for _ in range(count):
            time.sleep(gap / 1000)
            ours.stamp.enqueue(f"{time.monotonic_ns():<100}")


def idle(url: str, seconds: int) -> None:
    with BenchApp(url) as ours, ours.working():
        time.sleep(1.0)
        before = time.process_time()
        time.sleep(seconds)
        print(time.process_time() - before)


def memory(url: str, jobs: int) -> None:
    with BenchApp(url) as ours:
        for number in range(10):
            ours.complete(jobs // 10, ours.noop)
            if number in (0, 9):
                print(resident())


def work(url: str) -> None:
    with BenchApp(url) as ours:
        ours._expect(sys.maxsize)
        ours.app.run()


def sqlite(path: Path) -> str:
    return f"sqlite:///{path}"


if __name__ == "__main__":
    workloads: dict[str, Callable[..., None]] = {
        "enqueue": enqueue,
        "idle": idle,
        "memory": memory,
        "work": work,
    }
    workloads[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
