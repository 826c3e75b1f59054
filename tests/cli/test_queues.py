"""queues, parts and schedules."""

from __future__ import annotations

import re

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.shell import Shell
from towpath import App, commands, new_id
from towpath.commands import Spec
from towpath.core.schedule import Schedule
from towpath.operations import schedules


def test_set_and_lift(shell: Shell) -> None:
    options = [
        "--capacity",
        "5",
        "--cap",
        "2",
        "--rate",
        "10/s",
        "--burst",
        "3",
        "--retention",
        "2d",
        "--keep",
        "7",
    ]
    set_ = shell.run("queues", "set", "orders", *options, "--json").json
    assert (set_["capacity"], set_["cap"], set_["rate"], set_["retention"], set_["keep"]) == (
        5,
        2,
        "10/s:3",
        172800.0,
        7,
    )
    lifted = shell("queues", "set", "orders", "--capacity", "none", "--rate", "none", "--json").json
    assert (lifted["capacity"], lifted["cap"], lifted["rate"]) == (None, 2, None)
    assert "orders: cap 2" in shell("queues", "set", "orders", "--cap", "2").out
    assert "other (new)" in shell("queues", "set", "other", "--cap", "1").out
    held = shell("queues", "set", "orders", "--not-before", "10m", "--json").json["not_before"]
    assert held is not None
    assert [each["queue"] for each in shell("queues", "list", "--json").json["queues"]] == ["orders", "other"]
    assert shell("queues", "list").out.splitlines()[1].split()[0] == "orders"


def test_show(shell: Shell) -> None:
    shell("put", "orders", "x", "--part", "ada")
    shell("queues", "set", "orders", "--cap", "2", "--retention", "2d")
    shell("parts", "pause", "orders", "bob", "--why", "unpaid")
    shell("queues", "pause", "orders", "--why", "lunch")
    shown = shell.run("queues", "show", "orders", "--json").json
    assert (shown["ready"], shown["cap"], shown["paused"], shown["why"]) == (1, 2, True, "lunch")
    assert [(each["part"], each["ready"], each["paused"]) for each in shown["parts"]] == [
        ("ada", 1, False),
        ("bob", 0, True),
    ]
    text = shell("queues", "show", "orders").out
    for line in (r"ready +1", r"cap +2", r"why +lunch", r"retention +2d", r"oldest ready +\S+ ago"):
        assert re.search(f"(?m)^{line}$", text), text
    assert "\npart bob: 0 ready, 0 running, paused (unpaid), weight 1" in text
    assert "capacity" not in text
    assert "There is no queue nope." in shell("queues", "show", "nope", code=3).err


def test_warn_depth(shell: Shell) -> None:
    set_ = shell.run("queues", "set", "orders", "--capacity", "9", "--warn-depth", "7", "--json").json
    assert (set_["capacity"], set_["warn_depth"]) == (9, 7)
    with App(shell.url) as app:
        assert app.queue("orders").warn_depth() == 7
        app.queue("other").configure(warn_depth=3)
    assert "orders: capacity 9, warn_depth 7, cap 2" in shell("queues", "set", "orders", "--cap", "2").out
    assert [each["warn_depth"] for each in shell("queues", "list", "--json").json["queues"]] == [7, 3]
    heading, row, _ = shell("queues", "list").out.splitlines()
    assert "warn at" in heading
    assert "7" in row.split()
    assert shell("queues", "set", "orders", "--warn-depth", "none", "--json").json["warn_depth"] is None
    for wrong in (["--warn-depth", "0"], ["--warn-depth", "8", "--capacity", "7"]):
        assert "warn_depth is" in shell("queues", "set", "orders", *wrong, code=2).err
    assert shell("queues", "list", "--json").json["queues"][0]["capacity"] == 9


def test_a_full_queue_refuses(shell: Shell) -> None:
    shell("queues", "set", "orders", "--capacity", "1")
    shell.put()
    error = shell("put", "orders", "x", "--json", code=1).error
    assert (error["type"], error["details"]["capacity"]) == ("QueueFull", 1)
    assert "towpath queues set orders --capacity" in error["next"]


def test_pause_and_resume(shell: Shell) -> None:
    shell.put()
    assert shell.run("queues", "pause", "orders", "--why", "night", "--json").json["paused"]
    assert "night" in shell("queues", "list").out
    shell("get", "orders", code=3)
    assert not shell("queues", "resume", "orders", "--json").json["paused"]
    shell("get", "orders")


def test_an_unknown_queue(shell: Shell) -> None:
    shell.put()
    for command in ("pause", "resume"):
        error = shell("queues", command, "typo", "--json", code=3).error
        assert "orders" in error["next"]
    assert shell("queues", "pause", "later", "--new", "--json").json["paused"]
    for words in (
        ["parts", "list", "typo"],
        ["parts", "pause", "typo", "p"],
        ["jobs", "list", "--queue", "typo"],
    ):
        assert "no queue typo" in shell(*words, code=3).err


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--burst", "3"],
        ["--rate", "fast"],
        ["--rate", "0/s"],
        ["--cap", "-1"],
        ["--cap", "many"],
        ["--retention", "soon"],
    ],
)
def test_settings_that_make_no_sense(shell: Shell, options: list[str]) -> None:
    shell("queues", "set", "orders", *options, code=2)
    shell("parts", "set", "orders", "p", *options, code=2)


