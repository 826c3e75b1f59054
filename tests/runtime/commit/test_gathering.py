"""Concurrent coroutines pass their commands together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.gated import Gated, append, call_in_thread, until_waiting
from tests.support.waiting import until
from towpath.core.commands import Appended, Cancel, Renew, Result, Selector
from towpath.errors import LedgerClosed
from towpath.runtime.commit.committer import Committer

MOST = 10
LEASE = 60_000_000


@pytest.fixture
def ledger() -> Iterator[Gated]:
    gated = Gated()
    yield gated
    assert gated.check() == []


@pytest.fixture
def committer(ledger: Gated) -> Iterator[Committer]:
    """The last batch had several callers."""
    committer = Committer(ledger, max_backlog=MOST)
    committer.start()
    ledger.hold()
    callers = [call_in_thread(committer, append("first"))]
    assert ledger.inside.wait(20)
    callers += [call_in_thread(committer, append(f"company{n}")) for n in range(2)]
    until_waiting(committer, 2)
    ledger.let_go()
    for thread, _ in callers:
        thread.join(20)
    ledger.batches.clear()
    yield committer
    ledger.let_go()
    committer.close()


def ids(ledger: Gated) -> list[list[str]]:
    """The appended ids of each batch."""
    return [
        [spec.id for command in batch for spec in getattr(command, "specs", ())] for batch in ledger.batches
    ]


async def all_at_once(committer: Committer, *names: str) -> list[Result]:
    return await asyncio.gather(*(committer.acall(append(name)) for name in names))


@contextlib.asynccontextmanager
async def no_room(ledger: Gated, committer: Committer) -> AsyncIterator[None]:
    """The backlog is full until the ledger continues."""
    ledger.hold()
    busy, _ = call_in_thread(committer, append(*[f"busy{n}" for n in range(MOST)]))
    await asyncio.to_thread(ledger.inside.wait, 20)
    full, _ = call_in_thread(committer, append(*[f"full{n}" for n in range(MOST)]))
    await asyncio.to_thread(until_waiting, committer, 1)
    committer._several_callers = True
    yield
    for thread in (busy, full):
        await asyncio.to_thread(thread.join, 20)


def test_one_turn_of_the_loop_is_one_batch(ledger: Gated, committer: Committer) -> None:
    async def twice() -> list[Result]:
        return [*await all_at_once(committer, *"abcde"), *await all_at_once(committer, *"fghij")]

    answers = asyncio.run(twice())
    assert [answer.jobs[0].id for answer in answers if isinstance(answer, Appended)] == list("abcdefghij")
    assert ids(ledger) == [list("abcde"), list("fghij")]


def test_no_more_go_together_than_may_wait(ledger: Gated, committer: Committer) -> None:
    asyncio.run(all_at_once(committer, *[f"j{n}" for n in range(MOST + 1)]))
    assert [len(batch) for batch in ids(ledger)] == [MOST, 1]


def test_a_single_caller_does_not_wait_for_an_iteration_of_the_loop(
    ledger: Gated, committer: Committer
) -> None:
    async def alone() -> None:
        await committer.acall(append("a"))
        ledger.hold()
        task = asyncio.ensure_future(committer.acall(append("b")))
        await asyncio.sleep(0)
        # The loop is blocked meanwhile.
        assert ledger.inside.wait(20)
        ledger.let_go()
        await task

    asyncio.run(alone())
    assert ids(ledger) == [["a"], ["b"]]


def test_every_sort_keeps_its_place(ledger: Gated, committer: Committer) -> None:
    """Commands about held jobs go first, and commands without specs do not wait for room."""

    async def mixed() -> None:
        async with no_room(ledger, committer):
            waiting = asyncio.ensure_future(committer.acall(append("waits")))
            others = asyncio.gather(
                committer.acall(Cancel(where=Selector(ids=("x",)))), committer.acall(Renew((), LEASE))
            )
            await asyncio.to_thread(until_waiting, committer, 3)
            assert len(committer._queue.blocked) == 1
            ledger.let_go()
            await others
            await waiting

    asyncio.run(mixed())
    kinds = [[type(command).__name__ for command in batch] for batch in ledger.batches]
    assert kinds == [["Append"], ["Renew", "Append", "Cancel"], ["Append"]]


def test_of_the_appends_that_wait_for_room_only_the_cancelled_are_dropped(
    ledger: Gated, committer: Committer
) -> None:
    async def some_give_up() -> None:
        async with no_room(ledger, committer):
            tasks = [asyncio.ensure_future(committer.acall(append(name))) for name in "abc"]
            await asyncio.to_thread(until, lambda: len(committer._queue.blocked) == 1)
            tasks[1].cancel()
            await asyncio.sleep(0)
            ledger.let_go()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(each) for each in found] == [Appended, asyncio.CancelledError, Appended]

    asyncio.run(some_give_up())
    assert ids(ledger)[-1] == ["a", "c"]


def test_all_callers_get_an_error_when_another_thread_closes_the_committer(
    ledger: Gated, committer: Committer
) -> None:
    def close_elsewhere() -> None:
        closing = threading.Thread(target=committer.close)
        closing.start()
        closing.join(20)

    async def too_late() -> list[Result | BaseException]:
        tasks = [asyncio.ensure_future(committer.acall(append(name))) for name in "ab"]
        # They have started, and the iteration of the loop has not ended.
        asyncio.get_running_loop().call_soon(close_elsewhere)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(each) for each in asyncio.run(too_late())] == [LedgerClosed, LedgerClosed]


def test_a_close_in_the_same_iteration_loses_no_command(ledger: Gated, committer: Committer) -> None:
    async def in_time() -> list[Result]:
        tasks = [asyncio.ensure_future(committer.acall(append(name))) for name in "ab"]
        asyncio.get_running_loop().call_soon(committer.close)
        return await asyncio.gather(*tasks)

    assert [type(each) for each in asyncio.run(in_time())] == [Appended, Appended]
    assert ids(ledger) == [["a", "b"]]


def test_they_keep_their_order_also_when_they_are_not_in_company_any_more(
    ledger: Gated, committer: Committer
) -> None:
    async def alone_meanwhile() -> None:
        first = asyncio.ensure_future(committer.acall(append("first one")))
        await asyncio.sleep(0)
        committer._several_callers = False
        large = asyncio.ensure_future(committer.acall(append(*[f"j{n}" for n in range(MOST)])))
        await asyncio.gather(first, large)

    asyncio.run(alone_meanwhile())
    assert [id for batch in ids(ledger) for id in batch] == ["first one", *[f"j{n}" for n in range(MOST)]]


def test_every_loop_gathers_for_itself(ledger: Gated, committer: Committer) -> None:
    found: list[Result] = []

    def loop(name: str) -> None:
        found.extend(asyncio.run(all_at_once(committer, *[f"{name}{n}" for n in range(5)])))

    threads = [threading.Thread(target=loop, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(each.jobs[0].id for each in found if isinstance(each, Appended)) == [
        f"{a}{n}" for a in "abcd" for n in range(5)
    ]


def test_a_closed_loop_delays_no_other_caller(ledger: Gated, committer: Committer) -> None:
    left = asyncio.new_event_loop()
    left.set_exception_handler(lambda *_: None)  # it would log the task that never ends
    task = left.create_task(committer.acall(append("left behind")))
    left.call_soon(left.stop)
    left.run_forever()
    left.close()
    asyncio.run(all_at_once(committer, "a", "b"))
    assert [id for batch in ids(ledger) for id in batch] == ["left behind", "a", "b"]
    assert not task.done()
