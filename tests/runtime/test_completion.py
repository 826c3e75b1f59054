"""Thousands of coroutines wait for jobs and commits: one thread serves them, and it reads only after a
commit. Reads and wake-ups are counted, not seconds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from tests.support.waiting import WAIT, auntil, until
from towpath import App
from towpath.core.commands import Append, Claim, Claimed, Purge, Selector, Settle, Want
from towpath.core.job import Done, Job, Spec, State
from towpath.errors import LedgerClosed, UnknownJob
from towpath.ledger import Ledger
from towpath.ledger.memory import MemoryLedger
from towpath.runtime import completion
from towpath.runtime.completion import CompletionWatcher
from towpath.testing import ManualClock

MANY = 2000


class Counted:
    """A ledger that counts its reads and the sleeps of its watchers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.reads = self.sleeps = 0

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        self.reads += 1
        return self._ledger.get_many(ids, bodies=bodies)

    def wait(self, seen: int, timeout: float) -> int:
        self.sleeps += 1
        return self._ledger.wait(seen, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


def finish(ledger: Ledger, ids: Sequence[str]) -> None:
    [claimed] = ledger.apply([Claim(owner="w", wants=(Want("q", len(ids)),), lease=10**9)])
    assert isinstance(claimed, Claimed)
    ledger.apply([Settle(claim.id, claim.fence, Done()) for claim in claimed.claims])


def watching_threads() -> int:
    return sum(thread.name == "towpath-watch" for thread in threading.enumerate())


def test_no_wait_reads_on_the_event_loop() -> None:
    """Also not for the reason of a timeout."""
    with App("memory://") as app:
        ledger, readers = app.ledger, set[int]()
        app.queue("q").put(1, id="a")

        class Spied:
            def __getattr__(self, name: str) -> Any:
                readers.add(threading.get_ident())
                return getattr(ledger, name)

        watch = CompletionWatcher(cast(Ledger, Spied()))

        async def main() -> None:
            with pytest.raises(TimeoutError, match="ready, first in queue q"):
                await watch.ajob("a", timeout=0)
            waiting = asyncio.create_task(watch.ajob("a"))
            await auntil(lambda: watch._waiting)
            await asyncio.to_thread(finish, ledger, ["a"])
            assert (await waiting).state is State.DONE
            assert readers
            assert threading.get_ident() not in readers

        asyncio.run(main())
        watch.close()


def test_thousands_of_waiters_cost_one_thread_and_no_reads_while_nothing_happens() -> None:
    counted = Counted(MemoryLedger(ManualClock()))
    watch = CompletionWatcher(counted)
    ids = [f"j{n}" for n in range(MANY)]
    counted.apply([Append(tuple([Spec(id=id, queue="q") for id in ids]))])
    before = watching_threads()

    async def main() -> None:
        jobs = [asyncio.create_task(watch.ajob(id)) for id in ids]
        seen = counted.version()
        commits = [asyncio.create_task(watch.changed(seen)) for _ in range(MANY)]
        await auntil(lambda: len(watch._waiting) == MANY and sum(map(len, watch._versions.values())) == MANY)
        assert watching_threads() == before + 1
        # Until the thread has read for the last of them.
        await auntil(lambda: counted.sleeps)
        reads, sleeps = counted.reads, counted.sleeps
        await auntil(lambda: counted.sleeps >= sleeps + 3)
        assert counted.reads == reads, "nothing was committed"
        assert not any(task.done() for task in (*jobs, *commits))
        await asyncio.to_thread(finish, counted, ids)
        assert {job.state for job in await asyncio.gather(*jobs)} == {State.DONE}
        assert seen not in await asyncio.gather(*commits)
        assert counted.reads <= reads + 4
        assert watching_threads() == before + 1

    asyncio.run(main())
    watch.close()


def test_every_commit_is_seen(app: App) -> None:
    async def main() -> None:
        seen = await app.engine.watch.changed(None)
        for n in range(3):
            wait = asyncio.create_task(app.engine.watch.changed(seen))
            await app.queue("q").aput(n)
            seen = await wait
        # A commit between the read and the wait.
        seen = app.ledger.version()
        await app.queue("q").aput("x")
        assert await app.engine.watch.changed(seen) != seen

    asyncio.run(main())


def test_a_wait_for_a_commit_may_end_without_one() -> None:
    async def main() -> None:
        app = App("memory://")
        watch = app.engine.watch
        seen = await watch.changed(None)
        assert await watch.changed(seen, timeout=0.001) == seen
        task = asyncio.create_task(watch.changed(seen))
        await auntil(lambda: watch._versions)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert watch._versions == {}
        task = asyncio.create_task(watch.changed(seen))
        await auntil(lambda: watch._versions)
        await asyncio.to_thread(app.close)
        with pytest.raises(LedgerClosed):
            await task

    asyncio.run(main())


def test_the_thread_ends_without_waiters_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "WAIT_SLICE", 0.01)
    ledger = MemoryLedger(ManualClock())
    watch = CompletionWatcher(ledger)
    ledger.apply([Append((Spec(id="a", queue="q"), Spec(id="b", queue="q")))])
    for id in "ab":
        waiting = threading.Thread(target=watch.job, args=(id,))
        waiting.start()
        until(lambda: watch._waiting)
        finish(ledger, [id])
        waiting.join(60)
        assert not waiting.is_alive()
        until(lambda: watch._thread is None)
    watch.close()


def test_a_waiter_gets_no_result_of_a_job_that_the_same_batch_deletes(app: App) -> None:
    """The settle and the purge are one transaction; no reader sees the state between them."""
    queue, ends = app.queue("q"), list[object]()

    def wait(id: str) -> None:
        try:
            ends.append(app.job(id).finished(WAIT).state)
        except UnknownJob:
            ends.append(UnknownJob)

    for n in range(20):
        id = queue.put(n)
        message = queue.get(wait=None)
        waiter = threading.Thread(target=wait, args=(id,))
        waiter.start()
        until(lambda: app.engine.watch._waiting)
        settle, purge = Settle(id, message.fence, Done(b"1")), Purge(where=Selector(ids=(id,)))
        app.engine.call_all([settle, purge])
        waiter.join(WAIT)
    assert ends == [UnknownJob] * 20
