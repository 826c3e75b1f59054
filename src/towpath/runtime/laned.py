"""What a worker with lanes or resources has claimed and not started, and how it asks for more.

A line is what is claimed together: the queues of a lane, and apart from them those of each resource. `core.lanes` says whose turn
it is, `core.adaptive` how many may use a resource or run in a lane. Whatever may not start is not claimed, so nothing lies in
anybody's way.

Two threads look at the counts: the committing one writes `_delivered`, the worker's loop everything else.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from towpath.core.adaptive import Limiter, Ticket
from towpath.core.checks import SECOND, matches
from towpath.core.commands import MAX_BULK, Claimed, Want
from towpath.core.commands import Claim as ClaimCommand
from towpath.core.fleet import LaneView, LimitView
from towpath.core.job import Claim, Outcome, Refuse, Release
from towpath.core.lanes import Lane, Shares, bounds_of
from towpath.errors import TowpathError
from towpath.events import LimitChanged
from towpath.runtime.ageing import Ageing
from towpath.runtime.intake import Intake
from towpath.runtime.office import Attempt, Office, WorkerOptions


class Line(msgspec.Struct, frozen=True):
    """Queues (with commas between them) of one lane that are claimed together, and the names of the limits for all of them."""

    lane: int
    queues: str
    limits: tuple[str, ...] = ()


def limit_of(lane: str) -> str:
    """The name of a lane's own limit; no resource can be called so."""
    return f"lane {lane}"


def lines_of(lanes: Mapping[str, Lane], sources: Mapping[str, str]) -> list[Line]:
    """`sources`: queue -> the resource that all its jobs use."""
    found: list[Line] = []
    for number, (name, lane) in enumerate(lanes.items()):
        own = () if lane.adaptive is None else (limit_of(name),)
        by_resource: dict[str | None, list[str]] = {}
        for queue in lane.queues:
            by_resource.setdefault(sources.get(queue), []).append(queue)
        for resource, queues in by_resource.items():
            found.append(Line(number, ",".join(queues), own if resource is None else (resource, *own)))
    return found


