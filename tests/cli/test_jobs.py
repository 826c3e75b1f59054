"""jobs, dead, groups, stats: list and change jobs, one by one and in bulk."""

from __future__ import annotations

import getpass
import json
from contextlib import closing

import towpath
from tests.support.running import work
from tests.support.shell import Shell
from towpath import commands, new_id
from towpath.clock import SystemClock
from towpath.commands import Release, RetryOutcome, SnoozeOutcome, Spec
from towpath.core.checks import SECOND
from towpath.testing.ledger_suite import Harness


def test_stats(shell: Shell) -> None:
    shell.put("orders")
    shell.put("mail", "--delay", "1h")
    shell("queues", "pause", "mail", "--why", "night")
    data = shell.run("stats", "--json").json
    mail, orders = data["queues"]
    assert (mail["queue"], mail["scheduled"], mail["paused"], mail["why"]) == ("mail", 1, True, "night")
    assert (orders["queue"], orders["ready"]) == ("orders", 1)
    assert orders["oldest_ready_seconds"] >= 0
    assert data["total"]["ready"] == data["total"]["scheduled"] == 1
    table = shell("stats").out
    assert table.splitlines()[0].split()[:3] == ["queue", "blocked", "scheduled"]
    assert "paused: night" in table
    assert [each["queue"] for each in shell("stats", "orders", "--json").json["queues"]] == ["orders"]
    assert "Queues: mail, orders" in shell("stats", "typo", code=3).err


def test_stats_of_an_empty_ledger(shell: Shell) -> None:
    shell.ledger().close()
    assert "no queues yet" in shell("stats").out


def test_stats_watch_is_a_stream_that_sees_changes(shell: Shell) -> None:
    shell.put()
    watching = shell.start("stats", "--watch", "--json", "--interval", "60", "--count", "2")
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["total"]["ready"] == 1
    shell.put()
    assert json.loads(watching.stdout.readline())["total"]["ready"] == 2
    assert watching.wait(30) == 0
    watching.communicate()


def test_stats_watch_for_people(shell: Shell) -> None:
    shell.put()
    assert shell("stats", "--watch", "--count", "2", "--interval", "0.1").out.count("orders") == 2


def test_list_filters_and_pages(shell: Shell) -> None:
    ids = [shell.put("orders", "--header", f"n={n}") for n in range(5)]
    shell.put("other", "--key", "k", "--correlation-id", "c")
    first = shell.run("jobs", "list", "--queue", "orders", "--limit", "3", "--json").json
    assert [job["id"] for job in first["jobs"]] == ids[:1:-1]
    rest = shell("jobs", "list", "--queue", "orders", "--limit", "3", "--page", first["next"], "--json").json
    assert [job["id"] for job in rest["jobs"]] == ids[1::-1]
    assert rest["next"] is None
    for filters in (["--key", "k"], ["--correlation-id", "c"], ["--queue", "oth*"]):
        assert [job["queue"] for job in shell("jobs", "list", *filters, "--json").json["jobs"]] == ["other"]
    assert [job["id"] for job in shell("jobs", "list", "--header", "n=2", "--json").json["jobs"]] == [ids[2]]
    assert (
        len(
            shell("jobs", "list", "--since", "1h", "--state", "ready", "--oldest-first", "--json").json[
                "jobs"
            ]
        )
        == 6
    )
    assert shell("jobs", "list", "--until", "1h", "--json").json["jobs"] == []
    people = shell("jobs", "list", "--limit", "2")
    assert people.out.splitlines()[0].split()[0] == "id"
    assert "add --page" in people.err
    assert "No job matches" in shell("jobs", "list", "--state", "done").err


