"""Reads of a table ledger: conditions on jobs as SQL, the views of jobs, queues, parts and groups, and the
pool of connections that reads share. Reads never use the writing connection: a read waits for no commit, and
a commit for no read."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from towpath.core.checks import storable
from towpath.core.commands import GroupState, Selector
from towpath.core.edges import Edge, EdgePage, EdgePosition, EdgeQuery, edge_page
from towpath.core.explain import AHEAD, SHOWN, Explanation, JobFacts, explain
from towpath.core.history import AttemptRecord
from towpath.core.ids import prefix_range, short_seq
from towpath.core.job import Job, Reason, State
from towpath.core.selection import JobConditions
from towpath.core.views import (
    Counts,
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
    note_page,
    page_id,
    page_seq,
    page_token,
    prefix_end,
)
from towpath.errors import ReadersBusy, UnknownJob
from towpath.ledger.tables.database import Db, array
from towpath.ledger.tables.transaction import GroupRow, PartRow, QueueRow


class Conditions:
    """SQL conditions that must all hold, and their arguments. `?` in a condition is the next argument."""

    def __init__(self) -> None:
        self.terms: list[str] = []
        self.args: list[Any] = []

    def add(self, term: str, *args: Any) -> None:
        self.terms.append(term)
        self.args += args

    def equal(self, **columns: Any) -> None:
        for name, value in columns.items():
            if value is not None:
                self.add(f'j."{name}" = ?', value)

    def ids(self, ids: tuple[str, ...]) -> None:
        raise NotImplementedError

    def like(self, pattern: str) -> None:
        """The queue's name matches the pattern; * matches any text."""
        raise NotImplementedError

    def header(self, name: str, value: str) -> None:
        raise NotImplementedError

    def queue(self, pattern: str | None) -> None:
        if pattern is not None and "*" in pattern:
            self.like(pattern)
        else:
            self.equal(queue=pattern)

    def states(self, states: tuple[State, ...]) -> None:
        # Literals, not arguments, so that SQL can use the partial indexes.
        if len(states) == 1:
            self.add(f"j.state = '{states[0]}'")
        elif states:
            self.add("j.state IN (" + ", ".join(f"'{state}'" for state in states) + ")")

    def match(self, selector: Selector) -> None:
        if selector.ids:
            self.ids(selector.ids)
        self._shared(selector)
        if selector.finished_before is not None:
            self.add("j.finished_at < ?", selector.finished_before)

    def ask(self, query: Query) -> None:
        self._shared(query)
        self.equal(owner=query.owner, correlation_id=query.correlation_id)
        if query.created_from is not None:
            self.add("j.created_at >= ?", query.created_from)
        if query.header is not None:
            self.header(*query.header)
        if query.page is not None:
            self.add("j.seq > ?" if query.oldest_first else "j.seq < ?", page_seq(query.page))

    def _shared(self, given: JobConditions) -> None:
        self.queue(given.queue)
        self.equal(part=given.part, group=given.group, parent=given.parent, key=given.key, kind=given.kind)
        if given.generation is not None:
            self.add("j.generation = ?", given.generation)
        self.states(given.states)
        if given.created_before is not None:
            self.add("j.created_at < ?", given.created_before)

    @property
    def sql(self) -> str:
        return " AND ".join(self.terms or ["1 = 1"])


T = TypeVar("T")


def get(db: Db, id: str) -> Job | None:
    return get_many(db, [id], True).get(id)


def get_many(db: Db, ids: Sequence[str], bodies: bool) -> dict[str, Job]:
    found = _by_id(db, ids)
    if bodies:
        db.fill(list(found.values()))
    return found


def _by_id(db: Db, ids: Iterable[str]) -> dict[str, Job]:
    return {job.id: job for job in db.rows("read_by_id", (array(filter(storable, ids)),), Job)}


def lookup(db: Db, text: str, limit: int) -> list[Job]:
    """One range of the index on ids; a text in the form of a short id is also read by its seq."""
    if not storable(text):
        return []
    found = db.rows("read_by_prefix", (*prefix_range(text), limit), Job)
    if found and found[0].id == text:
        return found[:1]
    seq = short_seq(text)
    numbered = [] if seq is None else db.rows("read_by_seq", (seq,), Job)
    found += [job for job in numbered if job.short_id == text]
    return sorted(found, key=lambda job: job.id)[:limit]


