"""Each call checks the rights of its client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.api_reference import routes
from tests.support.wire import Remote, receipt, serving
from towpath import App
from towpath.http import authentication
from towpath.http.access import UNRESTRICTED, Grant, Principal, Right


@pytest.fixture
def remote() -> Iterator[Remote]:
    with App("memory://") as app, serving(app) as remote:
        yield remote


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the client of all requests."""

    def become(*grants: Grant) -> None:
        monkeypatch.setattr(authentication, "UNRESTRICTED", Principal("stranger", grants))

    return become


def test_nothing_without_a_right(remote: Remote, become: Any) -> None:
    remote.enqueue("a")
    id = remote.ask("POST", "jobs", {"jobs": [{"kind": "k", "queue": "a"}]}).json["jobs"][0]["id"]
    group = remote.ask("POST", "groups", {"calls": [{"kind": "k", "queue": "a"}]}).json["id"]
    taken = receipt(remote.take("a"))
    become()
    bodies: dict[str, Any] = {
        "/v1/queue/enqueueMany": {"queue": "a", "messages": [{}]},
        "/v1/queue/ackMany": {
            "queue": "a",
            "receipts": [{name: taken[name] for name in ("message_id", "lease_id")}],
        },
        "/v1/jobs": {"jobs": [{"kind": "k", "queue": "a"}]},
        "/v1/groups": {"calls": [{"kind": "k", "queue": "a"}]},
        "/v1/dead/replay": {"all": True},
        "/v1/dead/purge": {"queue": "a"},
        "/v1/bulk/cancel": {"ids": [id]},
        "/v1/bulk/retry": {"kind": "k"},
        "/v1/bulk/purge": {"all": True},
    }
    tried = 0
    for route in routes():
        if route.any_method or route.right is None or route.path == "/v1/queues":
            continue
        names = {"queue": "a", "part": "p", "name": "n", "id": group if "groups" in route.path else id}
        path = route.path.format_map(names).removeprefix("/v1/")
        body = bodies.get(route.path) if route.method == "POST" else {} if route.request else None
        answer = remote.ask(route.method, path, body)
        assert answer.status == 403, (route.method, route.path, answer)
        assert answer.error in ("forbidden", "namespace_forbidden")
        tried += 1
    assert tried > 40
    assert remote.ask("GET", "queues").json["queues"] == []


def test_rights_in_a_namespace(remote: Remote, become: Any) -> None:
    for namespace in ("default", "shop", "shopping"):
        remote.enqueue("orders", namespace=namespace)
    become(Grant(frozenset({Right.CONSUME}), "shop", "ord"))
    assert [each["name"] for each in remote.ask("GET", "queues").json["queues"]] == ["shop/orders"]
    assert remote.ask("GET", "queues/orders", namespace="shop").status == 200
    assert remote.ask("GET", "queues/orders").error == "namespace_forbidden"
    assert remote.ask("GET", "jobs", queue="shop/ord*").status == 200
    for pattern in ("shop/*", "shop*", "*", "shop/o*", "shopping/orders", "s*/orders"):
        assert remote.ask("GET", "jobs", queue=pattern).status == 403, pattern
    assert remote.ask("GET", "jobs").error == "forbidden"
    assert remote.ask("GET", "events", queue="shop/orders-2", kinds="none").error == "invalid_argument"
    assert remote.ask("GET", "events").error == "forbidden"
    assert remote.ask("PATCH", "queues/orders", {"paused": True}, namespace="shop").status == 403
    become(Grant(frozenset({Right.ADMIN}), "shop"))
    assert remote.ask("PATCH", "queues/orders", {"paused": True}, namespace="shop").status == 200
    assert remote.ask("POST", "bulk/cancel", {"namespace": "shop"}).json["count"] == 1
    assert remote.ask("POST", "bulk/cancel", {"kind": "k"}).status == 403


def test_one_forbidden_item_forbids_all(remote: Remote, become: Any) -> None:
    become(Grant(frozenset({Right.PRODUCE}), "default", "a"))
    messages = [{"queue": "a"}, {"queue": "b"}]
    assert remote.ask("POST", "queue/enqueueMany", {"messages": messages}).error == "namespace_forbidden"
    jobs = [{"kind": "k", "queue": "a"}, {"kind": "k", "queue": "b"}]
    assert remote.ask("POST", "jobs", {"jobs": jobs}).error == "namespace_forbidden"
    then = {"calls": jobs[:1], "then": jobs[1]}
    assert remote.ask("POST", "groups", then).error == "namespace_forbidden"
    assert remote.ask("POST", "jobs", {"jobs": jobs[:1]}).status == 200
    assert remote.app.ledger.queues().keys() == {"a"}


def test_the_client_of_an_open_server_is_unrestricted(remote: Remote) -> None:
    assert UNRESTRICTED.allows(Right.ADMIN)
    assert remote.ask("GET", "jobs").status == 200
