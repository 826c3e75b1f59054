"""Schedules: times, exactly one fire each, missed fires, and edits at run time."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine import BareEngine
from tests.support.gated import Gated
from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import Append, Note, SetQueue
from towpath.core.ids import derived
from towpath.core.job import Job, Spec
from towpath.core.schedule import CATCH_UP, GRACE, Missed, Schedule, next_fire, plan
from towpath.core.views import Query
from towpath.errors import InvalidInput, LedgerBusy
from towpath.ledger import Ledger
from towpath.operations.schedules import (
    SCHEDULED_AT,
    Scheduler,
    get_schedule,
    list_schedules,
    pause,
    register,
    remove,
    resume,
    set_schedule,
    trigger,
)
from towpath.runtime.caretaker import Caretaker
from towpath.testing import ManualClock

MINUTE = 60 * SECOND
SPEC = Spec(id="x", queue="q", kind="report", payload=b'{"n":1}')


@pytest.fixture
def ledger(manual_ledger: Ledger) -> Ledger:
    return manual_ledger


@pytest.fixture
def engine(ledger: Ledger, clock: ManualClock) -> Iterator[BareEngine]:
    with BareEngine(ledger, clock) as engine:
        yield engine


def cron(expression: str, tz: str = "UTC", missed: str = "skip", name: str = "s") -> Schedule:
    return Schedule(name=name, spec=SPEC, cron=expression, tz=tz, missed=Missed(missed))


def every(seconds: float, missed: str = "skip", anchor: int = 0) -> Schedule:
    return Schedule(name="s", spec=SPEC, every=round(seconds * SECOND), missed=Missed(missed), anchor=anchor)


def at(text: str, tz: str = "UTC") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(tz)).timestamp()) * SECOND


def fires(schedule: Schedule, start: int, end: int) -> list[int]:
    found = []
    while (start := next_fire(schedule, start)) <= end:
        found.append(start)
    return found


def local(times: list[int], tz: str) -> list[str]:
    return [datetime.fromtimestamp(time / SECOND, ZoneInfo(tz)).strftime("%d %H:%M %z") for time in times]


def jobs(ledger: Ledger) -> list[Job]:
    return list(ledger.find(Query(queue="q", oldest_first=True, limit=1000)).jobs)


def fired(ledger: Ledger) -> list[int]:
    """The scheduled times of the jobs, in the order of their append."""
    return [
        round(datetime.fromisoformat(job.headers[SCHEDULED_AT]).timestamp() * SECOND) for job in jobs(ledger)
    ]


class TestTimes:
    def test_a_plain_cron_expression(self) -> None:
        times = fires(cron("*/20 9-10 * * MON"), at("2026-06-01T00:00:00"), at("2026-06-02T00:00:00"))
        assert local(times, "UTC") == [
            f"01 {time} +0000" for time in ("09:00", "09:20", "09:40", "10:00", "10:20", "10:40")
        ]

    @pytest.mark.parametrize(
        ("alias", "expected"),
        [
            ("@hourly", "2026-06-03T11:00:00"),
            ("@daily", "2026-06-04T00:00:00"),
            ("@midnight", "2026-06-04T00:00:00"),
            ("@weekly", "2026-06-07T00:00:00"),
            ("@monthly", "2026-07-01T00:00:00"),
            ("@yearly", "2027-01-01T00:00:00"),
            (" @Annually ", "2027-01-01T00:00:00"),
        ],
    )
    def test_aliases(self, alias: str, expected: str) -> None:
        assert next_fire(cron(alias), at("2026-06-03T10:30:00")) == at(expected)

    def test_a_fire_is_later_than_the_last_one_to_the_microsecond(self) -> None:
        noon = at("2026-06-01T12:00:00")
        assert next_fire(cron("0 12 * * *"), noon - 1) == noon
        assert next_fire(cron("0 12 * * *"), noon) == noon + DAY
        assert next_fire(cron("30 * * * * *"), noon) == noon + 30 * SECOND

    def test_an_interval_lies_on_its_grid(self) -> None:
        assert next_fire(every(90), 0) == 90 * SECOND
        assert next_fire(every(90), 90 * SECOND - 1) == 90 * SECOND
        assert next_fire(every(90), 90 * SECOND) == 180 * SECOND
        assert next_fire(every(90, anchor=SECOND), 100 * SECOND) == 181 * SECOND
        assert next_fire(every(90, anchor=HOUR), 0) > 0

    def test_an_expression_that_ends_has_no_next_fire_before_the_end_of_time(self) -> None:
        assert next_fire(cron("0 0 29 2 *"), at("2097-01-01T00:00:00")) == at("2104-02-29T00:00:00")


class TestSummerTime:
    """Europe/Berlin: 2026-03-29 02:00 -> 03:00, 2026-10-25 03:00 -> 02:00. America/New_York: 2026-03-08,
    2026-11-01."""

    @pytest.mark.parametrize(
        ("tz", "year_month", "days", "change"),
        [("Europe/Berlin", "2026-10", 31, 25), ("America/New_York", "2026-11", 30, 1)],
    )
    def test_the_repeated_hour_of_autumn_fires_once(
        self, tz: str, year_month: str, days: int, change: int
    ) -> None:
        hour = 2 if tz == "Europe/Berlin" else 1
        start, end = at(f"{year_month}-01T00:00:00", tz), at(f"{year_month}-{days}T23:59:59", tz)
        times = fires(cron(f"30 {hour} * * *", tz), start - 1, end)
        assert len(times) == days
        assert [time[:8] for time in local(times, tz)] == [
            f"{day:02} 0{hour}:30" for day in range(1, days + 1)
        ]
        gaps = Counter(later - earlier for earlier, later in pairwise(times))
        assert gaps == {24 * HOUR: days - 2, 25 * HOUR: 1}
        summer = "+0200" if tz == "Europe/Berlin" else "-0400"
        assert local(times, tz)[change - 1].endswith(summer), "the first of the two passes"

    @pytest.mark.parametrize(
        ("tz", "change", "end"),
        [("Europe/Berlin", "2026-03-29", "2026-03-31"), ("America/New_York", "2026-03-08", "2026-03-31")],
    )
    def test_the_missing_hour_of_spring_shifts(self, tz: str, change: str, end: str) -> None:
        times = fires(cron("30 2 * * *", tz), at("2026-03-01T00:00:00", tz), at(f"{end}T23:00:00", tz))
        assert len(times) == 31
        days = {time[:2]: time[3:8] for time in local(times, tz)}
        assert days.pop(change[-2:]) == "03:00"
        assert set(days.values()) == {"02:30"}

    def test_one_second_in_front_gets_the_same_care(self) -> None:
        tz = "Europe/Berlin"
        autumn = fires(
            cron("15 30 2 * * *", tz), at("2026-10-24T12:00:00", tz), at("2026-10-26T00:00:00", tz)
        )
        assert autumn == [at("2026-10-25T02:30:15", tz)]
        spring = fires(
            cron("15 30 2 * * *", tz), at("2026-03-28T12:00:00", tz), at("2026-03-30T00:00:00", tz)
        )
        assert spring == [at("2026-03-29T03:00:15", tz)]

    def test_what_runs_all_day_runs_through_the_change_evenly(self) -> None:
        tz = "Europe/Berlin"
        for day in ("2026-03-29", "2026-10-25"):
            times = fires(cron("*/15 * * * *", tz), at(f"{day}T00:00:00", tz), at(f"{day}T06:00:00", tz))
            assert {later - earlier for earlier, later in pairwise(times)} == {15 * MINUTE}

    @given(
        st.sampled_from(
            ["30 2 * * *", "0 3 * * *", "*/7 * * * *", "0,30 1-3 * * *", "10 45 1 * * *", "*/20 2 * * 0"]
        ),
        st.sampled_from(["Europe/Berlin", "America/New_York", "UTC", "Australia/Lord_Howe"]),
        st.integers(at("2026-10-24T00:00:00"), at("2026-11-02T00:00:00")),
        st.integers(0, 12 * HOUR),
    )
    def test_the_next_fire_does_not_depend_on_where_one_asks_from(
        self, text: str, tz: str, after: int, more: int
    ) -> None:
        schedule = cron(text, tz)
        fire = next_fire(schedule, after)
        assert fire > after
        later = next_fire(schedule, after + more)
        assert later == fire if after + more < fire else later > fire


class TestPlans:
    def due(self, schedule: Schedule, missed: str, next_at: int) -> Schedule:
        return Schedule(
            name="s",
            spec=SPEC,
            cron=schedule.cron,
            every=schedule.every,
            missed=Missed(missed),
            next_at=next_at,
        )

    def test_on_time_every_policy_fires_once(self) -> None:
        noon = at("2026-06-01T12:00:00")
        for missed in Missed:
            assert plan(self.due(cron("@hourly"), missed, noon), noon + 5) == ([noon], noon + HOUR)

    def test_skip_forgets_and_once_makes_up_for_all_by_the_last(self) -> None:
        noon, now = at("2026-06-01T12:00:00"), at("2026-06-04T12:30:00")
        assert plan(self.due(cron("@hourly"), "skip", noon), now) == ([], now + HOUR // 2)
        assert plan(self.due(cron("@hourly"), "once", noon), now) == ([now - HOUR // 2], now + HOUR // 2)

    def test_skip_still_fires_what_is_only_a_little_late(self) -> None:
        noon = at("2026-06-01T12:00:00")
        assert plan(self.due(cron("* * * * *"), "skip", noon), noon + HOUR + GRACE // 2)[0] == [noon + HOUR]
        assert plan(self.due(cron("@hourly"), "skip", noon), noon + GRACE)[0] == [noon]
        assert plan(self.due(cron("@hourly"), "skip", noon), noon + GRACE + 1)[0] == []

    def test_all_makes_up_for_each_a_bounded_number_at_a_time(self) -> None:
        noon = at("2026-06-01T12:00:00")
        times, following = plan(self.due(cron("* * * * *"), "all", noon), noon + 1000 * MINUTE)
        assert times == [noon + n * MINUTE for n in range(CATCH_UP)]
        assert following == noon + CATCH_UP * MINUTE

    def test_a_year_of_missed_seconds_is_found_quickly(self) -> None:
        start = at("2026-01-01T00:00:00")
        times, _ = plan(self.due(cron("* * * * * *"), "once", start), start + 365 * DAY + 1)
        assert times == [start + 365 * DAY]

    @given(st.sampled_from(["* * * * *", "7 3 * * *", "0 0 1 * *"]), st.integers(0, 90 * DAY))
    def test_the_last_fire_is_the_one_that_walking_finds(self, text: str, more: int) -> None:
        start = next_fire(cron(text), at("2026-06-01T00:00:00"))
        now = start + (more % (2 * DAY) if text == "* * * * *" else more)
        times, following = plan(self.due(cron(text), "once", start), now)
        assert times == [([start, *fires(cron(text), start, now)])[-1]]
        assert following == next_fire(cron(text), now)


class TestBadInput:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "* * * *",
            "61 * * * *",
            "* * * * * * *",
            "0 0 30 2 *",
            "@often",
            "a b c d e",
            "*/0 * * * *",
            "1L/2 * * * *",
            "* * * * 1L/2",
        ],
    )
    def test_a_wrong_expression_is_named(self, text: str) -> None:
        with pytest.raises(InvalidInput) as caught:
            cron(text)
        assert caught.value.details["field"] == "cron"
        assert caught.value.details["value"] == repr(text)

    @pytest.mark.parametrize("tz", ["Mars/Olympus", "", "../etc/passwd", "a\0b", "Europe"])
    def test_a_wrong_time_zone_is_named(self, tz: str) -> None:
        with pytest.raises(InvalidInput) as caught:
            cron("@daily", tz)
        assert caught.value.details["field"] == "tz"

    @given(st.text("0123456789*/-,#LW @adily", max_size=20))
    def test_any_text_is_an_expression_or_a_clear_error(self, text: str) -> None:
        with contextlib.suppress(InvalidInput):
            assert next_fire(cron(text), 0) > 0

    def test_other_fields(self, engine: BareEngine) -> None:
        for make, field in (
            (lambda: Schedule(name="s", spec=SPEC), "schedule"),
            (lambda: Schedule(name="s", spec=SPEC, cron="@daily", every=SECOND), "schedule"),
            (lambda: Schedule(name="no spaces", spec=SPEC, cron="@daily"), "name"),
            (lambda: every(0.01), "every"),
            (lambda: Schedule(name="s", spec=SPEC, cron="@daily", missed="never"), "missed"),  # type: ignore[arg-type]
            (lambda: Schedule(name="s", spec=Spec(id="x", queue="q", ready_at=1), cron="@daily"), "spec"),
            (lambda: pause(engine, "nobody"), "schedule"),
            (lambda: remove(engine, "nobody"), "schedule"),
            (lambda: trigger(engine, "nobody"), "schedule"),
            (lambda: set_schedule(engine, "s", cron="@daily", every=5), "schedule"),
        ):
            with pytest.raises(InvalidInput) as caught:
                make()
            assert caught.value.details["field"] == field


class TestFiring:
    def test_a_simulated_month_through_the_autumn_change(
        self, engine: BareEngine, clock: ManualClock
    ) -> None:
        tz = "Europe/Berlin"
        clock.set(at("2026-10-01T00:00:00", tz))
        register(engine, cron("30 2 * * *", tz))
        scheduler, end = Scheduler(engine), at("2026-10-31T23:00:00", tz)
        while (wake := scheduler.due(clock.now())) is not None and wake <= end:
            clock.set(wake)
        times = fired(engine.ledger)
        assert times == fires(cron("30 2 * * *", tz), at("2026-10-01T00:00:00", tz), end)
        assert len(times) == 31
        assert {job.kind for job in jobs(engine.ledger)} == {"report"}
        assert {job.payload for job in jobs(engine.ledger)} == {b'{"n":1}'}

    def test_many_caretakers_at_once_fire_exactly_once(self, ledger: Ledger, clock: ManualClock) -> None:
        with BareEngine(ledger, clock) as first, BareEngine(ledger, clock, "other") as second:
            register(first, every(60))
            schedulers = [Scheduler(host) for host in (first, second, first, second)]
            start, rounds = clock.now(), 20
            barrier = threading.Barrier(len(schedulers) + 1)

            def work(scheduler: Scheduler) -> None:
                for _ in range(rounds):
                    barrier.wait(20)
                    scheduler.due(clock.now())
                    barrier.wait(20)

            threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in schedulers]
            for thread in threads:
                thread.start()
            for _ in range(rounds):
                clock.advance(60)
                barrier.wait(20)
                barrier.wait(20)
            for thread in threads:
                thread.join(20)
            assert fired(ledger) == fires(every(60), start, clock.now())
            assert ledger.check() == []

    def test_a_crash_between_the_job_and_the_note_fires_nothing_twice(
        self, engine: BareEngine, clock: ManualClock
    ) -> None:
        schedule = register(engine, every(60))
        clock.set(schedule.next_at)
        id = derived("schedule/s", str(schedule.next_at))
        engine.committer.call(
            Append((Spec(id=id, queue="q", headers={SCHEDULED_AT: "2026-01-01T00:00:00+00:00"}),))
        )
        assert Scheduler(engine).due(clock.now()) == schedule.next_at + MINUTE
        assert [job.id for job in jobs(engine.ledger)] == [id]
        assert get_schedule(engine, "s").last_at == schedule.next_at

    @pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("once", 1), ("all", 250)])
    def test_an_outage(self, engine: BareEngine, clock: ManualClock, missed: str, count: int) -> None:
        schedule = register(engine, every(300, missed))
        last = schedule.next_at + 249 * 5 * MINUTE
        clock.set(last + 2 * MINUTE)
        scheduler = Scheduler(engine)
        rounds = 1
        while (wake := scheduler.due(clock.now())) is not None and wake <= clock.now():
            rounds += 1
        assert wake == last + 5 * MINUTE
        expected = [schedule.next_at + n * 5 * MINUTE for n in range(250)]
        assert fired(engine.ledger) == expected[len(expected) - count :]
        assert rounds == max(1, -(-count // CATCH_UP))
        assert scheduler.due(clock.now()) == wake

    @pytest.mark.parametrize(("missed", "count"), [("skip", 1), ("all", 4)])
    def test_a_full_queue_refuses_no_fire(
        self, engine: BareEngine, clock: ManualClock, missed: str, count: int
    ) -> None:
        engine.committer.call(SetQueue(queue="q", capacity=0))
        schedule = register(engine, every(60, missed))
        clock.set(schedule.next_at + 3 * MINUTE)
        assert Scheduler(engine).due(clock.now()) == clock.now() + MINUTE
        assert len(jobs(engine.ledger)) == count

    def test_a_note_that_cannot_be_decoded_stops_only_its_schedule(
        self, engine: BareEngine, clock: ManualClock
    ) -> None:
        register(engine, cron("* * * * *", name="broken"))
        register(engine, cron("* * * * *", name="well"))
        engine.committer.call(Note(key="schedule/broken", value=b"?"))
        clock.advance(60)
        assert Scheduler(engine).due(clock.now()) is not None
        assert len(jobs(engine.ledger)) == 1
        assert [schedule.name for schedule in list_schedules(engine)] == ["well"]
        remove(engine, "broken")
        assert engine.ledger.note("schedule/broken") is None

    def test_a_ledger_that_was_busy_in_the_middle_is_asked_again(
        self, ledger: Ledger, clock: ManualClock
    ) -> None:
        gated = Gated(ledger)
        with BareEngine(gated, clock) as engine:
            register(engine, cron("* * * * *"))
            scheduler = Scheduler(engine)
            scheduler.due(clock.now())
            clock.advance(60)
            gated.fail = [LedgerBusy(path="x", seconds=1)]
            with pytest.raises(LedgerBusy):
                scheduler.due(clock.now())
            assert scheduler.due(clock.now()) is not None
            assert len(jobs(ledger)) == 1


class TestEdits:
    def test_the_same_definition_is_registered_once(self, engine: BareEngine, clock: ManualClock) -> None:
        first = register(engine, cron("@hourly"))
        version = engine.ledger.version()
        clock.advance(HOUR / SECOND)
        assert register(engine, cron("@hourly")) == first
        assert engine.ledger.version() == version

    def test_a_new_definition_keeps_the_next_fire_unless_the_times_changed(
        self, engine: BareEngine, clock: ManualClock
    ) -> None:
        first = register(engine, cron("@hourly"))
        clock.set(first.next_at + HOUR)
        second = register(engine, cron("@hourly", missed="once"))
        assert (second.missed, second.next_at) == (Missed.ONCE, first.next_at)
        third = register(engine, cron("@daily", missed="once"))
        assert third.next_at == next_fire(cron("@daily"), clock.now())

    def test_a_change_at_run_time_outlives_a_restart_of_the_same_code(
        self, engine: BareEngine, clock: ManualClock
    ) -> None:
        register(engine, cron("@hourly"))
        set_schedule(engine, "s", cron="*/5 * * * *", args={"n": 2})
        pause(engine, "s")
        kept = register(engine, cron("@hourly"))
        assert (kept.cron, kept.paused, kept.spec.payload) == ("*/5 * * * *", True, b'{"n":2}')
        renewed = register(engine, cron("@daily"))
        assert (renewed.cron, renewed.paused, renewed.spec.payload) == ("@daily", True, SPEC.payload)

    def test_pause_and_resume(self, engine: BareEngine, clock: ManualClock) -> None:
        register(engine, every(60, "all"))
        scheduler = Scheduler(engine)
        assert scheduler.due(clock.now()) is not None
        pause(engine, "s")
        clock.advance(600)
        assert scheduler.due(clock.now()) is None
        resumed = resume(engine, "s")
        assert resumed.next_at > clock.now(), "what passed during the pause was not missed"
        assert scheduler.due(clock.now()) == resumed.next_at
        assert jobs(engine.ledger) == []
        assert resume(engine, "s") == resumed

    def test_a_running_scheduler_notices_edits(self, engine: BareEngine, clock: ManualClock) -> None:
        scheduler = Scheduler(engine)
        assert scheduler.due(clock.now()) is None
        register(engine, cron("@yearly"))
        assert scheduler.due(clock.now()) == next_fire(cron("@yearly"), clock.now())
        set_schedule(engine, "s", every=60)
        assert scheduler.due(clock.now()) == next_fire(every(60), clock.now())
        set_schedule(engine, "s", cron="0 6 * * *", tz="Asia/Tokyo", missed="all")
        assert scheduler.due(clock.now()) == next_fire(cron("0 6 * * *", "Asia/Tokyo"), clock.now())
        remove(engine, "s")
        assert scheduler.due(clock.now()) is None
        assert list_schedules(engine) == []

    def test_trigger_makes_one_more_job_now(self, engine: BareEngine, clock: ManualClock) -> None:
        before = register(engine, cron("@yearly"))
        ids = [trigger(engine, "s"), trigger(engine, "s"), trigger(engine, "s", "mine")]
        assert sorted(job.id for job in jobs(engine.ledger)) == sorted(ids)
        assert ids[2] == "mine"
        assert get_schedule(engine, "s") == before

    def test_edits_that_race_are_all_kept(self, ledger: Ledger, clock: ManualClock) -> None:
        with BareEngine(ledger, clock) as engine:
            names = [f"s{n}" for n in range(6)]
            barrier = threading.Barrier(len(names) * 2)

            def work(name: str, extra: str) -> None:
                barrier.wait(20)
                register(engine, cron("@daily", name=name))
                register(engine, cron("@daily", name=extra))
                remove(engine, extra)

            threads = [
                threading.Thread(target=work, args=(name, f"x{n}"), daemon=True)
                for n, name in enumerate(names * 2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert [schedule.name for schedule in list_schedules(engine)] == names


def test_two_caretakers_with_schedules_fire_each_once(ledger: Ledger, clock: ManualClock) -> None:
    with BareEngine(ledger, clock, "a") as first, BareEngine(ledger, clock, "b") as second:
        register(first, cron("* * * * *"))
        keepers = [
            Caretaker(ledger, host.committer, host.owner, clock, Scheduler(host).due)
            for host in (first, second)
        ]
        start, end = clock.now(), clock.now() + HOUR // 6
        while clock.now() < end:
            wakes = [keeper.run_once(clock.now()) for keeper in keepers]
            clock.set(max(clock.now() + SECOND, min(wakes)))
        assert fired(ledger) == [time for time in fires(cron("* * * * *"), start, end) if time < end]
        first_job = jobs(ledger)[0]
        assert datetime.fromisoformat(first_job.headers[SCHEDULED_AT]).tzinfo == UTC
        for keeper in keepers:
            keeper.close()