class Laned:
    """The intake of a worker with lanes or resources."""

    counts = True

    def __init__(
        self,
        office: Office,
        options: WorkerOptions,
        lease: int,
        deliver: Callable[[list[Claim]], None],
        failed: Callable[[TowpathError], None],
        empty: Callable[[], None] | None,
    ) -> None:
        self._office, self._lease = office, lease
        self._deliver, self._failed, self._empty = deliver, failed, empty
        lanes = options.lanes or {"all": Lane(queues=options.queues, reserved=0)}
        self._declared = options.lanes
        self._ageing = Ageing(office, lanes.values())
        self._shares = Shares(options.concurrency, lanes)
        self._lines = lines_of(lanes, options.sources)
        self._by_lane = [[n for n, line in enumerate(self._lines) if line.lane == lane] for lane in range(len(lanes))]
        self._line_of: dict[str, int] = {}
        self._at_hand: list[deque[Claim]] = [deque() for _ in self._lines]
        self._running, self._gone, self._delivered = ([0] * len(self._lines) for _ in range(3))
        self._foreign: set[tuple[str, int]] = set()
        """What runs here and belongs to no lane any more: it only has a slot."""
        self._needs = options.needs
        own = {limit_of(name): bounds_of(name, lane.adaptive) for name, lane in lanes.items() if lane.adaptive is not None}
        self._limiters = {name: Limiter(bounds) for name, bounds in {**options.resources, **own}.items()}
        self._limits = {name: limiter.limit for name, limiter in self._limiters.items()}
        """How many of a resource or lane may be held; 0 while it has told us to wait."""
        self._told = dict.fromkeys(self._limits, 0)
        self._tickets: dict[tuple[str, int], list[tuple[Limiter, Ticket]]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._turn = 0
        self._ahead = [0] * len(lanes)
        self._ends = [0] * len(lanes)
        self._shares_of_ends = [0.0] * len(lanes)
        """Which part of what ended lately was of which lane: those may be claimed ahead."""
        self._asked: tuple[int, ...] = ()
        self._again = False
        self._is_open = False

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        for name in self._limiters:
            self._look(name)
        self._office.committer.add_demand(self)
        self._ageing.start()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._office.committer.drop_demand(self)
            self._ageing.stop()
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    def adopt(self, running: Sequence[Claim], before: Intake) -> None:
        old = before._tickets if isinstance(before, Laned) else {}
        if isinstance(before, Laned):
            self._learn(before)
        now, kept = _now(), list(self._limiters.values())
        for claim in running:
            key = claim.id, claim.fence
            line = self._find_line(claim.job.queue)
            if line is None:
                self._foreign.add(key)
                self._shares.total -= 1
            else:
                self._running[line] += 1
                self._delivered[line] += 1
            tickets = [each for each in old.get(key, ()) if each[0] in kept]
            known = [limiter for limiter, _ in tickets]
            tickets += [(each, each.start(now)) for each in self._limiters_of(line, claim) if each not in known]
            self._tickets[key] = tickets

    def _learn(self, before: Laned) -> None:
        """Limits with the same bounds go on with what they have learned; they know already what runs."""
        for name, limiter in before._limiters.items():
            if name in self._limiters and self._limiters[name].bounds == limiter.bounds:
                self._limiters[name], self._told[name] = limiter, before._told[name]

    def pause(self, lanes: Collection[str]) -> None:
        self._shares.pause([name for name in lanes if name in self._declared])
        self._again = True

    @property
    def lanes(self) -> tuple[LaneView, ...]:
        running, reserved, paused = self._by_lanes(self._running), self._shares.reserved, self._shares.paused
        return tuple(
            LaneView(name=name, queues=lane.queues, reserved=reserved[n], running=running[n], paused=n in paused)
            for n, (name, lane) in enumerate(self._declared.items())
        )

    @property
    def limits(self) -> tuple[LimitView, ...]:
        # Limits wait by a clock that only goes forward; whoever reads this knows the ledger's.
        ahead = self._office.clock.now() - _now()
        found: list[LimitView] = []
        for name, limiter in self._limiters.items():
            queues = tuple(queue for line in self._lines if name in line.limits for queue in line.queues.split(","))
            until = limiter.until + ahead if limiter.until > _now() else None
            shown = name if name.startswith(limit_of("")) else f"resource {name}"
            found.append(LimitView(name=shown, queues=queues, limit=limiter.limit, running=limiter.running, until=until))
        return tuple(found)

    def lane_of(self, queue: str) -> str | None:
        line = self._find_line(queue) if self._declared else None
        return None if line is None else self._shares.names[self._lines[line].lane]

    # In the committing thread

    def wanted(self) -> ClaimCommand | None:
        if not self._is_open:
            return None
        running = list(self._running)
        held = self._held()
        at_hand = [max(0, count - busy) for count, busy in zip(held, running, strict=True)]
        calls = self._shares.calls(self._by_lanes(running), self._by_lanes(at_hand), self._ahead)
        used = self._used(held)
        self._turn += 1
        wants: list[Want] = []
        for call in calls:
            lines = self._by_lane[call.lane]
            for step in range(len(lines)):
                # Lines of a lane take turns to be first: each may have more than there is room for.
                line = self._lines[lines[(self._turn + step) % len(lines)]]
                room = min([call.n, *[self._limits[name] - used[name] for name in line.limits]])
                if room > 0:
                    wants.append(Want(line.queues, min(room, MAX_BULK), None, call.upto))
        if not wants:
            return None
        once = max(0, min(self._shares.total - sum(held), MAX_BULK))
        return ClaimCommand(owner=self._office.owner, wants=tuple(wants[:1000]), lease=self._lease, once=once)

    def taken(self, reply: Claimed | TowpathError) -> None:
        if not isinstance(reply, Claimed):
            self._failed(reply)
        elif reply.claims:
            for claim in reply.claims:
                self._delivered[self._line(claim)] += 1
            self._deliver(list(reply.claims))
        elif self._empty is not None:
            self._empty()

    def _held(self) -> list[int]:
        return [given - gone for given, gone in zip(self._delivered, self._gone, strict=True)]

    def _by_lanes(self, counts: Sequence[int]) -> list[int]:
        return [sum([counts[line] for line in lines]) for lines in self._by_lane]

    def _used(self, held: Sequence[int]) -> dict[str, int]:
        used = dict.fromkeys(self._limits, 0)
        for line, count in zip(self._lines, held, strict=True):
            for name in line.limits:
                used[name] += count
        return used

    def _line(self, claim: Claim) -> int:
        line = self._find_line(claim.job.queue)
        assert line is not None
        return line

    def _find_line(self, queue: str) -> int | None:
        line = self._line_of.get(queue)
        if line is None:
            line = next((n for n, line in enumerate(self._lines) if matches(line.queues, queue)), None)
            if line is not None:
                self._line_of[queue] = line
        return line

    # On the worker's loop

    def __len__(self) -> int:
        return sum(map(len, self._at_hand))

    def add(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self._at_hand[self._line(claim)].append(claim)
        # A lane that keeps its slots may have got others: those that it kept are free for another look.
        self._again = not self._shares.lending

    def next(self) -> Claim | None:
        now = _now() if self._limiters else 0
        ready = [bool(claims) and self._may(line, now) for line, claims in zip(self._lines, self._at_hand, strict=True)]
        lane = self._shares.next(self._by_lanes(self._running), self._by_lanes(ready))
        if lane is None:
            return None
        lines = [line for line in self._by_lane[lane] if ready[line]]
        line = lines[0] if len(lines) == 1 else min(lines, key=self._rank)
        claim = self._at_hand[line].popleft()
        self._running[line] += 1
        if self._limiters and (limiters := self._limiters_of(line, claim)):
            self._tickets[claim.id, claim.fence] = [(limiter, limiter.start(now)) for limiter in limiters]
        return claim

    def _limiters_of(self, line: int | None, claim: Claim) -> list[Limiter]:
        """Those that a job must be counted in: the line's, and that of the resource its task uses wherever it came from."""
        names = dict.fromkeys(() if line is None else self._lines[line].limits)
        if (need := self._needs.get(claim.job.kind)) is not None:
            names[need] = None
        return [self._limiters[name] for name in names]

    def _may(self, line: Line, now: int) -> bool:
        return all(self._limiters[name].room(now) > 0 for name in line.limits)

    def _rank(self, line: int) -> tuple[int, int]:
        job = self._at_hand[line][0].job
        return job.priority, job.seq

    def ended(self, claim: Claim, ok: bool, attempt: Attempt | None) -> None:
        key = claim.id, claim.fence
        if key in self._foreign:
            self._foreign.remove(key)
            self._shares.total += 1
        else:
            line = self._line(claim)
            self._running[line] -= 1
            self._gone[line] += 1
            self._ends[self._lines[line].lane] += 1
        for limiter, ticket in self._tickets.pop(key, ()):
            if attempt is not None and attempt.throttled is not None:
                limiter.throttled(ticket, _now(), attempt.throttled)
            else:
                limiter.ended(ticket, _now(), ok)

    def surplus(self) -> list[tuple[Claim, Outcome]]:
        found: list[tuple[Claim, Outcome]] = []
        for number in [number for lane in self._shares.paused for number in self._by_lane[lane]]:
            found += [(claim, Release()) for claim in self._take_out(number)]
        if not self._limiters:
            return found
        now = _now()
        for name, limiter in self._limiters.items():
            room = limiter.room(now)
            # The same resource in two lanes was claimed for both: they take turns to keep what they got.
            lines = [*range(self._turn % len(self._lines), len(self._lines)), *range(self._turn % len(self._lines))]
            for number in lines:
                if name in self._lines[number].limits:
                    found += [(claim, Release()) for claim in self._take_out(number, but=room)]
                    room -= len(self._at_hand[number])
        return found + self._strangers(now)

    def _take_out(self, line: int, but: int = 0) -> list[Claim]:
        """All that is at hand in a line, but the first few."""
        claims, taken = self._at_hand[line], []
        while len(claims) > but:
            taken.append(claims.pop())
        self._gone[line] += len(taken)
        return taken

    def _strangers(self, now: int) -> list[tuple[Claim, Outcome]]:
        """Jobs that need a resource in a queue that is not its own: they are put off, or they would come back at once."""
        found: list[tuple[Claim, Outcome]] = []
        for number, line in enumerate(self._lines):
            for claim in list(self._at_hand[number]):
                name = self._needs.get(claim.job.kind)
                if name is not None and name not in line.limits and self._limiters[name].room(now) <= 0:
                    self._at_hand[number].remove(claim)
                    self._gone[number] += 1
                    delay = max(SECOND, self._limiters[name].until - now)
                    found.append((claim, Refuse(delay, error=f"resource {name} has no room now")))
        return found

    def ask(self, free: int, ahead: int, kick: bool) -> None:
        self._look_ahead(ahead)
        for name in self._limiters:
            self._look(name)
        held = self._held()
        used = self._used(held)
        asked = (self._shares.total + sum(self._ahead) - sum(held), *[self._limits[name] - used[name] for name in self._limits])
        grown = self._again or not self._asked or any(new > old for new, old in zip(asked, self._asked, strict=True))
        self._asked, self._again = asked, False
        if grown and kick:
            self._office.committer.kick()

    def _look_ahead(self, ahead: int) -> None:
        if count := sum(self._ends):
            parts = zip(self._shares_of_ends, self._ends, strict=True)
            self._shares_of_ends = [0.8 * part + 0.2 * ends / count for part, ends in parts]
            self._ends = [0] * len(self._ends)
        self._ahead = [int(ahead * part) for part in self._shares_of_ends]

    def _look(self, name: str) -> None:
        """Let the committing thread know the limit of a resource, and whoever listens."""
        limiter, now = self._limiters[name], _now()
        self._limits[name] = limiter.limit if now >= limiter.until else 0
        if limiter.until > now and name not in self._timers:
            self._timers[name] = self._loop.call_later((limiter.until - now) / SECOND, self._reopen, name)
        if (before := self._told[name]) != limiter.limit:
            self._told[name] = limiter.limit
            if self._office.bus.wants(LimitChanged):
                waits = max(0, limiter.until - now) / SECOND
                self._office.bus.publish(LimitChanged(name, limiter.limit, before, limiter.running, waits))

    def _reopen(self, name: str) -> None:
        del self._timers[name]
        if self._is_open:
            self.ask(1, sum(self._ahead), kick=True)

    def find(self, id: str) -> Claim | None:
        for number, claims in enumerate(self._at_hand):
            for claim in claims:
                if claim.id == id:
                    claims.remove(claim)
                    self._gone[number] += 1
                    return claim
        return None

    def clear(self) -> list[Claim]:
        return [claim for line in range(len(self._lines)) for claim in self._take_out(line)]


def _now() -> int:
    return time.monotonic_ns() // 1000
