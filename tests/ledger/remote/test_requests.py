"""`/v1/ledger/*` as bytes on a socket: what strangers may send, and what clients may not ask for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from tests.support.waiting import WAIT, until
from tests.support.wire import Answer, Remote, serving
from towpath import App
from towpath.core.commands import Append, Claim, Settle, Want
from towpath.core.job import Done, Spec
from towpath.errors import InvalidInput, NotALedger
from towpath.http import ledger_routes
from towpath.http.access import Grant, Principal, Right
from towpath.http.context import READERS
from towpath.ledger import open_ledger
from towpath.ledger.remote.messages import FORMAT, MAX_BODY, MAX_COMMANDS
from towpath.testing.clock import START

PATHS = ("apply", "read", "wait")
MSGPACK = {"Content-Type": "application/msgpack"}


@pytest.fixture(scope="module")
def local() -> Iterator[Remote]:
    with App("memory://") as app, serving(app) as remote:
        yield remote
        assert app.ledger.check() == []


def post(remote: Remote, path: str, *fields: Any) -> Answer:
    return remote.post(f"/v1/ledger/{path}", msgspec.msgpack.encode([FORMAT, *fields]), MSGPACK)


def refusal(answer: Answer) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/msgpack"
    assert answer.headers["x-correlation-id"]
    found: dict[str, Any] = msgspec.msgpack.decode(answer.body)
    assert found.pop("type") == "error"
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"\xc1", b"{}", b"\x93\x01", b"\xff" * 1000, b"\x91" * 50_000])
def test_bytes_that_are_no_request(local: Remote, path: str, body: bytes) -> None:
    answer = local.post(f"/v1/ledger/{path}", body, MSGPACK)
    assert answer.status == 400
    assert refusal(answer)["details"]["message"].startswith("the body is not a valid request")


@pytest.mark.parametrize("path", PATHS)
def test_another_format(local: Remote, path: str) -> None:
    answer = local.post(f"/v1/ledger/{path}", msgspec.msgpack.encode([FORMAT + 1, "new"]), MSGPACK)
    assert (answer.status, answer.error) == (400, "unsupported_format")
    assert f"format {FORMAT + 1}" in answer.json["detail"]


def test_a_body_that_is_too_large(local: Remote) -> None:
    with local.connect() as wire:
        wire.send(b"POST /v1/ledger/apply HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n%b\r\n" % bytes(0x100000)
        for _ in range(MAX_BODY // 0x100000 + 1):
            wire.send(chunk)
        wire.send(b"0\r\n\r\n")
        answer = wire.answer()
    assert (answer.status, answer.error) == (413, "payload_too_large")


def test_too_many_commands(local: Remote) -> None:
    answer = post(local, "apply", [{"type": "upkeep"}] * (MAX_COMMANDS + 1), None)
    assert answer.status == 400
    assert refusal(answer)["details"]["field"] == "len(commands)"


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("apply", ([], 5), "now"),
        ("read", ("dump", []), "dump"),
        ("read", ("close", []), "name"),
        ("read", ("__class__", []), "name"),
        ("read", ("apply", [[]]), "name"),
        ("read", ("find", [{"limit": 10**9}]), "limit"),
        ("read", ("get", [7]), "body"),
        ("read", ("get", ["a", "b"]), "body"),
    ],
)
def test_requests_that_are_refused(local: Remote, path: str, fields: tuple[Any, ...], field: str) -> None:
    answer = post(local, path, *fields)
    assert answer.status == 400
    assert refusal(answer)["details"]["field"] == field


def test_an_error_of_a_read(local: Remote) -> None:
    answer = post(local, "read", "explain", ["nothing", None])
    assert answer.status == 409
    assert refusal(answer) == {"kind": "UnknownJob", "details": {"id": "nothing"}}


def test_the_time_of_a_client_is_not_used(local: Remote) -> None:
    with closing(open_ledger(local.address)) as ledger:
        with pytest.raises(InvalidInput, match="for tests"):
            ledger.apply([Append((Spec(id="timed", queue="q"),))], START)
        with pytest.raises(InvalidInput, match="for tests"):
            ledger.dump()
        assert ledger.get("timed") is None


@pytest.mark.parametrize("path", PATHS)
def test_the_right_of_a_client(path: str, local: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger as a whole is for administrators."""
    reader = Principal("reader", (Grant(frozenset({Right.PRODUCE, Right.CONSUME})),))
    monkeypatch.setattr("towpath.http.authentication.UNRESTRICTED", reader)
    answer = post(local, path, "not looked at")
    assert (answer.status, answer.error) == (403, "forbidden")
    with pytest.raises(NotALedger, match=r"reader has no right to admin .* TOWPATH_TOKEN"):
        open_ledger(local.address)


def test_waits_share_one_thread_and_end_with_a_commit(local: Remote) -> None:
    version = msgspec.msgpack.decode(post(local, "wait", {}, 0.0).body)[0]
    before = threading.active_count()
    wires = [local.connect() for _ in range(20)]
    body = msgspec.msgpack.encode([FORMAT, {version[0]: 2**40, "another": 3}, 25.0])
    try:
        for wire in wires:
            wire.request("/v1/ledger/wait", body, MSGPACK)
        assert threading.active_count() <= before + 1 + READERS  # the watching thread, and the pool for reads
    finally:
        for wire in wires:
            wire.socket.close()
    with local.connect() as wire:
        body = msgspec.msgpack.encode([FORMAT, {version[0]: version[1]}, 25.0])
        wire.request("/v1/ledger/wait", body, MSGPACK)
        local.enqueue("waited")
        assert msgspec.msgpack.decode(wire.answer().body)[0][1] > version[1]


def test_a_drain_ends_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    changed = ledger_routes.LedgerRoutes._changed

    async def observed(self: ledger_routes.LedgerRoutes, seen: int, seconds: float) -> int:
        waiting.set()
        return await changed(self, seen, seconds)

    monkeypatch.setattr(ledger_routes.LedgerRoutes, "_changed", observed)
    with App("memory://") as app, serving(app) as remote, remote.connect() as wire:
        name, _ = msgspec.msgpack.decode(post(remote, "wait", {}, 0.0).body)[0]
        wire.request("/v1/ledger/wait", msgspec.msgpack.encode([FORMAT, {name: 2**40}, 25.0]), MSGPACK)
        assert waiting.wait(WAIT)
        remote.server.stop()
        answer = wire.answer()
        assert (answer.status, answer.error) == (503, "shutdown_draining")


def test_a_server_leaves_the_claims_of_its_clients_alone(local: Remote) -> None:
    """A batch of the server that is applied twice makes it search for its own lost claims. The claims of a
    client, which it has not received itself, stay."""
    app = local.app
    with closing(open_ledger(local.address)) as ledger:
        ledger.apply([Append((Spec(id="held", queue="far"), Spec(id="more", queue="far")))])
        claim = Claim(owner="client", wants=(Want("far"),), lease=60_000_000)
        app.ledger.apply([claim])  # as if through another server
        app.ledger.repeats += 1  # type: ignore[misc]
        ledger.apply([claim])
        app.engine.call(Append((Spec(id="other", queue="near"),)))
        until(lambda: not app.engine.committer._claims.read_due)
        for id in ("held", "more"):
            job = ledger.get(id)
            assert job is not None
            assert (job.state, job.owner) == ("running", "client")
            ledger.apply([Settle(id, job.fence, Done())])
