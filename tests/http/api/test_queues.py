"""Queues, parts, peek and dead letters over HTTP."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tests.support.wire import Remote, receipt, serving
from towpath import App


def listed(remote: Remote, path: str, field: str, limit: int, **arguments: Any) -> list[dict[str, Any]]:
    """All entries of a list, page by page."""
    found: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        answer = remote.ask("GET", path, **arguments, limit=limit, **cursor)
        assert answer.status == 200, answer
        page = answer.json[field]
        assert len(page) <= limit
        found += page
        if answer.json["next_cursor"] is None:
            return found
        assert len(page) == limit
        cursor = {"cursor": answer.json["next_cursor"]}


def test_queues_in_pages(remote: Remote, queue: str) -> None:
    names = [f"{queue}.{letter}" for letter in "abcde"]
    for name in names:
        remote.enqueue(name, namespace="paged")
    remote.enqueue(f"{queue}.x")
    found = listed(remote, "queues", "queues", 2, prefix=f"{queue}.", namespace="paged")
    assert [each["name"] for each in found] == [f"paged/{name}" for name in names]
    assert found[0]["counts"]["ready"] == 1
    plain = remote.ask("GET", "queues", prefix=f"{queue}.").json["queues"]
    assert [each["name"] for each in plain] == [f"{queue}.x"]
    default = remote.ask("GET", "queues", prefix=f"{queue}.", namespace="default").json["queues"]
    assert default == plain


def test_one_queue(remote: Remote, queue: str) -> None:
    assert remote.ask("GET", f"queues/{queue}").error == "unknown_queue"
    remote.enqueue(queue, namespace="far")
    for path, arguments in ((f"queues/{queue}", {"namespace": "far"}), (f"queues/far%2F{queue}", {})):
        answer = remote.ask("GET", path, **arguments)
        assert (answer.status, answer.json["name"]) == (200, f"far/{queue}")
        assert answer.json["counts"]["ready"] == 1
        assert answer.json["oldest_ready"].endswith("Z")


def test_pause_and_limits(remote: Remote, queue: str) -> None:
    remote.enqueue(queue)
    change = {"paused": True, "why": "deploy", "cap": 2, "rate": "100/m", "capacity": 1, "warn_depth": 1}
    answer = remote.ask("PATCH", f"queues/{queue}", change)
    assert answer.status == 200, answer
    assert {name: answer.json[name] for name in change} == change
    assert remote.dequeue(queue).error == "waiting"
    full = remote.ask("POST", "queue/enqueueMany", {"queue": queue, "messages": [{}]})
    assert (full.status, full.error) == (429, "throttled")
    assert full.headers["retry-after"]
    answer = remote.ask("PATCH", f"queues/{queue}", {"paused": False, "capacity": None, "retention": 60})
    assert (answer.json["paused"], answer.json["capacity"], answer.json["retention"]) == (False, None, 60.0)
    assert answer.json["cap"] == 2
    assert remote.take(queue)


@pytest.mark.parametrize(
    "change",
    [
        {"rate": "often"},
        {"cap": -1},
        {"color": 1},
        {"paused": "yes"},
        {"not_before": "2026-01-01T00:00:00"},
        {"warn_depth": 5, "capacity": 3},
        {"retention": 1e300},
        {"why": "x" * 1001},
        {"paused": False, "why": "x"},
    ],
)
def test_wrong_limits(local: Remote, queue: str, change: dict[str, Any]) -> None:
    answer = local.ask("PATCH", f"queues/{queue}", change)
    assert (answer.status, answer.error) == (400, "invalid_body"), answer


def test_a_wrong_name(local: Remote) -> None:
    answer = local.ask("PATCH", "queues/a%20b", {"paused": True})
    assert (answer.status, answer.error) == (400, "invalid_argument")
    assert local.ask("GET", "queues/%ff").error == "invalid_argument"
    assert local.ask("GET", "queues/a/b").error == "unknown_path"
    answer = local.ask("DELETE", "queues/a")
    assert (answer.error, answer.headers["allow"]) == ("method_not_allowed", "GET, PATCH")


def test_parts(remote: Remote, queue: str) -> None:
    for part in ("ada", "bob", "cid/7"):
        remote.enqueue(queue, part=part)
    change = {"paused": True, "why": "unpaid", "cap": 3, "weight": 5, "append_rate": "10/s:20"}
    answer = remote.ask("PATCH", f"queues/{queue}/parts/{quote('cid/7', safe='')}", change)
    assert {name: answer.json[name] for name in change} == change
    found = listed(remote, f"queues/{queue}/parts", "parts", 2)
    assert [(each["name"], each["ready"]) for each in found] == [("ada", 1), ("bob", 1), ("cid/7", 1)]
    assert len(remote.ask("GET", f"queues/{queue}/parts", prefix="a").json["parts"]) == 1
    taken = [meta["message_id"] for meta, _ in remote.dequeue(queue, page_size=5).messages()]
    assert len(taken) == 2
    assert not remote.ask("PATCH", f"queues/{queue}/parts/cid%2F7", {"paused": False}).json["paused"]
    assert remote.take(queue)


def test_peek_leases_nothing(remote: Remote, queue: str) -> None:
    ids = [remote.enqueue(queue, b'{"n":%d}' % n, attributes={"n": str(n)})["message_id"] for n in range(5)]
    found = listed(remote, f"queues/{queue}/messages", "messages", 2, oldest_first="true")
    assert [each["message_id"] for each in found] == ids
    assert all("payload" not in each and each["payload_bytes"] == 7 for each in found)
    assert all(each["state"] == "ready" and each["attempts"] == 0 for each in found)
    assert len(remote.dequeue(queue, page_size=10).messages()) == 5


def test_bodies(remote: Remote, queue: str) -> None:
    remote.enqueue(queue, b'{"n": 1}', payload_content_type="application/json", attributes={"a": {"b": 1}})
    remote.enqueue(queue, b"text")
    remote.enqueue(queue, b"\xff")
    remote.enqueue(queue, b"x" * 70_000)
    found = remote.ask("GET", f"queues/{queue}/messages", bodies="true", oldest_first="true").json["messages"]
    assert [(each.get("payload"), each.get("payload_encoding")) for each in found] == [
        ({"n": 1}, "json"),
        ("text", "text"),
        ("/w==", "base64"),
        (None, None),
    ]
    assert found[0]["attributes"] == {"a": {"b": 1}}
    assert found[3]["payload_bytes"] == 70_000


def test_search(remote: Remote, queue: str) -> None:
    one = remote.enqueue(queue, attributes={"colour": "red"}, dedupe_key=f"{queue}-k")["message_id"]
    two = remote.enqueue(queue, attributes={"colour": "blue"}, delay_ms=3_600_000)["message_id"]

    def ids(**arguments: str) -> list[str]:
        answer = remote.ask("GET", f"queues/{queue}/messages", **arguments)
        assert answer.status == 200, answer
        return [each["message_id"] for each in answer.json["messages"]]

    assert ids() == [two, one]
    assert ids(state="scheduled") == [two]
    assert ids(state="ready,scheduled") == [two, one]
    assert ids(header="colour=red") == [one]
    assert ids(key=f"{queue}-k") == [one]
    assert ids(created_from="2100-01-01T00:00:00Z") == []
    assert ids(created_before="2100-01-01T01:00:00+01:00") == [two, one]


@pytest.mark.parametrize(
    "arguments",
    [
        {"state": "sleeping"},
        {"state": ""},
        {"limit": 0},
        {"limit": 1001},
        {"limit": "many"},
        {"cursor": "%"},
        {"header": "a"},
        {"created_from": "yesterday"},
        {"created_from": "2026-01-01T00:00:00"},
        {"bodies": "maybe"},
        {"colour": "red"},
        {"key": "\0"},
    ],
)
def test_wrong_arguments(local: Remote, arguments: dict[str, Any]) -> None:
    answer = local.ask("GET", "queues/a/messages", **arguments)
    assert (answer.status, answer.error) == (400, "invalid_argument"), answer
    assert answer.json["next_step"]


def test_an_argument_twice(local: Remote) -> None:
    with local.connect() as wire:
        wire.request("/v1/queues?limit=1&limit=2", method="GET")
        assert wire.answer().error == "invalid_argument"


def dead_letters(remote: Remote, queue: str, count: int) -> list[str]:
    for _ in range(count):
        remote.enqueue(queue, max_attempts=1)
    for meta, _ in remote.dequeue(queue, page_size=count).messages():
        remote.call("queue/nack", **receipt(meta, last_error="broken"))
    found = remote.ask("GET", "dead", queue=queue, oldest_first="true").json["messages"]
    assert len(found) == count
    return [each["message_id"] for each in found]


def test_replay_one_many_and_all(remote: Remote, queue: str) -> None:
    ids = dead_letters(remote, queue, 5)
    shown = remote.ask("GET", "dead", queue=queue, bodies="true", limit=1).json["messages"][0]
    assert (shown["state"], shown["error"]) == ("failed", '"broken"')
    dry = remote.ask("POST", "dead/replay", {"queue": queue, "dry_run": True}).json
    assert (dry["dry_run"], dry["count"], dry["more"]) == (True, 5, False)
    dry = remote.ask("POST", "dead/replay", {"queue": queue, "kind": "x", "dry_run": True}).json
    assert dry["count"] == 0
    dry = remote.ask(
        "POST", "dead/purge", {"queue": queue, "created_before": "2100-01-01T00:00:00Z", "dry_run": True}
    )
    assert dry.json["count"] == 5
    assert remote.ask("POST", "dead/replay", {"ids": ids[:1]}).json["count"] == 1
    assert remote.ask("POST", "dead/replay", {"ids": ids[:3], "dry_run": True}).json["count"] == 2
    assert remote.ask("POST", "dead/purge", {"ids": ids[1:2]}).json["count"] == 1
    assert remote.ask("POST", "dead/replay", {"queue": queue}).json["count"] == 3
    assert len(remote.dequeue(queue, page_size=9).messages()) == 4


def test_wrong_selections(remote: Remote, queue: str) -> None:
    dead_letters(remote, queue, 1)
    for wrong in ({}, {"ids": ["a"], "queue": queue}, {"all": True, "queue": queue}, {"colour": 1}):
        assert remote.ask("POST", "dead/purge", wrong).error == "invalid_body"
    answer = remote.ask("POST", "dead/replay", {"ids": ["none"]})
    assert (answer.status, answer.error) == (404, "unknown_job")
    answer = remote.ask("POST", "dead/replay", {"namespace": "default"})
    assert (answer.status, answer.error) == (400, "invalid_argument")
    assert remote.ask("GET", "dead", state="done").error == "invalid_argument"
    assert remote.ask("POST", "dead/purge", {"namespace": "nowhere"}).json["count"] == 0
    assert len(remote.ask("GET", "dead", queue=queue).json["messages"]) == 1


def test_all_dead_letters() -> None:
    with App("memory://") as app, serving(app) as remote:
        dead_letters(remote, "a", 2)
        dead_letters(remote, "b", 1)
        assert remote.ask("POST", "dead/purge", {"all": True, "dry_run": True}).json["count"] == 3
        assert remote.ask("POST", "dead/purge", {"queue": "b*", "dry_run": True}).json["count"] == 1
        assert remote.ask("POST", "dead/purge", {"all": True}).json["count"] == 3
        assert remote.ask("GET", "dead").json["messages"] == []
