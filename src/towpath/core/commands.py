"""The ledger's language: commands in, results out. A business error takes the place of a result (see `errors.Refused`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.core.job import Claim as ClaimedJob
from towpath.core.job import Outcome, Reason, Spec, State, Word
from towpath.core.limits import Rate
from towpath.errors import InvalidInput

MAX_SPECS = 100_000
MAX_BULK = 10_000
MAX_LEASE = checks.DAY
PROMOTE = 1_000
"""How many due jobs of one queue a claim makes ready at most."""
TOMBSTONE = checks.HOUR
"""How long a deleted job's id, a refused id and a command's answer are remembered at least."""
KEEP = 1_000_000
"""Done and canceled jobs a queue keeps at most."""


class GroupState(Word):
    OPEN = "open"
    SEALED = "sealed"
    ABORTING = "aborting"
    CLOSED = "closed"


class OnFailure(Word):
    CONTINUE = "continue"
    ABORT = "abort"


class _Value(msgspec.Struct, frozen=True, gc=False):
    pass


class _Tokened(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`token` makes the command safe to repeat: the same token gets the first answer again for at least an hour."""

    token: str = ""

    def __post_init__(self) -> None:
        if self.token != "":
            checks.text("token", self.token)


class Append(_Value, frozen=True, gc=False, tag="append"):
    """Insert one or many, with their dependencies, all or nothing. Safe to repeat by the ids of the specs."""

    specs: tuple[Spec, ...]

    def __post_init__(self) -> None:
        force_setattr(self, "specs", tuple(self.specs))
        if not 1 <= len(self.specs) <= MAX_SPECS:
            raise InvalidInput(field="specs", value=f"{len(self.specs)} specs", expected=f"1 to {MAX_SPECS}")


class Want(_Value, frozen=True, gc=False):
    """At most `n` jobs of a queue, a queue pattern, or several of these with commas between them. Of these at most `once` may be jobs with a single attempt, which are
    lost for good if the claimer dies: ask only for as many as can start at once (None: all n)."""

    queue: str
    n: int = 1
    once: int | None = None

    def __post_init__(self) -> None:
        checks.patterns("queue", self.queue)
        checks.whole("n", self.n, 1, MAX_BULK)
        checks.optional_whole("once", self.once, 0, MAX_BULK)


class Claim(_Tokened, frozen=True, kw_only=True, gc=False, tag="claim"):
    owner: str
    wants: tuple[Want, ...]
    lease: int

    def __post_init__(self) -> None:
        _Tokened.__post_init__(self)
        checks.text("owner", self.owner, least=1)
        checks.whole("lease", self.lease, 1, MAX_LEASE)
        force_setattr(self, "wants", tuple(self.wants))
        if not 1 <= len(self.wants) <= 1000:
            raise InvalidInput(field="wants", value=f"{len(self.wants)} wants", expected="1 to 1000")


class Renew(_Value, frozen=True, gc=False, tag="renew"):
    """Heartbeat for (id, fence) pairs."""

    held: tuple[tuple[str, int], ...]
    lease: int

    def __post_init__(self) -> None:
        force_setattr(self, "held", tuple(self.held))
        checks.whole("lease", self.lease, 1, MAX_LEASE)
        checks.whole("len(held)", len(self.held), 0, MAX_SPECS)
        for id, _ in self.held:
            checks.text("held", id)


class Note(_Tokened, frozen=True, kw_only=True, gc=False, tag="note"):
    """A small compare-and-set record. `expect`: None writes anyway, 0 only if there is none, else only at that version.
    `value` None deletes. The answer's `fence` is fixed while the note lives and larger each time it is made anew, so a
    note that expires is a lock."""

    key: str
    value: bytes | None
    expect: int | None = None
    ttl: int | None = None

    def __post_init__(self) -> None:
        _Tokened.__post_init__(self)
        checks.text("key", self.key, checks.MAX_KEY, least=1)
        checks.optional_whole("expect", self.expect)
        checks.optional_whole("ttl", self.ttl, least=1)
        if self.value is not None:
            checks.data("value", self.value, checks.MAX_NOTE)


