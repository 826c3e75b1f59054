"""The peers: other queues on SQLite, each used as documented and tuned for speed, all with synchronous=FULL.

    python bench/peers.py [--jobs N] [--rounds N] [--dir DIR]

measures each of them in every mode that it offers. The work of each per job:

huey            takes a task by deleting its row: one commit per job, no history, and a crash loses taken
                tasks. Results are off, which saves a second commit. Worker threads share one connection.
litequeue       pop and done, two commits per job; the message stays in the table as done.
persist-queue   get and ack, two commits per job; the item stays in the table as acked.

The last two scan finished rows to find the next one, so a long history slows them down. Their rounds are
therefore short."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import signal
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import huey
import litequeue
import persistqueue
from measure import Peer, PeerSet

ARGUMENT = "x" * 100

logging.getLogger("huey").setLevel(logging.ERROR)


class Huey:
    """SqliteHuey with `fsync=True` and its own consumer, with short polling and without costly extras."""

    def __init__(self, folder: Path, workers: int = 4, worker_type: str = "thread") -> None:
        self._folder, self._workers, self._type = folder, workers, worker_type
        self._huey = huey.SqliteHuey("bench", filename=str(folder / "huey.db"), fsync=True, results=False)
        self._left: Iterator[int] = iter(())
        self._empty = threading.Event()

        def noop(argument: str) -> None:
            if next(self._left) == 1:
                self._empty.set()

        self._task: Any = self._huey.task()(noop)

    def fill(self, count: int) -> None:
        # Filling is not measured, so a second storage on the same file does not sync.
        stage = huey.SqliteHuey("bench", filename=str(self._folder / "huey.db"), fsync=False).storage
        for _ in range(count):
            stage.enqueue(self._huey.serialize_task(self._task.s(ARGUMENT)), 0)
        stage.close()

    def drain(self, count: int) -> float:
        self._left = itertools.count(count, -1)
        self._empty.clear()
        how = {"workers": self._workers, "worker_type": self._type, "initial_delay": 0.001, "max_delay": 0.01}
        consumer = self._huey.create_consumer(periodic=False, check_worker_health=False, **how)
        with _signals_kept():
            started = time.perf_counter()
            consumer.start()
            if self._type == "thread":
                self._empty.wait()
            else:
                # Its processes send no event; poll the queue seldom enough not to disturb them.
                while self._huey.storage.queue_size():
                    time.sleep(0.005)
            spent = time.perf_counter() - started
            consumer.stop(graceful=True)
        return spent

    def enqueue(self, count: int) -> float:
        return _timed(lambda: self._task(ARGUMENT), count)

    def close(self) -> None:
        self._huey.storage.close()


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers that huey's consumer replaces."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {name: signal.getsignal(name) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


class LiteQueue:
    def __init__(self, folder: Path) -> None:
        self._queue = litequeue.LiteQueue(str(folder / "litequeue.db"))
        self._queue.conn.execute("PRAGMA synchronous=FULL")

    def fill(self, count: int) -> None:
        with self._queue.transaction():
            for _ in range(count):
                self._queue.put(ARGUMENT)

    def drain(self, count: int) -> float:
        queue = self._queue

        def work() -> None:
            message = queue.pop()
            assert message.data == ARGUMENT
            queue.done(message.message_id)

        return _timed(work, count)

    def enqueue(self, count: int) -> float:
        return _timed(lambda: self._queue.put(ARGUMENT), count)

    def close(self) -> None:
        self._queue.close()


class PersistQueue:
    """SQLiteAckQueue. Pickle, its default, is its fastest serializer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._queue: Any = persistqueue.SQLiteAckQueue(str(folder / "persist"), auto_commit=True)
        self._queue._putter.execute("PRAGMA synchronous=FULL")

    def fill(self, count: int) -> None:
        self._queue._putter.execute("PRAGMA synchronous=OFF")
        for _ in range(count):
            self._queue.put(ARGUMENT)
        self._queue._putter.execute("PRAGMA synchronous=FULL")

    def drain(self, count: int) -> float:
        queue = self._queue

        def work() -> None:
            # `raw` returns the row id, so that ack need not search for the row.
            queue.ack(queue.get(block=False, raw=True))

        return _timed(work, count)

    def enqueue(self, count: int) -> float:
        return _timed(lambda: self._queue.put(ARGUMENT), count)

    def close(self) -> None:
        self._queue.close()


def _timed(work: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - started


WAYS: Mapping[str, Callable[[Path], Peer]] = {
    "huey, 1 thread": lambda folder: Huey(folder, 1),
    "huey, 2 threads": lambda folder: Huey(folder, 2),
    "huey, 4 threads": lambda folder: Huey(folder, 4),
    "huey, 8 threads": lambda folder: Huey(folder, 8),
    "huey, 1 process": lambda folder: Huey(folder, 1, "process"),
    "huey, 2 processes": lambda folder: Huey(folder, 2, "process"),
    "litequeue": LiteQueue,
    "persist-queue": PersistQueue,
}
IN_TURNS: Mapping[str, float] = {
    "huey, 1 thread": 4.0,
    "huey, 4 threads": 4.0,
    "litequeue": 1.0,
    "persist-queue": 1.0,
}
"""The modes that bench/engine.py runs, and the relative length of their rounds. Rounds of huey are longer,
because its start-up time dominates short ones (1,589 instead of 2,460 jobs/s). One thread is its best mode on
a quiet machine, four on a busy one. Processes were never faster, and must not be forked from a process with
an open ledger."""


def peers(folder: Path, names: Iterable[str]) -> dict[str, Peer]:
    """Create these peers, each in its own directory."""
    made: dict[str, Peer] = {}
    for number, name in enumerate(names):
        place = folder / f"peer{number}"
        place.mkdir()
        made[name] = WAYS[name](place)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=500, help="jobs per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to put the files (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        peer_set = PeerSet(peers(Path(name), WAYS))
        done: dict[str, list[float]] = {way: [] for way in WAYS}
        put: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, peer in peer_set.peers.items():
                done[way].append(peer_set.rate(way, options.jobs))
                put[way].append(200 / peer.enqueue(200))
                peer.drain(200)
        peer_set.close()
    print(
        f"SQLite {sqlite3.sqlite_version}, synchronous=FULL, 100-byte arguments; medians of "
        f"{options.rounds} rounds"
    )
    print(f"{'':20} {'jobs/s':>8} {'enqueue/s':>10}")
    for way in WAYS:
        print(f"{way:20} {statistics.median(done[way]):8,.0f} {statistics.median(put[way]):10,.0f}")


if __name__ == "__main__":
    main()
