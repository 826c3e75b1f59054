"""Enqueue: the multipart request, its answer, and every way in which it can be wrong."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.wire import MULTIPART, Remote, form, serving
from towpath import App

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


def test_the_answer(local: Remote, queue: str) -> None:
    body = form(
        ("meta", json.dumps({"queue": queue, "visibility_timeout_seconds": 7}).encode()), ("payload", b"abc")
    )
    answer = local.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    found = answer.json
    assert list(found) == [
        "namespace",
        "queue",
        "message_id",
        "attempts",
        "max_attempts",
        "not_visible_until_unix",
        "visibility_timeout_seconds",
        "payload_bytes",
        "correlation_id",
    ]
    assert UUID7.fullmatch(found["message_id"])
    assert UUID7.fullmatch(found["correlation_id"])
    assert answer.headers["x-correlation-id"] == found["correlation_id"]
    assert (found["namespace"], found["queue"], found["attempts"]) == ("default", queue, 0)
    assert (found["max_attempts"], found["visibility_timeout_seconds"], found["payload_bytes"]) == (5, 7, 3)


def test_chunked_and_in_single_bytes(local: Remote, queue: str) -> None:
    """The client of lockd sends no Content-Length."""
    with local.connect() as wire:
        wire.send(
            b"POST /v1/queue/enqueue HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: multipart/related; boundary=B\r\n\r\n"
        )
        body = form(("meta", json.dumps({"queue": queue}).encode()), ("payload", b"\r\n--\r\r\n-B"))
        for byte in body:
            wire.send(b"1\r\n%c\r\n" % byte)
        wire.send(b"0\r\n\r\n")
        assert wire.answer().status == 200
    [(meta, payload)] = local.dequeue(queue).messages()
    assert payload == b"\r\n--\r\r\n-B"
    assert meta["payload_bytes"] == len(payload)


def test_attributes_and_content_type_come_back(remote: Remote, queue: str) -> None:
    attributes = {
        "a": "text",
        "n": 9_007_199_254_740_993,
        "deep": {"x": [1, None, "\0"]},
        "": "empty",
        "z": "\0",
    }
    remote.enqueue(
        queue, b"1", attributes=attributes, payload_content_type="text/x-é".encode().decode()[:6] + "y"
    )
    message = remote.take(queue)
    assert message["attributes"] == attributes
    assert message["payload_content_type"] == "text/xy"


def test_a_message_of_the_library_has_its_headers_as_attributes(remote: Remote, queue: str) -> None:
    remote.app.queue(queue).put({"id": 1}, headers={"tenant": "seven"}, correlation_id="c-1")
    message = remote.take(queue)
    assert message["attributes"] == {"tenant": "seven"}
    assert message["payload_content_type"] == "application/json"
    assert message["correlation_id"] == "c-1"


def test_the_library_receives_what_a_client_enqueued(remote: Remote, queue: str) -> None:
    id = remote.enqueue(queue, b'{"id": 1}', attributes={"tenant": "seven"})["message_id"]
    with remote.app.queue(queue).get(wait=None) as message:
        assert (message.id, message.json(), message.headers) == (id, {"id": 1}, {"tenant": "seven"})
        message.ack()


def test_a_namespace_is_part_of_the_name(local: Remote, queue: str) -> None:
    local.enqueue(queue.upper(), b"there", namespace=" Team.A ")
    assert local.dequeue(queue).error == "waiting"
    assert local.take(queue.title(), namespace="team.a")["queue"] == queue


def test_the_queue_of_the_query_string_is_for_a_meta_without_one(local: Remote, queue: str) -> None:
    for body in (form(("payload", b"x")), form(("meta", b"{}"), ("payload", b"x"))):
        answer = local.post(f"/v1/queue/enqueue?queue={queue}", body, {"Content-Type": MULTIPART})
        assert answer.json["queue"] == queue


@pytest.mark.parametrize(
    ("parts", "payload"),
    [
        ((), b""),
        ((("payload", b""),), b""),
        ((("other", b"abc"),), b""),
        ((("other", b"abc"), ("payload", b"x"), ("payload", b"y")), b"x"),
    ],
)
def test_parts(local: Remote, queue: str, parts: tuple[tuple[str, bytes], ...], payload: bytes) -> None:
    body = form(("meta", json.dumps({"queue": queue, "unknown": 1}).encode()), *parts)
    assert local.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART}).status == 200
    assert [found for _, found in local.dequeue(queue).messages()] == [payload]


@pytest.mark.parametrize(
    ("body", "content_type", "code"),
    [
        (b"{}", "application/json", "invalid_content_type"),
        (b"", "multipart/related", "invalid_content_type"),
        (b"", "multipart/related; boundary=" + "x" * 300, "invalid_content_type"),
        (b"", MULTIPART, "multipart_error"),
        (b"no boundary", MULTIPART, "multipart_error"),
        (form(("meta", b'{"queue":"a"}'), ("payload", b"abc"), end=b""), MULTIPART, "multipart_error"),
        (form(("meta", b'{"queue":"a"}'), end=b""), MULTIPART, "multipart_error"),
        (b"--B\r\n\r\nx\r\n--B--\r\n", MULTIPART, "multipart_error"),
        (
            b"--B\r\nContent-Disposition: form-data; name=meta\r\n" + b"X: y\r\n" * 9,
            MULTIPART,
            "multipart_error",
        ),
        (b"--B\r\n" + b"x" * 10_000, MULTIPART, "multipart_error"),
        (b"".join([b"--B\r\nContent-Disposition: form-data\r\n\r\n\r\n"] * 50), MULTIPART, "multipart_error"),
        (form(("payload", b"")), MULTIPART, "missing_queue"),
        (form(("meta", b"{}")), MULTIPART, "missing_queue"),
        (form(("meta", b'{"queue":"a b"}')), MULTIPART, "invalid_queue"),
        (form(("meta", b'{"queue":"../a"}')), MULTIPART, "invalid_queue"),
        (form(("meta", '{"queue":"ä"}'.encode())), MULTIPART, "invalid_queue"),
        (form(("meta", b'{"queue":"%s"}' % (b"a" * 129))), MULTIPART, "invalid_queue"),
        (form(("meta", b'{"queue":"a","namespace":".x"}')), MULTIPART, "invalid_namespace"),
        (form(("meta", b'{"queue":"a","namespace":"x/y"}')), MULTIPART, "invalid_namespace"),
        (form(("meta", b"{")), MULTIPART, "invalid_body"),
        (form(("meta", b'{"queue":"a"} {}')), MULTIPART, "invalid_body"),
        (form(("meta", b'{"queue":"\xff"}')), MULTIPART, "invalid_body"),
        (form(("meta", b'{"queue":"a","attributes":[]}')), MULTIPART, "invalid_body"),
        (form(("meta", b'{"queue":"a","delay_seconds":1.5}')), MULTIPART, "invalid_body"),
        (form(("meta", b'{"queue":"a","delay_seconds":99999999999}')), MULTIPART, "invalid_body"),
        (form(("meta", b'{"queue":"a","max_attempts":9999999}')), MULTIPART, "invalid_body"),
        (form(("meta", b'{"queue":"a","payload_content_type":"a\\r\\nb"}')), MULTIPART, "invalid_body"),
        (
            form(("meta", b'{"queue":"a","attributes":{"x":"%s"}}' % (b"x" * 70_000))),
            MULTIPART,
            "invalid_body",
        ),
        (form(("meta", b'{"queue":"a","attributes":' + b"[" * 30_000 + b"}")), MULTIPART, "invalid_body"),
    ],
)
def test_bad_requests(local: Remote, body: bytes, content_type: str, code: str) -> None:
    answer = local.post("/v1/queue/enqueue", body, {"Content-Type": content_type})
    assert (answer.status, answer.error) == (400, code)
    assert local.app.ledger.queues().get("a") is None


def test_a_long_name_works(local: Remote) -> None:
    name = "q" * 128
    local.enqueue(name, b"x", namespace="n" * 100)
    assert local.take(name, namespace="n" * 100)["queue"] == name
    body = form(("meta", json.dumps({"queue": name, "namespace": "n" * 128}).encode()))
    assert local.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART}).error == "invalid_queue"


@pytest.mark.parametrize(
    ("given", "kept"), [("  abc ", "abc"), ("x" * 128, "x" * 128), ("x" * 129, ""), ("a\tb", ""), ("", "")]
)
def test_correlation_ids(local: Remote, queue: str, given: str, kept: str) -> None:
    body = form(("meta", json.dumps({"queue": queue}).encode()))
    answer = local.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART, "X-Correlation-Id": given})
    found = answer.json["correlation_id"]
    assert found == kept if kept else UUID7.fullmatch(found)
    assert local.take(queue)["correlation_id"] == found


def test_a_payload_that_is_too_large() -> None:
    with App("memory://") as app, serving(app, max_payload=1000) as remote:
        assert remote.enqueue("a", b"x" * 1000)["payload_bytes"] == 1000
        body = form(("meta", b'{"queue":"a"}'), ("payload", b"x" * 2_000_000))
        answer = remote.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
        assert (answer.status, answer.error) == (413, "payload_too_large")
        assert app.queue("a").stats().counts.ready == 1


def test_a_full_queue_is_429() -> None:
    with App("memory://") as app, serving(app) as remote:
        app.queue("a").configure(capacity=1)
        remote.enqueue("a")
        body = form(("meta", b'{"queue":"a"}'))
        answer = remote.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
        assert (answer.status, answer.error) == (429, "throttled")
        assert int(answer.headers["retry-after"]) >= 1
