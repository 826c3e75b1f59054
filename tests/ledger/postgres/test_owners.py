"""The locks of owners on the server: free when the process has ended, and taken again when only its
connection was lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from tests.support.waiting import WAIT
from towpath.errors import LedgerAway
from towpath.ledger import LeasesOnly
from towpath.ledger.postgres import owners
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions
from towpath.ledger.postgres.owners import FREE, lock_of
from towpath.testing.postgres import Server

PROGRAM = """
import sys
from towpath.ledger.postgres import PostgresLedger
ledger = PostgresLedger(sys.argv[1])
ledger.owners.announce(sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
ledger.close()
"""


@contextmanager
def process(url: str, owner: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, url, owner]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            assert started.stdout.readline()
            yield started
        finally:
            started.kill()


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the tests has just been started."""
    monkeypatch.setattr(owners, "GRACE", 0.0)


@pytest.fixture
def server(postgres_place: Path, tmp_path: Path) -> Iterator[Server]:
    with Server.start(postgres_place / f"{tmp_path.name}-{os.getpid()}") as server:
        yield server


def looks(ledger: PostgresLedger, seconds: float) -> Iterator[tuple[str, ...]]:
    """The dead owners that a caretaker reads for so many seconds. It reads again after an outage."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(LedgerAway):
            yield ledger.owners.dead()
        threading.Event().wait(0.2)


def is_locked(url: str, owner: str) -> bool:
    with psycopg.connect(url, autocommit=True) as other:
        row = other.execute("SELECT pg_try_advisory_lock(%s)", (lock_of("towpath", owner),)).fetchone()
    return row == (False,)


def rows(url: str) -> list[str]:
    with psycopg.connect(url) as other:
        return [name for (name,) in other.execute("SELECT name FROM towpath.owner ORDER BY name")]


def test_dead_after_two_seconds(ledger: PostgresLedger, postgres_url: str) -> None:
    with process(postgres_url, "a#1") as a, process(postgres_url, "b#1"):
        assert ledger.owners.dead() == ()
        a.kill()
        killed = time.monotonic()
        found = next(dead for dead in looks(ledger, WAIT) if dead)
        assert found == ("a#1",)
        assert time.monotonic() - killed >= FREE
        ledger.owners.forget(["a#1", "b#1"])
        assert (ledger.owners.dead(), rows(postgres_url)) == ((), ["b#1"])


def test_an_orderly_close_withdraws(postgres_url: str) -> None:
    with closing(PostgresLedger(postgres_url)) as ledger:
        ledger.owners.announce("a#1")
        assert rows(postgres_url) == ["a#1"]
        assert is_locked(postgres_url, "a#1")
    assert rows(postgres_url) == []


def test_announced_after_the_close(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer may start its caretaker while another thread closes the ledger: no error of a socket."""
    monkeypatch.setattr(owners, "ANNOUNCED", 0)
    ledger = PostgresLedger(postgres_url)
    ledger.close()
    ledger.owners.announce("w#1")


def test_the_living_are_not_dead_when_their_connections_are_ended(
    postgres: Server, postgres_url: str
) -> None:
    with closing(PostgresLedger(postgres_url)) as alive, closing(PostgresLedger(postgres_url)) as other:
        alive.owners.announce("a#1")
        for _ in range(3):
            postgres.end_backends(postgres_url)
            assert set(looks(other, 0.5)) <= {()}
        assert set(looks(other, FREE)) <= {()}
        assert is_locked(postgres_url, "a#1")


def test_nor_when_the_server_restarts(server: Server) -> None:
    url = server.create_database()
    with closing(PostgresLedger(url)) as alive, closing(PostgresLedger(url)) as other:
        alive.owners.announce("a#1")
        server.restart("fast")
        assert set(looks(other, FREE + 1)) <= {()}
        assert is_locked(url, "a#1")


def test_behind_a_pooler_leases_decide(postgres_url: str) -> None:
    with closing(PostgresLedger(postgres_url, PostgresOptions(pooled=True))) as ledger:
        assert isinstance(ledger.owners, LeasesOnly)
        ledger.owners.announce("a#1")
        assert rows(postgres_url) == []
