"""The parts of an engine that messages and schedules use, on any ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from tests.support.waiting import until
from towpath.clock import Clock
from towpath.core.checks import SECOND
from towpath.core.commands import Claim, Upkeep, Want
from towpath.core.job import Job, State
from towpath.ledger import Ledger
from towpath.queues.message import Message, Queue
from towpath.runtime.commit.committer import Committer
from towpath.runtime.engine import Components, Engine


class BareEngine(Engine):
    """An engine without tasks and workers. `attended` counts the starts of its caretaker, which does not
    exist."""

    def __init__(self, ledger: Ledger, clock: Clock | None = None, owner: str = "me") -> None:
        super().__init__("test", clock=clock, ledger=ledger)
        self._components = Components(ledger, Committer(ledger, bus=self.bus), owner, owned=False)
        self.attended = 0

    def start_caretaker(self) -> None:
        self.attended += 1

    def __enter__(self) -> Self:
        self.committer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.leases.close()
        self.committer.close()


class Verbs:
    """The same test for both forms: `verbs.get(queue, ...)` is `queue.get(...)` or `await
    queue.aget(...)`."""

    def __init__(self, is_async: bool) -> None:
        self._is_async = is_async

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(on: object, *args: Any, **options: Any) -> Any:
            if not self._is_async:
                return getattr(on, name)(*args, **options)
            return asyncio.run(getattr(on, f"a{name}")(*args, **options))

        return call


def job(ledger: Ledger, id: str) -> Job:
    found = ledger.get(id)
    assert found is not None
    return found


def taken(queue: Queue, **options: Any) -> Message:
    message: Message | None = queue.get(**options)
    assert message is not None
    return message


def settled(ledger: Ledger, id: str, state: State) -> None:
    until(lambda: job(ledger, id).state is state)


def expire(ledger: Ledger, held: Message | Job) -> None:
    """Let the lease end, as if the process had slept; the second upkeep is needed because the first records a
    clock jump."""
    job = held if isinstance(held, Job) else held.record
    assert job.lease_until is not None
    assert job.lease_len is not None
    for n in range(1, 5):
        ledger.apply([Upkeep()], job.lease_until + n * job.lease_len)


def steal(ledger: Ledger, message: Message) -> None:
    expire(ledger, message)
    ledger.apply([Claim(owner="thief", wants=(Want("orders"),), lease=60 * SECOND)])
