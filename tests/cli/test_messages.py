"""put, get, ack, nack, extend, enqueue: messages from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.shell import Shell
from towpath import State, commands


def test_a_life_with_the_real_executable(shell: Shell) -> None:
    id = shell.run("put", "orders", '{"item": 17}').out.strip()
    first = shell.run("get", "orders", "--json").json
    assert (first["id"], first["fence"], first["payload"], first["attempt"]) == (id, 1, {"item": 17}, 1)
    assert shell.run("extend", first["receipt"], "60", "--json").json["id"] == id
    assert shell.run("nack", first["receipt"], "--reason", "no stock").out == f"{id} is ready\n"
    second = shell.run("get", "orders")
    assert f"receipt      {id}:2" in second.out
    assert '{"item": 17}' in second.out
    assert shell.run("ack", f"{id}:2", "--result", '{"ok": true}', "--json").json == {
        "id": id,
        "state": "done",
    }
    assert shell.run("get", "orders", code=3).out == ""
    shown = shell.run("jobs", "show", id, "--json").json
    assert (shown["state"], shown["result"], shown["error"]) == ("done", {"ok": True}, None)
    assert [end["error"] for end in shown["history"]] == ["no stock"]


def test_put_takes_options(shell: Shell) -> None:
    options = [
        "--priority",
        "high",
        "--delay",
        "1h",
        "--part",
        "p",
        "--header",
        "a=b",
        "--header",
        "c=d=e",
        "--ttl",
        "2d",
    ]
    more = [
        "--max-attempts",
        "3",
        "--timeout",
        "90",
        "--retention",
        "1.5h",
        "--correlation-id",
        "x",
        "--id",
        "mine",
        "--key",
        "k",
    ]
    assert shell("put", "orders", "{}", *options, *more, "--json").json == {
        "id": "mine",
        "seq": 1,
        "queue": "orders",
        "new": True,
    }
    job = shell("jobs", "show", "mine", "--json").json
    assert (job["priority"], job["state"], job["part"], job["headers"]) == (
        0,
        "scheduled",
        "p",
        {"a": "b", "c": "d=e"},
    )
    assert (job["max_attempts"], job["timeout"], job["retention"]) == (3, 90.0, 5400.0)
    assert (job["correlation_id"], job["key"], job["key_policy"]) == ("x", "k", "unique")


def test_the_same_id_or_key_is_one_job(shell: Shell) -> None:
    shell("put", "orders", "1", "--id", "a", "--key", "k")
    assert not shell("put", "orders", "1", "--id", "a", "--json").json["new"]
    again = shell("put", "orders", "2", "--key", "k", "--json").json
    assert (again["id"], again["new"]) == ("a", False)
    replaced = shell(
        "put", "orders", "3", "--key", "k", "--on-conflict", "replace", "--id", "b", "--json"
    ).json
    assert (replaced["id"], replaced["new"]) == ("b", True)


def test_a_message_after_another(shell: Shell) -> None:
    first = shell.put()
    second = shell.put("orders", "--after", first)
    assert f"waits for 1 job: {first}" in shell("jobs", "explain", second).out


@pytest.mark.parametrize(
    ("data", "kind", "encoding", "shown"),
    [
        (b'{"a": 1}', "application/json", "json", {"a": 1}),
        ("grüße ☃".encode(), "text/plain", "text", "grüße ☃"),
        (b"\xff\x00\x1b", "application/octet-stream", "base64", "/wAb"),
        (b"", "text/plain", "text", ""),
    ],
)
def test_stdin_goes_as_it_is(shell: Shell, data: bytes, kind: str, encoding: str, shown: object) -> None:
    shell.run("put", "raw", "-", input=data)
    got = shell("get", "raw", "--json").json
    assert (got["content_type"], got["payload_encoding"], got["payload"]) == (kind, encoding, shown)


def test_a_given_content_type_stays(shell: Shell) -> None:
    shell("put", "raw", "{}", "--content-type", "text/x-mine")
    got = shell("get", "raw", "--json").json
    assert (got["content_type"], got["payload"]) == ("text/x-mine", "{}")


def test_control_characters_do_not_reach_the_terminal(shell: Shell) -> None:
    shell.run("put", "raw", "-", input=b"a\x1b[31mred\x07\nnext line")
    out = shell("get", "raw").out
    assert "\x1b" not in out
    assert "a\\x1b[31mred\\x07\n" in out


def test_several_at_once_are_lines(shell: Shell) -> None:
    ids = [shell.put() for _ in range(3)]
    got = shell("get", "orders", "-n", "10", "--json").lines
    assert [each["id"] for each in got] == ids


def test_get_waits_for_a_message(shell: Shell) -> None:
    shell.put("other")
    waiting = shell.start("get", "orders", "--wait", "30", "--json")
    id = shell.put("orders")
    out, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 0, err
    assert json.loads(out)["id"] == id


def test_get_waits_for_a_delay_to_pass(shell: Shell) -> None:
    id = shell.put("orders", "--delay", "0.2")
    assert shell("get", "orders", "--wait", "30", "--json").json["id"] == id


def test_get_takes_back_what_a_dead_consumer_held(shell: Shell) -> None:
    id = shell.put()
    shell("get", "orders", "--lease", "0.001")
    got = shell("get", "orders", "--wait", "30", "--json").json
    assert (got["id"], got["fence"]) == (id, 2)


def test_an_empty_get_prints_the_reason(shell: Shell) -> None:
    assert "No message: queue orders does not exist." in shell("get", "orders", code=3).err
    shell.put("orders")
    shell("queues", "pause", "orders")
    assert "towpath queues resume orders" in shell("get", "orders", code=3).err
    quiet = shell("get", "orders", "--json", code=3)
    assert (quiet.out, quiet.err) == ("", "")


def test_a_failure_too_many_is_a_dead_letter(shell: Shell) -> None:
    id = shell.dead()
    [job] = shell("dead", "list", "--json").json["jobs"]
    assert (job["id"], job["reason"], job["error"]) == (id, "exhausted", "broken")


def test_defer_is_no_failure(shell: Shell) -> None:
    id = shell.put("orders", "--max-attempts", "1")
    receipt = shell("get", "orders", "--json").json["receipt"]
    assert shell("nack", receipt, "--defer", "--delay", "1h", "--json").json == {
        "id": id,
        "state": "scheduled",
    }
    assert shell("jobs", "show", id, "--json").json["failures"] == 0


def test_an_old_receipt_is_refused(shell: Shell) -> None:
    id = shell.put()
    shell("get", "orders")
    shell("nack", f"{id}:1")
    shell("get", "orders")
    assert "was returned already; the message became ready" in shell("ack", f"{id}:1", code=1).err
    shell("ack", f"{id}:2")
    shell("ack", f"{id}:2")
    assert "was acknowledged already; the message became done" in shell("nack", f"{id}:2", code=1).err
    assert "message of orders" in shell("history").out
    lost = shell("ack", f"{id}:9", "--json", code=1).error
    assert (lost["type"], lost["code"], lost["details"]) == ("LostClaim", 1, {"id": id, "fence": 9})
    assert shell("extend", f"{id}:2", "10", "--json", code=1).error["type"] == "LostClaim"


def test_the_ack_takes_the_state_with_it(shell: Shell) -> None:
    id = shell.put()
    ledger = shell.ledger()
    ledger.apply([commands.Note(key=f"state/{id}", value=b"{}")])
    shell("ack", shell("get", "orders", "--json").json["receipt"])
    assert ledger.note(f"state/{id}") is None
    ledger.close()


def test_an_unknown_message(shell: Shell) -> None:
    shell.put()
    for command in (["ack", "nope:1"], ["nack", "nope:1"], ["extend", "nope:1", "5"]):
        assert shell(*command, "--json", code=3).error["type"] == "UnknownJob"


def test_extend_prints_a_request_to_stop(shell: Shell) -> None:
    id = shell.put()
    shell("get", "orders")
    shell("jobs", "cancel", id)
    assert "cancellation was requested" in shell("extend", f"{id}:1", "10").out
    assert shell("extend", f"{id}:1", "10", "--json").json["cancel_requested"] == "requested"


def test_enqueue_without_an_app(shell: Shell) -> None:
    (shell.folder / "arguments.json").write_text('{"to": "ada"}')
    id = shell("enqueue", "send", "--queue", "mail", "--args", "@arguments.json").out.strip()
    job = shell("jobs", "show", id, "--json").json
    assert (job["kind"], job["queue"], job["payload"]) == ("send", "mail", {"to": "ada"})
    assert "--queue" in shell("enqueue", "send", code=2).err


SHOP = """
from datetime import datetime
import towpath

