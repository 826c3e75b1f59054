"""The claims of a worker with lanes or resources that have not started, and its demand for more.

A queue set is claimed together: all queues of a lane without a resource, or with the same resource.
`core.lanes` chooses the next lane, `core.limits` how many jobs may use a resource or run in a lane. A job
that cannot start soon is not claimed, so it does not block others.

Two threads use the counts: the committing thread writes `_delivered` and `_suspects_delivered`, the worker's
loop all others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from towpath.core.checks import SECOND, matches, micros
from towpath.core.commands import MAX_BULK, Claim, Claimed, Hasten, Hastened, Want
from towpath.core.fleet import LaneView, LimitView
from towpath.core.job import SUSPECT, ClaimedJob, Outcome, Refuse, Release
from towpath.core.lanes import AGEING_STEPS, Lane, Shares, bounds_of, lane_queues, limit_of, shown
from towpath.core.limits import Limiter, LimiterStart
from towpath.core.retry import refused_again
from towpath.errors import LedgerClosed, TowpathError
from towpath.events import LimitChanged
from towpath.runtime.commit.pending import Reply
from towpath.runtime.engine import Engine
from towpath.runtime.worker.buffer import ClaimBuffer
from towpath.runtime.worker.options import RunnableAttempt, WorkerOptions
from towpath.runtime.worker.prefetch import ClaimCounts, PrefetchLimits


class LaneBuffer:
    """The buffer of a worker with lanes or resources. It is a demand of its own."""

    tracks_ends = True

    def __init__(
        self,
        engine: Engine,
        options: WorkerOptions,
        lease: int,
        deliver: Callable[[list[ClaimedJob]], None],
        failed: Callable[[TowpathError], None],
        empty: Callable[[], None] | None,
        counts: ClaimCounts | None = None,
    ) -> None:
        self._engine, self._lease, self._counts = engine, lease, counts or ClaimCounts()
        self._deliver, self._failed, self._empty = deliver, failed, empty
        lanes = options.lanes or {"all": Lane(queues=options.queues, reserved=0)}
        self._lanes = options.lanes
        self._ageing = Ageing(engine, lanes.values())
        self._slots = options.concurrency
        self._shares = Shares(self._slots, lanes)
        self._sets = lane_queues(lanes, options.sources, options.beside)
        self._by_lane = [
            [n for n, queues in enumerate(self._sets) if queues.lane == lane] for lane in range(len(lanes))
        ]
        self._set_of: dict[str, int] = {}
        self._buffered: list[deque[ClaimedJob]] = [deque() for _ in self._sets]
        self._running = [0] * len(lanes)
        self._left, self._delivered = ([0] * len(self._sets) for _ in range(2))
        self._suspects_gone = self._suspects_delivered = 0
        self._needs = options.needs
        own = {
            limit_of(name): bounds_of(name, lane.adaptive)
            for name, lane in lanes.items()
            if lane.adaptive is not None
        }
        self._limiters = {name: Limiter(bounds) for name, bounds in {**options.resources, **own}.items()}
        self._limits = {name: limiter.limit for name, limiter in self._limiters.items()}
        """How many jobs of a resource or lane may be held; 0 while a service asked to wait."""
        self._published = dict.fromkeys(self._limits, 0)
        self._kept = dict.fromkeys(self._limits, (0.0, 0))
        """How many claims may be buffered beyond the room of a limit, and the time of that estimate."""
        self._started: dict[tuple[str, int], tuple[int | None, dict[str, LimiterStart]]] = {}
        """By id and fence, the claims that have started and not ended: the queue set (None: its queue is in
        no lane any more, and it only has a slot), and the starts by the names of the limits."""
        self._foreign: dict[str, ClaimedJob] = {}
        """Buffered claims, by job id, that use a resource but come from a queue that is not a source of
        it."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._turn = 0
        self.prefetch = PrefetchLimits(self._slots, len(self._sets), self._find_set)
        self._ahead = [0] * len(self._sets)
        self._asked: tuple[int, ...] = ()
        self._recheck = False
        self._is_open = False

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        for name in self._limiters:
            self._update_limit(name)
        self._engine.committer.add_demand(self)
        self._ageing.start()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._engine.committer.drop_demand(self)
            self._ageing.stop()
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    def adopt(self, running: Sequence[ClaimedJob], before: ClaimBuffer) -> None:
        starts = self._keep_limiters(before) if isinstance(before, LaneBuffer) else {}
        for claim in running:
            number = self._find_set(claim.job.queue)
            if number is None:
                self._shares.total -= 1
            else:
                self._delivered[number] += 1
            self._suspects_delivered += claim.job.losses >= SUSPECT
            self._count_start(claim, number, _now(), starts.get((claim.id, claim.fence), {}))

    def _keep_limiters(self, before: LaneBuffer) -> dict[tuple[str, int], dict[str, LimiterStart]]:
        """Keep the limiters with the same bounds, with all that they have measured. They count the running
        jobs already; return the starts of these jobs."""
        kept = {name: old for name, old in before._limiters.items() if name in self._limiters}
        kept = {name: old for name, old in kept.items() if old.bounds == self._limiters[name].bounds}
        self._limiters.update(kept)
        self._published.update({name: before._published[name] for name in kept})
        out = before._started.items()
        return {
            key: {name: start for name, start in starts.items() if name in kept} for key, (_, starts) in out
        }

    def pause(self, lanes: Collection[str]) -> None:
        self._shares.pause([name for name in lanes if name in self._lanes])
        self._recheck = True

    @property
    def lanes(self) -> tuple[LaneView, ...]:
        running, reserved, paused = self._running, self._shares.reserved, self._shares.paused
        return tuple(
            LaneView(
                name=name, queues=lane.queues, reserved=reserved[n], running=running[n], paused=n in paused
            )
            for n, (name, lane) in enumerate(self._lanes.items())
        )

    @property
    def limits(self) -> tuple[LimitView, ...]:
        # Limiters use the monotonic clock; a view has the time of the ledger.
        now, ahead = _now(), self._engine.clock.now() - _now()
        found: list[LimitView] = []
        for name, limiter in self._limiters.items():
            queues = tuple(
                queue for each in self._sets if name in each.limits for queue in each.queues.split(",")
            )
            until = limiter.until + ahead if limiter.until > now else None
            found.append(
                LimitView(
                    name=shown(name), queues=queues, limit=limiter.limit, running=limiter.running, until=until
                )
            )
        return tuple(found)

    def lane_of(self, queue: str) -> str | None:
        number = self._find_set(queue) if self._lanes else None
        return None if number is None else self._shares.names[self._sets[number].lane]

    # In the committing thread

    def wanted(self) -> Claim | None:
        if not self._is_open:
            return None
        running, held = list(self._running), self._held()
        near = self._near(held)
        buffered = [max(0, count - busy) for count, busy in zip(self._by_lanes(near), running, strict=True)]
        self._ahead = self.prefetch.ahead()
        # A prefetched job of a full resource takes no slot of others, but it counts as claimed.
        far = zip(
            self._by_lanes(self._ahead), self._by_lanes(held), self._by_lanes(near), buffered, strict=True
        )
        # Each batch claims half of the prefetch; while these jobs run, the next half is claimed.
        ahead = [
            min(max(0, most - count + soon), waits + (most + 1) // 2) for most, count, soon, waits in far
        ]
        calls = self._shares.calls(running, buffered, ahead, self._unsettled(held))
        rooms = self._rooms(held)
        self._turn += 1
        wants: list[Want] = []
        without = self._counts.without()
        asked = [0] * len(self._sets)
        for call in calls:
            sets = self._by_lane[call.lane]
            for step in range(len(sets)):
                # The sets of a lane take turns to be first: each may have more jobs than there is room for.
                number = sets[(self._turn + step) % len(sets)]
                n = min(call.n, MAX_BULK)
                queues, once = self._sets[number], None
                if queues.limits:
                    least = map(min, zip(*[rooms[name] for name in queues.limits], strict=True))
                    room, once = (max(0, count - asked[number]) for count in least)
                    n = min(n, room)
                if n > 0:
                    asked[number] += n
                    wants.append(Want(queues.queues, n, once, call.upto, without=without))
        if not wants:
            return None
        once = max(0, min(self._shares.total - sum(held), MAX_BULK))
        startable = once > 0 or sum(self._ahead) > 0
        suspects = max(0, startable - self._suspects_delivered + self._suspects_gone)
        wanted = tuple(wants[:1000])
        return Claim(owner=self._engine.owner, wants=wanted, lease=self._lease, once=once, suspects=suspects)

    def taken(self, reply: Claimed | TowpathError) -> None:
        if not isinstance(reply, Claimed):
            self._failed(reply)
        elif reply.claims:
            for claim in reply.claims:
                self._delivered[self._set_of_claim(claim)] += 1
                self._suspects_delivered += claim.job.losses >= SUSPECT
            self._deliver(list(reply.claims))
        elif self._empty is not None:
            self._empty()

    def _held(self) -> list[int]:
        return [given - gone for given, gone in zip(self._delivered, self._left, strict=True)]

    def _unsettled(self, held: Sequence[int]) -> int:
        """Jobs that ended and are not settled: neither in a set nor running outside of all lanes."""
        return max(0, self._counts.held - sum(held) - (self._slots - self._shares.total))

    def _by_lanes(self, counts: Sequence[int]) -> list[int]:
        return [sum([counts[number] for number in sets]) for sets in self._by_lane]

    def _near(self, held: Sequence[int]) -> list[int]:
        """Per set: how many of the held jobs run, or could start now if there were slots."""
        left = {name: max(limit, self._limiters[name].running) for name, limit in self._limits.items()}
        found = list(held)
        for number, queues in enumerate(self._sets):
            found[number] = min([held[number], *[left[name] for name in queues.limits]])
            for name in queues.limits:
                left[name] -= found[number]
        return found

    def _rooms(self, held: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Per limit: how many more to claim, and how many of them may be jobs with a single attempt."""
        rooms: dict[str, tuple[int, int]] = {}
        for name, limit in self._limits.items():
            mine = self._sets_under(name)
            room = limit - sum([held[number] for number in mine])
            rooms[name] = (
                room + sum([self._ahead[number] for number in mine]) if limit else 0,
                max(0, min(room, MAX_BULK)),
            )
        return rooms

    def _sets_under(self, limit: str) -> list[int]:
        return [number for number, queues in enumerate(self._sets) if limit in queues.limits]

    def _set_of_claim(self, claim: ClaimedJob) -> int:
        number = self._find_set(claim.job.queue)
        assert number is not None, f"no set has queue {claim.job.queue}"
        return number

    def _find_set(self, queue: str) -> int | None:
        number = self._set_of.get(queue)
        if number is None:
            number = next(
                (number for number, queues in enumerate(self._sets) if matches(queues.queues, queue)), None
            )
            if number is not None:
                self._set_of[queue] = number
        return number

    # On the worker's loop

    def __len__(self) -> int:
        return sum(map(len, self._buffered))

    def add(self, claims: Sequence[ClaimedJob], took: float = 0.0) -> None:
        for claim in claims:
            number = self._set_of_claim(claim)
            if not self._buffered[number]:
                self.prefetch.limits[number].supplied(took)
            if claim.job.losses < SUSPECT:
                self._buffered[number].append(claim)
            else:
                self._buffered[number].appendleft(claim)
            need = self._needs.get(claim.job.kind)
            if need is not None and need not in self._sets[number].limits:
                self._foreign[claim.id] = claim
        # A lane that reserves slots has jobs now: the slots that it kept free may change the demand.
        self._recheck = self._recheck or not self._shares.lending

    def next(self) -> ClaimedJob | None:
        now = _now() if self._limiters else 0
        # Without limits each lane is one set.
        number = self._next_set(now) if self._limiters else self._shares.next(self._running, self._buffered)
        if number is None:
            return None
        claim = self._buffered[number].popleft()
        self.prefetch.starts[number] += 1
        self._count_start(claim, number, now, {})
        return claim

    def _count_start(
        self, claim: ClaimedJob, number: int | None, now: int, starts: dict[str, LimiterStart]
    ) -> None:
        """`starts`: of the limits that count the job already."""
        job = claim.job
        limits: tuple[str, ...] = ()
        if number is not None:
            limits = self._sets[number].limits
            self._running[self._sets[number].lane] += 1
        if (need := self._needs.get(job.kind)) is not None and need not in limits:
            limits = (*limits, need)
            self._foreign.pop(job.id, None)
        for name in limits:
            if name not in starts:
                starts[name] = self._limiters[name].start(now)
        self._started[job.id, job.fence] = number, starts

    def _next_set(self, now: int) -> int | None:
        ready: list[list[int]] = []
        for sets in self._by_lane:
            ready.append([])
            for number in sets:
                limits = self._sets[number].limits
                if self._buffered[number] and all(self._limiters[name].room(now) > 0 for name in limits):
                    ready[-1].append(number)
        lane = self._shares.next(self._running, ready)
        return None if lane is None else min(ready[lane], key=self._rank)

    def _rank(self, number: int) -> tuple[int, int]:
        job = self._buffered[number][0].job
        return job.priority, job.seq

    def ended(self, claim: ClaimedJob, ok: bool, attempt: RunnableAttempt | None) -> None:
        number, starts = self._started.pop((claim.job.id, claim.job.fence))
        throttled = None if attempt is None or not starts else attempt.throttled
        for name, start in starts.items():
            if throttled is None:
                self._limiters[name].ended(start, _now(), ok)
            else:
                self._limiters[name].throttled(start, _now(), throttled)
                self._kept[name] = 0.0, 0
        self._suspects_gone += claim.job.losses >= SUSPECT
        if number is None:
            self._shares.total += 1
            return
        self._running[self._sets[number].lane] -= 1
        self._left[number] += 1
        if throttled is not None:
            self.prefetch.limits[number].forget()

    def surplus(self) -> list[tuple[ClaimedJob, Outcome]]:
        paused = [number for lane in self._shares.paused for number in self._by_lane[lane]]
        found: list[tuple[ClaimedJob, Outcome]] = [
            (claim, Release()) for number in paused for claim in self._take_out(number)
        ]
        if not self._limiters:
            return found
        now = _now()
        # Two sets with the same limit each claimed for all of its room: they take turns to keep claims.
        turn = self._turn % len(self._sets)
        for name, limiter in self._limiters.items():
            room = limiter.room(now) + int(self._kept[name][0])
            for number in [*range(turn, len(self._sets)), *range(turn)]:
                if name in self._sets[number].limits:
                    found += [(claim, Release()) for claim in self._take_out(number, but=room)]
                    room -= len(self._buffered[number])
        return found + self._refuse_foreign(now)

    def _take_out(self, number: int, but: int = 0) -> list[ClaimedJob]:
        """Take out the buffered claims of a set, except the first few."""
        claims, taken = self._buffered[number], []
        while len(claims) > but:
            taken.append(claims.pop())
            self._foreign.pop(taken[-1].id, None)
            self._suspects_gone += taken[-1].job.losses >= SUSPECT
        self._left[number] += len(taken)
        return taken

    def _refuse_foreign(self, now: int) -> list[tuple[ClaimedJob, Outcome]]:
        """Refuse the claims of foreign queues if their resource has no room: if released, they would be
        claimed at once."""
        found: list[tuple[ClaimedJob, Outcome]] = []
        for claim in list(self._foreign.values()):
            limiter = self._limiters[name := self._needs[claim.job.kind]]
            if limiter.room(now) <= 0:
                self.find(claim.id)
                error = refused_again(f"resource {name} has no room now", claim.job.error)
                found.append((claim, Refuse(max(SECOND, limiter.until - now), error=error)))
        return found

    def ask(self, free: int, kick: bool) -> None:
        open_to = self._shares.open_to(self._running)
        for number, claims in enumerate(self._buffered):
            if not claims and open_to[self._sets[number].lane]:
                self.prefetch.limits[number].starved()
        self._ahead = self.prefetch.ahead()
        for name in self._limiters:
            self._update_limit(name)
        held = self._held()
        rooms = [room for room, _ in self._rooms(held).values()]
        asked = (self._shares.total + sum(self._ahead) - sum(held) - self._unsettled(held), *rooms)
        grown = (
            self._recheck
            or not self._asked
            or any(new > old for new, old in zip(asked, self._asked, strict=True))
        )
        self._asked, self._recheck = asked, False
        if grown and kick:
            self._engine.committer.kick()

    def late(self) -> list[ClaimedJob]:
        return [
            claim
            for number in range(len(self._sets))
            for claim in self._take_out(number, but=self.prefetch.keep(number))
        ]

    def _update_limit(self, name: str) -> None:
        """Store a limit for the committing thread, and publish its change."""
        limiter, now = self._limiters[name], _now()
        self._limits[name] = limiter.limit if now >= limiter.until else 0
        ahead = sum([self._ahead[number] for number in self._sets_under(name)])
        before, at = self._kept[name]
        # Claims may still be arriving: they are released only if jobs have become slow.
        kept = max(ahead, before * max(0.0, 1 - (now - at) / SECOND)) if self._limits[name] else 0.0
        self._kept[name] = kept, now
        if limiter.until > now and name not in self._timers:
            self._timers[name] = self._loop.call_later((limiter.until - now) / SECOND, self._reopen, name)
        if (before := self._published[name]) != limiter.limit:
            self._published[name] = limiter.limit
            if self._engine.bus.wants(LimitChanged):
                waits = max(0, limiter.until - now) / SECOND
                self._engine.bus.publish(LimitChanged(name, limiter.limit, before, limiter.running, waits))

    def _reopen(self, name: str) -> None:
        del self._timers[name]
        if self._is_open:
            self.ask(1, kick=True)

    def find(self, id: str) -> ClaimedJob | None:
        self._foreign.pop(id, None)
        for number, claims in enumerate(self._buffered):
            for claim in claims:
                if claim.id == id:
                    claims.remove(claim)
                    self._left[number] += 1
                    self._suspects_gone += claim.job.losses >= SUSPECT
                    return claim
        return None

    def clear(self) -> list[ClaimedJob]:
        return [claim for number in range(len(self._sets)) for claim in self._take_out(number)]


def _now() -> int:
    return time.monotonic_ns() // 1000


class Ageing:
    """Hastens jobs that have waited too long, on the worker's loop. Every worker of a fleet does it; the
    second one finds nothing to do."""

    def __init__(self, engine: Engine, lanes: Iterable[Lane]) -> None:
        self._engine = engine
        self._spans = {
            ",".join(lane.queues): micros(lane.ageing) for lane in lanes if lane.ageing is not None
        }
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._started = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started = True
        for queues in self._spans:
            self._hasten(queues)

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._started = False

    def _hasten(self, queues: str) -> None:
        span = self._spans[queues]

        def replied(replies: Sequence[Reply]) -> None:
            more = any(isinstance(reply, Hastened) and reply.more for reply in replies)
            # The loop may be closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(
                    self._later, queues, 0.0 if more else span / AGEING_STEPS / SECOND
                )

        with contextlib.suppress(LedgerClosed):
            self._engine.committer.post([Hasten(queues, span)], replied)

    def _later(self, queues: str, seconds: float) -> None:
        if self._started:
            self._timers[queues] = self._loop.call_later(seconds, self._hasten, queues)
