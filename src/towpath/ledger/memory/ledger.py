"""The ledger in memory, for one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from towpath.clock import Clock, SystemClock
from towpath.core import checks
from towpath.core.commands import (
    TOMBSTONE,
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
    PutChunk,
    Renew,
    Resolve,
    Result,
    Revive,
    SetPart,
    SetQueue,
    Settle,
    Upkeep,
    token_of,
)
from towpath.core.edges import EdgePage, EdgeQuery, edges_in
from towpath.core.explain import Explanation, explain, job_facts
from towpath.core.finish import GROUP_COMMANDS
from towpath.core.history import AttemptRecord
from towpath.core.ids import denotes
from towpath.core.job import ClaimedJob, Job, State, without_bodies
from towpath.core.results import changed_anything
from towpath.core.revival import resolve
from towpath.core.views import (
    GroupPage,
    GroupQuery,
    GroupView,
    NotePage,
    NoteQuery,
    NoteView,
    Page,
    PartView,
    Query,
    QueueView,
    Winner,
    group_page,
    notes_in,
    page_of,
    page_seq,
)
from towpath.errors import InvalidInput, LedgerClosed, Refused, UnknownJob
from towpath.ledger import Answer, Capabilities, LeasesOnly
from towpath.ledger.memory import claim, settle
from towpath.ledger.memory import upkeep as ageing
from towpath.ledger.memory import upkeep as bulk
from towpath.ledger.memory.audit import check, dump
from towpath.ledger.memory.rows import PartRecord, QueueRecord
from towpath.ledger.memory.store import MemoryRelations, MemoryStore, note, put_chunk, set_part, set_queue
from towpath.ledger.memory.upkeep import upkeep

Handler = Callable[[MemoryStore, Any, int], Result]


def _tokened(handler: Handler) -> Handler:
    """The handler of a command that may have a token: the same token gets the first result again."""

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


def _on_records(rule: Callable[[settle.MemoryRecords, Any, int], Result]) -> Handler:
    return lambda store, command, now: rule(settle.MemoryRecords(store), command, now)


_HANDLERS: dict[type, Handler] = {
    Append: settle.append,
    Claim: _tokened(claim.claim),
    Renew: claim.renew,
    Settle: settle.settle,
    Progress: claim.progress,
    Cancel: _tokened(bulk.cancel),
    Revive: _tokened(bulk.revive),
    Resolve: _on_records(resolve),
    Purge: _tokened(bulk.purge),
    Hasten: ageing.hasten,
    Open: settle.open_group,
    **{kind: _on_records(rule) for kind, rule in GROUP_COMMANDS.items()},
    SetQueue: set_queue,
    SetPart: set_part,
    Note: _tokened(note),
    PutChunk: put_chunk,
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
                        # The result outlives the call; its traceback would keep the frames in memory.
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
            return _get_many(self._store, ids, bodies)

    def lookup(self, text: str, limit: int = 10) -> list[Job]:
        with self._changed:
            self._check_open()
            return _lookup(self._store, text, limit)

    def find(self, query: Query) -> Page:
        with self._changed:
            self._check_open()
            return _find(self._store, query)

    def attempts(self, id: str) -> list[AttemptRecord]:
        with self._changed:
            self._check_open()
            job = self._store.find(id)
            return [] if job is None else list(self._store.attempts.get(job.seq, ()))

    def queues(self) -> dict[str, QueueView]:
        with self._changed:
            self._check_open()
            return {
                name: queue.view(_oldest_ready(self._store, queue))
                for name, queue in sorted(self._store.queues.items())
            }

    def queue(self, name: str) -> QueueView | None:
        with self._changed:
            self._check_open()
            queue = self._store.queues.get(name)
            return None if queue is None else queue.view(_oldest_ready(self._store, queue))

    def parts(self, queue: str) -> dict[str, PartView]:
        with self._changed:
            self._check_open()
            return {name: part.view() for name, part in sorted(self._store.parts.get(queue, {}).items())}

    def group(self, id: str) -> GroupView | None:
        with self._changed:
            self._check_open()
            group = self._store.groups.get(id)
            return None if group is None else group.view()

    def groups(self, query: GroupQuery) -> GroupPage:
        with self._changed:
            self._check_open()
            return _groups(self._store, query)

    def winners(self, *, job: str = "", group: str = "") -> list[Winner]:
        with self._changed:
            self._check_open()
            return _winners(self._store, job, group)

    def edges(self, query: EdgeQuery) -> EdgePage:
        with self._changed:
            self._check_open()
            return edges_in(MemoryRelations(self._store), query)

    def notes(self, query: NoteQuery, now: int | None = None) -> NotePage:
        with self._changed:
            return notes_in(query, self._store.notes.values(), self._time(now))

    def note(self, key: str, now: int | None = None) -> NoteView | None:
        with self._changed:
            now = self._time(now)
            note = self._store.notes.get(key)
            return note if note is not None and (note.expires_at is None or note.expires_at > now) else None

    def chunk(self, blob: str, number: int) -> bytes | None:
        with self._changed:
            self._check_open()
            return self._store.chunks.get(blob, {}).get(number)

    def explain(self, id: str, now: int | None = None) -> Explanation:
        with self._changed:
            return _explain(self._store, id, self._time(now))

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
        """Drop the whole state. Waiting calls and later calls raise `LedgerClosed`."""
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


def _get_many(store: MemoryStore, ids: Sequence[str], bodies: bool) -> dict[str, Job]:
    found = {id: job for id in ids if (job := store.find(id)) is not None}
    return found if bodies else {id: without_bodies(job) for id, job in found.items()}


def _lookup(store: MemoryStore, text: str, limit: int) -> list[Job]:
    exact = store.find(text)
    if exact is not None:
        return [without_bodies(exact)]
    found = [job for job in store.jobs.values() if denotes(text, job.seq, job.id)]
    return [without_bodies(job) for job in sorted(found, key=lambda job: job.id)[:limit]]


def _find(store: MemoryStore, query: Query) -> Page:
    return page_of(query, _candidates(store, query))


def _candidates(store: MemoryStore, query: Query) -> Iterator[Job]:
    """The jobs after the page token, in the order of the query."""
    if query.group is not None:
        group = store.groups.get(query.group)
        seqs = [] if group is None else list(group.members)
        first, last = (seqs[0], seqs[-1]) if seqs else (1, 0)
    else:
        first, last = next(iter(store.jobs), 1), store.next_seq - 1
    after = None if query.page is None else page_seq(query.page)
    if query.oldest_first:
        order = range(first if after is None else max(first, after + 1), last + 1)
    else:
        order = range(last if after is None else min(last, after - 1), first - 1, -1)
    return (job for seq in order if (job := store.jobs.get(seq)) is not None)


def _groups(store: MemoryStore, query: GroupQuery) -> GroupPage:
    ids = sorted((id for id in store.groups if query.follows(id)), reverse=query.descending)
    views = (store.groups[id].view() for id in ids)
    return group_page(query, list(islice(filter(query.matches, views), query.limit + 1)))


def _winners(store: MemoryStore, job: str, group: str) -> list[Winner]:
    if group:
        rows = [store.proxies[id] for id in store.groups[group].proxies] if group in store.groups else []
        return [Winner(row.id, row.seq, _id(store, row.job)) for row in sorted(rows, key=lambda row: row.seq)]
    dependent = store.find(job)
    names = {} if dependent is None else store.names.get(dependent.seq, {})
    return [Winner(id, 0, _id(store, src)) for id, src in sorted(names.items())]


def _id(store: MemoryStore, seq: int) -> str | None:
    return store.jobs[seq].id if seq in store.jobs else None


def _oldest_ready(store: MemoryStore, queue: QueueRecord) -> int | None:
    heaps = [queue.loose, *(part.queued for part in queue.parts.values())]
    return min((store.jobs[seq].ready_at for heap in heaps for _, seq in heap), default=None)


def _explain(store: MemoryStore, id: str, now: int) -> Explanation:
    job = store.find(id)
    if job is None:
        raise UnknownJob(id=id)
    queue = store.queues[job.queue]
    part = None if job.part is None else queue.parts.get(job.part)
    gates = queue.view(), None if part is None else part.view()
    running = (store.jobs[seq] for seq in sorted(store.leases) if store.jobs[seq].queue == job.queue)
    return explain(job_facts(MemoryRelations(store), job, gates, running, _ahead(queue, part, job)), now)


def _ahead(queue: QueueRecord, part: PartRecord | None, job: Job) -> int:
    if job.part is not None and part is None:
        return 0
    mine = (job.priority, job.seq)
    heap = queue.loose if part is None else part.queued
    return len({entry for entry in heap if entry < mine})
