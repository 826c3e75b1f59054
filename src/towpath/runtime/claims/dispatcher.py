"""Matches claims with waiters: worker slots, long-polls and subscribers.

Waiters for the same queues form a line and are served in the order of their arrival. A batch claims for the
lines that may get a job, at most `MAX_WANTS` waiters at a time, so the work under the commit lock does not
grow with the number of waiters. No claim is kept here: it is delivered at once, or released if its waiter has
left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Final

from towpath.core.checks import matches
from towpath.core.commands import MAX_BULK, MAX_WANTS, Append, Claimed, Settle, Want
from towpath.core.commands import Claim as ClaimCommand
from towpath.core.job import SUSPECT, ClaimedJob, Job, Release
from towpath.errors import LedgerClosed, TowpathError
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Replied, ignore

ALL_LINES: Final = 64
"""With at most this many lines every batch claims for all of them. With more, a batch claims for the queues
that it appends to and for new waiters; a pass over all lines follows a commit, with a pause in between."""
LINE_SHARE: Final = 16
"""Waiters of one line that a claim serves, if there are more. After a claim that returned a job for each, the
next one serves as many as fit into a claim beside the other lines."""
PASS_SHARE, MAX_PASS_PAUSE = 20, 0.5
"""The pause after a pass over the lines is so many times its duration, at most these seconds."""
PASS_INTERVAL, IDLE_SHARE = 1.0, 100
"""Seconds after which a pass begins in any case, and the least multiple of its duration: a rate limit that
opens writes nothing to the ledger."""


class Waiter:
    """`want` is the number of claims it takes; `once` how many of them may be jobs with a single attempt
    (None: all). `suspects` is the number of suspects it takes in total, of which it has received `given`
    (None: no limit). `without` is that of `Want`. `owner` replaces the owner of the dispatcher. With
    `demand`, `want` and `once` are read from that function before every claim, under the commit lock; the
    function may set `suspects` and `without`.

    `deliver`, `failed` (with the error of a failed batch) and `empty` are called in the committing thread;
    they must be quick and must not raise. `empty`: a claim returned no job for the waiter. It is called after
    every such claim if there is a `demand`, else once after each `add` and `more`."""

    def __init__(
        self,
        queues: Sequence[str],
        deliver: Callable[[list[ClaimedJob]], None],
        lease: int,
        failed: Callable[[TowpathError], None] | None = None,
        empty: Callable[[], None] | None = None,
        demand: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self.queues = ",".join(queues)
        self.deliver = deliver
        self.failed = failed
        self.empty = empty
        self.lease = lease
        self.demand = demand
        self.owner: str | None = None
        self.want = 0
        self.once: int | None = None
        self.suspects: int | None = None
        self.without: tuple[str, ...] = ()
        self.given = 0

    def takes(self, job: Job) -> bool:
        suspicious = job.losses >= SUSPECT and self.suspects is not None and self.given >= self.suspects
        return self.want > 0 and not suspicious

    def get(self, job: Job) -> None:
        self.want -= 1
        self.given += job.losses >= SUSPECT


Deliveries = dict[Waiter, list[ClaimedJob]]


class _Line:
    """The waiters for the same queues that want a job, the longest waiting first."""

    __slots__ = ("asked", "cut", "exact", "fed", "queues", "standing", "unanswered", "waiters")

    def __init__(self, queues: str) -> None:
        self.queues = queues
        self.exact = "*" not in queues and "," not in queues
        self.waiters: dict[Waiter, None] = {}
        self.standing = 0
        """How many of them have a `demand`."""
        self.unanswered: dict[Waiter, None] = {}
        """Waiters without a `demand`: their `empty` is called if the next claim returns nothing for them."""
        self.asked = -1
        """The last pass that claimed for this line."""
        self.cut = False
        """The last claim left out some of its waiters."""
        self.fed = False
        """The last claim left out waiters, and returned all jobs that the others wanted."""


def _terms(waiter: Waiter) -> tuple[str | None, int, tuple[str, ...]]:
    return waiter.owner, waiter.lease, waiter.without


class _Asked:
    """A want of the current claim, and the waiters that it is for: neighbours in one line, with the same
    terms."""

    __slots__ = ("at", "got", "line", "n", "once", "suspects", "terms", "unanswered", "waiters")

    def __init__(self, line: _Line, waiter: Waiter) -> None:
        self.line = line
        self.terms = _terms(waiter)
        self.waiters: list[Waiter] = []
        self.n = self.once = self.suspects = self.at = self.got = 0
        # Waiters that come later may not be answered by this claim. The first want of a line has them.
        self.unanswered, line.unanswered = line.unanswered, {}

    def add(self, waiter: Waiter) -> None:
        want = waiter.want
        self.waiters.append(waiter)
        self.n += want
        self.once += want if waiter.once is None else waiter.once
        self.suspects += want if waiter.suspects is None else max(0, waiter.suspects - waiter.given)

    def want(self) -> Want:
        self.n, self.once, self.suspects = (
            min(self.n, MAX_BULK),
            min(self.once, MAX_BULK),
            min(self.suspects, MAX_BULK),
        )
        return Want(self.line.queues, self.n, self.once, None, self.suspects, *self.terms)

    def takes(self, job: Job, owner: str) -> bool:
        """Whether the job may have been claimed for this want. The claims of a reply are in the order of the
        wants, so the first want that takes a job is the one, or is as good."""
        queues, (own, lease, _) = self.line.queues, self.terms
        return (
            self.n > 0
            and job.lease_len == lease
            and job.owner == (own or owner)
            and (job.max_attempts != 1 or self.once > 0)
            and (job.losses < SUSPECT or self.suspects > 0)
            and (job.queue == queues or (not self.line.exact and matches(queues, job.queue)))
        )

    @property
    def full(self) -> bool:
        """The want has taken all its jobs; the queue may have more."""
        return self.got > 0 and (self.n <= 0 or self.once <= 0 or self.suspects <= 0)

    def count(self, job: Job) -> None:
        self.got += 1
        self.n -= 1
        self.once -= job.max_attempts == 1
        self.suspects -= job.losses >= SUSPECT


class Dispatcher:
    """Safe from any thread. `wanted` and `taken` are called by the committer."""

    def __init__(self, committer: Committer, owner: str) -> None:
        self._committer = committer
        self._owner = owner
        self._lock = threading.Lock()
        self._registering = threading.RLock()
        """Around the change from no waiter to one and back: the committer must not have the demand twice."""
        self._waiters: set[Waiter] = set()
        self._lines: dict[str, _Line] = {}
        self._standing: OrderedDict[_Line, None] = OrderedDict()
        """Lines of every claim: with a worker, or with a pattern or several queues."""
        self._rotating: OrderedDict[_Line, None] = OrderedDict()
        """The other lines, the least recently asked first."""
        self._pass = 0
        """The number of the current pass. A line with a lower number is due."""
        self._pass_began, self._pass_cost, self._claim_began = time.monotonic(), 0.0, 0.0
        self._asked: list[_Asked] = []
        self._standing_first = True
        self.stale = False
        """As in `Refreshable`."""

    @property
    def waiting(self) -> int:
        """The number of waiters."""
        return len(self._waiters)

    def add(self, waiter: Waiter) -> None:
        self._committer.refuse_nested()
        with self._registering:
            with self._lock:
                first = not self._waiters
                self._waiters.add(waiter)
                self._enqueue(waiter)
            if first:
                self._committer.add_demand(self)
        if not first and (waiter.want or waiter.demand is not None):
            self._committer.kick()

    def more(self, waiter: Waiter, n: int) -> None:
        """Raise the waiter's `want` by n."""
        with self._lock:
            waiter.want += n
            if waiter in self._waiters:
                self._enqueue(waiter)
        self._committer.kick()

    def remove(self, waiter: Waiter) -> None:
        with self._registering:
            with self._lock:
                if waiter not in self._waiters:
                    return
                self._waiters.remove(waiter)
                self._dequeue(waiter)
                last = not self._waiters
            if last:
                self._committer.drop_demand(self)

    def returned(self, queue: str) -> None:
        """A job of the queue is ready again. With few lines, the batch that did it has claimed for all."""
        with self._lock:
            if (line := self._lines.get(queue)) is None or len(self._rotating) <= ALL_LINES:
                return
            self._make_due(line)
        self._committer.kick()

    def close(self) -> None:
        """No claim arrives any more: every waiter without a `demand` gets `LedgerClosed`."""
        with self._lock:
            callbacks = [each.failed for each in self._waiters if each.demand is None]
        for failed in callbacks:
            if failed is not None:
                failed(LedgerClosed(path="the engine"))

    def refresh(self) -> None:
        """Begin a pass: something was committed, perhaps by another process."""
        with self._lock:
            if len(self._rotating) <= ALL_LINES:
                return
            if time.monotonic() < self._pass_began + min(MAX_PASS_PAUSE, PASS_SHARE * self._pass_cost):
                self.stale = True
                return
            self._start_pass()
        self._committer.kick()

    # The lines; under the lock

    def _enqueue(self, waiter: Waiter) -> None:
        """Put the waiter at the end of its line, if it is not in it, and make the line due."""
        standing = waiter.demand is not None
        if not (waiter.want or standing):
            return
        line = self._lines.get(waiter.queues)
        if line is None:
            line = self._lines[waiter.queues] = _Line(waiter.queues)
        if waiter not in line.waiters:
            line.waiters[waiter] = None
            line.standing += standing
        if waiter.empty is not None and not standing:
            line.unanswered[waiter] = None
        if line.standing or not line.exact:
            self._rotating.pop(line, None)
            self._standing[line] = None
        else:
            self._make_due(line)

    def _make_due(self, line: _Line) -> None:
        """Ask for this line next, if it is not part of every claim."""
        if line.exact and not line.standing and self._lines.get(line.queues) is line:
            self._rotating[line] = None
            self._rotating.move_to_end(line, last=False)
            line.asked = -1

    def _dequeue(self, waiter: Waiter) -> None:
        line = self._lines.get(waiter.queues)
        if line is None or waiter not in line.waiters:
            return
        del line.waiters[waiter]
        line.unanswered.pop(waiter, None)
        line.standing -= waiter.demand is not None
        if not line.waiters:
            del self._lines[line.queues]
        if not (line.waiters and (line.standing or not line.exact)):
            self._standing.pop(line, None)
            if line.waiters:
                self._make_due(line)
            else:
                self._rotating.pop(line, None)

    def _start_pass(self) -> None:
        self._pass += 1
        self._pass_began, self._pass_cost = time.monotonic(), 0.0

    # In the committing thread

    def wanted(self) -> ClaimCommand | None:
        asked: list[_Asked] = []
        with self._lock:
            self._asked = asked
            self._claim_began = time.monotonic()
            idle = max(PASS_INTERVAL, IDLE_SHARE * self._pass_cost)
            if len(self._rotating) <= ALL_LINES or self._claim_began > self._pass_began + idle:
                self._start_pass()
            room = MAX_WANTS
            for line in self._next_lines():
                room -= self._ask(line, asked, room)
                if room <= 0:
                    break
        if not asked:
            return None
        wants = tuple([each.want() for each in asked])
        return ClaimCommand(owner=self._owner, wants=wants, lease=asked[0].terms[1])

    def _next_lines(self) -> Iterator[_Line]:
        """The lines of the next claim, by turns the standing ones or the others first."""
        if not self._rotating:
            yield from list(self._standing)
            return
        many = len(self._rotating) > ALL_LINES
        if many:
            self._make_appended_due()
        # A pass may take all the room of a claim.
        standing_first = self._standing_first or many
        self._standing_first = not self._standing_first
        if standing_first:
            yield from self._next_standing()
        while self._rotating and (line := next(iter(self._rotating))).asked < self._pass:
            yield line
        if not standing_first:
            yield from self._next_standing()

    def _next_standing(self) -> Iterator[_Line]:
        for line in list(self._standing):
            self._standing.move_to_end(line)
            yield line

    def _make_appended_due(self) -> None:
        """Ask next for the queues that the batch appends to."""
        queues: set[str] = set()
        for pending in self._committer.batch:
            for command in pending.commands:
                if type(command) is Append:
                    queues.update([spec.queue for spec in command.specs])
                elif type(command) is Settle and command.spawn:
                    queues.update([spec.queue for spec in command.spawn])
        for queue in queues:
            if (line := self._lines.get(queue)) is not None:
                self._make_due(line)

    def _ask(self, line: _Line, asked: list[_Asked], room: int) -> int:
        """Add the wants of a line; return the number of waiters that were read."""
        line.asked, line.cut = self._pass, False
        if line in self._rotating:
            self._rotating.move_to_end(line)
        share = max(LINE_SHARE, MAX_WANTS // len(self._lines)) if line.fed else LINE_SHARE
        most, read, run = min(room, share), 0, None
        for waiter in line.waiters:
            if read == most:
                line.cut = True
                break
            read += 1
            if waiter.demand is not None:
                waiter.want, waiter.once = waiter.demand()
                if waiter.want <= 0:
                    continue
            if run is None or run.terms != _terms(waiter):
                run = _Asked(line, waiter)
                asked.append(run)
            run.add(waiter)
        return max(1, read)

    def taken(self, reply: Claimed | TowpathError) -> None:
        if not isinstance(reply, Claimed):
            self._fail(reply)
            return
        asked, self._asked = self._asked, []
        served = self._deliver(asked, reply.claims) if reply.claims else {}
        with self._lock:
            again = False
            for line in {each.line for each in asked if each.line.cut or each.line.fed}:
                line.fed = False
            for each in asked:
                # The waiters that the claim left out may get a job too.
                if each.full and each.line.cut:
                    again = each.line.fed = True
                    self._make_due(each.line)
            callbacks = [waiter.empty for each in asked for waiter in self._empty(each, served)]
            if len(self._rotating) > ALL_LINES:
                self._pass_cost += time.monotonic() - self._claim_began
            again |= bool(self._rotating) and next(iter(self._rotating)).asked < self._pass
        for empty in callbacks:
            if empty is not None:
                empty()
        if again:
            self._committer.kick()

    def _empty(self, asked: _Asked, served: Container[Waiter]) -> Iterator[Waiter]:
        """The waiters for which the claim returned no job."""
        if asked.unanswered and asked.line.cut and asked.full:
            self._restore(asked)
        for waiter in asked.unanswered:
            if waiter in self._waiters and waiter not in served:
                yield waiter
        for waiter in asked.waiters:
            if waiter.demand is not None and waiter.empty is not None and waiter not in served:
                yield waiter

    def _restore(self, asked: _Asked) -> None:
        """The claim was no answer to these waiters; the next one may be."""
        for waiter in asked.unanswered:
            if waiter in asked.line.waiters:
                asked.line.unanswered[waiter] = None
        asked.unanswered = {}

    def _fail(self, error: TowpathError) -> None:
        """Pass a fatal error to all waiters, another one to the waiters of the claim."""
        with self._lock:
            self._pass += 1
            for each in self._asked:
                self._restore(each)
            asked = [waiter for each in self._asked for waiter in each.waiters]
            callbacks = [waiter.failed for waiter in (self._waiters if error.fatal else asked)]
            self._asked = []
        for failed in callbacks:
            if failed is not None:
                failed(error)

    def _deliver(self, asked: Sequence[_Asked], given: Sequence[ClaimedJob]) -> Deliveries:
        deliveries: Deliveries = {}
        orphans: list[ClaimedJob] = []
        with self._lock:
            if len(asked) == 1 and (only := self._only_waiter(asked[0], len(given))) is not None:
                # All claims are for the only waiter.
                for claim in given:
                    only.get(claim.job)
                deliveries[only] = list(given)
                given = ()
            at = 0
            for claim in given:
                job = claim.job
                while at < len(asked) and not asked[at].takes(job, self._owner):
                    at += 1
                waiter = None
                if at < len(asked):
                    asked[at].count(job)
                    waiter = self._find_waiter(asked[at], job)
                if waiter is None:
                    orphans.append(claim)
                else:
                    waiter.get(job)
                    deliveries.setdefault(waiter, []).append(claim)
            for waiter in deliveries:
                self._served(waiter)
        for waiter, claims in deliveries.items():
            waiter.deliver(claims)
        release(self._committer, orphans)
        return deliveries

    def _only_waiter(self, asked: _Asked, n: int) -> Waiter | None:
        waiter = asked.waiters[0]
        fits = len(asked.waiters) == 1 and waiter.want >= n and waiter in self._waiters
        if fits:
            asked.got, asked.n = n, asked.n - n
        return waiter if fits else None

    def _find_waiter(self, asked: _Asked, job: Job) -> Waiter | None:
        """The first waiter of the want that takes the job. If all have left, the first of the line."""
        waiters = asked.waiters
        while asked.at < len(waiters) and (
            waiters[asked.at].want <= 0 or waiters[asked.at] not in self._waiters
        ):
            asked.at += 1
        for at in range(asked.at, len(waiters)):
            if waiters[at] in self._waiters and waiters[at].takes(job):
                return waiters[at]
        other = next(iter(asked.line.waiters), None)
        fits = other is not None and _terms(other) == asked.terms
        return other if fits and other is not None and other.takes(job) else None

    def _served(self, waiter: Waiter) -> None:
        """A waiter that wants more goes to the end of its line; one that does not leaves the line."""
        line = self._lines.get(waiter.queues)
        if line is None or waiter not in line.waiters:
            return
        line.unanswered.pop(waiter, None)
        if waiter.want <= 0 and waiter.demand is None:
            self._dequeue(waiter)
        elif len(line.waiters) > 1:
            del line.waiters[waiter]
            line.waiters[waiter] = None


def release(committer: Committer, claims: Sequence[ClaimedJob], call: Replied = ignore) -> None:
    """Release claims as if they had never been claimed; `call` is that of `Committer.post`. If it fails, the
    leases expire."""
    if claims:
        with contextlib.suppress(LedgerClosed):
            committer.post([Settle(claim.id, claim.fence, Release()) for claim in claims], call)
