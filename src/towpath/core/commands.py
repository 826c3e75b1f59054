"""The commands of a ledger. Their results are in `core.results` and importable from here too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.core.blobs import PutChunk as PutChunk
from towpath.core.group_commands import Abort as Abort
from towpath.core.group_commands import Open as Open
from towpath.core.group_commands import Seal as Seal
from towpath.core.group_commands import Unseal as Unseal
from towpath.core.job import SERIAL, Done, Outcome, Spec, rank
from towpath.core.limits import Rate
from towpath.core.results import Appended as Appended
from towpath.core.results import Canceled as Canceled
from towpath.core.results import ChunkPut as ChunkPut
from towpath.core.results import Claimed as Claimed
from towpath.core.results import GroupSet as GroupSet
from towpath.core.results import GroupState as GroupState
from towpath.core.results import Hastened as Hastened
from towpath.core.results import Noted as Noted
from towpath.core.results import OnFailure as OnFailure
from towpath.core.results import Placed as Placed
from towpath.core.results import Progressed as Progressed
from towpath.core.results import Purged as Purged
from towpath.core.results import QueueSet as QueueSet
from towpath.core.results import Renewed as Renewed
from towpath.core.results import Resolution as Resolution
from towpath.core.results import Resolved as Resolved
from towpath.core.results import Result as Result
from towpath.core.results import Revived as Revived
from towpath.core.results import Settled as Settled
from towpath.core.results import Upkept as Upkept
from towpath.core.selection import MAX_BULK as MAX_BULK
from towpath.core.selection import Selector as Selector
from towpath.errors import Described, InvalidInput

MAX_SPECS, MAX_WANTS, MAX_NOTES = 100_000, 1_000, 2_000
MAX_LEFT = 10_000  # With more ready jobs a claim takes every kind, so that it does not scan them.
MAX_LEASE = checks.DAY
PROMOTE = 1_000  # The most due jobs of one queue that a claim makes ready.
TOMBSTONE = checks.HOUR
"""The least time for which the id of a deleted job, a refused id and the result of a token are stored."""
KEEP = 1_000_000  # The most done and canceled jobs that a queue keeps.

_OUTCOMES = frozenset(get_args(Outcome))
_MAX_NAME = checks.MAX_NAME


class _Command(msgspec.Struct, frozen=True, gc=False):
    pass


class _Tokened(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`token` makes the command safe to repeat: for at least an hour, the same token returns the first
    result."""

    token: str = ""

    def __post_init__(self) -> None:
        if self.token != "":
            checks.text("token", self.token)


def token_of(command: Any) -> str:
    """The key under which the command's result is kept; empty without a token. Each kind of command has its
    own tokens."""
    token: str = getattr(command, "token", "")
    return f"{type(command).__struct_config__.tag}:{token}" if token else ""


class Append(_Command, frozen=True, gc=False, tag="append"):
    """Insert one or many jobs, with their dependencies, all or nothing. Safe to repeat: the ids identify
    jobs. `inside`: appended by Towpath itself, for a schedule that fires; no capacity of a queue refuses
    it."""

    specs: tuple[Spec, ...]
    inside: bool = False

    def __post_init__(self) -> None:
        specs = self.specs
        if type(specs) is tuple and len(specs) == 1 and type(specs[0]) is Spec:
            return
        force_setattr(self, "specs", checks.all_of("specs", specs, Spec))
        _check_length("specs", self.specs, MAX_SPECS)
        _check_ids("specs", self.specs)


def _check_length(field: str, values: tuple[object, ...], most: int) -> None:
    if not 1 <= len(values) <= most:
        shown = Described(f"a list of {len(values)}")
        raise InvalidInput(field=field, value=shown, expected=f"1 to {most} long")


def _check_ids(field: str, specs: tuple[Spec, ...]) -> None:
    """Two specs with one id in one command are an error: one of the two would be dropped silently."""
    if len({spec.id for spec in specs}) == len(specs):
        return
    seen: set[str] = set()
    for spec in specs:
        if spec.id in seen:
            raise InvalidInput(field=field, value=spec.id, expected="used once in one command")
        seen.add(spec.id)