def test_parts(shell: Shell) -> None:
    shell.put("orders", "--part", "a")
    assert (
        shell.run(
            "parts", "set", "orders", "a", "--cap", "2", "--rate", "5/10s", "--weight", "3", "--json"
        ).json["weight"]
        == 3
    )
    assert shell("parts", "pause", "orders", "a", "--why", "unpaid", "--json").json["paused"]
    [part] = shell("parts", "list", "orders", "--json").json["parts"]
    assert (part["part"], part["ready"], part["cap"], part["rate"], part["why"]) == (
        "a",
        1,
        2,
        "5/10s",
        "unpaid",
    )
    assert "unpaid" in shell("parts", "list", "orders").out
    shell("get", "orders", code=3)
    assert not shell("parts", "resume", "orders", "a", "--json").json["paused"]
    assert (
        shell("parts", "set", "orders", "a", "--cap", "1", "--why", "one line", "--json").json["why"]
        == "one line"
    )
    shell("parts", "pause", "orders", "a", "--why", "unpaid")
    assert shell("parts", "resume", "orders", "a", "--json").json["why"] == "one line"
    assert "Parts: a" in shell("parts", "resume", "orders", "b", code=3).err
    shell.put("plain")
    assert "no parts" in shell("parts", "list", "plain").out


@pytest.fixture
def nightly(shell: Shell) -> Shell:
    spec = Spec(id="template", queue="work", kind="clean", payload=b'{"deep": true}')
    with App(shell.url) as app:
        schedules.register(app.engine, Schedule(name="nightly", spec=spec, cron="30 2 * * *"))
        schedules.register(app.engine, Schedule(name="often", spec=spec, every=60_000_000))
    return shell


def test_schedules(nightly: Shell) -> None:
    listed = nightly.run("schedules", "list", "--json").json["schedules"]
    assert [(each["name"], each["cron"], each["every"]) for each in listed] == [
        ("nightly", "30 2 * * *", None),
        ("often", None, 60.0),
    ]
    assert listed[0]["payload"] == {"deep": True}
    assert "every 60s" in nightly("schedules", "list").out
    with App(nightly.url) as app:
        view = app.ledger.note("schedule/often")
        assert view is not None
        overdue = replace(msgspec.json.decode(view.value, type=Schedule), next_at=1)
        app.engine.call(commands.Note(key="schedule/often", value=msgspec.json.encode(overdue)))
    assert "due, but no worker runs" in " ".join(nightly("schedules", "list").out.split())
    assert nightly("schedules", "pause", "nightly", "--json").json["paused"]
    assert "paused" in nightly("schedules", "list").out
    assert not nightly("schedules", "resume", "nightly", "--json").json["paused"]
    changed = nightly(
        "schedules",
        "set",
        "nightly",
        "--cron",
        "0 4 * * *",
        "--missed",
        "once",
        "--args",
        '{"deep": false}',
        "--json",
    ).json
    assert (changed["cron"], changed["missed"], changed["payload"]) == ("0 4 * * *", "once", {"deep": False})
    assert nightly("schedules", "set", "often", "--every", "2m", "--json").json["every"] == 120.0
    id = nightly("schedules", "trigger", "nightly").out.strip()
    assert nightly("jobs", "show", id, "--json").json["kind"] == "clean"
    assert nightly("schedules", "remove", "nightly", "--json").json == {"name": "nightly", "removed": True}
    assert [each["name"] for each in nightly("schedules", "list", "--json").json["schedules"]] == ["often"]


def test_schedules_that_are_not_there(nightly: Shell) -> None:
    for command in ("pause", "resume", "remove", "trigger"):
        assert "Schedules: nightly, often" in nightly("schedules", command, "weekly", code=3).err
    assert "Nothing to set" in nightly("schedules", "set", "nightly", code=2).err
    nightly("schedules", "set", "nightly", "--cron", "when I like", code=2)
    nightly("schedules", "set", "nightly", "--tz", "Mars/Olympus", code=2)


def test_no_schedules(shell: Shell) -> None:
    shell.put()
    assert "no schedules" in shell("schedules", "list").out


def test_watching_shows_how_far_running_jobs_are(shell: Shell) -> None:
    ledger, id = shell.ledger(), new_id()
    ledger.apply([commands.Append((Spec(id=id, queue="net", kind="fetch"),))])
    claim = commands.Claim(wants=(commands.Want("net", 2),), owner="me", lease=60_000_000)
    (claimed,) = ledger.apply([claim])
    assert isinstance(claimed, commands.Claimed)
    ledger.apply([commands.Progress(id, claimed.claims[0].fence, 25, 100)])
    ledger.close()
    text = shell.run("stats", "--watch", "--count", "1").out
    assert ["fetch", id, "25", "100", "25%", "-"] in [line.split() for line in text.splitlines()]
    assert text.splitlines()[-1] == "1 fetch, 0 waiting"
    (data,) = shell.run("stats", "--watch", "--json", "--count", "1").lines
    assert [(entry["kind"], entry["done"], entry["per_second"]) for entry in data["running"]] == [
        ("fetch", 25, None)
    ]


def test_a_part_limits_its_appends(shell: Shell) -> None:
    shell.run("put", "orders", "1", "--part", "acme")
    shell.run("parts", "set", "orders", "acme", "--capacity", "1", "--append-rate", "10/m:2")
    assert (
        "part acme of queue orders is full: 1 of 1 waiting"
        in shell.run("put", "orders", "2", "--part", "acme", code=1).err
    )
    shell.run("put", "orders", "3", "--part", "other")
    (acme, _) = shell.run("parts", "list", "orders", "--json").json["parts"]
    assert (acme["part"], acme["capacity"], acme["append_rate"]) == ("acme", 1, "10/m:2")
    assert "10/m:2" in shell.run("parts", "list", "orders").out
    shell.run("parts", "set", "orders", "acme", "--capacity", "none", "--append-rate", "none")
    shell.run("put", "orders", "2", "--part", "acme")
