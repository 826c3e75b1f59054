"""Subscribe: one document without end, each message delivered at once. Watch: events of a queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.support.waiting import until
from tests.support.wire import Remote, Wire, receipt, serving, split_message
from towpath import App
from towpath.testing import ManualClock


class Stream:
    """The messages of a subscription, read as far as they are written."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.status, self.headers = wire.head()
        assert self.status == 200, wire.read(int(self.headers["content-length"]))
        assert self.headers["transfer-encoding"] == "chunked"
        self._line = (
            b"--" + self.headers["content-type"].removeprefix("multipart/related; boundary=").encode()
        )
        self._data = b""

    def next(self) -> tuple[dict[str, Any], bytes]:
        """The next message. The delimiter behind it must be there without a further message."""
        while not self._data.count(self._line) >= 3:
            piece = self._wire.chunk()
            assert piece, "the stream has ended"
            self._data += piece
        meta, payload, self._data = split_message(self._data, self._line)
        return meta, payload

    def end(self) -> None:
        """The closing delimiter and the end of the body."""
        while piece := self._wire.chunk():
            self._data += piece
        assert self._data == self._line + b"--\r\n"


@contextmanager
def subscribed(remote: Remote, queue: str, path: str = "subscribe", **fields: Any) -> Iterator[Wire]:
    with remote.connect() as wire:
        wire.request(f"/v1/queue/{path}", json.dumps({"queue": queue, "owner": "me", **fields}).encode())
        yield wire


def waits(remote: Remote, queue: str, n: int = 1) -> None:
    """Wait until so many requests wait for messages of the queue."""
    until(partial(_waits, remote, queue, n))


def _waits(remote: Remote, queue: str, n: int) -> bool:
    waiting: int = remote.call("queue/stats", queue=queue).json["waiting_consumers"]
    return waiting == n


def test_messages_arrive_at_once(remote: Remote, queue: str) -> None:
    with subscribed(remote, queue) as wire:
        waits(remote, queue)
        sent = remote.enqueue(queue, b"one\r\n")
        stream = Stream(wire)
        assert stream.headers["x-correlation-id"] == sent["correlation_id"]
        meta, payload = stream.next()
        assert (meta["message_id"], payload) == (sent["message_id"], b"one\r\n")
        for text in (b"", b"\r", b"\r\n--", b"x" * 200_000):
            remote.enqueue(queue, text)
            meta, payload = stream.next()
            assert payload == text
            assert remote.call("queue/ack", **receipt(meta)).status == 200


def test_several_messages_without_acks(remote: Remote, queue: str) -> None:
    remote.app.queue(queue).put_many([b"%d" % number for number in range(20)])
    with subscribed(remote, queue, page_size=8) as wire:
        stream = Stream(wire)
        assert [stream.next()[1] for _ in range(20)] == [b"%d" % number for number in range(20)]


def test_a_stateful_subscription(local: Remote, queue: str) -> None:
    local.enqueue(queue, b"x")
    with subscribed(local, queue, "subscribeWithState") as wire:
        assert Stream(wire).next()[0]["state_lease_id"]


def test_no_wait_ends_with_the_queue(local: Remote, queue: str) -> None:
    assert local.call("queue/subscribe", queue=queue, owner="me", wait_seconds=-1).error == "waiting"
    for payload in (b"a", b"b", b"c"):
        local.enqueue(queue, payload)
    answer = local.call("queue/subscribe", queue=queue, owner="me", wait_seconds=-1)
    assert [payload for _, payload in answer.messages()] == [b"a", b"b", b"c"]
    assert b"filename" not in answer.body


def test_no_message_within_the_wait(local: Remote, queue: str) -> None:
    answer = local.call("queue/subscribe", queue=queue, owner="me", wait_seconds=1)
    assert (answer.status, answer.error, answer.headers["retry-after"]) == (409, "waiting", "1")


def test_a_client_that_leaves_takes_no_further_message(remote: Remote, queue: str) -> None:
    remote.enqueue(queue, b"1")
    with subscribed(remote, queue) as wire:
        Stream(wire).next()
        waits(remote, queue)
    waits(remote, queue, 0)
    remote.enqueue(queue, b"2")
    assert [payload for _, payload in remote.dequeue(queue).messages()] == [b"2"]


def test_what_was_not_written_is_given_back(local: Remote, queue: str) -> None:
    """A client that does not read holds the messages that fill its buffers. The others stay in the queue."""
    local.app.queue(queue).put_many([bytes(1_000_000)] * 40)
    with subscribed(local, queue) as wire:
        wire.read(1)
        until(lambda: local.app.queue(queue).stats().counts.running >= 1)
    waits(local, queue, 0)
    counts = local.app.queue(queue).stats().counts
    assert counts.ready >= 20, counts


def test_a_message_that_breaks_while_it_is_written_is_delivered_again_at_once(
    remote: Remote, queue: str
) -> None:
    payload = bytes(12_000_000)
    remote.enqueue(queue, payload)
    with subscribed(remote, queue, visibility_timeout_seconds=600) as wire:
        wire.read(1_000)
    with subscribed(remote, queue) as wire:
        meta, found = Stream(wire).next()
    assert found == payload
    assert (meta["attempts"], meta["fencing_token"]) == (1, 2)


