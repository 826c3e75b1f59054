"""Every verb of the client, on both surfaces, against real servers."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.surfaces import answer, scripted
from tests.support.waiting import in_thread, until
from tests.support.wire import Remote, lose_leases, serving
from towpath import App
from towpath.errors import (
    CallFailed,
    InvalidInput,
    LockBusy,
    LostLease,
    NotAllowed,
    ServerAway,
    ServerBusy,
)
from towpath.http.client import DeliveryReceipt, QueueClient
from towpath.testing import ManualClock

LARGE = bytes(range(256)) * 4096
"""1 MiB: larger than what is read with a message."""


def pieces() -> Iterator[bytes]:
    for start in range(0, len(LARGE), 100_000):
        yield LARGE[start : start + 100_000]


@pytest.mark.parametrize(
    "payload", [b"", b"hello", bytearray(b"x\r\n--"), "text \N{SNOWMAN}", io.BytesIO(LARGE), pieces(), LARGE]
)
def test_payloads(connect: Callable[..., Any], local: Remote, queue: str, payload: Any) -> None:
    # Each surface needs its own: a file or an iterator is read once.
    if isinstance(payload, io.BytesIO):
        payload.seek(0)
    elif not isinstance(payload, bytes | bytearray | str):
        payload = pieces()
    client = connect(local.address)
    sent = client.enqueue(queue, payload)
    wanted = payload.encode() if isinstance(payload, str) else LARGE
    wanted = bytes(payload) if isinstance(payload, bytes | bytearray) else wanted
    assert sent.payload_bytes == len(wanted)
    with client.dequeue(queue) as message:
        assert (message.id, message.size) == (sent.message_id, len(wanted))
        assert message.read() == wanted
        assert message.read() == wanted
        message.ack()
    assert client.dequeue(queue) is None


def test_a_file_is_sent_from_its_position(connect: Callable[..., Any], local: Remote, queue: str) -> None:
    file = io.BytesIO(b"0123456789")
    file.seek(4)
    client = connect(local.address)
    client.enqueue(queue, file)
    with client.dequeue(queue) as message:
        assert message.read() == b"456789"
        message.ack()


@pytest.mark.parametrize("payload", [{"a": 1}, 7, None, ["text"], "\ud800", io.StringIO])
def test_payloads_that_are_refused(connect: Callable[..., Any], local: Remote, payload: Any) -> None:
    with pytest.raises(InvalidInput):
        connect(local.address).enqueue("refused", payload("text") if callable(payload) else payload)


def test_an_error_of_an_iterator_is_its_own(connect: Callable[..., Any], local: Remote) -> None:
    def broken() -> Iterator[bytes]:
        yield b"1"
        raise KeyError("mine")

    client = connect(local.address)
    with pytest.raises(KeyError, match="mine"):
        client.enqueue("broken", broken())
    assert client.stats("broken").available is False


def test_options_of_a_message(client: Any, queue: str) -> None:
    sent = client.enqueue(
        queue,
        b"1",
        attributes={"a": "b", "n": [1]},
        correlation_id="c-1",
        content_type="application/x-a",
        max_attempts=2,
        delay=timedelta(seconds=0),
        ttl=60,
    )
    assert (sent.max_attempts, sent.correlation_id, sent.queue) == (2, "c-1", queue)
    message = client.dequeue(queue, visibility=7.5, owner="me")
    assert message.attributes == {"a": "b", "n": [1]}
    assert (message.correlation_id, message.content_type) == ("c-1", "application/x-a")
    assert (message.attempts, message.view.visibility_timeout_seconds) == (1, 8)
    assert message.json() == 1
    message.ack()


def test_a_message_in_pieces_and_in_a_file(client: Any, queue: str, tmp_path: Path) -> None:
    client.enqueue(queue, LARGE)
    client.enqueue(queue, LARGE)
    with client.dequeue(queue) as message:
        assert b"".join(message.pieces()) == LARGE
        with pytest.raises(InvalidInput, match="in pieces"):
            message.read()
        message.ack()
    with client.dequeue(queue) as message:
        path = tmp_path / "payload"
        path.write_bytes(b"old")
        assert message.save(path) == len(LARGE)
        assert path.read_bytes() == LARGE
        assert [each.name for each in tmp_path.iterdir()] == ["payload"]
        message.ack()


def test_settlements(client: Any, queue: str) -> None:
    client.enqueue(queue, b"1", max_attempts=9)
    first = client.dequeue(queue)
    first.nack(reason="no stock")
    assert first.settled
    with pytest.raises(InvalidInput, match="its nack was sent"):
        first.ack()
    second = client.dequeue(queue)
    assert (second.attempts, second.view.failure_attempts) == (2, 1)
    second.extend(20)
    with pytest.raises(LostLease) as caught:
        client.ack(first.receipt)
    assert caught.value.status == 409
    second.nack(defer=True)
    third = client.dequeue(queue)
    assert third.view.failure_attempts == 1
    answer = client.extend(third.receipt)
    assert answer.visibility_timeout_seconds == 30
    client.nack(third.receipt, delay=60)
    assert client.dequeue(queue) is None


def test_leaving_a_message(client: Any, queue: str) -> None:
    client.enqueue(queue, b"1", max_attempts=9)
    with pytest.raises(KeyError), client.dequeue(queue):
        raise KeyError("a")
    with client.dequeue(queue):
        pass
    with pytest.raises(KeyboardInterrupt), client.dequeue(queue):
        raise KeyboardInterrupt
    with client.dequeue(queue) as message:
        # An interrupt is no failure.
        assert message.view.failure_attempts == 2
        message.ack()


def test_leaving_a_message_whose_lease_is_lost(
    connect: Callable[..., Any], timed: Remote, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(timed.address)
    client.enqueue("a", b"1")
    message = client.dequeue("a")
    lose_leases(timed, clock, 31)
    with pytest.raises(LostLease), message:
        pass
    with pytest.raises(KeyError), message:
        raise KeyError
    assert "the nack failed" in caplog.text


def test_many_messages(client: Any, queue: str) -> None:
    for size in (1, 200_000, 0, 5_000_000):
        client.enqueue(queue, b"x" * size)
    messages = list(client.dequeue_many(queue, 10))
    # None was read before the next one arrived.
    assert [len(message.read()) for message in messages] == [1, 200_000, 0, 5_000_000]
    for message in messages:
        message.ack()
    assert list(client.dequeue_many(queue, 10)) == []


@pytest.mark.parametrize("n", [0, 65])
def test_the_number_of_messages_is_checked(connect: Callable[..., Any], local: Remote, n: int) -> None:
    with pytest.raises(InvalidInput, match="1 to 64"):
        list(connect(local.address).dequeue_many("a", n))


def test_subscribe_delivers_each_message_at_once(client: Any, queue: str) -> None:
    client.enqueue(queue, b"1\r\n")
    with client.subscribe(queue, prefetch=4) as messages:
        first = next(messages)
        assert first.read() == b"1\r\n"
        # The stream is open and silent; the second message is sent only now.
        client.enqueue(queue, LARGE)
        second = next(messages)
        assert b"".join(second.pieces()) == LARGE
        client.enqueue(queue, b"3")
        first.ack()
        second.ack()
        third = next(messages)
        third.ack()
    assert list(client.subscribe(queue, wait=0)) == []


def test_a_wait(connect: Callable[..., Any], local: Remote, queue: str) -> None:
    client = connect(local.address)
    with QueueClient(local.address) as other:
        taken = in_thread(lambda: other.dequeue(queue, wait=None))
        until(lambda: client.stats(queue).waiting_consumers == 1)
        client.enqueue(queue, b"late")
        message = taken()
        assert message.read() == b"late"
        message.ack()
    assert client.dequeue(queue, wait=1) is None


def test_state(client: Any, queue: str) -> None:
    client.enqueue(queue, b"1")
    message = client.dequeue(queue, stateful=True)
    assert message.state.get().value is None
    stored = message.state.update({"step": 1})
    assert message.state.get().value == {"step": 1}
    with pytest.raises(CallFailed) as caught:
        message.state.update({"step": 2}, expect=stored.version + 7)
    assert caught.value.status == 409
    message.state.update({"step": 2}, expect=stored.version)
    assert message.state.remove() is True
    assert message.state.remove() is False
    with pytest.raises(InvalidInput, match="a JSON value"):
        message.state.update(object())
    message.ack()
    client.enqueue(queue, b"1")
    with client.dequeue(queue) as message, pytest.raises(InvalidInput, match="stateful=True"):
        _ = message.state


def test_locks(client: Any, queue: str) -> None:
    with client.locks.acquire(queue, ttl=30) as lock:
        lock.check()
        assert (lock.key, lock.lost) == (queue, False)
        with pytest.raises(LockBusy) as caught:
            client.locks.acquire(queue, wait=0)
        assert caught.value.retryable
        assert 0 < caught.value.retry_after <= 30
        lock.document.update([1])
        lock.keepalive(20)
        assert client.locks.keepalive(lock.lease, 30) >= lock.expires_at_unix - 1
        assert client.locks.describe(queue).lease_id == lock.lease.lease_id
        assert client.locks.published(queue).value is None
    assert client.locks.published(queue).value == [1]

    def fail() -> None:
        with client.locks.acquire(queue) as lock:
            lock.document.update([2])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert client.locks.published(queue).value == [1]
    again = client.locks.acquire(queue, wait=0)
    assert again.fencing_token == lock.fencing_token + 2
    client.locks.release(again.lease)


def test_a_lock_is_renewed(connect: Callable[..., Any], local: Remote, queue: str) -> None:
    client = connect(local.address)
    with client.locks.acquire(queue, ttl=1) as lock:
        with pytest.raises(LockBusy):
            client.locks.acquire(queue, wait=2)
        lock.check()


def test_a_lost_lock_is_reported(connect: Callable[..., Any], timed: Remote, clock: ManualClock) -> None:
    client = connect(timed.address)

    def lose() -> None:
        with client.locks.acquire("a", ttl=1) as lock:
            clock.advance(60)
            client.locks.acquire("a", wait=0)
            # A call runs the event loop, and so the task that renews.
            until(lambda: client.stats("a") and lock.lost)
            with pytest.raises(LostLease):
                lock.check()

    with pytest.raises(LostLease):
        lose()


def test_stats_and_watch(client: Any, queue: str) -> None:
    with client.watch(queue) as events:
        assert next(events).available is False
        id = client.enqueue(queue, b"1").message_id
        event = next(events)
        assert (event.available, event.head_message_id) == (True, id)
    stats = client.stats(queue)
    assert (stats.head_message_id, stats.queue) == (id, queue)


def test_namespaces(connect: Callable[..., Any], local: Remote, queue: str) -> None:
    client = connect(local.address, namespace="team")
    client.enqueue(queue, b"1")
    assert client.dequeue(queue, namespace="default") is None
    assert client.stats(queue).available
    assert not client.stats(queue, namespace="default").available
    with client.dequeue(queue) as message:
        assert message.view.namespace == "team"
        message.ack()


def test_a_receipt_of_another_process(client: Any, queue: str) -> None:
    client.enqueue(queue, b"1")
    found = client.dequeue(queue).receipt
    receipt = DeliveryReceipt(
        queue=found.queue, message_id=found.message_id, lease_id=found.lease_id, meta_etag=found.meta_etag
    )
    client.extend(receipt, 40)
    client.ack(receipt)
    with pytest.raises(LostLease, match="not_found"):
        client.ack(receipt)


def test_refusals(connect: Callable[..., Any], local: Remote) -> None:
    client = connect(local.address)
    with pytest.raises(CallFailed, match="queue must be 1 to 128") as caught:
        client.enqueue("a b", b"")
    assert (caught.value.status, caught.value.code) == (400, "invalid_queue")
    assert not caught.value.retryable
    with pytest.raises(InvalidInput, match="visible ASCII"):
        client.enqueue("a", b"", correlation_id="a\r\nb")
    with pytest.raises(InvalidInput, match="visible ASCII"):
        client.enqueue("a", b"", content_type="\N{SNOWMAN}")


def test_bulk_calls(connect: Callable[..., Any]) -> None:
    """The bytes of the two calls that are not lockd's."""
    acks = b'{"acked":1,"results":[{"message_id":"1","acked":true},{"message_id":"2","error":"not_found"}]}'
    with scripted(answer("200 OK", acks)) as server:
        receipts = [DeliveryReceipt(queue="q", message_id=id, lease_id="l") for id in "12"]
        results = connect(server.address).ack_many(iter(receipts))
        assert [(each.acked, each.error) for each in results] == [(True, ""), (False, "not_found")]
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/queue/ackMany HTTP/1.1")
        assert body == (
            b'{"receipts":[{"queue":"q","message_id":"1","lease_id":"l"},'
            b'{"queue":"q","message_id":"2","lease_id":"l"}]}'
        )
    stored = b'{"messages":[{"message_id":"1","queue":"q","namespace":"default","payload_bytes":1}]}'
    with scripted(answer("200 OK", stored)) as server:
        client = connect(server.address)
        [message] = client.enqueue_many("q", [b"\xff"], priority=0, dedupe_key="k")
        assert (message.message_id, message.duplicate) == ("1", False)
        assert b'"priority":0,"dedupe_key":"k"' in server.requests[0]
        assert b'"payload_base64":"/w=="' in server.requests[0]
        assert client.enqueue_many("q", []) == client.ack_many([]) == []
        assert len(server.requests) == 1
        with pytest.raises(InvalidInput, match="bytes or text"):
            client.enqueue_many("q", [1])


