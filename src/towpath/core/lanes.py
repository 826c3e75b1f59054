"""Lanes: sets of queues that share the slots of one worker. Pure arithmetic: how many jobs each lane may
claim and start."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from towpath.core import checks
from towpath.core.commands import Claim, Want
from towpath.core.job import SUSPECT, Job
from towpath.core.limits import Bounds
from towpath.errors import InvalidInput

MAX_LANES = 100
AGEING_STEPS = 10
"""Checks for jobs to age within the time of `ageing`; a job ages at most a tenth of that time late."""


FLOWS = "towpath/flows"
"""The queue of the built-in jobs of flows. Every worker claims it beside its own queues."""
NODES = "node/"
"""The prefix of the queues of nodes, on which the steps of plans run."""


class Lane(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Queues (or patterns) with `reserved` slots of a worker: None is an eighth of all, at least 2.

    Reserved slots stay free for the lane, so that its jobs never wait for the end of a job of another lane.
    With `lends=True` other lanes may use the slots that the lane does not need; it gets them back as these
    jobs end.

    With `ageing` (seconds) a job that has waited this long gets the priority `high`. Jobs that were appended
    later then run before it only if their priority is higher than that.

    With `adaptive` (the least and the greatest limit) a worker learns how many jobs of the lane may run at
    once, as it does for a resource."""

    queues: tuple[str, ...]
    reserved: int | None = None
    lends: bool = False
    ageing: float | None = None
    adaptive: tuple[int, int] | None = None


class LaneCall(msgspec.Struct, frozen=True, gc=False):
    """A claim of at most `n` jobs for a lane. All calls up to this one claim at most `upto` jobs together."""

    lane: int
    n: int
    upto: int


