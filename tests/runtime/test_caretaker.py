"""The caretaker: what it does when, who is elected, what it hears of other processes, and how it ends."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import BareEngine
from tests.support.gated import Gated
from tests.support.waiting import WAIT, until
from towpath.core.checks import SECOND
from towpath.core.commands import Append, Claim, Note, Upkeep, Want
from towpath.core.job import ClaimedJob as Held
from towpath.core.job import Spec, State
from towpath.errors import DiskFull, LedgerBusy, LedgerClosed
from towpath.ledger import Ledger, open_ledger
from towpath.runtime.caretaker import (
    CARETAKER_KEY,
    MAX_DOUBT,
    MAX_UPKEEP_INTERVAL,
    MAX_UPKEEP_PAUSE,
    MIN_PAUSE,
    RENEW,
    RETRY_PAUSE,
    STAND_BY,
    TTL,
    Caretaker,
)
from towpath.runtime.claims.dispatcher import Waiter
from towpath.testing import ManualClock

SPAWN = multiprocessing.get_context("spawn")
# The intervals are those of a ledger on this machine; on a server they are `REMOTE_FACTOR` times as long.
pytestmark = pytest.mark.ledgers("memory", "sqlite")
EVERY = pytest.mark.ledgers("memory", "sqlite", "postgres")


@pytest.fixture
def ledger(manual_ledger: Ledger) -> Ledger:
    return manual_ledger


class Kept:
    """A caretaker on a gated ledger, with a log of the times at which its schedules were asked."""

    def __init__(self, ledger: Ledger, clock: ManualClock, owner: str = "a") -> None:
        self.gate = Gated(ledger)
        self.clock = clock
        self.engine = BareEngine(self.gate, clock, owner)
        self.asked: list[int] = []
        self.next: int | None = None
        self.error: Exception | None = None
        self.keeper = Caretaker(self.gate, self.engine.committer, owner, clock, self._due)

    def _due(self, now: int) -> int | None:
        self.asked.append(now)
        if self.error is not None:
            raise self.error
        return self.next

    def once(self) -> int:
        return self.keeper.run_once(self.clock.now())

    def settle(self) -> int:
        """Run until it has nothing more to do for a while; when it wants to come back."""
        for _ in range(20):
            wake = self.once()
            if wake > self.clock.now() + MIN_PAUSE:
                return wake
            self.clock.set(max(wake, self.clock.now() + 1))
        raise AssertionError("it does not come to rest")

    def upkeeps(self) -> int:
        return sum(isinstance(command, Upkeep) for batch in self.gate.batches for command in batch)


@pytest.fixture
def kept(ledger: Ledger, clock: ManualClock) -> Iterator[Kept]:
    kept = Kept(ledger, clock)
    with kept.engine:
        yield kept


def append(ledger: Ledger, id: str, **fields: object) -> None:
    ledger.apply([Append((Spec(id=id, queue="q", **fields),))])  # type: ignore[arg-type]


def state(ledger: Ledger, id: str) -> State:
    job = ledger.get(id)
    assert job is not None
    return job.state


class TestChores:
    def test_at_rest_it_does_little(self, kept: Kept) -> None:
        kept.settle()
        before = kept.upkeeps()
        start = kept.clock.now()
        while kept.clock.now() < start + 60 * SECOND:
            kept.clock.set(max(kept.once(), kept.clock.now() + 1))
        # Regularly, and once more after each renewal, which is a commit like any other.
        assert (
            60 * SECOND // MAX_UPKEEP_INTERVAL - 1
            <= kept.upkeeps() - before
            <= 60 * SECOND // MAX_UPKEEP_INTERVAL + 60 * SECOND // RENEW + 1
        )

    def test_a_delayed_job_is_woken_when_it_is_due(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        append(ledger, "late", delay=2 * SECOND)
        due = kept.clock.now() + 2 * SECOND
        while kept.clock.now() < due:
            assert state(ledger, "late") is State.SCHEDULED
            kept.clock.set(min(due, max(kept.once(), kept.clock.now() + 1)))
        kept.once()
        assert state(ledger, "late") is State.READY

    def test_a_lost_job_is_reaped(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        append(ledger, "job")
        ledger.apply([Claim(owner="gone", wants=(Want("q"),), lease=3 * SECOND)])
        end = kept.clock.now() + 3 * SECOND
        while kept.clock.now() <= end + MIN_PAUSE:
            kept.clock.set(max(kept.once(), kept.clock.now() + 1))
        kept.once()
        assert state(ledger, "job") is State.READY

    def test_at_most_every_50_ms_however_much_is_committed(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        before = kept.upkeeps()
        for n in range(100):
            append(ledger, f"job{n}")
            kept.clock.advance(0.001)
            kept.once()
        assert kept.upkeeps() - before <= 3

    @pytest.mark.parametrize(
        ("took", "pause"), [(0, MIN_PAUSE), (MIN_PAUSE // 5, 2 * MIN_PAUSE), (SECOND // 10, MAX_UPKEEP_PAUSE)]
    )
    def test_more_seldom_where_it_takes_long(self, kept: Kept, ledger: Ledger, took: int, pause: int) -> None:
        kept.settle()
        apply = kept.gate.apply

        def slow(*args: Any) -> Any:
            kept.clock.set(kept.clock.now() + took)
            return apply(*args)

        kept.gate.apply = slow  # type: ignore[method-assign, assignment]
        began, before = kept.clock.now(), kept.upkeeps()
        while kept.clock.now() < began + SECOND:
            append(ledger, f"{kept.clock.now()}")
            kept.once()
            kept.clock.set(kept.clock.now() + MIN_PAUSE // 10)
        assert SECOND // pause - 3 <= kept.upkeeps() - before <= SECOND // pause + 1

    def test_again_at_once_while_there_is_more(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        ledger.apply([Append(tuple(Spec(id=f"j{n}", queue="q", delay=SECOND) for n in range(2500)))])
        kept.settle()
        kept.clock.advance(2)
        times = [kept.once() for _ in range(3)]
        assert times[:2] == [kept.clock.now()] * 2
        assert times[2] > kept.clock.now()
        assert ledger.queues()["q"].counts.ready == 2500

    def test_a_clock_that_steps_back_does_not_stop_it(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        before = kept.upkeeps()
        kept.clock.set(kept.clock.now() - 3600 * SECOND)
        kept.once()
        assert kept.upkeeps() == before + 1
        assert kept.once() > kept.clock.now()


class TestSchedules:
    def test_they_are_asked_at_the_time_they_named_and_after_a_change(
        self, kept: Kept, ledger: Ledger
    ) -> None:
        kept.settle()
        kept.next = kept.clock.now() + SECOND // 2
        append(ledger, "something")
        kept.clock.advance(0.1)
        assert kept.settle() == kept.next
        asked = len(kept.asked)
        kept.once()
        assert len(kept.asked) == asked
        kept.clock.set(kept.next)
        kept.next = None
        kept.once()
        assert kept.asked[asked:] == [kept.clock.now()]

    def test_an_error_in_them_is_logged_once_and_stops_nothing_else(
        self, kept: Kept, ledger: Ledger, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept.settle()
        kept.error = ZeroDivisionError("oops")
        append(ledger, "late", delay=SECOND)
        with caplog.at_level(logging.WARNING, "towpath"):
            for _ in range(8):
                kept.clock.advance(0.5)
                kept.once()
        assert len([record for record in caplog.records if "oops" in record.message]) == 1
        assert len(kept.asked) >= 3
        assert state(ledger, "late") is State.READY

    def test_only_the_elected_one_fires(self, kept: Kept, ledger: Ledger) -> None:
        ledger.apply([Note(key=CARETAKER_KEY, value=b"somebody", ttl=TTL)])
        kept.once()
        assert kept.asked == []
        assert kept.upkeeps() == 0


class TestElection:
    def test_one_of_two(self, ledger: Ledger, clock: ManualClock) -> None:
        first, second = Kept(ledger, clock, "a"), Kept(ledger, clock, "b")
        with first.engine, second.engine:
            for kept in (first, second):
                kept.once()
            assert (first.keeper.elected, second.keeper.elected) == (True, False)
            start = clock.now()
            while clock.now() < start + 4 * TTL:
                clock.set(max(clock.now() + 1, min(first.once(), second.once())))
                assert first.keeper.elected
                assert not second.keeper.elected
            assert second.upkeeps() == 0
            note = ledger.note(CARETAKER_KEY)
            assert note is not None
            assert note.value == b"a"

    def test_a_dead_one_is_replaced_when_its_time_is_over(self, ledger: Ledger, clock: ManualClock) -> None:
        first, second = Kept(ledger, clock, "a"), Kept(ledger, clock, "b")
        with first.engine, second.engine:
            first.once()
            died = clock.now()
            while wake := second.once():
                if second.keeper.elected:
                    break
                clock.set(max(clock.now() + 1, wake))
            assert TTL <= clock.now() - died <= TTL + STAND_BY
            assert clock.now() - died <= 5_250_000, "docs/guarantees.md says so"
            first.once()
            assert not first.keeper.elected, "it comes back and finds the place taken"

    def test_the_work_of_a_dead_one_waits_no_longer_than_that(
        self, ledger: Ledger, clock: ManualClock
    ) -> None:
        """Killed right after it renewed its place, with a job about to come due."""
        first, second = Kept(ledger, clock, "a"), Kept(ledger, clock, "b")
        with first.engine, second.engine:
            first.settle()
            second.once()
            clock.advance(RENEW / SECOND)
            first.once()
            died = clock.now()
            append(ledger, "late", delay=SECOND)
            while (wake := second.once()) and state(ledger, "late") is not State.READY:
                clock.set(max(clock.now() + 1, wake))
            assert clock.now() - died <= TTL + STAND_BY
            assert second.asked, "and so do the schedules"

    def test_a_pause_of_the_elected_one_costs_nothing_but_its_place(
        self, ledger: Ledger, clock: ManualClock
    ) -> None:
        first, second = Kept(ledger, clock, "a"), Kept(ledger, clock, "b")
        with first.engine, second.engine:
            first.settle()
            clock.advance(3 * TTL / SECOND)
            second.once()
            first.once()
            assert (first.keeper.elected, second.keeper.elected) == (False, True)
            assert ledger.check() == []

    def test_one_that_closes_makes_way_at_once(self, ledger: Ledger, clock: ManualClock) -> None:
        first, second = Kept(ledger, clock, "a"), Kept(ledger, clock, "b")
        with first.engine, second.engine:
            first.once()
            second.once()
            first.keeper.close()
            until(lambda: ledger.note(CARETAKER_KEY) is None)
            clock.set(clock.now() + STAND_BY)
            second.once()
            assert second.keeper.elected

    def test_it_stands_by_when_somebody_took_its_place(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        ledger.apply([Note(key=CARETAKER_KEY, value=None), Note(key=CARETAKER_KEY, value=b"other", ttl=TTL)])
        kept.clock.advance(RENEW / SECOND)
        kept.once()
        assert not kept.keeper.elected
        assert kept.asked[-1] < kept.clock.now()

    def test_an_answer_that_was_lost_does_not_cost_the_place(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        kept.clock.advance(RENEW / SECOND)
        kept.gate.fail_after_commit = [LedgerBusy(path="x", seconds=1)]
        kept.once()
        for _ in range(4):
            kept.clock.advance(RENEW / SECOND)
            kept.once()
            assert kept.keeper.elected


class TestTrouble:
    @pytest.mark.parametrize("error", [LedgerBusy(path="x", seconds=1), DiskFull(path="x")])
    def test_it_waits_and_says_so_once(
        self, kept: Kept, ledger: Ledger, error: LedgerBusy, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept.settle()
        kept.gate.fail = [error] * 3
        with caplog.at_level(logging.INFO, "towpath"):
            for _ in range(3):
                kept.clock.advance(TTL / SECOND)
                assert kept.once() == kept.clock.now() + RETRY_PAUSE
        [said] = caplog.messages
        assert str(error) in said
        kept.clock.advance(1)
        kept.once()
        assert kept.keeper.elected
        before = kept.upkeeps()
        kept.clock.advance(MAX_UPKEEP_INTERVAL / SECOND)
        kept.once()
        assert kept.upkeeps() > before

    def test_what_is_fatal_is_raised(self, kept: Kept, ledger: Ledger) -> None:
        ledger.close()
        with pytest.raises(LedgerClosed):
            kept.once()


class TestEars:
    """Who waits here is a waiter at the dispatcher: it gets a job of another process only if somebody kicks
    the committer."""

    def waiter(self, engine: BareEngine) -> tuple[threading.Event, list[Held]]:
        came, got = threading.Event(), list[Held]()

        def deliver(claims: list[Held]) -> None:
            got.extend(claims)
            came.set()

        waiter = Waiter(("q",), deliver, 30 * SECOND)
        waiter.want = 1
        engine.dispatcher.add(waiter)
        return came, got

    def test_a_commit_of_somebody_else_is_noticed_at_once(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        kept.gate.inside.clear()
        came, got = self.waiter(kept.engine)
        assert kept.gate.inside.wait(WAIT)
        kept.settle()
        append(ledger, "foreign")
        assert not got
        kept.once()
        assert came.wait(WAIT)
        assert got[0].id == "foreign"

    def test_our_own_commits_cause_no_looking_around(self, kept: Kept, ledger: Ledger) -> None:
        self.waiter(kept.engine)
        kept.engine.committer.call(Append((Spec(id="other", queue="elsewhere"),)))
        kept.settle()
        batches = len(kept.gate.batches)
        for n in range(50):
            kept.engine.committer.call(Append((Spec(id=f"own{n}", queue="elsewhere"),)))
            kept.clock.advance(0.0005)
            kept.once()
        assert len(kept.gate.batches) - batches <= 55

    def test_a_commit_that_hides_behind_our_own_is_found(self, kept: Kept, ledger: Ledger) -> None:
        kept.settle()
        came, got = self.waiter(kept.engine)
        kept.settle()
        kept.engine.committer.call(Append((Spec(id="own", queue="elsewhere"),)))
        append(ledger, "foreign")
        wake = kept.once()
        assert wake <= kept.clock.now() + MAX_DOUBT
        kept.clock.set(wake)
        kept.once()
        assert came.wait(WAIT)
        assert got[0].id == "foreign"

    def test_those_who_stand_by_look_now_and_then(self, kept: Kept, ledger: Ledger) -> None:
        ledger.apply([Note(key=CARETAKER_KEY, value=b"somebody", ttl=TTL)])
        self.waiter(kept.engine)
        kept.once()
        batches = len(kept.gate.batches)
        kept.clock.set(kept.clock.now() + STAND_BY)
        kept.gate.inside.clear()
        kept.once()
        assert kept.gate.inside.wait(WAIT)
        assert len(kept.gate.batches) > batches


def _other_process(url: str, go: object, gone: object) -> None:
    go.wait()  # type: ignore[attr-defined]
    ledger = open_ledger(url)
    ledger.apply([Append((Spec(id="foreign", queue="q"),))])
    gone.set()  # type: ignore[attr-defined]
    ledger.close()


class TestThread:
    def start(self, engine: BareEngine) -> Caretaker:
        keeper = Caretaker(engine.ledger, engine.committer, engine.owner, engine.clock, lambda now: None)
        keeper.start()
        return keeper

    def test_another_process(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path}/work.db"
        ledger = open_ledger(url)
        with BareEngine(ledger) as engine:
            keeper = self.start(engine)
            came, got = TestEars().waiter(engine)
            go, gone = SPAWN.Event(), SPAWN.Event()
            child = SPAWN.Process(target=_other_process, args=(url, go, gone))
            child.start()
            go.set()
            assert came.wait(WAIT)
            assert got[0].id == "foreign"
            assert gone.wait(WAIT)
            child.join(WAIT)
            keeper.close()
        ledger.close()

    @EVERY
    def test_it_wakes_a_delayed_job_and_closes_promptly(self, url: str) -> None:
        ledger = open_ledger(url)
        with BareEngine(ledger) as engine:
            keeper = self.start(engine)
            until(lambda: ledger.note(CARETAKER_KEY) is not None)
            came, got = TestEars().waiter(engine)
            began = time.monotonic()
            engine.committer.call(Append((Spec(id="late", queue="q", delay=SECOND // 5),)))
            assert came.wait(WAIT)
            assert got[0].id == "late"
            assert time.monotonic() - began >= 0.2
            began = time.monotonic()
            keeper.close()
            assert time.monotonic() - began < 1
            assert not keeper._thread.is_alive()
            until(lambda: ledger.note(CARETAKER_KEY) is None)
        ledger.close()

    def test_a_locked_ledger_does_not_hold_up_the_closing(self) -> None:
        gate = Gated()
        with BareEngine(gate) as engine:
            keeper = self.start(engine)
            until(lambda: gate.note(CARETAKER_KEY) is not None)
            gate.hold()
            append_in = threading.Thread(
                target=lambda: engine.committer.call(Append((Spec(id="x", queue="q"),))), daemon=True
            )
            append_in.start()
            assert gate.inside.wait(WAIT)
            began = time.monotonic()
            keeper.close()
            assert time.monotonic() - began < 1
            gate.let_go()
            append_in.join(WAIT)

    def test_at_rest_it_uses_next_to_no_time_of_the_processor(self, tmp_path: Path) -> None:
        ledger = open_ledger(f"sqlite:///{tmp_path}/work.db")
        with BareEngine(ledger) as engine:
            TestEars().waiter(engine)
            keeper = self.start(engine)
            until(lambda: ledger.note(CARETAKER_KEY) is not None)
            eventually_quiet = threading.Event()
            eventually_quiet.wait(0.3)
            used, began = time.process_time(), time.monotonic()
            eventually_quiet.wait(2.0)
            share = (time.process_time() - used) / (time.monotonic() - began)
            keeper.close()
        ledger.close()
        assert share < 0.01
