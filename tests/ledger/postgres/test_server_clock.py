"""Time in which no lease could be renewed does not end leases."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import psycopg
import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import Append, Claim, Claimed, Note, Noted, Settle, Settled, Upkeep, Upkept, Want
from towpath.core.job import DONE, Done, Spec
from towpath.errors import LedgerError
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.transaction import ServerClock
from towpath.testing.postgres import Server

LEASE = 2 * SECOND


@pytest.fixture
def server(postgres_place: Path, tmp_path: Path) -> Iterator[Server]:
    with Server.start(postgres_place / f"{tmp_path.name}-{os.getpid()}") as server:
        yield server


def longer_than_the_lease() -> None:
    """Real time, because it is the time of the server."""
    threading.Event().wait(1.1 * LEASE / SECOND)


def fails(ledger: PostgresLedger) -> None:
    with pytest.raises(LedgerError):
        ledger.apply([Upkeep()])


@contextlib.contextmanager
def away(server: Server, url: str, reaper: PostgresLedger) -> Iterator[None]:
    with server.outage("immediate"):
        fails(reaper)
        yield


@contextlib.contextmanager
def away_for_reads(server: Server, url: str, reaper: PostgresLedger) -> Iterator[None]:
    """As a caretaker that is not elected."""
    with server.outage("immediate"):
        with pytest.raises(LedgerError):
            reaper.note("k")
        yield


@contextlib.contextmanager
def locked(server: Server, url: str, reaper: PostgresLedger) -> Iterator[None]:
    """The rest of the ledger is available, and its time passes."""
    with psycopg.connect(url) as locker:
        locker.execute("LOCK TABLE towpath.job IN ACCESS EXCLUSIVE MODE")
        fails(reaper)
        yield
        assert isinstance(reaper.apply([Note(key="k", value=b"v")])[0], Noted)
        fails(reaper)


Outage = Callable[[Server, str, PostgresLedger], AbstractContextManager[None]]


@pytest.mark.parametrize("outage", [away, away_for_reads, locked])
def test_a_holder_settles_its_job_after_an_outage_longer_than_its_lease(
    outage: Outage, server: Server
) -> None:
    url = server.create_database()
    with closing(PostgresLedger(url)) as reaper, closing(PostgresLedger(url)) as holder:
        server.query(f"ALTER DATABASE {url.rpartition('/')[2]} SET statement_timeout = '500ms'")
        server.end_backends(url)
        holder.apply([Append((Spec(id="a", queue="q"),))])
        (claimed,) = holder.apply([Claim(owner="w", wants=(Want("q"),), lease=LEASE)])
        assert isinstance(claimed, Claimed)
        reaper.apply([Upkeep()])
        with outage(server, url, reaper):
            longer_than_the_lease()
        (kept_up,) = reaper.apply([Upkeep()])
        assert isinstance(kept_up, Upkept)
        assert kept_up.reaped == 0
        assert holder.apply([Settle("a", claimed.claims[0].fence, Done())]) == [Settled("a", DONE)]


def test_without_trouble_it_is_taken_for_dead(postgres_url: str) -> None:
    with closing(PostgresLedger(postgres_url)) as reaper, closing(PostgresLedger(postgres_url)) as holder:
        holder.apply([Append((Spec(id="a", queue="q"),))])
        holder.apply([Claim(owner="w", wants=(Want("q"),), lease=LEASE)])
        reaper.apply([Upkeep()])
        longer_than_the_lease()
        (kept_up,) = reaper.apply([Upkeep()])
        assert isinstance(kept_up, Upkept)
        assert kept_up.reaped == 1


class Seen:
    """The clock jumps that a process records for a server with a manual time."""

    def __init__(self) -> None:
        self.server_clock = ServerClock()
        self.now = 1000 * SECOND
        self.batch(Upkeep())

    def passes(self, seconds: int) -> None:
        self.now += seconds * SECOND
        self.server_clock._seen_at -= seconds
        self.server_clock._good_at -= seconds
        if self.server_clock._back_at is not None:
            self.server_clock._back_at -= seconds

    def begin(self, command: Upkeep | Note) -> None:
        self.server_clock.begin(self.now, real=True)
        if isinstance(command, Upkeep):
            self.server_clock.begin_upkeep(self.now, real=True)

    def batch(self, command: Upkeep | Note) -> None:
        self.begin(command)
        self.server_clock.succeed([command])

    @property
    def largest(self) -> int:
        """Seconds of the largest jump."""
        return max([round(size / SECOND) for _, size in self.server_clock.jumps.recorded], default=0)

    def protects(self, ago: int, lease: int) -> bool:
        """Is a lease of so many seconds protected that ended so many seconds ago?"""
        return self.server_clock.jumps.protects(lease * SECOND, self.now - ago * SECOND, self.now)


def test_time_that_passes_is_no_jump() -> None:
    seen = Seen()
    seen.passes(30)
    seen.batch(Upkeep())
    assert seen.largest == 0


def test_a_clock_that_is_set_is_one() -> None:
    seen = Seen()
    seen.passes(30)
    seen.now += 7 * SECOND
    seen.batch(Note(key="k", value=b"v"))
    assert seen.largest == 7


def test_time_without_the_server_is_one() -> None:
    seen = Seen()
    seen.passes(10)
    seen.server_clock.fail()
    seen.passes(20)
    seen.batch(Upkeep())
    assert seen.largest == 30
    assert seen.protects(ago=25, lease=10)
    assert not seen.protects(ago=31, lease=10)
    seen.passes(60)
    seen.batch(Upkeep())
    assert seen.largest == 30
    assert not seen.protects(ago=85, lease=10)


def test_what_succeeds_meanwhile_does_not_end_it() -> None:
    seen = Seen()
    for _ in range(3):
        seen.passes(9)
        seen.server_clock.fail()
        seen.passes(1)
        seen.batch(Note(key="k", value=b"v"))
    seen.batch(Upkeep())
    assert seen.largest == 30
    assert seen.protects(ago=25, lease=10)


def test_an_upkeep_that_only_began_does_not_end_it() -> None:
    seen = Seen()
    for _ in range(3):
        seen.passes(10)
        seen.begin(Upkeep())
        seen.server_clock.fail()
    seen.batch(Upkeep())
    assert seen.largest == 30
    assert seen.protects(ago=25, lease=10)


@pytest.mark.parametrize("only_reads", [True, False])
def test_an_outage_does_not_grow_until_the_next_upkeep(only_reads: bool) -> None:
    seen = Seen()
    with pytest.raises(OSError, match="gone"), seen.server_clock.tracking():
        raise OSError("gone")
    seen.passes(2)
    for _ in range(60):
        if only_reads:
            with seen.server_clock.tracking():
                pass
        else:
            seen.batch(Note(key="k", value=b"v"))
        seen.passes(60)
    seen.batch(Upkeep())
    assert seen.largest == 2
    assert not seen.protects(ago=1, lease=30)


def test_a_long_upkeep_after_it_is_no_trouble() -> None:
    seen = Seen()
    seen.server_clock.fail()
    seen.begin(Upkeep())
    seen.passes(20)
    seen.server_clock.succeed([Upkeep()])
    seen.batch(Upkeep())
    assert seen.largest == 0
