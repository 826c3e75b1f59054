"""`workers`, SIGHUP, and a worker in a closed terminal: real processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from datetime import UTC, datetime

import pytest

import towpath
from tests.support.processes import command, greet
from tests.support.shell import EXECUTABLE, Shell
from tests.support.waiting import until
from towpath.core.fleet import LimitView
from towpath.operations.workers import Registration


@pytest.fixture
def shop(shop: Shell) -> Shell:
    """The shop with a ledger."""
    shop("put", "other", "{}")
    return shop


def test_times_of_a_listed_worker_are_text(shop: Shell) -> None:
    limit = LimitView(name="geo", queues=("other",), limit=3, running=1, until=1_800_000_000_000_000)
    with towpath.App(shop.url) as app:
        registration = Registration(app.engine, "box#1")
        registration.register()
        registration.report(queues=("other",), concurrency=4, running=1, limits=(limit,))
        until(lambda: len(app.workers.list()) == 1)  # the report is not awaited
        [worker] = app.workers.list()
        assert worker.limits[0].until == datetime.fromtimestamp(1_800_000_000, UTC)
    [listed] = shop("workers", "list", "--json").json["workers"]
    assert listed["limits"][0] | {"until": None} == {
        "name": "geo",
        "queues": ["other"],
        "limit": 3,
        "running": 1,
        "until": None,
    }
    assert listed["limits"][0]["until"] == "2027-01-15T08:00:00Z"
    assert [len(listed[name]) > 19 for name in ("started_at", "seen_at")] == [True, True]


def test_pause_resume_and_drain_of_a_fleet(shop: Shell) -> None:
    with command(shop, "worker", "shop:app", "--processes", "2", "--name", "box", "--json") as parent:
        for _ in range(2):
            parent.until("Worker ")
        names = [each["name"] for each in shop("workers", "list", "--json").json["workers"]]
        assert names == ["box-1", "box-2"]
        assert (
            shop("workers", "pause", "box-*", "--why", "a new disk").out == "box-* is paused: box-1, box-2\n"
        )
        for _ in range(2):
            parent.until("paused (box-*): a new disk")
        id = greet(shop, "ada")
        until(lambda: shop("workers", "list").out.count("paused") == 2)  # a report follows the log line
        assert shop("jobs", "show", id, "--json").json["state"] == "ready"
        asked = time.monotonic()
        assert shop("workers", "resume", "*").out == "box-*: resumed\n"
        parent.until("hello ada")
        assert time.monotonic() - asked < 2
        shop("workers", "drain", "box-1")
        parent.until("drained on request")
        greet(shop, "bob")
        parent.until("hello bob")
        shop("workers", "drain", "*")
        parent.until('{"processes":2,"codes":[0,0],"restarts":0}')
        assert parent.process.wait(60) == 0
    assert shop("workers", "list").out == "No worker is running.\n"
    shop("workers", "resume", "*", code=3)
    shop("workers", "drain", "box-1", code=3)


HOLDS = """
import os
import towpath

app = towpath.App("sqlite:///towpath.db")

@app.task(name="hold", queue="hall")
def hold(name: str) -> None:
    os.write(1, f"holding {name}\\n".encode())
    open(f"{name}.pipe").read()  # until the test opens it for writing
