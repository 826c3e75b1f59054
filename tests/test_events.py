"""The bus: subscribers receive events, a failing listener affects no other, and events without subscribers
cost nothing."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import timeit
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import pytest

from towpath import events
from towpath.events import (
    KINDS,
    MAX_BACKLOG,
    BatchCommitted,
    BatchFailed,
    Bus,
    Event,
    JobSettled,
    JobStarted,
    LeaseLost,
    WorkerStarted,
    log_events,
)

STARTED = JobStarted(id="1", kind="mail", queue="q", attempt=1, waited=0.25)
SETTLED = JobSettled(kind="mail", queue="q", state="done", outcome="done", duration=0.5, attempt=1, id="1")
COMMITTED = BatchCommitted(commands=3, jobs=200, seconds=0.01)


def publish(bus: Bus, several: Sequence[Event]) -> None:
    for event in several:
        bus.publish(event)
    assert bus.flush()


def test_a_listener_gets_its_kind_and_no_other() -> None:
    bus, seen = Bus(), list[Event]()
    bus.subscribe(JobStarted, seen.append)
    publish(bus, [STARTED, SETTLED])
    assert seen == [STARTED]


def test_one_listener_for_several_kinds() -> None:
    bus, seen = Bus(), list[Event]()
    leave = bus.subscribe((JobStarted, JobSettled), seen.append)
    publish(bus, [STARTED, COMMITTED, SETTLED])
    leave()
    bus.publish(STARTED)
    assert seen == [STARTED, SETTLED]


def test_the_base_class_means_every_kind_once() -> None:
    bus, seen = Bus(), list[Event]()
    leave = bus.subscribe((Event, JobStarted), seen.append)
    publish(bus, [STARTED, COMMITTED])
    assert seen == [STARTED, COMMITTED]
    assert all(bus.wants(kind) for kind in KINDS)
    leave()
    assert not any(bus.wants(kind) for kind in KINDS)


def test_kinds_names_every_event_of_the_module() -> None:
    defined = {value for _, value in inspect.getmembers(events, inspect.isclass) if issubclass(value, Event)}
    assert defined - {Event} == set(KINDS)


def test_wants_follows_the_registered_listeners() -> None:
    bus = Bus()
    assert not bus.wants(JobStarted)
    first = bus.subscribe(JobStarted, print)
    second = bus.subscribe(JobStarted, print)
    first()
    assert bus.wants(JobStarted)
    first()
    assert bus.wants(JobStarted), "a second call does not end another subscription"
    second()
    assert not bus.wants(JobStarted)


def test_a_listener_that_raises_is_logged_once_and_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bus, seen = Bus(), list[Event]()

    def broken(event: JobStarted) -> None:
        raise RuntimeError(f"no {event.kind}")

    bus.subscribe(JobStarted, broken)
    bus.subscribe(JobStarted, seen.append)
    publish(bus, [STARTED] * 3)
    assert seen == [STARTED] * 3
    (record,) = caplog.records
    assert "broken failed on JobStarted" in record.message
    assert record.exc_info is not None


def test_the_failure_of_a_new_subscription_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus()

    def broken(event: JobStarted) -> None:
        raise RuntimeError

    for _ in range(2):
        leave = bus.subscribe(JobStarted, broken)
        publish(bus, [STARTED])
        leave()
    assert len(caplog.records) == 2


def test_an_interrupt_is_not_swallowed() -> None:
    bus = Bus()

    def interrupted(event: JobStarted) -> None:
        raise KeyboardInterrupt

    bus.subscribe(JobStarted, interrupted, inline=True)
    with pytest.raises(KeyboardInterrupt):
        bus.publish(STARTED)


def test_a_listener_may_leave_and_come_while_it_is_called() -> None:
    bus, seen = Bus(), list[str]()

    def once(event: JobStarted) -> None:
        seen.append("once")
        leave()
        bus.subscribe(JobStarted, lambda event: seen.append("late"))

    leave = bus.subscribe(JobStarted, once)
    publish(bus, [STARTED])
    publish(bus, [STARTED])
    assert seen == ["once", "late"]


def test_threads_that_come_publish_and_leave_at_once() -> None:
    bus, start = Bus(), threading.Barrier(8)
    counted = [0] * 8

    def work(number: int) -> None:
        def count(event: JobStarted) -> None:
            if event.attempt == number:
                counted[number] += 1

        start.wait()
        for _ in range(300):
            leave = bus.subscribe(JobStarted, count, inline=True)
            bus.publish(JobStarted(id="x", kind="k", queue="q", attempt=number))
            leave()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [300] * 8
    assert not bus.wants(JobStarted)


def test_a_listener_is_called_in_the_delivery_thread_and_delays_no_publisher() -> None:
    bus, seen, go = Bus(), list[Event](), threading.Event()

    def slow(event: Event) -> None:
        assert go.wait(10)
        seen.append(event)

    bus.subscribe(JobStarted, slow)
    several = [JobStarted(id=str(n), kind="k", queue="q", attempt=n) for n in range(100)]
    for event in several:
        bus.publish(event)
    assert bus.pending
    assert seen == []
    go.set()
    assert bus.flush()
    assert seen == several, "in the order of publication"
    assert not bus.pending


def test_a_full_backlog_drops_counts_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bus, seen, go, taken = Bus(), list[Event](), threading.Event(), threading.Event()

    def slow(event: Event) -> None:
        taken.set()
        assert go.wait(10)
        seen.append(event)

    bus.subscribe(JobStarted, slow)
    bus.publish(STARTED)
    assert taken.wait(10)
    for _ in range(MAX_BACKLOG + 7):
        bus.publish(STARTED)
    assert bus.dropped == 7
    go.set()
    bus.close()
    assert len(seen) == MAX_BACKLOG + 1
    (record,) = caplog.records
    assert "dropped" in record.message


def test_close_delivers_what_is_pending_and_ends_the_thread() -> None:
    bus, seen, before = Bus(), list[Event](), set(threading.enumerate())
    bus.subscribe(JobStarted, seen.append)
    for turn in (1, 2):
        for _ in range(1000):
            bus.publish(STARTED)
        bus.close()
        assert len(seen) == turn * 1000, "the next event starts the thread again"
        assert set(threading.enumerate()) <= before


def test_a_listener_may_close_and_flush() -> None:
    bus, done = Bus(), threading.Event()

    def close(event: Event) -> None:
        assert bus.flush()
        bus.close()
        done.set()

    bus.subscribe(JobStarted, close)
    bus.publish(STARTED)
    assert done.wait(10)


def test_events_are_values() -> None:
    assert JobStarted(id="1", kind="mail", queue="q", attempt=1, waited=0.25) == STARTED
    with pytest.raises(AttributeError):
        STARTED.kind = "other"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        STARTED.more = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("state", "outcome", "reason"),
    [
        ("failed", "retry", "exhausted"),
        ("failed", "fail", "fatal"),
        ("done", "done", ""),
        ("scheduled", "retry", ""),
    ],
)
def test_why_a_job_failed(state: str, outcome: str, reason: str) -> None:
    event = JobSettled(kind="k", queue="q", state=state, outcome=outcome, duration=0.0, attempt=1, id="1")
    assert event.reason == reason


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_has_a_sentence_that_its_fields_fill(kind: type[Event]) -> None:
    words = {
        "str": "word",
        "int": 7,
        "float": 0.5,
        "bool": True,
        "tuple[str, ...]": ("a", "b"),
        "str | None": None,
        "tuple[Any, ...]": (),
        "datetime": datetime.now(UTC),
        "datetime | None": None,
    }
    event = kind(
        **{name: words[note] for name, note in kind.__annotations__.items() if "ClassVar" not in note}
    )
    assert str(event)
    assert "{" not in str(event)


def test_collect_gathers_inside_the_block_only() -> None:
    bus = Bus()
    bus.publish(STARTED)
    with bus.collect(JobStarted, JobSettled) as collected:
        bus.publish(STARTED)
        bus.publish(COMMITTED)
        bus.publish(SETTLED)
    bus.publish(STARTED)
    assert collected.events == [STARTED, SETTLED]


def test_collect_of_the_base_class_is_everything() -> None:
    bus = Bus()
    with bus.collect(Event) as collected:
        bus.publish(STARTED)
        bus.publish(COMMITTED)
    assert collected.events == [STARTED, COMMITTED]


def test_expect_wakes_when_the_event_comes() -> None:
    bus = Bus()
    with bus.collect(JobSettled) as collected:
        thread = threading.Thread(target=publish, args=(bus, [SETTLED] * 3))
        thread.start()
        assert collected.expect(3) == [SETTLED] * 3
        thread.join()
        assert collected.expect(2) == [SETTLED] * 2, "what has come need not come again"


def test_expect_of_a_certain_event() -> None:
    bus = Bus()
    with bus.collect(JobStarted) as collected:
        several = [JobStarted(id=str(n), kind="k", queue="q", attempt=n) for n in range(5)]
        thread = threading.Thread(target=publish, args=(bus, several))
        thread.start()
        (found,) = collected.expect(where=lambda event: event.attempt == 3)
        thread.join()
    assert found.id == "3"


def test_expect_says_what_is_missing() -> None:
    bus = Bus()
    with bus.collect(JobStarted) as collected:
        bus.publish(STARTED)
        with pytest.raises(TimeoutError, match=r"1 of 2 expected events in 0\.01 s, 1 seen"):
            collected.expect(2, timeout=0.01)


def test_aexpect_wakes_a_coroutine_from_another_thread() -> None:
    async def main() -> None:
        bus = Bus()
        with bus.collect(JobStarted) as collected:
            waiting = asyncio.ensure_future(collected.aexpect(2))
            await asyncio.to_thread(bus.publish, STARTED)
            assert not waiting.done()
            await asyncio.to_thread(bus.publish, STARTED)
            assert await waiting == [STARTED] * 2
            with pytest.raises(TimeoutError, match="2 of 3"):
                await collected.aexpect(3, timeout=0.01)

    asyncio.run(main())


def test_log_events_writes_sentences_at_their_level(caplog: pytest.LogCaptureFixture) -> None:
    bus, logger = Bus(), logging.getLogger("test.events")
    caplog.set_level(logging.DEBUG, "test.events")
    leave = log_events(bus, logger)
    lost = LeaseLost(id="1", kind="mail", queue="q", attempt=2, owner="w")
    for event in (STARTED, lost, WorkerStarted(owner="w", queues=("a", "b"), concurrency=8)):
        bus.publish(event)
    assert bus.flush()
    leave()
    bus.publish(lost)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "w lost the lease of mail 1 of q at attempt 2"),
        ("INFO", "worker w consumes ('a', 'b') with concurrency 8"),
    ]
    assert vars(caplog.records[0])["event"] == lost


def test_log_events_listens_only_to_what_is_loud_enough() -> None:
    bus = Bus()
    leave = log_events(bus, level=logging.WARNING)
    assert bus.wants(BatchFailed)
    assert not bus.wants(WorkerStarted)
    assert not bus.wants(JobStarted)
    leave()
    log_events(bus, level=logging.DEBUG)
    assert bus.wants(JobStarted)


def best(run: Callable[[], object], number: int = 20_000) -> float:
    return min(timeit.repeat(run, number=number, repeat=15)) / number


def test_asking_costs_no_more_than_a_call() -> None:
    """60 ns on an idle machine; measured beside an empty function, so that load does not matter."""
    bus = Bus()
    bus.subscribe(JobSettled, print)

    def empty(kind: type[Event]) -> bool:
        return False

    asked, called = best(lambda: bus.wants(JobStarted)), best(lambda: empty(JobStarted))
    assert asked < 2 * called + 60e-9
