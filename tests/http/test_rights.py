"""Tokens, and the table of clients and endpoints: which client may send which request."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until
from tests.support.wire import MULTIPART, Answer, Remote, form, receipt, serving
from towpath import App
from towpath.clock import SystemClock
from towpath.core.checks import SECOND
from towpath.http.access import Grant, Right
from towpath.http.authentication import PUBLIC
from towpath.http.context import ServerContext
from towpath.http.health import HealthRoutes
from towpath.http.options import ServerOptions
from towpath.http.routes import route_table
from towpath.http.table import Route
from towpath.http.tokens import create_token, find_token, load_tokens, revoke_token
from towpath.ledger import Ledger, open_ledger

PRODUCE, CONSUME, MONITOR, ADMIN = Right.PRODUCE, Right.CONSUME, Right.MONITOR, Right.ADMIN


def now() -> int:
    return SystemClock().now()


def grant(*rights: Right, namespace: str = "*", prefix: str = "") -> Grant:
    return Grant(frozenset(rights), namespace, prefix)


CLIENTS = {
    "producer": grant(PRODUCE),
    "consumer": grant(CONSUME),
    "prometheus": grant(MONITOR),
    "admin": grant(ADMIN),
    "own": grant(PRODUCE, CONSUME, namespace="shop"),
    "foreign": grant(PRODUCE, CONSUME, ADMIN, namespace="other"),
    "prefix": grant(PRODUCE, CONSUME, namespace="shop", prefix="order"),
    "other-prefix": grant(PRODUCE, CONSUME, namespace="shop", prefix="mail"),
}
ENQUEUE = {"producer", "admin", "own", "prefix"}
RECEIVE = {"consumer", "admin", "own", "prefix"}
LOCK = {"producer", "consumer", "admin", "own"}
READ = {"consumer", "admin", "own"}
WRITE = {"producer", "admin", "own"}
STATE = "key=q/orders/state/x&namespace=shop"
ENDPOINTS = [
    ("/v1/queue/enqueue", ENQUEUE),
    *((f"/v1/queue/{name}", RECEIVE) for name in ("dequeue", "dequeueWithState", "subscribe")),
    *((f"/v1/queue/{name}", RECEIVE) for name in ("subscribeWithState", "stats", "watch")),
    *((f"/v1/queue/{name}", RECEIVE) for name in ("ack", "nack", "extend")),
    ("/v1/acquire", LOCK),
    ("/v1/keepalive", LOCK),
    ("/v1/release", LOCK),
    ("/v1/describe?key=a&namespace=shop", READ),
    ("/v1/get?key=a&namespace=shop&public=1", READ),
    ("/v1/update?key=a&namespace=shop", WRITE),
    ("/v1/remove?key=a&namespace=shop", WRITE),
    (f"/v1/get?{STATE}", RECEIVE),
    (f"/v1/update?{STATE}", RECEIVE),
    (f"/v1/remove?{STATE}", RECEIVE),
    ("/metrics", {"prometheus", "admin"}),
]
LEASE = {"X-Lease-ID": "x", "X-Fencing-Token": "1", "X-Txn-ID": "0" * 20}


class Guarded:
    """A server that needs tokens, and a second connection to its ledger for their administration."""

    def __init__(self, remote: Remote, ledger: Ledger) -> None:
        self.remote = remote
        self.ledger = ledger
        self.tokens = {name: self.token(name, each) for name, each in CLIENTS.items()}

    def token(self, name: str, *grants: Grant, expires_at: int | None = None) -> str:
        return create_token(self.ledger, name, grants, now(), expires_at)[1]

    def client(self, name: str) -> Remote:
        return self.remote.client(self.tokens[name])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    url = f"sqlite:///{tmp_path_factory.mktemp('tokens') / 'work.db'}"
    with closing(open_ledger(url)) as ledger, App(url) as app, serving(app, require_token=True) as remote:
        yield Guarded(remote, ledger)


def request(client: Remote, path: str) -> Answer:
    name = path.partition("?")[0].rpartition("/")[2]
    if name == "enqueue":
        body = form(("meta", b'{"namespace":"shop","queue":"orders"}'), ("payload", b"x"))
        return client.post(path, body, {"Content-Type": MULTIPART})
    fields: dict[str, Any] = {"namespace": "shop"}
    if path.startswith("/v1/queue/"):
        fields["queue"] = "orders-that-are-empty"
    if name in ("ack", "nack", "extend"):
        fields |= {"message_id": "m", "lease_id": "x", "meta_etag": "e"}
    elif name.startswith(("dequeue", "subscribe")):
        fields |= {"owner": "me", "wait_seconds": -1}
    elif name in ("acquire", "keepalive", "release"):
        fields |= {"key": "a", "owner": "me"} if name == "acquire" else {"key": "a", "lease_id": "x"}
        fields |= {"block_seconds": -1, "ttl_seconds": 1} if name == "acquire" else {"txn_id": "0" * 20}
    elif name == "watch":
        return watch(client, path, json.dumps(fields).encode())
    is_document = name in ("get", "update", "remove", "describe")
    return client.post(path, b"{}" if is_document else json.dumps(fields).encode(), LEASE)


def watch(client: Remote, path: str, body: bytes) -> Answer:
    """The head of an endless response, or a refusal."""
    with client.connect() as wire:
        wire.request(path, body, client.headers)
        status, headers = wire.head()
        return Answer(status, headers, wire.read(int(headers.get("content-length", 0))))


def routes(app: App) -> tuple[Route, ...]:
    context = ServerContext(app.engine, ServerOptions())
    health = HealthRoutes(app, context)
    health.close()
    return route_table(context, health, app)


def test_every_path_is_in_the_table(guarded: Guarded) -> None:
    """Add a row to ENDPOINTS for a new path of lockd's protocol: the clients that may use it."""
    paths = {route.path for route in routes(guarded.remote.app) if route.any_method}
    assert paths == {path.partition("?")[0] for path, _ in ENDPOINTS} | PUBLIC


