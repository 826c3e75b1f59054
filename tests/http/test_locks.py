"""Leases on keys and their documents; the state of a message."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest

from tests.support.waiting import until
from tests.support.wire import Answer, Remote, receipt, serving
from towpath import App
from towpath.testing import ManualClock

XID = re.compile("[0-9a-v]{19}[0g]")


def acquire(remote: Remote, key: str, **fields: Any) -> dict[str, Any]:
    answer = remote.call("acquire", **{"key": key, "owner": "me", "block_seconds": -1, **fields})
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


def headers(lease: dict[str, Any], **more: str) -> dict[str, str]:
    fields = {"X-Lease-ID": "lease_id", "X-Txn-ID": "txn_id", "X-Fencing-Token": "fencing_token"}
    return {name: str(lease[field]) for name, field in fields.items()} | more


def keyed(remote: Remote, verb: str, lease: dict[str, Any], body: bytes = b"", **more: str) -> Answer:
    path = f"/v1/{verb}?key={lease['key']}&namespace={lease['namespace']}"
    return remote.post(
        path, body, headers(lease, **{name.replace("_", "-"): each for name, each in more.items()})
    )


def named(lease: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {name: lease[name] for name in ("namespace", "key", "lease_id", "txn_id")} | more


def call(remote: Remote, verb: str, lease: dict[str, Any], **more: Any) -> Answer:
    body = json.dumps(named(lease, **more)).encode()
    return remote.post(f"/v1/{verb}", body, {"X-Fencing-Token": str(lease["fencing_token"])})


def state_of(message: dict[str, Any]) -> dict[str, Any]:
    """The lease of the state of a message."""
    return {
        "namespace": message["namespace"],
        "key": f"q/{message['queue']}/state/{message['message_id']}",
        "lease_id": message["state_lease_id"],
        "txn_id": message["state_txn_id"],
        "fencing_token": message["state_fencing_token"],
    }


def test_a_lease(remote: Remote, queue: str) -> None:
    answer = remote.call("acquire", key=queue, owner="me", ttl_seconds=60)
    found = answer.json
    assert list(found) == [
        "namespace",
        "lease_id",
        "txn_id",
        "key",
        "owner",
        "expires_at_unix",
        "version",
        "fencing_token",
        "correlation_id",
    ]
    assert XID.fullmatch(found["lease_id"])
    assert XID.fullmatch(found["txn_id"])
    assert (found["key"], found["owner"], found["version"], found["fencing_token"]) == (queue, "me", 0, 1)
    assert (answer.headers["x-fencing-token"], answer.headers["x-key-version"]) == ("1", "0")
    other = remote.call("acquire", key=queue, owner="other", block_seconds=-1)
    assert (other.status, other.error) == (409, "waiting")
    assert 1 <= int(other.headers["retry-after"]) <= 60
    kept = call(remote, "keepalive", found, ttl_seconds=1000)
    assert kept.json["expires_at_unix"] >= found["expires_at_unix"] + 900
    assert kept.headers["x-fencing-token"] == "1"
    for _ in range(2):
        assert call(remote, "release", found).json == {"released": True}
    assert acquire(remote, queue)["fencing_token"] == 2


def test_a_document_is_published_by_the_release(remote: Remote, queue: str) -> None:
    lease = acquire(remote, queue)
    assert keyed(remote, "get", lease).status == 204
    answer = keyed(remote, "update", lease, b'{ "a": [1, 2],\n "b": "<x>" }')
    content = b'{"a":[1,2],"b":"<x>"}'
    etag = hashlib.sha256(content).hexdigest()
    assert answer.json == {"new_version": 1, "new_state_etag": etag, "bytes": len(content), "metadata": {}}
    assert (answer.headers["etag"], answer.headers["x-key-version"]) == (etag, "1")
    mine = keyed(remote, "get", lease)
    assert (mine.status, mine.body, mine.headers["etag"]) == (200, content, etag)
    assert (mine.headers["x-key-version"], mine.headers["x-fencing-token"]) == ("1", "1")
    public = f"/v1/get?key={queue}&public=1"
    assert remote.post(public).status == 204
    call(remote, "release", lease)
    assert remote.post(public).body == content
    lease = acquire(remote, queue)
    assert (lease["version"], lease["state_etag"]) == (1, etag)
    assert keyed(remote, "update", lease, b"2").json["new_version"] == 2
    assert keyed(remote, "update", lease, b"3").json["new_version"] == 3
    call(remote, "release", lease, rollback=True)
    assert remote.post(public).body == content
    lease = acquire(remote, queue)
    assert keyed(remote, "remove", lease).json == {"removed": True, "new_version": 2}
    assert keyed(remote, "remove", lease).json == {"removed": False, "new_version": 2}
    assert keyed(remote, "get", lease).status == 204
    call(remote, "release", lease)
    assert remote.post(public).status == 204


def test_what_an_expired_lease_staged_is_dropped(timed: Remote, clock: ManualClock) -> None:
    lease = acquire(timed, "a", ttl_seconds=10)
    keyed(timed, "update", lease, b"1")
    clock.advance(10)
    for answer in (
        keyed(timed, "get", lease),
        keyed(timed, "update", lease, b"2"),
        keyed(timed, "remove", lease),
        call(timed, "keepalive", lease),
    ):
        assert (answer.status, answer.error) == (403, "lease_expired")
    assert call(timed, "release", lease).json == {"released": True}
    new = acquire(timed, "a")
    assert (new["fencing_token"], new["version"]) == (2, 0)
    assert keyed(timed, "get", new).status == 204
    assert keyed(timed, "get", lease).error == "lease_required"


def test_conditions(local: Remote, queue: str) -> None:
    lease = acquire(local, queue)
    etag = keyed(local, "update", lease, b"1").json["new_state_etag"]
    for verb in ("update", "remove"):
        answer = keyed(local, verb, lease, b"2", X_If_Version="7")
        assert (answer.status, answer.error) == (409, "version_conflict")
        assert (answer.json["current_version"], answer.json["current_etag"]) == (1, etag)
        assert keyed(local, verb, lease, b"2", X_If_State_ETag="no").error == "etag_mismatch"
    assert keyed(local, "update", lease, b"2", X_Expected_Bytes="2").error == "expected_bytes_mismatch"
    assert keyed(local, "update", lease, b"2", X_Expected_SHA256="0").error == "expected_sha256_mismatch"
    good = {"X_If_Version": "1", "X_If_State_ETag": etag, "X_Expected_Bytes": "1"}
    digest = hashlib.sha256(b"2").hexdigest()
    assert keyed(local, "update", lease, b"2", X_Expected_SHA256=digest, **good).status == 200
    call(local, "release", lease)
    refused = local.call("acquire", key=queue, owner="x", if_not_exists=True)
    assert (refused.status, refused.error) == (409, "already_exists")


def test_waiting_for_a_lease(remote: Remote, queue: str) -> None:
    lease = acquire(remote, queue)
    with remote.connect() as wire:
        wire.request("/v1/acquire", json.dumps({"key": queue, "owner": "next"}).encode())
        call(remote, "release", lease)
        assert wire.answer().json["fencing_token"] == 2


def test_a_bounded_wait_for_a_lease(local: Remote, queue: str) -> None:
    acquire(local, queue)
    refused = local.call("acquire", key=queue, owner="x", block_seconds=1)
    assert (refused.status, refused.error) == (409, "waiting")


def test_a_client_that_leaves_while_it_waits_gets_no_lease(local: Remote, queue: str) -> None:
    lease = acquire(local, queue)
    with local.connect() as wire:
        wire.request("/v1/acquire", json.dumps({"key": queue, "owner": "next", "ttl_seconds": 900}).encode())
        local.call("acquire", key=queue, owner="x", block_seconds=1)
    call(local, "release", lease)
    until(lambda: local.call("acquire", key=queue, owner="x", block_seconds=-1).status == 200)


def test_an_expired_lease_is_taken_over(timed: Remote, clock: ManualClock) -> None:
    acquire(timed, "a", ttl_seconds=100)
    with timed.connect() as wire:
        wire.request("/v1/acquire", b'{"key":"a","owner":"next"}')
        clock.advance(100)
        assert wire.answer().json["owner"] == "next"


def test_several_servers_share_a_key() -> None:
    with App("memory://") as app, serving(app) as one, serving(app) as two:
        lease = acquire(one, "a")
        with two.connect() as wire:
            wire.request("/v1/acquire", b'{"key":"a","owner":"next"}')
            assert call(two, "keepalive", lease).status == 200
            call(one, "release", lease)
            assert wire.answer().json["fencing_token"] == 2


def test_describe(remote: Remote, queue: str) -> None:
    path = f"/v1/describe?key={queue}"
    assert remote.post(path).json == {"namespace": "default", "key": queue, "version": 0, "metadata": {}}
    lease = acquire(remote, queue)
    found = remote.post(path).json
    assert (found["owner"], found["lease_id"]) == ("me", lease["lease_id"])
    assert found["expires_at_unix"] == lease["expires_at_unix"]


def test_a_key_of_the_server(local: Remote) -> None:
    lease = acquire(local, "", txn_id="0123456789abcdefghi0")
    assert lease["txn_id"] == "0123456789abcdefghi0"
    assert len(lease["key"]) == 36


@pytest.mark.parametrize(
    ("change", "verbs", "status", "code"),
    [
        ({"lease_id": "0" * 20}, ("get", "update", "remove"), 403, "lease_required"),
        ({"fencing_token": 9}, ("get", "update", "remove"), 403, "fencing_mismatch"),
        ({"fencing_token": "x"}, ("get", "update", "remove"), 400, "invalid_fencing_token"),
        ({"txn_id": ""}, ("update", "remove"), 400, "missing_txn"),
        ({"txn_id": "0" * 20}, ("update", "remove"), 409, "txn_mismatch"),
        ({"lease_id": ""}, ("get", "update", "remove"), 400, "missing_params"),
        ({"key": ""}, ("get", "update", "remove"), 400, "missing_params"),
        ({"namespace": ".x"}, ("get", "update", "remove"), 400, "invalid_namespace"),
        ({"key": "k" * 200}, ("get", "update", "remove"), 400, "invalid_key"),
    ],
)
def test_wrong_leases(
    local: Remote, queue: str, change: dict[str, Any], verbs: tuple[str, ...], status: int, code: str
) -> None:
    lease = acquire(local, queue) | change
    for verb in verbs:
        answer = keyed(local, verb, lease, b"1")
        assert (answer.status, answer.error) == (status, code)


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("acquire", b"{}", "missing_owner"),
        ("acquire", b'{"owner":"a","unknown":1}', "invalid_body"),
        ("acquire", b'{"owner":"a","txn_id":"x"}', "invalid_txn"),
        ("acquire", b'{"owner":"a","key":"a b"}', "invalid_key"),
        ("acquire", b'{"owner":"a","key":"a\\u0000b"}', "invalid_key"),
        ("acquire", b'{"owner":"a","key":"q/a/state/b"}', "invalid_key"),
        ("acquire", b'{"owner":"a","namespace":"a/b"}', "invalid_namespace"),
        ("keepalive", b"", "invalid_body"),
        ("keepalive", b"{}", "missing_key"),
        ("keepalive", b'{"key":"a"}', "missing_lease"),
        ("keepalive", b'{"key":"a","lease_id":"b"}', "missing_fencing_token"),
        ("release", b"{}", "missing_key"),
        ("release", b'{"key":"a","lease_id":"b"}', "missing_fencing_token"),
        ("update", b"{}", "missing_params"),
        ("describe", b"", "missing_key"),
    ],
)
def test_bad_requests(local: Remote, path: str, body: bytes, code: str) -> None:
    answer = local.post(f"/v1/{path}", body)
    assert (answer.status, answer.error) == (400, code)


def test_documents_that_are_refused(local: Remote, queue: str) -> None:
    lease = acquire(local, queue)
    for body in (b"", b"{", b"\xff", b"1 2", b"[" * 5000):
        assert keyed(local, "update", lease, body).error == "invalid_body"
    large = keyed(local, "update", lease, b'"%s"' % (b"x" * 100_000))
    assert (large.status, large.error) == (413, "document_too_large")
    assert keyed(local, "update", lease, b'"%s"' % (b"x" * 99_998)).status == 200
    call(local, "release", lease)
    lease = acquire(local, queue)
    assert keyed(local, "update", lease, b'"%s"' % (b"y" * 99_998)).status == 200


def test_the_state_of_a_message(remote: Remote, queue: str) -> None:
    remote.enqueue(queue, namespace="team")
    asked = {"queue": queue, "namespace": "team", "owner": "me"}
    [(message, _)] = remote.call("queue/dequeueWithState", **asked).messages()
    state = state_of(message)
    assert keyed(remote, "get", state).status == 204
    version = keyed(remote, "update", state, b'{"step": 1}').json["new_version"]
    assert keyed(remote, "update", state, b"2", X_If_Version=str(version + 1)).error == "version_conflict"
    assert call(remote, "release", state).json == {"released": True}
    remote.call("queue/nack", **receipt(message))
    lost = keyed(remote, "get", state)
    assert (lost.status, lost.error) == (409, "queue_message_lease_mismatch")
    # The state of a message in Python is the same document.
    with remote.app.queue(f"team/{queue}").get(wait=None) as again:
        assert again.state.value == {"step": 1}
        again.nack()
    [(message, _)] = remote.call("queue/dequeueWithState", **asked).messages()
    state = state_of(message)
    assert keyed(remote, "get", state).body == b'{"step":1}'
    assert keyed(remote, "remove", state).json["removed"] is True
    assert keyed(remote, "get", state).status == 204
    keyed(remote, "update", state, b"3")
    kept = call(remote, "keepalive", state)
    assert (kept.status, kept.error) == (403, "queue_state_keepalive_unsupported")
    fields = {"state_lease_id": state["lease_id"], "state_fencing_token": state["fencing_token"]}
    assert remote.call("queue/ack", **receipt(message, **fields)).status == 200
    assert remote.app.ledger.note(f"state/{message['message_id']}") is None
    assert keyed(remote, "get", state).error == "queue_message_lease_mismatch"
    state["key"] = f"q/{queue}/state/unknown"
    assert keyed(remote, "get", state).error == "not_found"


def test_a_state_is_written_after_it_was_removed(remote: Remote, queue: str) -> None:
    """lockd's client sends the last version that it has seen, with every write."""
    remote.enqueue(queue)
    [(message, _)] = remote.call("queue/dequeueWithState", queue=queue, owner="me").messages()
    state = state_of(message)
    version = keyed(remote, "update", state, b"1").json["new_version"]
    removed = keyed(remote, "remove", state, X_If_Version=str(version)).json
    assert removed["removed"] is True
    assert removed["new_version"] > version
    for seen in (version, removed["new_version"]):
        assert keyed(remote, "update", state, b"2", X_If_Version=str(seen)).status == 200
        assert keyed(remote, "remove", state).json["removed"] is True
    assert keyed(remote, "get", state).status == 204


def test_a_negative_time(remote: Remote, queue: str) -> None:
    answer = remote.call("acquire", key=queue, owner="me", ttl_seconds=-1)
    assert (answer.status, answer.error) == (400, "invalid_ttl")
    assert remote.call("acquire", key=queue, owner="me", ttl_seconds=0).status == 200


def test_a_field_that_is_null_is_left_out(remote: Remote, queue: str) -> None:
    assert remote.call("acquire", key=queue, owner="me", ttl_seconds=None, txn_id=None).status == 200
    assert remote.call("acquire", key=queue, owner=None).error == "missing_owner"
    assert remote.call("acquire", key=queue, owner="me", ttl_seconds="x").error == "invalid_body"
    assert remote.call("acquire", key=queue, owner="me", unknown=None).error == "invalid_body"
