"""The ledger in memory, for one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from towpath.clock import Clock, SystemClock
from towpath.core import checks
from towpath.core.commands import (
    TOMBSTONE,
    Abort,
    Append,
    Cancel,
    Claim,
    Claimed,
    Command,
    Hasten,
    Note,
    Open,
    Progress,
    Purge,
    Renew,
    Result,
    Revive,
    Seal,
    SetPart,
    SetQueue,
    Settle,
    Unseal,
    Upkeep,
    token_of,
)
from towpath.core.explain import Explanation
from towpath.core.job import ClaimedJob, Job, State
from towpath.core.results import changed_anything
from towpath.core.views import GroupView, NoteView, Page, PartView, Query, QueueView, Winner
from towpath.errors import InvalidInput, LedgerClosed, Refused
from towpath.ledger import Answer, Capabilities, LeasesOnly
from towpath.ledger.memory import claim, reads, settle
from towpath.ledger.memory import upkeep as ageing
from towpath.ledger.memory import upkeep as bulk
from towpath.ledger.memory.audit import check, dump
from towpath.ledger.memory.store import MemoryStore, note, set_part, set_queue
from towpath.ledger.memory.upkeep import upkeep

Handler = Callable[[MemoryStore, Any, int], Result]


def _tokened(handler: Handler) -> Handler:
    """The handler of a command that may carry a token: the same token gets the first answer again."""

    def run(store: MemoryStore, command: Any, now: int) -> Result:
        token = token_of(command)
        if not token:
            return handler(store, command, now)
        if token in store.replies:
            return _again(store, token)
        answer = handler(store, command, now)
        if changed_anything(answer):
            kept = (
                tuple([(each.id, each.fence) for each in answer.claims])
                if isinstance(answer, Claimed)
                else answer
            )
            store.replies[token] = (kept, now + TOMBSTONE)
            store.reply_ends.push(now + TOMBSTONE, token)
        return answer

    return run


def _again(store: MemoryStore, token: str) -> Result:
    kept = store.replies[token][0]
    if not isinstance(kept, tuple):
        return kept
    held = [(store.find(id), fence) for id, fence in kept]
    return Claimed(
        tuple(
            [
                ClaimedJob(job)
                for job, fence in held
                if job and job.state is State.RUNNING and job.fence == fence
            ]
        )
    )


_HANDLERS: dict[type, Handler] = {
    Append: settle.append,
    Claim: _tokened(claim.claim),
    Renew: claim.renew,
    Settle: settle.settle,
    Progress: claim.progress,
    Cancel: _tokened(bulk.cancel),
    Revive: _tokened(bulk.revive),
    Purge: _tokened(bulk.purge),
    Hasten: ageing.hasten,
    Open: settle.open_group,
    Seal: settle.seal,
    Unseal: settle.unseal,
    Abort: settle.abort,
    SetQueue: set_queue,
    SetPart: set_part,
    Note: _tokened(note),
    Upkeep: upkeep,
}


class MemoryLedger:
    """Safe for any number of threads: one lock, held for each call."""

    capabilities = Capabilities(durable=False, shared=False, transactional=False)
    repeats = 0
    owners = LeasesOnly()

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._store = MemoryStore()
        self._version = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        try:
            work = [(_HANDLERS[type(command)], command) for command in commands]
        except KeyError as error:
            raise InvalidInput(
                field="command", value=error.args[0], expected="one of towpath.core.commands"
            ) from None
        answers: list[Answer] = []
        with self._changed:
            store, now = self._store, self._time(now)
            store.jumps.note(now)
            store.dirty = False
            try:
                for handler, command in work:
                    try:
                        answers.append(handler(store, command, now))
                    except Refused as refusal:
                        # The answer outlives the call; its traceback would keep the frames alive.
                        answers.append(refusal.with_traceback(None))
            finally:
                if store.dirty:
                    store.last = now
                    self._version += 1
                    self._changed.notify_all()
        return answers

    def get(self, id: str) -> Job | None:
        with self._changed:
            self._check_open()
            return self._store.find(id)

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        with self._changed:
            self._check_open()
            return reads.get_many(self._store, ids, bodies)

    def find(self, query: Query) -> Page:
        with self._changed:
            self._check_open()
            return reads.find(self._store, query)

    def queues(self) -> dict[str, QueueView]:
        with self._changed:
            self._check_open()
            return {
                name: queue.view(reads.oldest_ready(self._store, queue))
                for name, queue in sorted(self._store.queues.items())
            }

    def parts(self, queue: str) -> dict[str, PartView]:
        with self._changed:
            self._check_open()
            return {name: part.view() for name, part in sorted(self._store.parts.get(queue, {}).items())}

    def group(self, id: str) -> GroupView | None:
        with self._changed:
            self._check_open()
            group = self._store.groups.get(id)
            return None if group is None else group.view()

    def winners(self, *, job: str = "", group: str = "") -> list[Winner]:
        with self._changed:
            self._check_open()
            return reads.winners(self._store, job, group)

    def note(self, key: str, now: int | None = None) -> NoteView | None:
        with self._changed:
            now = self._time(now)
            note = self._store.notes.get(key)
            return note if note is not None and (note.expires_at is None or note.expires_at > now) else None

    def explain(self, id: str, now: int | None = None) -> Explanation:
        with self._changed:
            return reads.why(self._store, id, self._time(now))

    def version(self) -> int:
        with self._changed:
            self._check_open()
            return self._version

    def wait(self, seen: int, timeout: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._version != seen, timeout)
            self._check_open()
            return self._version

    def check(self) -> list[str]:
        with self._changed:
            self._check_open()
            return check(self._store)

    def dump(self) -> dict[str, Any]:
        with self._changed:
            self._check_open()
            return dump(self._store)

    def close(self) -> None:
        """Forget everything. Calls that wait, and calls that come later, raise `LedgerClosed`."""
        with self._changed:
            self._closed = True
            self._store = MemoryStore()
            self._changed.notify_all()

    def _time(self, now: int | None) -> int:
        """The ledger's time for a call at `now`."""
        checks.optional_whole("now", now)
        self._check_open()
        return max(self._clock.now() if now is None else now, self._store.last)

    def _check_open(self) -> None:
        if self._closed:
            raise LedgerClosed(path="memory://")