def test_a_token_is_sent_and_not_shown(
    connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    refused = answer("401 Unauthorized", b'{"error":"unauthorized","detail":"no valid token"}\n')
    with scripted(refused) as server:
        client = connect(server.address, token="s3cret")
        with pytest.raises(NotAllowed, match="no valid token") as caught:
            client.stats("a")
        assert b"authorization: bearer s3cret" in server.requests[0].lower()
        monkeypatch.setenv("TOWPATH_TOKEN", "fr0m-env")
        with pytest.raises(NotAllowed):
            connect(server.address).stats("a")
        assert b"Bearer fr0m-env" in server.requests[1]
    shown = f"{client!r} {caught.value!r} {caught.value.details} {caplog.text}"
    assert "s3cret" not in shown
    with pytest.raises(InvalidInput) as bad:
        connect("http://127.0.0.1:1", token="s3cr\nt")
    assert "s3cr" not in str(bad.value)


def test_a_token_without_encryption_is_warned_about(
    connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    for server in ("http://127.0.0.1:1", "http://[::1]:1", "localhost:1", "unix:///a", "https://a:1"):
        connect(server, token="s3cret")
    assert caplog.text == ""
    connect("http://a.example:1,http://127.0.0.1:1", token="s3cret")
    assert "without encryption to http://a.example:1: use https" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_unix_socket(connect: Callable[..., Any], tmp_path: Path) -> None:
    with App("memory://") as app, serving(app, listen=f"unix://{tmp_path}/http.sock") as remote:
        client = connect(remote.address)
        client.enqueue("a", b"1")
        with client.dequeue("a") as message:
            message.ack()


def test_failover(connect: Callable[..., Any], local: Remote, queue: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    passive = answer("503 Service Unavailable", b'{"error":"node_passive"}')
    with scripted(passive) as standby:
        client = connect(f"{nobody},{standby.address}, {local.address}")
        client.enqueue(queue, io.BytesIO(b"12"))
        assert len(standby.requests) == 1
        # The server that answered is the first one from now on.
        with client.dequeue(queue) as message:
            assert message.read() == b"12"
            message.ack()
        assert len(standby.requests) == 1
        # An iterator cannot be read again.
        with pytest.raises(ServerBusy, match="node_passive"):
            connect([standby.address, local.address]).enqueue(queue, iter([b"1"]))
    with pytest.raises(ServerAway) as caught:
        connect([nobody, nobody]).enqueue(queue, b"")
    assert (caught.value.sent, caught.value.retryable) == (False, True)


def test_an_enqueue_is_not_repeated_after_a_broken_connection(
    connect: Callable[..., Any], local: Remote, queue: str
) -> None:
    with scripted(b"HTTP/1.1 200") as broken:
        client = connect([broken.address, local.address])
        with pytest.raises(ServerAway) as caught:
            client.enqueue(queue, b"1")
        assert caught.value.sent
        # A read may be repeated.
        assert client.stats(queue).available is False


@pytest.mark.parametrize(
    "server",
    ["", "ftp://a", "http://", "http://u:p4ss@a", "unix://a", "http://a:99999", "http://a?b=c", " , "],
)
def test_addresses_that_are_refused(connect: Callable[..., Any], server: str) -> None:
    with pytest.raises(InvalidInput, match="unix:///path") as caught:
        connect(server)
    assert "p4ss" not in str(caught.value)


def test_the_address_of_the_environment(
    connect: Callable[..., Any], local: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKD_CLIENT_SERVER", local.address.removeprefix("http://"))
    assert connect().stats("a").queue == "a"
    monkeypatch.setenv("TOWPATH_SERVER", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1>" in repr(connect())
