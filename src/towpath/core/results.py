"""The results of commands, and the states of groups. A refused command returns an error (`errors.Refused`)
instead of a result."""

from __future__ import annotations

import msgspec

from towpath.core.job import ClaimedJob, Reason, State, Word


class GroupState(Word):
    OPEN = "open"
    SEALED = "sealed"
    ABORTING = "aborting"
    CLOSED = "closed"


class OnFailure(Word):
    CONTINUE = "continue"
    ABORT = "abort"
    STOP = "stop"


class _Result(msgspec.Struct, frozen=True, gc=False):
    pass


class Placed(_Result, frozen=True, gc=False):
    """The job of a spec: its own id, or the id of the job that already held its key."""

    id: str
    seq: int


class Appended(_Result, frozen=True, gc=False, tag="appended"):
    jobs: tuple[Placed, ...]


class Claimed(_Result, frozen=True, gc=False, tag="claimed"):
    claims: tuple[ClaimedJob, ...]


class Renewed(_Result, frozen=True, gc=False, tag="renewed"):
    until: int
    lost: tuple[str, ...] = ()
    cancel: tuple[tuple[str, Reason], ...] = ()


class Settled(_Result, frozen=True, gc=False, tag="settled"):
    id: str
    state: State


class Progressed(_Result, frozen=True, gc=False, tag="progressed"):
    cancel: Reason | None = None


class Canceled(_Result, frozen=True, gc=False, tag="canceled"):
    canceled: int
    requested: int
    more: bool = False


class Revived(_Result, frozen=True, gc=False, tag="revived"):
    """`revived` includes the dependents that were revived too; `refused` has the id and obstacle of each job
    that was not revived."""

    revived: int
    refused: tuple[tuple[str, str], ...] = ()
    more: bool = False


class Resolution(Word):
    """How a person decided about a job that is done without an attempt of its own."""

    MARKED = "marked"
    SKIPPED = "skipped"


class Resolved(_Result, frozen=True, gc=False, tag="resolved"):
    id: str
    state: State


class Purged(_Result, frozen=True, gc=False, tag="purged"):
    purged: int
    more: bool = False


class Hastened(_Result, frozen=True, gc=False, tag="hastened"):
    hastened: int
    more: bool = False


class GroupSet(_Result, frozen=True, gc=False, tag="group-set"):
    group: str


class QueueSet(_Result, frozen=True, gc=False, tag="queue-set"):
    queue: str
    part: str | None = None


class Noted(_Result, frozen=True, gc=False, tag="noted"):
    key: str
    version: int
    fence: int


class ChunkPut(_Result, frozen=True, gc=False, tag="chunk-put"):
    blob: str
    number: int


class Upkept(_Result, frozen=True, gc=False, tag="upkept"):
    reaped: int = 0
    expired: int = 0
    woken: int = 0
    purged: int = 0
    swept: int = 0
    more: bool = False
    next_due: int | None = None
    failed: tuple[str, ...] = ()
    """The reaped jobs that have become dead letters (`max_losses`), by id."""


Result = (
    Appended
    | Claimed
    | Renewed
    | Settled
    | Progressed
    | Canceled
    | Revived
    | Resolved
    | Purged
    | Hastened
    | GroupSet
    | QueueSet
    | Noted
    | ChunkPut
    | Upkept
)


def changed_anything(result: Result) -> bool:
    """Did the command change the ledger? Only then is the answer kept under the command's token."""
    match result:
        case Claimed():
            return bool(result.claims)
        case Canceled():
            return result.canceled + result.requested > 0
        case Revived():
            return result.revived > 0
        case Purged():
            return result.purged > 0
    return True
