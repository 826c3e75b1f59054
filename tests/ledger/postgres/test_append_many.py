"""Many plain specs are inserted by one COPY, with the same rows as on the general path."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import psycopg
import pytest

from towpath.core.commands import Append, Appended
from towpath.core.job import Reason, Spec, State
from towpath.errors import NewerSchema, QueueFull
from towpath.ledger import Ledger
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.postgres import fast_paths
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.rows import PostgresDb
from towpath.ledger.postgres.statements import SMALL
from towpath.ledger.tables.database import FastPathRefused
from towpath.testing import ManualClock
from towpath.testing.clock import START
from towpath.testing.ledger_suite import Harness, checked

N = fast_paths.MOST_BY_INSERT + 1


@pytest.fixture
def harness(postgres_url: str) -> Iterator[Harness]:
    with checked(PostgresLedger(postgres_url, clock=ManualClock())) as ledger:
        yield Harness(ledger)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attempt to use COPY succeeded."""
    found: list[bool] = []
    append = fast_paths.append

    def noted(*args: Any) -> Any:
        try:
            answer = append(*args)
        except FastPathRefused:
            found.append(False)
            raise
        found.append(True)
        return answer

    monkeypatch.setattr(fast_paths, "append", noted)
    return found


def specs(prefix: str = "j", n: int = N, **fields: Any) -> list[Spec]:
    return [
        Spec(**{"id": f"{prefix}{at:05}", "queue": "q", "payload": b"%d" % at, **fields}) for at in range(n)
    ]


def mixed() -> list[Spec]:
    """Runs of one and of many specs, with every field that a plain spec may have."""
    numbers = count()
    kinds: list[dict[str, Any]] = [
        {},
        {"kind": "grüße/𝄞", "queue": "other", "priority": 0},
        {"delay": 1},
        {"ready_at": START},
        {"ready_at": 1, "priority": 10},
        {"ready_at": START + 5_000_000, "queue": "third"},
        {"max_attempts": 1, "max_losses": 7, "timeout": 5, "retention": 0},
        {"parent": "p", "correlation_id": "c\\\t\n", "generation": 2**31},
        {"content_type": "text/plain", "payload": b""},
        {"payload": b"\\x00\t\n\\N\0\xff"},
        {"payload": b"x" * SMALL},
        {"payload": b"x" * (SMALL + 1)},
        {"payload": bytes(range(256)) * 300},
    ]
    return [
        Spec(**{"id": f"{'é' * (n % 3)}{next(numbers)}", "queue": "q", "kind": "k", **kind})
        for n in range(6)
        for kind in kinds
        for _ in range(1 + 3 * n)
    ]


def test_it_writes_what_the_memory_ledger_has(harness: Harness, loads: list[bool]) -> None:
    wanted = mixed()
    assert len(wanted) > N
    memory = MemoryLedger()
    ledgers: list[Ledger] = [memory, harness.ledger]
    answers = [
        ledger.apply([Append(tuple(wanted[:50])), Append(tuple(wanted[50:]))], START) for ledger in ledgers
    ]
    assert answers[0] == answers[1]
    assert memory.dump() == harness.ledger.dump()
    assert loads == [True]


def test_they_are_claimed_in_their_order(harness: Harness, loads: list[bool]) -> None:
    harness.append(*specs("b"), *specs("a", 2, priority=1), *specs("later", 3, delay=1_000_000))
    harness.append(*specs("c"))
    assert [claim.id for claim in harness.claim(n=4)] == ["a00000", "a00001", "b00000", "b00001"]
    assert len(harness.claim(n=3 * N)) == 2 * N - 2
    assert loads == [True, True]


def test_ids_that_are_known_keep_their_places(harness: Harness, loads: list[bool]) -> None:
    first = harness.append(*specs())
    assert harness.append(*specs()) == first
    again = harness.append(*specs(n=N + 1))
    assert again[:N] == first
    assert again[N].seq > first[-1].seq
    assert len({placed.id for placed in again}) == N + 1
    # Between known ids, and different from them.
    harness.append(*[Spec(id=f"{spec.id}+", queue="q") for spec in specs()])
    assert loads == [True, False, False, True]


def test_an_id_in_two_appends_of_one_batch_is_one_job(harness: Harness, loads: list[bool]) -> None:
    first, second = harness.ask(Append(tuple(specs())), Append(tuple(specs())))
    assert first == second
    assert harness.counts("q").ready == N
    assert loads == [False]