class Settle(_Value, frozen=True, gc=False, tag="settle"):
    """Finish an attempt. Children, notes and `within` happen in the same transaction or not at all. `within` is called
    with the ledger's own database connection and may write the user's tables."""

    id: str
    fence: int
    outcome: Outcome
    spawn: tuple[Spec, ...] = ()
    notes: tuple[Note, ...] = ()
    within: Callable[[Any], object] | None = None

    def __post_init__(self) -> None:
        checks.text("id", self.id)
        if self.spawn:
            force_setattr(self, "spawn", tuple(self.spawn))
            checks.whole("len(spawn)", len(self.spawn), 0, MAX_SPECS)
        if self.notes:
            force_setattr(self, "notes", tuple(self.notes))
            checks.whole("len(notes)", len(self.notes), 0, 1000)


class Progress(_Value, frozen=True, gc=False, tag="progress"):
    id: str
    fence: int
    done: int | None = None
    total: int | None = None
    cursor: bytes | None = None

    def __post_init__(self) -> None:
        checks.text("id", self.id)
        checks.optional_whole("done", self.done, most=2**62)
        checks.optional_whole("total", self.total, most=2**62)
        if self.cursor is not None:
            checks.data("cursor", self.cursor, checks.MAX_NOTE)


class Selector(_Value, frozen=True, kw_only=True, gc=False):
    """Which jobs a bulk command means: all that match every field given."""

    ids: tuple[str, ...] = ()
    queue: str | None = None
    part: str | None = None
    group: str | None = None
    key: str | None = None
    kind: str | None = None
    states: tuple[State, ...] = ()
    created_before: int | None = None
    finished_before: int | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "ids", tuple(self.ids))
        force_setattr(self, "states", states_of(self.states))
        if len(self.ids) > MAX_BULK:
            raise InvalidInput(field="ids", value=f"{len(self.ids)} ids", expected=f"at most {MAX_BULK}")
        for each in self.ids:
            checks.text("ids", each, least=1)
        if self.queue is not None:
            checks.pattern("queue", self.queue)
        checks.optional_text("part", self.part)
        checks.optional_text("group", self.group)
        checks.optional_text("key", self.key, checks.MAX_KEY)
        if self.kind is not None:
            checks.text("kind", self.kind)
        checks.optional_whole("created_before", self.created_before)
        checks.optional_whole("finished_before", self.finished_before)
        if all(getattr(self, field) in (None, ()) for field in self.__struct_fields__):
            raise InvalidInput(field="selector", value="empty", expected="at least one condition")


def states_of(states: tuple[State | str, ...]) -> tuple[State, ...]:
    for each in states:
        if each not in State._value2member_map_:
            raise InvalidInput(field="state", value=each, expected=f"one of {', '.join(State)}")
    return tuple(State(each) for each in states)


class _Bulk(_Tokened, frozen=True, kw_only=True, gc=False):
    """In the order of `seq`, at most `limit` at a time; the answer says whether there are more."""

    where: Selector
    limit: int = MAX_BULK

    def __post_init__(self) -> None:
        _Tokened.__post_init__(self)
        checks.whole("limit", self.limit, 1, MAX_BULK)


class Cancel(_Bulk, frozen=True, kw_only=True, gc=False, tag="cancel"):
    pass


class Revive(_Bulk, frozen=True, kw_only=True, gc=False, tag="revive"):
    pass


class Purge(_Bulk, frozen=True, kw_only=True, gc=False, tag="purge"):
    pass


class Open(_Value, frozen=True, gc=False, tag="open"):
    """`then`: for each way the group may end, the specs that are appended when it does. Their ids are derived."""

    group: str
    on_failure: OnFailure = OnFailure.CONTINUE
    then: Mapping[str, tuple[Spec, ...]] = {}

    def __post_init__(self) -> None:
        checks.text("group", self.group, least=1)
        if self.on_failure not in OnFailure._value2member_map_:
            raise InvalidInput(field="on_failure", value=self.on_failure, expected="continue or abort")
        for ending, specs in self.then.items():
            if ending not in ("done", "failed", "canceled"):
                raise InvalidInput(field="then", value=ending, expected="done, failed or canceled")
            for spec in specs:
                if spec.after or spec.group:
                    raise InvalidInput(field=f"then[{ending}]", value=spec.id, expected="specs without after and group")


