"""Plain ends and the next claim are one statement, which applies all or nothing."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from tests.support.waiting import WAIT, until
from towpath.core.commands import Append, Claim, Claimed, Note, SetQueue, Settle, Settled, Upkeep, Want
from towpath.core.job import After, Done, RetryOutcome, Spec, State
from towpath.errors import LostClaim
from towpath.ledger.postgres.fast_paths import SKIPPED_AFTER_MISS
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.rows import PostgresDb


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The statements from now on."""
    texts: list[bytes] = []
    execute = PostgresDb.execute

    def recorded(self: PostgresDb, query: bytes, args: Any = ()) -> Any:
        texts.append(query)
        return execute(self, query, args)

    monkeypatch.setattr(PostgresDb, "execute", recorded)
    return texts


def append(ledger: PostgresLedger, *ids: str, **fields: Any) -> None:
    ledger.apply([Append(tuple([Spec(id=id, queue="q", **fields) for id in ids]))])


def claim(n: int = 10, **fields: Any) -> Claim:
    return Claim(owner="w", wants=(Want("q", n, **fields),), lease=10**9)


def ends(claimed: Any) -> list[Settle]:
    assert isinstance(claimed, Claimed)
    return [Settle(each.id, each.fence, Done()) for each in claimed.claims]


def names(claimed: Any) -> list[str]:
    assert isinstance(claimed, Claimed)
    return [each.id for each in claimed.claims]


def states(ledger: PostgresLedger) -> dict[str, State]:
    return {job.id: job.state for job in ledger.dump()["jobs"]}


def test_one_statement_for_what_a_worker_sends(ledger: PostgresLedger, statements: list[bytes]) -> None:
    append(ledger, "a", "b", "c", payload=b"x")
    (first,) = ledger.apply([claim(2)])
    statements.clear()
    *settled, second = ledger.apply([*ends(first), claim(2)])
    assert len(statements) == 1
    assert settled == [Settled("a", State.DONE), Settled("b", State.DONE)]
    assert isinstance(second, Claimed)
    assert [(each.id, each.fence, each.job.payload, each.job.attempts) for each in second.claims] == [
        ("c", 1, b"x", 1)
    ]
    (third,) = second.claims
    statements.clear()
    assert ledger.apply([Settle("c", third.fence, Done(b"3")), claim()]) == [
        Settled("c", State.DONE),
        Claimed(()),
    ]
    assert len(statements) == 1
    job = ledger.get("c")
    assert job is not None
    assert job.result == b"3"
    counts = ledger.queues()["q"].counts
    assert (counts.ready, counts.running, counts.done) == (0, 0, 3)
    # A repetition is harmless.
    assert ledger.apply([Settle("c", third.fence, Done(b"3")), claim()]) == [
        Settled("c", State.DONE),
        Claimed(()),
    ]


def test_an_empty_result_is_one(ledger: PostgresLedger) -> None:
    append(ledger, "a", "b", "c")
    (held,) = ledger.apply([claim()])
    results = {"a": None, "b": b"", "c": None}
    ledger.apply([Settle(end.id, end.fence, Done(results[end.id])) for end in ends(held)])
    assert {job.id: job.result for job in ledger.dump()["jobs"]} == results


def test_what_touches_others_goes_the_general_way(ledger: PostgresLedger, statements: list[bytes]) -> None:
    append(ledger, "a", "b")
    append(ledger, "c", after=(After("b"),))
    (first,) = ledger.apply([claim()])
    *settled, second = ledger.apply([*ends(first), claim()])
    assert settled == [Settled("a", State.DONE), Settled("b", State.DONE)]
    assert names(second) == ["c"]
    # It is not tried for a while, and then again.
    lengths = []
    for turn in range(SKIPPED_AFTER_MISS + 1):
        append(ledger, f"d{turn}")
        held = ledger.apply([claim()])[0]
        statements.clear()
        ledger.apply([*ends(held), claim()])
        lengths.append(len(statements))
    assert lengths[0] > 1
    assert lengths[-1] == 1