def test_the_other_routes(guarded: Guarded) -> None:
    """Without a token each answers 401. A client without rights gets no answer of success."""
    found = [route for route in routes(guarded.remote.app) if route.path.startswith("/v1/")]
    found = [route for route in found if not route.any_method]
    assert len(found) > 40
    for route in found:
        path = re.sub(r"{\w+}", "x", route.path)
        answer = guarded.remote.ask(route.method, path.removeprefix("/v1/"))
        assert (answer.status, answer.error) == (401, "unauthorized"), route.path
        if route.right is not None:
            answer = guarded.client("prometheus").ask(route.method, path.removeprefix("/v1/"), {})
            if answer.status == 200:  # a list of the queues that the client may read
                assert next(iter(answer.json.values())) == [], route.path
            else:
                allowed = (403, 404) if route.request is None else (400, 403, 404, 415)
                assert answer.status in allowed, (route.path, answer)


@pytest.mark.parametrize(("path", "allowed"), ENDPOINTS)
def test_clients_and_endpoints(guarded: Guarded, path: str, allowed: set[str]) -> None:
    found = set()
    for name in CLIENTS:
        answer = request(guarded.client(name), path)
        refused = answer.status == 403 and answer.error in ("namespace_forbidden", "forbidden")
        assert answer.status in (200, 204, 403, 404, 409), (name, answer)
        if not refused:
            found.add(name)
    assert found == allowed


@pytest.mark.parametrize("path", [path for path, _ in ENDPOINTS])
def test_a_request_without_a_token(guarded: Guarded, path: str) -> None:
    answer = request(guarded.remote, path)
    assert (answer.status, answer.error) == (401, "unauthorized")
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_paths_without_authentication(guarded: Guarded) -> None:
    assert guarded.remote.post("/healthz").status == 200
    assert guarded.remote.post("/readyz").status == 200
    assert guarded.remote.post("/healthz?x=1").status == 200
    for path in ("/healthz/../metrics", "//metrics", "/metrics/", "/%6detrics", "/v1/queue/stats/"):
        assert guarded.remote.post(path).status in (401, 404), path


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic dXNlcjpwYXNz",
        "Bearer tp_",
        "Bearer tp_a_b",
        "tp_{id}_{secret}",
        "Bearer tp_{id}_" + "0" * 64,
        "Bearer tp_{id}_{secret}0",
        "Bearer tp_000000000000_{secret}",
        "Bearer {secret}",
        "Bearer \xe9",
        "Bearer " + "x" * 10_000,
    ],
)
def test_malformed_and_unknown_tokens(guarded: Guarded, header: str) -> None:
    _, id, secret = guarded.tokens["admin"].split("_")
    text = header.replace("{id}", id).replace("{secret}", secret)
    answer = guarded.remote.post("/v1/queue/stats", b'{"queue":"a"}', {"Authorization": text})
    assert (answer.status, answer.error) == (401, "unauthorized")
    assert secret not in str(answer)


def test_spelling_does_not_evade_a_prefix(guarded: Guarded) -> None:
    client = guarded.client("prefix")
    for queue, status in (("ORDERS-0", 409), (" orders-0 ", 409), ("Mail", 403), ("x/orders", 400)):
        answer = client.dequeue(queue, namespace="SHOP")
        assert answer.status == status, queue
    assert client.dequeue("orders", namespace="default").error == "namespace_forbidden"


