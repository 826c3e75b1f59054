"""Many processes, many threads, one file: no job lost or doubled, no process starved."""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import msgspec
import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import (
    Append,
    Appended,
    Claim,
    Claimed,
    Renew,
    Renewed,
    Settle,
    Settled,
    Upkeep,
    Upkept,
    Want,
)
from towpath.core.job import ClaimedJob as Held
from towpath.core.job import Done, Job, Release, RetryOutcome, State
from towpath.core.views import Query
from towpath.errors import LostClaim
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing.suite.harness import spec

SPAWN = multiprocessing.get_context("spawn")
SECONDS = float(os.environ.get("TOWPATH_SOAK_SECONDS", "4"))
PROCESSES, THREADS = 4, 64
BATCHES = round(25 * SECONDS)
LEASE = SECOND // 2


class Log(msgspec.Struct):
    """The answers that one worker received."""

    appended: list[str] = []
    claimed: list[tuple[str, int]] = []
    done: list[tuple[str, int]] = []
    given_back: int = 0
    lost: int = 0
    reaped: int = 0
    batches: int = 0
    longest: float = 0.0


class Worker:
    def __init__(self, ledger: SqliteLedger, name: str) -> None:
        self._ledger, self._name = ledger, name
        self._dice = random.Random(name)
        self.log = Log()

    def round(self, number: int) -> None:
        """Append and claim jobs; finish most, renew and release others, and let the leases of the rest
        expire."""
        ids = [f"{self._name}-{number}-{n}" for n in range(3)]
        (answer,) = self._apply(
            Append(tuple(spec(id, part=self._dice.choice("abc"), payload=b"p") for id in ids))
        )
        assert isinstance(answer, Appended)
        assert [placed.id for placed in answer.jobs] == ids
        self.log.appended += ids
        (taken,) = self._apply(Claim(owner=self._name, wants=(Want("q", 4),), lease=LEASE))
        assert isinstance(taken, Claimed)
        self.log.claimed += [(claim.id, claim.fence) for claim in taken.claims]
        self._finish(list(taken.claims))
        if number % 10 == 0:
            (kept,) = self._apply(Upkeep())
            assert isinstance(kept, Upkept)
            self.log.reaped += kept.reaped

    def _finish(self, held: list[Held]) -> None:
        (renewed,) = self._apply(Renew(tuple((claim.id, claim.fence) for claim in held), LEASE))
        assert isinstance(renewed, Renewed)
        settles = [
            Settle(
                claim.id,
                claim.fence,
                self._dice.choice((Done(b"r"), Done(), Done(), RetryOutcome(), Release())),
            )
            for claim in held
            if self._dice.random() < 0.95
        ]
        for command, answer in zip(settles, self._apply(*settles), strict=True):
            if isinstance(answer, LostClaim):
                self.log.lost += 1
            else:
                assert isinstance(answer, Settled)
                if answer.state is State.DONE:
                    self.log.done.append((command.id, command.fence))
                else:
                    self.log.given_back += 1

    def _apply(self, *commands: Append | Claim | Renew | Settle | Upkeep) -> list[object]:
        asked = time.monotonic()
        answers = self._ledger.apply(commands)
        self.log.longest = max(self.log.longest, time.monotonic() - asked)
        self.log.batches += 1
        return list(answers)


def all_jobs(ledger: SqliteLedger) -> Iterator[Job]:
    page: str | None = None
    while True:
        found = ledger.find(Query(limit=1000, page=page, oldest_first=True, bodies=False))
        yield from found.jobs
        if (page := found.next) is None:
            return


def judge(ledger: SqliteLedger, logs: Iterable[Log]) -> None:
    """The answers of all workers together must match the ledger."""
    logs = list(logs)
    jobs = list(all_jobs(ledger))
    assert sorted(job.id for job in jobs) == sorted(id for log in logs for id in log.appended)
    assert [job.seq for job in jobs] == list(range(1, len(jobs) + 1))
    claims = Counter(claim for log in logs for claim in log.claimed)
    assert max(claims.values()) == 1, "one claim was given to two"
    # A fence for each claim, without a gap: no worker got a job before the claim of another had ended.
    assert claims.keys() == {(job.id, fence) for job in jobs for fence in range(1, job.fence + 1)}
    done = [claim for log in logs for claim in log.done]
    assert sorted(done) == sorted((job.id, job.fence) for job in jobs if job.state is State.DONE)
    assert len({id for id, _ in done}) == len(done), "a job was done twice"
    assert ledger.integrity() == []
    counts = ledger.queues()["q"].counts
    # A job that was lost five times is a dead letter.
    assert all(job.losses == job.max_losses for job in jobs if job.state is State.FAILED)
    assert (counts.done, counts.waiting + counts.running + counts.failed) == (
        len(done),
        len(jobs) - len(done),
    )


