"""The values that the reads of a ledger return, and the query of `find`."""

from __future__ import annotations

import base64
import binascii

import msgspec
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.core.commands import GroupState, Note, Noted, OnFailure, states_of
from towpath.core.job import FINISHED, WAITING, Job, State
from towpath.core.limits import Rate
from towpath.errors import InvalidInput, NoteConflict

MAX_PAGE = 1000


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


class PartView(msgspec.Struct, frozen=True, gc=False):
    """A part of a queue: what waits and runs in it, and its limits."""

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
    """A group: where it is in its life, how it ended, and the exact counts of its members."""

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
    """It was sealed, and is open again until it is sealed anew."""
    why: str | None = None


class NoteView(msgspec.Struct, frozen=True, gc=False):
    """A note as it stands; `version` changes with every write, `fence` only when it is made anew."""

    key: str
    value: bytes
    version: int
    fence: int
    expires_at: int | None


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


class Query(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which jobs to list, in the order of `seq` (newest first unless `oldest_first`). `page` is what the last
    answer gave."""

    queue: str | None = None
    part: str | None = None
    states: tuple[State, ...] = ()
    kind: str | None = None
    group: str | None = None
    key: str | None = None
    owner: str | None = None
    correlation_id: str | None = None
    created_from: int | None = None
    created_before: int | None = None
    header: tuple[str, str] | None = None
    oldest_first: bool = False
    bodies: bool = True
    limit: int = 100
    page: str | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "states", states_of(self.states))
        if self.queue is not None:
            checks.pattern("queue", self.queue)
        for field in ("part", "group", "owner", "correlation_id"):
            checks.optional_text(field, getattr(self, field))
        checks.optional_text("key", self.key, checks.MAX_KEY)
        if self.kind is not None:
            checks.text("kind", self.kind)
        checks.optional_whole("created_from", self.created_from)
        checks.optional_whole("created_before", self.created_before)
        if self.header is not None:
            if not (isinstance(self.header, tuple) and len(self.header) == 2):
                raise InvalidInput(field="header", value=self.header, expected="a pair of name and value")
            checks.headers(dict([self.header]))
        checks.whole("limit", self.limit, 1, MAX_PAGE)
        if self.page is not None:
            page_seq(self.page)

    def matches(self, job: Job) -> bool:
        """Does the job meet every condition that is given, apart from the page?"""
        return (
            (not self.states or job.state in self.states)
            and (self.queue is None or checks.matches(self.queue, job.queue))
            and self.part in (None, job.part)
            and self.kind in (None, job.kind)
            and self.group in (None, job.group)
            and self.key in (None, job.key)
            and self.owner in (None, job.owner)
            and self.correlation_id in (None, job.correlation_id)
            and (self.created_from is None or job.created_at >= self.created_from)
            and (self.created_before is None or job.created_at < self.created_before)
            and (self.header is None or job.headers.get(self.header[0]) == self.header[1])
        )


def page_token(seq: int) -> str:
    return base64.urlsafe_b64encode(f"s{seq}".encode()).decode().rstrip("=")


def page_seq(page: object) -> int:
    """The seq after which a page continues."""
    try:
        if isinstance(page, str) and len(page) <= 64:
            raw = base64.b64decode(page + "=" * (-len(page) % 4), altchars=b"-_", validate=True).decode(
                "ascii"
            )
            if (
                raw.startswith("s")
                and raw[1:].isdigit()
                and page_token(int(raw[1:])) == page
                and int(raw[1:]) < 2**63
            ):
                return int(raw[1:])
    except (binascii.Error, ValueError):
        pass
    raise InvalidInput(field="page", value=page, expected="the `next` of an earlier page")


class Page(msgspec.Struct, frozen=True, gc=False):
    """Some of the jobs a query found; `next` is the `page` to ask for what follows, None at the end."""

    jobs: tuple[Job, ...]
    next: str | None


class Winner(msgspec.Struct, frozen=True):
    """An id that was refused for its key, or whose job was superseded, and the job that represents it (None:
    it is deleted). In a group `place` is the number by which it is ordered among the members."""

    id: str
    place: int
    winner: str | None
