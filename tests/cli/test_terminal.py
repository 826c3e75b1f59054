"""Output and questions on a real (pseudo) terminal."""

from __future__ import annotations

import signal

import pytest

from tests.support.shell import Shell
from tests.support.terminal import terminal
from towpath.cli.stats import COLUMNS


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 0), ("n", 130, 2)])
def test_bulk_asks_first(shell: Shell, answer: str, code: int, left: int) -> None:
    shell.put()
    shell.put()
    with terminal(shell, "jobs", "cancel", "--queue", "orders") as screen:
        screen.until("[y/N]")
        assert "every unfinished job of queue orders" in screen.text
        screen.type(f"{answer}\n")
        assert screen.rest() == code
    assert shell("stats", "--json").json["total"]["ready"] == left


def test_a_question_without_an_answer_is_130(shell: Shell) -> None:
    shell.put()
    with terminal(shell, "jobs", "cancel", "--all") as screen:
        screen.until("[y/N]")
        screen.type("\x04")  # Ctrl-D
        assert screen.rest() == 130
        assert "Traceback" not in screen.text


def test_tables_fit_a_terminal(shell: Shell) -> None:
    shell.put()
    with terminal(shell, "stats", colour=True) as screen:
        assert screen.rest() == 0
        assert "\x1b[1m" in screen.raw
        assert screen.text.splitlines()[0].split() == list(COLUMNS[:-1])
    with terminal(shell, "jobs", "list") as screen:
        assert screen.rest() == 0
        assert "orders" in screen.text


def test_a_job_with_a_long_error_is_one_line(shell: Shell) -> None:
    shell.put()
    receipt = shell("get", "orders", "--json").json["receipt"]
    shell("nack", receipt, "--reason", "AnErrorWithALongName: and a sentence that is far too long")
    with terminal(shell, "jobs", "list") as screen:
        assert screen.rest() == 0
        _, row = screen.text.splitlines()
    assert row.endswith("…")
    assert " AnError" in row


def test_stats_live(shell: Shell) -> None:
    shell.put()
    with terminal(shell, "stats", "--watch") as screen:
        screen.until("orders")
        shell.put("later")
        screen.until("later")
        screen.process.send_signal(signal.SIGINT)
        assert screen.rest() == 130
        assert "Traceback" not in screen.text


def test_the_demo_is_live_and_its_lines_are_whole(shell: Shell) -> None:
    with terminal(shell, "demo", "--jobs", "600", "--keep", "demo.db", colour=True) as screen:
        assert screen.rest() == 0
        assert "━" in screen.raw
        lines = [line.rpartition("\r")[2] for line in screen.text.splitlines()]
    for start in ("  mail       ━", "  ferries    ━", "  ok    ferries    100 of 100", "Total "):
        assert [line for line in lines if line.startswith(start)], lines
    assert "600/600" in screen.text


def test_backup_shows_progress_and_ends_clean(shell: Shell) -> None:
    shell.put()
    with terminal(shell, "backup", "copy.db") as screen:
        assert screen.rest() == 0
        assert "copy.db: " in screen.text
    assert (shell.folder / "copy.db").exists()


def test_a_plan_shows_its_progress(shell: Shell) -> None:
    step = '{"name": "%s", "node": "n", "action": {"run": "shell", "argv": %s}, "kind": "%s"%s}'
    wait = '["sh", "-c", "until test -e go; do sleep 0.02; done"]'
    first = step % ("first", wait, "pivot", "")
    last = step % ("last", '["true"]', "forward", ', "after": ["first"]')
    (shell.folder / "plan.json").write_text(f'{{"name": "p", "steps": [{first}, {last}]}}')
    with terminal(shell, "plan", "run", "plan.json", "--here", "--id", "p1") as screen:
        screen.until("0 of 2")
        screen.until("  first")
        (shell.folder / "go").touch()
        assert screen.rest() == 0
        assert "state      done" in screen.text