"""


def test_lanes_of_a_fleet_are_paused_from_outside(shop: Shell) -> None:
    lanes = ("--lane", "front:1=hall", "--lane", "back:1=cellar")
    with command(shop, "worker", "shop:app", "--processes", "2", "--concurrency", "4", *lanes) as parent:
        for _ in range(2):
            parent.until("Worker ")

        def listed() -> bool:
            # A worker prints its first line before the commit that lists its lanes.
            found = shop("lanes", "list", "--json").json["lanes"]
            return [(each["name"], each["workers"], each["reserved"], each["paused"]) for each in found] == [
                ("back", 2, 2, False),
                ("front", 2, 2, False),
            ]

        until(listed)
        assert "back, front" in shop("lanes", "pause", "bakc", code=3).err
        asked = time.monotonic()
        assert shop("lanes", "pause", "front", "--why", "a new disk").out == "lane front is paused\n"
        for _ in range(2):
            parent.until("lane front is paused: a new disk")
        assert time.monotonic() - asked < 2, "with the time that the command itself took"
        id = greet(shop, "ada")
        shop("enqueue", "greet", "--queue", "cellar", "--args", '{"name": "bob"}')
        parent.until("hello bob")
        job = shop("jobs", "show", id, "--json").json
        assert (job["state"], job["attempts"]) == ("ready", 0)
        explained = shop("jobs", "explain", id, "--json").json
        assert explained["gate"] == "lane-paused"
        assert explained["sentence"].endswith("but lane front is paused by hand: a new disk")
        assert "a new disk" in shop("lanes", "list").out
        assert shop("lanes", "resume", "front", "--json").json == {
            "lane": "front",
            "paused": False,
            "was_paused": True,
        }
        parent.until("hello ada")
        assert shop("lanes", "resume", "front").out == "lane front was not paused\n"
        assert parent.end() == 0
    assert shop("lanes", "list").out == "No running worker has lanes, and no lane is paused.\n"
    id = greet(shop, "eve")
    assert "no running worker consumes queue hall" in shop("jobs", "explain", id).out


def test_stats_watch_counts_by_lane(shop: Shell) -> None:
    (shop.folder / "holds.py").write_text(HOLDS)
    os.mkfifo(shop.folder / "ada.pipe")
    shop("enqueue", "hold", "--queue", "hall", "--args", '{"name": "ada"}')
    with command(shop, "worker", "holds:app", "--lane", "front=hall", "--lane", "back=cellar") as worker:
        worker.until("holding ada")
        [seen] = [json.loads(shop("stats", "--watch", "--count", "1", "--json").out)]
        assert seen["lanes"] == {"back": {}, "front": {"hold": 1}}
        assert [entry["lane"] for entry in seen["running"]] == ["front"]
        assert "back: nothing; front: 1 hold\n" in shop("stats", "--watch", "--count", "1").out
        (shop.folder / "ada.pipe").write_text("go")
        assert worker.end() == 0


def test_hangup_reads_the_settings_again(shop: Shell) -> None:
    file = shop.folder / "towpath.toml"
    file.write_text('queues = ["cellar"]\n')
    with command(shop, "worker", "shop:app", "--processes", "2", "--concurrency", "3") as parent:
        for _ in range(2):
            parent.until("Worker ")
        greet(shop, "ada")
        file.write_text('queues = ["hall"]\nconcurrency = 9\n')
        parent.process.send_signal(signal.SIGHUP)
        parent.until("settings reloaded: queues hall, concurrency 3")
        # The greeting is in another stream than the log, so that its line may have come before.
        if "hello ada" not in parent.lines:
            parent.until("hello ada")
        file.write_text("queues = 7\n")
        parent.process.send_signal(signal.SIGHUP)
        assert "queues in" in parent.until("the last valid ones stay")
        file.unlink()  # commands refuse it too
        greet(shop, "bob")
        parent.until("hello bob")
        assert parent.end() == 0


def test_hangup_counts_what_runs_in_the_new_lanes(shop: Shell) -> None:
    (shop.folder / "holds.py").write_text(HOLDS)
    file = shop.folder / "towpath.toml"
    file.write_text('concurrency = 4\n[lanes.all]\nqueues = ["hall", "cellar"]\n')
    names = ("ada", "bob")
    for name, queue in zip(names, ("hall", "cellar"), strict=True):
        os.mkfifo(shop.folder / f"{name}.pipe")
        shop("enqueue", "hold", "--queue", queue, "--args", f'{{"name": "{name}"}}')
    with command(shop, "worker", "holds:app") as worker:
        for _ in names:
            worker.until("holding ")
        file.write_text(
            'concurrency = 2\n[lanes.front]\nqueues = ["hall"]\n[lanes.other]\nqueues = ["attic"]\n'
        )
        worker.process.send_signal(signal.SIGHUP)
        worker.until("settings reloaded: queues hall,attic, concurrency 2")
        found: list[tuple[str, int]] = []
        for _ in range(500):  # it is listed after the next commit
            found = [
                (each["name"], each["running"]) for each in shop("lanes", "list", "--json").json["lanes"]
            ]
            if found != [("all", 0)]:
                break
        assert found == [("front", 1), ("other", 0)]
        os.mkfifo(shop.folder / "eve.pipe")
        id = shop("enqueue", "hold", "--queue", "hall", "--args", '{"name": "eve"}').out.strip()
        assert shop("jobs", "show", id, "--json").json["state"] == "ready", (
            "both slots are taken, one by a queue in no lane"
        )
        for name in (*names, "eve"):
            (shop.folder / f"{name}.pipe").write_text("go")
        worker.until("holding eve")
        assert worker.end() == 0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_closed_terminal_is_a_stop(shop: Shell, processes: str) -> None:
    greet(shop, "ada")
    near, far = pty.openpty()
    # The new session's first terminal is the one that it opens; a hangup goes to its leader.
    command = ["setsid", "--ctty", *EXECUTABLE, "worker", "shop:app", "--processes", processes]
    process = subprocess.Popen(
        command, cwd=shop.folder, env=shop.environment, stdin=far, stdout=far, stderr=far
    )
    os.close(far)
    output = b""
    # All processes: one that gets a stop signal while it still starts ends like any other program.
    while b"hello ada" not in output or output.count(b"Worker ") < int(processes):
        output += os.read(near, 4096)
    os.close(near)
    assert process.wait(30) == 0
    assert shop("workers", "list").out == "No worker is running.\n"


def test_groups_pause_and_resume(shop: Shell) -> None:
    with towpath.App(shop.url) as app:
        task = app.task(name="greet", queue="hall")(lambda name: name)
        group = app.group([task.of(name="ada")], id="g")
        assert shop("groups", "pause", "g", "--why", "a new disk").out == "group g is paused\n"
        assert (
            "group g is paused: a new disk; resume it with `towpath groups resume g`"
            in shop("jobs", "explain", group.jobs[0].id).out
        )
        assert group.jobs[0].status().state is towpath.State.BLOCKED
        assert shop("groups", "resume", "g", "--json").json == {"id": "g", "state": "sealed"}
        assert group.jobs[0].status().state is towpath.State.READY
        group.cancel()
        assert shop("groups", "pause", "g", code=1).out == "group g stays closed\n"
    shop("groups", "pause", "nothing", code=3)