def _hammer(path: Path, name: str, barrier: Barrier, pipe: Connection) -> None:
    with closing(SqliteLedger(path)) as ledger:
        worker = Worker(ledger, name)
        barrier.wait(60)
        number, deadline = 0, time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            worker.round(number)
            number += 1
        pipe.send_bytes(msgspec.msgpack.encode(worker.log))


def test_four_processes_hammer_one_file(tmp_path: Path) -> None:
    path, barrier = tmp_path / "a.db", SPAWN.Barrier(PROCESSES)
    pipes = [SPAWN.Pipe(duplex=False) for _ in range(PROCESSES)]
    children = [
        SPAWN.Process(target=_hammer, args=(path, f"w{n}", barrier, pipes[n][1])) for n in range(PROCESSES)
    ]
    for child in children:
        child.start()
    logs = []
    for ours, theirs in pipes:
        theirs.close()  # so that the end of a child is the end of its pipe
        assert ours.poll(SECONDS + 60), "no message of a process"
        logs.append(msgspec.msgpack.decode(ours.recv_bytes(), type=Log))
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * PROCESSES
    total = sum(log.batches for log in logs)
    print(f"\nbatches {[log.batches for log in logs]}, longest {[round(log.longest, 3) for log in logs]} s")
    print(
        f"claimed {sum(len(log.claimed) for log in logs)}, done {sum(len(log.done) for log in logs)}, ",
        end="",
    )
    print(f"lost {sum(log.lost for log in logs)}, reaped {sum(log.reaped for log in logs)}")
    with closing(SqliteLedger(path)) as ledger:
        judge(ledger, logs)
    assert min(log.batches for log in logs) >= total / PROCESSES / 3, "a process starved"
    assert max(log.longest for log in logs) < 2.0, "a batch waited too long"
    assert sum(log.reaped for log in logs) > 0


def test_sixty_four_threads_share_one_ledger(tmp_path: Path) -> None:
    with closing(SqliteLedger(tmp_path / "a.db", SqliteOptions(synchronous="normal"))) as ledger:
        workers = [Worker(ledger, f"t{n}") for n in range(THREADS)]
        finished: list[str] = []

        def work(worker: Worker) -> None:
            number = 0
            while worker.log.batches < BATCHES:
                worker.round(number)
                number += 1
            finished.append(threading.current_thread().name)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        print(
            f"\n{sum(worker.log.batches for worker in workers)} batches in {time.monotonic() - started:.1f} s"
        )
        assert sorted(finished) == sorted(thread.name for thread in threads)
        judge(ledger, (worker.log for worker in workers))


def _commit_when_told(path: Path, pipe: Connection) -> None:
    stamps: list[float] = []

    def stamp(point: str) -> None:
        if point == "committed":
            stamps.append(time.monotonic())

    with closing(SqliteLedger(path, SqliteOptions(fault=stamp))) as ledger:
        pipe.send("ready")
        while (number := pipe.recv()) is not None:
            ledger.apply([Append((spec(f"{number}"),))])
            pipe.send(stamps[-1])


def test_a_commit_of_another_process_wakes_a_waiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the other process's notification can end the wait.
    monkeypatch.setattr("towpath.ledger.sqlite.ledger.POLL_INTERVAL", 600.0)
    ours, theirs = SPAWN.Pipe()
    with closing(SqliteLedger(tmp_path / "a.db")) as ledger:
        child = SPAWN.Process(target=_commit_when_told, args=(tmp_path / "a.db", theirs))
        child.start()
        assert ours.poll(60)
        assert ours.recv() == "ready"
        latencies = []
        for number in range(20):
            seen = ledger.version()
            ours.send(number)
            assert ledger.wait(seen, 30.0) != seen
            woke = time.monotonic()
            assert ours.poll(60)
            latencies.append(woke - ours.recv())
            assert ledger.get(f"{number}") is not None
        ours.send(None)
        child.join(60)
    print(
        f"\nwoken after {statistics.median(latencies) * 1000:.2f} ms (median), {max(latencies) * 1000:.2f} ms"
        " at most"
    )


def test_an_idle_waiter_costs_nothing(tmp_path: Path) -> None:
    with closing(SqliteLedger(tmp_path / "a.db")) as ledger:
        seen = ledger.version()
        spent, started = time.process_time(), time.monotonic()
        assert ledger.wait(seen, 2.0) == seen
        cost = (time.process_time() - spent) / (time.monotonic() - started)
    print(f"\nan idle wait costs {cost:.2%} of a processor")
    assert cost < 0.01
