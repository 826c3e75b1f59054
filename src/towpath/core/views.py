"""The values that the reads of a ledger return, and the query of `find`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.core.commands import GroupState, Note, Noted, OnFailure, SetPart, SetQueue
from towpath.core.job import FINISHED, WAITING, Job, Reason, State, without_bodies, words_of
from towpath.core.limits import Rate, reason_after
from towpath.core.selection import MAX_PAGE as MAX_PAGE
from towpath.core.selection import Query as Query
from towpath.core.selection import page_seq as page_seq
from towpath.core.selection import page_token as page_token
from towpath.errors import InvalidInput, NoteConflict


class Readable:
    """The base of the views for users: frozen dataclasses in which times are datetimes in UTC and durations
    are seconds."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The view as plain JSON values; times are ISO 8601 text."""
        plain: dict[str, Any] = msgspec.to_builtins(self, enc_hook=_plain, str_keys=True)
        return plain


def _plain(value: Any) -> Any:
    """The form of a value that msgspec does not support: a model of pydantic as its fields, others as
    text."""
    dump = getattr(value, "model_dump", None)
    return str(value) if dump is None or isinstance(value, type) else dump(mode="json")


class Counts(msgspec.Struct, frozen=True, gc=False):
    """How many jobs of a queue are in each state."""

    blocked: int = 0
    scheduled: int = 0
    ready: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    canceled: int = 0

    @property
    def waiting(self) -> int:
        return sum(getattr(self, state) for state in WAITING)

    @property
    def finished(self) -> int:
        return sum(getattr(self, state) for state in FINISHED)


class QueueView(msgspec.Struct, frozen=True, gc=False):
    """A queue: its exact counts and its settings."""

    name: str
    counts: Counts
    oldest_ready: int | None
    """Since when the longest-waiting ready job could have run."""
    paused: bool
    why: str | None
    capacity: int | None
    cap: int | None
    rate: Rate | None
    next_at: int
    retention: int | None
    keep: int | None


QUEUE_KEPT = checks.HOUR
"""An unused queue is deleted when every upkeep has found it unused for this time."""


def is_unused(queue: QueueView, parts: int, now: int) -> bool:
    """True if a queue with so many parts has no job and no setting."""
    optional = (queue.why, queue.capacity, queue.cap, queue.rate, queue.retention, queue.keep)
    return (
        not any(getattr(queue.counts, state) for state in Counts.__struct_fields__)
        and not (queue.paused or queue.next_at > now or parts)
        and all(setting is None for setting in optional)
    )


class PartView(msgspec.Struct, frozen=True, gc=False):
    """A part of a queue: its ready and running jobs, and its limits."""

    queue: str
    name: str
    ready: int
    running: int
    paused: bool
    why: str | None
    cap: int | None
    rate: Rate | None
    next_at: int
    weight: int
    served: int
    capacity: int | None = None
    append_rate: Rate | None = None
    append_at: int = 0
    """When the append rate allows the next append."""


class GroupView(msgspec.Struct, frozen=True, gc=False):
    """A group: its state, its outcome, and the exact counts of its members."""

    id: str
    state: GroupState
    outcome: State | None
    on_failure: OnFailure
    total: int
    unfinished: int
    done: int
    failed: int
    canceled: int
    superseded: int
    created_at: int
    closed_at: int | None
    paused: bool = False
    """The group was sealed, and is open until it is sealed again."""
    why: str | None = None


class NoteView(msgspec.Struct, frozen=True, gc=False):
    """A note at one moment; `version` changes with every write, `fence` only when the note is created
    again."""

    key: str
    value: bytes
    version: int
    fence: int
    expires_at: int | None