class Want(_Command, frozen=True, gc=False):
    """At most `n` jobs of a queue, of a queue pattern, or of several of these separated by commas.

    `once`: the most jobs with a single attempt among them (None: n). Such a job is lost for good if its
    worker dies, so ask only for as many as can start immediately. `upto`: the most jobs for this want and the
    wants before it together. `suspects`: the most jobs that have lost their lease at least `SUSPECT` times
    (None: n); further suspects are skipped. `owner` and `lease` replace the claim's values. `without`: kinds
    that are left to others where no part takes turns and at most `MAX_LEFT` jobs are ready."""

    queue: str
    n: int = 1
    once: int | None = None
    upto: int | None = None
    suspects: int | None = None
    owner: str | None = None
    lease: int | None = None
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.patterns("queue", self.queue)
        checks.whole("n", self.n, 1, MAX_BULK)
        checks.optional_whole("once", self.once, 0, MAX_BULK)
        checks.optional_whole("upto", self.upto, 0)
        checks.optional_whole("suspects", self.suspects, 0, MAX_BULK)
        checks.optional_text("owner", self.owner)
        checks.optional_whole("lease", self.lease, 1, MAX_LEASE)
        if self.without:
            force_setattr(self, "without", checks.all_of("without", self.without, str))


class Claim(_Tokened, frozen=True, kw_only=True, gc=False, tag="claim"):
    """`once` and `suspects` limit all wants together: jobs with a single attempt, and jobs that lost their
    lease repeatedly."""

    owner: str
    wants: tuple[Want, ...]
    lease: int
    once: int | None = None
    suspects: int | None = None

    def __post_init__(self) -> None:
        _Tokened.__post_init__(self)
        checks.text("owner", self.owner, least=1)
        checks.whole("lease", self.lease, 1, MAX_LEASE)
        checks.optional_whole("once", self.once, 0, MAX_BULK)
        checks.optional_whole("suspects", self.suspects, 0, MAX_BULK)
        force_setattr(self, "wants", checks.all_of("wants", self.wants, Want))
        _check_length("wants", self.wants, MAX_WANTS)

    def terms(self, want: Want) -> tuple[str, int]:
        """The owner and the lease of the jobs that are claimed for this want."""
        return want.owner or self.owner, want.lease or self.lease


class Renew(_Command, frozen=True, gc=False, tag="renew"):
    """Heartbeat for (id, fence) pairs."""

    held: tuple[tuple[str, int], ...]
    lease: int

    def __post_init__(self) -> None:
        force_setattr(self, "held", tuple(self.held))
        checks.whole("lease", self.lease, 1, MAX_LEASE)
        checks.whole("len(held)", len(self.held), 0, MAX_SPECS)
        for pair in self.held:
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise InvalidInput(field="held", value=pair, expected="pairs of id and fence")
            checks.text("held", pair[0])
            checks.whole("held", pair[1], most=2**62)


class Note(_Tokened, frozen=True, kw_only=True, gc=False, tag="note"):
    """Write a small compare-and-set record.

    `expect` None: write in any case; 0: only if the note does not exist; else only at this version. `value`
    None deletes the note. The `fence` of the result stays while the note exists and is larger each time the
    note is created again, so a note that expires is a lock. `gates` are set together with the note, or not at
    all."""

    key: str
    value: bytes | None
    expect: int | None = None
    ttl: int | None = None
    gates: tuple[SetQueue | SetPart, ...] = ()

    def __post_init__(self) -> None:
        _Tokened.__post_init__(self)
        checks.text("key", self.key, checks.MAX_KEY, least=1)
        checks.optional_whole("expect", self.expect)
        checks.optional_whole("ttl", self.ttl, least=1)
        if self.value is not None:
            checks.data("value", self.value, checks.MAX_NOTE)
        if self.gates:
            force_setattr(self, "gates", checks.all_of("gates", self.gates, (SetQueue, SetPart)))
            checks.whole("len(gates)", len(self.gates), most=1000)


