"""One plain spec is one statement, sent without the driver; and the notification that follows it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

from tests.support.waiting import until
from towpath import new_id
from towpath.commands import Spec
from towpath.core.checks import SECOND
from towpath.core.commands import Append, Appended, Cancel, Note, Purge, Selector, SetQueue
from towpath.errors import QueueFull
from towpath.ledger import Answer
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.statements import RawStatement


def put(ledger: PostgresLedger, id: str, queue: str = "q") -> Answer:
    [answer] = ledger.apply([Append((Spec(id=id, queue=queue),))])
    return answer


def statement(ledger: PostgresLedger) -> RawStatement:
    found = ledger._db.raw_append
    assert found is not None
    return found


@pytest.fixture(params=["theirs", "ours"])
def id(request: pytest.FixtureRequest) -> str:
    """An id of a user, and a generated one."""
    return "a" if request.param == "theirs" else new_id()


def test_the_same_id_is_there_once(id: str, ledger: PostgresLedger) -> None:
    first = put(ledger, id)
    assert isinstance(first, Appended)
    assert put(ledger, id) == first
    assert ledger.queues()["q"].counts.ready == 1


def test_one_that_was_deleted_does_not_come_back(id: str, ledger: PostgresLedger) -> None:
    first = put(ledger, id)
    ledger.apply([Cancel(where=Selector(ids=(id,)))])
    ledger.apply([Purge(where=Selector(ids=(id,)))])
    assert ledger.get(id) is None
    assert put(ledger, id) == first
    assert ledger.get(id) is None


def test_a_capacity_holds_from_the_moment_it_is_set(ledger: PostgresLedger) -> None:
    put(ledger, new_id())
    ledger.apply([SetQueue(queue="q", capacity=2), SetQueue(queue="other", capacity=None)])
    put(ledger, new_id())
    assert isinstance(put(ledger, new_id()), QueueFull)
    assert isinstance(put(ledger, "a"), QueueFull)
    assert isinstance(put(ledger, new_id(), "other"), Appended)
    ledger.apply([SetQueue(queue="q", capacity=None)])
    assert isinstance(put(ledger, new_id()), Appended)


def test_capacities_that_several_set_at_once_are_all_known(ledger: PostgresLedger, postgres_url: str) -> None:
    """They are in one row, which other transactions have changed meanwhile."""

    def bound(owner: int) -> None:
        with closing(PostgresLedger(postgres_url)) as own:
            for n in range(20):
                own.apply([SetQueue(queue=f"{owner}-{n}", capacity=1)])
                own.apply([SetQueue(queue=f"{owner}-{n - 1}", capacity=None)] if n else [])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(bound, range(4))) == [None] * 4
    with psycopg.connect(postgres_url) as connection:
        [(known,)] = connection.execute("SELECT bounded FROM towpath.meta").fetchall()
    assert sorted(known) == [f"{owner}-19" for owner in range(4)]
    for owner in range(4):
        assert isinstance(put(ledger, new_id(), f"{owner}-19"), Appended)
        assert isinstance(put(ledger, new_id(), f"{owner}-19"), QueueFull)


def test_an_answer_that_is_late_is_waited_for_asleep(ledger: PostgresLedger, postgres_url: str) -> None:
    id = new_id()
    put(ledger, new_id())
    answers: list[Answer] = []
    with psycopg.connect(postgres_url) as connection:
        connection.execute("LOCK TABLE towpath.turn IN ACCESS EXCLUSIVE MODE")
        thread = threading.Thread(target=lambda: answers.append(put(ledger, id)))
        thread.start()
        waiting = (
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        until(lambda: connection.execute(waiting).fetchone())
        before = time.thread_time_ns(), time.process_time_ns()
        while time.thread_time_ns() - before[0] < 20_000_000:
            pass
        others = time.process_time_ns() - before[1] - (time.thread_time_ns() - before[0])
        connection.commit()
        thread.join()
    assert isinstance(answers[0], Appended)
    assert others < 10_000_000, "it was awake all the time"


def test_a_spec_with_an_interrupted_append_is_appended_once(
    id: str, ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ledger, new_id())
    put(ledger, "b")

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(statement(ledger), "_readable", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(ledger, id)
    assert isinstance(put(ledger, id), Appended)
    assert ledger.queues()["q"].counts.ready == 3


def test_notifications_are_received_after_their_connection_was_lost(
    ledger: PostgresLedger, postgres_url: str
) -> None:
    with (
        closing(PostgresLedger(postgres_url)) as other,
        psycopg.connect(postgres_url, autocommit=True) as connection,
    ):
        for _ in range(3):
            seen = other.version()
            put(ledger, new_id())
            while (version := other.wait(seen, 60)) == seen:
                pass
            assert version != seen
            listening = "query LIKE 'LISTEN%' OR query LIKE '%NOTIFY%'"
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND"
                f" ({listening})"
            )


def test_a_ledger_that_only_appends_has_two_connections(ledger: PostgresLedger, postgres_url: str) -> None:
    put(ledger, new_id())
    with psycopg.connect(postgres_url) as connection:
        count = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
            " pg_backend_pid()"
        )
        assert connection.execute(count).fetchone() == (2,)


@pytest.mark.parametrize("token", ["", "t"])
def test_settings_of_the_fleet_notify_other_processes(
    token: str, ledger: PostgresLedger, postgres_url: str
) -> None:
    """On the fast path of a note and, with a token, on the general path."""
    with closing(PostgresLedger(postgres_url)) as other:
        seen = other.version()
        report = Note(key="worker/box-1", value=b"r", ttl=SECOND, token=token and f"{token}-report")
        before = ledger.version()
        ledger.apply([report])
        assert ledger.version() == before
        ledger.apply([Note(key="towpath/workers", value=b"{}", token=token)])
        assert ledger.version() != before
        # The poll, which finds every commit, is due 5 s after the last one.
        assert other.wait(seen, 3) != seen


def test_own_notifications_do_not_change_the_version(ledger: PostgresLedger) -> None:
    """With both, every commit would be checked twice."""
    seen = ledger.version()
    put(ledger, new_id())
    version = ledger.version()
    assert version == seen + 1
    until(lambda: not ledger._notifications._unpublished)
    assert ledger.wait(version, 0.2) == version