class _OfGroup(_Value, frozen=True, gc=False):
    group: str

    def __post_init__(self) -> None:
        checks.text("group", self.group, least=1)


class Seal(_OfGroup, frozen=True, gc=False, tag="seal"):
    pass


class Abort(_OfGroup, frozen=True, gc=False, tag="abort"):
    pass


class SetQueue(_Value, frozen=True, kw_only=True, gc=False, tag="set-queue"):
    """What is left out stays as it is; None lifts a limit."""

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


class SetPart(_Value, frozen=True, kw_only=True, gc=False, tag="set-part"):
    queue: str
    part: str
    paused: bool | UnsetType = UNSET
    why: str | UnsetType | None = UNSET
    cap: int | UnsetType | None = UNSET
    rate: Rate | UnsetType | None = UNSET
    not_before: int | UnsetType = UNSET
    weight: int | UnsetType = UNSET

    def __post_init__(self) -> None:
        checks.name("queue", self.queue)
        checks.text("part", self.part, least=1)
        _check_gate(self)
        if self.weight is not UNSET:
            checks.whole("weight", self.weight, 1, 1000)


def _check_gate(setting: SetQueue | SetPart) -> None:
    if setting.paused is not UNSET and type(setting.paused) is not bool:
        raise InvalidInput(field="paused", value=setting.paused, expected="true or false")
    if setting.why is not UNSET:
        checks.optional_text("why", setting.why, 1000)
    if setting.cap is not UNSET:
        checks.optional_whole("cap", setting.cap, most=1_000_000)
    if setting.not_before is not UNSET:
        checks.whole("not_before", setting.not_before)


class Upkeep(_Value, frozen=True, gc=False, tag="upkeep"):
    """Reap, expire, wake, purge and sweep at most `limit` rows; writes nothing when nothing is due."""

    limit: int = 1000

    def __post_init__(self) -> None:
        checks.whole("limit", self.limit, 1, MAX_BULK)


_OfJobs = Append | Claim | Renew | Settle | Progress | Cancel | Revive | Purge
Command = _OfJobs | Open | Seal | Abort | SetQueue | SetPart | Note | Upkeep


class Placed(_Value, frozen=True, gc=False):
    """Where a spec ended up: its own id, or that of the job that already held its key."""

    id: str
    seq: int


class Appended(_Value, frozen=True, gc=False, tag="appended"):
    jobs: tuple[Placed, ...]


class Claimed(_Value, frozen=True, gc=False, tag="claimed"):
    claims: tuple[ClaimedJob, ...]


class Renewed(_Value, frozen=True, gc=False, tag="renewed"):
    until: int
    lost: tuple[str, ...] = ()
    cancel: tuple[tuple[str, Reason], ...] = ()


class Settled(_Value, frozen=True, gc=False, tag="settled"):
    id: str
    state: State


class Progressed(_Value, frozen=True, gc=False, tag="progressed"):
    cancel: Reason | None = None


class Canceled(_Value, frozen=True, gc=False, tag="canceled"):
    canceled: int
    requested: int
    more: bool = False


class Revived(_Value, frozen=True, gc=False, tag="revived"):
    """`revived` counts what came back with it too; `refused` says of each asked job why it could not."""

    revived: int
    refused: tuple[tuple[str, str], ...] = ()
    more: bool = False


class Purged(_Value, frozen=True, gc=False, tag="purged"):
    purged: int
    more: bool = False


class GroupSet(_Value, frozen=True, gc=False, tag="group-set"):
    group: str


class QueueSet(_Value, frozen=True, gc=False, tag="queue-set"):
    queue: str
    part: str | None = None


class Noted(_Value, frozen=True, gc=False, tag="noted"):
    key: str
    version: int
    fence: int


class Upkept(_Value, frozen=True, gc=False, tag="upkept"):
    reaped: int = 0
    expired: int = 0
    woken: int = 0
    purged: int = 0
    swept: int = 0
    more: bool = False
    next_due: int | None = None


Result = (
    Appended | Claimed | Renewed | Settled | Progressed | Canceled | Revived | Purged | GroupSet | QueueSet | Noted | Upkept
)
