"""What a batch is told about, once it is durable. Nothing is built that nobody listens to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from towpath.core.commands import Append, Appended, Claim, Claimed, Command, Renewed, Settle, Settled, Upkept
from towpath.core.job import DONE, Job, Release, Spec, State
from towpath.core.views import Query
from towpath.errors import LostClaim, QueueFull, TowpathError
from towpath.escapes import get_logger
from towpath.events import BatchCommitted, Bus, JobsAppended, QueueFullSeen, UpkeepDone
from towpath.ledger import Answer, Ledger


def has_listeners(bus: Bus) -> bool:
    """Does anybody listen to what `tell` tells?"""
    wants = bus.wants
    return wants(BatchCommitted) or wants(JobsAppended) or wants(QueueFullSeen) or wants(UpkeepDone)


def publish(bus: Bus, commands: Sequence[Command], answers: Sequence[Answer], seconds: float) -> None:
    """`seconds` is how long the ledger took for it."""
    if bus.wants(BatchCommitted) and not all(_is_empty(answer) for answer in answers):
        jobs = sum(_job_count(command, answer) for command, answer in zip(commands, answers, strict=True))
        bus.publish(BatchCommitted(len(commands), jobs, seconds))
    if bus.wants(JobsAppended):
        queues: dict[str, list[str]] = {}
        for command, answer in zip(commands, answers, strict=True):
            for spec in _new_specs(command, answer):
                queues.setdefault(spec.queue, []).append(spec.id)
        for queue, ids in queues.items():
            bus.publish(JobsAppended(queue, tuple(ids)))
    if bus.wants(QueueFullSeen):
        for answer in answers:
            if isinstance(answer, QueueFull) and "capacity" in answer.details:
                bus.publish(
                    QueueFullSeen(*[answer.details[name] for name in ("queue", "depth", "capacity", "asked")])
                )
    if bus.wants(UpkeepDone):
        for answer in answers:
            if isinstance(answer, Upkept) and not _is_empty(answer):
                bus.publish(
                    UpkeepDone(answer.reaped, answer.expired, answer.woken, answer.purged, answer.swept)
                )


def _is_empty(answer: Answer) -> bool:
    """A look that found nothing writes nothing: idle engines look several times a second."""
    if isinstance(answer, Upkept):
        return not (answer.reaped or answer.expired or answer.woken or answer.purged or answer.swept)
    return isinstance(answer, Claimed) and not answer.claims


def _job_count(command: Command, answer: Answer) -> int:
    if isinstance(answer, Claimed):
        return len(answer.claims)
    return isinstance(answer, Settled) + sum(1 for _ in _new_specs(command, answer))


def _new_specs(command: Command, answer: Answer) -> Iterator[Spec]:
    """What was appended, children of a settled job included. A spec whose key was taken is no new job."""
    if isinstance(command, Append) and isinstance(answer, Appended):
        for spec, placed in zip(command.specs, answer.jobs, strict=True):
            if placed.id == spec.id:
                yield spec
    elif (
        isinstance(command, Settle) and command.spawn and isinstance(answer, Settled) and answer.state is DONE
    ):
        yield from command.spawn


SAMPLE_INTERVAL: Final = 1.0
"""Seconds between two looks at a queue."""
WINDOW: Final = 30.0
"""Seconds that a rate is measured over. What was seen longer ago than that, with nobody refused since, says
nothing any more."""
MIN_HINT, MAX_HINT = 0.1, 60.0
"""Bounds of a hint, in seconds."""


class _FinishedSample(NamedTuple):
    at: float
    finished: int


class RetryHints:
    """Safe from any thread."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._lock = threading.Lock()
        self._looks: dict[str, tuple[_FinishedSample, _FinishedSample]] = {}
        """Of each queue that was full: the look that its rate begins with, and the last one."""

    def hinted(self, full: QueueFull) -> QueueFull:
        """The same refusal with a hint that is measured, or as it is where nothing is known."""
        if "capacity" not in full.details:
            return full
        queue, excess = (
            full.details["queue"],
            full.details["depth"] + full.details["asked"] - full.details["capacity"],
        )
        with self._lock:
            try:
                first, last = self._freshen(queue, self._clock())
            except TowpathError:
                return full
        seconds, finished = last.at - first.at, last.finished - first.finished
        if not seconds:
            return full
        # While nothing drains, the time that we have seen it for is all that can be said.
        hint = excess * seconds / finished if finished else seconds
        return type(full)(**{**full.details, "retry_after": round(min(MAX_HINT, max(MIN_HINT, hint)), 1)})

    def _freshen(self, queue: str, now: float) -> tuple[_FinishedSample, _FinishedSample]:
        known = self._looks.get(queue)
        if known is not None and now < known[1].at + SAMPLE_INTERVAL:
            return known
        view = self._ledger.queues().get(queue)
        look = _FinishedSample(now, 0 if view is None else view.counts.finished)
        if known is None or now > known[1].at + WINDOW or look.finished < known[1].finished:
            # The first look for a long time, or retention took finished jobs away.
            first = look
        else:
            first = known[0] if now <= known[0].at + WINDOW else known[1]
        self._looks[queue] = first, look
        return first, look