def test_show_and_explain(shell: Shell) -> None:
    id = shell.put("orders", "--delay", "1h", "--header", "a=b")
    shown = shell("jobs", "show", id).out
    assert "scheduled (delay)" in shown
    assert "a=b" in shown
    report = shell("jobs", "explain", id, "--json").json
    assert (report["id"], report["gate"]) == (id, "scheduled")
    assert report["until"] > "2026"
    assert report["sentence"] == shell("jobs", "explain", id).out.strip()
    for command in ("show", "explain"):
        assert shell("jobs", command, "nope", "--json", code=3).error["type"] == "UnknownJob"


def test_attempts_are_shown_within_max_attempts(shell: Shell) -> None:
    id = shell.put("orders", "--max-attempts", "2")
    with closing(shell.ledger()) as ledger:
        harness = Harness(ledger, SystemClock().now())
        for outcome in (SnoozeOutcome(), SnoozeOutcome(), SnoozeOutcome(), RetryOutcome(error="busy")):
            harness.settle(harness.take("orders"), outcome)
    assert " 1/2 " in shell("jobs", "list").out
    assert "attempts  1 of 2, 1 failed, 0 lost; started 4 times" in shell("jobs", "show", id).out
    data = shell("jobs", "show", id, "--json").json
    assert (data["attempts"], data["failures"], data["max_attempts"], data["error"]) == (4, 1, 2, "busy")
    with closing(shell.ledger()) as ledger:
        harness = Harness(ledger, SystemClock().now())
        harness.done(harness.take("orders"))
    assert " 2/2 " in shell("jobs", "list").out
    assert shell("jobs", "show", id, "--json").json["error"] is None


def test_show_has_the_history_of_attempts(shell: Shell) -> None:
    id = shell.put("orders")
    with closing(shell.ledger()) as ledger:
        harness = Harness(ledger, SystemClock().now())
        harness.settle(harness.take("orders", owner="me:1"), RetryOutcome(error="busy\x1b[31m\n\nTraceback"))
        harness.jump(SECOND)
        claim = harness.take("orders", owner="you:2")
        harness.jump(2 * SECOND)
        harness.settle(claim, Release())
    one, two = shell("jobs", "show", id, "--json").json["history"]
    assert (one["number"], one["counted"], one["outcome"], one["worker"]) == (1, True, "retried", "me:1")
    assert one["error"] == "busy\x1b[31m\n\nTraceback"
    assert (two["number"], two["counted"], two["outcome"], two["error"]) == (2, False, "released", None)
    assert one["started_at"] == one["ended_at"] < two["started_at"] < two["ended_at"]
    lines = shell("jobs", "show", id).out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("history"))
    shown = [line.split() for line in lines[head : head + 3]]
    assert shown[0] == ["history", "attempt", "outcome", "started", "took", "worker", "error"]
    assert shown[1] == ["1", "retried", one["started_at"], "0s", "me:1", "busy\\x1b[31m"]
    assert shown[2] == ["-", "released", two["started_at"], "2s", "you:2", "-"]


def test_retry_by_id(shell: Shell) -> None:
    dead, waiting = shell.dead(), shell.put()
    assert shell.run("jobs", "retry", dead, "--json").json == {"revived": 1, "refused": [], "more": False}
    refused = shell("jobs", "retry", waiting, "--json", code=1).json["refused"]
    assert refused == [{"id": waiting, "why": "it is ready"}]
    assert f"refused: {waiting}: it is ready" in shell("jobs", "retry", waiting, code=1).out


def test_an_unknown_id_stops_everything(shell: Shell) -> None:
    dead = shell.dead()
    for command in (
        ["jobs", "retry"],
        ["jobs", "cancel"],
        ["jobs", "purge", "--yes"],
        ["dead", "retry"],
        ["dead", "purge", "--yes"],
    ):
        assert "no job" in shell(*command, dead, "nope", code=3).err
        assert "nope, nix" in shell(*command, dead, "nope", "nix", code=3).err
    assert shell("jobs", "show", dead, "--json").json["state"] == "failed"