app = towpath.App("sqlite:///towpath.db")

@app.task(name="send", queue="mail", priority="high")
def send(to: str, when: datetime | None = None) -> None: ...
"""


def test_enqueue_with_an_app(shell: Shell) -> None:
    (shell.folder / "shop.py").write_text(SHOP)
    arguments = '{"to": "ada", "when": "2026-01-31T12:00:00Z"}'
    placed = shell.run(
        "enqueue",
        "send",
        "--app",
        "shop:app",
        "--args",
        arguments,
        "--delay",
        "1h",
        "--header",
        "a=b",
        "--json",
    ).json
    assert placed["queue"] == "mail"
    ledger = shell.ledger()
    job = ledger.get(placed["id"])
    ledger.close()
    assert job is not None
    assert (job.kind, job.priority, job.state, job.headers["a"]) == ("send", 0, State.SCHEDULED, "b")
    assert json.loads(job.payload)["when"] == "2026-01-31T12:00:00Z"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["send", "--args", '{"to": 5}'], "it must be str, not int"),
        (["send", "--args", '{"too": "ada"}'], "to"),
        (["send"], "to"),
        (["sned", "--args", "{}"], "Tasks: send"),
        (["send", "--args", '{"to": "ada"}', "--key", ""], "1 to 512 characters"),
        (
            ["send", "--args", '{"to": "ada"}', "--url", "sqlite:///other.db"],
            "sets its own URL sqlite:///towpath.db",
        ),
    ],
)
def test_enqueue_checks_against_the_task(shell: Shell, arguments: list[str], expected: str) -> None:
    (shell.folder / "shop.py").write_text(SHOP)
    assert expected in shell.run("enqueue", *arguments, "--app", "shop:app", code=2).err
    assert not Path("towpath.db").exists()


def test_enqueue_suggests_the_full_name_of_a_task(shell: Shell) -> None:
    (shell.folder / "shop.py").write_text(SHOP.replace('name="send", ', ""))
    err = shell.run("enqueue", "send", "--app", "shop:app", code=2).err
    assert err == "Error: shop:app has no task send.\nDid you mean shop.send? Tasks: shop.send\n"


def test_priorities_by_the_names_of_the_settings(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "towpath.toml").write_text("[priorities]\nurgent = -10\n")
    monkeypatch.chdir(tmp_path)
    id = shell.run("put", "orders", "1", "--priority", "urgent").out.strip()
    assert shell.run("jobs", "show", id, "--json").json["priority"] == -10
    assert "-10 (urgent)" in shell.run("jobs", "show", id).out
    assert "urgent" in shell.run("put", "orders", "1", "--priority", "soon", code=2).err
