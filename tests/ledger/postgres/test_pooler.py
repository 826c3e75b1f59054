"""Behind pgbouncer in transaction mode: a client has a session for one transaction, so no state of the ledger
may stay in it.

This module is skipped where there is no pgbouncer. No package on PyPI carries the program (the one named
`pgbouncer` is a fixture that needs it installed), so the project's own files cannot install it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import psycopg
import pytest

import towpath
from tests.support.postgres_fleet import Fleet, Producer, at_rest, judge, judge_order
from tests.support.postgres_member import CAPS, Tasks
from tests.support.shell import Shell
from towpath import App, State, new_id
from towpath.commands import Append, Claim, Claimed, Done, Note, Settle, Spec, Want
from towpath.errors import LedgerAway, LedgerError, TowpathError
from towpath.ledger import Ledger
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions, options_of
from towpath.testing import ManualClock
from towpath.testing.histories import factory, play
from towpath.testing.postgres import PgBouncer, PoolMode, Server, ServerFailed, empty, pgbouncer_program
from towpath.testing.suite.append import AppendSuite
from towpath.testing.suite.batches import BatchSuite, RepeatSuite
from towpath.testing.suite.claim import ClaimSuite
from towpath.testing.suite.harness import checked
from towpath.testing.suite.keys import UniqueSuite
from towpath.testing.suite.notes import NoteSuite
from towpath.testing.suite.parts import PartSuite
from towpath.testing.suite.settle import SettleSuite

try:
    pgbouncer_program()
except ServerFailed as missing:
    pytest.skip(str(missing), allow_module_level=True)

SIZE = 2
"""Sessions of the server that all clients share."""


@contextlib.contextmanager
def pooler_of(
    server: Server, folder: Path, mode: PoolMode = "transaction", size: int = SIZE
) -> Iterator[PgBouncer]:
    with PgBouncer.start(
        folder / f"pooler-{server.port}-{mode}-{size}-{os.getpid()}", server, mode=mode, size=size
    ) as pooler:
        yield pooler


@pytest.fixture(scope="module")
def pooler(postgres: Server, postgres_place: Path) -> Iterator[PgBouncer]:
    with pooler_of(postgres, postgres_place) as pooler:
        yield pooler


@pytest.fixture
def pooled_url(pooler: PgBouncer, empty_database: str) -> str:
    """A new database, through the pooler, with the right option in the URL."""
    return f"{pooler.url(empty_database)}?pooled=true"


@pytest.fixture(scope="module")
def direct(postgres: Server) -> Iterator[str]:
    """A database that the tests of the suite use one after the other."""
    url = postgres.create_database()
    PostgresLedger(url).close()
    yield url
    postgres.drop_database(url)


class TestPooled(
    BatchSuite, RepeatSuite, AppendSuite, UniqueSuite, ClaimSuite, PartSuite, SettleSuite, NoteSuite
):
    @pytest.fixture
    def ledger(self, clock: ManualClock, direct: str, pooler: PgBouncer) -> Iterator[Ledger]:
        empty(direct)
        with checked(PostgresLedger(pooler.url(direct), PostgresOptions(pooled=True), clock)) as ledger:
            yield ledger


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_answers_as_the_memory_ledger(
    seed: int, direct: str, pooler: PgBouncer, tmp_path: Path
) -> None:
    def pooled() -> Ledger:
        empty(direct)
        return PostgresLedger(pooler.url(direct), PostgresOptions(pooled=True))

    play(seed, 80, factory("memory", tmp_path), pooled)


def sessions(pooler: PgBouncer, direct: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """Every session of the server that is behind the pooler, each held by a transaction of its own."""
    with contextlib.ExitStack() as stack:
        for _ in range(SIZE):
            connection = stack.enter_context(psycopg.connect(pooler.url(direct), prepare_threshold=None))
            connection.execute("SELECT 1")
            yield connection


def leftovers(pooler: PgBouncer, direct: str) -> list[tuple[object, ...]]:
    """The state that the next client of a session would find there."""
    # The settings that a pooler sets for each client, and the defaults.
    theirs = (
        "application_name",
        "client_encoding",
        "DateStyle",
        "TimeZone",
        "standard_conforming_strings",
        "IntervalStyle",
    )
    found: list[tuple[object, ...]] = []
    for connection in sessions(pooler, direct):
        settings = "SELECT name, setting FROM pg_settings WHERE source = 'session' AND NOT name = ANY (%s)"
        found += connection.execute(settings, (list(theirs),)).fetchall()
        found += connection.execute("SELECT 'prepared', statement FROM pg_prepared_statements").fetchall()
        found += connection.execute("SELECT 'listens', pg_listening_channels()").fetchall()
        locks = "SELECT 'lock', objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        found += connection.execute(locks).fetchall()
    return found


def work(url: str, name: str, rounds: int) -> None:
    """Short transactions of every kind."""
    ledger = towpath.open_ledger(url)
    try:
        for n in range(rounds):
            specs = [Spec(queue=name, kind="k", id=f"{name} {n} {m}") for m in range(3)]
            ledger.apply([Append(tuple(specs))])
            [claimed] = ledger.apply([Claim(owner=name, wants=(Want(name, 3),), lease=60_000_000)])
            assert isinstance(claimed, Claimed)
            settles = [Settle(claim.id, claim.fence, Done()) for claim in claimed.claims]
            answers = ledger.apply([*settles, Note(key=f"note {name}", value=str(n).encode())])
            assert not [answer for answer in answers if isinstance(answer, TowpathError)]
            found = ledger.note(f"note {name}")
            assert found is not None
            assert found.value == str(n).encode()
            assert ledger.queues()[name].counts.done == 3 * (n + 1)
    finally:
        ledger.close()


@pytest.mark.parametrize("option", ["?pooled=true", ""])
def test_many_clients_share_two_sessions(option: str, pooler: PgBouncer, empty_database: str) -> None:
    """All of them also migrate at once, at the start."""
    url = f"{pooler.url(empty_database)}{option}"
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(work, url, f"queue{n}", 15) for n in range(6)]:
            done.result()
    assert leftovers(pooler, empty_database) == []
    ledger = towpath.open_ledger(url)
    assert ledger.check() == []
    ledger.close()


def test_a_pool_of_one(postgres: Server, postgres_place: Path, empty_database: str) -> None:
    """No call waits for a second session while it holds the first."""
    with pooler_of(postgres, postgres_place, size=1) as pooler:
        for option in ("?pooled=true", ""):
            work(f"{pooler.url(empty_database)}{option}", f"alone{len(option)}", 3)


def test_workers_in_other_processes(pooled_url: str, tmp_path: Path) -> None:
    with App(pooled_url) as app, contextlib.ExitStack() as stack:
        for part, cap in CAPS.items():
            app.queue("fleet").part(part).configure(cap=cap)
        fleet = stack.enter_context(Fleet(pooled_url, tmp_path, [0, 0, 0], feed=2))
        fleet.until(lambda: len(list(tmp_path.glob("*.fed"))) == 3, "all have fed")
        fleet.until(lambda: at_rest(app), "everything is done")
        judge_order(fleet, judge(app, fleet))


def test_an_idle_worker_is_woken_by_looking(pooled_url: str, tmp_path: Path) -> None:
    with App(pooled_url) as app, Fleet(pooled_url, tmp_path, [0]) as fleet:
        fleet.wait_for_all(app)
        Tasks(app).step.enqueue("here")
        fleet.wait_for_runs("returned", "here", 1)


def test_another_ledger_is_noticed_by_looking(pooled_url: str) -> None:
    one, other = PostgresLedger(*options_of(pooled_url)), PostgresLedger(*options_of(pooled_url))
    seen = one.version()
    other.apply([Append((Spec(queue="q", kind="k", id=new_id()),))])
    assert one.wait(seen, 30) != seen
    assert not one.listens()
    one.close()
    other.close()


def test_a_users_transaction_through_the_pooler(
    pooled_url: str, pooler: PgBouncer, empty_database: str
) -> None:
    ledger = PostgresLedger(*options_of(pooled_url))
    with psycopg.connect(pooler.url(empty_database), prepare_threshold=None) as connection:
        for n in range(10):
            ledger.append_on(connection, [Spec(queue="q", kind="k", id=f"mine {n}")])
            connection.commit()
    assert ledger.queues()["q"].counts.ready == 10
    assert leftovers(pooler, empty_database) == []
    ledger.close()


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(import_module("towpath.ledger.postgres.connection"), "_warned", set())
    caplog.set_level(logging.WARNING, "towpath.postgres")
    return caplog


def test_a_pooler_without_the_option_is_detected(
    pooler: PgBouncer, empty_database: str, unwarned: pytest.LogCaptureFixture
) -> None:
    url = pooler.url(empty_database)
    with App(url) as app, App(url) as other:
        Tasks(app).step.enqueue("one")
        Tasks(other).step.enqueue("two")
        assert not app.ledger.listens()  # type: ignore[attr-defined]
    [option] = unwarned.messages
    assert "is behind a transaction pooler" in option
    assert "?pooled=true" in option
    assert leftovers(pooler, empty_database) == []


def test_a_pooler_with_the_option_is_not_logged(pooled_url: str, unwarned: pytest.LogCaptureFixture) -> None:
    App(pooled_url).close()
    assert unwarned.messages == []


def test_session_mode_is_like_none(
    postgres: Server, postgres_place: Path, empty_database: str, unwarned: pytest.LogCaptureFixture
) -> None:
    with pooler_of(postgres, postgres_place, "session", 20) as pooler:
        one, other = PostgresLedger(pooler.url(empty_database)), PostgresLedger(pooler.url(empty_database))
        while not one.listens():
            one.wait(one.version(), 1)
        seen = one.version()
        other.apply([Append((Spec(queue="q", kind="k", id=new_id()),))])
        assert one.wait(seen, 30) != seen
        one.close()
        other.close()
    assert unwarned.messages == []


def test_doctor_reports_the_pooler(
    pooler: PgBouncer,
    postgres: Server,
    postgres_place: Path,
    empty_database: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path)

    def report(url: str) -> tuple[str, str]:
        found = shell("doctor", "--json", "--url", url).json
        return found["ledger"]["wake_ups"], "\n".join(
            f"{each['what']} {each['advice']}" for each in found["findings"]
        )

    shell("put", "orders", "{}", "--url", empty_database)
    ups, findings = report(f"{pooler.url(empty_database)}?pooled=true")
    assert ups == "by polling: the URL has pooled=true"
    assert "A job may wait up to one second before it starts." in findings
    ups, findings = report(pooler.url(empty_database))
    assert ups == "by polling: the URL leads to a transaction pooler and has no pooled=true"
    assert "Add ?pooled=true to the URL" in findings
    with pooler_of(postgres, postgres_place, "session", 20) as sessions:
        assert report(sessions.url(empty_database))[0] == "by LISTEN and NOTIFY"
    assert leftovers(pooler, empty_database) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_workers_outlast_a_restart_behind_it(mode: str, postgres_place: Path, tmp_path: Path) -> None:
    with (
        Server.start(postgres_place / f"behind-{mode}-{os.getpid()}") as server,
        pooler_of(server, postgres_place) as pooler,
    ):
        url = f"{pooler.url(server.create_database())}?pooled=true"
        with (
            App(url) as app,
            App(url) as other,
            Fleet(url, tmp_path, [0, 0]) as fleet,
            Producer(app, tmp_path) as producer,
        ):
            fleet.wait_for_all(other)
            fleet.until(lambda: producer.acknowledged > 5, "jobs are acknowledged before")
            for _ in range(3):
                server.restart(mode)  # type: ignore[arg-type]
                before = producer.acknowledged
                fleet.until(lambda: producer.acknowledged > before + 5, "jobs are acknowledged again")  # noqa: B023
            producer.__exit__()
            fleet.until(lambda: at_rest(other), "everything is done")
            assert all(job.state is State.DONE for job in judge(other, fleet).values())


def test_a_ledger_that_pgbouncer_cannot_reach_is_away(postgres_place: Path) -> None:
    with (
        Server.start(postgres_place / f"reached-{os.getpid()}") as server,
        pooler_of(server, postgres_place) as pooler,
    ):
        ledger = towpath.open_ledger(f"{pooler.url(server.create_database())}?pooled=true")
        over = threading.Event()
        raised: list[LedgerError] = []

        def put() -> None:
            for n in range(10_000):
                try:
                    ledger.apply([Append((Spec(queue="q", kind="k", id=str(n)),))])
                except LedgerError as error:
                    raised.append(error)
                    if not error.retryable:
                        return
                if over.is_set():
                    return

        thread = threading.Thread(target=put)
        thread.start()
        for _ in range(5):
            server.restart("immediate")
        over.set()
        thread.join()
        assert [error for error in raised if not error.retryable] == []
        until = time.monotonic() + 60.0
        found = None
        while found is None:
            # pgbouncer does not connect again for a moment after an outage of the server.
            try:
                found = ledger.check()
            except LedgerAway:
                assert time.monotonic() < until
        assert found == []
        ledger.close()
