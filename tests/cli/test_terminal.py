"""What a person sees and is asked, on a real (pseudo) terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.shell import EXECUTABLE, Shell
from towpath.cli.stats import COLUMNS

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command on a terminal of 80 columns."""

    def __init__(self, shell: Shell, *arguments: str, colour: bool = False, columns: int = 80) -> None:
        self._near, far = pty.openpty()
        environment = {**shell.environment, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24"}
        if colour:
            del environment["NO_COLOR"]
        command = [*EXECUTABLE, *arguments]
        self.process = subprocess.Popen(
            command, cwd=shell.folder, env=environment, stdin=far, stdout=far, stderr=far
        )
        os.close(far)
        self.raw = ""

    def until(self, words: str) -> None:
        while words not in self.raw and self._read():
            pass
        assert words in self.raw

    def rest(self) -> int:
        """Everything it still says; its exit code."""
        while self._read():
            pass
        return self.process.wait(60)

    def type(self, keys: str) -> None:
        os.write(self._near, keys.encode())

    def _read(self) -> bool:
        try:
            data = os.read(self._near, 65536)
        except OSError:  # Linux says so when the last one has left the terminal
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)

    @property
    def text(self) -> str:
        return _ANSI.sub("", self.raw).replace("\r\n", "\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._near)


@contextmanager
def terminal(shell: Shell, *arguments: str, colour: bool = False, columns: int = 80) -> Iterator[Terminal]:
    screen = Terminal(shell, *arguments, colour=colour, columns=columns)
    try:
        yield screen
    finally:
        screen.close()


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
    for start in ("  mail       ━", "  ferries    ━", "  ok    ferries    100 of 100", "It took"):
        assert [line for line in lines if line.startswith(start)], lines
    assert "600/600" in screen.text


def test_backup_shows_progress_and_ends_clean(shell: Shell) -> None:
    shell.put()
    with terminal(shell, "backup", "copy.db") as screen:
        assert screen.rest() == 0
        assert "copy.db: " in screen.text
    assert (shell.folder / "copy.db").exists()
