"""Ctrl-C at any moment of a batch: the batch is applied as a whole or not at all, and the ledger works for
all callers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

from tests.support.waiting import until
from towpath.core.commands import Append, Claim, Claimed, Note, Upkeep, Want
from towpath.core.job import Spec
from towpath.errors import LedgerError, TowpathError
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.runtime.commit.committer import Committer

OPTIONS = SqliteOptions(synchronous="normal", busy_timeout=0.3)

HAMMER = """
import random, signal, sys, threading, time
from towpath.commands import Append, Claim, Done, Note, Settle, Upkeep, Want
from towpath.core.job import Key, KeyPolicy, Spec, State
from towpath.ledger.sqlite import SqliteLedger, SqliteOptions

path, rounds, most, seed = sys.argv[1], *map(int, sys.argv[2:])
chance = random.Random(seed)
options = SqliteOptions(synchronous="normal", busy_timeout=1.0)
ledger, other = SqliteLedger(path, options), SqliteLedger(path, options)
left = 0

def interrupt(number, frame):
    global left
    if left:
        left -= 1
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)

def batch(n):
    held = other.apply([Append((Spec(id=f"run-{n}", queue="run"),)),
        Claim(owner="me", wants=(Want("run"),), lease=10**9)])[1]
    specs = tuple(
        Spec(id=f"{n}-{each}", queue="q", key=Key(f"{n}-{each}", KeyPolicy.UNIQUE) if each % 2 else None)
        for each in range(5)
    )
    return [
        Append(specs),
        *[Settle(claim.id, claim.fence, Done(b"r"), spawn=(Spec(id=f"{n}-child", queue="q"),))
          for claim in held.claims],
        Note(key=f"n-{n}", value=b"v"),
        Upkeep(),
    ]

def whole(n, reader):
    ids = [f"{n}-{each}" for each in (*range(5), "child")]
    there = {id in reader.get_many(ids) for id in ids} | {reader.note(f"n-{n}") is not None}
    there |= {reader.get(f"run-{n}").state is State.DONE}
    assert len(there) == 1, f"batch {n} is there in part"
    return there.pop()

commands = batch("warm")
began = time.perf_counter()
ledger.apply(commands)
span = time.perf_counter() - began
counts = {"whole": 0, "nothing": 0, "unharmed": 0}
for n in range(rounds):
    commands = batch(n)
    left = chance.randint(1, most)
    interrupted = False
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, span), 3e-5)
        try:
            ledger.apply(commands)
            if n % 3 == 0:
                ledger.get(f"{n}-1")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted = True
    left = 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    if most > 1:
        # The second interrupt may have come while the first was cleaned up; the next call repairs that.
        ledger.apply([Upkeep()])
        ledger.get("x")
    assert not (ledger._db.in_transaction and interrupted), "a transaction was left open"
    happened = whole(n, other)
    assert happened == whole(n, ledger)
    assert happened or interrupted
    counts["unharmed" if not interrupted else "whole" if happened else "nothing"] += 1
    # What was refused can be done now; it is the same the second time.
    ledger.apply(commands)
    assert whole(n, other)
