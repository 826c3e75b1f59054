"""The request for a job (`Spec`), the durable record (`Job`), a job on lease (`ClaimedJob`), and the outcomes
of an attempt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
from msgspec.structs import force_setattr, replace

from towpath.core import blobs, checks, ids
from towpath.errors import Described, InvalidInput

PRIORITIES: Mapping[str, int] = {"high": 0, "normal": 5, "low": 10}
LOWEST, HIGHEST = 32_767, -32_768
MAX_LOSSES = 5
SUSPECT = 2
"""A job with so many lost leases, or more, is a suspect: it may be the job that ends its workers."""
_JSON = "application/json"
SERIAL = "serial:"
"""Parts with this prefix belong to serial keys and have a cap of one."""


class Word(StrEnum):
    """A text value that the ledger stores. It is hashed as text, because the hash of Enum is a slow Python
    function."""

    __hash__ = str.__hash__


W = TypeVar("W", bound=Word)


def words_of(
    field: str, values: Iterable[W | str], kind: type[W], allowed: Collection[W] = ()
) -> tuple[W, ...]:
    """The values, which may be plain text, as words of this kind; only the `allowed` words, if any are
    given."""
    known = [each for each in kind if not allowed or each in allowed]
    found = checks.all_of(field, values, str)
    for each in found:
        if each not in known:
            raise InvalidInput(field=field[:-1], value=each, expected=f"one of {', '.join(known)}")
    return tuple(kind(each) for each in found)


class State(Word):
    """The state of a job. `docs/states.md` draws the transitions."""

    BLOCKED = "blocked"
    SCHEDULED = "scheduled"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELED = "canceled"


# Module constants for hot paths: reading a member of the Enum costs more than the comparison.
BLOCKED, SCHEDULED, READY, RUNNING, DONE, FAILED, CANCELED = State
WAITING = frozenset({State.BLOCKED, State.SCHEDULED, State.READY})
FINISHED = frozenset({State.DONE, State.FAILED, State.CANCELED})


class Reason(Word):
    """The reason for a job's state. `NONE` if the state needs none."""

    NONE = ""
    DELAY = "delay"
    RETRY = "retry"
    SNOOZED = "snoozed"
    REFUSED = "refused"
    RELEASED = "released"
    REVIVED = "revived"
    LOST = "lost"
    EXHAUSTED = "exhausted"
    FATAL = "fatal"
    EXPIRED = "expired"
    DEPENDENCY = "dependency"
    REQUESTED = "requested"
    HANDLER = "handler"
    SUPERSEDED = "superseded"
    ABORTED = "aborted"
    STOPPED = "stopped"
    MARKED = "marked"
    SKIPPED = "skipped"


class KeyPolicy(Word):
    """The effect of a second job with the same key: it is not added, replaces the first job, or waits until
    the first job has run."""

    UNIQUE = "unique"
    REPLACE = "replace"
    SERIAL = "serial"


class Handle(Protocol):
    """A handle on a job or a group."""

    @property
    def id(self) -> str: ...

    @property
    def is_group(self) -> bool: ...


class After(msgspec.Struct, frozen=True, gc=False):
    """A dependency on a job, or on a whole group, by its id or its handle. With `run_anyway` any end meets
    it, otherwise only success."""

    id: str
    run_anyway: bool = False
    group: bool = False

    if TYPE_CHECKING:

        def __init__(
            self: After, id: str | Handle, run_anyway: bool = False, group: bool = False
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) and hasattr(self.id, "is_group"):
            force_setattr(self, "group", self.id.is_group)
            force_setattr(self, "id", self.id.id)
        checks.text("after.id", self.id, least=1)


class Key(msgspec.Struct, frozen=True, gc=False):
    """A name that at most one job may hold; `policy` decides what happens to the second. `window` is for
    `unique`."""

    name: str
    policy: KeyPolicy = KeyPolicy.UNIQUE
    window: int = 0

    def __post_init__(self) -> None:
        checks.text("key.name", self.name, checks.MAX_KEY, least=1)
        if not isinstance(self.policy, str) or self.policy not in KeyPolicy._value2member_map_:
            raise InvalidInput(field="key.policy", value=self.policy, expected="unique, replace or serial")
        force_setattr(self, "policy", KeyPolicy(self.policy))
        checks.whole("key.window", self.window)
        if self.policy is KeyPolicy.SERIAL and len(self.name) > checks.MAX_NAME - len(SERIAL):
            raise InvalidInput(
                field="key.name", value=self.name, expected="at most 248 characters long for a serial key"
            )


