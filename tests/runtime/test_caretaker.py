"""The caretaker: its work and times, the election, commits of other processes, errors, and its end."""

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
from towpath.errors import DiskFull, LedgerAway, LedgerBusy, LedgerClosed
from towpath.ledger import Ledger, open_ledger
from towpath.runtime.caretaker import (
    CARETAKER_KEY,
    MAX_DOUBT,
    MAX_UPKEEP_INTERVAL,
    MAX_UPKEEP_PAUSE,
    MIN_PAUSE,
    REMOTE_FACTOR,
    REMOTE_TTL_FACTOR,
    RENEW,
    RETRY_PAUSE,
    STAND_BY,
    TTL,
    Caretaker,
)
from towpath.runtime.claims.dispatcher import Waiter
from towpath.testing import ManualClock

SPAWN = multiprocessing.get_context("spawn")
pytestmark = pytest.mark.ledgers("memory", "sqlite", "postgres")


@pytest.fixture
def ledger(manual_ledger: Ledger) -> Ledger:
    return manual_ledger


class CaretakerHarness:
    """A caretaker on a gated ledger, and the times at which its schedules were checked."""

    def __init__(self, ledger: Ledger, clock: ManualClock, owner: str = "a") -> None:
        self.gate = Gated(ledger)
        self.clock = clock
        self.engine = BareEngine(self.gate, clock, owner)
        remote = ledger.capabilities.remote
        times = REMOTE_FACTOR if remote else 1
        self.renew, self.stand_by, self.interval = (
            times * each for each in (RENEW, STAND_BY, MAX_UPKEEP_INTERVAL)
        )
        self.ttl = TTL * (REMOTE_TTL_FACTOR if remote else 1)
        self.asked: list[int] = []
        self.next: int | None = None
        self.error: Exception | None = None
        self.caretaker = Caretaker(self.gate, self.engine.committer, owner, clock, self._due)

    def _due(self, now: int) -> int | None:
        self.asked.append(now)
        if self.error is not None:
            raise self.error
        return self.next

    def once(self) -> int:
        return self.caretaker.run_once(self.clock.now())

    def settle(self) -> int:
        """Run until no work is due; return the time of the next step."""
        for _ in range(20):
            wake = self.once()
            if wake > self.clock.now() + MIN_PAUSE:
                return wake
            self.clock.set(max(wake, self.clock.now() + 1))
        raise AssertionError("it does not come to rest")

    def upkeeps(self) -> int:
        return sum(isinstance(command, Upkeep) for batch in self.gate.batches for command in batch)


@pytest.fixture
def harness(ledger: Ledger, clock: ManualClock) -> Iterator[CaretakerHarness]:
    harness = CaretakerHarness(ledger, clock)
    with harness.engine:
        yield harness


def append(ledger: Ledger, id: str, **fields: object) -> None:
    ledger.apply([Append((Spec(id=id, queue="q", **fields),))])  # type: ignore[arg-type]


def state(ledger: Ledger, id: str) -> State:
    job = ledger.get(id)
    assert job is not None
    return job.state