def test_subscriptions_are_served_in_turn(local: Remote, queue: str) -> None:
    with subscribed(local, queue) as first:
        waits(local, queue)
        with subscribed(local, queue) as second:
            waits(local, queue, 2)
            for number in range(4):
                local.enqueue(queue, b"%d" % number)
            streams = Stream(first), Stream(second)
            assert [[stream.next()[1] for _ in range(2)] for stream in streams] == [
                [b"0", b"2"],
                [b"1", b"3"],
            ]


def test_a_drain_ends_streams_and_waits_and_takes_receipts() -> None:
    with App("memory://") as app, serving(app, drain_grace=60.0) as remote:
        remote.enqueue("a", b"1")
        remote.enqueue("c", b"1")
        held = remote.take("c")
        with subscribed(remote, "a") as streaming, subscribed(remote, "b", "dequeue") as polling:
            stream = Stream(streaming)
            meta, _ = stream.next()
            waits(remote, "b")
            with remote.connect() as watching:
                watching.request("/v1/queue/watch", b'{"queue":"a"}')
                watching.head()
                watching.chunk()
                remote.server.stop()
                assert polling.answer().error == "shutdown_draining"
                stream.end()
                while watching.chunk():
                    pass
        ready = remote.post("/readyz")
        assert (ready.status, ready.error) == (503, "shutdown_draining")
        assert remote.post("/healthz").status == 200
        refused = remote.dequeue("a")
        assert (refused.status, refused.error) == (503, "shutdown_draining")
        assert refused.headers["shutdown-imminent"] == "true"
        answer = remote.call("queue/extend", **receipt(meta, extend_by_seconds=50))
        assert (answer.status, answer.headers["shutdown-imminent"]) == (200, "true")
        assert remote.call("queue/nack", **receipt(meta)).status == 200
        assert remote.call("queue/ack", **receipt(held)).status == 200
    # No message is held any more: the server did not wait for the end of the grace.


def test_watch(remote: Remote, queue: str) -> None:
    with remote.connect() as wire:
        wire.request("/v1/queue/watch", json.dumps({"queue": queue}).encode(), {"X-Correlation-Id": "c-7"})
        status, headers = wire.head()
        assert status == 200
        assert headers["content-type"] == "text/event-stream"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        first = _event(wire.chunk(), 1)
        assert list(first) == ["namespace", "queue", "available", "changed_at_unix", "correlation_id"]
        assert (first["available"], first["correlation_id"]) == (False, "c-7")
        id = remote.enqueue(queue)["message_id"]
        second = _event(wire.chunk(), 2)
        assert (second["available"], second["head_message_id"]) == (True, id)


def test_watch_notices_the_end_of_a_delay(timed: Remote, clock: ManualClock) -> None:
    id = timed.enqueue("a", delay_seconds=60)["message_id"]
    with timed.connect() as wire:
        wire.request("/v1/queue/watch", b'{"queue":"a"}')
        wire.head()
        assert _event(wire.chunk(), 1)["available"] is False
        clock.advance(60)
        assert _event(wire.chunk(), 2)["head_message_id"] == id


@pytest.mark.parametrize("path", ["stats", "watch"])
def test_bad_names(local: Remote, path: str) -> None:
    assert local.call(f"queue/{path}").error == "missing_queue"
    assert local.call(f"queue/{path}", queue="a/b").error == "invalid_queue"
    assert local.call(f"queue/{path}", queue="a", owner="b").error == "invalid_body"
    assert local.call(f"queue/{path}", queue="a", namespace=".b").error == "invalid_namespace"


def test_stats(timed: Remote, clock: ManualClock) -> None:
    answer = timed.post("/v1/queue/stats?queue=A&namespace=team", b"", {"X-Correlation-Id": "c-1"})
    assert answer.headers["x-correlation-id"] == "c-1"
    assert answer.json == {
        "namespace": "team",
        "queue": "a",
        "waiting_consumers": 0,
        "pending_candidates": 0,
        "total_consumers": 0,
        "has_active_watcher": True,
        "available": False,
        "correlation_id": "c-1",
    }
    now = clock.now() // 1_000_000
    id = timed.enqueue("a", namespace="team")["message_id"]
    clock.advance(5)
    found = timed.call("queue/stats", queue="a", namespace="team").json
    assert found["available"] is True
    assert found["head_message_id"] == id
    assert (found["head_enqueued_at_unix"], found["head_age_seconds"]) == (now, 5)
    assert found["head_not_visible_until_unix"] == now


def _event(data: bytes, number: int) -> dict[str, Any]:
    head = b"id: %d\nevent: queue_watch\ndata: " % number
    assert data.startswith(head)
    assert data.endswith(b"\n\n")
    found: dict[str, Any] = json.loads(data.removeprefix(head))
    return found
