"""Dequeue: framing, waiting, and who gets a message."""

from __future__ import annotations

import json
import re
import threading
from contextlib import ExitStack
from functools import partial

import pytest

from tests.support.waiting import WAIT, until
from tests.support.wire import Remote, lose_leases, receipt, serving
from towpath import App
from towpath.testing import ManualClock


def test_the_bytes_of_one_message(local: Remote, queue: str) -> None:
    sent = local.enqueue(queue, b"\x00payload\r\n", payload_content_type="text/plain")
    answer = local.dequeue(queue, visibility_timeout_seconds=60)
    assert answer.status == 200
    boundary = answer.headers["content-type"].removeprefix("multipart/related; boundary=")
    assert re.fullmatch("[0-9a-f]{60}", boundary)
    assert answer.headers["x-correlation-id"] == sent["correlation_id"]
    line = b"--" + boundary.encode()
    pattern = (
        line + rb'\r\nContent-Disposition: form-data; name="meta"\r\nContent-Type: application/json\r\n\r\n'
        rb'(\{"message":.*\})\n\r\n'
        + line
        + rb'\r\nContent-Disposition: form-data; name="payload"\r\nContent-Length: 10\r\n'
        rb"Content-Type: text/plain\r\n\r\n\x00payload\r\n\r\n" + line + rb"--\r\n"
    )
    found = re.fullmatch(pattern, answer.body)
    assert found is not None, answer.body
    meta = json.loads(found[1])
    assert list(meta) == ["message"]
    message = meta["message"]
    assert list(message) == [
        "namespace",
        "queue",
        "message_id",
        "attempts",
        "max_attempts",
        "not_visible_until_unix",
        "visibility_timeout_seconds",
        "payload_content_type",
        "payload_bytes",
        "correlation_id",
        "lease_id",
        "lease_expires_at_unix",
        "fencing_token",
        "txn_id",
        "meta_etag",
    ]
    assert message["message_id"] == sent["message_id"]
    assert (message["attempts"], message["fencing_token"], message["visibility_timeout_seconds"]) == (
        1,
        1,
        60,
    )
    assert re.fullmatch("[0-9a-v]{19}[0g]", message["lease_id"])
    assert re.fullmatch("[0-9a-v]{19}[0g]", message["txn_id"])


def test_a_batch(remote: Remote, queue: str) -> None:
    payloads = [b"first", b"", b"third\r"]
    for payload in payloads:
        remote.enqueue(queue, payload)
    answer = remote.dequeue(queue, page_size=100)
    assert [payload for _, payload in answer.messages()] == payloads
    for number in range(3):
        assert b'name="meta"; filename="meta-%d.json"\r\n' % number in answer.body
        assert b'name="payload"; filename="payload-%d"\r\n' % number in answer.body


def test_at_most_64_messages(local: Remote, queue: str) -> None:
    local.app.queue(queue).put_many(range(70))
    assert len(local.dequeue(queue, page_size=1000).messages()) == 64
    assert len(local.dequeue(queue, page_size=-3).messages()) == 1


