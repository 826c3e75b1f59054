"""The ledger around the model: batches, reads, dump and check."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import astuple, replace

from towpath.clock import Clock, SystemClock
from towpath.core import blobs, checks, commands, finish, history, lifecycle, views
from towpath.core.edges import EdgePage, EdgeQuery, edges_in
from towpath.core.explain import Explanation, explain, job_facts
from towpath.core.ids import denotes
from towpath.core.job import (
    FINISHED,
    Job,
    without_bodies,
)
from towpath.core.lifecycle import Jumps
from towpath.errors import InvalidInput, LedgerClosed, Refused, UnknownJob
from towpath.ledger import Answer, Capabilities, LeasesOnly
from towpath.ledger.model import ABORTING, BLOCKED, HANDLERS, RUNNING, SEALED, Tables, answer_to


class ModelLedger:
    """Safe for any number of threads: one lock, held for each call."""

    capabilities = Capabilities(durable=False, shared=False, transactional=False)
    repeats = 0
    owners = LeasesOnly()

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._tables = Tables()
        self._jumps = Jumps()
        self._last = 0
        self._version = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())

    def apply(self, batch: Sequence[commands.Command], now: int | None = None) -> list[Answer]:
        for command in batch:
            if type(command) not in HANDLERS and type(command) is not commands.Upkeep:
                expected = "one of towpath.core.commands"
                raise InvalidInput(field="command", value=type(command), expected=expected)
        with self._changed:
            at = self._time(now)
            self._jumps.note(at)
            answers, changed = [], False
            for command in batch:
                before = self._tables
                answers.append(self._apply_one(command, at))
                # Command by command: the next one may restore what this one has changed.
                changed = changed or vars(self._tables) != vars(before)
            if changed:
                self._last = at
                self._version += 1
                self._changed.notify_all()
            return answers

    def _apply_one(self, command: commands.Command, now: int) -> Answer:
        tables = self._tables.copy()
        try:
            answer = answer_to(tables, command, now, self._jumps)
        except Refused as refusal:
            return refusal.with_traceback(None)
        self._tables = tables
        return answer

    def get(self, id: str) -> Job | None:
        return self._open().find(id)

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        found = {job.id: job for job in self._open().jobs.values() if job.id in ids}
        return {id: found[id] if bodies else without_bodies(found[id]) for id in ids if id in found}

    def lookup(self, text: str, limit: int = 10) -> list[Job]:
        jobs = sorted(self._open().jobs.values(), key=lambda job: job.id)
        found = [without_bodies(job) for job in jobs if denotes(text, job.seq, job.id)]
        return [job for job in found if job.id == text] or found[:limit]

    def find(self, query: views.Query) -> views.Page:
        jobs = sorted(self._open().jobs.values(), key=lambda job: job.seq, reverse=not query.oldest_first)
        if query.page is not None:
            mark = views.page_seq(query.page)
            jobs = [job for job in jobs if (job.seq > mark if query.oldest_first else job.seq < mark)]
        return views.page_of(query, jobs)

    def attempts(self, id: str) -> list[history.AttemptRecord]:
        tables = self._open()
        return [end for seq, ends in tables.attempts.items() if tables.jobs[seq].id == id for end in ends]

    def queues(self) -> dict[str, views.QueueView]:
        tables = self._open()
        return {name: tables.queue_view(name) for name in sorted(tables.queues)}

    def queue(self, name: str) -> views.QueueView | None:
        tables = self._open()
        return tables.queue_view(name) if name in tables.queues else None

    def parts(self, queue: str) -> dict[str, views.PartView]:
        tables = self._open()
        return {place[1]: tables.part_view(place) for place in sorted(tables.parts) if place[0] == queue}

    def group(self, id: str) -> views.GroupView | None:
        return self._open().group_view(id)

    def groups(self, query: views.GroupQuery) -> views.GroupPage:
        tables = self._open()
        ids = [id for id in sorted(tables.groups, reverse=query.descending) if query.follows(id)]
        found = [finish.group_of(tables, id) for id in ids]
        return views.group_page(query, [group for group in found if query.matches(group)])

    def winners(self, *, job: str = "", group: str = "") -> list[views.Winner]:
        tables = self._open()
        ids = {row.seq: row.id for row in tables.jobs.values()}
        if group:
            return [views.Winner(row.id, row.seq, ids.get(row.job)) for row in tables.proxies_in(group)]
        named = [(id, src) for (dst, id), src in tables.names.items() if ids.get(dst) == job]
        return [views.Winner(id, 0, ids.get(src)) for id, src in sorted(named)]

    def edges(self, query: EdgeQuery) -> EdgePage:
        return edges_in(self._open(), query)

    def notes(self, query: views.NoteQuery, now: int | None = None) -> views.NotePage:
        return views.notes_in(query, self._open().notes.values(), self._time(now))

    def note(self, key: str, now: int | None = None) -> views.NoteView | None:
        row, at = self._open().notes.get(key), self._time(now)
        return row if row is not None and (row.expires_at is None or row.expires_at > at) else None

    def chunk(self, blob: str, number: int) -> bytes | None:
        return self._open().chunks.get((blob, number))

    def explain(self, id: str, now: int | None = None) -> Explanation:
        tables, at = self._open(), self._time(now)
        job = tables.find(id)
        if job is None:
            raise UnknownJob(id=id)
        place = (job.queue, job.part or "")
        gates = tables.queue_view(job.queue), tables.part_view(place) if place in tables.parts else None
        ready = tables.ready(job.queue, job.part)
        ahead = sum((each.priority, each.seq) < (job.priority, job.seq) for each in ready)
        return explain(job_facts(tables, job, gates, tables.of(RUNNING, queue=job.queue), ahead), at)

    def version(self) -> int:
        self._open()
        return self._version

    def wait(self, seen: int, timeout: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._version != seen, timeout)
            self._open()
            return self._version

    def check(self) -> list[str]:
        return list(problems(self._open()))

    def dump(self) -> dict[str, Any]:
        return {**dump(self._open()), "last": self._last}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _open(self) -> Tables:
        """The state. A command replaces it as a whole, so a read sees one moment."""
        if self._closed:
            raise LedgerClosed(path="model")
        return self._tables

    def _time(self, now: int | None) -> int:
        checks.optional_whole("now", now)
        self._open()
        return max(self._clock.now() if now is None else now, self._last)


def dump(tables: Tables) -> dict[str, Any]:
    """The whole state in canonical order."""
    bare_queues = [replace(tables.queue_view(name), oldest_ready=None) for name in sorted(tables.queues)]
    return {
        "jobs": [tables.jobs[seq] for seq in sorted(tables.jobs)],
        "attempts": [(seq, *astuple(end)) for seq, ends in sorted(tables.attempts.items()) for end in ends],
        "edges": sorted((*ends, any_end) for ends, any_end in tables.edges.items()),
        "gates": sorted((*at, gate.run_anyway, gate.wanted or "") for at, gate in tables.gates.items()),
        "proxies": sorted(astuple(row) for row in tables.proxies.values()),
        "names": sorted((*at, src) for at, src in tables.names.items()),
        "groups": [
            (tables.group_view(id), {ending: list(specs) for ending, specs in tables.thens[id].items()})
            for id in sorted(tables.groups)
        ],
        "keys": [(*name, *astuple(row)[1:]) for name, row in sorted(tables.keys.items())],
        "notes": [tables.notes[key] for key in sorted(tables.notes)],
        "queues": [(view, *tables.turns[view.name]) for view in bare_queues],
        "parts": [(tables.part_view(place), place in tables.configured) for place in sorted(tables.parts)],
        "tombstones": sorted(
            (row.id, row.seq, row.state.value, row.settled_fence, row.alias or "", row.until)
            for row in tables.tombstones.values()
        ),
        "replies": sorted((token, until) for token, (_, until) in tables.replies.items()),
        "blobs": sorted(astuple(row) for row in tables.blobs.values()),
        "chunks": sorted((*at, data) for at, data in tables.chunks.items()),
        "next_seq": tables.next_seq,
        "next_version": tables.next_version,
    }


def problems(tables: Tables) -> Iterator[str]:
    """The violated invariants. Counts cannot be wrong here, because they are computed when they are read."""
    for job in tables.jobs.values():
        waits = finish.open_waits(tables, job) if job.state is BLOCKED else 0
        if job.waits != waits or (job.state is BLOCKED) != (waits > 0):
            yield f"job {job.id} is {job.state} with waits {job.waits}, counted {waits}"
        yield from [f"job {job.id} {what}" for what in lifecycle.inconsistencies(job)]
    for group in [finish.group_of(tables, id) for id in tables.groups]:
        if group.state in (SEALED, ABORTING) and not group.unfinished:
            yield f"group {group.id} is {group.state} with no unfinished member"
    for name, row in tables.keys.items():
        holder = tables.jobs.get(row.seq)
        if (holder is None or holder.state in FINISHED) and not row.until:
            yield f"key {name} is held by the finished job {row.id} and has no window"
    sizes = Counter[str]()
    for (id, _), data in tables.chunks.items():
        sizes[id] += len(data)
    headers = {seq: job.headers for seq, job in tables.jobs.items()}
    yield from blobs.inconsistencies(headers, tables.blobs.values(), sizes)
