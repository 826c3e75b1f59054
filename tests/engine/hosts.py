"""What messages and schedules need of an App, made of the real parts, on a ledger of the test's choice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from towpath.clock import Clock, SystemClock
from towpath.ledger import Ledger
from towpath.runtime.committer import Committer
from towpath.runtime.dispatcher import Dispatcher
from towpath.runtime.leases import Leases

WAIT = 20.0
"""Seconds after which a test that waits for something real gives up."""


class Desk:
    """A host. `attended` counts how often somebody asked to be woken by other processes."""

    def __init__(self, ledger: Ledger, clock: Clock | None = None, owner: str = "me") -> None:
        self.ledger = ledger
        self.clock: Clock = clock or SystemClock()
        self.owner = owner
        self.committer = Committer(ledger)
        self.leases = Leases(self.committer)
        self.dispatcher = Dispatcher(self.committer, owner)
        self.attended = 0

    def attend(self) -> None:
        self.attended += 1

    def __enter__(self) -> Self:
        self.committer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.leases.close()
        self.committer.close()


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Do it in another thread; calling what comes back waits for it and gives its result."""
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT)
        assert box, "it has not ended"
        return box[0]

    return result


def eventually(ledger: Ledger, true: Callable[[], bool]) -> None:
    """Wait for a condition that a commit brings about."""
    for _ in range(1000):
        seen = ledger.version()
        if true():
            return
        ledger.wait(seen, 0.05)
    raise AssertionError("it did not happen")