def test_a_stateful_dequeue(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    remote.enqueue(queue)
    answer = remote.call("queue/dequeueWithState", queue=queue, owner="me", page_size=9)
    [(message, _)] = answer.messages()
    for name in ("state_etag", "state_lease_id", "state_txn_id"):
        assert message[name]
    assert message["state_lease_id"] != message["lease_id"]
    assert message["state_fencing_token"] == message["fencing_token"]
    assert message["state_lease_expires_at_unix"] == message["lease_expires_at_unix"]
    assert message["state_txn_id"] == message["txn_id"]


@pytest.mark.parametrize(
    ("fields", "hint"), [({"wait_seconds": -1}, None), ({"wait_seconds": 1, "page_size": 3}, "1")]
)
def test_an_empty_queue(local: Remote, queue: str, fields: dict[str, int], hint: str | None) -> None:
    answer = local.dequeue(queue, **fields)
    assert (answer.status, answer.error) == (409, "waiting")
    assert answer.headers.get("retry-after") == hint


@pytest.mark.parametrize("wait", [0, 50, -7])
def test_a_waiting_request_gets_the_next_message(remote: Remote, queue: str, wait: int) -> None:
    with remote.connect() as wire:
        wire.request(
            "/v1/queue/dequeue", b'{"queue":"%s","owner":"a","wait_seconds":%d}' % (queue.encode(), wait)
        )
        until(partial(_waits, remote, queue, 1))
        remote.enqueue(queue, b"late")
        assert [payload for _, payload in wire.answer().messages()] == [b"late"]


def test_waiting_requests_are_served_in_order(local: Remote, queue: str) -> None:
    with ExitStack() as stack:
        wires = [stack.enter_context(local.connect()) for _ in range(3)]
        for number, wire in enumerate(wires, 1):
            wire.request("/v1/queue/dequeue", json.dumps({"queue": queue, "owner": "a"}).encode())
            until(partial(_waits, local, queue, number))
        for number in range(3):
            local.enqueue(queue, b"%d" % number)
        assert [wire.answer().messages()[0][1] for wire in wires] == [b"0", b"1", b"2"]


def test_a_client_that_leaves_while_it_waits_takes_no_message(remote: Remote, queue: str) -> None:
    with remote.connect() as wire:
        wire.request("/v1/queue/dequeue", json.dumps({"queue": queue, "owner": "a"}).encode())
        until(partial(_waits, remote, queue, 1))
    until(partial(_waits, remote, queue, 0))
    remote.enqueue(queue, b"kept")
    assert remote.take(queue)["attempts"] == 1


@pytest.mark.parametrize("call", ["dequeue", "subscribe"])
def test_clients_that_leave_before_the_answer_take_no_message(local: Remote, queue: str, call: str) -> None:
    """The message arrives in the moment in which the client leaves."""
    for _ in range(30):
        with local.connect() as wire:
            wire.request(f"/v1/queue/{call}", json.dumps({"queue": queue, "owner": "a"}).encode())
        local.app.queue(queue).put(b"x")
    until(partial(_waits, local, queue, 0))
    until(lambda: local.app.queue(queue).stats().counts.ready == 30)


def test_a_message_whose_answer_is_not_read_is_delivered_again(local: Remote, queue: str) -> None:
    """At once, not after its lease: the server notices the break while it writes."""
    payload = bytes(12_000_000)
    local.enqueue(queue, payload)
    with local.connect() as wire:
        body = {"queue": queue, "owner": "a", "visibility_timeout_seconds": 600}
        wire.request("/v1/queue/dequeue", json.dumps(body).encode())
        wire.read(1_000)
    [(_, found)] = local.dequeue(queue, wait_seconds=int(WAIT)).messages()
    assert found == payload


def test_too_many_consumers() -> None:
    with App("memory://") as app, serving(app, max_consumers=1) as remote, remote.connect() as wire:
        wire.request("/v1/queue/dequeue", b'{"queue":"a","owner":"a"}')
        until(lambda: remote.call("queue/stats", queue="a").json["total_consumers"] == 1)
        answer = remote.dequeue("b")
        assert (answer.status, answer.error) == (503, "queue_busy")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "missing_queue"),
        (b'{"owner":"a"}', "missing_queue"),
        (b'{"queue":"a"}', "missing_owner"),
        (b'{"queue":"a","owner":" "}', "missing_owner"),
        (b'{"queue":"a*","owner":"a"}', "invalid_queue"),
        (b'{"queue":"a,b","owner":"a"}', "invalid_queue"),
        (b'{"queue":"a","owner":"a","namespace":".lockd"}', "invalid_namespace"),
        (b'{"queue":"a","owner":"a","txn_id":"no"}', "invalid_txn"),
        (b'{"queue":"a","owner":"a","txn_id":"0123456789abcdefghi0"}', "invalid_txn"),
        (b'{"queue":"a","owner":"a","unknown":1}', "invalid_body"),
        (b'{"queue":"a","owner":"a","page_size":"1"}', "invalid_body"),
        (b'{"queue":"a","owner":"a","page_size":9223372036854775808}', "invalid_body"),
        (b'{"queue":"a","owner":"a"}{}', "invalid_body"),
        (b'{"queue":"a","owner":"%s"}' % (b"x" * 600), "invalid_body"),
        (b'{"queue":"a","owner":"%s"}' % (b"x" * 100_000), "invalid_body"),
        (b"[]", "invalid_body"),
        (b"\xff\xfe", "invalid_body"),
    ],
)
@pytest.mark.parametrize("path", ["dequeue", "subscribe"])
def test_bad_requests(local: Remote, path: str, body: bytes, code: str) -> None:
    answer = local.post(f"/v1/queue/{path}", body)
    assert (answer.status, answer.error) == (400, code)