class TestUpkeep:
    @pytest.mark.ledgers("memory", "sqlite")
    @pytest.mark.parametrize("seconds", [1, 2, 3])
    def test_a_short_lease_is_reaped_at_its_end(self, harness: CaretakerHarness, seconds: int) -> None:
        """An idle ledger must not take the time between two upkeeps for a clock jump."""
        harness.settle()
        append(harness.gate, "a", max_losses=9)
        harness.engine.committer.call(Claim(owner="b", wants=(Want("q", 1),), lease=seconds * SECOND))
        end = harness.clock.now() + seconds * SECOND
        while state(harness.gate, "a") is State.RUNNING and harness.clock.now() < end + 10 * SECOND:
            harness.clock.set(max(harness.once(), harness.clock.now() + 1))
        assert harness.clock.now() - end < SECOND

    def test_at_rest_it_does_little(self, harness: CaretakerHarness) -> None:
        harness.settle()
        before = harness.upkeeps()
        start = harness.clock.now()
        while harness.clock.now() < start + 60 * SECOND:
            harness.clock.set(max(harness.once(), harness.clock.now() + 1))
        # Regularly, and once more after each renewal, which is a commit.
        assert (
            60 * SECOND // harness.interval - 1
            <= harness.upkeeps() - before
            <= 60 * SECOND // harness.interval + 60 * SECOND // harness.renew + 1
        )

    def test_a_delayed_job_is_woken_when_it_is_due(self, harness: CaretakerHarness, ledger: Ledger) -> None:
        harness.settle()
        append(ledger, "late", delay=2 * SECOND)
        due = harness.clock.now() + 2 * SECOND
        while harness.clock.now() < due:
            assert state(ledger, "late") is State.SCHEDULED
            harness.clock.set(min(due, max(harness.once(), harness.clock.now() + 1)))
        harness.once()
        assert state(ledger, "late") is State.READY

    def test_a_lost_job_is_reaped(self, harness: CaretakerHarness, ledger: Ledger) -> None:
        harness.settle()
        append(ledger, "job")
        ledger.apply([Claim(owner="gone", wants=(Want("q"),), lease=3 * SECOND)])
        end = harness.clock.now() + 3 * SECOND
        while harness.clock.now() <= end + MIN_PAUSE:
            harness.clock.set(max(harness.once(), harness.clock.now() + 1))
        harness.once()
        assert state(ledger, "job") is State.READY

    def test_at_most_every_50_ms_however_much_is_committed(
        self, harness: CaretakerHarness, ledger: Ledger
    ) -> None:
        harness.settle()
        before = harness.upkeeps()
        for n in range(100):
            append(ledger, f"job{n}")
            harness.clock.advance(0.001)
            harness.once()
        assert harness.upkeeps() - before <= 3

    @pytest.mark.parametrize(
        ("took", "pause"), [(0, MIN_PAUSE), (MIN_PAUSE // 5, 2 * MIN_PAUSE), (SECOND // 10, MAX_UPKEEP_PAUSE)]
    )
    def test_more_seldom_where_it_takes_long(
        self, harness: CaretakerHarness, ledger: Ledger, took: int, pause: int
    ) -> None:
        harness.settle()
        apply = harness.gate.apply

        def slow(*args: Any) -> Any:
            harness.clock.set(harness.clock.now() + took)
            return apply(*args)

        harness.gate.apply = slow  # type: ignore[method-assign, assignment]
        began, before = harness.clock.now(), harness.upkeeps()
        while harness.clock.now() < began + SECOND:
            append(ledger, f"{harness.clock.now()}")
            harness.once()
            harness.clock.set(harness.clock.now() + MIN_PAUSE // 10)
        assert SECOND // pause - 3 <= harness.upkeeps() - before <= SECOND // pause + 1

    def test_again_at_once_while_there_is_more(self, harness: CaretakerHarness, ledger: Ledger) -> None:
        harness.settle()
        ledger.apply([Append(tuple(Spec(id=f"j{n}", queue="q", delay=SECOND) for n in range(2500)))])
        harness.settle()
        harness.clock.advance(2)
        times = [harness.once() for _ in range(3)]
        assert times[:2] == [harness.clock.now()] * 2
        assert times[2] > harness.clock.now()
        assert ledger.queues()["q"].counts.ready == 2500

    def test_a_clock_that_steps_back_does_not_stop_it(
        self, harness: CaretakerHarness, ledger: Ledger
    ) -> None:
        harness.settle()
        before = harness.upkeeps()
        harness.clock.set(harness.clock.now() - 3600 * SECOND)
        harness.once()
        assert harness.upkeeps() == before + 1
        assert harness.once() > harness.clock.now()


class TestSchedules:
    def test_they_are_asked_at_the_time_they_named_and_after_a_change(
        self, harness: CaretakerHarness, ledger: Ledger
    ) -> None:
        harness.settle()
        harness.next = harness.clock.now() + SECOND // 2
        append(ledger, "something")
        harness.clock.advance(0.1)
        assert harness.settle() == harness.next
        asked = len(harness.asked)
        harness.once()
        assert len(harness.asked) == asked
        harness.clock.set(harness.next)
        harness.next = None
        harness.once()
        assert harness.asked[asked:] == [harness.clock.now()]

    def test_an_error_in_them_is_logged_once_and_stops_nothing_else(
        self, harness: CaretakerHarness, ledger: Ledger, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness.settle()
        harness.error = ZeroDivisionError("oops")
        append(ledger, "late", delay=SECOND)
        with caplog.at_level(logging.WARNING, "towpath"):
            for _ in range(8):
                harness.clock.advance(0.5)
                harness.once()
        assert len([record for record in caplog.records if "oops" in record.message]) == 1
        assert len(harness.asked) >= 3
        assert state(ledger, "late") is State.READY

    def test_only_the_elected_one_fires(self, harness: CaretakerHarness, ledger: Ledger) -> None:
        ledger.apply([Note(key=CARETAKER_KEY, value=b"other", ttl=harness.ttl)])
        harness.once()
        assert harness.asked == []
        assert harness.upkeeps() == 0


class TestElection:
    def test_one_of_two(self, ledger: Ledger, clock: ManualClock) -> None:
        first, second = CaretakerHarness(ledger, clock, "a"), CaretakerHarness(ledger, clock, "b")
        with first.engine, second.engine:
            for harness in (first, second):
                harness.once()
            assert (first.caretaker.elected, second.caretaker.elected) == (True, False)
            start = clock.now()
            while clock.now() < start + 4 * first.ttl:
                clock.set(max(clock.now() + 1, min(first.once(), second.once())))
                assert first.caretaker.elected
                assert not second.caretaker.elected
            assert second.upkeeps() == 0
            note = ledger.note(CARETAKER_KEY)
            assert note is not None
            assert note.value == b"a"

    def test_a_dead_one_is_replaced_when_its_time_is_over(self, ledger: Ledger, clock: ManualClock) -> None:
        first, second = CaretakerHarness(ledger, clock, "a"), CaretakerHarness(ledger, clock, "b")
        with first.engine, second.engine:
            first.once()
            died = clock.now()
            while wake := second.once():
                if second.caretaker.elected:
                    break
                clock.set(max(clock.now() + 1, wake))
            assert first.ttl <= clock.now() - died <= first.ttl + first.stand_by
            promised = 16_250_000 if ledger.capabilities.remote else 5_250_000
            assert clock.now() - died <= promised, "the bound of docs/guarantees.md"
            first.once()
            assert not first.caretaker.elected, "it comes back and finds the place taken"

    def test_the_work_of_a_dead_one_waits_no_longer_than_that(
        self, ledger: Ledger, clock: ManualClock
    ) -> None:
        """Killed right after it renewed its note, with a job that is due soon."""
        first, second = CaretakerHarness(ledger, clock, "a"), CaretakerHarness(ledger, clock, "b")
        with first.engine, second.engine:
            first.settle()
            second.once()
            clock.advance(first.renew / SECOND)
            first.once()
            died = clock.now()
            append(ledger, "late", delay=SECOND)
            while (wake := second.once()) and state(ledger, "late") is not State.READY:
                clock.set(max(clock.now() + 1, wake))
            assert clock.now() - died <= first.ttl + first.stand_by
            assert second.asked, "and so do the schedules"

    def test_a_pause_of_the_elected_one_costs_nothing_but_its_place(
        self, ledger: Ledger, clock: ManualClock
    ) -> None:
        first, second = CaretakerHarness(ledger, clock, "a"), CaretakerHarness(ledger, clock, "b")
        with first.engine, second.engine:
            first.settle()
            clock.advance(3 * first.ttl / SECOND)
            second.once()
            first.once()
            assert (first.caretaker.elected, second.caretaker.elected) == (False, True)
            assert ledger.check() == []

    def test_one_that_closes_makes_way_at_once(self, ledger: Ledger, clock: ManualClock) -> None:
        first, second = CaretakerHarness(ledger, clock, "a"), CaretakerHarness(ledger, clock, "b")
        with first.engine, second.engine:
            first.once()
            second.once()
            first.caretaker.close()
            until(lambda: ledger.note(CARETAKER_KEY) is None)
            clock.set(clock.now() + second.stand_by)
            second.once()
            assert second.caretaker.elected

    def test_it_stands_by_when_another_owner_holds_the_note(
        self, harness: CaretakerHarness, ledger: Ledger
    ) -> None:
        harness.settle()
        ledger.apply(
            [Note(key=CARETAKER_KEY, value=None), Note(key=CARETAKER_KEY, value=b"other", ttl=harness.ttl)]
        )
        harness.clock.advance(harness.renew / SECOND)
        harness.once()
        assert not harness.caretaker.elected
        assert harness.asked[-1] < harness.clock.now()

    def test_an_answer_that_was_lost_does_not_cost_the_place(
        self, harness: CaretakerHarness, ledger: Ledger
    ) -> None:
        harness.settle()
        harness.clock.advance(harness.renew / SECOND)
        harness.gate.fail_after_commit = [LedgerBusy(path="x", seconds=1)]
        harness.once()
        for _ in range(4):
            harness.clock.advance(harness.renew / SECOND)
            harness.once()
            assert harness.caretaker.elected


class TestErrors:
    @pytest.mark.parametrize("error", [LedgerBusy(path="x", seconds=1), DiskFull(path="x")])
    def test_it_waits_and_logs_once(
        self, harness: CaretakerHarness, ledger: Ledger, error: LedgerBusy, caplog: pytest.LogCaptureFixture
    ) -> None:
        harness.settle()
        harness.gate.fail = [error] * 3
        with caplog.at_level(logging.INFO, "towpath"):
            for _ in range(3):
                harness.clock.advance(harness.ttl / SECOND)
                assert harness.once() == harness.clock.now() + RETRY_PAUSE
        [line] = caplog.messages
        assert str(error) in line
        harness.clock.advance(1)
        harness.once()
        assert harness.caretaker.elected
        before = harness.upkeeps()
        harness.clock.advance(harness.interval / SECOND)
        harness.once()
        assert harness.upkeeps() > before

    def test_what_is_fatal_is_raised(self, harness: CaretakerHarness, ledger: Ledger) -> None:
        ledger.close()
        with pytest.raises(LedgerClosed):
            harness.once()


class TestWakeups:
    """A waiter of the dispatcher gets a job of another process only after a kick of the committer."""

    def waiter(self, engine: BareEngine) -> tuple[threading.Event, list[Held]]:
        came, got = threading.Event(), list[Held]()

        def deliver(claims: list[Held]) -> None:
            got.extend(claims)
            came.set()

        waiter = Waiter(("q",), deliver, 30 * SECOND)
        waiter.want = 1
        engine.dispatcher.add(waiter)
        return came, got

    def test_a_commit_of_another_process_is_detected_at_once(
        self, harness: CaretakerHarness, ledger: Ledger
    ) -> None:
        harness.settle()
        harness.gate.inside.clear()
        came, got = self.waiter(harness.engine)
        assert harness.gate.inside.wait(WAIT)
        harness.settle()
        append(ledger, "foreign")
        assert not got
        harness.once()
        assert came.wait(WAIT)
        assert got[0].id == "foreign"

    def test_our_own_commits_cause_no_looking_around(self, harness: CaretakerHarness, ledger: Ledger) -> None:
        self.waiter(harness.engine)
        harness.engine.committer.call(Append((Spec(id="other", queue="elsewhere"),)))
        harness.settle()
        batches = len(harness.gate.batches)
        for n in range(50):
            harness.engine.committer.call(Append((Spec(id=f"own{n}", queue="elsewhere"),)))
            harness.clock.advance(0.0005)
            harness.once()
        assert len(harness.gate.batches) - batches <= 55

    def test_a_commit_that_hides_behind_our_own_is_found(
        self, harness: CaretakerHarness, ledger: Ledger
    ) -> None:
        harness.settle()
        came, got = self.waiter(harness.engine)
        harness.settle()
        harness.engine.committer.call(Append((Spec(id="own", queue="elsewhere"),)))
        append(ledger, "foreign")
        wake = harness.once()
        assert wake <= harness.clock.now() + MAX_DOUBT
        harness.clock.set(wake)
        harness.once()
        assert came.wait(WAIT)
        assert got[0].id == "foreign"

    def test_caretakers_that_stand_by_check_from_time_to_time(
        self, harness: CaretakerHarness, ledger: Ledger
    ) -> None:
        ledger.apply([Note(key=CARETAKER_KEY, value=b"other", ttl=harness.ttl)])
        self.waiter(harness.engine)
        harness.once()
        batches = len(harness.gate.batches)
        harness.clock.set(harness.clock.now() + harness.stand_by)
        harness.gate.inside.clear()
        harness.once()
        assert harness.gate.inside.wait(WAIT)
        assert len(harness.gate.batches) > batches


def _other_process(url: str, go: object, gone: object) -> None:
    go.wait()  # type: ignore[attr-defined]
    ledger = open_ledger(url)
    ledger.apply([Append((Spec(id="foreign", queue="q"),))])
    gone.set()  # type: ignore[attr-defined]
    ledger.close()


class TestThread:
    def start(self, engine: BareEngine) -> Caretaker:
        caretaker = Caretaker(engine.ledger, engine.committer, engine.owner, engine.clock, lambda now: None)
        caretaker.start()
        return caretaker

    def test_started_in_an_outage(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ledger may become unavailable after a worker has registered and before its caretaker starts."""
        available, refused = ledger.version, threading.Event()

        def refuse() -> int:
            refused.set()
            raise LedgerAway(path="postgresql://", why="the server is restarted")

        monkeypatch.setattr(ledger, "version", refuse)
        with BareEngine(ledger) as engine:
            caretaker = self.start(engine)
            assert refused.wait(WAIT)
            monkeypatch.setattr(ledger, "version", available)
            until(lambda: caretaker.elected)
            caretaker.close()

    def test_another_process(self, tmp_path: Path) -> None:
        url = f"sqlite:///{tmp_path}/work.db"
        ledger = open_ledger(url)
        with BareEngine(ledger) as engine:
            caretaker = self.start(engine)
            came, got = TestWakeups().waiter(engine)
            go, gone = SPAWN.Event(), SPAWN.Event()
            child = SPAWN.Process(target=_other_process, args=(url, go, gone))
            child.start()
            go.set()
            assert came.wait(WAIT)
            assert got[0].id == "foreign"
            assert gone.wait(WAIT)
            child.join(WAIT)
            caretaker.close()
        ledger.close()

    def test_it_wakes_a_delayed_job_and_closes_promptly(self, url: str) -> None:
        ledger = open_ledger(url)
        with BareEngine(ledger) as engine:
            caretaker = self.start(engine)
            until(lambda: ledger.note(CARETAKER_KEY) is not None)
            came, got = TestWakeups().waiter(engine)
            began = time.monotonic()
            engine.committer.call(Append((Spec(id="late", queue="q", delay=SECOND // 5),)))
            assert came.wait(WAIT)
            assert got[0].id == "late"
            assert time.monotonic() - began >= 0.2
            began = time.monotonic()
            caretaker.close()
            assert time.monotonic() - began < 1
            until(lambda: not caretaker._thread.is_alive())
            until(lambda: ledger.note(CARETAKER_KEY) is None)
        ledger.close()

    def test_a_locked_ledger_does_not_hold_up_the_closing(self) -> None:
        gate = Gated()
        with BareEngine(gate) as engine:
            caretaker = self.start(engine)
            until(lambda: gate.note(CARETAKER_KEY) is not None)
            gate.hold()
            append_in = threading.Thread(
                target=lambda: engine.committer.call(Append((Spec(id="x", queue="q"),))), daemon=True
            )
            append_in.start()
            assert gate.inside.wait(WAIT)
            began = time.monotonic()
            caretaker.close()
            assert time.monotonic() - began < 1
            gate.let_go()
            append_in.join(WAIT)

    def test_at_rest_it_uses_next_to_no_time_of_the_processor(self, tmp_path: Path) -> None:
        ledger = open_ledger(f"sqlite:///{tmp_path}/work.db")
        with BareEngine(ledger) as engine:
            TestWakeups().waiter(engine)
            caretaker = self.start(engine)
            until(lambda: ledger.note(CARETAKER_KEY) is not None)
            eventually_quiet = threading.Event()
            eventually_quiet.wait(0.3)
            used, began = time.process_time(), time.monotonic()
            eventually_quiet.wait(2.0)
            share = (time.process_time() - used) / (time.monotonic() - began)
            caretaker.close()
        ledger.close()
        assert share < 0.01
