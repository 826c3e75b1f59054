"""The state that the handlers of a server share: the engine, its options, the waiting consumers, the held
messages, and whether the server drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import msgspec

from towpath.core.checks import SECOND
from towpath.core.commands import PutChunk, Result
from towpath.core.job import RUNNING, ClaimedJob, Job
from towpath.http.authentication import AccessControl
from towpath.http.consumers import Consumers
from towpath.http.options import ServerOptions
from towpath.http.problems import Headers, Problem
from towpath.http.tls import ServerTls
from towpath.http.wire import QueueName, queue_name
from towpath.runtime.engine import Engine

P = ParamSpec("P")
T = TypeVar("T")

CHECKED_AT_ONCE = 500
"""Held messages that one read of the drain checks."""
MAX_HELD = 100_000
"""Messages that a server remembers. The receipt of any other message costs a read of the ledger."""

READERS = 8
"""Threads that read from the ledger for requests."""


MAX_UPLOADS = 8
"""Chunks of payloads that are committed at once: they are in memory, and each delays the commit of other
requests."""


class HeldMessage(msgspec.Struct, frozen=True, gc=False):
    """The fields of a delivered message that a receipt needs. `lease` is microseconds."""

    id: str
    fence: int
    queue: str
    lease: int
    correlation_id: str
    has_state: bool
    """It may have a state: it was delivered before, or to a stateful consumer."""
    until: int
    """The end of the lease when the message was delivered."""

    @classmethod
    def of(cls, job: Job, stateful: bool = True) -> HeldMessage:
        has_state = stateful or job.fence > 1
        correlation, until = job.correlation_id or "", job.lease_until or 0
        return cls(job.id, job.fence, job.queue, job.lease_len or 0, correlation, has_state, until)


class ServerContext:
    def __init__(self, engine: Engine, options: ServerOptions, tls: ServerTls | None = None) -> None:
        self.engine = engine
        self.options = options
        self.access = AccessControl(engine, options, tls)
        self.consumers = Consumers(engine, options)
        self.held: dict[str, HeldMessage] = {}
        """The delivered messages by id: a cache, oldest first."""
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="towpath-http-read")
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self.draining = False
        self.drained = asyncio.Event()
        """Set when the drain begins, on the event loop."""
        self.extra: Headers = []
        """Headers of every response."""

    def now(self) -> int:
        """Unix time in whole seconds."""
        return self.engine.clock.now() // SECOND

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A read of the ledger, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Reads that have begun end by themselves."""
        self._readers.shutdown(wait=False)

    async def put_chunk(self, command: PutChunk) -> asyncio.Future[Result]:
        """Begin to store a chunk of a payload. While the ledger commits as many chunks as it may, the
        request waits here and reads no further."""
        await self._uploads.acquire()
        stored = asyncio.ensure_future(self.engine.acall(command))
        stored.add_done_callback(lambda _: self._uploads.release())
        return stored

    def queue(self, namespace: str, queue: str) -> QueueName:
        return queue_name(namespace or self.options.default_namespace, queue)

    def delivered(self, claims: list[ClaimedJob], stateful: bool) -> None:
        """Store the claims in the cache of held messages."""
        held = self.held
        for claim in claims:
            held[claim.job.id] = HeldMessage.of(claim.job, stateful)
        while len(held) > MAX_HELD:
            del held[next(iter(held))]

    def returned(self, claims: list[ClaimedJob]) -> None:
        """Remove the claims from the cache: they were given back."""
        for claim in claims:
            self.held.pop(claim.job.id, None)

    def holds_messages(self) -> bool:
        """Whether a client holds a message of this server."""
        now = self.engine.clock.now()
        return any(held.until > now for held in self.held.values())

    async def forget_settled(self) -> None:
        """Remove the messages from the cache that another server has settled."""
        ids = list(self.held)
        for start in range(0, len(ids), CHECKED_AT_ONCE):
            some = ids[start : start + CHECKED_AT_ONCE]
            jobs = await self.read(self.engine.ledger.get_many, some, bodies=False)
            for id in some:
                job, held = jobs.get(id), self.held.get(id)
                if held is not None and (job is None or job.state is not RUNNING or job.fence != held.fence):
                    self.held.pop(id, None)

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise draining()

    def drain(self) -> None:
        """Take no new work and end all waits. Receipts are still taken."""
        self.draining = True
        self.drained.set()
        self.extra.append((b"shutdown-imminent", b"true"))
        self.consumers.interrupt()


def draining() -> Problem:
    return Problem(503, "shutdown_draining", "the server stops; use another one, or try again", retry_after=1)