def test_the_state_of_a_message_of_another_queue(guarded: Guarded) -> None:
    admin, other = guarded.client("admin"), guarded.client("other-prefix")
    id = admin.enqueue("orders-with-state", namespace="shop")["message_id"]
    message = admin.call("queue/dequeueWithState", queue="orders-with-state", namespace="shop", owner="me")
    [(meta, _)] = message.messages()
    lease = {"X-Lease-ID": meta["state_lease_id"], "X-Txn-ID": meta["state_txn_id"]}
    lease["X-Fencing-Token"] = str(meta["state_fencing_token"])
    query = f"key=q/orders-with-state/state/{id}&namespace=shop"
    assert admin.post(f"/v1/update?{query}", b'{"secret":1}', lease).status == 200
    assert admin.post(f"/v1/get?{query}&public=1").body == b'{"secret":1}'
    own = query.replace("orders-with-state", "mail")
    assert other.post(f"/v1/get?{own}&public=1").status == 204
    assert admin.call("queue/ack", **receipt(meta)).status == 200


def test_a_revoked_token_ends_its_waiting_requests(guarded: Guarded) -> None:
    token = guarded.token("leaving", grant(CONSUME))
    client = guarded.remote.client(token)
    body = b'{"queue":"idle","owner":"me"}'
    with client.connect() as waiting, client.connect() as watching:
        waiting.request("/v1/queue/dequeue", body, client.headers)
        watching.request("/v1/queue/watch", b'{"queue":"idle"}', client.headers)
        assert watching.head()[0] == 200
        assert b"queue_watch" in watching.chunk()
        until(lambda: guarded.client("consumer").call("queue/stats", queue="idle").json["waiting_consumers"])
        revoke_token(guarded.ledger, token.split("_")[1])
        assert waiting.answer().error == "unauthorized"
        assert watching.closed()
    assert client.call("queue/stats", queue="idle").status == 401
    stats = guarded.client("consumer").call("queue/stats", queue="idle").json
    assert stats["waiting_consumers"] == 0


def test_a_token_that_expires(guarded: Guarded) -> None:
    token = guarded.token("short", grant(CONSUME), expires_at=now() + 2 * SECOND)
    client = guarded.remote.client(token)
    assert client.call("queue/stats", queue="idle").status == 200
    answer = client.call("queue/dequeue", queue="idle", owner="me")  # waits without limit
    assert answer.error == "unauthorized"
    assert "expired" in client.call("queue/stats", queue="idle").json["detail"]


def test_the_log_has_no_secrets(guarded: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, logger="towpath.http.audit")
    token = guarded.token("logged", grant(PRODUCE))
    secret = token.rpartition("_")[2]
    client = guarded.remote.client(token)
    assert client.call("queue/stats", queue="a").status == 403
    assert guarded.remote.client(token[:-1] + "z").call("queue/stats", queue="a").status == 401
    assert client.enqueue("a")["queue"] == "a"
    revoke_token(guarded.ledger, token.split("_")[1])
    metrics = guarded.client("prometheus").post("/metrics")
    assert metrics.status == 200
    assert secret[:16] not in caplog.text + metrics.body.decode()
    assert "token" in caplog.text
    audited = [record.getMessage() for record in caplog.records if record.name == "towpath.http.audit"]
    assert [line for line in audited if "(logged) was created" in line]
    assert [line for line in audited if "(logged) was revoked" in line]
    assert [line for line in audited if "was refused" in line]


def test_records(ledger: Ledger) -> None:
    """On every ledger."""
    record, text = create_token(ledger, "a", [grant(PRODUCE, namespace="x")], now())
    found = load_tokens(ledger)
    assert find_token(found, text) == found[record.id] == record
    assert text.rpartition("_")[2].encode() not in ledger.note("towpath/tokens").value  # type: ignore[union-attr]
    assert find_token(found, text[:-1] + ("0" if text[-1] != "0" else "1")) is None
    create_token(ledger, "b", [grant(CONSUME)], now())
    assert revoke_token(ledger, record.id) == record
    assert revoke_token(ledger, record.id) is None
    assert [each.name for each in load_tokens(ledger).values()] == ["b"]


@pytest.mark.ledgers("sqlite")
def test_tokens_made_at_the_same_time(url: str) -> None:
    def make(name: str) -> None:
        with closing(open_ledger(url)) as ledger:
            create_token(ledger, name, [grant(CONSUME)], now())

    threads = [threading.Thread(target=make, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with closing(open_ledger(url)) as ledger:
        assert sorted(each.name for each in load_tokens(ledger).values()) == ["t0", "t1", "t2", "t3"]


def test_a_file_of_the_ledger_has_no_secret(guarded: Guarded) -> None:
    secrets = [token.rpartition("_")[2].encode() for token in guarded.tokens.values()]
    file = Path(guarded.remote.app.engine.url.removeprefix("sqlite:///"))
    data = b"".join(path.read_bytes() for path in file.parent.glob(f"{file.name}*"))
    assert not [secret for secret in secrets if secret in data]