class Spec(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True, forbid_unknown_fields=True
):
    """The request for a job. Durations (`delay`, `ttl`, `timeout`, `retention`) are microseconds counted from
    the ledger's time. `blob`: the payload is this blob, of `blob_size` bytes; `payload` is then empty."""

    id: str
    queue: str
    kind: str = ""
    payload: bytes = b""
    content_type: str = _JSON
    headers: Mapping[str, str] = {}
    priority: int | str = PRIORITIES["normal"]
    part: str | None = None
    delay: int = 0
    ready_at: int | None = None
    ttl: int | None = None
    max_attempts: int = 20
    max_losses: int = MAX_LOSSES
    timeout: int | None = None
    retention: int | None = None
    after: tuple[After, ...] = ()
    group: str | None = None
    parent: str | None = None
    generation: int = 0
    key: Key | None = None
    correlation_id: str | None = None
    blob: str | None = None
    blob_size: int = 0

    def __post_init__(self) -> None:
        checks.text("id", self.id, least=1)
        checks.name("queue", self.queue)
        checks.text("kind", self.kind)
        checks.data("payload", self.payload, checks.MAX_PAYLOAD)
        if self.content_type is not _JSON:
            checks.text("content_type", self.content_type)
        if self.headers or self.headers is None:
            checks.headers(self.headers)
            _check_reserved(self.headers)
        if type(self.priority) is not int or not HIGHEST <= self.priority <= LOWEST:
            force_setattr(self, "priority", rank(self.priority))
        if self.delay or type(self.delay) is not int:
            checks.whole("delay", self.delay)
        if self.max_attempts != 20:
            checks.whole("max_attempts", self.max_attempts, 1, 1_000_000)
        if self.max_losses != MAX_LOSSES:
            checks.whole("max_losses", self.max_losses, 1, 1_000_000)
        if not (
            self.part is None
            and self.ready_at is None
            and self.ttl is None
            and self.timeout is None
            and self.retention is None
            and self.group is None
            and self.parent is None
            and self.key is None
            and self.correlation_id is None
            and self.generation == 0
            and self.after == ()
            and self.blob is None
            and self.blob_size == 0
        ):
            _check_optional(self)


def another(spec: Spec, id: str, payload: bytes) -> Spec:
    """A copy of the spec with another payload and an id that Towpath created. All else is already checked."""
    if len(payload) > checks.MAX_PAYLOAD:
        checks.data("payload", payload, checks.MAX_PAYLOAD)
    made: Spec = spec.__copy__()  # type: ignore[attr-defined]  # which it has; copy.copy() costs five times as much
    force_setattr(made, "id", id)
    force_setattr(made, "payload", payload)
    return made


def runs_of(specs: Iterable[Spec]) -> list[list[Spec]]:
    """Runs of consecutive specs that differ only in id and payload."""
    runs: list[list[Spec]] = []
    model: Spec | None = None
    for spec in specs:
        if model is not None:
            # A copy with the other id and payload, compared as a whole: the fastest comparison.
            force_setattr(model, "id", spec.id)
            force_setattr(model, "payload", spec.payload)
            if model == spec:
                runs[-1].append(spec)
                continue
        model = spec.__copy__()  # type: ignore[attr-defined]
        runs.append([spec])
    return runs


def _check_optional(spec: Spec) -> None:
    """The fields that most specs leave out."""
    if spec.part is not None:
        checks.text("part", spec.part, least=1)
        if spec.part.startswith(SERIAL):
            raise InvalidInput(
                field="part", value=spec.part, expected=f"a name that does not start with {SERIAL}"
            )
        if spec.key is not None and spec.key.policy is KeyPolicy.SERIAL:
            raise InvalidInput(
                field="part", value=spec.part, expected="left out beside a serial key, which is a part itself"
            )
    if spec.ready_at is not None:
        checks.whole("ready_at", spec.ready_at)
        if spec.delay:
            raise InvalidInput(field="ready_at", value=spec.ready_at, expected="left out beside a delay")
    checks.optional_whole("ttl", spec.ttl, least=1)
    checks.optional_whole("timeout", spec.timeout, least=1)
    checks.optional_whole("retention", spec.retention)
    checks.optional_text("group", spec.group)
    checks.optional_text("parent", spec.parent)
    checks.optional_text("correlation_id", spec.correlation_id)
    if spec.generation != 0:
        checks.whole("generation", spec.generation, most=2**31)
    if spec.key is not None and not isinstance(spec.key, Key):
        raise InvalidInput(field="key", value=spec.key, expected="a Key")
    if spec.after:
        _check_after(spec)
    if spec.blob is not None:
        checks.name("blob", spec.blob)
        checks.whole("blob_size", spec.blob_size, 1, blobs.MAX_BLOB)
        if spec.payload:
            size = Described(f"{len(spec.payload)} bytes")
            raise InvalidInput(field="payload", value=size, expected="empty beside a blob")
    elif spec.blob_size != 0:
        raise InvalidInput(field="blob_size", value=spec.blob_size, expected="0 without a blob")


def _check_reserved(headers: Mapping[str, str]) -> None:
    if blobs.HEADER in headers:
        expected = f"without {blobs.HEADER}, which names the blob of a job: use Spec.blob"
        raise InvalidInput(field="headers", value=headers, expected=expected)


def _check_after(spec: Spec) -> None:
    if not isinstance(spec.after, tuple) or not all(isinstance(each, After) for each in spec.after):
        raise InvalidInput(field="after", value=spec.after, expected="a tuple of After values")
    if len(spec.after) > 10_000:
        raise InvalidInput(
            field="after",
            value=Described(f"a list of {len(spec.after)}"),
            expected="at most 10000 long; depend on a group instead",
        )


