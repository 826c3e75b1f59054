"""Ack, nack and extend, and every way in which a receipt can be wrong."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.waiting import until
from tests.support.wire import Remote, lose_leases, receipt, serving
from towpath import App
from towpath.runtime.claims import dispatcher
from towpath.testing import ManualClock


def test_ack(remote: Remote, queue: str) -> None:
    sent = remote.enqueue(queue, b"x")
    answer = remote.call("queue/ack", **receipt(remote.take(queue)))
    assert answer.status == 200
    assert answer.json == {"acked": True, "correlation_id": sent["correlation_id"]}
    assert answer.headers["x-correlation-id"] == sent["correlation_id"]
    assert remote.dequeue(queue).error == "waiting"
    assert remote.app.queue(queue).stats().counts.done == 1


def test_the_smallest_ack(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    message = remote.take(queue)
    names = ("queue", "message_id", "lease_id")
    assert remote.call("queue/ack", **{name: message[name] for name in names}).status == 200


def test_an_ack_with_an_outdated_etag(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    assert remote.call("queue/ack", **receipt(remote.take(queue), meta_etag="old")).status == 200


def test_a_second_ack(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    message = remote.take(queue)
    remote.call("queue/ack", **receipt(message))
    for path in ("ack", "nack", "extend"):
        answer = remote.call(f"queue/{path}", **receipt(message))
        assert (answer.status, answer.error) == (404, "not_found")


def test_nack(remote: Remote, queue: str) -> None:
    sent = remote.enqueue(queue)
    first = remote.take(queue)
    answer = remote.call("queue/nack", **receipt(first, last_error={"detail": "broken"}))
    assert answer.status == 200
    found = answer.json
    assert (found["requeued"], found["correlation_id"]) == (True, sent["correlation_id"])
    assert found["meta_etag"] != first["meta_etag"]
    job = remote.app.ledger.get(sent["message_id"])
    assert job is not None
    assert job.error == '{"detail":"broken"}'
    second = remote.take(queue)
    assert (second["attempts"], second["failure_attempts"], second["fencing_token"]) == (2, 1, 2)
    assert second["lease_id"] != first["lease_id"]


def test_defer_is_no_failure(remote: Remote, queue: str) -> None:
    remote.enqueue(queue, max_attempts=1)
    for _ in range(3):
        answer = remote.call("queue/nack", **receipt(remote.take(queue), intent=" Defer "))
        assert answer.status == 200
    message = remote.take(queue)
    assert (message["attempts"], "failure_attempts" in message) == (4, False)


def test_the_last_failure_makes_a_dead_letter(remote: Remote, queue: str) -> None:
    sent = remote.enqueue(queue, max_attempts=2)
    for _ in range(2):
        assert remote.call("queue/nack", **receipt(remote.take(queue))).status == 200
    assert remote.dequeue(queue).error == "waiting"
    assert remote.app.queue(queue).stats().counts.failed == 1
    remote.app.job(sent["message_id"]).retry()
    assert remote.take(queue)["attempts"] == 3


def test_extend(remote: Remote, queue: str) -> None:
    sent = remote.enqueue(queue)
    message = remote.take(queue, visibility_timeout_seconds=10)
    answer = remote.call("queue/extend", **receipt(message, extend_by_seconds=5000))
    found = answer.json
    assert found["visibility_timeout_seconds"] == 5000
    assert found["lease_expires_at_unix"] >= message["lease_expires_at_unix"] + 4980
    assert found["correlation_id"] == sent["correlation_id"]
    job = remote.app.ledger.get(sent["message_id"])
    assert job is not None
    assert (job.lease_until or 0) // 1_000_000 == found["lease_expires_at_unix"]
    # The etag of the delivery is valid for the whole lease, and so is the new one.
    assert remote.call("queue/extend", **receipt(message, meta_etag=found["meta_etag"])).status == 200
    assert remote.call("queue/nack", **receipt(message)).status == 200


def test_an_extend_without_seconds_has_the_length_of_the_lease(local: Remote, queue: str) -> None:
    local.enqueue(queue)
    message = local.take(queue, visibility_timeout_seconds=77)
    assert local.call("queue/extend", **receipt(message)).json["visibility_timeout_seconds"] == 77


def test_receipts_of_a_stateful_delivery(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    [(message, _)] = remote.call("queue/dequeueWithState", queue=queue, owner="me").messages()
    state = {name: message[name] for name in ("state_lease_id", "state_fencing_token")}
    answer = remote.call("queue/extend", **receipt(message, extend_by_seconds=50, **state))
    assert answer.json["state_lease_expires_at_unix"] == answer.json["lease_expires_at_unix"]
    remote.app.engine.document(f"state/{message['message_id']}").save({"step": 1})
    answer = remote.call("queue/ack", **receipt(message, state_etag=message["state_etag"], **state))
    assert answer.status == 200
    assert remote.app.ledger.note(f"state/{message['message_id']}") is None


def test_after_a_nack(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    message = remote.take(queue)
    remote.call("queue/nack", **receipt(message, delay_seconds=1000))
    for path, code in (
        ("ack", "cas_mismatch"),
        ("nack", "cas_mismatch"),
        ("extend", "queue_message_lease_mismatch"),
    ):
        answer = remote.call(f"queue/{path}", **receipt(message))
        assert (answer.status, answer.error) == (409, code)


def test_after_a_redelivery(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    first = remote.take(queue)
    remote.call("queue/nack", **receipt(first))
    remote.take(queue)
    for path in ("ack", "nack", "extend"):
        answer = remote.call(f"queue/{path}", **receipt(first))
        assert (answer.status, answer.error) == (409, "queue_message_lease_mismatch")


def test_after_the_end_of_the_lease(timed: Remote, clock: ManualClock) -> None:
    """Until the message is given to another consumer or reaped, its holder may acknowledge it."""
    for _ in range(2):
        timed.enqueue("a")
    first, second = (timed.take("a", visibility_timeout_seconds=1) for _ in range(2))
    clock.advance(2)
    assert timed.call("queue/ack", **receipt(first)).status == 200
    lose_leases(timed, clock, 2)
    for path in ("ack", "nack", "extend"):
        answer = timed.call(f"queue/{path}", **receipt(second))
        assert (answer.status, answer.error) == (409, "queue_message_lease_mismatch")


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_id": "0" * 20},
        {"fencing_token": 7},
        {"txn_id": "0" * 20},
        {"state_lease_id": "0" * 20},
        {"state_fencing_token": 9},
    ],
)
@pytest.mark.parametrize("path", ["ack", "nack", "extend"])
def test_ids_of_another_lease(local: Remote, queue: str, path: str, wrong: dict[str, Any]) -> None:
    local.enqueue(queue)
    message = local.take(queue)
    answer = local.call(f"queue/{path}", **receipt(message, **wrong))
    assert (answer.status, answer.error) == (409, "queue_message_lease_mismatch")
    assert local.call("queue/ack", **receipt(message)).status == 200


@pytest.mark.parametrize("path", ["nack", "extend"])
def test_an_outdated_etag(local: Remote, queue: str, path: str) -> None:
    local.enqueue(queue)
    answer = local.call(f"queue/{path}", **receipt(local.take(queue), meta_etag="old"))
    assert (answer.status, answer.error) == (409, "cas_mismatch")


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("ack", {}, "missing_fields"),
        ("ack", {"queue": "a", "message_id": "x"}, "missing_fields"),
        ("nack", {"queue": "a", "message_id": "x", "lease_id": "y"}, "missing_fields"),
        ("extend", {"queue": "a", "message_id": "x", "lease_id": "y"}, "missing_fields"),
        ("ack", {"queue": "a b", "message_id": "x", "lease_id": "y"}, "invalid_queue"),
        ("ack", {"queue": "a", "message_id": "x", "lease_id": "y", "namespace": "a/b"}, "invalid_namespace"),
        ("ack", {"queue": "a", "message_id": "x", "lease_id": "y", "delay_seconds": 1}, "invalid_body"),
        ("nack", {"intent": "later"}, "invalid_nack_intent"),
        ("nack", {"intent": "defer", "last_error": "x"}, "invalid_nack_last_error"),
        ("nack", {"delay_seconds": 10**18}, "invalid_body"),
    ],
)
def test_bad_requests(local: Remote, path: str, fields: dict[str, Any], code: str) -> None:
    answer = local.call(f"queue/{path}", **fields)
    assert (answer.status, answer.error) == (400, code)


@pytest.mark.parametrize("id", ["x", "x" * 300, "a\0b", "01a1e8b9-7969-7cc9-a9d1-23886514339b"])
def test_unknown_messages(remote: Remote, id: str) -> None:
    answer = remote.call("queue/ack", queue="a", message_id=id, lease_id="y")
    assert (answer.status, answer.error) == (404, "not_found")


def test_a_message_of_another_queue(local: Remote, queue: str) -> None:
    local.enqueue(queue)
    message = local.take(queue)
    for other in ({"queue": "other"}, {"namespace": "other"}):
        assert local.call("queue/ack", **receipt(message) | other).error == "not_found"


@pytest.mark.parametrize("path", ["ack", "nack", "extend"])
def test_an_empty_body_is_refused(local: Remote, path: str) -> None:
    assert local.post(f"/v1/queue/{path}").error == "invalid_body"


def test_another_server_takes_the_receipt() -> None:
    with App("memory://") as app, serving(app) as one, serving(app) as two:
        one.enqueue("a")
        first = two.take("a")
        assert two.call("queue/nack", **receipt(first)).status == 200
        second = one.take("a")
        # Each server remembers another delivery; the ledger decides.
        assert one.call("queue/ack", **receipt(first)).error == "queue_message_lease_mismatch"
        assert two.call("queue/extend", **receipt(second, extend_by_seconds=9)).status == 200
        assert two.call("queue/ack", **receipt(second)).status == 200
        # The first server still remembers the delivery, and the ledger repeats the outcome of the claim.
        assert one.call("queue/ack", **receipt(second)).status == 200
        assert one.call("queue/ack", **receipt(second)).error == "not_found"


def test_a_nack_reaches_a_waiter_at_once_beside_many_waited_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """With so many queues a batch does not claim for all of them, and the pass over all is far away."""
    monkeypatch.setattr(dispatcher, "PASS_INTERVAL", 3600.0)
    monkeypatch.setattr(dispatcher, "MAX_PASS_PAUSE", 3600.0)
    monkeypatch.setattr(dispatcher, "PASS_SHARE", 10**9)
    with App("memory://") as app, serving(app, max_consumers=1000) as remote, ExitStack() as stack:
        for number in range(dispatcher.ALL_LINES + 10):
            other = stack.enter_context(remote.connect())
            other.request("/v1/queue/dequeue", json.dumps({"queue": f"q{number}", "owner": "a"}).encode())
        until(lambda: app.engine.dispatcher.waiting == dispatcher.ALL_LINES + 10)
        remote.enqueue("q0", b"taken")
        remote.enqueue("a", b"x")
        message = remote.take("a")
        wire = stack.enter_context(remote.connect())
        wire.request("/v1/queue/dequeue", b'{"queue":"a","owner":"b"}')
        until(lambda: remote.call("queue/stats", queue="a").json["waiting_consumers"] == 1)
        assert remote.call("queue/nack", **receipt(message)).status == 200
        [(again, payload)] = wire.answer().messages()
        assert (again["attempts"], payload) == (2, b"x")
