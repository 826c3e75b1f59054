"""A program with defective handlers: `python faulty.py <url> [key=value ...]` runs its worker until a stop
signal."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import towpath
from towpath.runtime.worker import worker

app = towpath.App(sys.argv[1] if len(sys.argv) > 1 else "memory://", name="faulty")

ENDS: dict[str, Callable[[], Any]] = {
    "SystemExit": lambda: sys.exit("enough"),
    "KeyboardInterrupt": lambda: _raise(KeyboardInterrupt("enough")),
    "GeneratorExit": lambda: _raise(GeneratorExit("enough")),
}


def _raise(error: BaseException) -> None:
    raise error


def _forked(child: Callable[[], object]) -> tuple[int, int]:
    """In the child: call the function and return 0. In the parent: return the process id and the exit status
    of the child."""
    pid = os.fork()
    if pid == 0:
        child()
        return 0, 0
    return pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


CHILDREN: dict[str, Callable[[], object]] = {
    "returns": lambda: None,
    "exits": lambda: sys.exit(3),
    "raises": lambda: 1 / 0,
    "reports": lambda: towpath.current().progress(7),
    "kills itself": lambda: os.kill(os.getpid(), signal.SIGTERM),
}


def answer(how: str) -> list[Any]:
    pid, code = _forked(CHILDREN[how])
    return ["child" if pid == 0 else "parent", code]


@app.task(name="loop.ends", max_attempts=1)
async def loop_ends(how: str) -> None:
    ENDS[how]()


@app.task(name="thread.ends", max_attempts=1)
def thread_ends(how: str) -> None:
    ENDS[how]()


@app.task(name="process.ends", max_attempts=1, process=True)
def process_ends(how: str) -> None:
    ENDS[how]()


@app.task(name="loop.forks", max_attempts=1)
async def loop_forks(how: str) -> list[Any]:
    return answer(how)


@app.task(name="thread.forks", max_attempts=1)
def thread_forks(how: str) -> list[Any]:
    return answer(how)


@app.task(name="process.forks", max_attempts=1, process=True)
def process_forks(how: str) -> list[Any]:
    return answer(how)


@app.task(name="loop.dies")
async def loop_dies() -> str:
    return _dies()


@app.task(name="thread.dies")
def thread_dies() -> str:
    return _dies()


def _dies() -> str:
    if towpath.current().attempt == 1:
        os._exit(9)
    return "survived"


@app.task(name="pid")
def pid() -> int:
    return os.getpid()


@app.task(name="process.pid", process=True)
def process_pid() -> int:
    return os.getpid()


@app.task(name="terminates")
def terminates() -> list[int | None]:
    """Forked processes of the standard library, terminated in the standard way as soon as they run."""
    codes: list[int | None] = []
    for _ in range(20):
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        process.terminate()
        process.join(20)
        codes.append(process.exitcode)
        process.kill()
    return codes


def _begun() -> None:
    os.write(1, f"begun {os.getpid()}\n".encode())


@app.task(name="loop.refuses")
async def loop_refuses() -> None:
    _begun()
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


@app.task(name="loop.blocks")
async def loop_blocks() -> None:
    _begun()
    threading.Event().wait()


@app.task(name="loop.is_deaf")
async def loop_is_deaf() -> None:
    # The signal goes to another thread, so that this one is not woken and its handler is not called: as if it
    # had come at the last moment before the wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _begun()
    threading.Event().wait()


@app.task(name="thread.hangs")
def thread_hangs() -> None:
    _begun()
    threading.Event().wait()


@app.task(name="process.hangs", process=True)
def process_hangs() -> None:
    _begun()
    threading.Event().wait()


if __name__ == "__main__":
    # Newer Pythons warn about a fork beside threads, which is tested here.
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = dict(each.split("=") for each in sys.argv[2:])
    worker.CLEANUP = float(options.pop("last_word", "5"))
    numbers = {name: int(value) if name == "concurrency" else float(value) for name, value in options.items()}
    app.run(**numbers)  # type: ignore[arg-type]
    app.close()
    os.write(1, b"left\n")