class NoteQuery(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which notes to list, in the order of their keys by bytes. Expired notes are left out. `page` is the
    `next` of the last answer."""

    prefix: str = ""
    limit: int = 100
    page: str | None = None

    def __post_init__(self) -> None:
        checks.text("prefix", self.prefix, checks.MAX_KEY)
        checks.whole("limit", self.limit, 1, MAX_PAGE)
        if self.page is not None:
            page_id(self.page)

    @property
    def after(self) -> str:
        """The key after which the page begins."""
        return "" if self.page is None else page_id(self.page)


class NotePage(msgspec.Struct, frozen=True, gc=False):
    """Some of the notes that a query found; `next` is the `page` of the query for the next notes, None at the
    end."""

    notes: tuple[NoteView, ...]
    next: str | None


def note_page(query: NoteQuery, found: Sequence[NoteView]) -> NotePage:
    """A page of the notes found, of which there may be one more than the limit."""
    page = tuple(found[: query.limit])
    return NotePage(page, id_token(page[-1].key) if len(found) > query.limit else None)


def notes_in(query: NoteQuery, notes: Iterable[NoteView], now: int) -> NotePage:
    """The page of a query from all notes, in any order."""
    found = [
        note
        for note in notes
        if note.key.startswith(query.prefix)
        and note.key > query.after
        and (note.expires_at is None or note.expires_at > now)
    ]
    return note_page(query, sorted(found, key=lambda note: note.key)[: query.limit + 1])


def write_note(old: NoteView | None, note: Note, version: int, now: int) -> tuple[NoteView | None, Noted]:
    """The note after a write (None: it is deleted) and the answer; raises `NoteConflict`. `old` is the note
    as stored, `version` the number of this write."""
    if old is not None and old.expires_at is not None and old.expires_at <= now:
        old = None
    found, fence = (0, 0) if old is None else (old.version, old.fence)
    if note.expect is not None and note.expect != found:
        raise NoteConflict(key=note.key, version=found, expect=note.expect)
    if note.value is None:
        return None, Noted(note.key, found, fence)
    expires_at = None if note.ttl is None else now + note.ttl
    new = NoteView(note.key, note.value, version, fence or version, expires_at)
    return new, Noted(note.key, version, new.fence)


NotePlan = list[tuple[NoteView | None, Noted]]
"""For each write of a note: the note after it (None: the note is deleted), and the answer."""


def plan_notes(stored: Mapping[str, NoteView], notes: Iterable[Note], version: int, now: int) -> NotePlan:
    """The writes of notes one after the other; each reads the results of the writes before it. Raises
    `NoteConflict`. `version` is the number of the first write."""
    plan: NotePlan = []
    ahead: dict[str, NoteView | None] = {}
    for note in notes:
        old = ahead[note.key] if note.key in ahead else stored.get(note.key)
        new, answer = write_note(old, note, version, now)
        version += new is not None
        ahead[note.key] = new
        plan.append((new, answer))
    return plan


_GATE_KEYS = frozenset({"queue", "part", "why", "not_before"})


def given_settings(why: str | None, paused: bool, command: SetQueue | SetPart) -> dict[str, Any]:
    """The settings that a command changes, by the field names of `QueueView` and `PartView`. `why` and
    `paused` are the values before the command."""
    fields = [field for field in command.__struct_fields__ if field not in _GATE_KEYS]
    found = {field: getattr(command, field) for field in fields} | {"next_at": command.not_before}
    found["why"] = reason_after(why, paused, command.paused, command.why)
    return {field: value for field, value in found.items() if value is not UNSET}


class GroupQuery(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which groups to list, in the order of their ids by bytes. Ids that Towpath creates grow with time, so
    `descending` lists the newest of them first. `page` is the `next` of the last answer."""

    states: tuple[GroupState, ...] = ()
    outcomes: tuple[State, ...] = ()
    """How the group ended. A group that is not closed has no outcome."""
    prefix: str = ""
    descending: bool = False
    limit: int = 100
    page: str | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "states", words_of("states", self.states, GroupState))
        force_setattr(self, "outcomes", words_of("outcomes", self.outcomes, State, FINISHED))
        checks.text("prefix", self.prefix)
        checks.whole("limit", self.limit, 1, MAX_PAGE)
        if self.page is not None:
            page_id(self.page)

    def matches(self, group: GroupView) -> bool:
        """Does the group meet every condition that is given, apart from the page?"""
        return (
            group.id.startswith(self.prefix)
            and (not self.states or group.state in self.states)
            and (not self.outcomes or group.outcome in self.outcomes)
        )

    def follows(self, id: str) -> bool:
        """Is the id behind the page mark?"""
        if self.page is None:
            return True
        mark = page_id(self.page)
        return id < mark if self.descending else id > mark