class Settle(_Command, frozen=True, gc=False, tag="settle"):
    """Finish an attempt. Children, notes and `within` happen in the same transaction or not at all. `within`
    is called with the ledger's own database connection and may write the user's tables."""

    id: str
    fence: int
    outcome: Outcome
    spawn: tuple[Spec, ...] = ()
    notes: tuple[Note, ...] = ()
    within: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        id, fence = self.id, self.fence
        # One settle per job: this check costs less than the call.
        if type(id) is not str or len(id) > _MAX_NAME or not id.isascii() or "\0" in id:
            checks.text("id", id)
        if type(fence) is not int or not 0 <= fence < 2**62:
            checks.whole("fence", fence, most=2**62)
        if type(self.outcome) not in _OUTCOMES:
            raise InvalidInput(
                field="outcome", value=self.outcome, expected="one of the outcomes, such as Done()"
            )
        if self.spawn:
            force_setattr(self, "spawn", checks.all_of("spawn", self.spawn, Spec))
            checks.whole("len(spawn)", len(self.spawn), 0, MAX_SPECS)
            _check_ids("spawn", self.spawn)
        if self.notes:
            force_setattr(self, "notes", _fenced_notes(self.notes))


def _fenced_notes(notes: tuple[Note, ...]) -> tuple[Note, ...]:
    """The notes of a settle or a progress, checked."""
    notes = checks.all_of("notes", notes, Note)
    checks.whole("len(notes)", len(notes), 0, MAX_NOTES)
    if any(note.gates for note in notes):
        expected = "a note without gates in a settle or a progress"
        raise InvalidInput(field="notes", value=Described("a note with gates"), expected=expected)
    return notes


def plain_end(command: Settle) -> Done | None:
    """The outcome of a settle that is done and has no children, no notes and no commit function."""
    outcome = command.outcome
    plain = type(outcome) is Done and not (command.spawn or command.notes or command.within is not None)
    return outcome if plain else None  # type: ignore[return-value]


class Progress(_Command, frozen=True, gc=False, tag="progress"):
    """Progress of a running job. The notes are written in the same transaction or not at all: a lost claim or
    a `NoteConflict` writes nothing."""

    id: str
    fence: int
    done: int | None = None
    total: int | None = None
    cursor: bytes | None = None
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        checks.text("id", self.id)
        checks.whole("fence", self.fence, most=2**62)
        checks.optional_whole("done", self.done, most=2**62)
        checks.optional_whole("total", self.total, most=2**62)
        if self.cursor is not None:
            checks.data("cursor", self.cursor, checks.MAX_NOTE)
        if self.notes:
            force_setattr(self, "notes", _fenced_notes(self.notes))


class _Bulk(_Tokened, frozen=True, kw_only=True, gc=False):
    """In the order of `seq`, at most `limit` jobs; `more` in the result is true if further jobs match."""

    where: Selector
    limit: int = MAX_BULK

    def __post_init__(self) -> None:
        _Tokened.__post_init__(self)
        checks.whole("limit", self.limit, 1, MAX_BULK)
        if not isinstance(self.where, Selector):
            raise InvalidInput(field="where", value=self.where, expected="a Selector")


class Cancel(_Bulk, frozen=True, kw_only=True, gc=False, tag="cancel"):
    pass


class Revive(_Bulk, frozen=True, kw_only=True, gc=False, tag="revive"):
    pass


class Purge(_Bulk, frozen=True, kw_only=True, gc=False, tag="purge"):
    pass


class Resolve(_Command, frozen=True, gc=False, tag="resolve"):
    """Make a job done by the decision of a person: `marked` if its effect exists, `skipped` if it is not
    needed. The job waits, or is failed or canceled; jobs that ended only because of it are revived. `why` and
    `by` (the person) are kept in the history of its attempts. Safe to repeat."""

    id: str
    outcome: Resolution
    why: str
    by: str
    result: bytes | None = None

    def __post_init__(self) -> None:
        checks.text("id", self.id, least=1)
        if not isinstance(self.outcome, str) or self.outcome not in Resolution._value2member_map_:
            raise InvalidInput(field="outcome", value=self.outcome, expected="marked or skipped")
        force_setattr(self, "outcome", Resolution(self.outcome))
        checks.text("why", self.why, 1000, least=1)
        checks.text("by", self.by, least=1)
        if self.result is not None:
            checks.data("result", self.result, checks.MAX_PAYLOAD)


