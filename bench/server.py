"""Speed of the HTTP server, as ratios to a bare route on the same stack in the same run.

    python bench/server.py [--quick] [--dir DIR]

The echo is a litestar route that returns a body of 256 bytes, on the same uvicorn, httptools, uvloop and
protocol class. Every server has a process of its own; the client is this process: an event loop that writes
prepared bytes and searches answers instead of parsing them. Client and server share the cores: with two cores
each has one, and the committer of a server shares the interpreter of its process. All sides run alternately
in every round; a ratio is the median over the rounds. The last line is JSON. TARGETS has the target of each
ratio, LIMITS the limit of each other number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop
from connections import PATIENCE, ServerProcess, checked, connect, request
from measure import Alternating, Report
from servers import MAX_CONSUMERS

TARGETS = {
    "enqueue": 0.5,
    "dequeue_ack": 0.2,
    "subscribe": 1.0,
    "remote_jobs": 2.0,
    "enqueue_durable": 0.5,
}
LIMITS = {"idle_1000": 2.0, "pickup_ms": 5.0}
BODY = b"x" * 256
CLIENTS, DURABLE_CLIENTS, SUBSCRIBERS = 8, 64, 1_000
PAGE = 64
"""Messages of one acknowledgement, and of one claim of the subscription."""
SETTLE_SECONDS = 1.0
"""Rest before the CPU of idle subscribers is measured."""
_RECEIPT = re.compile(
    rb'"message_id":"([^"]+)".*?"lease_id":"([^"]+)".*?"fencing_token":(\d+).*?"txn_id":"([^"]+)"', re.DOTALL
)

ECHO = request("/echo", BODY, "text/plain")
ENQUEUE = request(
    "/v1/queue/enqueue",
    b'--B\r\nContent-Disposition: form-data; name="meta"\r\nContent-Type: application/json\r\n\r\n'
    b'{"queue":"messages"}\r\n--B\r\nContent-Disposition: form-data; name="payload"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n%b\r\n--B--\r\n" % BODY,
    "multipart/related; boundary=B",
)
DEQUEUE = request("/v1/queue/dequeue", b'{"queue":"messages","owner":"me","wait_seconds":-1}')
LONG_POLL = request("/v1/queue/dequeue", b'{"queue":"messages","owner":"me"}')
SUBSCRIBE = request("/v1/queue/subscribe", b'{"queue":"messages","owner":"me","page_size":%d}' % PAGE)


class Sizes:
    """Operations per run, and rounds."""

    def __init__(self, quick: bool) -> None:
        self.rounds = 7 if quick else 15
        self.budget = 28.0 if quick else 300.0
        self.durable_budget = 8.0 if quick else 100.0
        self.requests = 2_000 if quick else 10_000
        self.samples = 150 if quick else 1_000
        self.idle = 4.0 if quick else 20.0


def run(work: Coroutine[Any, Any, float]) -> float:
    async def bounded() -> float:
        async with asyncio.timeout(PATIENCE):
            return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bounded())


async def repeated(port: int, clients: int, count: int, data: bytes) -> float:
    """Requests per second of the same request, from so many connections."""
    left = count

    def answered(head: bytes, body: bytes) -> bytes | None:
        nonlocal left
        checked(head, body)
        left -= 1
        return data if left >= clients else None

    connections = [await connect(port, answered) for _ in range(clients)]
    started = time.perf_counter()
    for connection in connections:
        connection.send(data)
    await asyncio.gather(*[connection.ended for connection in connections])
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return count / seconds


def receipt(found: tuple[bytes, ...]) -> bytes:
    message, lease, fence, txn = found
    return b'{"queue":"messages","message_id":"%b","lease_id":"%b","txn_id":"%b","fencing_token":%b}' % (
        message,
        lease,
        txn,
        fence,
    )


async def dequeue_and_ack(port: int, count: int) -> float:
    """Messages per second, each with a dequeue and an ack, from `CLIENTS` connections. The queue is filled
    before."""
    await repeated(port, CLIENTS, count, ENQUEUE)
    left = count

    def answered(head: bytes, body: bytes) -> bytes | None:
        nonlocal left
        checked(head, body)
        if (found := _RECEIPT.search(body)) is not None:
            return request("/v1/queue/ack", receipt(found.groups()))
        left -= 1
        return DEQUEUE if left >= CLIENTS else None

    connections = [await connect(port, answered) for _ in range(CLIENTS)]
    started = time.perf_counter()
    for connection in connections:
        connection.send(DEQUEUE)
    await asyncio.gather(*[connection.ended for connection in connections])
    seconds = time.perf_counter() - started
    for connection in connections:
        connection.close()
    return count / seconds


async def subscribe(port: int, count: int) -> float:
    """Messages per second that one subscription delivers, with acks of up to `PAGE` messages on a second
    connection. The queue is filled before."""
    await repeated(port, CLIENTS, count, ENQUEUE)
    waiting: list[bytes] = []
    sent: list[bytes] = []
    acked, tail, is_idle = 0, b"", True
    done = asyncio.get_running_loop().create_future()

    def next_ack() -> bytes | None:
        nonlocal is_idle, sent
        sent = waiting[:PAGE]
        del waiting[:PAGE]
        is_idle = not sent
        return request("/v1/queue/ackMany", b'{"receipts":[%b]}' % b",".join(sent)) if sent else None

    def was_acked(head: bytes, body: bytes) -> bytes | None:
        nonlocal acked
        checked(head, body)
        acked += len(sent)
        if acked >= count:
            done.set_result(None)
            return None
        return next_ack() or b""

    def received(_: bytes, piece: bytes) -> None:
        nonlocal tail
        data, end = tail + piece, 0
        for found in _RECEIPT.finditer(data):
            waiting.append(receipt(found.groups()))
            end = found.end()
        tail = data[max(end, len(data) - 2_000) :]
        if is_idle and waiting and (ack := next_ack()) is not None:
            acks.send(ack)

    acks, stream = await connect(port, was_acked), await connect(port, received, stream=True)
    started = time.perf_counter()
    stream.send(SUBSCRIBE)
    await asyncio.wait([done, acks.ended], return_when=asyncio.FIRST_COMPLETED)
    seconds = time.perf_counter() - started
    if acks.ended.done():
        await acks.ended
    for connection in (acks, stream):
        connection.close()
    return count / seconds


def has_route(port: int, path: str) -> bool:
    """Whether the server has this route: an empty JSON object is not answered with 404."""
    status = b""

    async def ask() -> float:
        def answered(head: bytes, body: bytes) -> bytes | None:
            nonlocal status
            status = head[9:12]
            return None

        connection = await connect(port, answered)
        connection.send(request(path, b"{}"))
        await connection.ended
        connection.close()
        return 0.0

    run(ask())
    return status != b"404"


async def pick_up(port: int, samples: int) -> float:
    """Median milliseconds from the enqueue to the answer of a long poll that waits."""
    taken: list[float] = []
    arrived = asyncio.Event()

    def received(head: bytes, body: bytes) -> bytes | None:
        checked(head, body)
        taken.append(time.perf_counter())
        found = _RECEIPT.search(body)
        assert found is not None
        arrived.set()
        acks.send(request("/v1/queue/ack", receipt(found.groups())))
        return b""

    def answered(head: bytes, body: bytes) -> bytes | None:
        checked(head, body)
        return b""

    polls, producer, acks = [await connect(port, each) for each in (received, answered, answered)]
    delays = []
    for _ in range(samples):
        polls.send(LONG_POLL)
        await asyncio.sleep(0.01)
        arrived.clear()
        before = time.perf_counter()
        producer.send(ENQUEUE)
        await arrived.wait()
        delays.append((taken[-1] - before) * 1e3)
    for connection in (polls, producer, acks):
        connection.close()
    return statistics.median(delays)


async def idle(server: ServerProcess, seconds: float) -> float:
    """Percent of a CPU that waiting subscribers cost."""

    def received(head: bytes, piece: bytes) -> None:
        raise RuntimeError(f"unexpected answer: {piece!r}")

    connections = [await connect(server.port, received, stream=True) for _ in range(SUBSCRIBERS)]
    for number, connection in enumerate(connections):
        body = b'{"queue":"idle-%d","owner":"me"}' % (number % 100)
        connection.send(request("/v1/queue/subscribe", body))
    await asyncio.sleep(SETTLE_SECONDS)
    before = server.cpu()
    await asyncio.sleep(seconds)
    used = server.cpu() - before
    for connection in connections:
        connection.close()
    return 100 * used / seconds


def bench_calls(report: Report, sizes: Sizes, echo: ServerProcess) -> None:
    count = sizes.requests
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess("serve", "memory://"))
        port = server.port
        runs: dict[str, Callable[[], float]] = {
            "echo": lambda: run(repeated(echo.port, CLIENTS, count, ECHO)),
            "enqueue": lambda: run(repeated(port, CLIENTS, count, ENQUEUE)),
            "dequeue_ack": lambda: run(dequeue_and_ack(port, count // 2)),
        }
        if has_route(port, "/v1/queue/ackMany"):
            runs["subscribe"] = lambda: run(subscribe(port, count))
        if has_route(port, "/v1/ledger/apply"):
            worker = stack.enter_context(ServerProcess("work", server.url))
            runs["remote_jobs"] = lambda: worker.ask(2 * count)
        found = Alternating(sizes.rounds, runs, sizes.budget)
    for name in ("enqueue", "dequeue_ack", "subscribe", "remote_jobs"):
        if name in runs:
            report.ratio(name, found[name], found["echo"])
        else:
            print(f"{name:20} not there: the server does not have this call")


def bench_durable(report: Report, sizes: Sizes, folder: Path) -> None:
    url = f"sqlite:///{folder / 'work.db'}"
    with ServerProcess("serve", url) as durable, ServerProcess("serve", "memory://") as memory:
        found = Alternating(
            sizes.rounds,
            {
                "durable": lambda: run(repeated(durable.port, DURABLE_CLIENTS, sizes.requests, ENQUEUE)),
                "memory": lambda: run(repeated(memory.port, DURABLE_CLIENTS, sizes.requests, ENQUEUE)),
            },
            sizes.durable_budget,
        )
    report.ratio("enqueue_durable", found["durable"], found["memory"])


def bench_waits(report: Report, sizes: Sizes) -> dict[str, float]:
    with ServerProcess("serve", "memory://") as server:
        found = {
            "pickup_ms": run(pick_up(server.port, sizes.samples)),
            "idle_1000": run(idle(server, sizes.idle)),
        }
    report.limit("pickup_ms", found["pickup_ms"], LIMITS["pickup_ms"], "ms, p50")
    report.limit("idle_1000", found["idle_1000"], LIMITS["idle_1000"], "% CPU")
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds; ends within 60 s")
    parser.add_argument("--dir", type=Path, help="where to put the files (default: a temporary directory)")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * MAX_CONSUMERS), hard))
    sizes, report = Sizes(options.quick), Report(TARGETS)
    with tempfile.TemporaryDirectory(dir=options.dir) as name, ServerProcess("echo") as echo:
        bench_calls(report, sizes, echo)
        bench_durable(report, sizes, Path(name))
        other = bench_waits(report, sizes)
    print(json.dumps({"ratios": report.ratios, **other}))


if __name__ == "__main__":
    main()