log = get_logger("towpath.ledger")


class Outage:
    """Any thread may notice it; a batch that was committed ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._batches = 0

    def noticed(self, error: TowpathError, batches: int = 0) -> None:
        """`batches`: how many failed by it."""
        with self._lock:
            begins = self._since is None
            if self._since is None:
                self._since = time.monotonic()
            self._batches += batches
        if begins:
            log.warning(
                "%s. What is under way is kept, and it is tried again and again until it succeeds.", error
            )
        else:
            log.debug("still: %s", error)

    def over(self) -> None:
        if self._since is None:
            return
        with self._lock:
            since, batches = self._since, self._batches
            self._since, self._batches = None, 0
        if since is not None:
            away = time.monotonic() - since
            log.info(
                "the ledger is back after %.1f s; %d batches failed meanwhile and were tried again",
                away,
                batches,
            )


READ_TIMES: Final = (0.0, 1.0, 5.0, 30.0)
"""Seconds after a lost reply at which the ledger is read. A server may still commit a batch whose connection
is already lost, so one read is not enough there; an embedded ledger needs only the first."""
PAGE: Final = 1000
MAX_CLAIMS: Final = 50_000
"""Claims above which those that have ended are looked for: a message that is never settled stays known until
then."""


class ReceivedClaims:
    """Every claim that was answered to this process and is not settled yet. All methods are called under the
    commit lock."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._known: dict[str, int] = {}
        """The fence of each claimed job."""
        self._most = MAX_CLAIMS
        self._repeats = ledger.repeats
        self._owners: set[str] = set()
        """Owners of the claims whose reply was lost."""
        self._looks: list[float] = []

    def applied(self, commands: Sequence[Command], answers: Sequence[Answer]) -> None:
        """Record what a batch claimed and settled."""
        known = self._known
        command: Any
        for command, answer in zip(commands, answers, strict=True):
            kind = type(answer)
            if kind is Settled or kind is LostClaim:
                if known.get(command.id) == getattr(command, "fence", None):
                    del known[command.id]
            elif kind is Claimed:
                known.update([(claim.job.id, claim.job.fence) for claim in answer.claims])  # type: ignore[union-attr]
            elif kind is Renewed:
                self._lost(command.held, answer)  # type: ignore[arg-type]
        if self._ledger.repeats != self._repeats:
            self._repeats = self._ledger.repeats
            self.failed(commands)
        if len(known) > self._most:
            self._prune()

    def failed(self, commands: Sequence[Command]) -> None:
        """A batch raised an error, or was applied a second time: whether the first transaction was committed
        is unknown."""
        if owners := {command.owner for command in commands if type(command) is Claim}:
            self._owners |= owners
            now = self._clock()
            looks = READ_TIMES if self._ledger.capabilities.remote else READ_TIMES[:1]
            self._looks = [now + seconds for seconds in looks]

    @property
    def doubtful(self) -> bool:
        """Is it time to read the ledger for claims whose reply was lost?"""
        return bool(self._looks) and self._clock() >= self._looks[0]

    def releases(self) -> list[Settle]:
        """Read the ledger; a release for each of its claims that this process never received."""
        known = self._known
        found: list[Settle] = []
        for job in self._running():
            if known.get(job.id) != job.fence:
                found.append(Settle(job.id, job.fence, Release()))
        del self._looks[0]
        if not self._looks:
            self._owners.clear()
        return found

    def _running(self) -> Iterator[Job]:
        """What the ledger holds for these owners."""
        for owner in self._owners:
            page: str | None = None
            while True:
                query = Query(
                    states=(State.RUNNING,),
                    owner=owner,
                    oldest_first=True,
                    bodies=False,
                    limit=PAGE,
                    page=page,
                )
                found = self._ledger.find(query)
                yield from found.jobs
                if (page := found.next) is None:
                    break

    def _lost(self, held: Sequence[tuple[str, int]], answer: Renewed) -> None:
        lost = set(answer.lost)
        for id, fence in held if lost else ():
            if id in lost and self._known.get(id) == fence:
                del self._known[id]

    def _prune(self) -> None:
        jobs = self._ledger.get_many(list(self._known), bodies=False)
        self._known = {
            id: fence
            for id, fence in self._known.items()
            if (job := jobs.get(id)) is not None and job.state is State.RUNNING and job.fence == fence
        }
        self._most = max(MAX_CLAIMS, 2 * len(self._known))
