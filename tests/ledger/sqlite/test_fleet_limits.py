"""Limits of a queue and its parts hold for a fleet: four real processes on one file."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import closing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from towpath.core.checks import SECOND
from towpath.core.commands import Append, Claim, Claimed, SetPart, SetQueue, Settle, Want
from towpath.core.job import ClaimedJob as Held
from towpath.core.job import Done, RetryOutcome
from towpath.core.limits import Rate, interval_of
from towpath.core.views import Query
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing.suite.harness import spec

SPAWN = multiprocessing.get_context("spawn")
PROCESSES, SECONDS = 4, 3.0
CAP, CAP_OF_A = 5, 2
OPTIONS = SqliteOptions(synchronous="normal")


class Gauge:
    """The number of running jobs by an external count: raised after the commit of the claim, lowered before
    the settle."""

    def __init__(self) -> None:
        self.now: Any = SPAWN.Value("i", 0)
        self.most: Any = SPAWN.Value("i", 0)

    def add(self, count: int) -> None:
        with self.now.get_lock():
            self.now.value += count
            self.most.value = max(self.most.value, self.now.value)


def _work(path: Path, name: str, everything: Gauge, of_a: Gauge, start: Barrier) -> None:
    with closing(SqliteLedger(path, OPTIONS)) as ledger:
        start.wait(60)
        until = time.monotonic() + SECONDS
        held: list[Held] = []
        settles: list[Settle] = []
        while time.monotonic() < until:
            (*_, answer) = ledger.apply(
                [*settles, Claim(owner=name, wants=(Want("q", 3),), lease=60 * SECOND)]
            )
            assert isinstance(answer, Claimed)
            held += answer.claims
            everything.add(len(answer.claims))
            of_a.add(sum(claim.job.part == "a" for claim in answer.claims))
            # One stays for the next round, so that the cap is full most of the time.
            ending, held = held[:-1] or held, held[-1:] if len(held) > 1 else []
            everything.add(-len(ending))
            of_a.add(-sum(claim.job.part == "a" for claim in ending))
            settles = [Settle(claim.id, claim.fence, RetryOutcome()) for claim in ending]


def test_a_cap_of_n_is_never_n_plus_one(tmp_path: Path) -> None:
    path = tmp_path / "work.db"
    with closing(SqliteLedger(path, OPTIONS)) as ledger:
        jobs = [spec(f"{part}{n}", part=part, max_attempts=1_000_000) for part in "abc" for n in range(20)]
        ledger.apply(
            [Append(tuple(jobs)), SetQueue(queue="q", cap=CAP), SetPart(queue="q", part="a", cap=CAP_OF_A)]
        )
        everything, of_a, start = Gauge(), Gauge(), SPAWN.Barrier(PROCESSES + 1)
        work = [
            SPAWN.Process(target=_work, args=(path, f"w{n}", everything, of_a, start))
            for n in range(PROCESSES)
        ]
        for process in work:
            process.start()
        start.wait(60)
        seen: set[tuple[int, int]] = set()
        while any(process.is_alive() for process in work):
            seen.add((ledger.queues()["q"].counts.running, ledger.parts("q")["a"].running))
        for process in work:
            process.join()
        assert [process.exitcode for process in work] == [0] * PROCESSES
        assert max(running for running, _ in seen) == CAP
        assert max(running for _, running in seen) == CAP_OF_A
        assert everything.most.value == CAP
        assert of_a.most.value <= CAP_OF_A
        assert ledger.check() == []


def _drain(path: Path, name: str, start: Barrier) -> None:
    with closing(SqliteLedger(path, OPTIONS)) as ledger:
        start.wait(60)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            (answer,) = ledger.apply([Claim(owner=name, wants=(Want("q", 3),), lease=60 * SECOND)])
            assert isinstance(answer, Claimed)
            if answer.claims:
                ledger.apply([Settle(claim.id, claim.fence, Done()) for claim in answer.claims])


def test_a_rate_is_exact_in_a_fleet(tmp_path: Path) -> None:
    path, rate = tmp_path / "work.db", Rate(40, 1, 4)
    with closing(SqliteLedger(path, OPTIONS)) as ledger:
        ledger.apply(
            [
                Append(tuple([spec(f"j{n}", part="p") for n in range(900)])),
                SetPart(queue="q", part="p", rate=rate),
            ]
        )
        start = SPAWN.Barrier(PROCESSES)
        work = [SPAWN.Process(target=_drain, args=(path, f"w{n}", start)) for n in range(PROCESSES)]
        for process in work:
            process.start()
        for process in work:
            process.join()
        assert [process.exitcode for process in work] == [0] * PROCESSES
        found = ledger.find(Query(queue="q", limit=1000)).jobs
        started = sorted(job.started_at for job in found if job.started_at is not None)
        # The burst at once, and then one per interval, in every window.
        for apart in range(rate.burst, len(started)):
            least = (apart - rate.burst + 1) * interval_of(rate)
            assert all(started[n + apart] - started[n] >= least for n in range(len(started) - apart))
        assert len(started) > 40 * SECONDS / 2