print(ledger.integrity(), other.integrity(), min(counts["whole"], counts["nothing"]) > 0, counts)
ledger.close()
other.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs interval timers")
@pytest.mark.parametrize("most", [1, 3], ids=["one", "several"])
def test_interrupts_at_random_moments(tmp_path: Path, most: int) -> None:
    command = [sys.executable, "-c", HAMMER, str(tmp_path / "a.db"), "400", str(most), "7"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.startswith("[] [] True"), (ran.stdout, ran.stderr[-3000:])


class Interrupts:
    """KeyboardInterrupt at the entry of the nth Python function that is called inside: that is where Python
    looks for signals. With `twice` another one at the next entry, which is where the first one is cleaned up.
    `hits` names the functions."""

    def __init__(self, n: int, twice: bool) -> None:
        self._left = n
        self._twice = twice
        self.hits: list[str] = []

    def __enter__(self) -> Self:
        # Python takes a function away that raises: the first comes by the trace, the second by the profile.
        sys.setprofile(self._second)
        sys.settrace(self._first)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def _first(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code is Interrupts.__exit__.__code__:
            return
        self._left -= 1
        if self._left == 0:
            self._hit(frame)

    def _second(self, frame: FrameType, event: str, _: Any) -> None:
        if self._twice and event == "call" and self.hits and frame.f_code is not Interrupts.__exit__.__code__:
            self._twice = False
            self._hit(frame)

    def _hit(self, frame: FrameType) -> None:
        self.hits.append(frame.f_code.co_qualname)
        raise KeyboardInterrupt


def every_entry(
    action: Callable[[int], object], after: Callable[[int, bool], None], twice: bool = False
) -> list[str]:
    """Interrupt the action at each of its entries, one after the other, until it gets through. Returns the
    interrupted functions."""
    hits: list[str] = []
    for n in range(1, 10_000):
        interrupts = Interrupts(n, twice)
        try:
            with interrupts:
                action(n)
        except KeyboardInterrupt:
            hits += interrupts.hits
            after(n, True)
        else:
            after(n, False)
            return hits
    raise AssertionError("it never gets through")


@pytest.mark.parametrize("twice", [False, True], ids=["one", "two"])
def test_a_batch_interrupted_at_every_entry(tmp_path: Path, twice: bool) -> None:
    path = tmp_path / "a.db"
    with closing(SqliteLedger(path, OPTIONS)) as ledger, closing(SqliteLedger(path, OPTIONS)) as other:

        def batch(n: int) -> list[Append | Note]:
            return [
                Append((Spec(id=f"{n}", queue="q"), Spec(id=f"{n}-b", queue="q"))),
                Note(key=f"{n}", value=b"v"),
            ]

        def after(n: int, interrupted: bool) -> None:
            if twice:
                # A second interrupt may have come before the rollback after the first one; the next call
                # rolls back.
                ledger.apply([Upkeep()])
            other.apply([Note(key="other", value=b"%d" % n)])
            there = [
                other.get(f"{n}") is not None,
                other.get(f"{n}-b") is not None,
                other.note(f"{n}") is not None,
            ]
            assert len(set(there)) == 1
            assert interrupted or all(there)
            ledger.apply(batch(n))
            assert other.get(f"{n}") is not None

        hits = every_entry(lambda n: ledger.apply(batch(n)), after, twice)
        assert {
            "ProcessTurns.__enter__",
            "ProcessTurns.__exit__",
            "SqliteLedger._attempt",
            "Transaction.finish",
        } <= set(hits)
        assert not twice or "SqliteLedger._undo" in hits
        assert ledger.integrity() == []


@pytest.mark.parametrize("twice", [False, True], ids=["one", "two"])
def test_a_read_interrupted_at_every_entry(tmp_path: Path, twice: bool) -> None:
    with closing(SqliteLedger(tmp_path / "a.db", OPTIONS)) as ledger:
        ledger.apply([Append((Spec(id="a", queue="q"),))])
        reads: list[Callable[[], object]] = [
            lambda: ledger.get("a"),
            lambda: ledger.explain("a"),
            ledger.queues,
            ledger.version,
            lambda: ledger.wait(ledger.version(), 0.0),
        ]
        for read in reads:
            hits = every_entry(
                lambda _, read=read: read(),  # type: ignore[misc]
                lambda n, _, read=read: read() and None,  # type: ignore[misc]
                twice,
            )
            assert hits
            ledger.apply([Append((Spec(id=f"{len(hits)}", queue="q"),))])
        assert ledger.integrity() == []


class Waiting:
    """A worker that waits for jobs of a queue that has none."""

    def wanted(self) -> Claim:
        return Claim(owner="w", wants=(Want("none"),), lease=1_000_000)

    def taken(self, reply: Claimed | TowpathError) -> None:
        assert reply == Claimed(()) or isinstance(reply, LedgerError), reply


WAYS = {
    "alone": {"Committer._lead_alone", "Committer._lead_one", "Committer._apply"},
    "beside a worker": {"Committer._lead_alone", "Committer._lead", "Committer._apply", "deliver"},
    "in company": {"Committer._lead_alone", "CommitQueue.add", "Condition.notify", "PendingCall.wait"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_of_the_engine_interrupted_at_every_entry(tmp_path: Path, way: str) -> None:
    """Neither the commit lock nor the state lock stays locked, and the thread does not sleep: the call of
    another thread returns, and so does `close`. A single caller leads; with several callers the thread
    applies the command."""
    with closing(SqliteLedger(tmp_path / "a.db", OPTIONS)) as ledger:
        committer, ids = Committer(ledger), count()
        committer.start()
        if way == "beside a worker":
            committer.add_demand(Waiting())

        def after(n: int, _: bool) -> None:
            spec = Spec(id=f"{n}-{next(ids)}-other", queue="q")
            thread = threading.Thread(target=committer.call, args=(Append((spec,)),), daemon=True)
            thread.start()
            thread.join(20)
            assert not thread.is_alive(), "a lock was left behind"
            # The next caller shall lead, so the committer's thread must have applied the interrupted batch.
            until(lambda: committer._idle)

        def action(n: int) -> None:
            committer._several_callers = way == "in company"
            committer.call(Append((Spec(id=f"{n}-{next(ids)}", queue="q"),)))

        expected = WAYS[way]
        hits: set[str] = set()
        for _ in range(5):
            # A checkpoint adds function calls, so an entry may be skipped.
            hits.update(every_entry(action, after))
            if expected <= hits:
                break
        assert expected <= hits
        assert not any(name.startswith("Condition.__") for name in hits)
        committer.close()
        assert ledger.check() == []
