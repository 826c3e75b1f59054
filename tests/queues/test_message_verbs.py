"""Received messages, blocking and async, on memory and SQLite: ack, nack, extend, state, `with`, heartbeats,
subscriptions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from tests.support.engine import BareEngine, Verbs, expire, job, steal, taken
from tests.support.gated import Gated
from tests.support.waiting import WAIT, in_thread, until
from towpath.core.checks import SECOND
from towpath.core.commands import Cancel, Selector
from towpath.core.job import Reason, State
from towpath.errors import AlreadySettled, InvalidInput, LedgerBusy, LostClaim, NoteConflict
from towpath.ledger import Ledger
from towpath.queues.message import Queue
from towpath.runtime.notes import Document


class TestWords:
    def test_ack(self, queue: Queue, ledger: Ledger, engine: BareEngine, verbs: Verbs) -> None:
        id = queue.put("x")
        message = verbs.get(queue)
        assert (message.attempt, message.fence) == (1, 1)
        verbs.ack(message, {"ok": True})
        done = job(ledger, id)
        assert (done.state, done.result) == (State.DONE, b'{"ok":true}')
        assert engine.leases._held == {}

    def test_nack_counts_a_failure_with_its_reason(self, queue: Queue, ledger: Ledger, verbs: Verbs) -> None:
        id = queue.put("x", max_attempts=2)
        verbs.nack(taken(queue), reason="no stock")
        back = job(ledger, id)
        assert (back.state, back.failures, back.error) == (State.READY, 1, "no stock")
        again = taken(queue)
        assert (again.attempt, again.fence) == (2, 2)
        verbs.nack(again, delay=5, reason="still none")
        dead = job(ledger, id)
        assert (dead.state, dead.reason, dead.error) == (State.FAILED, Reason.EXHAUSTED, "still none")

    def test_nack_with_delay(self, queue: Queue, ledger: Ledger, verbs: Verbs) -> None:
        id = queue.put("x")
        verbs.nack(taken(queue), delay=timedelta(seconds=90))
        later = job(ledger, id)
        assert later.state is State.SCHEDULED
        assert 80 * SECOND < later.ready_at - later.created_at < 120 * SECOND

    def test_defer_counts_nothing(self, queue: Queue, ledger: Ledger, verbs: Verbs) -> None:
        id = queue.put("x", max_attempts=1)
        for _ in range(3):
            verbs.nack(taken(queue), defer=True)
        back = job(ledger, id)
        assert (back.state, back.failures) == (State.READY, 0)

    def test_extend(self, queue: Queue, ledger: Ledger, engine: BareEngine, verbs: Verbs) -> None:
        id = queue.put("x")
        message = taken(queue, lease=5, max_hold=10)
        verbs.extend(message, 300)
        held = job(ledger, id)
        assert held.lease_until is not None
        assert held.lease_until - held.created_at > 290 * SECOND
        _, entry = engine.leases._held[id]
        assert entry.lease == 300 * SECOND
        assert entry.until is not None
        assert entry.until > time.monotonic() + 290

    def test_verbs_of_a_lost_claim_raise(self, queue: Queue, ledger: Ledger, verbs: Verbs) -> None:
        queue.put("x")
        message = taken(queue)
        steal(ledger, message)
        for word in ("ack", "nack"):
            with pytest.raises(LostClaim):
                getattr(verbs, word)(message)
        with pytest.raises(LostClaim):
            verbs.extend(message, 5)
        assert message.lost

    def test_only_one_word_counts(self, queue: Queue, ledger: Ledger, verbs: Verbs) -> None:
        for first, second in (("ack", "nack"), ("nack", "ack"), ("ack", "ack"), ("nack", "extend")):
            queue.put("x")
            message = taken(queue)
            getattr(verbs, first)(message)
            outcome = "acknowledged" if first == "ack" else "returned"
            with pytest.raises(AlreadySettled, match=f"fence .* was {outcome} already"):
                getattr(verbs, second)(message, *([5] if second == "extend" else []))
            while (rest := queue.get()) is not None:
                rest.ack()

    def test_a_command_with_a_lost_reply_may_be_repeated(self, engine: BareEngine, verbs: Verbs) -> None:
        gate = Gated(engine.ledger)
        with BareEngine(gate) as other:
            queue = Queue(other, "orders")
            id = queue.put("x")
            message = taken(queue)
            gate.fail_after_commit = [LedgerBusy(path="x", seconds=1)]
            with pytest.raises(LedgerBusy):
                verbs.ack(message)
            with pytest.raises(LostClaim):
                verbs.nack(message)
            assert job(gate, id).state is State.DONE

    def test_a_stale_message_does_not_disturb_the_next_holder(
        self, queue: Queue, ledger: Ledger, engine: BareEngine
    ) -> None:
        id = queue.put("x")
        stale = taken(queue)
        expire(ledger, stale)
        fresh = taken(queue)
        assert fresh.fence == stale.fence + 1
        with pytest.raises(LostClaim):
            stale.ack()
        assert engine.leases._held[id][0] == fresh.fence
        fresh.ack()
        assert engine.leases._held == {}


class TestContext:
    def test_without_a_word_it_is_a_nack(self, queue: Queue, ledger: Ledger) -> None:
        id = queue.put("x")
        with taken(queue):
            pass
        assert (job(ledger, id).state, job(ledger, id).failures) == (State.READY, 1)

        async def main() -> None:
            message = await queue.aget()
            assert message is not None
            async with message:
                pass

        asyncio.run(main())
        assert job(ledger, id).failures == 2

    def test_an_exception_is_the_reason(self, queue: Queue, ledger: Ledger) -> None:
        id = queue.put("x")
        with pytest.raises(ZeroDivisionError), taken(queue):
            raise ZeroDivisionError("by\0zero")
        assert job(ledger, id).error == "ZeroDivisionError: by\\0zero"

        async def main() -> None:
            message = await queue.aget()
            assert message is not None
            async with message:
                raise KeyError("gone")

        with pytest.raises(KeyError):
            asyncio.run(main())
        assert job(ledger, id).error == "KeyError: 'gone'"

    def test_an_interrupt_is_not_the_messages_fault(self, queue: Queue, ledger: Ledger) -> None:
        id = queue.put("x")
        with pytest.raises(KeyboardInterrupt), taken(queue):
            raise KeyboardInterrupt
        assert (job(ledger, id).state, job(ledger, id).failures) == (State.READY, 0)

    @pytest.mark.parametrize("word", ["ack", "nack"])
    def test_a_word_inside_stands(self, queue: Queue, ledger: Ledger, word: str) -> None:
        id = queue.put("x")
        with contextlib.suppress(ZeroDivisionError), taken(queue) as message:
            getattr(message, word)()
            raise ZeroDivisionError
        assert job(ledger, id).failures == (word == "nack")

    def test_a_lost_claim_does_not_hide_the_users_own_error(self, queue: Queue, ledger: Ledger) -> None:
        queue.put("x")
        message = taken(queue)
        seen = None
        try:
            with message:
                steal(ledger, message)
                raise ZeroDivisionError
        except ZeroDivisionError as error:
            seen = error
        assert seen is not None

    def test_a_lost_claim_raises_at_the_end_of_the_block(self, queue: Queue, ledger: Ledger) -> None:
        queue.put("x")
        message = taken(queue)
        with pytest.raises(LostClaim), message:
            steal(ledger, message)


class TestState:
    def test_it_survives_nacks_and_goes_with_the_ack(
        self, queue: Queue, ledger: Ledger, verbs: Verbs
    ) -> None:
        id = queue.put("x")
        message = taken(queue)
        assert (message.state.value, message.state.version) == (None, 0)
        first = verbs.save(message.state, {"step": 1})
        assert (message.state.value, message.state.version) == ({"step": 1}, first)
        verbs.nack(message)
        again = taken(queue)
        assert verbs.load(again.state) == {"step": 1}
        again.state.value["step"] = 2
        assert verbs.save(again.state) > first
        verbs.nack(again, defer=True)
        last = taken(queue)
        assert last.state.value == {"step": 2}
        verbs.ack(last)
        assert ledger.note(f"state/{id}") is None

    def test_an_ack_takes_it_along_even_if_this_holder_never_looked(
        self, queue: Queue, ledger: Ledger, verbs: Verbs
    ) -> None:
        id = queue.put("x")
        message = taken(queue)
        verbs.save(message.state, 1)
        message.nack()
        verbs.ack(taken(queue))
        assert ledger.note(f"state/{id}") is None

    def test_a_save_of_an_old_version_is_refused(
        self, queue: Queue, engine: BareEngine, verbs: Verbs
    ) -> None:
        queue.put("x")
        message = taken(queue)
        verbs.save(message.state, 1)
        other = Document(engine.ledger, engine.committer, f"state/{message.id}")
        assert other.value == 1
        verbs.save(message.state, 2)
        with pytest.raises(NoteConflict):
            verbs.save(other, 3)
        assert verbs.load(other) == 2
        verbs.save(other, 3)

    def test_a_refused_ack_keeps_it(self, queue: Queue, ledger: Ledger, verbs: Verbs) -> None:
        queue.put("x")
        message = taken(queue)
        verbs.save(message.state, 1)
        steal(ledger, message)
        with pytest.raises(LostClaim):
            verbs.ack(message)
        assert ledger.note(f"state/{message.id}") is not None

    def test_bad_values(self, queue: Queue, verbs: Verbs) -> None:
        queue.put("x")
        message = taken(queue)
        with pytest.raises(InvalidInput, match="state"):
            verbs.save(message.state, object())
        with pytest.raises(InvalidInput):
            verbs.save(message.state, "x" * 300_000)
        assert message.state.value is None


class TestHolding:
    def test_in_hand_it_is_kept_alive(self, queue: Queue, ledger: Ledger, engine: BareEngine) -> None:
        id = queue.put("x")
        message = taken(queue, lease=1)
        first = job(ledger, id).lease_until
        assert first is not None
        until(lambda: (job(ledger, id).lease_until or 0) > first)
        message.ack()
        assert engine.leases._held == {}

    def test_only_for_max_hold(self, queue: Queue, engine: BareEngine) -> None:
        queue.put("x")
        message = taken(queue, lease=5, max_hold=60)
        engine.leases.renew(time.monotonic() + 59)
        assert message.id in engine.leases._held
        engine.leases.renew(time.monotonic() + 61)
        assert engine.leases._held == {}

    def test_losses_and_requests_to_stop_are_noticed(
        self, queue: Queue, ledger: Ledger, engine: BareEngine
    ) -> None:
        ids = queue.put_many(["a", "b"])
        lost, stopped = queue.get_many(2)
        ledger.apply([Cancel(where=Selector(ids=(ids[1],)))])
        engine.leases.renew(time.monotonic())
        while stopped.cancel_requested is None:
            ledger.wait(ledger.version(), 0.01)
        assert stopped.cancel_requested is Reason.REQUESTED
        steal(ledger, lost)
        engine.leases.renew(time.monotonic())
        until(lambda: lost.lost)


class TestSubscribe:
    def test_everything_comes_once(self, queue: Queue, ledger: Ledger) -> None:
        ids = queue.put_many(range(50))
        got = []
        with queue.subscribe(prefetch=4) as messages:
            for message in messages:
                message.ack()
                got.append(message.id)
                if len(got) == 50:
                    break
        assert got == ids
        assert ledger.queues()["orders"].counts.done == 50

    def test_async(self, queue: Queue, ledger: Ledger) -> None:
        async def main() -> list[str]:
            feeder = asyncio.create_task(queue.aput_many(range(30)))
            got = []
            async with queue.subscribe(prefetch=3) as messages:
                async for message in messages:
                    await message.aack()
                    got.append(message.id)
                    if len(got) == 30:
                        break
            assert got == await feeder
            return got

        assert len(asyncio.run(main())) == 30
        assert ledger.queues()["orders"].counts.done == 30

    def test_what_was_not_consumed_goes_back(self, queue: Queue, ledger: Ledger, engine: BareEngine) -> None:
        ids = queue.put_many(range(10))
        for message in queue.subscribe(prefetch=5):
            until(lambda: ledger.queues()["orders"].counts.running >= 5)
            message.ack()
            break
        until(lambda: ledger.queues()["orders"].counts.ready == 9)
        assert {job(ledger, id).attempts for id in ids[1:]} == {0}
        assert engine.leases._held == {}
        assert engine.dispatcher.waiting == 0

    def test_another_thread_may_close_it(self, queue: Queue, engine: BareEngine) -> None:
        subscription = queue.subscribe()
        result = in_thread(lambda: [message.id for message in subscription])
        until(lambda: engine.dispatcher.waiting)
        subscription.close()
        assert result() == []
        assert list(subscription) == []

    def test_a_canceled_task_gives_back(self, queue: Queue, ledger: Ledger, engine: BareEngine) -> None:
        queue.put_many(range(6))

        async def consume(begun: asyncio.Event) -> None:
            async for _ in queue.subscribe(prefetch=3):
                begun.set()
                await asyncio.Event().wait()

        async def main() -> None:
            begun = asyncio.Event()
            task = asyncio.create_task(consume(begun))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        # The consumed message belongs to the consumer, which did not settle it.
        until(lambda: ledger.queues()["orders"].counts.ready == 5)
        assert engine.dispatcher.waiting == 0

    def test_jobs_with_a_single_attempt_are_not_hoarded(self, queue: Queue, ledger: Ledger) -> None:
        queue.put_many(range(5), max_attempts=1)
        for message in queue.subscribe(prefetch=5):
            assert ledger.queues()["orders"].counts.running <= 2
            message.ack()
            break

    def test_two_share(self, queue: Queue, ledger: Ledger) -> None:
        total = 40
        seen, lock, over = list[str](), threading.Lock(), threading.Event()
        subscriptions = [queue.subscribe(prefetch=2) for _ in range(2)]

        def consume(messages: Any) -> None:
            for message in messages:
                message.ack()
                with lock:
                    seen.append(message.id)
                    if len(seen) == total:
                        over.set()

        results = [in_thread(lambda each=each: consume(each)) for each in subscriptions]  # type: ignore[misc]
        ids = queue.put_many(range(total))
        assert over.wait(WAIT)
        for each in subscriptions:
            each.close()
        for result in results:
            result()
        assert sorted(seen) == sorted(ids)
