"""A claim starts its scan behind the claimed jobs, and misses no ready job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from towpath.core.commands import Append, Appended, Claim, Claimed, Settle, Upkeep, Want
from towpath.core.job import Done, Spec
from towpath.ledger.postgres import ready_scan
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.ready_scan import FULL_SCAN, LONGEST, ScanPositions
from towpath.testing.postgres import Server

ALL = (-(2**31), 0, 2**31 - 1)
LEAST, MOST = ALL[0], ALL[2]


def take(ledger: PostgresLedger, n: int = 10) -> list[str]:
    (found,) = ledger.apply([Claim(owner="w", wants=(Want("q", n),), lease=10**9)])
    assert isinstance(found, Claimed)
    ledger.apply([Settle(claim.id, claim.fence, Done()) for claim in found.claims])
    return [claim.id for claim in found.claims]


def append(ledger: PostgresLedger, *ids: str, priority: int = 5) -> None:
    answers = ledger.apply([Append(tuple([Spec(id=id, queue="q", priority=priority) for id in ids]))])
    assert isinstance(answers[0], Appended)


def spans(ledger: PostgresLedger) -> list[tuple[int, int, int]]:
    return ledger._db.positions.spans("q")


def test_a_position_is_used_when_earlier_transactions_have_ended() -> None:
    found = ScanPositions()
    found.begin(10, 11)
    found.claimed("q", [(5, 1), (5, 2), (7, 3)], None, found.spans("q"), 0.001)
    assert found.spans("q") == [ALL]
    found.begin(10, 12)  # a transaction has been running since before the scan
    found.claimed("q", [(5, 9)], None, found.spans("q"), 0.001)
    assert found.spans("q") == [ALL]
    found.begin(12, 20)
    found.claimed("q", [], None, found.spans("q"), 0.001)
    assert found.spans("q") == [(LEAST, 0, 5), (5, 2, 7), (7, 3, MOST)]
    assert found.spans("other") == [ALL]
    found.forget()
    assert found.spans("q") == [ALL]


def test_positions_end_where_the_scan_ended() -> None:
    found = ScanPositions()
    found.begin(1, 1)
    found.claimed("q", [(3, 8), (5, 6), (7, 9)], None, found.spans("q"), 0.001)
    found.begin(1, 1)
    found.claimed("q", [(3, 10), (5, 4)], (5, 4), found.spans("q"), 0.001)
    assert found.spans("q") == [(LEAST, 0, 3), (3, 8, 5), (5, 4, MOST)]


def test_the_whole_queue_is_scanned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    found = ScanPositions()
    for _ in range(2):
        found.begin(1, 1)
        found.claimed("q", [(5, 6)], None, found.spans("q"), 1.0)
    assert len(found.spans("q")) == 2
    now += FULL_SCAN + 1
    assert len(found.spans("q")) == 2, "not while that takes so long"
    now += LONGEST
    assert found.spans("q") == [ALL]


def test_what_is_committed_late_is_found_at_once(ledger: PostgresLedger, postgres_url: str) -> None:
    append(ledger, "first")
    with psycopg.connect(postgres_url) as late:
        ledger.append_on(late, [Spec(id="late", queue="q")])
        for n in range(5):
            append(ledger, f"early{n}")
            assert take(ledger) == ([f"early{n}"] if n else ["first", "early0"])
        late.commit()
    assert take(ledger) == ["late"]
    # The position is used when all earlier transactions have ended, which may be a vacuum or another test.
    for n in range(1000):
        append(ledger, f"more{n}")
        assert take(ledger) == [f"more{n}"]
        if len(spans(ledger)) == 2:
            return
    pytest.fail("there is no mark")


def test_a_rolled_back_claim_is_found_at_once(ledger: PostgresLedger, postgres_url: str) -> None:
    append(ledger, "first", "held")
    with psycopg.connect(postgres_url) as other:
        other.execute("SELECT 1 FROM towpath.job WHERE id = 'held' FOR UPDATE")
        assert take(ledger) == ["first"]
        for n in range(5):
            append(ledger, f"more{n}")
            assert take(ledger) == [f"more{n}"]
        other.rollback()
    assert take(ledger) == ["held"]


def test_a_better_priority_and_what_is_ready_again_come_first(ledger: PostgresLedger) -> None:
    for n in range(4):
        append(ledger, f"a{n}", f"b{n}")
        assert take(ledger, 1) == [f"{'ab'[n % 2]}{n // 2}"]
    (claimed,) = ledger.apply([Claim(owner="w", wants=(Want("q", 1),), lease=1)])
    assert isinstance(claimed, Claimed)
    assert [claim.id for claim in claimed.claims] == ["a2"]
    append(ledger, "urgent", priority=1)
    ledger.apply([Upkeep()])
    assert take(ledger) == ["urgent", "a2", "b2", "a3", "b3"]


def test_a_claim_that_declines_has_not_seen_everything(ledger: PostgresLedger, postgres_url: str) -> None:
    append(ledger, "first")
    with psycopg.connect(postgres_url) as late:
        ledger.append_on(late, [Spec(id="once", queue="q", max_attempts=1)])
        append(ledger, "early")
        assert take(ledger) == ["first", "early"]
        late.commit()
    append(ledger, "last")
    (declined,) = ledger.apply([Claim(owner="w", wants=(Want("q", 2, once=0),), lease=10**9)])
    assert declined == Claimed(())
    assert take(ledger) == ["once", "last"]


def test_upkeep_waits_for_no_other_upkeep(ledger: PostgresLedger, postgres_url: str) -> None:
    append(ledger, "a")
    assert take(ledger) == ["a"]
    with psycopg.connect(postgres_url) as other:
        assert other.execute("SELECT until FROM towpath.lease FOR UPDATE").fetchall()
        ledger.apply([Upkeep()])
        assert other.execute("SELECT count(*) FROM towpath.lease").fetchone() == (1,)
    ledger.apply([Upkeep()])
    with psycopg.connect(postgres_url) as other:
        assert other.execute("SELECT count(*) FROM towpath.lease").fetchone() == (0,)


@pytest.fixture
def quiet_url(postgres_place: Path, tmp_path: Path) -> Iterator[str]:
    """On a server of its own: transactions in other databases of a server delay the positions."""
    with Server.start(postgres_place / f"{tmp_path.name}-{os.getpid()}") as server:
        yield server.create_database()


@pytest.mark.parametrize("reads", [True, False])
def test_a_claim_does_not_walk_over_what_was_claimed(
    quiet_url: str, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vacuum cannot remove rows beside a long transaction."""
    monkeypatch.setattr(ready_scan, "FULL_SCAN", 3600.0)
    ledger = PostgresLedger(quiet_url)
    with psycopg.connect(quiet_url) as reader:
        if reads:
            reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT 1 FROM towpath.job")
        rounds, each = 60, 50
        for n in range(rounds):
            append(ledger, *[f"{n}-{i}" for i in range(each)])
            assert len(take(ledger, each)) == each
        ledger.close()  # its statistics are reported at the end of the session
    read = 0
    with psycopg.connect(quiet_url, autocommit=True) as watch:
        until = time.monotonic() + 30
        while read < rounds * each and time.monotonic() < until:
            row = watch.execute(
                "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE schemaname = 'towpath' AND indexrelname"
                " = 'turn_ready'"
            ).fetchone()
            assert row is not None
            read = row[0]
    # Each job once, and the jobs of the last few rounds again; a scan of all claimed jobs would read 30 times
    # as many.
    assert rounds * each <= read <= 8 * rounds * each
