"""Behaviour of the memory ledger alone: threads, waiting, lazy deletion, and unsupported commands."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from towpath.core.commands import (
    Append,
    Appended,
    Cancel,
    Claim,
    Claimed,
    Command,
    Renew,
    Selector,
    Settle,
    Settled,
    Upkeep,
    Upkept,
    Want,
)
from towpath.core.job import ClaimedJob, Done, Release, Spec, State
from towpath.core.lifecycle import KEPT, Jumps
from towpath.errors import InvalidInput, LedgerClosed, Unsupported
from towpath.ledger.memory.ledger import MemoryLedger

SECOND = 1_000_000
NOW = 1_000 * SECOND


def append(*ids: str, queue: str = "q", part: str | None = None) -> Append:
    return Append(tuple([Spec(id=id, queue=queue, part=part) for id in ids]))


def claim(
    ledger: MemoryLedger, n: int = 1, now: int | None = NOW, lease: int = 60 * SECOND
) -> tuple[ClaimedJob, ...]:
    [answer] = ledger.apply([Claim(owner="w", wants=(Want("q", n),), lease=lease)], now)
    assert isinstance(answer, Claimed)
    return answer.claims


def test_a_function_inside_a_settle_is_not_supported() -> None:
    ledger = MemoryLedger()
    ledger.apply([append("a")], NOW)
    [held] = claim(ledger)
    [answer] = ledger.apply([Settle(held.id, held.fence, Done(), within=lambda _: None)], NOW)
    assert isinstance(answer, Unsupported)
    job = ledger.get("a")
    assert job is not None
    assert job.state is State.RUNNING
    assert not ledger.capabilities.transactional


def test_wait_wakes_another_thread() -> None:
    ledger = MemoryLedger()
    seen = ledger.version()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ledger.wait, seen, 30)
        started = time.monotonic()
        ledger.apply([append("a")])
        assert waiting.result() != seen
        assert time.monotonic() - started < 10


def test_wait_gives_up() -> None:
    ledger = MemoryLedger()
    assert ledger.wait(ledger.version(), 0.01) == ledger.version()


def test_a_command_that_changes_nothing_wakes_no_waiter() -> None:
    ledger = MemoryLedger()
    ledger.apply([append("a")], NOW)
    seen = ledger.version()
    ledger.apply(
        [append("a"), Renew((), SECOND), Upkeep(), Claim(owner="w", wants=(Want("none"),), lease=1)], NOW + 5
    )
    assert ledger.version() == seen
    assert ledger.dump()["last"] == NOW


def test_eight_threads_do_every_job_once() -> None:
    ledger, each, threads = MemoryLedger(), 250, 8
    done: list[str] = []
    barrier = threading.Barrier(threads)

    def work(name: int) -> None:
        barrier.wait()
        for n in range(each):
            ledger.apply([append(f"{name}-{n}", part=f"p{n % 3}" if n % 2 else None)])
            for held in claim(ledger, 2, now=None):
                [answer] = ledger.apply([Settle(held.id, held.fence, Done())])
                assert answer == Settled(held.id, State.DONE)
                done.append(held.id)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, name) for name in range(threads)]:
            future.result()
    while left := claim(ledger, 100, now=None):
        ledger.apply([Settle(held.id, held.fence, Done()) for held in left])
        done.extend(held.id for held in left)
    assert sorted(done) == sorted(f"{name}-{n}" for name in range(threads) for n in range(each))
    assert ledger.queues()["q"].counts.done == threads * each
    assert ledger.check() == []


def test_stale_entries_do_not_pile_up() -> None:
    ledger = MemoryLedger()
    ledger.apply([append("a")], NOW)
    for n in range(5_000):
        [held] = claim(ledger, now=NOW + n)
        ledger.apply(
            [Renew(((held.id, held.fence),), SECOND), Settle(held.id, held.fence, Release())], NOW + n
        )
    for n in range(0, 5_000, 10):
        ledger.apply(
            [append(*[f"{n}-{k}" for k in range(10)], part="p"), Cancel(where=Selector(part="p"))], NOW + n
        )
    store = ledger._store
    assert store.leases == {}
    heaps = (store.queues["q"].loose, store.queues["q"].parts["p"].queued)
    assert max(len(heap) for heap in heaps) < 5_000
    assert ledger.check() == []


def test_a_closed_ledger_raises() -> None:
    ledger = MemoryLedger()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ledger.wait, ledger.version(), 30)
        ledger.close()
        with pytest.raises(LedgerClosed):
            waiting.result()
    with pytest.raises(LedgerClosed):
        ledger.apply([append("a")])
    with pytest.raises(LedgerClosed):
        ledger.get("a")


def test_what_is_no_command_spoils_nothing() -> None:
    ledger = MemoryLedger()
    junk: list[Command] = [append("a"), "append"]  # type: ignore[list-item]
    with pytest.raises(InvalidInput):
        ledger.apply(junk)
    assert ledger.get("a") is None


def test_after_a_jump_nothing_is_reaped_for_one_lease() -> None:
    ledger = MemoryLedger()
    [answer] = ledger.apply([append("a")], NOW)
    assert isinstance(answer, Appended)
    claim(ledger, lease=10 * SECOND)
    jumped = NOW + 60 * SECOND
    assert ledger.apply([Upkeep()], jumped) == [Upkept(next_due=jumped + 10 * SECOND)]
    for step in range(1, 25):
        ledger.apply([Upkeep()], jumped + step * SECOND * 2 // 5)
    [answer] = ledger.apply([Upkeep()], jumped + 10 * SECOND)
    assert isinstance(answer, Upkept)
    assert answer.reaped == 1


class TestJumps:
    def test_the_first_time_is_no_jump(self) -> None:
        jumps = Jumps()
        jumps.note(NOW)
        assert not jumps.protects(SECOND, NOW, NOW)

    def test_a_jump_of_more_than_half_a_lease_spares_it_for_one_lease(self) -> None:
        jumps = Jumps()
        jumps.note(NOW)
        jumps.note(NOW + 5 * SECOND)
        assert jumps.protects(10 * SECOND - 1, NOW + 1, NOW + 5 * SECOND)
        assert not jumps.protects(10 * SECOND, NOW + 1, NOW + 5 * SECOND)
        assert jumps.protects(4 * SECOND, NOW + 1, NOW + 9 * SECOND - 1)
        assert not jumps.protects(4 * SECOND, NOW + 1, NOW + 9 * SECOND)
        assert not jumps.protects(4 * SECOND, NOW, NOW + 5 * SECOND)

    def test_short_jumps_and_steps_back_do_not_count(self) -> None:
        jumps = Jumps()
        for now in (NOW, NOW + SECOND // 2, NOW, NOW + SECOND // 2):
            jumps.note(now)
        assert not jumps.protects(1, NOW + 1, NOW + SECOND // 2)

    def test_the_largest_are_kept_for_a_day(self) -> None:
        jumps = Jumps()
        jumps.note(0)
        now = 3600 * SECOND
        jumps.note(now)
        for _ in range(2 * KEPT):
            now += SECOND
            jumps.note(now)
        assert jumps.protects(7000 * SECOND, 1, now)
        jumps.note(now := now + 86_400 * SECOND)
        assert jumps.until(7000 * SECOND, now) == now + 7000 * SECOND
