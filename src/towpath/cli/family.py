"""Child processes that end with their parent: started apart from the terminal's signals, stopped politely, then not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

LIFELINE = "TOWPATH_LIFELINE"
"""The variable with the number of a pipe that closes when the parent is gone."""
LEAVE = 2.0
"""Seconds for a child that was asked twice."""
STOPS = (signal.SIGINT, signal.SIGTERM)


class Child:
    """`towpath` itself with other arguments, in a process group of its own: Ctrl-C reaches it only through us, once."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, quiet: bool = False) -> None:
        self.told = False
        """Was it asked to stop?"""
        near, self._lifeline = os.pipe()
        output = subprocess.DEVNULL if quiet else None
        command = [sys.executable, "-m", "towpath", *arguments]
        try:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {}), LIFELINE: str(near)},
                pass_fds=(near,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        finally:
            os.close(near)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.told = self.told or how in STOPS
        if self.process.poll() is None:
            self.process.send_signal(how)

    def wait(self, timeout: float | None = None) -> bool:
        """Has it ended within the time?"""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, grace: float = 0.0) -> int:
        """Ask it to end, ask it to leave at once, end it; its exit code."""
        for patience in (grace, LEAVE):
            self.stop()
            if self.wait(patience):
                break
        else:
            self.process.kill()
        code = self.process.wait()
        os.close(self._lifeline)
        return code


def hold_on_to_parent() -> None:
    """In a child: if the parent dies without a word, do as if it had said to stop."""
    number = os.environ.pop(LIFELINE, None)
    if number is None:
        return
    pipe = int(number)
    os.set_inheritable(pipe, False)

    def watch() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="towpath-lifeline", daemon=True).start()


@contextmanager
def caught(children: list[Child], asked: threading.Event, reload: bool = False) -> Iterator[None]:
    """Pass every stop signal on to the children, and remember that one came. Each one counts: the second means at once. With
    `reload` SIGHUP is passed on too, unless it says that the terminal was closed: the children have none."""
    terminal = os.isatty(0)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and terminal and not os.isatty(0):
            number = signal.SIGTERM
        if number != signal.SIGHUP:
            asked.set()
        for child in children:
            child.stop(number)

    before = {number: signal.signal(number, pass_on) for number in (*STOPS, *([signal.SIGHUP] if reload else []))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
