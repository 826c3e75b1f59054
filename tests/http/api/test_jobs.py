"""Jobs over HTTP."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.waiting import WAIT, until
from tests.support.wire import Remote, serving
from towpath import App
from towpath.commands import Append, Spec
from towpath.http.api.waiting import LongPolls


def enqueue(remote: Remote, queue: str, **fields: Any) -> str:
    answer = remote.ask("POST", "jobs", {"jobs": [{"kind": "mail.send", "queue": queue, **fields}]})
    assert answer.status == 200, answer
    id: str = answer.json["jobs"][0]["id"]
    return id


def test_enqueue_several(remote: Remote, queue: str) -> None:
    jobs = [
        {"kind": "a", "queue": queue, "args": {"n": 1}, "priority": "high", "max_attempts": 3},
        {"kind": "b", "queue": queue, "id": f"{queue}/my id", "headers": {"x": "y"}, "part": "{p}"},
        {"kind": "c", "queue": queue, "delay": 3600, "timeout": 1.5, "correlation_id": "corr", "ttl": 7200},
    ]
    answer = remote.ask("POST", "jobs", {"jobs": jobs})
    assert [(each["kind"], each["queue"]) for each in answer.json["jobs"]] == [
        ("a", queue),
        ("b", queue),
        ("c", queue),
    ]
    first, second, third = [
        remote.ask("GET", f"jobs/{each['id'].replace('/', '%2F').replace(' ', '%20')}").json
        for each in answer.json["jobs"]
    ]
    assert (first["arguments"], first["priority"], first["max_attempts"]) == ({"n": 1}, 0, 3)
    assert (second["id"], second["headers"], second["part"]) == (f"{queue}/my id", {"x": "y"}, "{p}")
    assert (third["state"], third["timeout"], third["correlation_id"]) == ("scheduled", 1.5, "corr")
    assert remote.ask("POST", "jobs", {"jobs": jobs[1:2]}).json["jobs"][0]["id"] == f"{queue}/my id"
    assert remote.app.queue(queue).stats().counts.waiting == 3


def test_keys_and_dependencies(remote: Remote, queue: str) -> None:
    first = enqueue(remote, queue, key=f"{queue}-k", window=10)
    again = remote.ask("POST", "jobs", {"jobs": [{"kind": "mail.send", "queue": queue, "key": f"{queue}-k"}]})
    assert again.json["jobs"] == [{"id": first, "queue": queue, "kind": "mail.send", "duplicate": True}]
    after = enqueue(remote, queue, after=[first])
    shown = remote.ask("GET", f"jobs/{after}").json
    assert (shown["state"], shown["after"]) == ("blocked", [first])
    answer = remote.ask("POST", "jobs", {"jobs": [{"kind": "a", "queue": queue, "after": ["none"]}]})
    assert (answer.status, answer.error) == (400, "unknown_dependency")
    answer = remote.ask("POST", "jobs", {"jobs": [{"kind": "a", "queue": queue, "group": "none"}]})
    assert (answer.status, answer.error) == (404, "unknown_group")


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({"kind": "a"}, "no task a"),
        ({"kind": "", "queue": "q"}, "length"),
        ({"kind": "a", "queue": "a b"}, "queue"),
        ({"kind": "a", "queue": "q", "delay": -1}, ">= 0"),
        ({"kind": "a", "queue": "q", "delay": 1, "at": "2100-01-01T00:00:00Z"}, "exclude"),
        ({"kind": "a", "queue": "q", "on_conflict": "replace"}, "key"),
        ({"kind": "a", "queue": "q", "on_conflict": "ask"}, "on_conflict"),
        ({"kind": "a", "queue": "q", "priority": "urgent"}, "priority"),
        ({"kind": "a", "queue": "q", "args": [1]}, "object"),
        ({"kind": "a", "queue": "q", "max_attempts": 0}, "max_attempts"),
        ({"kind": "a", "queue": "q", "ttl": 0}, "ttl"),
        ({"kind": "a", "queue": "q", "id": ""}, "id"),
        ({"kind": "a", "queue": "q", "headers": {"": "x"}}, "headers"),
        ({"kind": "a", "queue": "q", "on": 1}, "unknown field"),
    ],
)
def test_wrong_jobs(local: Remote, job: dict[str, Any], text: str) -> None:
    answer = local.ask("POST", "jobs", {"jobs": [{"kind": "good", "queue": "wrong"}, job]})
    assert (answer.status, answer.error) == (400, "invalid_body"), answer
    assert text in answer.json["detail"], answer.json
    assert local.ask("GET", "jobs", queue="wrong").json["jobs"] == []


def test_tasks_of_the_app(queue: str) -> None:
    with App("memory://") as app:

        @app.task(name="add", queue=queue, part="p{a}", max_attempts=7)
        def add(a: int, b: int = 2) -> int:
            return a + b

        with serving(app) as remote:
            answer = remote.ask("POST", "jobs", {"jobs": [{"kind": "add", "args": {"a": 1}}]})
            [job] = answer.json["jobs"]
            shown = remote.ask("GET", f"jobs/{job['id']}").json
            assert (shown["queue"], shown["part"], shown["max_attempts"]) == (queue, "p1", 7)
            for wrong in ({"a": "x"}, {}, {"a": 1, "c": 3}):
                answer = remote.ask("POST", "jobs", {"jobs": [{"kind": "add", "args": wrong}]})
                assert (answer.status, answer.error) == (400, "invalid_body")
                assert answer.json["detail"].startswith("jobs[0]: ")
            part = {"kind": "add", "args": {"a": 1}, "part": "{a.__class__}"}
            id = remote.ask("POST", "jobs", {"jobs": [part]}).json["jobs"][0]["id"]
            assert remote.ask("GET", f"jobs/{id}").json["part"] == "{a.__class__}"
            app.run(burst=True)
            result = remote.ask("GET", f"jobs/{job['id']}/result").json
            assert (result["state"], result["result"]) == ("done", 3)


def test_lists(remote: Remote, queue: str) -> None:
    ids = [enqueue(remote, queue, args={"n": n}, id=f"{queue}-{n}") for n in range(5)]
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = remote.ask("GET", "jobs", queue=queue, limit=2, **cursor).json
        found += [each["id"] for each in page["jobs"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert found == ids[::-1]
    page = remote.ask("GET", "jobs", queue=queue, bodies="true", oldest_first="true").json
    assert [each["arguments"] for each in page["jobs"]] == [{"n": n} for n in range(5)]
    assert remote.ask("GET", "jobs", queue=queue, kind="none").json["jobs"] == []
    assert remote.ask("GET", "jobs", queue=queue, bodies="true", limit=101).error == "invalid_argument"
    assert remote.ask("GET", "jobs", queue="a b").error == "invalid_argument"


def test_an_unknown_job(remote: Remote) -> None:
    for path in ("", "/result", "/explanation", "/history"):
        answer = remote.ask("GET", f"jobs/none{path}")
        assert (answer.status, answer.error) == (404, "unknown_job")
    for path in ("cancel", "retry"):
        assert remote.ask("POST", f"jobs/none/{path}").error == "unknown_job"
    assert remote.ask("GET", "jobs/%00").status == 404
    assert remote.ask("GET", f"jobs/{'x' * 300}").error == "unknown_job"


def test_cancel_retry_explain_and_history(remote: Remote, queue: str) -> None:
    id = enqueue(remote, queue, max_attempts=1)
    why = remote.ask("GET", f"jobs/{id}/explanation").json
    assert why["id"] == id
    assert queue in why["sentence"]
    answer = remote.ask("POST", f"jobs/{id}/cancel")
    assert answer.json == {"id": id, "changed": True, "state": "canceled", "cancel_requested": None}
    assert remote.ask("POST", f"jobs/{id}/cancel").json["changed"] is False
    assert remote.ask("POST", f"jobs/{id}/retry").json["state"] == "ready"
    message = remote.app.queue(queue).get()
    assert message is not None
    asked = remote.ask("POST", f"jobs/{id}/cancel").json
    assert (asked["changed"], asked["state"], asked["cancel_requested"]) == (True, "running", "requested")
    message.nack(reason="broken")
    history = remote.ask("GET", f"jobs/{id}/history").json
    assert history["id"] == id
    assert len(history["attempts"]) == 1
    done = enqueue(remote, queue)
    taken = remote.app.queue(queue).get()
    assert taken is not None
    taken.ack(result={"sum": 3})
    answer = remote.ask("POST", f"jobs/{done}/retry")
    assert (answer.status, answer.error) == (409, "not_revivable")
    result = remote.ask("GET", f"jobs/{done}/result")
    assert (result.status, result.json["state"], result.json["result"]) == (200, "done", {"sum": 3})


def test_a_result_without_wait(remote: Remote, queue: str) -> None:
    id = enqueue(remote, queue)
    answer = remote.ask("GET", f"jobs/{id}/result")
    assert (answer.status, answer.json["state"], answer.json["finished_at"]) == (202, "ready", None)
    assert remote.ask("GET", f"jobs/{id}/result", wait=0.05).status == 202
    for wrong in (-1, 301, "long"):
        assert remote.ask("GET", f"jobs/{id}/result", wait=wrong).error == "invalid_argument"


def waiting(monkeypatch: pytest.MonkeyPatch) -> list[LongPolls]:
    """The long polls of the servers that have one, in the order of arrival."""
    found: list[LongPolls] = []
    place = LongPolls.place

    def noted(self: LongPolls) -> Any:
        found.append(self)
        return place(self)

    monkeypatch.setattr(LongPolls, "place", noted)
    return found


def test_a_long_poll_ends_with_its_job(remote: Remote, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = waiting(monkeypatch)
    id = enqueue(remote, queue)
    with remote.connect() as wire:
        wire.request(f"/v1/jobs/{id}/result?wait=60", method="GET")
        until(lambda: bool(polls) and polls[-1].open == 1)
        message = remote.app.queue(queue).get()
        assert message is not None
        message.ack(result=7)
        answer = wire.answer()
    assert (answer.status, answer.json["result"]) == (200, 7)
    until(lambda: polls[-1].open == 0)


def test_a_client_that_leaves(remote: Remote, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = waiting(monkeypatch)
    id = enqueue(remote, queue)
    with remote.connect() as wire:
        wire.request(f"/v1/jobs/{id}/result?wait=60", method="GET")
        until(lambda: bool(polls) and polls[-1].open == 1)
    until(lambda: polls[-1].open == 0)


def test_a_drain_ends_a_long_poll(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = waiting(monkeypatch)
    with App("memory://") as app, serving(app) as remote:
        id = enqueue(remote, queue)
        with remote.connect() as wire:
            wire.request(f"/v1/jobs/{id}/result?wait=60", method="GET")
            until(lambda: bool(polls) and polls[-1].open == 1)
            remote.server.stop()
            assert wire.answer().status == 202


def test_too_many_long_polls(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = waiting(monkeypatch)
    with App("memory://") as app, serving(app, max_consumers=1) as remote:
        id = enqueue(remote, queue)
        with remote.connect() as wire:
            wire.request(f"/v1/jobs/{id}/result?wait=60", method="GET")
            until(lambda: bool(polls) and polls[-1].open == 1)
            answer = remote.ask("GET", f"jobs/{id}/result", wait=60)
            assert (answer.status, answer.error) == (503, "queue_busy")


def test_children_by_generation(remote: Remote, queue: str) -> None:
    parent = enqueue(remote, queue)
    specs = [
        Spec(id=f"{queue}-{n}", queue=queue, parent=parent, generation=n // 2, payload=b"{}")
        for n in range(3)
    ]
    remote.app.engine.call(Append(tuple(specs)))

    def listed(**arguments: Any) -> list[str]:
        answer = remote.ask("GET", "jobs", queue=queue, oldest_first="true", **arguments)
        return [each["id"] for each in answer.json["jobs"]]

    ids = [spec.id for spec in specs]
    assert listed(parent=parent) == ids
    assert listed(parent=parent, generation=0) == ids[:2]
    assert listed(generation=1) == ids[2:]
    assert remote.ask("GET", f"jobs/{ids[2]}").json["generation"] == 1
    old = {"parent": parent, "generation": 0}
    assert remote.ask("POST", "bulk/cancel", {**old, "dry_run": True}).json["count"] == 2
    assert remote.ask("POST", "bulk/cancel", old).json["count"] == 2
    assert remote.ask("POST", "bulk/retry", {"parent": parent}).json["count"] == 2
    remote.ask("POST", "bulk/cancel", old)
    assert remote.ask("POST", "bulk/purge", {**old, "queue": queue}).json["count"] == 2
    assert listed(parent=parent) == ids[2:]
    assert remote.ask("GET", "jobs", queue=queue, generation="x").error == "invalid_argument"
    assert remote.ask("GET", "jobs", queue=queue, generation=-1).error == "invalid_argument"


def test_bulk_changes(remote: Remote, queue: str) -> None:
    ids = [enqueue(remote, queue) for _ in range(4)]
    assert remote.ask("POST", "bulk/cancel", {"queue": queue, "dry_run": True}).json["count"] == 4
    assert remote.ask("POST", "bulk/cancel", {"ids": ids[:1]}).json["count"] == 1
    message = remote.app.queue(queue).get()
    assert message is not None
    answer = remote.ask("POST", "bulk/cancel", {"queue": queue, "kind": "mail.send"}).json
    assert (answer["count"], answer["requested"]) == (2, 1)
    message.nack()
    assert remote.ask("POST", "bulk/retry", {"queue": queue}).json["count"] == 4
    assert remote.ask("POST", "bulk/purge", {"queue": queue}).json["count"] == 0
    remote.ask("POST", "bulk/cancel", {"queue": queue})
    assert remote.ask("POST", "bulk/purge", {"ids": ids[:2]}).json["count"] == 2
    assert remote.ask("POST", "bulk/purge", {"queue": queue}).json["count"] == 2
    assert remote.ask("GET", "jobs", queue=queue).json["jobs"] == []


def test_a_draining_server_takes_no_jobs() -> None:
    with App("memory://") as app, serving(app, drain_grace=5.0) as remote:
        remote.enqueue("a")
        message = remote.take("a")
        remote.server.stop()
        until(lambda: remote.post("/readyz").status == 503)
        answer = remote.ask("POST", "jobs", {"jobs": [{"kind": "a", "queue": "q"}]})
        assert (answer.status, answer.error) == (503, "shutdown_draining")
        names = ("message_id", "lease_id")
        body = {"queue": "a", "receipts": [{name: message[name] for name in names}]}
        assert remote.ask("POST", "queue/ackMany", body).json["acked"] == 1


def test_a_wait_does_not_miss_the_end(remote: Remote, queue: str) -> None:
    """Jobs that end while their long polls begin."""
    ids = [enqueue(remote, queue) for _ in range(8)]
    states: dict[str, str] = {}

    def poll(id: str) -> None:
        states[id] = remote.ask("GET", f"jobs/{id}/result", wait=30).json["state"]

    threads = [threading.Thread(target=poll, args=(id,)) for id in ids]
    for thread in threads:
        thread.start()
    for message in remote.app.queue(queue).get_many(8, wait=WAIT):
        message.ack()
    for thread in threads:
        thread.join(WAIT)
    assert states == dict.fromkeys(ids, "done")


def test_resolve_makes_a_job_done(remote: Remote, queue: str) -> None:
    first = enqueue(remote, queue, delay=3600)
    second = enqueue(remote, queue, after=[first])
    body = {"outcome": "marked", "why": "copied by hand", "by": "ada", "result": {"rows": 7}}
    answer = remote.ask("POST", f"jobs/{first}/resolve", body)
    assert (answer.status, answer.json["state"], answer.json["reason"]) == (200, "done", "marked")
    assert answer.json["result"] == {"rows": 7}
    assert remote.ask("GET", f"jobs/{second}").json["state"] == "ready"
    (decision,) = remote.ask("GET", f"jobs/{first}/history").json["attempts"]
    assert (decision["outcome"], decision["worker"], decision["error"]) == ("marked", "ada", "copied by hand")
    assert remote.ask("POST", f"jobs/{first}/resolve", body).status == 200
    answer = remote.ask("POST", f"jobs/{first}/resolve", {"outcome": "skipped", "why": "again"})
    assert (answer.status, answer.error) == (409, "not_resolvable")
    answer = remote.ask("POST", f"jobs/{second}/resolve", {"outcome": "skipped", "why": "not needed"})
    assert (answer.status, answer.json["reason"], answer.json["result"]) == (200, "skipped", None)
    assert remote.ask("GET", f"jobs/{second}/history").json["attempts"][0]["worker"] != ""
    for wrong in ({"outcome": "lost", "why": "x"}, {"outcome": "marked"}, {"outcome": "marked", "why": ""}):
        assert remote.ask("POST", f"jobs/{second}/resolve", wrong).status == 400
    assert remote.ask("POST", "jobs/none/resolve", body).error == "unknown_job"
