"""What a worker with lanes or resources has claimed and not started, and how it asks for more.

A line is claimed together: the queues of a lane, and apart from them those of each resource. `core.lanes`
chooses the next line and its limit. A job that cannot start soon is not claimed.

Two threads look at the counts: the committing one writes `_delivered` and `_suspects_delivered`, the worker's
loop everything else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from towpath.core.checks import SECOND, matches, micros
from towpath.core.commands import MAX_BULK, Claimed, Hasten, Hastened, Want
from towpath.core.commands import Claim as ClaimCommand
from towpath.core.fleet import LaneView, LimitView
from towpath.core.job import SUSPECT, Claim, Outcome, Refuse, Release
from towpath.core.lanes import AGEING_STEPS, Lane, Shares, bounds_of, limit_of, lines_of, shown
from towpath.core.limits import Limiter, Ticket
from towpath.errors import LedgerClosed, TowpathError
from towpath.events import LimitChanged
from towpath.runtime.commit.pending import Reply
from towpath.runtime.engine import Engine
from towpath.runtime.worker.buffer import ClaimBuffer
from towpath.runtime.worker.options import RunnableAttempt, WorkerOptions
from towpath.runtime.worker.prefetch import ClaimCounts, PrefetchLimits


class LaneBuffer:
    """The intake of a worker with lanes or resources."""

    counts = True

    def __init__(
        self,
        engine: Engine,
        options: WorkerOptions,
        lease: int,
        deliver: Callable[[list[Claim]], None],
        failed: Callable[[TowpathError], None],
        empty: Callable[[], None] | None,
        account: ClaimCounts | None = None,
    ) -> None:
        self._engine, self._lease, self._account = engine, lease, account or ClaimCounts()
        self._deliver, self._failed, self._empty = deliver, failed, empty
        lanes = options.lanes or {"all": Lane(queues=options.queues, reserved=0)}
        self._declared = options.lanes
        self._ageing = Ageing(engine, lanes.values())
        self._slots = options.concurrency
        self._shares = Shares(self._slots, lanes)
        self._lines = lines_of(lanes, options.sources)
        self._by_lane = [
            [n for n, line in enumerate(self._lines) if line.lane == lane] for lane in range(len(lanes))
        ]
        self._line_of: dict[str, int] = {}
        self._at_hand: list[deque[Claim]] = [deque() for _ in self._lines]
        self._running = [0] * len(lanes)
        self._gone, self._delivered = ([0] * len(self._lines) for _ in range(2))
        self._suspects_gone = self._suspects_delivered = 0
        self._needs = options.needs
        own = {
            limit_of(name): bounds_of(name, lane.adaptive)
            for name, lane in lanes.items()
            if lane.adaptive is not None
        }
        self._limiters = {name: Limiter(bounds) for name, bounds in {**options.resources, **own}.items()}
        self._limits = {name: limiter.limit for name, limiter in self._limiters.items()}
        """How many of a resource or lane may be held; 0 while it has told us to wait."""
        self._told = dict.fromkeys(self._limits, 0)
        self._kept = dict.fromkeys(self._limits, (0.0, 0))
        """How many claims may lie here beyond what a limit has room for, and when that was found."""
        self._out: dict[tuple[str, int], tuple[int | None, dict[str, Ticket]]] = {}
        """What was given out and has not ended: its line (None: it belongs to no lane any more, and only has
        a slot), and its tickets by the names of its limits."""
        self._strangers: dict[str, Claim] = {}
        """Claims at hand, by job, that need a resource and came from a queue that is not its own."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._turn = 0
        self.paces = PrefetchLimits(self._slots, len(self._lines), self._find_line)
        self._ahead = [0] * len(self._lines)
        self._asked: tuple[int, ...] = ()
        self._again = False
        self._is_open = False

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        for name in self._limiters:
            self._look(name)
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

    def adopt(self, running: Sequence[Claim], before: ClaimBuffer) -> None:
        tickets = self._learn(before) if isinstance(before, LaneBuffer) else {}
        for claim in running:
            line = self._find_line(claim.job.queue)
            if line is None:
                self._shares.total -= 1
            else:
                self._delivered[line] += 1
            self._suspects_delivered += claim.job.losses >= SUSPECT
            self._give_out(claim, line, _now(), tickets.get((claim.id, claim.fence), {}))

    def _learn(self, before: LaneBuffer) -> dict[tuple[str, int], dict[str, Ticket]]:
        """Limits with the same bounds go on with what they have learned. They count already what runs; their
        tickets."""
        kept = {name: old for name, old in before._limiters.items() if name in self._limiters}
        kept = {name: old for name, old in kept.items() if old.bounds == self._limiters[name].bounds}
        self._limiters.update(kept)
        self._told.update({name: before._told[name] for name in kept})
        out = before._out.items()
        return {
            key: {name: ticket for name, ticket in tickets.items() if name in kept}
            for key, (_, tickets) in out
        }

    def pause(self, lanes: Collection[str]) -> None:
        self._shares.pause([name for name in lanes if name in self._declared])
        self._again = True

    @property
    def lanes(self) -> tuple[LaneView, ...]:
        running, reserved, paused = self._running, self._shares.reserved, self._shares.paused
        return tuple(
            LaneView(
                name=name, queues=lane.queues, reserved=reserved[n], running=running[n], paused=n in paused
            )
            for n, (name, lane) in enumerate(self._declared.items())
        )

    @property
    def limits(self) -> tuple[LimitView, ...]:
        # Limits wait by a clock that only goes forward; whoever reads this knows the ledger's.
        now, ahead = _now(), self._engine.clock.now() - _now()
        found: list[LimitView] = []
        for name, limiter in self._limiters.items():
            queues = tuple(
                queue for line in self._lines if name in line.limits for queue in line.queues.split(",")
            )
            until = limiter.until + ahead if limiter.until > now else None
            found.append(
                LimitView(
                    name=shown(name), queues=queues, limit=limiter.limit, running=limiter.running, until=until
                )
            )
        return tuple(found)

    def lane_of(self, queue: str) -> str | None:
        line = self._find_line(queue) if self._declared else None
        return None if line is None else self._shares.names[self._lines[line].lane]

    # In the committing thread

    def wanted(self) -> ClaimCommand | None:
        if not self._is_open:
            return None
        running, held = list(self._running), self._held()
        near = self._near(held)
        at_hand = [max(0, count - busy) for count, busy in zip(self._by_lanes(near), running, strict=True)]
        self._ahead = self.paces.ahead()
        # What of a resource was claimed ahead takes nobody's slot, but it has been claimed.
        far = zip(
            self._by_lanes(self._ahead), self._by_lanes(held), self._by_lanes(near), at_hand, strict=True
        )
        # Half of what may lie here comes with each batch: while it is run, the next half is claimed.
        ahead = [
            min(max(0, most - count + soon), waits + (most + 1) // 2) for most, count, soon, waits in far
        ]
        calls = self._shares.calls(running, at_hand, ahead, self._unsettled(held))
        rooms = self._rooms(held)
        self._turn += 1
        wants: list[Want] = []
        asked = [0] * len(self._lines)
        for call in calls:
            lines = self._by_lane[call.lane]
            for step in range(len(lines)):
                # Lines of a lane take turns to be first: each may have more than there is room for.
                number = lines[(self._turn + step) % len(lines)]
                n = min(call.n, MAX_BULK)
                line, once = self._lines[number], None
                if line.limits:
                    least = map(min, zip(*[rooms[name] for name in line.limits], strict=True))
                    room, once = (max(0, count - asked[number]) for count in least)
                    n = min(n, room)
                if n > 0:
                    asked[number] += n
                    wants.append(Want(line.queues, n, once, call.upto))
        if not wants:
            return None
        once = max(0, min(self._shares.total - sum(held), MAX_BULK))
        startable = once > 0 or sum(self._ahead) > 0
        suspects = max(0, startable - self._suspects_delivered + self._suspects_gone)
        wanted = tuple(wants[:1000])
        return ClaimCommand(
            owner=self._engine.owner, wants=wanted, lease=self._lease, once=once, suspects=suspects
        )

    def taken(self, reply: Claimed | TowpathError) -> None:
        if not isinstance(reply, Claimed):
            self._failed(reply)
        elif reply.claims:
            for claim in reply.claims:
                self._delivered[self._line(claim)] += 1
                self._suspects_delivered += claim.job.losses >= SUSPECT
            self._deliver(list(reply.claims))
        elif self._empty is not None:
            self._empty()

    def _held(self) -> list[int]:
        return [given - gone for given, gone in zip(self._delivered, self._gone, strict=True)]

    def _unsettled(self, held: Sequence[int]) -> int:
        """Jobs that ended and are not settled: neither held on a line nor running outside of all lanes."""
        return max(0, self._account.held - sum(held) - (self._slots - self._shares.total))

    def _by_lanes(self, counts: Sequence[int]) -> list[int]:
        return [sum([counts[line] for line in lines]) for lines in self._by_lane]

    def _near(self, held: Sequence[int]) -> list[int]:
        """How many of those held on each line run or could start now, were there slots."""
        left = {name: max(limit, self._limiters[name].running) for name, limit in self._limits.items()}
        found = list(held)
        for number, line in enumerate(self._lines):
            found[number] = min([held[number], *[left[name] for name in line.limits]])
            for name in line.limits:
                left[name] -= found[number]
        return found

    def _rooms(self, held: Sequence[int]) -> dict[str, tuple[int, int]]:
        """How many more to claim under each limit, and how many of them may be jobs with a single attempt."""
        rooms: dict[str, tuple[int, int]] = {}
        for name, limit in self._limits.items():
            mine = self._lines_under(name)
            room = limit - sum([held[number] for number in mine])
            rooms[name] = (
                room + sum([self._ahead[number] for number in mine]) if limit else 0,
                max(0, min(room, MAX_BULK)),
            )
        return rooms

    def _lines_under(self, limit: str) -> list[int]:
        return [number for number, line in enumerate(self._lines) if limit in line.limits]

    def _line(self, claim: Claim) -> int:
        line = self._find_line(claim.job.queue)
        assert line is not None, f"nobody asked for a job of {claim.job.queue}"
        return line

    def _find_line(self, queue: str) -> int | None:
        line = self._line_of.get(queue)
        if line is None:
            line = next(
                (number for number, line in enumerate(self._lines) if matches(line.queues, queue)), None
            )
            if line is not None:
                self._line_of[queue] = line
        return line

    # On the worker's loop

    def __len__(self) -> int:
        return sum(map(len, self._at_hand))

    def add(self, claims: Sequence[Claim], took: float = 0.0) -> None:
        for claim in claims:
            line = self._line(claim)
            if not self._at_hand[line]:
                self.paces.limits[line].supplied(took)
            if claim.job.losses < SUSPECT:
                self._at_hand[line].append(claim)
            else:
                self._at_hand[line].appendleft(claim)
            need = self._needs.get(claim.job.kind)
            if need is not None and need not in self._lines[line].limits:
                self._strangers[claim.id] = claim
        # A lane that keeps its slots may have got others: those that it kept are free for another look.
        self._again = self._again or not self._shares.lending

    def next(self) -> Claim | None:
        now = _now() if self._limiters else 0
        # Without limits each lane is one line.
        line = self._next_line(now) if self._limiters else self._shares.next(self._running, self._at_hand)
        if line is None:
            return None
        claim = self._at_hand[line].popleft()
        self.paces.starts[line] += 1
        self._give_out(claim, line, now, {})
        return claim

    def _give_out(self, claim: Claim, line: int | None, now: int, tickets: dict[str, Ticket]) -> None:
        """`tickets`: of the limits that count it already."""
        job = claim.job
        limits: tuple[str, ...] = ()
        if line is not None:
            limits = self._lines[line].limits
            self._running[self._lines[line].lane] += 1
        if (need := self._needs.get(job.kind)) is not None and need not in limits:
            limits = (*limits, need)
            self._strangers.pop(job.id, None)
        for name in limits:
            if name not in tickets:
                tickets[name] = self._limiters[name].start(now)
        self._out[job.id, job.fence] = line, tickets

    def _next_line(self, now: int) -> int | None:
        ready: list[list[int]] = []
        for lines in self._by_lane:
            ready.append([])
            for line in lines:
                limits = self._lines[line].limits
                if self._at_hand[line] and all(self._limiters[name].room(now) > 0 for name in limits):
                    ready[-1].append(line)
        lane = self._shares.next(self._running, ready)
        return None if lane is None else min(ready[lane], key=self._rank)

    def _rank(self, line: int) -> tuple[int, int]:
        job = self._at_hand[line][0].job
        return job.priority, job.seq

    def ended(self, claim: Claim, ok: bool, attempt: RunnableAttempt | None) -> None:
        line, tickets = self._out.pop((claim.job.id, claim.job.fence))
        throttled = None if attempt is None or not tickets else attempt.throttled
        for name, ticket in tickets.items():
            if throttled is None:
                self._limiters[name].ended(ticket, _now(), ok)
            else:
                self._limiters[name].throttled(ticket, _now(), throttled)
                self._kept[name] = 0.0, 0
        self._suspects_gone += claim.job.losses >= SUSPECT
        if line is None:
            self._shares.total += 1
            return
        self._running[self._lines[line].lane] -= 1
        self._gone[line] += 1
        if throttled is not None:
            self.paces.limits[line].forget()

    def surplus(self) -> list[tuple[Claim, Outcome]]:
        paused = [line for lane in self._shares.paused for line in self._by_lane[lane]]
        found: list[tuple[Claim, Outcome]] = [
            (claim, Release()) for line in paused for claim in self._take_out(line)
        ]
        if not self._limiters:
            return found
        now = _now()
        # The same limit for two lines was claimed for both: they take turns to keep what they got.
        turn = self._turn % len(self._lines)
        for name, limiter in self._limiters.items():
            room = limiter.room(now) + int(self._kept[name][0])
            for number in [*range(turn, len(self._lines)), *range(turn)]:
                if name in self._lines[number].limits:
                    found += [(claim, Release()) for claim in self._take_out(number, but=room)]
                    room -= len(self._at_hand[number])
        return found + self._put_off(now)

    def _take_out(self, line: int, but: int = 0) -> list[Claim]:
        """All that is at hand in a line, but the first few."""
        claims, taken = self._at_hand[line], []
        while len(claims) > but:
            taken.append(claims.pop())
            self._strangers.pop(taken[-1].id, None)
            self._suspects_gone += taken[-1].job.losses >= SUSPECT
        self._gone[line] += len(taken)
        return taken

    def _put_off(self, now: int) -> list[tuple[Claim, Outcome]]:
        """Strangers whose resource has no room would come back at once."""
        found: list[tuple[Claim, Outcome]] = []
        for claim in list(self._strangers.values()):
            limiter = self._limiters[name := self._needs[claim.job.kind]]
            if limiter.room(now) <= 0:
                self.find(claim.id)
                found.append(
                    (
                        claim,
                        Refuse(max(SECOND, limiter.until - now), error=f"resource {name} has no room now"),
                    )
                )
        return found

    def ask(self, free: int, kick: bool) -> None:
        open_to = self._shares.open_to(self._running)
        for line, claims in enumerate(self._at_hand):
            if not claims and open_to[self._lines[line].lane]:
                self.paces.limits[line].starved()
        self._ahead = self.paces.ahead()
        for name in self._limiters:
            self._look(name)
        held = self._held()
        rooms = [room for room, _ in self._rooms(held).values()]
        asked = (self._shares.total + sum(self._ahead) - sum(held) - self._unsettled(held), *rooms)
        grown = (
            self._again
            or not self._asked
            or any(new > old for new, old in zip(asked, self._asked, strict=True))
        )
        self._asked, self._again = asked, False
        if grown and kick:
            self._engine.committer.kick()

    def late(self) -> list[Claim]:
        return [
            claim
            for line in range(len(self._lines))
            for claim in self._take_out(line, but=self.paces.keep(line))
        ]

    def _look(self, name: str) -> None:
        """Let the committing thread know a limit, and whoever listens."""
        limiter, now = self._limiters[name], _now()
        self._limits[name] = limiter.limit if now >= limiter.until else 0
        ahead = sum([self._ahead[number] for number in self._lines_under(name)])
        before, at = self._kept[name]
        # What was asked for may still be on its way: it is given back only where jobs have become slow.
        kept = max(ahead, before * max(0.0, 1 - (now - at) / SECOND)) if self._limits[name] else 0.0
        self._kept[name] = kept, now
        if limiter.until > now and name not in self._timers:
            self._timers[name] = self._loop.call_later((limiter.until - now) / SECOND, self._reopen, name)
        if (before := self._told[name]) != limiter.limit:
            self._told[name] = limiter.limit
            if self._engine.bus.wants(LimitChanged):
                waits = max(0, limiter.until - now) / SECOND
                self._engine.bus.publish(LimitChanged(name, limiter.limit, before, limiter.running, waits))

    def _reopen(self, name: str) -> None:
        del self._timers[name]
        if self._is_open:
            self.ask(1, kick=True)

    def find(self, id: str) -> Claim | None:
        self._strangers.pop(id, None)
        for number, claims in enumerate(self._at_hand):
            for claim in claims:
                if claim.id == id:
                    claims.remove(claim)
                    self._gone[number] += 1
                    self._suspects_gone += claim.job.losses >= SUSPECT
                    return claim
        return None

    def clear(self) -> list[Claim]:
        return [claim for line in range(len(self._lines)) for claim in self._take_out(line)]


def _now() -> int:
    return time.monotonic_ns() // 1000


class Ageing:
    """Belongs to the worker's loop. Every worker of a fleet does it; the second one finds nothing to do."""

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

        def heard(replies: Sequence[Reply]) -> None:
            more = any(isinstance(reply, Hastened) and reply.more for reply in replies)
            # The loop may have ended meanwhile.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(
                    self._later, queues, 0.0 if more else span / AGEING_STEPS / SECOND
                )

        with contextlib.suppress(LedgerClosed):
            self._engine.committer.post([Hasten(queues, span)], heard)

    def _later(self, queues: str, seconds: float) -> None:
        if self._started:
            self._timers[queues] = self._loop.call_later(seconds, self._hasten, queues)
