"""Experiments with processes: kills, freezes, outages and a full disk, while producers enqueue and workers
run jobs.

Each experiment ends when everything that was acknowledged has ended, or when it takes too long, and is then
audited."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.audit import ALL_PROCESSES, Event, Findings, Record, audit, event, runs_of
from tests.chaos.stores import MB, PostgresStore, SqliteStore, Store, filled, postgres_store, small_disk
from tests.support.postgres_fleet import Fleet, all_jobs, at_rest
from towpath import App, open_ledger
from towpath.commands import Spec
from towpath.core.commands import Append
from towpath.errors import LedgerError
from towpath.ledger.sqlite.ledger import FAULT_POINTS
from towpath.runtime.caretaker import CARETAKER_KEY as CARETAKER

ROOT = Path(__file__).parents[2]
LEASE = 4.0
PATIENCE = 90.0
"""Seconds after which an unfinished job counts as lost."""
STARTING = 5.0
"""Seconds that a process may take until it handles signals."""
PACE = 0.04
"""Seconds between two requests of a producer, on average."""


class ChaosFleet(Fleet):
    """Two workers and two producers. A killed process is replaced by one with a new name."""

    def __init__(self, store: Store, seed: int, size: int = 10) -> None:
        super().__init__(store.url, store.folder, [])
        self.store, self.dice, self.size = store, random.Random(seed), size
        self.events: list[Event] = []
        self.hired, self.numbers = 0.0, itertools.count()
        self.armed: dict[str, int] = {}
        """Workers that a fault point will kill, and when they were started."""
        for _ in range(2):
            self.hire("worker")
            self.hire("producer")

    def hire(self, role: str, fault: tuple[str, int] | None = None) -> str:
        name, self.hired = f"{role}{next(self.numbers)}", time.monotonic()
        more = [str(LEASE)] if role == "worker" else [str(PACE), str(self.size)]
        if fault is not None:
            more += [fault[0], str(fault[1])]
            self.armed[name] = time.monotonic_ns()
        self.start(
            name, ["-m", "tests.chaos.actor", self.store.url, str(self.folder), name, role, *more], ROOT
        )
        return name

    def alive(self, role: str) -> list[str]:
        return [
            name for name, process in self.members.items() if name.startswith(role) and process.poll() is None
        ]

    def busy(self, role: str) -> list[str]:
        """The processes that have run or enqueued a job: killing processes that still start proves
        nothing."""
        records = {
            name: self.folder / f"{name}.{'runs' if role == 'worker' else 'asked'}"
            for name in self.alive(role)
        }
        return [name for name, record in records.items() if record.exists() and record.stat().st_size]

    def replace(self, name: str, fault: tuple[str, int] | None = None) -> None:
        at = time.monotonic_ns()  # before the kill: its jobs may run again before the process is reaped
        self.kill(name)
        self.events.append(event("kill", name, at))
        self.armed.pop(name, None)
        self.hire(name.rstrip("0123456789"), fault)

    def buried(self) -> bool:
        """Replace the workers that their fault points have killed."""
        for name, at in list(self.armed.items()):
            if self.members[name].poll() is not None:
                del self.armed[name]
                self.events.append(event("fault point", name, at))
                self.hire("worker")
        return True

    def signal(self, name: str, number: int) -> None:
        os.kill(self.members[name].pid, number)

    def asked_ids(self) -> list[str]:
        return [each.id for each in self.asked()]

    def wait_for_work(self) -> None:
        names = self.alive("worker")
        self.until(lambda: all(self.runs(name) for name in names), "every worker has had a job")

    def dismiss(self) -> None:
        """End the producers, one after the other."""
        names = self.alive("producer")
        for name in names:
            self.members[name].terminate()
        for name in names:
            code = self.members.pop(name).wait(PATIENCE)
            # The signal may arrive before its handler is installed.
            assert code in (0, -signal.SIGTERM), f"{name} ended with {code}\n{self.output()}"

    def settle_in(self) -> None:
        """Wait until the youngest worker is ready for a signal."""
        self.until(lambda: time.monotonic() - self.hired > STARTING, "the youngest process has started")

    def last_words(self) -> list[str]:
        """The ends of the logs of processes that ended by themselves."""
        ended = [
            name for name, process in self.members.items() if process.poll() not in (None, 0, -signal.SIGKILL)
        ]
        logs = {name: (self.folder / f"{name}.log").read_text("utf-8", "replace") for name in ended}
        return [
            f"{name} ended with {self.members[name].poll()}: {' '.join(log.split())[-300:]}"
            for name, log in logs.items()
        ]

    def record(self) -> Record:
        lines = {name: self.runs(name) for name in self.members if name.startswith("worker")}
        return Record(self.events, self.asked_ids(), runs_of(lines), self.store.applied())


def run(store: Store, seed: int, disturb: Callable[[ChaosFleet], None], size: int = 10) -> Findings:
    """Run a fleet during the disturbance, then until all jobs have ended; return the audit's findings."""
    problems: list[str] = []
    fleet = ChaosFleet(store, seed, size)
    with App(store.url) as app:
        try:
            with fleet:
                fleet.wait_for_work()
                disturb(fleet)
                fleet.dismiss()
                with contextlib.suppress(AssertionError):
                    fleet.until(lambda: fleet.buried() and at_rest(app), "everything has ended", PATIENCE)
                fleet.settle_in()
        except AssertionError as error:
            problems.append(" ".join(str(error).split())[:300])
            problems += fleet.last_words()
        found = audit(fleet.record(), all_jobs(app), app.ledger.check())
    for each in reversed(problems):
        found.add_unexplained(each)
        found.notes.insert(0, found.notes.pop())
    return found


