"""Faults below a worker: a full disk, a ledger that is removed or replaced, a clock that jumps, a name used
twice."""

from __future__ import annotations

import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import towpath
from tests.support.processes import enqueue, faulty_worker
from tests.support.running import working
from tests.support.shell import Shell
from tests.support.waiting import WAIT, until
from towpath import App, State
from towpath.commands import Query
from towpath.core.checks import SECOND
from towpath.errors import LedgerGone, OrphanedLog
from towpath.operations.schedules import list_schedules

# The disk is full

FULL = """
import logging, os, resource, sys, threading
import towpath
from towpath.errors import DiskFull
from towpath.operations.service import Service

folder, how = sys.argv[1:]
app = towpath.App(f"sqlite:///{folder}/work.db")
logged = threading.Event()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

class Listener(logging.Handler):
    def emit(self, record):
        if "the disk or the allowed size is full" in record.getMessage():
            logged.set()

logging.getLogger("towpath").addHandler(Listener())

def fill():
    if how == "limit":
        size = max(os.path.getsize(f"{folder}/{name}") for name in os.listdir(folder))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        return
    with open(f"{folder}/ballast", "wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError:
            return

def make_room():
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    else:
        os.remove(f"{folder}/ballast")

ready, go_on = threading.Barrier(5), threading.Event()

@app.task
def works(n: int) -> str:
    if n < 4:
        ready.wait(20)
        go_on.wait(20)
    return f"{n}" * 20_000

service = app._service({"concurrency": 4})
thread = threading.Thread(target=service.run)
thread.start()
handles = [works.enqueue(n) for n in range(8)]
ready.wait(20)
fill()
go_on.set()
assert logged.wait(20)
try:
    for n in range(1000):
        handles.append(works.enqueue(8 + n))
    print("never full")
except DiskFull as error:
    print("refused:", error)
make_room()
for n, handle in enumerate(handles):
    assert handle.result(20) == f"{n}" * 20_000
    assert (handle.status().attempts, handle.status().failures) == (1, 0), handle.status()
service.stop()
thread.join(20)
done = app.ledger.find(towpath.commands.Query(states=(towpath.State.DONE,), limit=1000)).jobs
print("done", len(done) == len(handles), app.ledger.integrity())
app.close()
"""


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root can make a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs and resource limits as on Linux")
@pytest.mark.parametrize("how", ["disk", "limit"])
def test_a_worker_outlasts_a_full_disk(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "small"

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", FULL, str(folder), how]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    if how == "disk":
        if not shutil.which("mount"):
            pytest.skip("no mount here")
        with small_disk(folder):
            ran = run()
    else:
        folder.mkdir()
        ran = run()
    first, last = ran.stdout.splitlines() or ["", ran.stderr]
    assert first.startswith("refused:"), ran
    assert "free space and try again, nothing was written" in first
    assert last == "done True []", ran


# The ledger is removed


def remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def replace(path: Path) -> None:
    remove(path)
    towpath.open_ledger(f"sqlite:///{path}").close()


def move(path: Path) -> None:
    path.rename(path.with_name("moved.db"))


def remove_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "all slots taken"])
@pytest.mark.parametrize("vanish", [remove, replace, move, remove_log])
def test_a_worker_with_a_removed_ledger_logs_it_and_ends(
    tmp_path: Path, vanish: Callable[[Path], None], busy: bool
) -> None:
    path = tmp_path / "work.db"
    app = App(f"sqlite:///{path}")
    with faulty_worker(app, concurrency=1, lease=0.6, last_word=0.5) as worker:
        if busy:
            enqueue(app, "thread.hangs")
            worker.until("started")
        else:
            enqueue(app, "pid").result(WAIT)
        kept = app.engine.call(towpath.commands.Note(key="k", value=b"v"))
        assert kept
        vanish(path)
        assert worker.process.wait(WAIT) == 1
        assert worker.silent()
    reason = f"{path} was removed or replaced while it was open"
    assert any(f"the worker stops because the ledger is lost: {reason}" in line for line in worker.lines), (
        worker.lines
    )
    # Every other process that has it open gets the error too, with every call.
    for question in (
        lambda: enqueue(app, "pid"),
        lambda: app.ledger.get("x"),
        app.ledger.version,
        app.ledger.check,
    ):
        with pytest.raises(LedgerGone, match="was removed or replaced"):
            question()
    app.close()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_nothing_is_acknowledged_after_a_file_was_removed(tmp_path: Path, suffix: str) -> None:
    """From the first call on: the files are checked before each answer, not at intervals."""
    path = tmp_path / "work.db"
    with App(f"sqlite:///{path}") as app:
        enqueue(app, "pid")
        assert app.ledger.get("x") is None  # this process has checked the files just now
        Path(f"{path}{suffix}").unlink()
        for _ in range(10):
            with pytest.raises(LedgerGone, match="was removed or replaced"):
                enqueue(app, "pid")


