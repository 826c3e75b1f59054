"""Schedules, workers, lanes and breakers over HTTP, and the audit log of every change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.waiting import WAIT, until
from tests.support.wire import Remote, serving
from towpath import App
from towpath.core.breaker import Breaker
from towpath.core.job import Spec
from towpath.core.schedule import Schedule
from towpath.operations.schedules import register


@pytest.fixture
def schedule(remote: Remote, queue: str) -> str:
    name = f"{queue}:daily"
    spec = Spec(id="x", queue=queue, kind="report", payload=b'{"day":1}')
    register(remote.app.engine, Schedule(name=name, cron="0 3 * * *", spec=spec))
    return name


def test_schedules(remote: Remote, schedule: str, queue: str) -> None:
    names = [each["name"] for each in remote.ask("GET", "schedules").json["schedules"]]
    assert schedule in names
    shown = remote.ask("GET", f"schedules/{schedule}").json
    assert (shown["cron"], shown["args"], shown["paused"]) == ("0 3 * * *", {"day": 1}, False)
    paused = remote.ask("POST", f"schedules/{schedule}/pause").json
    assert (paused["paused"], paused["next_at"]) == (True, None)
    assert remote.ask("POST", f"schedules/{schedule}/resume").json["paused"] is False
    change = {"every": 90, "args": {"day": 2}, "missed": "skip"}
    changed = remote.ask("PATCH", f"schedules/{schedule}", change).json
    assert (changed["every"], changed["cron"], changed["args"]) == (90.0, None, {"day": 2})
    id = remote.ask("POST", f"schedules/{schedule}/trigger").json["id"]
    job = remote.ask("GET", f"jobs/{id}").json
    assert (job["queue"], job["kind"], job["arguments"]) == (queue, "report", {"day": 2})
    assert remote.ask("DELETE", f"schedules/{schedule}").json == {"name": schedule, "removed": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/trigger")):
        answer = remote.ask(method, f"schedules/{schedule}{path}")
        assert (answer.status, answer.error) == (404, "unknown_name")


def test_pages_of_schedules(remote: Remote, queue: str) -> None:
    for letter in "cab":
        spec = Spec(id="x", queue=queue, kind="report")
        register(remote.app.engine, Schedule(name=f"{queue}-{letter}", every=60_000_000, spec=spec))
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = remote.ask("GET", "schedules", limit=1, **cursor).json
        found += [each["name"] for each in page["schedules"] if each["name"].startswith(f"{queue}-")]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert found == [f"{queue}-a", f"{queue}-b", f"{queue}-c"]
    answer = remote.ask("PATCH", f"schedules/{queue}-a", {"cron": "soon"})
    assert (answer.status, answer.error) == (400, "invalid_body")
    answer = remote.ask("PATCH", f"schedules/{queue}-a", {"cron": "* * * * *", "every": 1})
    assert (answer.status, answer.error) == (400, "invalid_body")


@contextmanager
def working(app: App, **options: Any) -> Iterator[threading.Thread]:
    """A worker in a thread, until it is drained."""
    thread = threading.Thread(target=app.run, kwargs=options)
    thread.start()
    try:
        yield thread
    finally:
        app.workers.drain("*")
        thread.join(WAIT)
        assert not thread.is_alive()


def test_workers(queue: str) -> None:
    with App("memory://", name="box") as app, serving(app) as remote:
        app.task(name="noop", queue=queue)(lambda: None)
        with working(app, queues=(queue,)) as thread:
            until(lambda: remote.ask("GET", "workers").json["workers"])
            [worker] = remote.ask("GET", "workers").json["workers"]
            assert (worker["name"], worker["queues"]) == ("box", [queue])
            assert worker["started_at"].endswith("Z")
            answer = remote.ask("POST", "workers/bo*/pause", {"why": "deploy"}).json
            assert answer == {"workers": [worker["owner"]], "paused": {"bo*": "deploy"}}
            assert remote.ask("POST", "workers/bo*/resume").json["paused"] == {}
            assert remote.ask("POST", "workers/bo*/resume").error == "unknown_name"
            assert remote.ask("POST", "workers/none/drain").error == "unknown_name"
            assert remote.ask("POST", "workers/box/drain").json["workers"] == [worker["owner"]]
            thread.join(WAIT)
            assert not thread.is_alive()
        assert remote.ask("POST", f"workers/{'x' * 201}/drain").status == 400


def test_lanes(local: Remote) -> None:
    assert local.ask("GET", "lanes").json == {"lanes": [], "next_cursor": None}
    for action in ("pause", "resume"):
        answer = local.ask("POST", f"lanes/none/{action}")
        assert (answer.status, answer.error) == (404, "unknown_name")


def test_breakers(remote: Remote, queue: str) -> None:
    name = f"{queue}-mail"
    engine = remote.app.engine
    engine.components.breakers.declare(Breaker(name), [(queue, f"breaker:{name}")], engine.clock.now())
    found = remote.ask("GET", "breakers").json["breakers"]
    [shown] = [each for each in found if each["name"] == name]
    assert (shown["state"], shown["gates"]) == ("closed", [{"queue": queue, "part": f"breaker:{name}"}])
    opened = remote.ask("POST", f"breakers/{name}/open", {"why": "outage", "seconds": 60}).json
    assert (opened["state"], opened["why"]) == ("open", "by hand: outage")
    assert opened["until"].endswith("Z")
    assert remote.ask("POST", f"breakers/{name}/open").json["until"] is None
    assert remote.ask("POST", f"breakers/{name}/close").json["state"] == "closed"
    assert remote.ask("POST", f"breakers/{name}/reset").json["removed"] is True
    for action in ("open", "close", "reset"):
        answer = remote.ask("POST", f"breakers/{name}/{action}")
        assert (answer.status, answer.error) == (404, "unknown_name")
    assert remote.ask("POST", "breakers/x/open", {"seconds": -1}).error == "invalid_body"


def test_the_audit_log(local: Remote, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "towpath.http.audit"):
        id = local.enqueue(queue)["message_id"]
        local.ask("GET", f"queues/{queue}")
        local.ask("PATCH", f"queues/{queue}", {"paused": True, "why": "a\nb"})
        local.ask("POST", f"jobs/{id}/cancel")
        local.ask("POST", "bulk/purge", {"queue": queue, "dry_run": True})
        local.ask("POST", "bulk/purge", {"queue": queue})
        local.ask("POST", "workers/none/pause")
        local.ask("POST", "workers/none/resume")
    lines = [each.getMessage() for each in caplog.records if each.name == "towpath.http.audit"]
    assert lines == [
        f"local: set paused=True, why=a\\nb queue {queue}",
        f"local: cancel job {id}: 1",
        f"local: purge done or failed or canceled jobs (queue={queue}): 1",
        "local: pause workers none: 0",
        "local: resume workers none: 1",
    ]
