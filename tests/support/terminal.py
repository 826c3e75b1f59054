"""Commands on a pseudo terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.shell import EXECUTABLE, Shell

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
        """Read the rest of its output; return the exit code."""
        while self._read():
            pass
        return self.process.wait(60)

    def type(self, keys: str) -> None:
        os.write(self._near, keys.encode())

    def _read(self) -> bool:
        try:
            data = os.read(self._near, 65536)
        except OSError:  # Linux raises this error when the last process has closed the terminal
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
