"""Forked children of handlers. A child that comes back from the handler it was forked in must not say how the job ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from towpath.escapes import get_logger

log = get_logger("towpath.worker")

_generation = 0
_undone: list[Callable[[], None]] = []
_mask = threading.local()


def generation() -> int:
    """Another number in a child than in its parent. (To ask for the process number would cost a system call.)"""
    return _generation


@contextlib.contextmanager
def undone_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """A child that is forked inside the block calls `undo` first. SIGINT and SIGTERM for the child wait for that."""
    _undone.append(undo)
    try:
        yield
    finally:
        _undone.remove(undo)


def leave(id: str, error: BaseException | None) -> NoReturn:
    """End a child that came back from the handler of this job, as a child of a program would end that got there."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    else:
        log.warning(
            "job %s: process %d, which its handler forked, came back from the handler and is ended; only the one that forked it "
            "says how the job ended. Let a forked process end with os._exit.",
            id,
            os.getpid(),
            exc_info=error,
        )
        code = 0 if error is None else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _before_fork() -> None:
    if _undone:
        # A signal that came before `undo` would be caught by the handlers of the parent, and forgotten by Python.
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _unblock() -> None:
    before = getattr(_mask, "before", None)
    if before is not None:
        _mask.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork() -> None:
    global _generation  # noqa: PLW0603
    _generation += 1
    for undo in _undone:
        undo()
    _undone.clear()
    _unblock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_unblock, after_in_child=_after_fork)
