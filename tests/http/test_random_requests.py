"""Random requests: no answer is 5xx, and the connection stays usable."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.wire import MULTIPART, Remote, Wire, form

PATHS = (
    "queue/enqueue",
    "queue/dequeue",
    "queue/dequeueWithState",
    "queue/subscribe",
    "queue/stats",
    "queue/ack",
    "queue/nack",
    "queue/extend",
    "acquire",
    "keepalive",
    "release",
    "update",
    "get",
    "remove",
    "describe",
)
FIELDS = [
    "namespace",
    "queue",
    "owner",
    "key",
    "txn_id",
    "message_id",
    "lease_id",
    "fencing_token",
    "meta_etag",
    "state_lease_id",
    "intent",
    "visibility_timeout_seconds",
    "page_size",
    "delay_seconds",
    "ttl_seconds",
    "max_attempts",
    "attributes",
    "last_error",
    "extend_by_seconds",
    "payload_content_type",
    "state_fencing_token",
    "if_not_exists",
    "rollback",
]
TEXTS = st.text(max_size=12) | st.sampled_from(
    ["a", "q/a/state/b", "defer", "0" * 20, "a" * 200, "\0", "\ud800"]
)
NUMBERS = st.integers() | st.sampled_from([0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
HEADERS = st.dictionaries(
    st.sampled_from(["X-Lease-ID", "X-Txn-ID", "X-Fencing-Token", "X-If-Version", "X-Expected-Bytes"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip),
    max_size=4,
)
QUERIES = st.dictionaries(
    st.sampled_from(["queue", "namespace", "owner", "key", "public"]), TEXTS, max_size=3
)
OPTIONS: Any = {
    "derandomize": True,
    "max_examples": 60,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@pytest.fixture(scope="module")
def wire(local: Remote) -> Any:
    with local.connect() as wire:
        yield wire


def ask(wire: Wire, path: str, body: bytes, headers: dict[str, str], query: dict[str, str]) -> None:
    words = "&".join(f"{name}={quote(value, errors='replace')}" for name, value in query.items())
    wire.request(f"/v1/{path}?{words}", body, headers)
    answer = wire.answer()
    assert answer.status < 500, answer
    if answer.status >= 400:
        assert answer.error


@settings(**OPTIONS)
@given(
    path=st.sampled_from(PATHS),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    headers=HEADERS,
    query=QUERIES,
)
def test_json(
    wire: Wire, path: str, fields: dict[str, Any], headers: dict[str, str], query: dict[str, str]
) -> None:
    if path in ("queue/dequeue", "queue/dequeueWithState", "queue/subscribe"):
        fields["wait_seconds"] = -1
    elif path == "acquire":
        fields["block_seconds"] = -1
    ask(wire, path, json.dumps(fields).encode(), headers, query)


@settings(**OPTIONS)
@given(path=st.sampled_from(PATHS[:1] + PATHS[4:8] + PATHS[9:]), body=st.binary(max_size=60), headers=HEADERS)
def test_bytes(wire: Wire, path: str, body: bytes, headers: dict[str, str]) -> None:
    ask(wire, path, body, headers, {})


@settings(**OPTIONS)
@given(
    meta=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    payload=st.binary(max_size=20),
    cut=st.integers(0, 300),
    put=st.binary(max_size=3),
)
def test_multipart(wire: Wire, meta: dict[str, Any], payload: bytes, cut: int, put: bytes) -> None:
    body = form(("meta", json.dumps({"queue": "a", **meta}).encode()), ("payload", payload))
    ask(wire, "queue/enqueue", body[:cut] + put + body[cut + 1 :], {"Content-Type": MULTIPART}, {})
