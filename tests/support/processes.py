"""Worker processes with output that a test reads line by line."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import towpath
from tests.support import faulty
from tests.support.shell import Shell
from tests.support.waiting import WAIT
from towpath import App, JobHandle, commands
from towpath.commands import Spec


class WatchedProcess:
    """A process with pipes for stdout and stderr. `lines` has every line that was read so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._unread: queue.Queue[str] = queue.Queue()
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in ("stdout", "stderr")]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        stream = getattr(self.process, name)
        for line in stream:
            self._unread.put(line.rstrip("\n"))
        stream.close()

    def until(self, text: str) -> str:
        """The next line that contains `text`."""
        while True:
            try:
                self.lines.append(self._unread.get(timeout=WAIT))
            except queue.Empty:
                raise AssertionError(f"no line with {text!r}: {self.lines}") from None
            if text in self.lines[-1]:
                return self.lines[-1]

    def end(self, how: int = signal.SIGTERM) -> int:
        """Send the signal and wait for the exit code."""
        self.process.send_signal(how)
        return self.process.wait(WAIT)

    def silent(self) -> bool:
        """Whether the pipes are closed: the process and every child that inherited them have ended."""
        for reader in self._readers:
            reader.join(WAIT)
        while not self._unread.empty():
            self.lines.append(self._unread.get())
        return not any(reader.is_alive() for reader in self._readers)

    def close(self) -> bool:
        self.process.kill()
        self.process.wait()
        return self.silent()


@contextmanager
def command(shell: Shell, *arguments: str) -> Iterator[WatchedProcess]:
    """A running `towpath` command, which must not print a traceback."""
    watched = WatchedProcess(shell.start(*arguments, env={"PYTHONWARNINGS": "default"}))
    try:
        yield watched
    finally:
        watched.close()
        assert not [line for line in watched.lines if "Traceback" in line], watched.lines


@contextmanager
def faulty_worker(app: App, **options: float) -> Iterator[WatchedProcess]:
    """A worker of the tasks of tests/support/faulty.py."""
    arguments = [f"{name}={value}" for name, value in options.items()]
    program = [sys.executable, "-u", faulty.__file__, app.engine.url, *arguments]
    watched = WatchedProcess(
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )
    try:
        yield watched
    finally:
        assert watched.close(), "a process of the worker outlived it"


def enqueue(app: App, kind: str, arguments: bytes = b"{}", **fields: Any) -> JobHandle[Any]:
    """A job of a task that another program has registered."""
    fields = {"max_attempts": 20, **fields}
    spec = Spec(id=towpath.new_id(), queue="default", kind=kind, payload=arguments, **fields)
    app.engine.call(commands.Append((spec,)))
    return app.job(spec.id)


SHOP = """
import os
import towpath

app = towpath.App("sqlite:///towpath.db")
number = 3

@app.task(name="greet", queue="hall")
def greet(name: str) -> str:
    os.write(1, f"hello {name}\\n".encode())  # in one piece: other processes write there too
    return f"hello {name} from {os.getpid()}"

@app.task(name="leave", queue="hall", max_attempts=2)
def leave() -> None:
    os._exit(9)
"""


def greet(shop: Shell, name: str) -> str:
    return shop("enqueue", "greet", "--queue", "hall", "--args", f'{{"name": "{name}"}}').out.strip()
