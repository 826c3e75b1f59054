"""Progress: a live snapshot of this process, and the history in the ledger.

The snapshot is made of the runs of the workers and the progress that their handlers report by
`current().progress()`. The counts of waiting jobs are read from the ledger in a thread, at most once a second
while snapshots are taken. Without snapshots nothing is measured."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import msgspec

from towpath.core import checks
from towpath.core.fleet import spell_lanes
from towpath.core.job import State
from towpath.core.views import MAX_PAGE, Counts, GroupStatus, GroupView, Query
from towpath.errors import TowpathError, UnknownGroup
from towpath.events import JobSettled
from towpath.ledger import Ledger
from towpath.runtime.engine import Engine
from towpath.tasks.attempt import Attempt
from towpath.tasks.codec import group_status
from towpath.tasks.context import Running

WINDOW = 10.0
"""Seconds that rates are measured over."""
FRESH = 1.0
"""Seconds for which the counts read from the ledger are used."""


class RunningJob(msgspec.Struct, frozen=True):
    """A running job of this process. `done` and `total` are in the unit of its handler (bytes, for a
    transfer); `rate` is per second."""

    id: str
    kind: str
    queue: str
    group: str | None
    attempt: int
    seconds: float
    done: int | None
    total: int | None
    rate: float
    eta: float | None
    lane: str | None = None
    short_id: str = ""


class KindProgress(msgspec.Struct, frozen=True):
    """All running jobs of a kind together; `finished` since the first snapshot, `jobs_rate` per second."""

    kind: str
    running: int
    done: int
    total: int
    rate: float
    finished: int
    jobs_rate: float


class Snapshot(msgspec.Struct, frozen=True):
    """`waiting` by queue (for a group: its members that have neither ended nor run here), `age` seconds old.
    `in_flight` is the number of bytes that running transfers have moved, of `in_flight_total`. `eta`: seconds
    until nothing waits or runs at the present rate, None if unknown."""

    running: tuple[RunningJob, ...]
    kinds: Mapping[str, KindProgress]
    queues: Mapping[str, int]
    """Running jobs of this process, by queue."""
    lanes: Mapping[str, Mapping[str, int]]
    """Running jobs of this process, by lane and kind; empty without lanes."""
    waiting: Mapping[str, int]
    age: float
    in_flight: int
    in_flight_total: int
    rate: float
    jobs_rate: float
    eta: float | None
    group: GroupStatus | None = None

    @property
    def waits(self) -> int:
        """The number of waiting jobs."""
        return sum(self.waiting.values())

    def summary(self, transfers: Mapping[str, str] | None = None) -> str:
        """`3 downloading (2.1 GB), 5 uploading, 12 waiting`; `transfers` maps kinds that count bytes to their
        labels."""
        names = transfers or {}
        texts = []
        for kind in sorted(self.kinds):
            each = self.kinds[kind]
            if each.running:
                size = f" ({size_of(each.total)})" if kind in names and each.total else ""
                texts.append(f"{each.running} {names.get(kind, kind)}{size}")
        return ", ".join([*texts, f"{self.waits} waiting"])

    def by_lane(self, transfers: Mapping[str, str] | None = None) -> str:
        """`interactive: 3 downloading; bulk: 5 uploading`."""
        return spell_lanes(self.lanes, transfers or {})


def size_of(count: float) -> str:
    """A number of bytes with its unit: `2.1 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.95 or (unit == "B" and abs(count) < 1000):
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Tally:
    """A rate per second, over the last ten seconds."""

    def __init__(self, now: float) -> None:
        self.total = 0
        self._since = now
        self._added: deque[tuple[float, int]] = deque()

    def add(self, now: float, count: int) -> None:
        self.total += count
        if self._added and now - self._added[-1][0] < 0.1:
            self._added[-1] = self._added[-1][0], self._added[-1][1] + count
        else:
            self._added.append((now, count))

    def rate(self, now: float) -> float:
        while self._added and self._added[0][0] < now - WINDOW:
            self._added.popleft()
        return sum(count for _, count in self._added) / max(0.1, min(WINDOW, now - self._since))


class LiveProgress:
    """Measures from its first snapshot on. Safe from any thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self.bus = engine.bus
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._jobs: dict[tuple[str, str | None], Tally] = {}
        """Ended jobs by kind and group."""
        self._amounts: dict[tuple[str, int], tuple[Tally, int]] = {}
        """The tally of each run, and its progress at the last snapshot."""
        self._counts: dict[str | None, _WaitingCounts] = {}
        self.bus.subscribe(JobSettled, self._settled, inline=True)

    def _settled(self, event: JobSettled) -> None:
        if event.state in ("done", "failed", "canceled"):
            with self._lock:
                key = event.kind, event.group
                tally = self._jobs.setdefault(key, Tally(self._began))
                tally.add(self._clock(), 1)
                if len(self._jobs) > 10_000:
                    # Bound the memory: drop the tally of the oldest group.
                    del self._jobs[next(iter(self._jobs))]

    def snapshot(self, group: str | None = None) -> Snapshot:
        checks.optional_text("group", group)
        counts = self._counts.get(group) or self._counts.setdefault(
            group, _WaitingCounts(self._engine, group)
        )
        if len(self._counts) > 1000:
            self._counts = {group: counts}
        now = self._clock()
        counts.refresh(now)
        with self._lock:
            running = tuple(self._running(now, group))
            return self._drawn(now, group, running, counts)

    def _running(self, now: float, group: str | None) -> Iterable[RunningJob]:
        seen = set()
        for worker, run in [(each, run) for each in list(self._engine.local_workers) for run in each.running]:
            job, attempt = run.claim.job, run.attempt
            if not isinstance(attempt, Attempt):
                continue
            key = job.id, job.fence
            seen.add(key)
            rate = self._moved(key, attempt.running, now)
            if group is not None and job.group != group:
                continue
            done, total = attempt.running.at or (None, None)
            eta = None if done is None or total is None or rate <= 0 else max(0.0, (total - done) / rate)
            seconds = time.monotonic() - run.started
            lane = worker.buffer.lane_of(job.queue)
            yield RunningJob(
                id=job.id,
                kind=job.kind,
                queue=job.queue,
                group=job.group,
                attempt=job.attempts,
                seconds=seconds,
                done=done,
                total=total,
                rate=rate,
                eta=eta,
                lane=lane,
                short_id=job.short_id,
            )
        for key in self._amounts.keys() - seen:
            del self._amounts[key]

    def _moved(self, key: tuple[str, int], running: Running, now: float) -> float:
        done = (running.at or (0, None))[0]
        if key not in self._amounts:
            # Progress before the first snapshot has no known duration, so it does not count in the rate.
            self._amounts[key] = Tally(now), done
        tally, before = self._amounts[key]
        if done > before:
            tally.add(now, done - before)
        self._amounts[key] = tally, done
        return tally.rate(now) if tally.total else 0.0

    def _drawn(
        self, now: float, group: str | None, running: tuple[RunningJob, ...], counts: _WaitingCounts
    ) -> Snapshot:
        tallies = [(kind, tally) for (kind, of), tally in self._jobs.items() if group is None or of == group]
        kinds = {}
        for kind in sorted({job.kind for job in running} | {kind for kind, _ in tallies}):
            mine = [job for job in running if job.kind == kind]
            ended = [tally for each, tally in tallies if each == kind]
            kinds[kind] = KindProgress(
                kind,
                len(mine),
                sum(job.done or 0 for job in mine),
                sum(job.total or 0 for job in mine),
                sum(job.rate for job in mine),
                sum(tally.total for tally in ended),
                sum(tally.rate(now) for tally in ended),
            )
        jobs_rate = sum(each.jobs_rate for each in kinds.values())
        waiting = dict(counts.waiting)
        if counts.view is not None:
            waiting = {"": max(0, counts.view.unfinished - len(running))}
        left = sum(waiting.values()) + len(running)
        return Snapshot(
            running=running,
            kinds=kinds,
            queues=Counter(job.queue for job in running),
            lanes=self._lanes(running),
            waiting=waiting,
            age=max(0.0, now - counts.at),
            in_flight=sum(each.done for each in kinds.values()),
            in_flight_total=sum(each.total for each in kinds.values()),
            rate=sum(each.rate for each in kinds.values()),
            jobs_rate=jobs_rate,
            eta=0.0 if left == 0 else left / jobs_rate if jobs_rate > 0 else None,
            group=None if counts.view is None else group_status(counts.view),
        )

    def _lanes(self, running: tuple[RunningJob, ...]) -> Mapping[str, Mapping[str, int]]:
        names = dict.fromkeys(
            lane.name for worker in list(self._engine.local_workers) for lane in worker.buffer.lanes
        )
        return {name: Counter(job.kind for job in running if job.lane == name) for name in names}


class _WaitingCounts:
    """The counts of waiting jobs at the last read. The first read is awaited."""

    def __init__(self, engine: Engine, group: str | None) -> None:
        self._engine = engine
        self._group = group
        self._reading = threading.Lock()
        self.at = float("-inf")
        self.waiting: dict[str, int] = {}
        self.view: GroupView | None = None

    def refresh(self, now: float) -> None:
        if self.at == float("-inf"):
            self._read(now)
        elif now - self.at >= FRESH and self._reading.acquire(blocking=False):
            threading.Thread(target=self._reread, args=(now,), name="towpath-progress", daemon=True).start()

    def _reread(self, now: float) -> None:
        try:
            self._read(now)
        except TowpathError:
            # The ledger is closed or unreachable: the last counts stay, and their age grows.
            return
        finally:
            self._reading.release()

    def _read(self, now: float) -> None:
        if self._group is None:
            self.waiting = {
                name: view.counts.waiting
                for name, view in self._engine.ledger.queues().items()
                if view.counts.waiting
            }
        else:
            view = self._engine.ledger.group(self._group)
            if view is None:
                raise UnknownGroup(group=self._group)
            self.view = view
        self.at = now


class KindHistory(msgspec.Struct, frozen=True):
    """The jobs of one kind in the ledger: counts by state, the first start and the last end, and
    the sum of their progress (bytes, for transfers)."""

    kind: str
    counts: Counts
    first_start: datetime | None
    last_end: datetime | None
    done: int


def history(ledger: Ledger, group: str | None = None) -> tuple[KindHistory, ...]:
    """The history by kind. Jobs past their retention are deleted and not counted; the counts of a group stay
    exact (`ledger.group`)."""
    if group is not None and ledger.group(group) is None:
        raise UnknownGroup(group=group)
    counts: dict[str, Counter[State]] = {}
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    done: Counter[str] = Counter()
    page: str | None = None
    while True:
        found = ledger.find(Query(group=group, bodies=False, limit=MAX_PAGE, page=page))
        for job in found.jobs:
            counts.setdefault(job.kind, Counter())[job.state] += 1
            if job.started_at is not None:
                starts[job.kind] = min(starts.get(job.kind, job.started_at), job.started_at)
            if job.finished_at is not None:
                ends[job.kind] = max(ends.get(job.kind, 0), job.finished_at)
            done[job.kind] += job.progress_done or 0
        page = found.next
        if page is None:
            break
    return tuple(
        KindHistory(
            kind,
            Counts(**{state.value: n for state, n in counts[kind].items()}),
            checks.optional_utc(starts.get(kind)),
            checks.optional_utc(ends.get(kind)),
            done[kind],
        )
        for kind in sorted(counts)
    )
