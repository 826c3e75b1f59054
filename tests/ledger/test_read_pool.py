"""Reads beside each other and beside commits: a pool of connections serves them, and none waits for a long
read or a commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import apsw
import psycopg
import pytest

from tests.support.waiting import WAIT, in_thread, until
from towpath.core.commands import Append, Claim, Claimed, Settle, Settled, Want
from towpath.core.job import Done, Spec, State
from towpath.core.views import GroupQuery, Query
from towpath.errors import LedgerClosed, NestedCall, ReadersBusy
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.ledger.tables.reads import READERS, Reader, ReadPool

TableLedger = SqliteLedger | PostgresLedger

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


def opened(url: str, timeout: float = 600.0) -> TableLedger:
    """A ledger with this timeout of a read. The server does not end a transaction that a test holds."""
    if url.startswith("sqlite:"):
        return SqliteLedger(url.removeprefix("sqlite:///"), SqliteOptions(busy_timeout=timeout))
    return PostgresLedger(
        url, PostgresOptions(idle_timeout=600.0, commit_timeout=600.0, lock_timeout=timeout)
    )


@pytest.fixture
def ledger(url: str) -> Iterator[TableLedger]:
    with closing(opened(url)) as ledger:
        yield ledger
        assert ledger.check() == []


class HeldReads:
    """Reads that have begun their snapshots and then wait for `release`."""

    def __init__(self, ledger: TableLedger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self.inside = self.peak = 0

    def start(self) -> Callable[[], Any]:
        """Start a read in a thread. Returns the function that waits for its result: the count of the jobs."""
        return in_thread(lambda: self._ledger._reads(self._read))

    def release(self) -> None:
        self._gate.set()

    def _read(self, db: Any) -> int:
        before = self._count(db)
        with self._lock:
            self.inside += 1
            self.peak = max(self.peak, self.inside)
        try:
            assert self._gate.wait(WAIT)
            assert self._count(db) == before, "the snapshot has changed"
        finally:
            with self._lock:
                self.inside -= 1
        return before

    def _count(self, db: Any) -> int:
        return len(db.find(Query(bodies=False), 1000))


@contextmanager
def held_reads(ledger: TableLedger, count: int) -> Iterator[list[Callable[[], Any]]]:
    """That many reads, held until the end of the block."""
    reads = HeldReads(ledger)
    results = [reads.start() for _ in range(count)]
    try:
        until(lambda: reads.inside == count)
        yield results
    finally:
        reads.release()
        for result in results:
            result()


def append(ledger: TableLedger, *ids: str) -> None:
    ledger.apply([Append(tuple(Spec(id=id, queue="q") for id in ids))])


def test_commits_and_reads_pass_a_long_read(ledger: TableLedger) -> None:
    append(ledger, "first")
    reads = HeldReads(ledger)
    result = reads.start()
    until(lambda: reads.inside)
    for number in range(100):
        append(ledger, f"{number}")
        assert ledger.get(f"{number}") is not None
    assert ledger.queues()["q"].counts.ready == 101
    reads.release()
    assert result() == 1


def test_reads_pass_a_commit_in_progress(ledger: TableLedger) -> None:
    append(ledger, "a", "b")
    (claimed,) = ledger.apply([Claim(owner="me", wants=(Want("q", 1),), lease=600_000_000)])
    assert isinstance(claimed, Claimed)
    begun, gate = threading.Event(), threading.Event()

    def hold(connection: Any) -> None:
        with pytest.raises(NestedCall):
            ledger.get("a")
        begun.set()
        assert gate.wait(WAIT)

    (claim,) = claimed.claims
    result = in_thread(lambda: ledger.apply([Settle(claim.id, claim.fence, Done(b"1"), within=hold)]))
    assert begun.wait(WAIT)
    for _ in range(10):
        assert [job.state for job in ledger.find(Query(oldest_first=True)).jobs] == [
            State.RUNNING,
            State.READY,
        ]
        assert ledger.queues()["q"].counts.running == 1
        assert ledger.explain("b").id == "b"
        assert ledger.note("none") is None
        assert ledger.groups(GroupQuery()).groups == ()
    gate.set()
    assert isinstance(result()[0], Settled)
    job = ledger.get("a")
    assert job is not None
    assert job.state is State.DONE


def test_fifty_threads_share_the_pool(ledger: TableLedger) -> None:
    append(ledger, "a")
    reads = HeldReads(ledger)
    results = [reads.start() for _ in range(50)]
    until(lambda: reads.inside == READERS)
    until(lambda: len(ledger._readers._waiters) == 50 - READERS)
    reads.release()
    assert [result() for result in results] == [1] * 50
    assert reads.peak == READERS
    assert len(ledger._readers._all) == READERS


def test_short_reads_share_one_connection(ledger: TableLedger) -> None:
    for _ in range(2 * READERS):
        assert in_thread(ledger.queues)() == {}
    assert len(ledger._readers._all) == 1


def test_no_connection_for_a_read_within_the_timeout(url: str) -> None:
    with closing(opened(url, timeout=0.2)) as ledger:
        with held_reads(ledger, READERS), pytest.raises(ReadersBusy, match="all 4 read connections"):
            ledger.queues()
        assert ledger.queues() == {}


def test_close_waits_for_running_reads(url: str) -> None:
    ledger = opened(url)
    append(ledger, "a")
    closed = threading.Event()
    with held_reads(ledger, 2) as results:

        def close() -> bool:
            ledger.close()
            closed.set()
            return True

        end = in_thread(close)

        def is_refused() -> bool:
            try:
                return ledger.queues() is None
            except LedgerClosed:
                return True

        until(is_refused)
        assert not closed.is_set()
    assert [result() for result in results] == [1, 1]
    assert end()


@pytest.mark.ledgers("sqlite")
def test_idle_readers_keep_no_snapshot_of_the_log(ledger: SqliteLedger) -> None:
    append(ledger, "a")
    with held_reads(ledger, READERS):
        append(ledger, "b")
    with closing(apsw.Connection(str(ledger.path))) as other:
        busy, *_ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0]
    assert busy == 0


@pytest.mark.ledgers("postgres")
def test_readers_on_postgresql_are_idle_and_replaced_after_a_loss(ledger: PostgresLedger, url: str) -> None:
    with held_reads(ledger, READERS):
        pass
    before = backends(ledger)
    with psycopg.connect(url, autocommit=True) as other:
        states = other.execute(
            "SELECT DISTINCT state FROM pg_stat_activity WHERE pid = ANY (%s)", (list(before),)
        )
        assert states.fetchall() == [("idle",)]
        killed = min(before)
        other.execute("SELECT pg_terminate_backend(%s)", (killed,))
        until(
            lambda: not other.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (killed,)).fetchall()
        )
    with held_reads(ledger, READERS):
        pass
    after = backends(ledger)
    assert before - after == {killed}
    assert len(after) == READERS


def backends(ledger: PostgresLedger) -> set[int]:
    readers = [reader.connection for reader in ledger._readers._all]
    return {reader.connection.info.backend_pid for reader in readers if reader is not None}


def unused(reader: Reader[str]) -> str:
    return "read"


class TestPool:
    """Of the pool itself, without a database."""

    def test_threads_get_readers_in_the_order_of_their_arrival(self) -> None:
        pool: ReadPool[str] = ReadPool("here", 600.0, size=1)
        gate, order = threading.Event(), list[int]()
        first = in_thread(lambda: pool.run(lambda reader: gate.wait(WAIT)))
        until(lambda: pool._all)
        later = []
        for number in range(5):
            later.append(
                in_thread(lambda number=number: pool.run(lambda reader: order.append(number)) or True)  # type: ignore[misc]
            )
            until(lambda number=number: len(pool._waiters) == number + 1)  # type: ignore[misc]
        gate.set()
        assert first()
        assert [result() for result in later] == [True] * 5
        assert order == [0, 1, 2, 3, 4]

    def test_a_reader_lost_by_an_interrupt_is_replaced(self) -> None:
        pool: ReadPool[str] = ReadPool("here", 600.0, size=1)
        assert pool.run(unused) == "read"
        pool._idle.clear()
        assert pool.run(unused) == "read"
        assert len(pool._all) == 1

    def test_a_failed_read_returns_its_reader(self) -> None:
        pool: ReadPool[str] = ReadPool("here", 600.0, size=1)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                pool.run(lambda reader: 1 // 0)
        assert pool.run(unused) == "read"

    def test_an_interrupted_wait_leaves_the_line(self) -> None:
        """The timeout raises in the same place as an interrupt does."""
        pool: ReadPool[str] = ReadPool("here", 0.05, size=1)

        def nested(reader: Reader[str]) -> int:
            with pytest.raises(ReadersBusy):
                pool.run(unused)
            return len(pool._waiters)

        assert pool.run(nested) == 0
        assert pool.run(unused) == "read"

    def test_a_fork_waits_for_a_running_read(self) -> None:
        pool: ReadPool[str] = ReadPool("here", 600.0)
        inside, gate = threading.Event(), threading.Event()

        def hold(reader: Reader[str]) -> bool:
            inside.set()
            return gate.wait(WAIT)

        result = in_thread(lambda: pool.run(hold))
        assert inside.wait(WAIT)
        locks = pool.locks()
        no_read_begins = next(locks)
        assert no_read_begins.acquire(blocking=False)
        read_has_ended = next(locks)
        assert not read_has_ended.acquire(blocking=False)
        gate.set()
        assert read_has_ended.acquire(timeout=WAIT)
        assert list(locks) == []
        read_has_ended.release()
        no_read_begins.release()
        assert result()
