"""Servers that are killed or frozen under load. An acknowledged message is gone, every other one is still
there, and no client gets a message twice while its lease lasts."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import BROKEN, Client, ServerProcess, served
from tests.support.waiting import auntil, until
from tests.support.wire import Wire, receipt
from towpath import App
from towpath.core.job import Job
from towpath.core.views import Query

HOLD = 600
"""Seconds of a lease: none ends during a test."""
PRODUCERS = CONSUMERS = 8
AT_LEAST = 100
"""Messages that are acknowledged before a server is killed, and again after it."""

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


class Traffic:
    """Producers and consumers on several servers. A client whose connection breaks goes on at another server.
    An enqueue is never repeated; an ack is repeated until it is answered."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.stored: set[bytes] = set()
        """Payloads of answered enqueues."""
        self.unanswered: set[bytes] = set()
        """Payloads of enqueues whose connection broke: stored or not."""
        self.delivered: Counter[bytes] = Counter()
        self.acked: set[bytes] = set()
        self.lost_answers = 0
        """Dequeues whose connection broke: a message may be leased to them."""
        self._numbers = itertools.count()
        self._stopping = False

    async def run(self, during: Any) -> None:
        """Traffic until `during`, a coroutine, has ended, and each client has ended its last call."""
        work = [asyncio.create_task(self._produce()) for _ in range(PRODUCERS)]
        work += [asyncio.create_task(self._consume()) for _ in range(CONSUMERS)]
        try:
            await during
        finally:
            self._stopping = True
        await asyncio.gather(*work)

    async def more(self, count: int) -> None:
        """Wait until so many further messages are acknowledged."""
        target = len(self.acked) + count
        await auntil(lambda: len(self.acked) >= target, explain=lambda: (target, len(self.acked)))

    async def _connect(self, broken: Client | None = None) -> Client:
        if broken is not None:
            broken.close()
        while True:
            try:
                return await Client.connect(random.choice(self.addresses))
            except ConnectionError:
                await asyncio.sleep(0.01)

    async def _produce(self) -> None:
        client = await self._connect()
        while not self._stopping:
            payload = b"%d" % next(self._numbers)
            try:
                answer = await client.enqueue("work", payload)
            except BROKEN:
                self.unanswered.add(payload)
                client = await self._connect(client)
                continue
            assert answer.status == 200, answer
            self.stored.add(payload)
        client.close()

    async def _consume(self) -> None:
        client = await self._connect()
        while not self._stopping:
            try:
                answer = await client.dequeue("work", visibility_timeout_seconds=HOLD, wait_seconds=1)
            except BROKEN:
                self.lost_answers += 1
                client = await self._connect(client)
                continue
            if answer.status == 409:
                continue
            [(message, payload)] = answer.messages()
            self.delivered[payload] += 1
            client = await self._ack(client, message)
            self.acked.add(payload)
        client.close()

    async def _ack(self, client: Client, message: dict[str, Any]) -> Client:
        again = False
        while True:
            try:
                answer = await client.ack(message)
            except BROKEN:
                again, client = True, await self._connect(client)
                continue
            # The ack whose answer was lost may have been stored: then the message is gone.
            assert answer.status == 200 or (again and answer.status == 404), answer
            return client

    def check(self, url: str) -> None:
        """Compare the answers that the clients got with the ledger."""
        assert set(self.delivered.values()) == {1}
        with App(url) as app:
            jobs = all_jobs(app)
            assert app.ledger.check() == []
        assert len({job.payload for job in jobs}) == len(jobs)
        by_state: dict[str, set[bytes]] = {"ready": set(), "running": set(), "done": set()}
        for job in jobs:
            by_state[job.state.value].add(job.payload)
        found = {job.payload for job in jobs}
        assert self.stored <= found
        assert found <= self.stored | self.unanswered
        assert by_state["done"] == self.acked
        assert len(by_state["running"]) <= self.lost_answers


def all_jobs(app: App) -> list[Job]:
    found: list[Job] = []
    page = app.ledger.find(Query(queue="work", limit=1000))
    while True:
        found += page.jobs
        if page.next is None:
            return found
        page = app.ledger.find(Query(queue="work", limit=1000, page=page.next))


def kill(server: ServerProcess) -> None:
    server.watched.process.kill()
    server.watched.process.wait()


def test_a_server_that_is_killed_and_started_again(url: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(served(tmp_path, url))
        traffic = Traffic([server.address])

        async def kill_and_start() -> None:
            await traffic.more(AT_LEAST)
            kill(server)
            again = stack.enter_context(served(tmp_path, url))
            traffic.addresses[:] = [await asyncio.to_thread(lambda: again.address)]
            await traffic.more(AT_LEAST)

        asyncio.run(traffic.run(kill_and_start()))
        assert traffic.lost_answers or traffic.unanswered
    traffic.check(url)


def test_three_servers_of_which_one_is_killed(url: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(served(tmp_path, url)) for _ in range(3)]
        traffic = Traffic([server.address for server in servers])

        async def one_kill() -> None:
            await traffic.more(AT_LEAST)
            del traffic.addresses[0]
            kill(servers[0])
            await traffic.more(AT_LEAST)

        asyncio.run(traffic.run(one_kill()))
        assert traffic.lost_answers or traffic.unanswered
    traffic.check(url)


def test_a_server_that_is_frozen_for_longer_than_a_lease(url: str, tmp_path: Path) -> None:
    """The message goes to a client of the other server, and the receipt of the first is refused."""
    # The server that runs first is the caretaker of both: it takes back messages whose leases have ended.
    with served(tmp_path, url) as other, Wire(other.address) as wire, served(tmp_path, url) as frozen:
        with Wire(frozen.address) as late, Wire(frozen.address) as waiting:
            with App(url) as app:
                app.queue("work").put(b"x")
                late.request("/v1/queue/dequeue", _demand("work", 1))
                [(first, _)] = late.answer().messages()
                waiting.request("/v1/queue/dequeue", _demand("later", 60))
                until(lambda: _stats(frozen.address, "later")["waiting_consumers"] == 1)
                os.kill(frozen.pid, signal.SIGSTOP)
                try:
                    wire.request("/v1/queue/dequeue", _demand("work", 60))
                    [(second, payload)] = wire.answer().messages()
                    assert (payload, second["attempts"]) == (b"x", 2)
                finally:
                    os.kill(frozen.pid, signal.SIGCONT)
                late.request("/v1/queue/ack", _json(receipt(first)))
                assert late.answer().error == "queue_message_lease_mismatch"
                wire.request("/v1/queue/ack", _json(receipt(second)))
                assert wire.answer().status == 200
                app.queue("later").put(b"y")
                assert waiting.answer().messages()[0][1] == b"y"
                assert app.ledger.check() == []


def _demand(queue: str, lease: int) -> bytes:
    return _json({"queue": queue, "owner": "me", "visibility_timeout_seconds": lease})


def _stats(address: str, queue: str) -> Any:
    with Wire(address) as wire:
        wire.request("/v1/queue/stats", _json({"queue": queue}))
        return wire.answer().json


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
