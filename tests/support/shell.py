"""Calls of the command line: as a process, or faster as a function in this process."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import click
import msgspec

import towpath
from towpath.cli import main
from towpath.cli.base import root

EXECUTABLE = [str(Path(sysconfig.get_path("scripts")) / "towpath")]


class Ran(msgspec.Struct, frozen=True):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        [line] = self.out.splitlines()
        return json.loads(line)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        assert self.out == ""
        [line] = self.err.splitlines()
        return json.loads(line)["error"]


class Shell:
    """A directory with a ledger `towpath.db`, the default URL."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'towpath.db'}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment without settings of Towpath, and with warnings as errors."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("TOWPATH_", "PYTEST_"))
        }
        return {**kept, "PYTHONWARNINGS": "error", "NO_COLOR": "1"}

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        """Start the real executable; return the running process."""
        return subprocess.Popen(
            [*EXECUTABLE, *arguments],
            cwd=self.folder,
            env={**self.environment, **more.pop("env", {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            **more,
        )

    def run(
        self, *arguments: str, input: bytes = b"", env: Mapping[str, str] | None = None, code: int = 0
    ) -> Ran:
        """Run the real executable."""
        environment = {**self.environment, **(env or {})}
        command: Sequence[str] = [*EXECUTABLE, *arguments]
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            input=input,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return _checked(Ran(ended.returncode, ended.stdout.decode(), ended.stderr.decode()), code, arguments)

    def __call__(self, *arguments: str, code: int = 0) -> Ran:
        """Call the same function in this process, several times as fast."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            ended = main(arguments)
        return _checked(Ran(ended, out.getvalue(), err.getvalue()), code, arguments)

    def ledger(self) -> towpath.Ledger:
        return towpath.open_ledger(self.url)

    def put(self, queue: str = "orders", *more: str) -> str:
        """Put a message; return its id."""
        return self("put", queue, "{}", *more).out.strip()

    def dead(self, queue: str = "orders", *more: str) -> str:
        """Create a dead letter; return its id."""
        id = self.put(queue, "--max-attempts", "1", *more)
        receipt = self("get", queue, "--json").json["receipt"]
        self("nack", receipt, "--reason", "broken")
        return id


def _checked(ran: Ran, code: int, arguments: Sequence[str]) -> Ran:
    assert ran.code == code, f"{arguments}: {ran}"
    assert "Traceback" not in ran.err
    return ran


def python(folder: Path, program: str, *arguments: str) -> Ran:
    """Run a Python program in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return Ran(ended.returncode, ended.stdout, ended.stderr)


def parsed(arguments: Sequence[str]) -> click.Context:
    """The context of the command that the real parser finds; fails as the command line does."""
    context, words = root.make_context("towpath", list(arguments)), list(arguments)
    while isinstance(group := context.command, click.Group):
        _, found, words = group.resolve_command(context, words)
        assert found is not None
        context = found.make_context(found.name, words, parent=context)
    return context
