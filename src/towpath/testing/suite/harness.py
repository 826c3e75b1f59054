"""A ledger, a time and short methods for all commands, so that a test is as short as the rule it checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from towpath.core.checks import SECOND
from towpath.core.commands import (
    Abort,
    Append,
    Cancel,
    Canceled,
    Claim,
    Claimed,
    Command,
    GroupSet,
    Note,
    Noted,
    Open,
    Placed,
    Purge,
    Purged,
    QueueSet,
    Renew,
    Revive,
    Revived,
    Seal,
    Selector,
    SetPart,
    SetQueue,
    Settle,
    Settled,
    Unseal,
    Upkeep,
    Upkept,
    Want,
)
from towpath.core.commands import Appended as _Appended
from towpath.core.job import After, Done, FailOutcome, Job, Key, KeyPolicy, Outcome, Spec
from towpath.core.job import ClaimedJob as Held
from towpath.core.views import Counts, GroupView, PartView, Query, QueueView
from towpath.errors import Refused
from towpath.ledger import Answer, Ledger
from towpath.testing.clock import START, ManualClock

LEASE = 60 * SECOND
"""The default lease of claims."""

T = TypeVar("T")
E = TypeVar("E", bound=Refused)


def spec(id: str, queue: str = "q", **fields: Any) -> Spec:
    """A spec; `after` may be ids (success needed) or `After` values."""
    after = [need(each) if isinstance(each, str) else each for each in fields.pop("after", ())]
    return Spec(id=id, queue=queue, after=tuple(after), **fields)


def need(id: str) -> After:
    return After(id)


def anyway(id: str) -> After:
    return After(id, run_anyway=True)


def whole_group(id: str, run_anyway: bool = False) -> After:
    return After(id, run_anyway=run_anyway, group=True)


def unique(name: str, window: int = 0) -> Key:
    return Key(name, KeyPolicy.UNIQUE, window)


def replace(name: str) -> Key:
    return Key(name, KeyPolicy.REPLACE)


def serial(name: str) -> Key:
    return Key(name, KeyPolicy.SERIAL)


def ids(claims: Sequence[Held]) -> list[str]:
    return [claim.id for claim in claims]


@contextmanager
def checked(ledger: Ledger) -> Iterator[Ledger]:
    """For a ledger's fixture: yield the ledger, assert afterwards that `check()` returns nothing, and close
    it."""
    try:
        yield ledger
        assert ledger.check() == []
    finally:
        ledger.close()


class HarnessBase:
    """A ledger and a time, with methods that apply commands and methods that read. `now` is passed with every
    batch; only `jump` and `advance` move it."""

    def __init__(self, ledger: Ledger, now: int = START) -> None:
        self.ledger = ledger
        self.now = now

    # Time

    def jump(self, micros: int) -> None:
        """Move the time without applying anything on the way."""
        self.now += micros

    def advance(self, micros: int, step: int = LEASE // 4) -> None:
        """Move the time as in a ledger in use: in steps too small to count as a clock jump, each applied with
        an empty heartbeat, which writes nothing."""
        until = self.now + micros
        while self.now < until:
            self.now = min(until, self.now + step)
            self.ask(Renew((), 1))

    # Commands

    def ask(self, *commands: Command) -> list[Answer]:
        return self.ledger.apply(commands, self.now)

    def do(self, kind: type[T], command: Command) -> T:
        """Apply a command; return its answer, which must be of this type."""
        (answer,) = self.ask(command)
        assert isinstance(answer, kind), answer
        return answer

    def refusal(self, kind: type[E], command: Command) -> E:
        """Apply a command; return its refusal, which must be of this type and must have changed nothing."""
        with self.unchanged():
            (answer,) = self.ask(command)
        assert type(answer) is kind, answer
        return answer

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.ledger.dump()
        yield
        assert self.ledger.dump() == before

    def upkeep(self, limit: int = 1000, dead: Sequence[str] = ()) -> Upkept:
        return self.do(Upkept, Upkeep(limit, tuple(dead)))

    def lose(self, lease: int = LEASE) -> Upkept:
        """Let every lease of this length end, and reap the held jobs."""
        self.advance(lease + 1, step=lease // 4)
        return self.upkeep()

    # Reads

    def job(self, id: str) -> Job:
        job = self.ledger.get(id)
        assert job is not None, f"there is no job {id}"
        return job

    def at(self, *ids: str) -> str:
        """The state of each, and the reason where there is one: "ready failed/dependency"."""
        jobs = [self.job(id) for id in ids]
        return " ".join(f"{job.state}/{job.reason}" if job.reason else job.state for job in jobs)

    def counts(self, queue: str = "q") -> Counts:
        return self.queue(queue).counts

    def queue(self, queue: str = "q") -> QueueView:
        return self.ledger.queues()[queue]

    def part(self, part: str, queue: str = "q") -> PartView:
        return self.ledger.parts(queue)[part]

    def group(self, id: str) -> GroupView:
        group = self.ledger.group(id)
        assert group is not None, f"there is no group {id}"
        return group

    def found(self, **query: Any) -> list[str]:
        """The ids of the first page, oldest first unless the query has another order."""
        return [job.id for job in self.ledger.find(Query(**{"oldest_first": True, **query})).jobs]


class Harness(HarnessBase):
    """A harness with a method for every command. Each asserts that the command is not refused; `refusal`
    asserts that it is."""

    def append(self, *specs: Spec) -> tuple[Placed, ...]:
        return self.do(_Appended, Append(specs)).jobs

    def add(self, id: str, queue: str = "q", **fields: Any) -> Job:
        """Append one job and read it."""
        (placed,) = self.append(spec(id, queue, **fields))
        assert placed.id == id
        return self.job(id)

    def claim(
        self,
        *wants: Want | str,
        n: int = 1,
        once: int | None = None,
        owner: str = "worker",
        lease: int = LEASE,
        token: str = "",
    ) -> list[Held]:
        """At most `n` of each queue named by text (of "q" if none is)."""
        chosen = tuple(Want(want, n, once) if isinstance(want, str) else want for want in wants or ("q",))
        return list(self.do(Claimed, Claim(owner=owner, wants=chosen, lease=lease, token=token)).claims)

    def take(self, queue: str = "q", owner: str = "worker", lease: int = LEASE) -> Held:
        """Claim one job; there must be one."""
        (claim,) = self.claim(queue, owner=owner, lease=lease)
        return claim

    def started(self, id: str, queue: str = "q", **fields: Any) -> Held:
        """Append a job and claim it."""
        self.add(id, queue, **fields)
        claim = self.take(queue)
        assert claim.id == id
        return claim

    def settle(
        self, claim: Held, outcome: Outcome, spawn: Sequence[Spec] = (), notes: Sequence[Note] = ()
    ) -> Settled:
        return self.do(Settled, Settle(claim.id, claim.fence, outcome, tuple(spawn), tuple(notes)))

    def done(self, claim: Held, spawn: Sequence[Spec] = (), notes: Sequence[Note] = ()) -> Settled:
        return self.settle(claim, Done(), spawn, notes)

    def fail(self, claim: Held) -> Settled:
        return self.settle(claim, FailOutcome("broken"))

    def cancel(self, *ids: str, limit: int = 10_000, token: str = "", **where: Any) -> Canceled:
        return self.do(Canceled, Cancel(where=Selector(ids=ids, **where), limit=limit, token=token))

    def revive(self, *ids: str, limit: int = 10_000, token: str = "", **where: Any) -> Revived:
        return self.do(Revived, Revive(where=Selector(ids=ids, **where), limit=limit, token=token))

    def purge(self, *ids: str, limit: int = 10_000, token: str = "", **where: Any) -> Purged:
        return self.do(Purged, Purge(where=Selector(ids=ids, **where), limit=limit, token=token))

    def open(self, group: str, **fields: Any) -> None:
        self.do(GroupSet, Open(group, **fields))

    def seal(self, group: str) -> None:
        self.do(GroupSet, Seal(group))

    def unseal(self, group: str, why: str | None = None) -> None:
        self.do(GroupSet, Unseal(group, why))

    def abort(self, group: str) -> None:
        self.do(GroupSet, Abort(group))

    def set_queue(self, queue: str = "q", **fields: Any) -> None:
        assert self.do(QueueSet, SetQueue(queue=queue, **fields)) == QueueSet(queue)

    def set_part(self, part: str, queue: str = "q", **fields: Any) -> None:
        assert self.do(QueueSet, SetPart(queue=queue, part=part, **fields)) == QueueSet(queue, part)

    def write(self, key: str, value: bytes | None = b"v", **fields: Any) -> Noted:
        return self.do(Noted, Note(key=key, value=value, **fields))


class Suite:
    """The base of every class of the suite. A subclass for a ledger adds the fixture `ledger`, which may
    use `clock`."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def harness(self, ledger: Ledger) -> Harness:
        return Harness(ledger)