def test_names_from_the_query_string(local: Remote, queue: str) -> None:
    local.enqueue(queue, b"x", namespace="team")
    answer = local.post(f"/v1/queue/dequeue?queue={queue}&namespace=team&owner=me")
    assert [payload for _, payload in answer.messages()] == [b"x"]
    assert local.post("/v1/queue/dequeue?" + "a=1&" * 50).error == "invalid_body"
    assert local.post("/v1/queue/dequeue?queue=%ff").error == "invalid_body"


def test_a_lease_that_ends_counts_as_a_failure(timed: Remote, clock: ManualClock) -> None:
    timed.enqueue("a", max_attempts=2)
    message = timed.take("a", visibility_timeout_seconds=5)
    assert message["lease_expires_at_unix"] == clock.now() // 1_000_000 + 5
    lose_leases(timed, clock, 6)
    message = timed.take("a")
    assert (message["attempts"], message["failure_attempts"]) == (2, 1)
    lose_leases(timed, clock, 40)
    assert timed.dequeue("a").error == "waiting"
    assert timed.app.queue("a").stats().counts.failed == 1


def test_delay_and_time_to_live(timed: Remote, clock: ManualClock) -> None:
    sent = timed.enqueue("a", delay_seconds=10, ttl_seconds=20)
    assert sent["not_visible_until_unix"] == clock.now() // 1_000_000 + 10
    assert timed.dequeue("a").error == "waiting"
    clock.advance(10)
    message = timed.take("a")
    assert timed.call("queue/nack", **receipt(message)).status == 200
    clock.advance(10)
    assert timed.dequeue("a").error == "waiting"


def test_the_longest_lease(local: Remote, queue: str) -> None:
    local.enqueue(queue)
    assert local.take(queue, visibility_timeout_seconds=99_999)["visibility_timeout_seconds"] == 1800


def test_get_works_too(local: Remote, queue: str) -> None:
    """The method is not checked."""
    local.enqueue(queue)
    with local.connect() as wire:
        body = json.dumps({"queue": queue, "owner": "me"}).encode()
        wire.send(
            b"GET /v1/queue/dequeue HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert wire.answer().status == 200


def _waits(remote: Remote, queue: str, n: int) -> bool:
    """Whether so many requests wait for messages of the queue."""
    waiting: int = remote.call("queue/stats", queue=queue).json["waiting_consumers"]
    return waiting == n


@pytest.mark.parametrize("watch", [True, False])
def test_the_safety_poll(watch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs while a request waits, at the interval that the options name."""
    intervals = (
        {"poll_interval": 3600.0, "resilient_poll_interval": 0.01} if watch else {"poll_interval": 0.01}
    )
    polls = threading.Semaphore(0)
    with App("memory://") as app, serving(app, watch=watch, poll_jitter=0.0, **intervals) as remote:
        kick = app.engine.committer.kick

        def counted() -> None:
            polls.release()
            kick()

        monkeypatch.setattr(app.engine.committer, "kick", counted)
        with remote.connect() as wire:
            wire.request("/v1/queue/dequeue", b'{"queue":"a","owner":"me"}')
            for _ in range(20):
                assert polls.acquire(timeout=WAIT)
            remote.enqueue("a", b"x")
            assert wire.answer().messages()[0][1] == b"x"
