"""What follows from a batch: events, retry hints for full queues, the outage flag, and claims with a lost
reply."""

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
from towpath.events import BatchCommitted, Bus, JobsAppended, JobsLost, QueueFullSeen, UpkeepDone
from towpath.ledger import Answer, Ledger

log = get_logger("towpath.ledger")


def has_listeners(bus: Bus) -> bool:
    """True if an event of `publish` has a listener."""
    wants = bus.wants
    appends = wants(BatchCommitted) or wants(JobsAppended) or wants(QueueFullSeen)
    return appends or wants(UpkeepDone) or wants(JobsLost)


def publish(bus: Bus, commands: Sequence[Command], answers: Sequence[Answer], seconds: float) -> None:
    """Publish the events of a batch that took `seconds` in the ledger."""
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
    if bus.wants(JobsLost):
        for answer in answers:
            if isinstance(answer, Upkept) and answer.failed:
                bus.publish(JobsLost(answer.failed))
    if bus.wants(UpkeepDone):
        for answer in answers:
            if isinstance(answer, Upkept) and not _is_empty(answer):
                bus.publish(
                    UpkeepDone(answer.reaped, answer.expired, answer.woken, answer.purged, answer.swept)
                )


def _is_empty(answer: Answer) -> bool:
    """True if the command changed nothing. Idle engines claim without a result several times a second."""
    if isinstance(answer, Upkept):
        return not (answer.reaped or answer.expired or answer.woken or answer.purged or answer.swept)
    return isinstance(answer, Claimed) and not answer.claims


def _job_count(command: Command, answer: Answer) -> int:
    if isinstance(answer, Claimed):
        return len(answer.claims)
    return isinstance(answer, Settled) + sum(1 for _ in _new_specs(command, answer))


def _new_specs(command: Command, answer: Answer) -> Iterator[Spec]:
    """The appended specs, including children of a settled job. A spec with a taken key is not a new
    job."""
    if isinstance(command, Append) and isinstance(answer, Appended):
        for spec, placed in zip(command.specs, answer.jobs, strict=True):
            if placed.id == spec.id:
                yield spec
    elif (
        isinstance(command, Settle) and command.spawn and isinstance(answer, Settled) and answer.state is DONE
    ):
        yield from command.spawn


SAMPLE_INTERVAL: Final = 1.0
"""Seconds between two samples of a queue."""
WINDOW: Final = 30.0
"""Seconds that a rate is measured over. Older samples are dropped."""
MIN_HINT, MAX_HINT = 0.1, 60.0
"""Bounds of a hint, in seconds."""


class _FinishedSample(NamedTuple):
    at: float
    finished: int


class RetryHints:
    """Estimates from the rate of finished jobs when a full queue will have room. Safe from any thread."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: dict[str, tuple[_FinishedSample, _FinishedSample]] = {}
        """For each queue that was full: the first sample of its rate, and the last one."""

    def hinted(self, full: QueueFull) -> QueueFull:
        """The refusal with a measured `retry_after`; unchanged if there are not two samples."""
        if "capacity" not in full.details:
            return full
        queue, excess = (
            full.details["queue"],
            full.details["depth"] + full.details["asked"] - full.details["capacity"],
        )
        with self._lock:
            try:
                first, last = self._sample(queue, self._clock())
            except TowpathError:
                return full
        seconds, finished = last.at - first.at, last.finished - first.finished
        if not seconds:
            return full
        # If no job has finished, the only estimate is the observed time.
        hint = excess * seconds / finished if finished else seconds
        return type(full)(**{**full.details, "retry_after": round(min(MAX_HINT, max(MIN_HINT, hint)), 1)})

    def _sample(self, queue: str, now: float) -> tuple[_FinishedSample, _FinishedSample]:
        known = self._samples.get(queue)
        if known is not None and now < known[1].at + SAMPLE_INTERVAL:
            return known
        view = self._ledger.queue(queue)
        sample = _FinishedSample(now, 0 if view is None else view.counts.finished)
        if known is None or now > known[1].at + WINDOW or sample.finished < known[1].finished:
            # The first sample for a long time, or retention has removed finished jobs.
            first = sample
        else:
            first = known[0] if now <= known[0].at + WINDOW else known[1]
        self._samples[queue] = first, sample
        return first, sample


class Outage:
    """Logs the begin and the end of an outage of the ledger once each. Any thread may notice it; the next
    commit ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None
        self._batches = 0

    def noticed(self, error: TowpathError, batches: int = 0) -> None:
        """`batches`: the number of batches that failed."""
        with self._lock:
            begins = self._since is None
            if self._since is None:
                self._since = time.monotonic()
            self._batches += batches
        if begins:
            log.warning(
                "the ledger is unavailable: %s. Running jobs go on; their settles are kept and retried until "
                "the ledger is back.",
                error,
            )
        else:
            log.debug("the ledger is still unavailable: %s", error)

    def over(self) -> None:
        if self._since is None:
            return
        with self._lock:
            since, batches = self._since, self._batches
            self._since, self._batches = None, 0
        if since is not None:
            away = time.monotonic() - since
            log.info(
                "the ledger is back after %.1f s; %d batches failed in that time and were retried",
                away,
                batches,
            )