def test_cancel_by_id(shell: Shell) -> None:
    held = shell.put()
    shell("get", "orders")
    waiting = shell.put()
    assert shell("jobs", "cancel", held, waiting, "--json").json == {
        "canceled": 1,
        "requested": 1,
        "finished": [],
    }
    again = shell("jobs", "cancel", waiting, "--json").json
    assert again["finished"] == [{"id": waiting, "state": "canceled"}]
    shell("ack", f"{held}:1")
    assert f"{held} is already done" in shell("jobs", "cancel", held, code=1).out


def test_bulk_needs_a_word(shell: Shell) -> None:
    shell.put()
    assert "Select jobs: ids, or --queue" in shell("jobs", "cancel", "--yes", code=2).err
    assert "--yes" in shell("jobs", "cancel", "--queue", "orders", code=2).err
    assert "every unfinished job of queue orders" in shell("jobs", "cancel", "--queue", "orders", code=2).err
    assert "not both" in shell("jobs", "cancel", "x", "--queue", "orders", code=2).err
    assert shell("stats", "--json").json["total"]["ready"] == 1
    assert "no queue typo" in shell("jobs", "cancel", "--queue", "typo", "--yes", code=3).err


def test_cancel_and_retry_by_selectors(shell: Shell) -> None:
    for _ in range(3):
        shell.put("orders")
    shell.put("mail")
    assert shell("jobs", "cancel", "--queue", "orders", "--yes", "--json").json["canceled"] == 3
    assert (
        shell("jobs", "retry", "--queue", "orders", "--state", "canceled", "--yes", "--json").json["revived"]
        == 3
    )
    assert shell("jobs", "cancel", "--all", "--yes", "--json").json["canceled"] == 4


def test_bulk_goes_on_while_there_is_more(shell: Shell) -> None:
    ledger = shell.ledger()
    for _ in range(3):
        ledger.apply([commands.Append(tuple(Spec(id=new_id(), queue="many") for _ in range(4000)))])
    ledger.close()
    assert shell("jobs", "cancel", "--queue", "many", "--yes", "--json").json["canceled"] == 12_000
    assert shell("jobs", "retry", "--queue", "many", "--yes", "--json").json["revived"] == 12_000
    shell("jobs", "cancel", "--queue", "many", "--yes")
    assert shell("jobs", "purge", "--queue", "many", "--yes", "--json").json["purged"] == 12_000


def test_purge(shell: Shell) -> None:
    done, waiting = shell.put(), shell.put()
    shell("ack", shell("get", "orders", "--json").json["receipt"])
    assert (
        shell("jobs", "purge", "--queue", "orders", "--finished-before", "1h", "--yes", "--json").json[
            "purged"
        ]
        == 0
    )
    assert "--yes" in shell("jobs", "purge", done, code=2).err
    report = shell("jobs", "purge", done, waiting, "--yes", "--json", code=1).json
    assert report == {"purged": 1, "unfinished": [waiting]}
    assert "cancel it first" in shell("jobs", "purge", waiting, "--yes", code=1).out


def test_dead_letters(shell: Shell) -> None:
    ids = [shell.dead("orders"), shell.dead("orders"), shell.dead("mail")]
    listed = shell.run("dead", "list", "--json").json["jobs"]
    assert [job["id"] for job in listed] == ids[::-1]
    assert "broken" in shell("dead", "list", "--queue", "orders").out
    assert "Select jobs: ids, or --queue" in shell("dead", "retry", "--yes", code=2).err
    assert shell("dead", "retry", "--queue", "orders", "--yes", "--json").json["revived"] == 2
    assert shell("dead", "retry", "--queue", "orders", "--yes", "--json").json["revived"] == 0
    assert "not a dead letter" in shell("dead", "retry", ids[0], code=2).err
    assert shell("dead", "purge", "--all", "--yes", "--json").json["purged"] == 1
    assert shell("dead", "list", "--json").json["jobs"] == []


def test_dead_retry_by_kind(shell: Shell) -> None:
    for kind in ("a", "b"):
        shell("enqueue", kind, "--queue", "work", "--max-attempts", "1")
        shell("nack", shell("get", "work", "--json").json["receipt"])
    assert shell("dead", "retry", "--kind", "a", "--yes", "--json").json["revived"] == 1


