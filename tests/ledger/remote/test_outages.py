"""The server is killed, frozen or replaced under a running worker: no job is lost, and the worker goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.support.processes import WatchedProcess, command
from tests.support.running import working
from tests.support.shell import Shell
from tests.support.waiting import WAIT, until
from tests.support.wire import serving
from towpath import App
from towpath.core.commands import Append, Claim, Claimed, Settle, Settled, Want
from towpath.core.job import Done, Spec
from towpath.errors import LedgerAway
from towpath.ledger import open_ledger


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in [name for name in os.environ if name.startswith("TOWPATH_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)


@contextmanager
def restarted(shell: Shell, listen: str) -> Iterator[WatchedProcess]:
    with command(shell, "serve", "--listen", listen) as server:
        address_of(server)
        yield server


def address_of(server: WatchedProcess) -> str:
    return server.until("serves").rpartition(" ")[2]


def test_a_server_is_killed_under_a_worker(shell: Shell) -> None:
    """Twice. The worker lives, so every job runs exactly once: claims whose answer was lost are given
    back, and the ends of jobs are sent again."""
    ran: Counter[int] = Counter()
    reached = threading.Semaphore(0)
    total, address = 600, f"unix://{shell.folder / 's.sock'}"
    with ExitStack() as stack:
        server = stack.enter_context(restarted(shell, address))
        app = App(address)

        @app.task
        def job(number: int) -> None:
            ran[number] += 1
            if number % (total // 6) == 0:
                reached.release()

        with app:
            handles = job.enqueue_many([job.of(number) for number in range(total)])
            with working(app, concurrency=8, lease=60.0):
                for _ in range(2):
                    assert reached.acquire(timeout=WAIT)
                    server.end(signal.SIGKILL)
                    server = stack.enter_context(restarted(shell, address))
                for handle in handles:
                    handle.result(timeout=WAIT)
            assert app.ledger.check() == []
    assert ran == Counter(range(total))


def test_a_frozen_server(shell: Shell) -> None:
    with command(shell, "serve", "--listen", "127.0.0.1:0") as server:
        address = address_of(server)
        with closing(open_ledger(f"{address}?timeout=1")) as ledger:
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                began = time.monotonic()
                with pytest.raises(LedgerAway, match=f"{address} cannot do it now: no answer within 1 s"):
                    ledger.apply([Append((Spec(id="a", queue="q"),))])
                with pytest.raises(LedgerAway, match="no answer within 1 s"):
                    ledger.get("a")
                assert 2 <= time.monotonic() - began < WAIT
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            # The server has received the request and may apply it now.
            ledger.apply([Append((Spec(id="a", queue="q"),))])
            assert ledger.queues()["q"].counts.ready == 1


def test_a_killed_worker_loses_its_jobs_with_their_leases(shell: Shell) -> None:
    (shell.folder / "slow.py").write_text(
        "import os, time, towpath\n"
        "app = towpath.App()\n"
        "@app.task(name='slow')\n"
        "def slow() -> None:\n"
        "    os.write(1, b'started\\n')\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    with command(shell, "serve", "--listen", "127.0.0.1:0") as server:
        address = address_of(server)
        with closing(open_ledger(address)) as ledger:
            ledger.apply([Append((Spec(id="j", queue="default", kind="slow", payload=b"{}"),))])
            worker = ("--url", address, "worker", "slow:app", "--lease", "1s")
            with command(shell, *worker) as first:
                first.until("started")
                first.end(signal.SIGKILL)
            (shell.folder / "go").touch()
            with command(shell, *worker) as second:
                second.until("started")
                until(lambda: ledger.queues()["default"].counts.done == 1)
                assert second.end() == 0
            job = ledger.get("j")
            assert job is not None
            assert (job.losses, job.attempts) == (1, 2)


@pytest.mark.ledgers("sqlite", "postgres")
def test_clients_are_not_bound_to_a_server(url: str) -> None:
    """Two servers on one ledger. A job that was claimed through one is settled through the other, and a
    commit through one wakes the clients of the other."""
    with App(url) as one, App(url) as two, serving(two) as second:
        with closing(open_ledger(second.address)) as far:
            with serving(one) as first, closing(open_ledger(first.address)) as near:
                near.apply([Append((Spec(id="a", queue="q"),))])
                [claimed] = near.apply([Claim(owner="w", wants=(Want("q"),), lease=60_000_000)])
                assert isinstance(claimed, Claimed)
                seen = far.version()
                near.apply([Append((Spec(id="b", queue="q"),))])
                until(lambda: far.wait(seen, 1) != seen)
            [claim] = claimed.claims
            [settled] = far.apply([Settle(claim.id, claim.fence, Done())])
            assert isinstance(settled, Settled)
            assert (far.queues()["q"].counts.done, far.queues()["q"].counts.ready) == (1, 1)
