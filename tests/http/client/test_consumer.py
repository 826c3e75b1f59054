"""Consumers: handlers that return, fail, crash and take long, leases that are lost, servers that die."""

from __future__ import annotations

import asyncio
import collections
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import command
from tests.support.shell import Shell
from tests.support.surfaces import answer, scripted
from tests.support.waiting import WAIT, until
from tests.support.wire import Remote, lose_leases, serving
from towpath import App, Exponential
from towpath.core.views import Query
from towpath.errors import CallFailed, NotAllowed
from towpath.http.client import AsyncQueueClient, QueueClient
from towpath.testing import ManualClock

QUICK = Exponential(base=0.05, cap=0.2)
Start = Callable[..., Any]


class Running:
    """A consumer in a thread."""

    def __init__(self, consumer: Any, run: Callable[[], object]) -> None:
        self.stop = consumer.stop
        self._errors: list[BaseException] = []

        def work() -> None:
            try:
                run()
            except BaseException as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def ended(self) -> BaseException | None:
        """Wait for the end of the consumer; its error."""
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        return self._errors[0] if self._errors else None


@pytest.fixture(params=["sync", "async"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a consumer with a handler that blocks; for the async one it runs in a thread."""
    made: list[Running] = []

    def begin(address: str, queue: str, handler: Callable[[Any], object], **options: Any) -> Running:
        options = {"restart": QUICK, "nack_delay": 0, **options}
        if request.param == "sync":
            consumer = QueueClient(address).consumer(queue, handler, **options)
            made.append(Running(consumer, consumer.run))
        else:

            async def call(message: Any) -> None:
                await asyncio.to_thread(handler, message)

            other = AsyncQueueClient(address).consumer(queue, call, **options)
            made.append(Running(other, lambda: asyncio.run(other.run())))
        return made[-1]

    yield begin
    for each in made:
        each.stop()
        each.ended()


def counts(remote: Remote, queue: str) -> Any:
    return remote.app.queue(queue).stats().counts


@pytest.mark.parametrize("stateful", [False, True])
def test_every_message_is_handled_once(start: Start, remote: Remote, queue: str, stateful: bool) -> None:
    ids = {remote.enqueue(queue, b"%d" % n)["message_id"] for n in range(100)}
    seen: list[str] = []
    running = start(
        remote.address, queue, lambda m: seen.append(m.id), concurrency=4, prefetch=8, stateful=stateful
    )
    until(lambda: counts(remote, queue).done == 100)
    running.stop()
    assert running.ended() is None
    assert sorted(seen) == sorted(ids)


def test_a_large_payload_is_stored_in_a_file(start: Start, local: Remote, queue: str) -> None:
    data = bytes(range(256)) * 40_000
    with QueueClient(local.address) as client:
        client.enqueue(queue, data)
    sizes: list[int] = []

    def handler(message: Any) -> None:
        assert message._delivery._spool._rolled
        sizes.append(message.size)

    start(local.address, queue, handler)
    # The ack deletes a message with a large payload.
    until(lambda: sizes and not (counts(local, queue).running or counts(local, queue).waiting))
    assert sizes == [len(data)]


def test_a_bad_message_does_not_stop_the_others(start: Start, local: Remote, queue: str) -> None:
    for n in range(20):
        local.enqueue(queue, b"%d" % n, max_attempts=2)

    def handler(message: Any) -> None:
        if message.view.payload_bytes == 1:
            raise SystemExit(3) if message.attempts == 1 else ValueError("bad\x1b")

    start(local.address, queue, handler, concurrency=3)
    until(lambda: counts(local, queue).done == 10 and counts(local, queue).failed == 10)


def test_the_reason_of_a_failure_is_stored(start: Start, local: Remote, queue: str) -> None:
    id = local.enqueue(queue, b"1", max_attempts=1)["message_id"]

    def handler(message: Any) -> None:
        raise ValueError("no stock")

    start(local.address, queue, handler)
    until(lambda: counts(local, queue).failed == 1)
    job = local.app.ledger.get(id)
    assert job is not None
    assert "ValueError: no stock" in (job.error or "")


def test_a_handler_may_settle_by_itself(start: Start, local: Remote, queue: str) -> None:
    for n in range(2):
        local.enqueue(queue, b"%d" % n, max_attempts=1)
    seen: list[int] = []

    with QueueClient(local.address) as client:

        def handler(message: Any) -> None:
            # A call on the event loop of the consumer, from its handler's thread.
            client.extend(message.receipt, 60)
            seen.append(message.attempts)

        start(local.address, queue, handler)
        until(lambda: counts(local, queue).done == 2)
    assert seen == [1, 1]


def test_a_settled_message_is_left_alone(local: Remote, queue: str) -> None:
    local.enqueue(queue, b"1")
    local.enqueue(queue, b"2")

    def handler(message: Any) -> None:
        if message.read() == b"1":
            message.nack(delay=600, defer=True)
        else:
            message.ack()

    with QueueClient(local.address) as client:
        consumer = client.consumer(queue, handler)
        running = Running(consumer, consumer.run)
        until(lambda: counts(local, queue).done == 1 and counts(local, queue).scheduled == 1)
        running.stop()
        assert running.ended() is None


def test_a_handler_may_go_on_after_its_ack(local: Remote, queue: str) -> None:
    """The lease of a settled message is not extended, and that is no loss."""
    local.enqueue(queue, b"1")
    other = local.enqueue(queue, b"2")["message_id"]
    lost: list[bool] = []

    def handler(message: Any) -> None:
        if message.id == other:
            return
        message.ack()
        before = local.app.ledger.get(other)
        # The message beside it is extended at the same times.
        until(lambda: _lease(local, other) != (before and before.lease_until))
        lost.append(message.lost)

    with QueueClient(local.address) as client:
        consumer = client.consumer(queue, handler, visibility=1, prefetch=1)
        running = Running(consumer, consumer.run)
        until(lambda: counts(local, queue).done == 2)
        running.stop()
        assert running.ended() is None
    assert lost == [False]


def _lease(remote: Remote, id: str) -> int | None:
    job = remote.app.ledger.get(id)
    return None if job is None else job.lease_until


def test_a_long_handler_keeps_its_lease(start: Start, local: Remote, queue: str) -> None:
    local.enqueue(queue, b"1", max_attempts=1)
    local.enqueue(queue, b"2", max_attempts=1)
    renewed = threading.Event()
    expiries: set[int] = set()

    def handler(message: Any) -> None:
        assert renewed.wait(WAIT)

    start(local.address, queue, handler, visibility=1, prefetch=1)

    def leases() -> bool:
        found = [job.lease_until for job in local.app.ledger.get_many(ids).values()]
        expiries.update(until for until in found if until is not None)
        return len(expiries) >= 6

    ids = [job.id for job in local.app.ledger.find(Query(queue=queue, limit=10)).jobs]
    # The running message and the one that waits in the client were both extended, several times.
    until(leases)
    renewed.set()
    until(lambda: counts(local, queue).done == 2)


def test_a_lost_lease_cancels_an_async_handler(timed: Remote, clock: ManualClock) -> None:
    timed.enqueue("a", b"1")
    begun, ended = threading.Event(), threading.Event()

    async def handler(message: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(WAIT)
        finally:
            assert message.lost
            ended.set()

    consumer = AsyncQueueClient(timed.address).consumer("a", handler, visibility=2, prefetch=0)
    running = Running(consumer, lambda: asyncio.run(consumer.run()))
    assert begun.wait(WAIT)
    timed.app.queue("a").pause()
    lose_leases(timed, clock, 30)
    assert ended.wait(WAIT)
    running.stop()
    assert running.ended() is None


def test_a_lost_lease_flags_a_thread(timed: Remote, clock: ManualClock) -> None:
    timed.enqueue("a", b"1", max_attempts=9)
    begun = threading.Event()
    lost: list[bool] = []

    def handler(message: Any) -> None:
        begun.set()
        lost.append(until(lambda: message.lost))

    with QueueClient(timed.address) as client:
        consumer = client.consumer("a", handler, visibility=2, prefetch=0)
        running = Running(consumer, consumer.run)
        assert begun.wait(WAIT)
        timed.app.queue("a").pause()
        lose_leases(timed, clock, 30)
        until(lambda: lost)
        running.stop()
        assert running.ended() is None
    assert counts(timed, "a").done == 0


def test_a_stop_finishes_what_runs_and_returns_the_rest(start: Start, local: Remote, queue: str) -> None:
    for n in range(10):
        local.enqueue(queue, b"%d" % n)
    begun, goes_on = threading.Event(), threading.Event()

    def handler(message: Any) -> None:
        begun.set()
        assert goes_on.wait(WAIT)

    running = start(local.address, queue, handler, concurrency=1, prefetch=5)
    assert begun.wait(WAIT)
    until(lambda: counts(local, queue).running == 6)
    running.stop()
    # The five messages that were held ahead come back while the handler still runs.
    until(lambda: counts(local, queue).running == 1 and counts(local, queue).ready == 9)
    goes_on.set()
    assert running.ended() is None
    found = counts(local, queue)
    assert (found.done, found.ready, found.running) == (1, 9, 0)
    [message] = local.dequeue(queue).messages()
    assert message[0].get("failure_attempts", 0) == 0


def test_a_stop_ends_a_wait_at_once(start: Start, local: Remote, queue: str) -> None:
    running = start(local.address, queue, lambda message: None)
    until(lambda: local.call("queue/stats", queue=queue).json["waiting_consumers"])
    running.stop()
    assert running.ended() is None
    # The request has left the server: a new message is not delivered to it.
    until(lambda: local.call("queue/stats", queue=queue).json["waiting_consumers"] == 0)
    local.enqueue(queue, b"1")
    assert local.take(queue)


def test_a_consumer_that_was_cancelled_returns_its_messages(local: Remote, queue: str) -> None:
    local.enqueue(queue, b"1", max_attempts=1)

    async def main() -> None:
        begun = asyncio.Event()

        async def handler(message: Any) -> None:
            begun.set()
            await asyncio.sleep(WAIT)

        async with AsyncQueueClient(local.address) as client:
            task = asyncio.create_task(client.consume(queue, handler))
            await asyncio.wait_for(begun.wait(), WAIT)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert local.take(queue)["attempts"] == 2


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [("401 Unauthorized", "unauthorized", NotAllowed), ("403 Forbidden", "namespace_forbidden", NotAllowed)],
)
def test_a_refusal_ends_the_consumer(start: Start, status: str, code: str, kind: type[Exception]) -> None:
    with scripted(answer(status, b'{"error":"%s","detail":"no right"}' % code.encode())) as server:
        running = start(server.address, "a", lambda message: None)
        error = running.ended()
        assert isinstance(error, kind)
        assert "no right" in str(error)
        assert len(server.requests) == 1


def test_a_bad_name_ends_the_consumer(start: Start, local: Remote) -> None:
    error = start(local.address, "a b", lambda message: None).ended()
    assert isinstance(error, CallFailed)
    assert error.code == "invalid_queue"


def test_errors_that_pass_are_survived(start: Start, local: Remote, queue: str) -> None:
    """A refused connection, a broken response, 500, garbage and 503 with a hint; then the real server."""
    seen = threading.Event()
    broken = [
        b"HTTP/1.1 2",
        answer("500 Internal Server Error", b'{"error":"internal_error"}'),
        answer("200 OK", b"garbage", "Content-Type: text/html"),
        answer("503 Service Unavailable", b'{"error":"queue_busy"}'),
    ]
    local.enqueue(queue, b"1")

    def forward(connection: socket.socket) -> None:
        """The answer of the real server to one dequeue."""
        found = local.dequeue(queue)
        connection.sendall(answer("200 OK", found.body, f"Content-Type: {found.headers['content-type']}"))

    with scripted(*broken, forward, answer("409 Conflict", b'{"error":"waiting"}')) as server:
        running = start(server.address, queue, lambda message: seen.set(), concurrency=1, prefetch=0)
        assert seen.wait(WAIT)
        assert sum(b"/v1/queue/dequeue" in each for each in server.requests) >= 5
        running.stop()
        running.ended()


def test_an_ack_whose_answer_was_lost_is_repeated(
    start: Start, local: Remote, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    id = local.enqueue(queue, b"1")["message_id"]
    found = local.dequeue(queue)
    document = answer("200 OK", found.body, f"Content-Type: {found.headers['content-type']}")
    done = threading.Event()

    def lost(connection: socket.socket) -> None:
        """Apply the ack, and close the connection without an answer."""
        [(meta, _)] = found.messages()
        names = ("queue", "message_id", "lease_id", "meta_etag")
        assert local.call("queue/ack", **{name: meta[name] for name in names}).status == 200

    def second(connection: socket.socket) -> None:
        connection.sendall(answer("404 Not Found", b'{"error":"not_found","detail":"already removed"}'))
        done.set()

    waiting = answer("409 Conflict", b'{"error":"waiting"}')
    with scripted(document, lost, second, waiting) as server:
        # No second request is sent before the message is settled.
        running = start(server.address, queue, lambda message: None, concurrency=1, prefetch=0)
        assert done.wait(WAIT)
        running.stop()
        running.ended()
        assert [each.split()[1] for each in server.requests if each][1:3] == [b"/v1/queue/ack"] * 2
    assert local.app.job(id).status().state == "done"
    assert "was not settled" not in caplog.text


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)


@contextmanager
def served(shell: Shell, port: int) -> Iterator[Any]:
    with command(shell, "serve", "--listen", f"127.0.0.1:{port}") as server:
        server.until("serves")
        yield server


def test_a_killed_server_loses_no_message(start: Start, shell: Shell) -> None:
    """The server is killed with requests in flight and started again, twice."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    seen: collections.Counter[str] = collections.Counter()
    sent: list[str] = []
    steps = [threading.Event() for _ in range(3)]

    def handler(message: Any) -> None:
        seen[message.id] += 1
        for number, step in enumerate(steps):
            if len(seen) >= 40 * (number + 1):
                step.set()

    running = None
    for number, step in enumerate(steps):
        with served(shell, port) as server, QueueClient(address) as client:
            for n in range(40):
                sent.append(client.enqueue("a", f"{number}-{n}").message_id)
            if running is None:
                running = start(address, "a", handler, concurrency=4, prefetch=8, visibility=2)
            assert step.wait(WAIT) or number == 2
            if number == 2:
                until(lambda: set(seen) == set(sent))
                until(lambda: client.stats("a").available is False)
                running.stop()
                assert running.ended() is None
                assert server.end(signal.SIGTERM) == 0
            else:
                server.end(signal.SIGKILL)
    assert set(seen) == set(sent)
    with App(shell.url) as app:
        found = app.queue("a").stats().counts
        assert (found.done, found.ready, found.running, found.failed) == (120, 0, 0, 0)
        assert app.ledger.check() == []


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"prefetch": -1}, {"visibility": 0}, {"nack_delay": -1}, {"concurrency": "a"}],
)
def test_bad_options(options: Any) -> None:
    with QueueClient("http://127.0.0.1:1") as client, pytest.raises(ValueError, match="must be"):
        client.consumer("a", print, **options)


def test_a_stop_before_the_start(local: Remote, queue: str) -> None:
    with QueueClient(local.address) as client:
        consumer = client.consumer(queue, print)
        consumer.stop()
        running = Running(consumer, consumer.run)
        assert running.ended() is None


def test_a_drain_of_the_server_is_survived(start: Start, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/work.db"
    listen = f"unix://{tmp_path}/http.sock"
    seen: list[bytes] = []
    with App(url) as app, serving(app, listen=listen) as remote:
        start(remote.address, "a", lambda message: seen.append(message.id))
        app.queue("a").put(b"1")
        until(lambda: len(seen) == 1)
    with App(url) as app, serving(app, listen=listen):
        app.queue("a").put(b"2")
        until(lambda: len(seen) == 2)
