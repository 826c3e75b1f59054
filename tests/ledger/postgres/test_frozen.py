"""A process is frozen, or a session hangs, while it holds the lock on relations: the others continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest

from tests.support import frozen
from tests.support.running import working
from tests.support.waiting import WAIT, in_thread, until
from towpath import App, State, current
from towpath.cli.doctor import server_facts, server_findings
from towpath.core.checks import SECOND
from towpath.core.commands import Append, Claim, Note, Upkeep, Upkept, Want
from towpath.core.job import Spec
from towpath.errors import InvalidInput, JobFailed, LedgerAway
from towpath.ledger.postgres.ledger import PostgresLedger, PostgresOptions, options_of

LOCK = "SELECT pg_advisory_xact_lock('towpath.meta'::regclass::oid::bigint)"


@contextmanager
def frozen_process(url: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, frozen.__file__, url], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "frozen\n"
            yield process
        finally:
            process.kill()


def test_a_frozen_worker_stops_no_other_for_long(postgres_url: str) -> None:
    url = f"{postgres_url}?idle_timeout=3"
    with App(url) as app:

        @app.task
        def hold(key: str) -> None:
            return

        with working(app, lease=2.0), frozen_process(url) as process:
            # The heartbeats of a handler that runs meanwhile are behind the lock as well.
            before = app.queue("held")
            before.put("work")
            message = before.get(lease=2.0, wait=WAIT)
            assert message is not None
            began = time.monotonic()
            handle = hold.options(key="other").enqueue("other")
            handle.result(timeout=WAIT)
            assert time.monotonic() - began < 10
            job = app.ledger.get(message.id)
            assert job is not None
            assert (job.state, job.losses) == (State.RUNNING, 0)
            message.ack()
            # The frozen process continues as after a lost connection.
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout is not None
            assert process.stdout.readline() == "thawed\n"
        assert app.queue("mail").stats().counts.ready == 1
        assert app.ledger.check() == []


def test_the_wait_for_the_lock_has_a_limit_and_the_doctor_names_its_holder(postgres_url: str) -> None:
    url = f"{postgres_url}?lock_timeout=2.5"
    with App(url) as app, psycopg.connect(postgres_url, application_name="a report") as holder:
        task = app.task(nothing)
        task.enqueue()
        holder.execute(LOCK)
        result = in_thread(lambda: refused(task.options(key="k").enqueue))

        def waiting() -> list[str]:
            return [each.what for each in server_findings(server_facts(url)) if "lock on keys" in each.what]

        findings = until(waiting)
        assert f"a report (process {holder.info.backend_pid} of the server" in findings[0]
        assert "1 sessions wait" in findings[0]
        assert "towpath doctor" in result()
        holder.rollback()
        task.options(key="k").enqueue()


def nothing() -> None:
    return


def refused(enqueue: Callable[[], object]) -> str:
    with pytest.raises(LedgerAway) as away:
        enqueue()
    return str(away.value)


def test_no_lease_is_reaped_while_a_session_waits_for_the_lock(postgres_url: str) -> None:
    options = PostgresOptions(lock_timeout=60.0)
    with (
        closing(PostgresLedger(postgres_url)) as ledger,
        closing(PostgresLedger(postgres_url, options)) as waiting,
    ):
        ledger.apply([Append((Spec(id="a", queue="q"),))])
        with psycopg.connect(postgres_url) as holder:
            holder.execute(LOCK)
            result = in_thread(lambda: waiting.apply([Note(key="k", value=b"v", token="t")]))
            ledger.apply([Claim(owner="me", wants=(Want("q"),), lease=SECOND)])
            for _ in range(8):
                holder.execute("SELECT pg_sleep(0.4)")
                (upkept,) = ledger.apply([Upkeep()])
                assert isinstance(upkept, Upkept)
                assert upkept.reaped == 0
            holder.rollback()
        result()
        job = ledger.get("a")
        assert job is not None
        assert (job.state, job.losses) == (State.RUNNING, 0)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "1e9"])
def test_timeouts_of_the_url(text: str) -> None:
    assert options_of("postgresql://h/d?idle_timeout=2.5&lock_timeout=7")[1] == PostgresOptions(
        idle_timeout=2.5, lock_timeout=7.0
    )
    with pytest.raises(InvalidInput, match="commit_timeout"):
        options_of(f"postgresql://h/d?commit_timeout={text}")


def test_a_commit_function_that_idles_for_too_long_fails_alone(postgres_url: str) -> None:
    with App(f"{postgres_url}?commit_timeout=0.3") as app:

        @app.task(max_attempts=1)
        def slow() -> None:
            current().commit(lambda db: threading.Event().wait(1.0))

        handle = slow.enqueue()
        with working(app):
            with pytest.raises(JobFailed):
                handle.result(timeout=WAIT)
            assert app.task(nothing).enqueue().result(timeout=WAIT) is None
