"""Events as server-sent events."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.waiting import WAIT, until
from tests.support.wire import Remote, Wire, serving
from towpath import App
from towpath.events import JobsAppended
from towpath.http.api import events


def subscribe(wire: Wire, query: str = "") -> None:
    wire.request(f"/v1/events{query}", method="GET")
    status, headers = wire.head()
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert wire.chunk() == b": subscribed\n\n"


def read(wire: Wire, count: int) -> list[dict[str, Any]]:
    """The next events, without keepalives."""
    found: list[dict[str, Any]] = []
    end = time.monotonic() + WAIT
    while len(found) < count:
        assert time.monotonic() < end, found
        for block in wire.chunk().decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
            if "data" in fields:
                data = json.loads(fields["data"])
                assert fields["event"] == data["event"]
                found.append(data)
    return found


def test_the_events_of_a_message(remote: Remote, queue: str) -> None:
    with remote.connect() as wire:
        subscribe(wire, f"?queue={queue}")
        remote.enqueue(f"{queue}-other")
        ids = [remote.enqueue(queue)["message_id"] for _ in range(2)]
        found = read(wire, 2)
    assert [(each["event"], each["fields"]) for each in found] == [
        ("JobsAppended", {"queue": queue, "ids": [id]}) for id in ids
    ]
    assert ids[0] in found[0]["sentence"]


def test_the_events_of_a_worker_in_the_process(queue: str) -> None:
    with App("memory://") as app, serving(app) as remote, remote.connect() as wire:
        app.task(name="noop", queue=queue)(lambda: None)
        subscribe(wire, f"?queue={queue}&kinds=JobsClaimed,JobStarted,JobSettled")
        answer = remote.ask("POST", "jobs", {"jobs": [{"kind": "noop"}]})
        id = answer.json["jobs"][0]["id"]
        app.run(burst=True)
        claimed, started, settled = read(wire, 3)
    assert (claimed["event"], claimed["fields"]["ids"]) == ("JobsClaimed", [id])
    assert claimed["fields"].keys() == {"ids", "queues", "owner"}
    assert (started["event"], started["fields"]["id"]) == ("JobStarted", id)
    assert (settled["event"], settled["fields"]["state"]) == ("JobSettled", "done")


def test_kinds(local: Remote, queue: str) -> None:
    with local.connect() as wire:
        subscribe(wire, "?kinds=BatchCommitted")
        local.enqueue(queue)
        assert read(wire, 1)[0]["event"] == "BatchCommitted"


def test_wrong_arguments(local: Remote) -> None:
    answer = local.ask("GET", "events", kinds="JobsEaten")
    assert (answer.status, answer.error) == (400, "invalid_argument")
    assert "JobsAppended" in answer.json["detail"]
    assert local.ask("GET", "events", queue="a*").error == "invalid_argument"
    assert local.ask("POST", "events").headers["allow"] == "GET"


def test_drops_are_counted(local: Remote, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_BUFFERED", 2)
    bus = local.app.bus
    with local.connect() as wire:
        subscribe(wire, f"?kinds=JobsAppended&queue={queue}")
        # All before the event loop takes them: the listener holds the lock of the interpreter.
        buffers = [each.listener.__self__ for each in bus._by_kind[JobsAppended].queued]  # type: ignore[attr-defined]
        for number in range(5):
            buffers[-1]._add(JobsAppended(queue, (str(number),)))
        found = read(wire, 1)
        while found[-1]["event"] != "dropped" and len(found) < 5:
            found += read(wire, 1)
    delivered = [each for each in found if each["event"] == "JobsAppended"]
    dropped = sum(each["fields"]["count"] for each in found if each["event"] == "dropped")
    assert len(delivered) + dropped == 5


def test_a_client_that_leaves_is_unsubscribed(local: Remote, queue: str) -> None:
    kind = events._BY_NAME["QueueDeep"]
    before = local.app.bus.wants(kind)
    with local.connect() as wire:
        subscribe(wire, "?kinds=QueueDeep")
        assert local.app.bus.wants(kind)
    until(lambda: local.app.bus.wants(kind) == before)


def test_the_stream_ends_with_the_server() -> None:
    with App("memory://") as app, serving(app) as remote, remote.connect() as wire:
        subscribe(wire)
        remote.server.stop()
        while wire.chunk():
            pass