def id_token(id: str) -> str:
    return base64.urlsafe_b64encode(f"i{id}".encode()).decode().rstrip("=")


def page_id(page: object) -> str:
    """The id after which a page continues."""
    try:
        if isinstance(page, str) and len(page) <= 2048:
            raw = base64.b64decode(page + "=" * (-len(page) % 4), altchars=b"-_", validate=True).decode()
            if raw.startswith("i") and checks.storable(raw) and id_token(raw[1:]) == page:
                return raw[1:]
    except (binascii.Error, ValueError):
        pass
    raise InvalidInput(field="page", value=page, expected="the `next` of an earlier page")


def prefix_end(prefix: str) -> str:
    """The end of the index range of this prefix: a text that is greater, by bytes, than all ids with the
    prefix and not greater than any id after them."""
    for at in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[at]) + 1
        if code <= 0x10FFFF:
            # Surrogates are no characters: no stored text is between the characters around them.
            return prefix[:at] + chr(0xE000 if code == 0xD800 else code)
    return chr(0x10FFFF) * (checks.MAX_NAME + 1)


class GroupPage(msgspec.Struct, frozen=True, gc=False):
    """Some of the groups that a query found; `next` is the `page` of the query for the next groups, None at
    the end."""

    groups: tuple[GroupView, ...]
    next: str | None


def group_page(query: GroupQuery, found: Sequence[GroupView]) -> GroupPage:
    """A page of the groups found, of which there may be one more than the limit."""
    page = tuple(found[: query.limit])
    return GroupPage(page, id_token(page[-1].id) if len(found) > query.limit else None)


class Page(msgspec.Struct, frozen=True, gc=False):
    """Some of the jobs that a query found; `next` is the `page` of the query for the next jobs, None at the
    end."""

    jobs: tuple[Job, ...]
    next: str | None


def page_of(query: Query, jobs: Iterable[Job]) -> Page:
    """The page of a query from the jobs behind its page mark, in the order of the query."""
    found = list(islice((job for job in jobs if query.matches(job)), query.limit + 1))
    page = [job if query.bodies else without_bodies(job) for job in found[: query.limit]]
    return Page(tuple(page), page_token(page[-1].seq) if len(found) > query.limit else None)


class Winner(msgspec.Struct, frozen=True):
    """An id of a refused (for its key) or superseded job, and the job that represents it (None:
    it is deleted). In a group `place` is the number by which it is ordered among the members."""

    id: str
    place: int
    winner: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(Readable):
    """A job at one moment. `arguments` and `result` have the types of the task if it is registered in this
    process, else they are plain JSON; `arguments` of a message are None. `attempts` counts the deliveries,
    `attempts_used` the attempts that count towards `max_attempts`. `after` and `after_groups` are the ids of
    its dependencies."""

    id: str
    kind: str
    queue: str
    state: State
    reason: Reason
    arguments: Mapping[str, Any] | None
    result: Any
    error: str | None
    attempts: int
    attempts_used: int
    max_attempts: int
    failures: int
    losses: int
    created_at: datetime
    ready_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime | None
    priority: int
    part: str | None
    key: str | None
    timeout: float | None
    """Seconds that an attempt may take."""
    retention: float | None
    """Seconds for which the finished job is kept; None: the retention of its queue."""
    owner: str | None
    """The worker that runs the job."""
    cancel_requested: Reason | None
    progress_done: int | None
    progress_total: int | None
    cursor: Any
    """The last checkpoint."""
    group: str | None
    parent: str | None
    generation: int
    after: tuple[str, ...]
    after_groups: tuple[str, ...]
    correlation_id: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus(Readable):
    """A group at one moment, with the exact counts of its members. `outcome` is None until it is closed."""

    id: str
    state: GroupState
    outcome: State | None
    on_failure: OnFailure
    total: int
    unfinished: int
    done: int
    failed: int
    canceled: int
    superseded: int
    created_at: datetime
    closed_at: datetime | None
    paused: bool
    why: str | None