def test_what_cannot_come_back_does_not_hang(shell: Shell) -> None:
    """If another job holds the key, every revival is refused."""
    dead = shell.dead("orders", "--key", "k")
    holder = shell.put("orders", "--key", "k")
    report = shell("dead", "retry", "--queue", "orders", "--yes", "--json", code=1).json
    assert report["refused"] == [{"id": dead, "why": f"its key is held by {holder}"}]


def test_children_of_a_job_by_generation(shell: Shell) -> None:
    parent = shell.put()
    with closing(shell.ledger()) as ledger:
        for n in range(3):
            spec = Spec(id=f"{n}", queue="q", parent=parent, generation=n // 2)
            ledger.apply([commands.Append((spec,))])

    def listed(*options: str) -> list[str]:
        return [job["id"] for job in shell("jobs", "list", "--json", *options).json["jobs"]]

    assert listed("--parent", parent) == listed("--parent", parent[:30]) == ["2", "1", "0"]
    assert listed("--parent", parent, "--generation", "0") == ["1", "0"]
    assert listed("--generation", "1") == ["2"]
    assert "generation  1" in shell("jobs", "show", "2").out
    asked = shell("jobs", "cancel", "--parent", parent, "--generation", "0", code=2)
    assert f"every unfinished job of parent {parent}, generation 0" in asked.err
    old = ("--parent", parent, "--generation", "0", "--yes", "--json")
    assert shell("jobs", "cancel", *old).json["canceled"] == 2
    assert shell("jobs", "retry", *old).json["revived"] == 2
    shell("jobs", "cancel", *old)
    assert shell("jobs", "purge", *old).json["purged"] == 2
    assert listed("--parent", parent) == ["2"]
    shell("jobs", "cancel", parent)
    shell("jobs", "purge", parent, "--yes")
    assert listed("--parent", parent) == ["2"]


def test_groups(shell: Shell) -> None:
    ledger = shell.ledger()
    ledger.apply([commands.Open("night"), commands.Append((Spec(id="a", queue="q", group="night"),))])
    ledger.close()
    data = shell.run("groups", "show", "night", "--json").json
    assert (data["id"], data["state"], data["total"], data["unfinished"], data["closed_at"]) == (
        "night",
        "open",
        1,
        1,
        None,
    )
    assert "unfinished  1" in shell("groups", "show", "night").out
    assert shell("put", "q", "x", "--group", "night", "--json").json["new"]
    assert shell("groups", "show", "nope", "--json", code=3).error["type"] == "UnknownGroup"


def test_groups_list_abort_and_retry(shell: Shell) -> None:
    with towpath.App(shell.url) as app:
        app.queue("orders").configure(cap=1)
        assert shell("groups", "list").out == "No group matches.\n"
        task = app.task(name="t", max_attempts=1)(lambda n: 1 // n)
        failing = app.group([task.of(n=0), task.of(n=1)], id="nightly-1")
        app.group([task.of(n=1)], id="nightly-2")
        app.group([task.of(n=1)], id="weekly-1")
        shell("groups", "abort", "weekly")
        work(app)
        listed = shell("groups", "list", "--json").json
        assert [each["id"] for each in listed["groups"]] == ["weekly-1", "nightly-2", "nightly-1"]
        found = shell("groups", "list", "--outcome", "failed", "--json").json["groups"]
        assert [(each["id"], each["failed"], each["done"]) for each in found] == [("nightly-1", 1, 1)]
        page = shell("groups", "list", "--prefix", "nightly", "--ascending", "--limit", "1", "--json").json
        assert [each["id"] for each in page["groups"]] == ["nightly-1"]
        more = shell("groups", "list", "--prefix", "nightly", "--ascending", "--page", page["next"])
        assert "nightly-2" in more.out
        assert "nightly-1" not in more.out
        assert shell("groups", "retry", "nightly-1", "--json").json == {
            "id": "nightly-1",
            "revived": 1,
            "refused": [],
            "more": False,
        }
        assert failing.status().state == "sealed"
        assert shell("groups", "retry", "nightly-2").out == "0 retried\n"
        assert shell("groups", "abort", "nightly-1").out == "group nightly-1 is aborted\n"
    assert shell("groups", "retry", "nothing", "--json", code=3).error["type"] == "UnknownGroup"
    shell("groups", "abort", "nothing", code=3)
    assert "--state" in shell("groups", "list", "--state", "shut", code=2).err


def test_history(shell: Shell) -> None:
    done, dead, waiting = shell.put("orders"), "", ""
    receipt = shell("get", "orders", "--json").json["receipt"]
    shell("ack", receipt)
    dead, waiting = shell.dead("mail"), shell.put("mail")
    listed = shell("history", "--json").json
    assert [job["id"] for job in listed["jobs"]] == [dead, done]
    assert all(job["duration"] >= 0 for job in listed["jobs"])
    for arguments, ids in (
        (["orders"], [done]),
        (["ma*"], [dead]),
        (["--state", "failed"], [dead]),
        (["--state", "done", "--state", "canceled"], [done]),
        (["--limit", "1"], [dead]),
        (["--until", "1h"], []),
    ):
        assert [job["id"] for job in shell("history", *arguments, "--json").json["jobs"]] == ids
    table = shell("history").out
    assert waiting not in table
    assert [line.split()[0] for line in table.splitlines()] == ["id", dead, done]
    assert "broken" in table
    assert "No job matches." in shell("history", "--until", "1h").err
    assert shell("history", "nowhere", code=3).err.startswith("Error: There is no queue nowhere")


def test_mark_done_and_skip_keep_the_reason_and_the_person(shell: Shell) -> None:
    dead = shell.dead("orders")
    with closing(shell.ledger()) as ledger:
        Harness(ledger, SystemClock().now()).add("next", "orders", after=[dead])
    assert shell("jobs", "show", "next", "--json").json["state"] == "failed"
    ran = shell(
        "jobs", "mark-done", dead, "--reason", "copied by hand", "--by", "ada", "--result", "7", "--json"
    )
    expected = {"id": dead, "state": "done", "reason": "marked", "why": "copied by hand", "by": "ada"}
    assert ran.json == expected
    data = shell("jobs", "show", dead, "--json").json
    assert (data["state"], data["reason"], data["result"]) == ("done", "marked", 7)
    last = data["history"][-1]
    assert (last["outcome"], last["worker"], last["error"]) == ("marked", "ada", "copied by hand")
    assert "marked by ada: copied by hand" in shell("jobs", "show", dead).out
    assert shell("jobs", "show", "next", "--json").json["state"] == "ready"
    assert "done (skipped by" in shell("jobs", "skip", "next", "--reason", "not needed").out
    assert shell("jobs", "show", "next", "--json").json["history"][-1]["worker"] == getpass.getuser()
    assert "it is done (skipped)" in shell("jobs", "mark-done", "next", "--reason", "x", code=1).err
    assert "--reason" in shell("jobs", "skip", "next", code=2).err
    assert "JSON" in shell("jobs", "mark-done", "next", "--reason", "x", "--result", "{", code=2).err


def test_a_group_is_stopped(shell: Shell) -> None:
    with closing(shell.ledger()) as ledger:
        harness = Harness(ledger, SystemClock().now())
        harness.open("night")
        harness.append(*[Spec(id=id, queue="orders", group="night") for id in ("a", "b")])
        harness.seal("night")
        claim = harness.take("orders")
        assert "group night is stopped" in shell("groups", "abort", "night", "--stop").out
        assert harness.at("a", "b") == "running canceled/stopped"
        harness.done(claim)
        assert harness.at("a") == "done"
    assert shell("groups", "show", "night", "--json").json["outcome"] == "canceled"
