"""enqueueMany and ackMany, and the fields of an enqueue that lockd does not have."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from tests.support.wire import Remote, lose_leases, serving
from towpath import App, State
from towpath.commands import Query
from towpath.testing import ManualClock


def receipts(messages: list[tuple[dict[str, Any], bytes]]) -> list[dict[str, Any]]:
    names = ("message_id", "lease_id", "fencing_token")
    return [{name: meta[name] for name in names} for meta, _ in messages]


def test_many_messages(remote: Remote, queue: str) -> None:
    answer = remote.ask(
        "POST",
        "queue/enqueueMany",
        {
            "queue": queue,
            "messages": [
                {"payload_json": {"n": 1}, "attributes": {"a": "b"}},
                {"payload_text": "zwei", "correlation_id": "mine"},
                {"payload_base64": base64.b64encode(b"\xff\0").decode(), "payload_content_type": "x/y"},
                {},
            ],
        },
    )
    assert answer.status == 200, answer
    found = answer.json["messages"]
    assert [each["payload_bytes"] for each in found] == [7, 4, 2, 0]
    assert found[1]["correlation_id"] == "mine"
    delivered = remote.dequeue(queue, page_size=10).messages()
    assert [payload for _, payload in delivered] == [b'{"n":1}', b"zwei", b"\xff\0", b""]
    assert [meta["message_id"] for meta, _ in delivered] == [each["message_id"] for each in found]
    kinds = [meta["payload_content_type"] for meta, _ in delivered]
    assert kinds == ["application/json", "text/plain; charset=utf-8", "x/y", "application/octet-stream"]
    acked = remote.ask("POST", "queue/ackMany", {"queue": queue, "receipts": receipts(delivered)})
    assert acked.json["acked"] == 4
    assert remote.app.queue(queue).stats().counts.done == 4


def test_one_wrong_message_stores_none(remote: Remote, queue: str) -> None:
    for wrong, text in (
        ({"payload_base64": "%"}, "base64"),
        ({"payload_text": "a", "payload_json": 1}, "exclude each other"),
        ({"priority": "urgent"}, "priority"),
        ({"delay_ms": 1, "delay_seconds": 1}, "exclude each other"),
        ({"dedupe_window_ms": 1}, "dedupe_key"),
        ({"payload_content_type": "\n"}, "payload_content_type"),
        ({"ttl_seconds": 2**60}, "ttl"),
    ):
        answer = remote.ask("POST", "queue/enqueueMany", {"queue": queue, "messages": [{}, wrong]})
        assert (answer.status, answer.error) == (400, "invalid_body"), answer
        assert answer.json["detail"].startswith("messages[1]: ")
        assert text in answer.json["detail"]
        assert answer.json["next_step"]
    assert remote.dequeue(queue).error == "waiting"


def test_messages_of_several_queues(remote: Remote, queue: str) -> None:
    messages = [{"queue": f"{queue}-a"}, {"namespace": "far", "queue": queue}, {}]
    answer = remote.ask("POST", "queue/enqueueMany", {"queue": queue, "messages": messages})
    assert [(each["namespace"], each["queue"]) for each in answer.json["messages"]] == [
        ("default", f"{queue}-a"),
        ("far", queue),
        ("default", queue),
    ]
    taken = remote.take(queue, namespace="far")
    receipt = {name: taken[name] for name in ("namespace", "queue", "message_id", "lease_id")}
    answer = remote.ask("POST", "queue/ackMany", {"receipts": [receipt]})
    assert answer.json["acked"] == 1


def test_each_receipt_has_its_result(remote: Remote, queue: str) -> None:
    for number in range(4):
        remote.enqueue(queue, b"%d" % number)
    good = remote.dequeue(queue, page_size=4).messages()
    done, again, *rest = receipts(good)
    remote.call("queue/ack", queue=queue, **done)
    remote.call("queue/nack", queue=queue, meta_etag=good[1][0]["meta_etag"], **again)
    asked = [
        done,
        again,
        {**rest[0], "lease_id": "0" * 20},
        rest[1],
        rest[1],
        {"message_id": "nothing", "lease_id": "x"},
        {"message_id": "\0", "lease_id": "x"},
    ]
    answer = remote.ask("POST", "queue/ackMany", {"queue": queue, "receipts": asked})
    assert answer.status == 200
    assert [(each["acked"], each.get("error")) for each in answer.json["results"]] == [
        (False, "not_found"),
        (False, "cas_mismatch"),
        (False, "queue_message_lease_mismatch"),
        (True, None),
        (True, None),
        (False, "not_found"),
        (False, "not_found"),
    ]
    assert answer.json["acked"] == 2
    counts = remote.app.queue(queue).stats().counts
    assert (counts.done, counts.running, counts.ready) == (2, 1, 1)


def test_a_server_that_delivered_none_of_them(remote: Remote, queue: str) -> None:
    for _ in range(3):
        remote.enqueue(queue)
    asked = receipts(remote.dequeue(queue, page_size=3).messages())
    with serving(remote.app) as other:
        answer = other.ask("POST", "queue/ackMany", {"queue": queue, "receipts": asked})
        assert answer.json["acked"] == 3


def test_a_lost_lease(timed: Remote, clock: ManualClock, queue: str) -> None:
    timed.enqueue(queue)
    asked = receipts(timed.dequeue(queue, visibility_timeout_seconds=5).messages())
    lose_leases(timed, clock, 10)
    answer = timed.ask("POST", "queue/ackMany", {"queue": queue, "receipts": asked})
    assert answer.json["results"][0]["error"] == "queue_message_lease_mismatch"


def test_the_state_is_removed_with_its_message(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    taken = remote.call("queue/dequeueWithState", queue=queue, owner="me", wait_seconds=-1).messages()
    [(meta, _)] = taken
    key = f"q/{queue}/state/{meta['message_id']}"
    headers = {
        "X-Lease-ID": meta["state_lease_id"],
        "X-Txn-ID": meta["state_txn_id"],
        "X-Fencing-Token": str(meta["state_fencing_token"]),
    }
    assert remote.post(f"/v1/update?key={key}", b'{"a":1}', headers).status == 200
    body = {"queue": queue, "receipts": receipts(taken)}
    assert remote.ask("POST", "queue/ackMany", body).json["acked"] == 1
    assert remote.app.ledger.note(f"state/{meta['message_id']}") is None


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("enqueueMany", {"messages": []}, "invalid_body"),
        ("enqueueMany", {"messages": [{}] * 1001}, "invalid_body"),
        ("enqueueMany", {"messages": [{}]}, "missing_queue"),
        ("enqueueMany", {"queue": "a b", "messages": [{}]}, "invalid_queue"),
        ("enqueueMany", {"queue": "a", "messages": [{"color": 1}]}, "invalid_body"),
        ("ackMany", {"queue": "a", "receipts": []}, "invalid_body"),
        ("ackMany", {"receipts": [{"message_id": "a", "lease_id": "b"}]}, "missing_queue"),
        ("ackMany", {"queue": "a", "receipts": [{"message_id": "a"}]}, "invalid_body"),
    ],
)
def test_wrong_requests(local: Remote, path: str, body: dict[str, Any], code: str) -> None:
    answer = local.ask("POST", f"queue/{path}", body)
    assert (answer.status, answer.error) == (400, code)


def test_too_large(local: Remote) -> None:
    message = {"payload_text": "x" * 5_000_000}
    answer = local.ask("POST", "queue/enqueueMany", {"queue": "a", "messages": [message] * 2})
    assert (answer.status, answer.error) == (413, "body_too_large")


def test_other_media_and_methods(local: Remote) -> None:
    answer = local.post("/v1/queue/ackMany", b"{}", {"Content-Type": "text/plain"})
    assert (answer.status, answer.error) == (415, "unsupported_media_type")
    answer = local.ask("GET", "queue/ackMany")
    assert (answer.status, answer.error, answer.headers["allow"]) == (405, "method_not_allowed", "POST")
    answer = local.ask("POST", "queue/ackMany", {}, queue="x")
    assert (answer.status, answer.error) == (400, "invalid_argument")


def test_a_dedupe_key(remote: Remote, queue: str) -> None:
    key = f"{queue}-once"
    first = remote.enqueue(queue, b"1", dedupe_key=key)
    second = remote.enqueue(queue, b"2", dedupe_key=key)
    assert (second["message_id"], second["duplicate"]) == (first["message_id"], True)
    assert "duplicate" not in first
    answer = remote.ask("POST", "queue/enqueueMany", {"queue": queue, "messages": [{"dedupe_key": key}, {}]})
    assert [each.get("duplicate", False) for each in answer.json["messages"]] == [True, False]
    assert len(remote.dequeue(queue, page_size=5).messages()) == 2


def test_a_dedupe_window(clock: ManualClock, queue: str) -> None:
    with App("memory://", clock=clock) as app, serving(app) as remote:
        options: dict[str, Any] = {"dedupe_key": "k", "dedupe_window_ms": 1500}
        first = remote.enqueue(queue, **options)
        taken = remote.take(queue)
        names = ("queue", "message_id", "lease_id")
        assert remote.call("queue/ack", **{name: taken[name] for name in names}).status == 200
        assert remote.enqueue(queue, **options)["message_id"] == first["message_id"]
        clock.advance(2)
        assert remote.enqueue(queue, **options)["message_id"] != first["message_id"]


def test_priority_part_and_milliseconds(timed: Remote, clock: ManualClock, queue: str) -> None:
    timed.enqueue(queue, b"low", priority="low")
    timed.enqueue(queue, b"high", priority=0)
    timed.enqueue(queue, b"later", priority=-1, delay_ms=1500, ttl_ms=2500)
    payloads = [payload for _, payload in timed.dequeue(queue, page_size=5).messages()]
    assert payloads == [b"high", b"low"]
    [later] = timed.app.ledger.find(Query(queue=queue, states=(State.SCHEDULED,))).jobs
    spans = later.ready_at - later.created_at, (later.expires_at or 0) - later.created_at
    assert spans == (1_500_000, 2_500_000)
    clock.advance(1.6)
    assert timed.dequeue(queue).messages()[0][1] == b"later"
    job = timed.app.ledger.get(timed.enqueue(queue, part="ada")["message_id"])
    assert job is not None
    assert job.part == "ada"


def test_names_of_priorities_are_those_of_the_app(queue: str) -> None:
    with App("memory://", priorities={"urgent": -10}) as app, serving(app) as remote:
        id = remote.enqueue(queue, priority="urgent")["message_id"]
        job = app.ledger.get(id)
        assert job is not None
        assert job.priority == -10


def test_unknown_fields_of_an_enqueue_are_ignored(local: Remote, queue: str) -> None:
    assert json.dumps(local.enqueue(queue, color="red"))
