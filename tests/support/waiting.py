"""The one way to wait in tests: for a condition, with a bound, with a failure that can be read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

WAIT = 60.0
"""Seconds after which a test gives up. No test waits this long when it passes, on a loaded machine either."""
_PAUSE = 0.005
T = TypeVar("T")


def until(true: Callable[[], T], seconds: float = WAIT, explain: Callable[[], object] | None = None) -> T:
    """Return the first true value of `true()`; fail after `seconds`, with the text of `explain`."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, _message(seconds, explain)
        time.sleep(_PAUSE)
    return value


async def auntil(
    true: Callable[[], T], seconds: float = WAIT, explain: Callable[[], object] | None = None
) -> T:
    """`until` for coroutines: the event loop runs between two calls of `true`."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, _message(seconds, explain)
        await asyncio.sleep(_PAUSE)
    return value


def _message(seconds: float, explain: Callable[[], object] | None) -> str:
    return f"not within {seconds:g} s" + ("" if explain is None else f": {explain()}")


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Run `work` in a thread; the function that is returned waits for its end and returns its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT)
        assert results, "the thread has not ended, or it failed"
        return results[0]

    return result