class Shares:
    """Shares the slots of a worker among its lanes. `reserved` are the slots that each lane gets before any
    lane gets more. `total` may change: running jobs that belong to no lane use slots too."""

    def __init__(self, total: int, lanes: Mapping[str, Lane]) -> None:
        self.total = total
        self.paused: frozenset[int] = frozenset()
        self.names = tuple(lanes)
        self.reserved = _reserved(total, lanes)
        self._keeps = tuple(index for index, lane in enumerate(lanes.values()) if not lane.lends)
        self.lending = not self._keeps

    def pause(self, names: Collection[str]) -> None:
        """Pause these lanes and resume all others. A paused lane starts no job and reserves no slot."""
        self.paused = frozenset([lane for lane, name in enumerate(self.names) if name in names])

    def calls(
        self, running: Sequence[int], at_hand: Sequence[int], ahead: Sequence[int], unsettled: int = 0
    ) -> list[LaneCall]:
        """The claims to make now. `running` and `at_hand` are, for each lane, the running jobs and the
        claimed jobs that have not started.

        Reserved slots are claimed first; the first lane with ready jobs gets the remaining ones. A lane may
        have `ahead` more jobs at hand than there are free slots. Jobs that other lanes have ahead do not keep
        it from a free slot that is reserved for it. Jobs that ended and are not settled (`unsettled`) count
        as claimed ahead, and beyond that as used slots."""
        total = self.total
        if unsettled:
            most = sum(ahead)
            ahead = [count * max(0, most - unsettled) // most for count in ahead] if most else ahead
            total -= max(0, unsettled - most)
        held = [first + second for first, second in zip(running, at_hand, strict=True)]
        short = self._short(held)
        kept = sum([short[lane] for lane in self._keeps])
        free = total - sum(running)
        shared = total + sum(ahead) - sum(held) - kept
        own = max(0, shared, free - kept)
        calls = [
            LaneCall(lane, min(n, own), own)
            for lane, n in enumerate(short)
            if n and own and lane not in self._keeps
        ]
        empty = self._short(running)
        for lane, more in enumerate(ahead):
            mine = free - sum([empty[other] for other in self._keeps if other != lane])
            if lane not in self.paused and (n := min(shared, max(0, mine) + more - at_hand[lane])) > 0:
                if calls and calls[-1].lane == lane and calls[-1].n <= n:
                    calls.pop()
                calls.append(LaneCall(lane, n, shared))
        if free <= 0:
            # Jobs that started before the lane was declared or resumed may use its slots.
            return calls
        return calls + [
            LaneCall(lane, min(free, short[lane]), own + min(free, kept))
            for lane in self._keeps
            if short[lane]
        ]

    def next(self, running: Sequence[int], waiting: Sequence[object]) -> int | None:
        """The lane of the job that starts next; None if no job may start. `running` has the running jobs of
        each lane, `waiting` is true for a lane that has jobs at hand."""
        free = self.total - sum(running)
        if free <= 0:
            return None
        kept = sum([self._short_of(lane, running) for lane in self._keeps]) if self._keeps else 0
        first: int | None = None
        for lane, waits in enumerate(waiting):
            if not waits or lane in self.paused:
                continue
            short = self._short_of(lane, running)
            if free > kept - (short if lane in self._keeps else 0):
                if short:
                    return lane
                if first is None:
                    first = lane
        return first

    def open_to(self, running: Sequence[int]) -> list[bool]:
        """For each lane: could a job of it start now?"""
        short, free = self._short(running), self.total - sum(running)
        kept = sum([short[lane] for lane in self._keeps])
        return [free > kept - (short[lane] if lane in self._keeps else 0) for lane in range(len(running))]

    def _short(self, held: Sequence[int]) -> list[int]:
        return [self._short_of(lane, held) for lane in range(len(held))]

    def _short_of(self, lane: int, held: Sequence[int]) -> int:
        return 0 if lane in self.paused else max(0, self.reserved[lane] - held[lane])


def ageing_order(job: Job) -> tuple[object, ...]:
    """The order in which `Hasten` raises the priority of jobs."""
    return job.queue, job.losses >= SUSPECT, job.part is not None, job.part or "", job.priority, job.seq


def named_queues(claim: Claim) -> list[str]:
    """The queues that the claim names. Queue patterns are left out."""
    return [name for want in claim.wants for name in want.queue.split(",") if "*" not in name]


def narrowed(claim: Claim, want: Want, taken: Sequence[Job]) -> Want | None:
    """The want within the limits that its claim sets over all wants, after the jobs `taken` for earlier
    wants; None if nothing may be taken."""
    if want.upto is None and claim.once is None and claim.suspects is None:
        return want
    n = want.n if want.upto is None else min(want.n, want.upto - len(taken))
    if n <= 0:
        return None
    once = _least(want.once, claim.once, sum([job.max_attempts == 1 for job in taken]))
    suspects = _least(want.suspects, claim.suspects, sum([job.losses >= SUSPECT for job in taken]))
    return Want(want.queue, n, once, None, suspects, want.owner, want.lease, want.without)


def _least(own: int | None, all_wants: int | None, used: int) -> int | None:
    """The lower of a want's own limit and the rest of the limit over all wants; None is no limit."""
    if all_wants is None:
        return own
    left = max(0, all_wants - used)
    return left if own is None else min(own, left)


def check(lanes: Mapping[str, Lane], total: int | None = None) -> None:
    """Raise InvalidInput for an invalid lane; with `total` also if the reserved slots exceed it."""
    if not isinstance(lanes, Mapping):
        raise InvalidInput(field="lanes", value=lanes, expected="a mapping of names to lanes")
    checks.whole("len(lanes)", len(lanes), 1, MAX_LANES)
    homes: dict[str, str] = {}
    for name, lane in lanes.items():
        checks.name("lanes", name)
        if not isinstance(lane, Lane):
            raise InvalidInput(field=f"lanes.{name}", value=lane, expected="a Lane")
        _check_lane(name, lane)
        for queue in lane.queues:
            for other, home in homes.items():
                if checks.matches(other, queue) or checks.matches(queue, other):
                    expected = f"in one lane only: {other} is in lane {home}"
                    raise InvalidInput(field=f"lanes.{name}.queues", value=queue, expected=expected)
        homes |= dict.fromkeys(lane.queues, name)
    checks.whole("len(queues)", len(homes), 1, checks.MAX_PATTERNS)
    if total is not None:
        _reserved(total, lanes)


def _check_lane(name: str, lane: Lane) -> None:
    field = f"lanes.{name}"
    if isinstance(lane.queues, str) or not isinstance(lane.queues, tuple | list) or not lane.queues:
        raise InvalidInput(
            field=f"{field}.queues", value=lane.queues, expected="a tuple of queue names or patterns"
        )
    for queue in lane.queues:
        checks.pattern(f"{field}.queues", queue)
    checks.optional_whole(f"{field}.reserved", lane.reserved, 0, 10_000)
    if lane.ageing is not None:
        checks.whole(f"{field}.ageing", checks.micros(lane.ageing, f"{field}.ageing"), checks.SECOND)
    if lane.adaptive is not None:
        bounds_of(name, lane.adaptive)
    if type(lane.lends) is not bool:
        raise InvalidInput(field=f"{field}.lends", value=lane.lends, expected="true or false")


def bounds_of(name: str, adaptive: tuple[int, int]) -> Bounds:
    """The bounds of the adaptive limit of a lane."""
    try:
        least, most = adaptive
        return Bounds(least, most)
    except (TypeError, ValueError, InvalidInput) as error:
        expected = "the least and the most that may run at once, such as (1, 16)"
        raise InvalidInput(field=f"lanes.{name}.adaptive", value=adaptive, expected=expected) from error


def _reserved(total: int, lanes: Mapping[str, Lane]) -> tuple[int, ...]:
    reserved = sum(lane.reserved or 0 for lane in lanes.values())
    for name, lane in lanes.items():
        if lane.reserved and reserved > total:
            expected = f"at most the concurrency ({total}) for all lanes together; they reserve {reserved}"
            raise InvalidInput(field=f"lanes.{name}.reserved", value=lane.reserved, expected=expected)
    unset = [name for name, lane in lanes.items() if lane.reserved is None]
    if unset and total - reserved < len(unset):
        expected = (
            f"at least {reserved + len(unset)}: {reserved} are reserved, and lane {unset[-1]} needs one"
        )
        raise InvalidInput(field="concurrency", value=total, expected=expected)
    usual = min(max(2, total // 8), (total - reserved) // len(unset)) if unset else 0
    return tuple(usual if lane.reserved is None else lane.reserved for lane in lanes.values())


def lanes_of(texts: Sequence[str]) -> dict[str, Lane]:
    """Lanes from texts such as `interactive:4=mail,web`: a name, optionally its reserved slots, its
    queues."""
    found: dict[str, Lane] = {}
    for text in texts:
        head, _, queues = text.partition("=")
        name, colon, reserved = head.strip().partition(":")
        names = tuple(each.strip() for each in queues.split(",") if each.strip())
        if not name or not names or (colon and not reserved.strip().isdecimal()):
            raise InvalidInput(
                field="lane",
                value=text,
                expected="name=queue,queue, or name:4=queue,queue to reserve 4 slots",
            )
        if name in found:
            raise InvalidInput(field="lane", value=name, expected="named once")
        found[name] = Lane(queues=names, reserved=int(reserved) if colon else None)
    return found


class LaneQueues(msgspec.Struct, frozen=True):
    """The queues of one lane that are claimed together, separated by commas, and the names of the limits that
    apply to them."""

    lane: int
    queues: str
    limits: tuple[str, ...] = ()


def limit_of(lane: str) -> str:
    """The name of a lane's own limit. It has a space, so no resource has the same name."""
    return f"lane {lane}"


def shown(limit: str) -> str:
    """The displayed name of a limit."""
    return limit if limit.startswith(limit_of("")) else f"resource {limit}"


def lane_queues(lanes: Mapping[str, Lane], sources: Mapping[str, str], beside: str = "") -> list[LaneQueues]:
    """The queue sets of the lanes. `sources` maps a queue to the resource that all its jobs use. `beside`: a
    further queue, of the first lane."""
    found: list[LaneQueues] = []
    for number, (name, lane) in enumerate(lanes.items()):
        own = () if lane.adaptive is None else (limit_of(name),)
        by_resource: dict[str | None, list[str]] = {}
        for queue in lane.queues:
            by_resource.setdefault(sources.get(queue), []).append(queue)
        if beside and not number:
            by_resource.setdefault(None, []).append(beside)
        for resource, queues in by_resource.items():
            found.append(LaneQueues(number, ",".join(queues), own if resource is None else (resource, *own)))
    return found