def test_a_job_that_is_forgotten_is_still_known(harness: Harness, loads: list[bool]) -> None:
    (old,) = harness.append(specs()[7])
    harness.done(harness.take())
    harness.purge(old.id)
    assert harness.ledger.get(old.id) is None
    placed = harness.append(*specs())
    assert placed[7] == old
    assert harness.ledger.get(old.id) is None
    assert loads == [False]


def test_an_id_of_a_concurrent_append_belongs_to_that_append(
    harness: Harness, loads: list[bool], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id is unknown at the check and exists at the insert."""
    with checked(PostgresLedger(postgres_url, clock=ManualClock())) as other:
        blocks = fast_paths._blocks

        def late(*args: Any) -> Any:
            other.apply([Append((specs()[3],))])
            return blocks(*args)

        monkeypatch.setattr(fast_paths, "_blocks", late)
        placed = harness.append(*specs())
    assert placed[3].seq == N + 1  # after the attempts that failed
    assert [each.seq for each in placed if each.id != "j00003"] == list(range(N + 2, 2 * N + 1))
    assert harness.counts("q").ready == N
    assert loads == []  # it raised


def test_numbers_that_others_took_some_of_are_taken_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, gaps = PostgresDb.one, iter([3])

    def torn(self: PostgresDb, name: str, args: Any = ()) -> Any:
        row = one(self, name, args)
        return (row[0], row[1] + next(gaps, 0)) if name == "take_seqs" else row

    monkeypatch.setattr(PostgresDb, "one", torn)
    placed = harness.append(*specs())
    assert [each.seq for each in placed] == list(range(N + 1, 2 * N + 1))


def test_a_queue_with_a_capacity_is_asked(harness: Harness, loads: list[bool]) -> None:
    harness.set_queue(capacity=N)
    assert len(harness.append(*specs())) == N
    harness.refusal(QueueFull, Append(tuple(specs("k"))))
    assert harness.counts("q").ready == N
    assert loads == [False, False]


def test_what_is_not_plain_goes_the_general_way(harness: Harness, loads: list[bool]) -> None:
    harness.append(*specs(), Spec(id="z", queue="q", part="p"))
    harness.append(*specs("k"), Spec(id="y", queue="q", headers={"a": "b"}))
    assert loads == []
    assert harness.job("y").headers == {"a": "b"}


def test_nothing_is_written_under_a_schema_that_is_too_new(
    harness: Harness, loads: list[bool], postgres_url: str
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE towpath.meta SET schema = 99, min_schema = 99")
        with pytest.raises(NewerSchema):
            harness.append(*specs())
        assert connection.execute("SELECT count(*) FROM towpath.job").fetchone() == (0,)
        connection.execute("UPDATE towpath.meta SET schema = 1, min_schema = 1")
    assert loads == [False]


def test_an_interrupt_leaves_nothing_open(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fast_paths.SpecRun.rows

    def interrupted(self: fast_paths.SpecRun, now: int) -> Iterator[bytes]:
        yield next(rows(self, now))
        raise KeyboardInterrupt

    monkeypatch.setattr(fast_paths.SpecRun, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        harness.append(*specs())
    monkeypatch.setattr(fast_paths.SpecRun, "rows", rows)
    assert harness.ledger._db.connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE  # type: ignore[attr-defined]
    (answer,) = harness.ledger.apply([Append(tuple(specs()))])
    assert isinstance(answer, Appended)
    assert harness.job("j00000").state is State.READY
    assert harness.job("j00000").reason is Reason.NONE


def test_one_that_is_interrupted_while_it_is_waited_for_is_there_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with checked(PostgresLedger(postgres_url)) as ledger:
        assert isinstance(ledger, PostgresLedger)
        ledger.apply([Append((Spec(id="a", queue="q"),))])
        one = ledger._db.raw_append
        assert one is not None

        def interrupt(*_: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(one, "_readable", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.apply([Append((Spec(id="b", queue="q"),))])
        (answer,) = ledger.apply([Append((Spec(id="b", queue="q"),))])
        assert isinstance(answer, Appended)
        assert answer.jobs[0].id == "b"
        assert ledger.queues()["q"].counts.ready == 2
