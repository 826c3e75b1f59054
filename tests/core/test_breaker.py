"""The state machine of a circuit breaker, with time as an argument."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from towpath.core import breaker as rules
from towpath.core.breaker import Breaker, BreakerGate, Phase, Record, Status, cooldown_of
from towpath.core.checks import SECOND
from towpath.core.commands import SetPart, SetQueue
from towpath.core.views import NoteView
from towpath.errors import InvalidInput

NOW = 1_700_000_000 * SECOND
B = Breaker("x", failures=3, window=10, cooldown=30, probes=2)


def view(value: bytes) -> NoteView:
    return NoteView("breaker/x", value, 1, 1, None)


def fails(status: Status, *times: float, began: float | None = None) -> Status:
    for time in times:
        at = NOW + round(time * SECOND)
        status = rules.failed(B, status, at, at if began is None else NOW + round(began * SECOND))
    return status


def at(seconds: float) -> int:
    return NOW + round(seconds * SECOND)


def test_failures_within_the_window_open_it() -> None:
    status = fails(Status(), 0, 5, 9)
    assert (status.phase(at(9)), status.until, status.why, status.trips) == (
        Phase.OPEN,
        at(39),
        "3 failures in 10 s",
        1,
    )
    assert (status.phase(at(39) - 1), status.phase(at(39))) == (Phase.OPEN, Phase.HALF_OPEN)


def test_failures_further_apart_do_not() -> None:
    status = fails(Status(), 0, 6, 10, 21)
    assert (status.phase(at(21)), len(status.failed)) == (Phase.CLOSED, 1)


def test_a_success_resets_the_count() -> None:
    status = Status()
    for round in range(100):
        status = fails(status, round / 50, round / 50)
        assert len(status.failed) == 2
        status = rules.succeeded(B, status, at(round / 50), at(round / 50))
        assert status == Status()
    assert rules.succeeded(B, status, at(9), at(9)) is status


def test_a_success_that_began_before_it_closed_resets_nothing() -> None:
    status = fails(rules.closed(Status(), at(0)), 1, 2)
    assert rules.succeeded(B, status, at(3), at(-1)) == status


R = Breaker("x", window=10, ratio=0.5, volume=10)


def called(status: Status, *calls: tuple[float, bool]) -> Status:
    for time, ok in calls:
        turn = rules.succeeded if ok else rules.failed
        passed = rules.call(R, at(time), True) if ok else ()
        status = turn(R, status, at(time), at(time), passed)
    return status


def test_a_ratio_of_failures_opens_it() -> None:
    status = called(Status(), *[(n / 10, n % 2 == 1) for n in range(9)])
    assert status.phase(at(1)) is Phase.CLOSED
    status = called(status, (1, False))
    assert (status.phase(at(1)), status.why) == (Phase.OPEN, "6 of 10 calls failed in 10 s")
    assert status.tally == ()


def test_few_failures_among_many_successes_do_not() -> None:
    status = called(Status(), *[(n / 100, n % 10 > 0) for n in range(1000)])
    assert status.phase(at(10)) is Phase.CLOSED
    assert len(status.tally) <= rules.SLICES + 1


def test_a_ratio_forgets_what_is_older_than_its_window() -> None:
    status = called(Status(), *[(0, False)] * 9)
    status = called(status, (12, False))
    assert (status.phase(at(12)), sum(bad for _, _, bad in status.tally)) == (Phase.CLOSED, 1)


def test_notes_of_older_versions_can_be_read() -> None:
    old = (
        b'{"breaker":{"name":"x","failures":5,"window":60.0,"cooldown":30.0,"probes":2},'
        b'"status":{"failed":[1,2]},"gates":[]}'
    )
    assert rules.BREAKERS.decode(view(old)) == Record(Breaker("x"), Status(failed=(1, 2)))


def test_successes_of_the_probes_close_it() -> None:
    status = fails(Status(), 0, 0, 0)
    once = rules.succeeded(B, status, at(31), at(30))
    assert (once.phase(at(31)), once.good) == (Phase.HALF_OPEN, 1)
    closed = rules.succeeded(B, once, at(32), at(31))
    assert closed == Status(since=at(32), trips=1, why="2 probes succeeded")


def test_one_probe_that_fails_opens_it_again() -> None:
    status = rules.succeeded(B, fails(Status(), 0, 0, 0), at(31), at(30))
    again = fails(status, 32)
    assert (again.phase(at(32)), again.until, again.why, again.good, again.trips) == (
        Phase.OPEN,
        at(62),
        "a probe failed",
        0,
        2,
    )


def test_calls_that_began_before_the_last_change_do_not_count() -> None:
    status = fails(Status(), 0, 0, 0)
    assert fails(status, 31, began=29) == status
    assert rules.succeeded(B, status, at(31), at(29)) == status
    assert fails(status, 5) == status
    closed = rules.closed(status, at(40))
    assert fails(closed, 41, 41, 41, began=39) == closed


def test_so_many_calls_are_let_through_as_probes() -> None:
    status = fails(Status(), 0, 0, 0)
    assert rules.admit(B, Status(), at(0)) == Status()
    assert rules.admit(B, status, at(29)) is None
    first = rules.admit(B, status, at(30))
    assert first is not None
    second = rules.admit(B, first, at(31))
    assert second is not None
    assert rules.admit(B, second, at(32)) is None
    assert rules.admit(B, rules.returned(second, at(31)), at(32)) is not None


def test_a_probe_that_never_reports_cannot_wedge_it() -> None:
    status: Status | None = fails(Status(), 0, 0, 0)
    for time in (30, 31, 61, 61.5, 92, 92):
        assert status is not None
        status = rules.admit(B, status, at(time))
    assert status is not None
    assert len(status.out) == 2


def test_by_hand() -> None:
    status = rules.opened(B, Status(), NOW, "by hand", at(5))
    assert (status.phase(at(4)), status.phase(at(5))) == (Phase.OPEN, Phase.HALF_OPEN)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "breaker"),
        ({"name": "two words"}, "breaker"),
        ({"name": "x" * 250}, "breaker"),
        ({"failures": 0}, "failures"),
        ({"failures": 2.5}, "failures"),
        ({"probes": -1}, "probes"),
        ({"window": 0}, "window"),
        ({"window": "long"}, "window"),
        ({"cooldown": -3}, "cooldown"),
        ({"cooldown": 0.01}, "cooldown"),
        ({"cooldown": float("nan")}, "cooldown"),
        ({"cooldown": timedelta(days=8)}, "cooldown"),
    ],
)
def test_bad_settings(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^{named} is "):
        Breaker(**{"name": "x", **fields})


def test_spans() -> None:
    assert Breaker("x", window=timedelta(minutes=1), cooldown=timedelta(seconds=2)) == Breaker(
        "x", window=60, cooldown=2
    )


# The gates that follow


def test_a_gate_is_a_time_and_a_cap_and_its_settings_come_back() -> None:
    record = Record(
        B,
        fails(Status(), 0, 0, 0),
        (BreakerGate("q", "breaker:x", cap=9, why="mine"), BreakerGate("r"), BreakerGate("s", None, 1)),
    )
    words = "breaker x: 3 failures in 10 s"
    assert record.settings() == [
        SetPart(queue="q", part="breaker:x", cap=2, not_before=at(30), why=words),
        SetQueue(queue="r", cap=2, not_before=at(30), why=words),
        SetQueue(queue="s", cap=1, not_before=at(30), why=words),
    ]
    assert replace(record, status=Status(trips=1)).settings() == [
        SetPart(queue="q", part="breaker:x", cap=9, not_before=0, why="mine"),
        SetQueue(queue="r", cap=None, not_before=0, why=None),
        SetQueue(queue="s", cap=1, not_before=0, why=None),
    ]
    assert rules.parse_reason(words) == ("x", "3 failures in 10 s")
    assert [rules.parse_reason(each) for each in (None, "", "unpaid", "breaker is broken")] == [None] * 4


def test_the_note_is_read_as_it_was_written() -> None:
    record = Record(B, fails(Status(), 0, 1, 2), (BreakerGate("q", "breaker:x", 4, "w"),)).with_gate(
        ("r", None)
    )
    stored = rules.BREAKERS.put("x", record).value
    assert stored is not None
    assert rules.BREAKERS.decode(view(stored)) == record
    assert record.with_gate(("r", None)) is record


# Any history

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["fail", "succeed", "return", "admit", "open", "close"]),
        st.integers(0, 20 * SECOND),
        st.integers(0, 40 * SECOND),
    ),
    max_size=60,
)


@given(MOVES, st.integers(1, 4), st.integers(1, 3))
def test_any_history(moves: list[tuple[str, int, int]], failures: int, probes: int) -> None:
    breaker = Breaker("x", failures=failures, window=10, cooldown=30, probes=probes)
    status, now = Status(), NOW
    for move, step, ago in moves:
        now += step
        began, before = now - ago, status
        phase = before.phase(now)
        if move == "fail":
            status = rules.failed(breaker, status, now, began)
            assert phase is not Phase.OPEN or status == before
        elif move == "succeed":
            status = rules.succeeded(breaker, status, now, began)
            assert phase is Phase.HALF_OPEN or status in (before, replace(before, failed=()))
        elif move == "return":
            status = rules.returned(status, began)
        elif move == "admit":
            admitted = rules.admit(breaker, status, now)
            assert (admitted is None) <= (phase is not Phase.CLOSED)
            assert admitted is None or phase is not Phase.OPEN
            status = admitted or status
        elif move == "open":
            status = rules.opened(breaker, status, now, "by hand")
        else:
            status = rules.closed(status, now)
        assert len(status.failed) < failures
        assert len(status.out) <= probes
        assert status.good < probes
        assert status.trips >= before.trips
        if status.until != before.until:
            assert status.since == now
            assert status.until in (0, now + cooldown_of(breaker))
    # In every state: after a cool-down the probes may run, and their successes close it.
    now = max(now, status.until) + cooldown_of(breaker)
    for _ in range(probes):
        admitted = rules.admit(breaker, status, now)
        assert admitted is not None
        status = rules.succeeded(breaker, admitted, now, now)
    assert status.phase(now) is Phase.CLOSED
