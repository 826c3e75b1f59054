"""Ids on the command line: whole, short, or their beginning; in one piece in every table."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import pytest

import towpath
from tests.support.shell import Shell
from tests.support.terminal import terminal
from towpath import commands
from towpath.cli.output import STYLES


def shorten(shell: Shell, id: str) -> str:
    return str(shell("jobs", "show", id, "--json").json["short_id"])


def distinct(one: str, other: str) -> str:
    """The shortest prefix of `one`, of at least 6 characters, that is no prefix of `other`."""
    return next(one[:n] for n in range(6, 37) if not other.startswith(one[:n]))


def test_a_job_by_its_short_id_and_by_its_beginning(shell: Shell) -> None:
    first, second = shell.put(), shell.put("orders", "--id", "order-17")
    short = shorten(shell, first)
    assert re.fullmatch(r"[0-9]+-[0-9a-f]{4}", short)
    assert short.endswith(first[-4:])
    assert shorten(shell, second) == second
    for text in (first, short, first[:6], first[:13]):
        assert shell("jobs", "show", text, "--json").json["id"] == first
        assert shell("jobs", "explain", text, "--json").json["id"] == first
    assert shell("jobs", "show", "order-", "--json").json["id"] == second
    assert f"{first} ({short})" in shell("jobs", "show", first).out


def test_changes_by_short_ids(shell: Shell) -> None:
    one, other = shell.dead("orders"), shell.dead("orders")
    assert shell("dead", "retry", shorten(shell, one), "--json").json["revived"] == 1
    assert shell("jobs", "retry", shorten(shell, other), shorten(shell, other), "--json").json["revived"] == 1
    report = shell("jobs", "cancel", shorten(shell, one), distinct(other, one), "--json").json
    assert (report["canceled"], report["finished"]) == (2, [])
    assert shell("jobs", "cancel", shorten(shell, one), "--json").json["finished"] == [
        {"id": one, "state": "canceled"}
    ]
    assert shell("jobs", "purge", shorten(shell, one), other, "--yes", "--json").json["purged"] == 2


def test_receipts_and_dependencies_by_short_ids(shell: Shell) -> None:
    first = shell.put()
    short = shorten(shell, first)
    after = shell.put("orders", "--after", short)
    assert shell("jobs", "show", after, "--json").json["state"] == "blocked"
    fence = shell("get", "orders", "--json").json["fence"]
    assert shell("extend", f"{short}:{fence}", "60", "--json").json["id"] == first
    assert shell("nack", f"{short}:{fence}", "--json").json == {"id": first, "state": "ready"}
    fence = shell("get", "orders", "--json").json["fence"]
    assert shell("ack", f"{short}:{fence}", "--json").json == {"id": first, "state": "done"}
    assert shell("jobs", "show", after, "--json").json["state"] == "ready"


AMBIGUOUS: list[list[str]] = [
    ["jobs", "show", "ID"],
    ["jobs", "explain", "ID"],
    ["jobs", "retry", "ID"],
    ["jobs", "cancel", "ID"],
    ["jobs", "purge", "ID", "--yes"],
    ["dead", "retry", "ID"],
    ["dead", "purge", "ID", "--yes"],
    ["ack", "ID:1"],
    ["nack", "ID:1"],
    ["extend", "ID:1", "5"],
    ["put", "orders", "x", "--after", "ID"],
]


@pytest.mark.parametrize("arguments", AMBIGUOUS, ids=lambda arguments: " ".join(arguments[:2]))
def test_an_ambiguous_beginning_lists_the_jobs(shell: Shell, arguments: list[str]) -> None:
    ids = [shell.put(), shell.put()]
    before = shell("stats", "--json").json["total"]
    given = [each.replace("ID", ids[0][:6]) for each in arguments]
    error: Any = shell(*given, "--json", code=2).error
    assert (error["type"], error["details"]["candidates"]) == ("Ambiguous", ids)
    report = shell(*given, code=2).err
    for id in ids:
        assert f"  {shorten(shell, id)}  {id}  orders, ready\n" in report
    assert shell("stats", "--json").json["total"] == before


def test_many_candidates_are_cut(shell: Shell) -> None:
    with closing(shell.ledger()) as ledger:
        specs = tuple(towpath.commands.Spec(queue="q", id=f"order-{n:02}") for n in range(12))
        ledger.apply([commands.Append(specs)])
    report = shell("jobs", "cancel", "order-", "--json", code=2).error
    assert (len(report["details"]["candidates"]), report["details"]["more"]) == (10, True)
    assert "order-10" not in report["message"]


def test_what_denotes_no_job(shell: Shell) -> None:
    id = shell.put()
    number, tail = shorten(shell, id).split("-")
    for text in (
        id[:5],
        number,
        f"{number}-{'0000' if tail != '0000' else '1111'}",
        f"{int(number) + 1}-{tail}",
    ):
        error = shell("jobs", "cancel", text, "--json", code=3).error
        assert error["type"] == "UnknownJob"
        assert "at least 6 characters" in error["next"]


def test_groups_by_the_beginning_of_their_id(shell: Shell) -> None:
    with closing(shell.ledger()) as ledger:
        opened = [commands.Open("night-1"), commands.Open("night-2"), commands.Open("morning")]
        ledger.apply([*opened, commands.Append((towpath.commands.Spec(queue="q", id="a", group="morning"),))])
    assert shell("groups", "show", "mornin", "--json").json["id"] == "morning"
    assert shell("groups", "resume", "mornin", "--json").json == {"id": "morning", "state": "sealed"}
    assert [job["id"] for job in shell("jobs", "list", "--group", "mornin", "--json").json["jobs"]] == ["a"]
    assert shell("groups", "show", "night-", "--json", code=2).error["details"]["candidates"] == [
        "night-1",
        "night-2",
    ]
    for text in ("morni", "evening"):
        assert shell("groups", "pause", text, "--json", code=3).error["type"] == "UnknownGroup"


def test_an_id_stays_in_one_piece_at_80_columns(shell: Shell) -> None:
    """Also beside wide columns. In a pipe the whole id is printed, for other programs."""
    id = shell.dead("orders-of-the-big-warehouse", "--key", "k" * 60)
    short = shorten(shell, id)
    for arguments in (["jobs", "list"], ["dead", "list"]):
        with terminal(shell, *arguments) as screen:
            assert screen.rest() == 0
            assert short in screen.text.split()
            assert max(map(len, screen.text.splitlines())) <= 80
        assert id in shell(*arguments).out.split()


def test_states_have_colours(shell: Shell) -> None:
    id = shell.dead("orders")
    with terminal(shell, "jobs", "list", colour=True) as screen:
        assert screen.rest() == 0
        assert "\x1b[1;31mfailed" in screen.raw
    with terminal(shell, "stats", colour=True) as screen:
        assert screen.rest() == 0
        assert re.search(r"\x1b\[1;31m *1\x1b", screen.raw)
    with terminal(shell, "jobs", "show", id, colour=True) as screen:
        assert screen.rest() == 0
        assert re.search(r"state +\x1b\[31m\x1b\[1mfailed\x1b\[0m \(exhausted\)", screen.raw)
    for arguments in (["list"], ["show", id]):
        with terminal(shell, "jobs", *arguments) as screen:  # with NO_COLOR
            assert screen.rest() == 0
            assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", screen.raw)
            assert "failed" in screen.text


def test_every_state_but_ready_has_a_style() -> None:
    assert {state.value for state in towpath.State} - set(STYLES) == {"ready"}