@pytest.mark.parametrize("limit", [{"cap": 1}, {"paused": True}])
def test_a_queue_with_limits_keeps_them(ledger: PostgresLedger, limit: dict[str, Any]) -> None:
    append(ledger, "a", "b", "c")
    (first,) = ledger.apply([claim(1)])
    ledger.apply([SetQueue(queue="q", **limit)])
    *settled, second = ledger.apply([*ends(first), claim()])
    assert settled == [Settled("a", State.DONE)]
    assert names(second) == ([] if "paused" in limit else ["b"])


def test_what_is_due_is_claimed(ledger: PostgresLedger) -> None:
    append(ledger, "late", delay=1000)
    append(ledger, "a", priority=9)
    found: list[str] = []

    def claimed() -> bool:
        found.extend(names(ledger.apply([claim()])[0]))
        return "late" in found

    until(claimed)
    assert sorted(found) == ["a", "late"]


def test_a_job_with_one_attempt_is_not_hoarded(ledger: PostgresLedger) -> None:
    append(ledger, "a", "b", "c", max_attempts=1)
    assert names(ledger.apply([claim(once=1)])[0]) == ["a"]
    assert names(ledger.apply([claim(once=5)])[0]) == ["b", "c"]


def test_it_is_undone_if_another_transaction_changed_one_of_them(
    ledger: PostgresLedger, postgres_url: str
) -> None:
    append(ledger, "a", "b", "c")
    (first,) = ledger.apply([claim(2)])
    answers: list[Any] = []
    with psycopg.connect(postgres_url) as other, psycopg.connect(postgres_url, autocommit=True) as watch:
        other.execute("UPDATE towpath.job SET fence = fence + 1 WHERE id = 'b'")
        thread = threading.Thread(target=lambda: answers.extend(ledger.apply([*ends(first), claim()])))
        thread.start()
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        until(lambda: watch.execute(waits).fetchone() != (0,))
        other.commit()
        thread.join(WAIT)
    *settled, second = answers
    assert settled[0] == Settled("a", State.DONE)
    assert isinstance(settled[1], LostClaim)
    assert names(second) == ["c"]
    assert states(ledger) == {"a": State.DONE, "b": State.RUNNING, "c": State.RUNNING}


def test_a_row_that_makes_no_sense_spares_the_others(
    ledger: PostgresLedger, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    append(ledger, "a", "b")
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("UPDATE towpath.job SET generation = -1, key_policy = 'odd' WHERE id = 'a'")
        assert names(ledger.apply([claim()])[0]) == ["b"]
        assert "job a has values that no ledger wrote" in caplog.text
        other.execute("UPDATE towpath.job SET generation = 0, key_policy = NULL WHERE id = 'a'")
    assert states(ledger) == {"a": State.RUNNING, "b": State.RUNNING}


def test_the_relations_are_not_held_for_longer_than_they_are_needed(
    ledger: PostgresLedger, statements: list[bytes]
) -> None:
    """The holder of the lock keeps all others from it."""
    append(ledger, "a", "b", "c", "d")
    ledger.apply([Note(key="n", value=b"1"), Note(key="n", value=b"2"), Note(key="n", value=b"3")])
    held = ends(ledger.apply([claim()])[0])
    statements.clear()
    ledger.apply([Settle(held[0].id, held[0].fence, RetryOutcome(0, "once more"))])
    assert not [text for text in statements if b"advisory" in text]
    append(ledger, "e", after=(After("b"),))
    statements.clear()
    ledger.apply(held[1:])  # a dependent exists: the need for the lock is detected inside the batch
    ledger.apply([Settle("x", 1, RetryOutcome(0, "unknown")), claim()])
    ledger.apply([Settle("x", 1, RetryOutcome(0, "unknown")), claim()])
    assert len([text for text in statements if b"advisory" in text]) == 2


def test_upkeep_goes_by_itself(ledger: PostgresLedger, statements: list[bytes]) -> None:
    append(ledger, "a", "b", part="p")
    ledger.apply([SetQueue(queue="r", cap=3), Upkeep(), claim(1)])
    assert statements.count(b"BEGIN READ WRITE") == 4  # the append's is one of them