READ_TIMES: Final = (0.0, 1.0, 5.0, 30.0)
"""Seconds after a lost reply at which the ledger is read. A server may commit a batch after its connection is
lost, so one read is not enough there; an embedded ledger needs only the first."""
PAGE: Final = 1000
MAX_CLAIMS: Final = 50_000
"""Number of recorded claims above which ended ones are removed: a message that is never settled stays
recorded until then."""


class ReceivedClaims:
    """Every claim that this process received and has not settled. If the reply to a claim is lost, the claims
    that the ledger holds for this process and that are not recorded here are released. All methods are called
    under the commit lock."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._claims: dict[str, int] = {}
        """Job id -> fence."""
        self._max_claims = MAX_CLAIMS
        self._repeats = ledger.repeats
        self._owners: set[str] = set()
        """Owners of the claims with a lost reply."""
        self._reads: list[float] = []

    def applied(self, commands: Sequence[Command], answers: Sequence[Answer]) -> None:
        """Record what a batch claimed and settled."""
        claims = self._claims
        command: Any
        for command, answer in zip(commands, answers, strict=True):
            kind = type(answer)
            if kind is Settled or kind is LostClaim:
                if claims.get(command.id) == getattr(command, "fence", None):
                    del claims[command.id]
            elif kind is Claimed:
                claims.update([(claim.job.id, claim.job.fence) for claim in answer.claims])  # type: ignore[union-attr]
            elif kind is Renewed:
                self._lost(command.held, answer)  # type: ignore[arg-type]
        if self._ledger.repeats != self._repeats:
            self._repeats = self._ledger.repeats
            self.failed(commands)
        if len(claims) > self._max_claims:
            self._prune()

    def failed(self, commands: Sequence[Command]) -> None:
        """A batch raised an error, or was applied a second time: the first transaction may have been
        committed."""
        claims = [command for command in commands if type(command) is Claim]
        if owners := {claim.terms(want)[0] for claim in claims for want in claim.wants}:
            self._owners |= owners
            now = self._clock()
            times = READ_TIMES if self._ledger.capabilities.remote else READ_TIMES[:1]
            self._reads = [now + seconds for seconds in times]

    @property
    def read_due(self) -> bool:
        """True if the ledger must be read now, because the reply to a claim was lost."""
        return bool(self._reads) and self._clock() >= self._reads[0]

    def releases(self) -> list[Settle]:
        """Read the ledger; return a release for each claim that this process never received."""
        claims = self._claims
        found: list[Settle] = []
        for job in self._running():
            if claims.get(job.id) != job.fence:
                found.append(Settle(job.id, job.fence, Release()))
        del self._reads[0]
        if not self._reads:
            self._owners.clear()
        return found

    def _running(self) -> Iterator[Job]:
        """The running jobs of these owners."""
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
            if id in lost and self._claims.get(id) == fence:
                del self._claims[id]

    def _prune(self) -> None:
        jobs = self._ledger.get_many(list(self._claims), bodies=False)
        self._claims = {
            id: fence
            for id, fence in self._claims.items()
            if (job := jobs.get(id)) is not None and job.state is State.RUNNING and job.fence == fence
        }
        self._max_claims = max(MAX_CLAIMS, 2 * len(self._claims))