def kills(store: Store, seed: int, seconds: float) -> Findings:
    """SIGKILL of workers, producers and the caretaker at random moments, and on SQLite at the named fault
    points."""

    def disturb(fleet: ChaosFleet) -> None:
        until = time.monotonic() + seconds
        with App(store.url) as app:
            while time.monotonic() < until:
                time.sleep(0.1 + 0.3 * fleet.dice.random())
                fleet.buried()
                choice = fleet.dice.random()
                names = fleet.busy("producer" if choice < 0.25 else "worker")
                if not names:
                    continue
                if 0.25 <= choice < 0.45:
                    note = app.ledger.note(CARETAKER)
                    named = "" if note is None else note.value.decode().rpartition("#")[0]
                    names = [named] if named in names else names
                fault = None
                if choice > 0.7 and isinstance(store, SqliteStore):
                    point = fleet.dice.choice(FAULT_POINTS)
                    fault = (point, 1 if point == "checkpointed" else fleet.dice.randrange(1, 60))
                fleet.replace(fleet.dice.choice(names), fault)

    return run(store, seed, disturb)


def freezes(store: Store, seed: int, seconds: float) -> Findings:
    """SIGSTOP of a worker for longer than its lease, then SIGCONT: it continues jobs that other workers have
    claimed meanwhile. On SQLite a process that is frozen while it writes stops all others, and their leases
    may end; on PostgreSQL it must not."""

    def disturb(fleet: ChaosFleet) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until or not fleet.events:
            name, at = fleet.dice.choice(fleet.alive("worker")), time.monotonic_ns()
            fleet.signal(name, signal.SIGSTOP)
            try:
                time.sleep(LEASE / 2)
                before = len(fleet.asked())
                time.sleep(LEASE * (0.7 + fleet.dice.random()))
                stopped_all = isinstance(store, SqliteStore) and len(fleet.asked()) == before
            finally:
                fleet.signal(name, signal.SIGCONT)
            time.sleep(0.5 + fleet.dice.random())
            fleet.events.append(event("freeze", ALL_PROCESSES if stopped_all else name, at))

    return run(store, seed, disturb)


