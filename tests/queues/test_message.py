"""Messages by hand, blocking and async, on memory and SQLite: put, get, ack and nack, state, and no message
lost."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest

from tests.support.engine import BareEngine, Verbs, job, settled, taken
from tests.support.gated import Gated
from tests.support.waiting import WAIT, auntil, in_thread, until
from towpath import App
from towpath.core.checks import SECOND
from towpath.core.commands import Append
from towpath.core.job import Reason, Spec, State
from towpath.errors import InvalidInput, LedgerBusy, LedgerClosed
from towpath.ledger import Ledger, open_ledger
from towpath.queues.message import Message, Queue, terms_of
from towpath.runtime.notes import Document
from towpath.testing import ManualClock


class TestPut:
    @pytest.mark.parametrize(
        ("payload", "body", "content_type"),
        [
            (b"\x00\xff", b"\x00\xff", "application/octet-stream"),
            (bytearray(b"ab"), b"ab", "application/octet-stream"),
            ("grüße", "grüße".encode(), "text/plain; charset=utf-8"),
            ({"a": [1, None]}, b'{"a":[1,null]}', "application/json"),
            (None, b"null", "application/json"),
        ],
    )
    def test_payloads(
        self, queue: Queue, verbs: Verbs, payload: object, body: bytes, content_type: str
    ) -> None:
        id = verbs.put(queue, payload)
        message = verbs.get(queue)
        assert (message.id, message.payload, message.content_type) == (id, body, content_type)

    def test_reading_a_payload(self, queue: Queue) -> None:
        queue.put("grüße")
        queue.put([1, 2])
        queue.put(b"\xff")
        text, numbers, raw = queue.get_many(3)
        assert text.text() == "grüße"
        assert numbers.json() == numbers.json(list[int]) == [1, 2]
        for read in (raw.text, raw.json, partial(numbers.json, dict[str, int])):
            with pytest.raises(InvalidInput, match="payload"):
                read()

    def test_options(self, queue: Queue, ledger: Ledger, verbs: Verbs) -> None:
        id = verbs.put(
            queue,
            "x",
            delay=timedelta(minutes=1),
            priority="high",
            part="eu",
            ttl=3600,
            headers={"h": "1"},
            content_type="text/csv",
            correlation_id="c",
            max_attempts=3,
            id="mine",
        )
        stored = job(ledger, id)
        assert (stored.id, stored.queue, stored.state, stored.priority) == (
            "mine",
            "orders",
            State.SCHEDULED,
            0,
        )
        assert (stored.part, stored.headers, stored.content_type, stored.max_attempts) == (
            "eu",
            {"h": "1"},
            "text/csv",
            3,
        )
        assert stored.correlation_id == "c"
        assert stored.ready_at == stored.created_at + 60 * SECOND
        assert stored.expires_at == stored.created_at + 3600 * SECOND

    def test_keys(self, queue: Queue, ledger: Ledger) -> None:
        first = queue.put(1, key="k")
        assert queue.put(2, key="k") == first
        newer = queue.put(3, key="k", on_conflict="replace")
        assert newer != first
        assert job(ledger, first).reason is Reason.SUPERSEDED
        serial = [queue.put(n, key="s", on_conflict="serial") for n in range(2)]
        assert len(set(serial)) == 2

    def test_many_are_one_commit(self, engine: BareEngine, verbs: Verbs) -> None:
        gate = Gated(engine.ledger)
        with BareEngine(gate) as other:
            queue = Queue(other, "orders")
            ids = verbs.put_many(queue, (n for n in range(100)), priority="low")
            assert len(gate.batches) == 1
            assert [message.id for message in queue.get_many(100)] == ids
            assert verbs.put_many(queue, []) == []

    def test_bad_input(self, engine: BareEngine, queue: Queue, verbs: Verbs) -> None:
        calls: dict[str, Callable[[], object]] = {
            "payload": lambda: verbs.put(queue, object()),
            "queue": lambda: Queue(engine, "no spaces"),
            "delay": lambda: verbs.put(queue, 1, delay=-1),
            "ttl": lambda: verbs.put(queue, 1, ttl="soon"),
            "on_conflict": lambda: verbs.put(queue, 1, on_conflict="keep"),
            "key": lambda: verbs.put_many(queue, [1], key="k"),
            "id": lambda: verbs.put_many(queue, [1], id="i"),
            "payloads": lambda: verbs.put_many(queue, "one text"),
            "n": lambda: verbs.get_many(queue, 0),
            "wait": lambda: verbs.get(queue, wait=-1),
            "lease": lambda: verbs.get(queue, lease=0),
            "prefetch": lambda: queue.subscribe(prefetch=0),
        }
        for field, call in calls.items():
            with pytest.raises(InvalidInput) as caught:
                call()
            assert caught.value.details["field"] == field
        with pytest.raises(InvalidInput, match=r"keep, replace or serial"):
            verbs.put(queue, 1, key="k", on_conflict="never")
        with pytest.raises(InvalidInput, match="surrogates"):
            verbs.put(queue, "\ud800")
        with pytest.raises(TypeError, match="colour"):
            verbs.put(queue, 1, colour="red")
        assert engine.ledger.queues() == {}


class TestGet:
    def test_an_empty_queue_gives_nothing_at_once(
        self, queue: Queue, engine: BareEngine, verbs: Verbs
    ) -> None:
        assert verbs.get(queue) is None
        assert verbs.get_many(queue, 5) == []
        assert engine.attended == 0, "there is no waiter, so no caretaker is needed"

    def test_an_empty_queue_is_waited_for_so_long(self, queue: Queue, verbs: Verbs) -> None:
        began = time.monotonic()
        assert verbs.get(queue, wait=0.05) is None
        assert 0.05 <= time.monotonic() - began < WAIT

    @pytest.mark.parametrize("wait", [WAIT, None])
    def test_a_message_that_comes_while_we_wait(
        self, queue: Queue, engine: BareEngine, verbs: Verbs, wait: float | None
    ) -> None:
        result = in_thread(lambda: verbs.get(queue, wait=wait))
        until(lambda: engine.attended == 1)
        id = queue.put("now")
        assert result().id == id
        assert engine.attended == 1

    def test_several_at_once_in_order(self, queue: Queue, verbs: Verbs) -> None:
        ids = queue.put_many(range(5))
        assert [message.id for message in verbs.get_many(queue, 3)] == ids[:3]
        assert [message.id for message in verbs.get_many(queue, 3, wait=1)] == ids[3:]

    def test_a_broken_ledger_is_the_callers_error(self, engine: BareEngine, verbs: Verbs) -> None:
        gate = Gated(engine.ledger)
        with BareEngine(gate) as other:
            gate.fail = [LedgerBusy(path="x", seconds=1)]
            with pytest.raises(LedgerBusy):
                verbs.get(Queue(other, "orders"))
        with pytest.raises(LedgerClosed):
            verbs.get(Queue(other, "orders"))

    @pytest.mark.parametrize("seconds", [WAIT, None])
    def test_a_waiter_gets_the_error_of_a_closed_ledger(
        self, ledger: Ledger, verbs: Verbs, seconds: float | None
    ) -> None:
        with App(ledger=ledger) as app:

            def wait() -> object:
                with pytest.raises(LedgerClosed) as caught:
                    verbs.get(app.queue("orders"), wait=seconds)
                return caught.value

            result = in_thread(wait)
            until(lambda: app.engine.dispatcher.waiting)
            ledger.close()
            assert isinstance(result(), LedgerClosed)


class TestNothingIsLost:
    def test_a_task_canceled_while_its_claim_is_on_the_way(self, engine: BareEngine) -> None:
        gate = Gated(engine.ledger)
        with BareEngine(gate) as other:
            queue = Queue(other, "orders")
            id = queue.put("x")

            async def main() -> None:
                gate.hold()
                task = asyncio.create_task(queue.aget())
                assert await asyncio.to_thread(gate.inside.wait, WAIT)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                gate.let_go()

            asyncio.run(main())
            until(lambda: job(gate, id).fence == 1 and job(gate, id).state is State.READY)
            assert job(gate, id).attempts == 0, "as if it had never been claimed"

    def test_a_task_canceled_after_its_message_was_delivered(self, queue: Queue, engine: BareEngine) -> None:
        async def main() -> str:
            task = asyncio.create_task(queue.aget(wait=WAIT))
            await auntil(lambda: engine.dispatcher.waiting)
            # Put without giving the loop a chance: the claim is delivered, the task has not run yet.
            id = queue.put("x")
            until(lambda: job(engine.ledger, id).state is State.RUNNING)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return id

        id = asyncio.run(main())
        settled(engine.ledger, id, State.READY)
        assert job(engine.ledger, id).attempts == 0
        assert engine.dispatcher.waiting == 0

    def test_a_timeout_around_it(self, queue: Queue, engine: BareEngine) -> None:
        async def main() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await queue.aget(wait=WAIT)

        asyncio.run(main())
        assert engine.dispatcher.waiting == 0
        id = queue.put("x")
        assert taken(queue).id == id

    def test_many_callers_that_are_interrupted_at_random(self, queue: Queue, engine: BareEngine) -> None:
        total = 60

        async def main() -> list[str]:
            got: list[str] = []

            async def one(n: int) -> None:
                while len(got) < total:
                    with contextlib.suppress(TimeoutError):
                        # Some are shorter than a commit, some are not.
                        async with asyncio.timeout(0.002 * 2.5**n):
                            message = await queue.aget(wait=1)
                        if message is not None:
                            await message.aack()
                            got.append(message.id)

            feeder = asyncio.create_task(asyncio.to_thread(lambda: [queue.put(n) for n in range(total)]))
            async with asyncio.timeout(WAIT):
                await asyncio.gather(*(one(n) for n in range(8)))
            assert sorted(got) == sorted(await feeder)
            return got

        got = asyncio.run(main())
        assert len(set(got)) == total
        assert engine.ledger.queues()["orders"].counts.done == total
        assert {job(engine.ledger, id).losses for id in got} == {0}
        assert engine.ledger.check() == []

    def test_timeouts_shorter_than_a_commit_get_nowhere_but_lose_nothing(
        self, queue: Queue, engine: BareEngine
    ) -> None:
        """A caller with a shorter wait than a commit gets no message; afterwards all messages are
        unchanged."""
        ids = queue.put_many(range(20))

        async def one(n: int) -> list[str]:
            got = []
            for _ in range(100):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.0002 * (1 + n)):
                        message = await queue.aget(wait=1)
                    if message is not None:
                        await message.aack()
                        got.append(message.id)
            return got

        async def main() -> list[str]:
            return [id for got in await asyncio.gather(*(one(n) for n in range(8))) for id in got]

        got = asyncio.run(main())
        until(lambda: engine.ledger.queues()["orders"].counts.running == 0)
        left = queue.get_many(100)
        assert sorted([*got, *(message.id for message in left)]) == sorted(ids)
        assert {(message.attempt, message.job.losses) for message in left} <= {(1, 0)}
        assert engine.ledger.check() == []

    def test_an_interrupt_of_a_thread_that_waits(self, queue: Queue, engine: BareEngine) -> None:
        class Interrupt(BaseException):
            pass

        steps = queue._fetch(1, WAIT, terms_of(30.0, 3600.0))
        nap = next(steps)
        answered = threading.Event()
        id = queue.put("x")
        nap.start(answered.set)
        assert answered.wait(WAIT)
        with pytest.raises(Interrupt):
            steps.throw(Interrupt())
        settled(engine.ledger, id, State.READY)
        assert job(engine.ledger, id).attempts == 0


def test_both_forms_have_the_same_signature() -> None:
    for cls in (Queue, Message, Document):
        methods = dict(inspect.getmembers(cls, inspect.isfunction))
        pairs = [(name, f"a{name}") for name in methods if not name.startswith("_") and f"a{name}" in methods]
        assert len(pairs) >= 2
        for plain, other in pairs:
            assert inspect.signature(methods[plain]) == inspect.signature(methods[other])
            assert inspect.iscoroutinefunction(methods[other])


def test_a_message_by_the_clock_of_the_ledger(clock: ManualClock) -> None:
    ledger = open_ledger("memory://", clock)
    with BareEngine(ledger, clock) as engine:
        queue = Queue(engine, "orders")
        queue.put("later", delay=60)
        assert queue.get() is None
        clock.advance(60)
        assert taken(queue).text() == "later"
        engine.committer.call(Append((Spec(id="task", queue="orders", kind="a.task", payload=b"{}"),)))
        assert taken(queue).job.kind == "a.task"
    ledger.close()