class Hasten(_Command, frozen=True, gc=False, tag="hasten"):
    """Raise the priority of ready jobs of these queues to `priority` if they could have run for `waited` and
    are less urgent."""

    queue: str
    waited: int
    priority: int = 0
    limit: int = 1000

    def __post_init__(self) -> None:
        checks.patterns("queue", self.queue)
        checks.whole("waited", self.waited)
        rank(self.priority)
        checks.whole("limit", self.limit, 1, MAX_BULK)


class SetQueue(_Command, frozen=True, kw_only=True, gc=False, tag="set-queue"):
    """Set the given fields of a queue; an omitted field stays as it is, None removes a limit."""

    queue: str
    paused: bool | UnsetType = UNSET
    why: str | UnsetType | None = UNSET
    capacity: int | UnsetType | None = UNSET
    cap: int | UnsetType | None = UNSET
    rate: Rate | UnsetType | None = UNSET
    not_before: int | UnsetType = UNSET
    retention: int | UnsetType | None = UNSET
    keep: int | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        checks.name("queue", self.queue)
        _check_gate(self)
        for field in ("capacity", "retention", "keep"):
            if (value := getattr(self, field)) is not UNSET:
                checks.optional_whole(field, value)


class SetPart(_Command, frozen=True, kw_only=True, gc=False, tag="set-part"):
    """Set the given fields of a part, as `SetQueue` does. `capacity` and `append_rate` limit appends from
    outside to this part."""

    queue: str
    part: str
    paused: bool | UnsetType = UNSET
    why: str | UnsetType | None = UNSET
    cap: int | UnsetType | None = UNSET
    rate: Rate | UnsetType | None = UNSET
    not_before: int | UnsetType = UNSET
    weight: int | UnsetType = UNSET
    capacity: int | UnsetType | None = UNSET
    append_rate: Rate | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        checks.name("queue", self.queue)
        checks.text("part", self.part, least=1)
        _check_gate(self)
        if self.part.startswith(SERIAL) and self.cap not in (UNSET, 0, 1):
            raise InvalidInput(
                field="cap", value=self.cap, expected="0 or 1: the part of a serial key runs one at a time"
            )
        if self.weight is not UNSET:
            checks.whole("weight", self.weight, 1, 1000)
        if self.capacity is not UNSET:
            checks.optional_whole("capacity", self.capacity)
        if self.append_rate is not UNSET and not isinstance(self.append_rate, Rate | None):
            raise InvalidInput(
                field="append_rate", value=self.append_rate, expected="a Rate, or None to lift it"
            )


def _check_gate(setting: SetQueue | SetPart) -> None:
    if setting.paused is not UNSET and type(setting.paused) is not bool:
        raise InvalidInput(field="paused", value=setting.paused, expected="true or false")
    if setting.why is not UNSET:
        checks.optional_text("why", setting.why, 1000)
    if setting.rate is not UNSET and not isinstance(setting.rate, Rate | None):
        raise InvalidInput(field="rate", value=setting.rate, expected="a Rate, or None to lift it")
    if setting.cap is not UNSET:
        checks.optional_whole("cap", setting.cap, most=1_000_000)
    if setting.not_before is not UNSET:
        checks.whole("not_before", setting.not_before)


class Upkeep(_Command, frozen=True, gc=False, tag="upkeep"):
    """Reap, expire, wake, purge and sweep at most `limit` rows; writes nothing when nothing is due. `dead`:
    owners with an ended process. Their running jobs are lost now, whatever their lease."""

    limit: int = 1000
    dead: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks.whole("limit", self.limit, 1, MAX_BULK)
        if self.dead:
            force_setattr(self, "dead", checks.all_of("dead", self.dead, str))
            checks.whole("len(dead)", len(self.dead), 0, MAX_BULK)
            for owner in self.dead:
                checks.text("dead", owner, least=1)


_OfJobs = Append | Claim | Renew | Settle | Progress | Cancel | Revive | Resolve | Purge
Command = _OfJobs | Hasten | Open | Seal | Unseal | Abort | SetQueue | SetPart | Note | Upkeep | PutChunk
