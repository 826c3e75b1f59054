"""Completion of the shells, and the commands that an error proposes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.shell import EXECUTABLE, Shell
from towpath.cli.completion import SHELLS


@pytest.fixture
def complete(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> object:
    def proposals(*words: str) -> list[str]:
        """The output that the script of bash receives for the last word."""
        monkeypatch.setenv("_TOWPATH_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["towpath", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        ran = shell()
        monkeypatch.delenv("_TOWPATH_COMPLETE")
        assert ran.err == ""
        return [line.partition(",")[2] for line in ran.out.splitlines() if line]

    return proposals


def test_words_of_the_program(complete: object) -> None:
    assert callable(complete)
    assert complete("que") == ["queues"]
    assert complete("jobs", "ex") == ["explain"]
    assert complete("jobs", "list", "--state", "f") == ["failed"]
    assert complete("jobs", "list", "--oldest") == ["--oldest-first"]


def test_values_of_the_ledger(shell: Shell, complete: object) -> None:
    assert callable(complete)
    mail, order = shell.put("mail"), shell.put("orders")
    shell("enqueue", "send_mail", "--queue", "mail")
    short = shell("jobs", "show", order, "--json").json["short_id"]
    assert complete("stats", "") == ["mail", "orders"]
    assert complete("queues", "pause", "o") == ["orders"]
    assert complete("jobs", "list", "--queue", "m") == ["mail"]
    assert complete("jobs", "list", "--kind", "send") == ["send_mail"]
    assert complete("jobs", "show", short[:2]) == [short]
    assert complete("jobs", "cancel", order[:-1]) == [order]
    assert complete("put", "mail", "x", "--after", mail[:-1]) == [mail]
    assert complete("put", "mail", "x", "--id", "") == []


def test_no_ledger_no_proposal(shell: Shell, complete: object) -> None:
    """And no file is created, and no error is printed."""
    assert callable(complete)
    assert complete("jobs", "list", "--queue", "") == []
    assert complete("--url", "mysql://x", "queues", "pause", "") == []
    assert list(shell.folder.iterdir()) == []


def test_control_characters_are_not_proposed(shell: Shell, complete: object) -> None:
    assert callable(complete)
    shell("enqueue", "evil\x1b[2J", "--queue", "q")
    assert complete("jobs", "list", "--kind", "") == []


@pytest.mark.parametrize("name", SHELLS)
def test_the_script_and_its_protocol(shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    script = shell("completion", name).out
    assert f"{name}_complete" in script
    assert shell("completion", name, "--json").json["script"] == script.removesuffix("\n")
    monkeypatch.setenv("_TOWPATH_COMPLETE", f"{name}_complete")
    monkeypatch.setenv("COMP_WORDS", "towpath que")
    monkeypatch.setenv("COMP_CWORD", "que" if name == "fish" else "1")
    assert "queues" in shell().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_itself(shell: Shell) -> None:
    shell.put("orders")
    program = f"""
        PATH={Path(EXECUTABLE[0]).parent}:$PATH
        eval "$(towpath completion bash)"
        COMP_WORDS=(towpath queues pause o) COMP_CWORD=3
        $(complete -p towpath | sed 's/.*-F \\([^ ]*\\).*/echo \\1/') >/dev/null
        _towpath_completion towpath
        echo "${{COMPREPLY[*]}}"
    """
    ended = subprocess.run(
        ["bash", "--norc", "-c", program],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("orders\n", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_itself(shell: Shell) -> None:
    shell.put("orders")
    program = f"""
        set -x PATH {Path(EXECUTABLE[0]).parent} $PATH
        towpath completion fish | source
        complete -C "towpath queues pause o"
        complete -C "towpath jobs list --state f"
    """
    ended = subprocess.run(
        ["fish", "--no-config", "-c", program],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.stdout.split(), ended.stderr) == (["orders", "failed"], "")


@pytest.mark.parametrize(
    ("arguments", "proposal"),
    [
        (["job", "list"], "Did you mean jobs?"),
        (["worke"], "Did you mean worker or workers?"),
        (["jobs", "lst"], "Did you mean list?"),
        (["groups", "shwo"], "Did you mean show?"),
        (["retry"], "Did you mean jobs retry or dead retry or groups retry?"),
        (["stats", "--wach"], "Did you mean '--watch'?"),
    ],
)
def test_did_you_mean(shell: Shell, arguments: list[str], proposal: str) -> None:
    assert proposal in shell(*arguments, code=2).err


def test_no_proposal_for_nonsense(shell: Shell) -> None:
    assert shell("xyzzy", code=2).err == "Error: No such command 'xyzzy'.\nTry: towpath --help\n"
