"""Subscriptions that last: every message arrives at once and is delivered once, and the server does not grow.
Some seconds here; `make soak-server SECONDS=7200` runs for hours."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import Counter
from pathlib import Path

from tests.support.clients import Client, ServerProcess, served
from tests.support.waiting import auntil
from towpath import App

SECONDS = float(os.environ.get("TOWPATH_SOAK_SECONDS", "3"))
SUBSCRIBERS, PRODUCERS = 20, 4
PAUSE = 0.02
"""Seconds between two messages of a producer."""
AT_ONCE = 1.0
"""Seconds within which half of the messages arrive, on a machine that is busy with other tests too."""


async def soak(server: ServerProcess) -> list[int]:
    """Run the subscriptions; return the resident memory of the server in the first and the last quarter."""
    got: Counter[bytes] = Counter()
    delays: list[float] = []
    sent = 0
    resident: list[int] = []

    async def subscribe(number: int) -> None:
        stream, acks = await Client.connect(server.address), await Client.connect(server.address)
        try:
            async for message, payload in stream.stream("work", page_size=1 + number % 8):
                got[payload] += 1
                delays.append(time.monotonic() - float(payload.split(b" ")[1]))
                answer = await acks.ack(message)
                assert answer.status == 200, answer
        finally:
            stream.close()
            acks.close()

    async def produce(number: int, end: float) -> None:
        nonlocal sent
        client = await Client.connect(server.address)
        while time.monotonic() < end:
            payload = f"{number}.{sent} {time.monotonic()}"
            answer = await client.enqueue("work", payload.encode())
            assert answer.status == 200, answer
            sent += 1
            await asyncio.sleep(PAUSE)
        client.close()

    async def measure() -> None:
        for share in (0.25, 0.75):
            await asyncio.sleep(share * SECONDS)
            resident.append(server.resident())

    subscribers = [asyncio.create_task(subscribe(number)) for number in range(SUBSCRIBERS)]
    end = time.monotonic() + SECONDS
    await asyncio.gather(measure(), *[produce(number, end) for number in range(PRODUCERS)])
    await auntil(lambda: got.total() >= sent, explain=lambda: (sent, got.total(), subscribers))
    assert not any(each.done() for each in subscribers)
    assert set(got.values()) == {1}
    assert statistics.median(delays) < AT_ONCE, statistics.quantiles(delays, n=10)
    for each in subscribers:
        each.cancel()
    await asyncio.gather(*subscribers, return_exceptions=True)
    return resident


def test_subscriptions_keep_delivering(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with served(tmp_path, url, "--drain-grace", "0s") as server:
        first, last = asyncio.run(soak(server))
        assert last <= 1.25 * first, (first, last)
        assert server.watched.end() == 0
    with App(url) as app:
        assert app.queue("work").stats().counts.ready == 0
        assert app.ledger.check() == []
