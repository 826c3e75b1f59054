"""Outages of the server of every kind: workers continue, finish the jobs that they hold, and lose no
acknowledged job."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres_fleet import Fleet, Producer, at_rest, judge
from tests.support.postgres_member import Tasks
from tests.support.running import working
from tests.support.waiting import WAIT, until
from towpath import App, State
from towpath.ledger.postgres.connection import PostgresOptions, connect, end, is_gone
from towpath.testing.postgres import Server

SECONDS = float(os.environ.get("TOWPATH_SOAK_SECONDS", "2"))
"""Seconds of an outage: 30 with `make soak-postgres`, which is longer than any lease here."""
LEASE = 10.0
HELD = 4
CONNECTIONS = 30


@pytest.fixture
def server(postgres_place: Path, tmp_path: Path) -> Iterator[Server]:
    with Server.start(
        postgres_place / f"{tmp_path.name}-{os.getpid()}", max_connections=CONNECTIONS
    ) as server:
        yield server


def passing(seconds: float) -> None:
    """Real time, because a real server is stopped."""
    threading.Event().wait(seconds)


@contextlib.contextmanager
def restarted_fast(server: Server, url: str) -> Iterator[None]:
    server.restart("fast")
    yield


@contextlib.contextmanager
def restarted_immediate(server: Server, url: str) -> Iterator[None]:
    server.restart("immediate")
    yield


@contextlib.contextmanager
def killed(server: Server, url: str) -> Iterator[None]:
    server.kill()
    yield
    server.up()


@contextlib.contextmanager
def away(server: Server, url: str) -> Iterator[None]:
    with server.outage("immediate"):
        yield
        passing(SECONDS)


@contextlib.contextmanager
def backends_ended(server: Server, url: str) -> Iterator[None]:
    """End all sessions repeatedly, new ones included."""
    over = threading.Event()

    def end() -> None:
        while not over.wait(0.05):
            server.end_backends(url)

    thread = threading.Thread(target=end)
    thread.start()
    yield
    passing(SECONDS)
    over.set()
    thread.join()


@contextlib.contextmanager
def no_connection_left(server: Server, url: str) -> Iterator[None]:
    """Other sessions use all connections of the server, and the sessions of the ledger are ended."""
    with contextlib.ExitStack() as stack:

        def take_all() -> None:
            with contextlib.suppress(psycopg.OperationalError):
                while True:
                    stack.enter_context(psycopg.connect(server.url()))

        killer = stack.enter_context(psycopg.connect(server.url(), autocommit=True))
        take_all()
        database = url.rpartition("/")[2]
        killer.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [database]
        )
        take_all()
        yield
        passing(SECONDS)


@contextlib.contextmanager
def statements_time_out(server: Server, url: str) -> Iterator[None]:
    """A table is locked, and the server ends every session that waits for it."""
    database = url.rpartition("/")[2]
    server.query(f"ALTER DATABASE {database} SET statement_timeout = '100ms'")
    server.end_backends(url)
    with psycopg.connect(url) as locker:
        locker.execute("SET statement_timeout = 0")
        locker.execute("LOCK TABLE towpath.job IN ACCESS EXCLUSIVE MODE")
        yield
        passing(SECONDS)
    server.query(f"ALTER DATABASE {database} RESET statement_timeout")
    server.end_backends(url)


Outage = Callable[[Server, str], AbstractContextManager[None]]
OUTAGES: list[Outage] = [
    restarted_fast,
    restarted_immediate,
    killed,
    away,
    backends_ended,
    no_connection_left,
    statements_time_out,
]


@pytest.mark.timeout(300 + 10 * SECONDS)
@pytest.mark.parametrize("outage", OUTAGES)
def test_workers_outlast(outage: Outage, server: Server, tmp_path: Path) -> None:
    url = server.create_database()
    with App(url) as app, App(url) as other:
        hold = Tasks(other).hold
        held = [hold.enqueue("held") for _ in range(HELD)]
        with Fleet(url, tmp_path, [0, 0], lease=LEASE) as fleet:
            with Producer(app, tmp_path) as producer:
                fleet.wait_for_all(other)
                fleet.wait_for_runs("began", "held", HELD)
                fleet.until(lambda: producer.acknowledged > 5, "jobs are acknowledged before")
                with outage(server, url):
                    # The held jobs end while the server is unreachable, or just after the connections were
                    # lost.
                    fleet.release()
                    fleet.wait_for_runs("returned", "held", HELD)
                before = producer.acknowledged
                fleet.until(lambda: producer.acknowledged > before + 5, "jobs are acknowledged again")
            fleet.until(lambda: at_rest(other), "everything is done")
        # The first run counted: no other worker got these jobs.
        assert [job.record().fence for job in held] == [1] * HELD
        jobs = judge(other, fleet)
        assert all(job.state is State.DONE for job in jobs.values())
        names = [url.rpartition("/")[2]]
        idle = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND state LIKE 'idle in transaction%%'"
        )
        assert server.query(idle, names) == [(0,)]


@pytest.mark.parametrize("busy", [True, False])
def test_an_outage_is_two_lines_in_the_log(
    busy: bool, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a producer that enqueues all the time, and with nothing but the upkeep of a worker."""
    caplog.set_level(logging.WARNING, "towpath.jobs")  # without the lines of jobs that run meanwhile
    caplog.set_level(logging.INFO, "towpath")
    records: list[tuple[int, str]] = []
    ended = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelno, record.getMessage()))
            if "is back after" in record.getMessage():
                ended.set()

    log = logging.getLogger("towpath")
    listener = Listener()
    with App(server.create_database()) as app, working(app), contextlib.ExitStack() as stack:
        if busy:
            producer = stack.enter_context(Producer(app, tmp_path))
            while producer.acknowledged < 5:
                passing(0.01)
        until(lambda: "worker started" in caplog.text)
        log.addHandler(listener)
        with server.outage("immediate"):
            passing(2)
        assert ended.wait(WAIT)
        log.removeHandler(listener)
    (warned, began), (informed, over) = records
    assert (warned, informed) == (logging.WARNING, logging.INFO)
    assert "cannot do it now" in began
    assert "are kept and retried until the ledger is back" in began
    assert re.search(r"back after [1-9]\d*\.\d s; \d+ batches", over)
    assert not (busy and "; 0 batches" in over)


def test_a_connection_that_is_lost_at_the_last_moment(postgres: Server, postgres_url: str) -> None:
    """The rollback of an empty transaction fails, because the connection is lost."""
    connection = connect(postgres_url, PostgresOptions())
    connection.execute("BEGIN")
    postgres.end_backends(postgres_url)
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError) as lost:
            end(connection)
        assert is_gone(lost.value)
    connection.close()