def rank(priority: object, names: Mapping[str, int] = PRIORITIES) -> int:
    """A priority as a number, from a number or one of `names`."""
    if isinstance(priority, str) and priority in names:
        return names[priority]
    if type(priority) is int and HIGHEST <= priority <= LOWEST:
        return priority
    expected = f"a whole number from {HIGHEST} to {LOWEST} or one of {', '.join(names)}"
    raise InvalidInput(field="priority", value=priority, expected=expected)


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Exactly the durable record. The last five fields are bodies, which a ledger keeps apart from the small
    columns."""

    id: str
    seq: int
    queue: str
    part: str | None
    kind: str
    priority: int
    state: State
    reason: Reason
    ready_at: int
    expires_at: int | None
    attempts: int
    failures: int
    losses: int
    max_attempts: int
    max_losses: int
    fence: int
    owner: str | None
    lease_until: int | None
    lease_len: int | None
    settled_fence: int
    settled_as: State | None
    cancel_requested: Reason | None
    timeout: int | None
    retention: int | None
    purge_at: int | None
    waits: int
    group: str | None
    parent: str | None
    generation: int
    key: str | None
    key_policy: KeyPolicy | None
    progress_done: int | None
    progress_total: int | None
    correlation_id: str | None
    created_at: int
    started_at: int | None
    finished_at: int | None
    size: int
    content_type: str
    payload: bytes = b""
    headers: Mapping[str, str] = {}
    result: bytes | None = None
    error: str | None = None
    cursor: bytes | None = None

    @property
    def short_id(self) -> str:
        """The id in log lines and tables; the commands accept it."""
        return ids.short_id(self.seq, self.id)

    @property
    def attempts_used(self) -> int:
        """How many of `max_attempts` the job has used, the running attempt included; at most `max_attempts`.

        `attempts` counts claims, which may be more: a claim that ends with a snooze or a lost lease does not
        use the budget, and a revived job has a new one."""
        is_counted = self.state is RUNNING or (self.state is DONE and self.reason is Reason.NONE)
        is_counted = is_counted or (self.state is FAILED and self.reason is Reason.LOST)
        return min(self.failures + is_counted, self.max_attempts)


COLUMNS: tuple[str, ...] = Job.__struct_fields__[: Job.__struct_fields__.index("payload")]
BODIES: tuple[str, ...] = Job.__struct_fields__[len(COLUMNS) :]


def without_bodies(job: Job) -> Job:
    return replace(job, payload=b"", headers={}, result=None, error=None, cursor=None)


STATE_TTL = 90 * checks.DAY
"""How long the state of a job or message is kept after it was last saved, if no end deletes it."""


def state_key(id: str) -> str:
    """The note with the state of a job or message."""
    return f"state/{id}"


class ClaimedJob(msgspec.Struct, frozen=True, gc=False):
    """A job on lease. Every later write about it carries the fence."""

    job: Job

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def fence(self) -> int:
        return self.job.fence


class Done(msgspec.Struct, frozen=True, gc=False, tag="done"):
    """Finished with success and an optional result."""

    result: bytes | None = None

    def __post_init__(self) -> None:
        if self.result is not None:
            checks.data("result", self.result, checks.MAX_PAYLOAD)


class _Delayed(msgspec.Struct, frozen=True, gc=False):
    delay: int = 0

    def __post_init__(self) -> None:
        checks.whole("delay", self.delay)
        if (error := getattr(self, "error", None)) is not None:
            checks.text("error", error, checks.MAX_ERROR)


class RetryOutcome(_Delayed, frozen=True, gc=False, tag="retry"):
    """The attempt failed; try again after `delay`, unless that was the last one allowed."""

    error: str | None = None


class SnoozeOutcome(_Delayed, frozen=True, gc=False, tag="snooze"):
    """Not a failure: the job is ready again after `delay`."""


class Release(_Delayed, frozen=True, gc=False, tag="release"):
    """The attempt did not begin. The job waits as if it had not been claimed."""


class Refuse(_Delayed, frozen=True, gc=False, tag="refuse"):
    """This worker cannot run the job (unknown kind, closed gate). It waits at least a second, so that no
    worker claims it in a loop."""

    error: str | None = None


class FailOutcome(msgspec.Struct, frozen=True, gc=False, tag="fail"):
    """No further attempt: a dead letter."""

    error: str | None = None

    def __post_init__(self) -> None:
        if self.error is not None:
            checks.text("error", self.error, checks.MAX_ERROR)


class Stop(msgspec.Struct, frozen=True, gc=False, tag="stop"):
    """The handler stopped because it was asked to, or by its own decision."""

    error: str | None = None

    def __post_init__(self) -> None:
        if self.error is not None:
            checks.text("error", self.error, checks.MAX_ERROR)


Outcome = Done | RetryOutcome | SnoozeOutcome | Release | Refuse | FailOutcome | Stop