def find(db: Db, query: Query) -> Page:
    found = db.find(query, query.limit + 1)
    page = found[: query.limit]
    if query.bodies:
        db.fill(page)
    return Page(tuple(page), page_token(page[-1].seq) if len(found) > query.limit else None)


def attempts(db: Db, id: str) -> list[AttemptRecord]:
    return db.rows("attempts_of", (id,), AttemptRecord) if storable(id) else []


class ShownQueue(QueueRow, array_like=True):
    oldest_ready: int | None = None


def queues(db: Db) -> dict[str, QueueView]:
    return {row.name: queue_view(row, row.oldest_ready) for row in db.rows("all_queues", (), ShownQueue)}


def queue(db: Db, name: str) -> QueueView | None:
    found = db.rows("one_queue", (name,), ShownQueue) if storable(name) else []
    return queue_view(found[0], found[0].oldest_ready) if found else None


def queue_view(row: QueueRow, oldest_ready: int | None) -> QueueView:
    counts = Counts(row.blocked, row.scheduled, row.ready, row.running, row.done, row.failed, row.canceled)
    return QueueView(
        name=row.name,
        counts=counts,
        oldest_ready=oldest_ready,
        paused=bool(row.paused),
        why=row.why,
        capacity=row.capacity,
        cap=row.cap,
        rate=row.rate,
        next_at=row.next_at,
        retention=row.retention,
        keep=row.keep,
    )


def parts(db: Db, queue: str) -> dict[str, PartView]:
    found = db.rows("parts_of_queue", (queue,), PartRow) if storable(queue) else []
    return {row.name: part_view(row) for row in found}


def part_view(row: PartRow) -> PartView:
    return PartView(
        queue=row.queue,
        name=row.name,
        ready=row.ready,
        running=row.running,
        paused=bool(row.paused),
        why=row.why,
        cap=row.cap,
        rate=row.rate,
        next_at=row.next_at,
        weight=row.weight,
        served=row.served,
        capacity=row.capacity,
        append_rate=row.append_rate,
        append_at=row.append_at,
    )


def group(db: Db, id: str) -> GroupView | None:
    found = db.rows("groups_by_id", (array(filter(storable, [id])),), GroupRow)
    return group_view(found[0]) if found else None


def groups(db: Db, query: GroupQuery) -> GroupPage:
    first, end = query.prefix, prefix_end(query.prefix)
    mark = None if query.page is None else page_id(query.page)
    states = array(query.states or GroupState)
    outcomes = array(query.outcomes) if query.outcomes else None
    wanted = (states, outcomes, query.limit + 1)
    if query.descending:
        rows = db.rows("groups_before", (first, end if mark is None else min(end, mark), *wanted), GroupRow)
    else:
        rows = db.rows("groups_after", (first, mark or "", end, *wanted), GroupRow)
    return group_page(query, [group_view(row) for row in rows])


def winners(db: Db, job: str, group: str) -> list[Winner]:
    name, about = ("winners_in", group) if group else ("winners_for", job)
    found = db.rows(name, (about,), tuple[str, int, str | None, str]) if storable(about) else []
    return [Winner(id, place, winner) for id, place, winner, _ in found]


def group_view(row: GroupRow) -> GroupView:
    fields = {field: getattr(row, field) for field in GroupView.__struct_fields__}
    return GroupView(**{**fields, "paused": bool(row.paused)})


def note(db: Db, key: str, now: int) -> NoteView | None:
    row = db.one("read_note", (key, now)) if storable(key) else None
    return None if row is None else NoteView(*row)


def notes(db: Db, query: NoteQuery, now: int | None) -> NotePage:
    bounds = (query.prefix, query.after, prefix_end(query.prefix))
    rows = db.rows("notes_after", (*bounds, now, query.limit + 1), tuple[str, str, int, int, int | None])
    return note_page(query, [NoteView(row[0], bytes.fromhex(row[1]), *row[2:]) for row in rows])