def outages(store: PostgresStore, seed: int, seconds: float) -> Findings:
    """The server is killed, or stopped without a checkpoint, and started again: a power cut for the
    database."""

    def disturb(fleet: ChaosFleet) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(1 + fleet.dice.random())
            at = time.monotonic_ns()
            if fleet.dice.random() < 0.5:
                store.server.kill()
            else:
                store.server.stop("immediate")
            store.server.up()
            fleet.events.append(event("outage", ALL_PROCESSES, at))

    return run(store, seed, disturb)


def full_disk_sqlite(seed: int, seconds: float, folder: Path) -> Findings:
    """The file system of the ledger has no room for some seconds, twice."""
    with small_disk(64 * MB) as disk:
        return _full(SqliteStore(folder, disk), seed, seconds, disk, left=MB, size=4000)


def full_disk_postgres(seed: int, seconds: float) -> Findings:
    with small_disk(500 * MB) as disk, postgres_store(parent=disk) as store:
        return _full(store, seed, seconds, disk, left=0, size=4000)


def _full(store: Store, seed: int, seconds: float, disk: Path, left: int, size: int) -> Findings:
    stuck: list[bool] = []

    def disturb(fleet: ChaosFleet) -> None:
        for _ in range(2):
            at = time.monotonic_ns()
            with filled(disk, left):
                stuck.append(_stands_still(fleet, seconds))
            if isinstance(store, PostgresStore):
                _revive(store)
            before = len(fleet.asked())
            fleet.until(lambda before=before: len(fleet.asked()) > before + 5, "jobs are acknowledged again")  # type: ignore[misc]
            fleet.events.append(event("full disk", ALL_PROCESSES, at))

    found = run(store, seed, disturb, size)
    if not all(stuck):
        found.notes.append("the disk did not become full")
    return found


def _stands_still(fleet: ChaosFleet, seconds: float) -> bool:
    """Wait until no job was acknowledged for two seconds, at most `seconds`."""
    until, last, since = time.monotonic() + seconds, -1, time.monotonic()
    while time.monotonic() < until:
        now = len(fleet.asked())
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > 2:
            return True
        time.sleep(0.1)
    return False


def _revive(store: PostgresStore) -> None:
    """A server that could not write its log has ended, and is started again."""
    import psycopg

    try:
        store.server.query("SELECT 1")
    except psycopg.OperationalError:
        with contextlib.suppress(Exception):
            store.server.stop("immediate")
        store.server.up()


def damage_postgres(seed: int, cases: int) -> Findings:
    """Bytes overwritten in the table of jobs of a stopped server with checksums: every read is right, or
    raises an error."""
    found, dice, ids = Findings(), random.Random(seed), [f"job{n}" for n in range(300)]
    with postgres_store(checksums=True) as store:
        with contextlib.closing(open_ledger(store.url)) as ledger:
            ledger.apply([Append(tuple(Spec(id=id, queue="q", payload=id.encode() * 20) for id in ids))])
        database = store.url.rpartition("/")[2]
        store.server.query("CHECKPOINT")
        [(file,)] = store.server.query("SELECT pg_relation_filepath('towpath.job')", database=database)
        path = store.server.directory / "data" / file
        sound = path.read_bytes()
        for _ in range(cases):
            hurt = bytearray(sound)
            at, length = dice.randrange(len(hurt)), dice.choice((1, 64, 4096))
            hurt[at : at + length] = dice.randbytes(len(hurt[at : at + length]))
            with store.server.outage():
                path.write_bytes(hurt)
            found.events, found.jobs = found.events + 1, found.jobs + len(ids)
            try:
                with contextlib.closing(open_ledger(store.url)) as ledger:
                    read = ledger.get_many(ids)
            except LedgerError:
                continue
            for id in ids:
                if id not in read or read[id].payload != id.encode() * 20:
                    found.add_lost(f"{length} bytes at {at}: job {id} is missing or changed without an error")
    return found
