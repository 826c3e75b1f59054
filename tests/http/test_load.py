"""Thousands of connections at once: every message is delivered once, and afterwards the server holds no more
than before."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients import Client, ServerProcess, served
from tests.support.waiting import until
from tests.support.wire import Wire
from towpath import App
from towpath.http.server import allow_files

IDLE, PRODUCERS, CONSUMERS = 1_000, 500, 500
EACH = 1
"""Messages of each producer."""
CONNECTING = 200
"""Connections that are opened at the same time."""
HOLD = 600
"""Seconds of a lease: none ends during a test."""


async def clients(address: str, count: int) -> list[Client]:
    found: list[Client] = []
    while len(found) < count:
        found += await asyncio.gather(*[Client.connect(address) for _ in range(CONNECTING)])
    return found


async def crowd(address: str) -> Counter[bytes]:
    """Producers, consumers and waiting subscribers at the same time. Returns how often each payload was
    delivered; every answer is checked."""
    connected = await clients(address, IDLE + PRODUCERS + CONSUMERS)
    for number, client in enumerate(connected[:IDLE]):
        client.send("subscribe", json.dumps({"queue": f"idle-{number % 100}", "owner": "me"}).encode())
    got: Counter[bytes] = Counter()
    complete = asyncio.Event()

    async def produce(number: int, client: Client) -> None:
        for each in range(EACH):
            answer = await client.enqueue("work", b"%d-%d" % (number, each))
            assert answer.status == 200, answer

    async def consume(client: Client) -> None:
        while True:
            answer = await client.dequeue("work", visibility_timeout_seconds=HOLD)
            assert answer.status == 200, answer
            for message, payload in answer.messages():
                got[payload] += 1
                answer = await client.ack(message)
                assert answer.status == 200, answer
            if got.total() >= PRODUCERS * EACH:
                complete.set()

    consumers = [asyncio.ensure_future(consume(client)) for client in connected[IDLE : IDLE + CONSUMERS]]
    await asyncio.gather(*[produce(*each) for each in enumerate(connected[IDLE + CONSUMERS :])])
    ended = asyncio.ensure_future(complete.wait())
    await asyncio.wait([ended, *consumers], return_when=asyncio.FIRST_COMPLETED, timeout=60)
    assert ended.done(), [each for each in consumers if each.done()]
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    for client in connected:
        client.close()
    return got


def rests(server: ServerProcess, files: int) -> None:
    """Wait until the server has no connection and no consumer."""
    until(lambda: server.files() <= files, explain=lambda: (files, server.files()))

    def consumers() -> int:
        with Wire(server.address) as wire:
            wire.request("/v1/queue/stats", b'{"queue":"work"}')
            found: int = wire.answer().json["total_consumers"]
            return found

    until(lambda: consumers() == 0)


@pytest.fixture
def usual_file_limit() -> Iterator[None]:
    """A limit of 1024 open files, which a server raises by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_thousand_connections(tmp_path: Path, usual_file_limit: None) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with served(tmp_path, url, "--queue-max-consumers", "2000", "--drain-grace", "0s") as server:
        with Wire(server.address) as wire:
            wire.request("/healthz")
            assert wire.answer().status == 200
        files = server.files()
        allow_files(4_096)
        resident = []
        for _ in range(2):
            got = asyncio.run(crowd(server.address))
            assert set(got.values()) == {1}
            assert len(got) == PRODUCERS * EACH
            rests(server, files)
            resident.append(server.resident())
        # The second crowd needs no memory beyond that of the first.
        assert resident[1] <= 1.1 * resident[0], resident
        assert server.watched.end() == 0
    with App(url) as app:
        counts = app.queue("work").stats().counts
        assert (counts.ready, counts.running, counts.done) == (0, 0, 2 * PRODUCERS * EACH)
        assert app.ledger.check() == []


def test_more_connections_than_files(tmp_path: Path) -> None:
    """The server goes on when the system refuses it further connections, and serves again when clients
    leave."""
    with served(tmp_path, "memory://", "--drain-grace", "0s") as server:
        with Wire(server.address) as wire:
            wire.request("/healthz")
            assert wire.answer().status == 200
        before = server.files()
        limit = before + 20
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        wires = [Wire(server.address) for _ in range(60)]
        until(lambda: server.files() >= limit - 1, explain=server.files)
        for wire in wires:
            wire.socket.close()
        until(lambda: server.files() <= before + 1, explain=server.files)
        with Wire(server.address) as wire:
            wire.request("/healthz")
            assert wire.answer().status == 200
        assert server.watched.end() == 0