def edges(db: Db, query: EdgeQuery) -> EdgePage:
    subjects = {
        "edges_into": query.into,
        "edges_out_of": query.out_of,
        "edges_into_group": query.into_group,
        "edges_out_of_group": query.out_of_group,
    }
    name, subject = next((name, subject) for name, subject in subjects.items() if subject is not None)
    args = (subject, *query.after, query.limit + 1)
    rows = db.rows(name, args, tuple[int, int, int, str, str, bool])
    found = [
        (EdgePosition(dst, group, seq, src if group else ""), Edge(src, id, bool(group), run_anyway))
        for dst, group, seq, src, id, run_anyway in rows
    ]
    return edge_page(query, found)


def chunk(db: Db, blob: str, number: int) -> bytes | None:
    row = db.one("read_chunk", (blob, number)) if storable(blob) else None
    return None if row is None else bytes(row[0])


def explain_job(db: Db, id: str, now: int) -> Explanation:
    found = _by_id(db, [id])
    if id not in found:
        raise UnknownJob(id=id)
    job = found[id]
    if job.reason is Reason.REFUSED or (job.state is State.READY and job.fence):
        db.fill([job])
    (queue,) = db.rows("queues_by_name", (array([job.queue]),), QueueRow)
    facts = JobFacts(job=job, queue=queue_view(queue, None))
    if job.state is State.BLOCKED:
        facts.open_jobs = tuple(db.rows("open_dependencies", (job.seq, SHOWN), str))
        facts.open_groups = tuple(db.rows("open_groups", (job.seq, SHOWN), str))
        facts.group = None if job.group is None else group(db, job.group)
    elif job.state in (State.READY, State.SCHEDULED):
        _add_gates(db, facts, job, queue)
    elif job.reason is Reason.DEPENDENCY:
        facts.culprit = next(iter(get_many(db, db.rows("culprit", (job.seq,), str), True).values()), None)
    return explain(facts, now)


def _add_gates(db: Db, facts: JobFacts, job: Job, queue: QueueRow) -> None:
    part = None
    if job.part is not None:
        part = next(iter(db.rows("parts_by_name", (array([(job.queue, job.part)]),), PartRow)), None)
    if part is not None:
        facts.part = part_view(part)
    part_full = part is not None and part.cap is not None and part.running >= part.cap
    queue_full = queue.cap is not None and queue.running >= queue.cap
    if queue_full or part_full:
        args = (job.queue, None if queue_full else job.part, SHOWN)
        facts.holders = tuple(db.rows("running_jobs", args, str))
    if job.part is None:
        where: tuple[Any, ...] = (job.queue, job.priority, job.seq, AHEAD)
        facts.ahead = db.one("ahead_loose", where)[0]
    else:
        facts.ahead = db.one("ahead_parted", (job.queue, job.part, job.priority, job.seq, AHEAD))[0]


class SharedReads:
    """The reads of jobs, attempts, queues, parts and groups, which all table ledgers share."""

    def _reads(self, read: Callable[[Db], T]) -> T:
        raise NotImplementedError

    def get(self, id: str) -> Job | None:
        return self._reads(lambda db: get(db, id))

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        return self._reads(lambda db: get_many(db, ids, bodies))

    def find(self, query: Query) -> Page:
        return self._reads(lambda db: find(db, query))

    def queues(self) -> dict[str, QueueView]:
        return self._reads(queues)

    def queue(self, name: str) -> QueueView | None:
        return self._reads(lambda db: queue(db, name))

    def edges(self, query: EdgeQuery) -> EdgePage:
        return self._reads(lambda db: edges(db, query))

    def lookup(self, text: str, limit: int = 10) -> list[Job]:
        return self._reads(lambda db: lookup(db, text, limit))

    def attempts(self, id: str) -> list[AttemptRecord]:
        return self._reads(lambda db: attempts(db, id))

    def parts(self, queue: str) -> dict[str, PartView]:
        return self._reads(lambda db: parts(db, queue))

    def group(self, id: str) -> GroupView | None:
        return self._reads(lambda db: group(db, id))

    def groups(self, query: GroupQuery) -> GroupPage:
        return self._reads(lambda db: groups(db, query))

    def winners(self, *, job: str = "", group: str = "") -> list[Winner]:
        return self._reads(lambda db: winners(db, job, group))

    def chunk(self, blob: str, number: int) -> bytes | None:
        return self._reads(lambda db: chunk(db, blob, number))


