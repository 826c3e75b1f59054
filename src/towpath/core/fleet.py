"""The workers of a ledger by their reports in notes, and the explanation of a ready job that no worker runs.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from towpath.core.checks import matches, optional_utc
from towpath.core.explain import Explanation, GateName, at_least, place, when
from towpath.core.job import Job
from towpath.core.lanes import FLOWS
from towpath.core.records import NoteRecords


class LaneView(msgspec.Struct, frozen=True, kw_only=True):
    """A lane of one worker (`paused`: the worker has applied the pause), or of all workers (`paused`: the
    pause is requested)."""

    name: str
    queues: tuple[str, ...]
    reserved: int
    running: int
    workers: int = 1
    paused: bool = False
    why: str | None = None


class LimitView(msgspec.Struct, frozen=True, kw_only=True):
    """The limit of a worker for a resource (or a lane): at most `limit` jobs at once, and none before
    `until` (microseconds), if the service asked for a delay."""

    name: str
    queues: tuple[str, ...]
    limit: int
    running: int
    until: int | None = None


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """The last report of a worker, at most 10 s old. Times are microseconds."""

    name: str
    owner: str
    host: str
    pid: int
    queues: tuple[str, ...]
    concurrency: int
    running: int
    started_at: int
    seen_at: int
    paused: bool = False
    draining: bool = False
    why: str | None = None
    lanes: tuple[LaneView, ...] = ()
    limits: tuple[LimitView, ...] = ()

    def lane_of(self, queue: str) -> str | None:
        return next((lane.name for lane in self.lanes if _takes(lane.queues, queue)), None)

    def slots_for(self, queue: str) -> int:
        """The slots in which a job of this queue may run: all slots except the reserved slots of other
        lanes."""
        lane = self.lane_of(queue)
        return self.concurrency - sum(
            each.reserved for each in self.lanes if lane is not None and each.name != lane
        )

    def busy_for(self, queue: str, held: Sequence[str]) -> bool:
        """Is none of these slots free? `held` are the queues of the jobs that it has on lease. The report
        counts as well: a handler with a lost lease still has its slot."""
        if max(self.running, len(held)) >= self.concurrency:
            return True
        lane = self.lane_of(queue)
        if lane is None:
            return False
        by_lane = Counter(map(self.lane_of, held))
        running = {each.name: max(each.running, by_lane[each.name]) for each in self.lanes}
        # Jobs of other lanes take slots that this queue could use only if they are beyond the reserved
        # slots.
        shared = sum(max(0, running[each.name] - each.reserved) for each in self.lanes if each.name != lane)
        return running[lane] + shared >= self.slots_for(queue)


REPORTS: Final = NoteRecords("worker/", WorkerView)
"""The reports of the workers by owner."""


class Fleet(msgspec.Struct):
    """The instructions to the workers. `paused` and `lanes`: the pauses with their reasons. `drain`: the time
    of the request to a worker to end."""

    paused: dict[str, str | None] = {}
    drain: dict[str, int] = {}
    lanes: dict[str, str | None] = {}

    def pause_of(self, name: str) -> str | None:
        """The entry that pauses a worker of this name."""
        return next((each for each in sorted(self.paused) if fnmatchcase(name, each)), None)


def lanes_together(workers: Sequence[WorkerView], paused: dict[str, str | None]) -> list[LaneView]:
    """The lanes of all workers by name, including paused lanes that no worker has."""
    found: list[LaneView] = []
    names = dict.fromkeys(lane.name for worker in workers for lane in worker.lanes)
    for name in sorted(names | dict.fromkeys(paused)):
        lanes = [lane for worker in workers for lane in worker.lanes if lane.name == name]
        found.append(
            LaneView(
                name=name,
                queues=tuple(dict.fromkeys(queue for lane in lanes for queue in lane.queues)),
                reserved=sum(lane.reserved for lane in lanes),
                running=sum(lane.running for lane in lanes),
                workers=len(lanes),
                paused=name in paused,
                why=paused.get(name),
            )
        )
    return found


def spell_lanes(lanes: Mapping[str, Mapping[str, int]], names: Mapping[str, str]) -> str:
    """The running kinds of each lane as text. `names` maps kinds to displayed names."""
    words = {
        lane: ", ".join(f"{count} {names.get(kind, kind)}" for kind, count in sorted(kinds.items()))
        for lane, kinds in lanes.items()
    }
    return "; ".join(f"{lane}: {text or 'nothing'}" for lane, text in words.items())


def among_workers(
    found: Explanation,
    queue: str,
    workers: Sequence[WorkerView],
    paused: dict[str, str | None],
    now: int,
    running: Sequence[Job] = (),
) -> Explanation:
    """The explanation of a job that the next claim would return, given the workers. `paused` are lanes,
    `running` are jobs on lease."""
    takers = [worker for worker in workers if _takes(worker.queues, queue) and not worker.draining]
    if not takers:
        return _but(found, queue, GateName.NO_WORKER, f"no running worker consumes queue {queue}")
    awake = [worker for worker in takers if not worker.paused]
    if not awake:
        return _but(
            found,
            queue,
            GateName.WORKERS_PAUSED,
            f"every worker that consumes queue {queue} is paused{_why(takers[0].why)}",
        )
    lanes = [worker.lane_of(queue) for worker in awake]
    if all(lane in paused for lane in lanes):
        name = str(lanes[0])
        return _but(found, queue, GateName.LANE_PAUSED, f"lane {name} is paused by hand{_why(paused[name])}")
    able = [worker for worker, lane in zip(awake, lanes, strict=True) if lane not in paused]
    return _limited(found, queue, able, now) or _busy(found, queue, able, now, running) or found


def _busy(
    found: Explanation, queue: str, workers: Sequence[WorkerView], now: int, running: Sequence[Job]
) -> Explanation | None:
    """The explanation if no worker has a free slot. A worker held by a limit has none."""
    free = [worker for worker in workers if _in_the_way(worker, queue, now) is None]
    for worker in free:
        held = [job.queue for job in running if job.owner == worker.owner and job.kind]
        if not worker.busy_for(queue, held):
            return None
    slots = sum(worker.slots_for(queue) for worker in free)
    which = f"all {slots} slots" if slots > 1 else "the slot"
    of = f"{len(free)} worker{'s' * (len(free) > 1)} on queue {queue} {'are' if slots > 1 else 'is'} busy"
    ahead = (
        "no job is"
        if not found.count
        else "1 job is"
        if found.count == 1
        else f"{at_least(found.count)} jobs are"
    )
    return Explanation(
        found.id,
        GateName.BUSY,
        f"job {found.id}: ready; {which} of {of}; {ahead} ahead",
        (),
        found.count,
        None,
    )


def _limited(found: Explanation, queue: str, workers: Sequence[WorkerView], now: int) -> Explanation | None:
    """The explanation if a limit holds every worker."""
    limits = [_in_the_way(worker, queue, now) for worker in workers]
    if any(limit is None for limit in limits):
        return None
    first = min((limit for limit in limits if limit is not None), key=lambda limit: limit.until or 0)
    if first.until is not None and first.until > now:
        text = f"{first.name} is held until {when(first.until)}: the service is throttling"
        return _but(found, queue, GateName.LIMIT, text, first.until)
    return _but(
        found, queue, GateName.LIMIT, f"{first.name} is at its limit: {first.running} of {first.limit} run"
    )


def _in_the_way(worker: WorkerView, queue: str, now: int) -> LimitView | None:
    """The limit that prevents jobs of this queue from starting."""
    mine = [limit for limit in worker.limits if _takes(limit.queues, queue)]
    held = [limit for limit in mine if limit.until is not None and limit.until > now]
    full = [limit for limit in mine if limit.running >= limit.limit]
    return next(iter(held + full), None)


def _takes(patterns: Sequence[str], queue: str) -> bool:
    return queue == FLOWS or any(matches(pattern, queue) for pattern in patterns)


def _but(found: Explanation, queue: str, gate: GateName, why: str, until: int | None = None) -> Explanation:
    text = f"job {found.id}: {place(found.count, queue)}, but {why}"
    return Explanation(found.id, gate, text, (), found.count, optional_utc(until))


def _why(why: str | None) -> str:
    return f": {why}" if why else ""
