"""How the tests call the command line: as a process of its own, or here in this one where speed matters."""

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

import msgspec

import towpath
from towpath.cli import main

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
    """A directory with a ledger `towpath.db`, which is where the default URL leads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'towpath.db'}"

    @property
    def environment(self) -> dict[str, str]:
        """Ours without what would change the outcome, and with every warning an error."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("TOWPATH_", "PYTEST_"))
        }
        return {**kept, "PYTHONWARNINGS": "error", "NO_COLOR": "1"}

    def start(self, *arguments: str, **more: Any) -> subprocess.Popen[str]:
        """The real executable, still running."""
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
        """The real executable."""
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
        """The same function in this process, several times as fast."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            ended = main(arguments)
        return _checked(Ran(ended, out.getvalue(), err.getvalue()), code, arguments)

    def ledger(self) -> towpath.Ledger:
        return towpath.open_ledger(self.url)

    def put(self, queue: str = "orders", *more: str) -> str:
        """A new message; its id."""
        return self("put", queue, "{}", *more).out.strip()

    def dead(self, queue: str = "orders", *more: str) -> str:
        """A new dead letter; its id."""
        id = self.put(queue, "--max-attempts", "1", *more)
        receipt = self("get", queue, "--json").json["receipt"]
        self("nack", receipt, "--reason", "broken")
        return id


def _checked(ran: Ran, code: int, arguments: Sequence[str]) -> Ran:
    assert ran.code == code, f"{arguments}: {ran}"
    assert "Traceback" not in ran.err
    return ran


def python(folder: Path, program: str, *arguments: str) -> Ran:
    """A Python program in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return Ran(ended.returncode, ended.stdout, ended.stderr)