READERS: Final = 4
"""Read connections of an open ledger, at most."""
GROW_AFTER: Final = 0.01
"""Seconds that a read waits for an open connection before another one is opened. Short reads of several
threads take turns on one connection, so a process without long reads holds one."""
RECHECK: Final = 1.0
"""Seconds after which a waiting thread checks for a reader that was lost by an interrupt."""

C = TypeVar("C")


class Reader(Generic[C]):
    """A place for a connection. Its lock is held during a read, and by a thread that closes it or forks."""

    __slots__ = ("__weakref__", "connection", "lock")

    def __init__(self) -> None:
        self.connection: C | None = None
        """Opened by the first read and replaced after a loss, both by the function given to `run`."""
        self.lock = threading.Lock()


class _Waiter(Generic[C]):
    __slots__ = ("reader", "woken")

    def __init__(self) -> None:
        self.reader: Reader[C] | None = None
        self.woken = threading.Lock()
        """Released when `reader` is set."""
        self.woken.acquire()


class ReadPool(Generic[C]):
    """Waiting threads get the readers in the order of their arrival. After `timeout` seconds without a reader
    `ReadersBusy` is raised.

    An interrupt can lose a reader between two statements. No reference to it is left then: the set of all
    readers is weak, so that another one takes its place."""

    def __init__(self, place: str, timeout: float, size: int = READERS) -> None:
        self._place, self._timeout, self._size = place, timeout, size
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[Reader[C]] = weakref.WeakSet()
        self._idle: list[Reader[C]] = []
        """Empty while a thread waits."""
        self._waiters: deque[_Waiter[C]] = deque()

    def run(self, use: Callable[..., T], *args: Any) -> T:
        """Call `use(reader, *args)` with a reader that no other thread uses."""
        with self._lock:
            reader = self._idle.pop() if self._idle else None
        if reader is None:
            reader = self._wait()
        try:
            with reader.lock:
                return use(reader, *args)
        finally:
            with self._lock:
                if self._waiters:
                    self._give(reader)
                else:
                    self._idle.append(reader)

    def _give(self, reader: Reader[C]) -> None:
        if self._waiters:
            waiter = self._waiters.popleft()
            waiter.reader = reader
            waiter.woken.release()
        else:
            self._idle.append(reader)

    def _wait(self) -> Reader[C]:
        """A reader that another thread has returned, or a new one."""
        waiter: _Waiter[C] = _Waiter()
        began = time.monotonic()
        try:
            while True:
                with self._lock:
                    if waiter.reader is not None:
                        return waiter.reader
                    waited = time.monotonic() - began
                    if self._idle or self._may_grow(waited):
                        self._forget(waiter)
                        return self._idle.pop() if self._idle else self._add()
                    if waited >= self._timeout:
                        raise ReadersBusy(path=self._place, count=self._size, seconds=self._timeout)
                    if waiter not in self._waiters:
                        self._waiters.append(waiter)
                pause = GROW_AFTER if waited < GROW_AFTER else RECHECK
                waiter.woken.acquire(timeout=min(pause, self._timeout - waited))
        except BaseException:
            with self._lock:
                self._forget(waiter)
                if waiter.reader is not None:
                    self._give(waiter.reader)
            raise

    def _may_grow(self, waited: float) -> bool:
        return not self._all or (waited >= GROW_AFTER and len(self._all) < self._size)

    def _add(self) -> Reader[C]:
        reader: Reader[C] = Reader()
        self._all.add(reader)
        return reader

    def _forget(self, waiter: _Waiter[C]) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def locks(self) -> Iterator[threading.Lock]:
        """The locks that no other thread must hold during a fork. After the first one is acquired, no read
        begins, and the running reads end before the others can be acquired."""
        yield self._lock
        for reader in list(self._all):
            yield reader.lock

    def close(self, end: Callable[[C], object]) -> None:
        """Wait for the running reads and call `end` with each connection. The caller must have made sure that
        later reads use no connection."""
        for reader in list(self._all):
            with reader.lock:
                connection, reader.connection = reader.connection, None
                if connection is not None:
                    end(connection)