KILLED = """
import os, signal, sys
from towpath import App

app = App(sys.argv[1])

@app.task(name="work")
def work(n: int) -> None:
    pass

for n in range(50):
    work.enqueue(n)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("instead", [None, b""], ids=["missing", "empty"])
def test_a_log_without_its_database_is_kept(tmp_path: Path, instead: bytes | None) -> None:
    path, moved, log = tmp_path / "work.db", tmp_path / "moved.db", tmp_path / "work.db-wal"
    url = f"sqlite:///{path}"
    assert subprocess.run([sys.executable, "-c", KILLED, url], check=False).returncode == -signal.SIGKILL
    before = log.read_bytes()
    path.rename(moved)
    if instead is not None:
        path.write_bytes(instead)
    with App(url) as app, pytest.raises(OrphanedLog, match=r"work[.]db-wal holds commits"):
        enqueue(app, "pid")
    for arguments in (["put", "q", "1"], ["stats"], ["doctor"], ["ledger", "migrate"]):
        ran = Shell(tmp_path)(*arguments, "--url", url, code=4)
        assert "holds commits" in ran.out + ran.err
    assert log.read_bytes() == before
    moved.rename(path)
    with App(url) as app:
        assert app.ledger.queues()["default"].counts.ready == 50
        assert app.ledger.check() == []


@pytest.mark.parametrize("vanish", [remove, replace])
def test_the_first_read_of_a_removed_ledger(tmp_path: Path, vanish: Callable[[Path], None]) -> None:
    path = tmp_path / "work.db"
    with closing(towpath.open_ledger(f"sqlite:///{path}")) as ledger:
        ledger._presence.check_now()  # type: ignore[attr-defined]  # the next check is some time later
        vanish(path)
        with pytest.raises(LedgerGone):
            ledger.get("a")


def test_a_waiter_for_a_result_gets_the_error(tmp_path: Path) -> None:
    path = tmp_path / "work.db"
    with App(f"sqlite:///{path}") as app:
        handle = enqueue(app, "pid")
        errors: queue.Queue[BaseException] = queue.Queue()

        def wait() -> None:
            try:
                handle.result(WAIT)
            except LedgerGone as error:
                errors.put(error)

        thread = threading.Thread(target=wait)
        thread.start()
        remove(path)
        assert isinstance(errors.get(timeout=WAIT), LedgerGone)
        thread.join(WAIT)


# One name, two workers


def test_two_workers_of_one_name_share_the_work(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    ran: queue.Queue[tuple[int, int]] = queue.Queue()
    meet = threading.Barrier(2)

    def hire(number: int) -> App:
        app = App(url, name="box")

        @app.task(name="works")
        def works(n: int) -> int:
            if n < 2:
                meet.wait(WAIT)
            ran.put((number, n))
            return n

        return app

    with hire(1) as first, hire(2) as second:
        assert first.engine.owner != second.engine.owner
        assert first.engine.owner.startswith("box#")
        with working(second, concurrency=1, lease=3):
            with working(first, concurrency=1, lease=3):
                # The first two need a worker each.
                handles = first.tasks["works"].enqueue_many([first.tasks["works"].of(n) for n in range(50)])
                assert [each.result(WAIT) for each in handles] == list(range(50))
            # A worker that ends does not affect the other one.
            assert first.tasks["works"].enqueue(50).result(WAIT) == 50
        done = first.ledger.find(Query(states=(State.DONE,), limit=100)).jobs
        assert {job.attempts for job in done} == {1}
        assert first.ledger.check() == []
    rows = [ran.get() for _ in range(ran.qsize())]
    assert sorted(n for _, n in rows) == list(range(51))
    assert {number for number, n in rows if n < 2} == {1, 2}


# The clock jumps


class Stepping:
    """The clock of the machine, which the test sets."""

    def __init__(self) -> None:
        self.offset = 0
        self._system = towpath.clock.SystemClock()

    def now(self) -> int:
        return self._system.now() + self.offset


HOUR = 3600 * SECOND


@pytest.fixture
def clock() -> Stepping:
    return Stepping()


@pytest.fixture
def app(url: str, clock: Stepping) -> Iterator[App]:
    with App(url, clock=clock) as app:
        yield app
        assert app.ledger.check() == []


@pytest.mark.parametrize("step", [-HOUR, HOUR], ids=["back", "forward"])
def test_a_running_job_keeps_its_lease_when_the_clock_steps(app: App, clock: Stepping, step: int) -> None:
    started, go_on = threading.Event(), threading.Event()

    @app.task
    def long() -> str:
        started.set()
        assert go_on.wait(WAIT)
        return "kept"

    @app.task
    def beat() -> int:
        return 1

    with working(app, lease=1.5):
        handle = long.enqueue()
        assert started.wait(WAIT)
        clock.offset += step
        # Other processes open and close the ledger, upkeep is applied, and the lease is renewed (ledger time
        # stands still if the clock went back).
        held = handle.record().lease_until
        for _ in range(10):
            assert beat.enqueue().result(WAIT) == 1
        app.engine.leases.renew(0.0)
        if step > 0:
            until(lambda: handle.record().lease_until != held)
        go_on.set()
        assert handle.result(WAIT) == "kept"
    job = handle.status()
    assert (job.attempts, job.losses, job.failures) == (1, 0, 0)


# On PostgreSQL the server's clock counts.
@pytest.mark.ledgers("memory", "sqlite")
def test_delays_and_retries_when_the_clock_steps_forward(app: App, clock: Stepping) -> None:
    attempts: queue.Queue[int] = queue.Queue()

    @app.task(backoff=1800, max_attempts=2)
    def flaky() -> str:
        attempts.put(towpath.current().attempt)
        if towpath.current().attempt == 1:
            raise ValueError("not yet")
        return "fine"

    @app.task
    def later() -> str:
        return "on time"

    with working(app):
        retried, delayed = flaky.enqueue(), later.options(delay=1800).enqueue()
        too_late = later.options(delay=7200).enqueue()
        assert attempts.get(timeout=WAIT) == 1
        until(lambda: retried.status().state is State.SCHEDULED)
        clock.offset += HOUR
        assert (retried.result(WAIT), delayed.result(WAIT)) == ("fine", "on time")
        assert too_late.status().state is State.SCHEDULED


def test_delays_and_retries_when_the_clock_steps_back(app: App, clock: Stepping) -> None:
    """Ledger time stands still until the clock has caught up: no job is early, and jobs without a delay
    run."""

    @app.task(backoff=0, max_attempts=2)
    def at_once() -> str:
        if towpath.current().attempt == 1:
            raise ValueError("not yet")
        return "fine"

    @app.task
    def later() -> str:
        return "on time"

    with working(app):
        at_once.enqueue().result(WAIT)
        clock.offset -= HOUR
        assert at_once.enqueue().result(WAIT) == "fine"
        delayed = later.options(delay=1).enqueue()
        assert at_once.enqueue().result(WAIT) == "fine"
        assert delayed.status().state is State.SCHEDULED
        clock.offset += HOUR + SECOND
        assert delayed.result(WAIT) == "on time"


def test_schedules_when_the_clock_steps(app: App, clock: Stepping) -> None:
    fired: queue.Queue[str] = queue.Queue()

    @app.every(60, missed="once")
    def ticks() -> None:
        fired.put(towpath.current().job.headers["scheduled-at"])

    with working(app):
        until(lambda: bool(list_schedules(app.engine)))
        clock.offset += HOUR
        first = fired.get(timeout=WAIT)
        clock.offset -= HOUR // 2
        clock.offset += HOUR
        second = fired.get(timeout=WAIT)
    # Sixty fires were missed and one was made; the step back fired nothing a second time.
    assert fired.empty()
    assert first != second
