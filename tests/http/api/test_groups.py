"""Groups over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.wire import Remote


def create(remote: Remote, queue: str, count: int = 2, **fields: Any) -> dict[str, Any]:
    calls = [{"kind": "a", "queue": queue, "args": {"n": n}} for n in range(count)]
    answer = remote.ask("POST", "groups", {"calls": calls, **fields})
    assert answer.status == 200, answer
    found: dict[str, Any] = answer.json
    return found


def test_a_group_with_a_following_job(remote: Remote, queue: str) -> None:
    group = create(remote, queue, then={"kind": "b", "queue": f"{queue}-then"}, id=f"{queue}/g")
    assert (group["id"], len(group["jobs"]), group["branches"]) == (f"{queue}/g", 2, {})
    path = f"groups/{queue}%2Fg"
    answer = remote.ask("GET", path)
    assert (answer.status, answer.json["state"], answer.json["unfinished"]) == (200, "sealed", 2)
    assert remote.ask("GET", path, wait=0.05).status == 202
    for message in remote.app.queue(queue).get_many(2, wait=10):
        message.ack()
    answer = remote.ask("GET", path, wait=30)
    assert (answer.status, answer.json["outcome"], answer.json["done"]) == (200, "done", 2)
    assert remote.ask("GET", f"jobs/{group['then']}").json["state"] == "ready"
    again = create(remote, queue, then={"kind": "b", "queue": f"{queue}-then"}, id=f"{queue}/g")
    assert again == group


def test_branches(remote: Remote, queue: str) -> None:
    then = {outcome: {"kind": outcome, "queue": f"{queue}-then"} for outcome in ("done", "canceled")}
    group = create(remote, queue, branches=then)
    assert group["branches"].keys() == {"done", "canceled"}
    answer = remote.ask("POST", f"groups/{group['id']}/abort")
    assert (answer.status, answer.json["outcome"]) == (200, "canceled")
    assert remote.ask("GET", f"jobs/{group['branches']['canceled']}").json["kind"] == "canceled"
    answer = remote.ask("POST", f"groups/{group['id']}/retry")
    assert answer.json == {"id": group["id"], "revived": 2}
    assert remote.ask("GET", f"groups/{group['id']}").json["state"] == "sealed"


def test_a_stop_lets_running_jobs_end(remote: Remote, queue: str) -> None:
    group = create(remote, queue)
    message = remote.app.queue(queue).get()
    assert message is not None
    answer = remote.ask("POST", f"groups/{group['id']}/abort?stop=true")
    assert (answer.status, answer.json["state"], answer.json["unfinished"]) == (200, "aborting", 1)
    message.ack()
    status = remote.ask("GET", f"groups/{group['id']}").json
    assert (status["outcome"], status["done"]) == ("canceled", 1)
    assert remote.ask("POST", f"groups/{group['id']}/abort?stop=perhaps").error == "invalid_argument"


def test_pause_and_resume(remote: Remote, queue: str) -> None:
    group = create(remote, queue)
    answer = remote.ask("POST", f"groups/{group['id']}/pause", {"why": "deploy"})
    assert (answer.json["paused"], answer.json["why"]) == (True, "deploy")
    assert remote.app.queue(queue).get() is None
    assert remote.ask("POST", f"groups/{group['id']}/resume").json["paused"] is False
    assert remote.app.queue(queue).get() is not None


def test_lists(remote: Remote, queue: str) -> None:
    ids = [create(remote, queue, 1, id=f"{queue}-{n}")["id"] for n in range(3)]
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = remote.ask("GET", "groups", prefix=f"{queue}-", limit=2, ascending="true", **cursor).json
        found += [each["id"] for each in page["groups"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert found == ids
    assert remote.ask("GET", "groups", prefix=f"{queue}-", state="closed").json["groups"] == []
    assert remote.ask("GET", "groups", outcome="ready").error == "invalid_argument"
    assert remote.ask("GET", "groups", cursor="%").error == "invalid_argument"


def test_unknown_groups(remote: Remote) -> None:
    for method, path in (("GET", ""), ("POST", "/abort"), ("POST", "/retry"), ("POST", "/resume")):
        answer = remote.ask(method, f"groups/none{path}")
        assert (answer.status, answer.error) == (404, "unknown_group")
    assert remote.ask("POST", "groups/none/pause").error == "unknown_group"
    assert remote.ask("GET", "groups/%00").status == 404


@pytest.mark.parametrize(
    "fields",
    [
        {"calls": []},
        {"calls": [{"kind": "a"}]},
        {"calls": [{"kind": "a", "queue": "q", "id": "x"}]},
        {"calls": [{"kind": "a", "queue": "q", "group": "x"}]},
        {"then": {"kind": "a", "queue": "q"}, "branches": {"done": {"kind": "a", "queue": "q"}}},
        {"branches": {"ended": {"kind": "a", "queue": "q"}}},
        {"on_failure": "ask"},
        {"id": "x" * 201},
        {"id": "\0"},
    ],
)
def test_wrong_groups(local: Remote, fields: dict[str, Any]) -> None:
    answer = local.ask("POST", "groups", {"calls": [{"kind": "a", "queue": "q"}], **fields})
    assert (answer.status, answer.error) == (400, "invalid_body"), answer
    assert local.ask("GET", "groups").json["groups"] == []
