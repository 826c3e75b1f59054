"""Events as values, and the bus that logs, metrics, dashboards and tests subscribe to.

Nothing here is durable: an event reports what the ledger has stored, or what only this process observed.
Without subscribers an event costs nothing, because a publisher asks first and builds the event only then:

    if bus.wants(JobStarted):
        bus.publish(JobStarted(id=..., kind=..., queue=..., attempt=..., waited=...))

Listeners are called in one delivery thread of the bus, in the order of publication. A slow listener delays no
commit, and a listener may make blocking calls of the ledger. The backlog is bounded (`MAX_BACKLOG`);
`Bus.dropped` counts the events that found it full.

A listener that is subscribed with `inline=True` is called in the publishing thread instead (the committer's,
the worker's loop, a handler's). It must be quick, and a ledger call from it may raise `NestedCall`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

from towpath.escapes import escape, get_logger
from towpath.events.delivery import MAX_BACKLOG as MAX_BACKLOG
from towpath.events.delivery import Collected as Collected
from towpath.events.delivery import Delivery

log = get_logger("towpath.events")


@dataclass(frozen=True, slots=True)
class Event:
    """`sentence` is its text in a log, `level` the level. Subscribe to this class to receive every kind in
    `KINDS`."""

    sentence: ClassVar[str] = ""
    level: ClassVar[int] = logging.DEBUG

    def __str__(self) -> str:
        return self.sentence.format_map({field.name: getattr(self, field.name) for field in fields(self)})


E = TypeVar("E", bound=Event)
E2 = TypeVar("E2", bound=Event)
Listener = Callable[[E], object]


# Jobs


@dataclass(frozen=True, slots=True)
class JobsAppended(Event):
    """New jobs of one queue are durable, children of a settled job included. A repeated append is published
    again with the same ids if the ledger cannot detect the repetition. Jobs that the ledger adds itself after
    a group are not published."""

    sentence = "appended to {queue}: {ids}"

    queue: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobsClaimed(Event):
    """This process claimed jobs; they have not started. `JobStarted` has the kind, queue and attempt of
    each."""

    sentence = "{owner} claimed: {ids}"

    ids: tuple[str, ...]
    queues: tuple[str, ...]
    """The queues of the jobs, each once."""
    owner: str


@dataclass(frozen=True, slots=True)
class JobStarted(Event):
    """The handler is called. `waited`: seconds since the job became ready."""

    sentence = "{kind} {id} of {queue} starts attempt {attempt} after waiting {waited:.3f} s"

    id: str
    kind: str
    queue: str
    attempt: int
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class JobSettled(Event):
    """An attempt ended and its outcome is durable. `outcome` is the handler's (done, retry, snooze, release,
    refuse, fail, stop), `state` is the state of the job after it; the last allowed retry leads to the state
    `failed`."""

    sentence = "{kind} {id} of {queue}: {outcome} in {duration:.3f} s at attempt {attempt}, now {state}"

    kind: str
    queue: str
    state: str
    outcome: str
    duration: float
    attempt: int
    id: str
    error: str | None = None
    group: str | None = None

    @property
    def reason(self) -> str:
        """The reason of a failed job, as the ledger stores it: its retries were spent, or it asked for
        none."""
        return (
            {"retry": "exhausted", "fail": "fatal"}.get(self.outcome, self.outcome)
            if self.state == "failed"
            else ""
        )


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """Another process holds, or held, a job that this process still runs. The ledger refuses the outcome of
    this attempt."""

    sentence = "{owner} lost the lease of {kind} {id} of {queue} at attempt {attempt}"
    level = logging.WARNING

    id: str
    kind: str = ""
    queue: str = ""
    attempt: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class JobsLost(Event):
    """Jobs have lost too many leases (`max_losses`) and are dead letters. Published by the process that took
    them back."""

    sentence = "lost for good: {ids}"
    level = logging.WARNING

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HandlerBlocked(Event):
    """An async handler blocks the event loop; published once, when the loop monitor detects it. `where`:
    file, line and function of the handler. `id` and `kind` are empty if several jobs, or none, may be the
    cause: the log names them."""

    sentence = "{kind} {id} has blocked the event loop for {seconds:.1f} s at {where}"
    level = logging.WARNING

    id: str
    kind: str
    seconds: float
    where: str

    def __str__(self) -> str:
        return Event.__str__(self if self.id else replace(self, kind="something", id="unknown"))


# The committer


@dataclass(frozen=True, slots=True)
class BatchCommitted(Event):
    """One transaction was committed. `jobs`: how many jobs it appended, settled and claimed. A claim that
    found nothing is no transaction."""

    sentence = "{commands} commands for {jobs} jobs committed in {seconds:.4f} s"

    commands: int
    jobs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BatchFailed(Event):
    """A batch failed as a whole. If it is `retryable`, the engine repeats its own commands."""

    sentence = "a batch of {commands} commands failed: {error}"
    level = logging.WARNING

    commands: int
    error: str
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class QueueFullSeen(Event):
    """An append was refused because its queue is full."""

    sentence = "queue {queue} is full: {depth} of {capacity} waiting, {asked} more asked"
    level = logging.WARNING

    queue: str
    depth: int
    capacity: int
    asked: int = 1
    retry_after: float = 1.0
    """Seconds after which a retry is useful."""


@dataclass(frozen=True, slots=True)
class QueueDeep(Event):
    """A queue has reached its `warn_depth`. The caretaker publishes it once, and again only after the depth
    was below."""

    sentence = "queue {queue} is deep: {depth} waiting, warn_depth {warn_depth}"
    level = logging.WARNING

    queue: str
    depth: int
    warn_depth: int


# Workers and upkeep


@dataclass(frozen=True, slots=True)
class WorkerStarted(Event):
    sentence = "worker {owner} consumes {queues} with concurrency {concurrency}"
    level = logging.INFO

    owner: str
    queues: tuple[str, ...]
    concurrency: int


@dataclass(frozen=True, slots=True)
class WorkerDraining(Event):
    """The worker claims no new jobs; running jobs have `grace` seconds to end."""

    sentence = "worker {owner} drains: {running} running, {grace:g} s of grace"
    level = logging.INFO

    owner: str
    running: int
    grace: float


@dataclass(frozen=True, slots=True)
class WorkerStopped(Event):
    sentence = "worker {owner} stopped"
    level = logging.INFO

    owner: str


@dataclass(frozen=True, slots=True)
class LimitChanged(Event):
    """The limit of a resource changed: how many jobs of this worker may use it at once. `waits`: seconds for
    which none may, because the service asked for a pause."""

    sentence = (
        "resource {resource}: {before} -> {limit} jobs at once, {running} running, none for {waits:g} s"
    )

    resource: str
    limit: int
    before: int
    running: int = 0
    waits: float = 0.0

    def __str__(self) -> str:
        text = f"resource {self.resource}: {self.before} -> {self.limit} jobs at once, {self.running} running"
        return f"{text}; none starts for {self.waits:g} s" if self.waits else text


@dataclass(frozen=True, slots=True)
class CaretakerElected(Event):
    """This process was elected as the caretaker of the fleet."""

    sentence = "{owner} is the caretaker"
    level = logging.INFO

    owner: str


@dataclass(frozen=True, slots=True)
class UpkeepDone(Event):
    """An upkeep changed something."""

    sentence = "upkeep: {reaped} reaped, {expired} expired, {woken} woken, {purged} purged, {swept} swept"

    reaped: int = 0
    expired: int = 0
    woken: int = 0
    purged: int = 0
    swept: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleFired(Event):
    """A schedule fired. `late`: seconds between `due` and now. `id` is the id of its
    job: a new one, or the one that held its key. Published once, by the worker that stored the next fire."""

    sentence = "schedule {name} fired {late:.3f} s late: job {id}"
    level = logging.INFO

    name: str
    id: str
    due: datetime
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class BreakerChanged(Event):
    """A circuit breaker opened, closed, or became half open. The process that stored the change publishes it
    (half open: the caretaker). `until`: when it becomes half open, None if it closed; `why` is the cause."""

    sentence = "breaker {name} is {state} ({why})"
    level = logging.WARNING

    name: str
    state: str
    until: datetime | None
    why: str


KINDS: tuple[type[Event], ...] = (
    *(JobsAppended, JobsClaimed, JobStarted, JobSettled, LeaseLost, JobsLost, HandlerBlocked),
    *(BatchCommitted, BatchFailed, QueueFullSeen, QueueDeep),
    *(WorkerStarted, WorkerDraining, WorkerStopped, LimitChanged, BreakerChanged),
    *(CaretakerElected, UpkeepDone, ScheduleFired),
)


class _Subscription:
    """One call of `subscribe`."""

    __slots__ = ("active", "inline", "listener")

    def __init__(self, listener: Listener[Any], inline: bool) -> None:
        self.listener = listener
        self.inline = inline
        self.active = True


class _Subscribed(NamedTuple):
    """The subscriptions of one kind of event."""

    inline: tuple[_Subscription, ...] = ()
    queued: tuple[_Subscription, ...] = ()


class Bus:
    """The subscriptions of a process. Any thread may subscribe, publish and unsubscribe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # One dict for life, changed by single steps, so that `wants` and `publish` need no lock.
        self._by_kind: dict[type[Event], _Subscribed] = {}
        self._known_bad: set[int] = set()
        self._delivery = Delivery()
        self.wants: Callable[[type[Event]], bool] = self._by_kind.__contains__
        """True if this kind has a subscriber. Ask before you build an event. (The dict's own method: a call
        costs 30 ns.)"""

    @overload
    def subscribe(
        self, kind: type[E], listener: Listener[E], *, inline: bool = False
    ) -> Callable[[], None]: ...

    @overload
    def subscribe(
        self, kind: tuple[type[E], type[E2]], listener: Listener[E | E2], *, inline: bool = False
    ) -> Callable[[], None]: ...

    @overload
    def subscribe(
        self, kind: tuple[type[Event], ...], listener: Listener[Any], *, inline: bool = False
    ) -> Callable[[], None]: ...

    def subscribe(
        self, kind: type[Any] | tuple[type[Any], ...], listener: Listener[Any], *, inline: bool = False
    ) -> Callable[[], None]:
        """Call `listener` with every event of this kind, or of these; `Event` means all. The returned
        function ends it: pending events are not delivered to this listener any more."""
        given = kind if isinstance(kind, tuple) else (kind,)
        kinds = tuple(dict.fromkeys(each for one in given for each in (KINDS if one is Event else (one,))))
        added = _Subscription(listener, inline)
        with self._lock:
            for each in kinds:
                before = self._by_kind.get(each, _Subscribed())
                self._by_kind[each] = (
                    before._replace(inline=(*before.inline, added))
                    if inline
                    else before._replace(queued=(*before.queued, added))
                )

        def unsubscribe() -> None:
            with self._lock:
                if not added.active:
                    return
                added.active = False
                self._known_bad.discard(id(listener))
                for each in kinds:
                    self._drop(each, added)

        return unsubscribe

    def _drop(self, kind: type[Event], dropped: _Subscription) -> None:
        left = _Subscribed(
            *(tuple(each for each in some if each is not dropped) for some in self._by_kind[kind])
        )
        if left.inline or left.queued:
            self._by_kind[kind] = left
        else:
            del self._by_kind[kind]

    def publish(self, event: Event) -> None:
        """Call the inline listeners, and queue the event for the others. A listener that raises disturbs
        neither the other listeners nor the publisher."""
        found = self._by_kind.get(type(event))
        if found is None:
            return
        for each in found.inline:
            try:
                each.listener(event)
            except Exception:
                self._log_failure(each.listener, event)
        if found.queued:
            self._delivery.put(lambda: self._deliver(event, found.queued))

    def _deliver(self, event: Event, subscriptions: Sequence[_Subscription]) -> None:
        """In the delivery thread."""
        for each in subscriptions:
            try:
                if each.active:
                    each.listener(event)
            except BaseException:
                self._log_failure(each.listener, event)

    def _log_failure(self, listener: Listener[Any], event: Event) -> None:
        with self._lock:
            if id(listener) in self._known_bad:
                return
            self._known_bad.add(id(listener))
        name = getattr(listener, "__qualname__", repr(listener))
        log.exception(
            "the listener %s failed on %s; its next failures are not logged", name, type(event).__name__
        )

    @property
    def dropped(self) -> int:
        """Events that were not delivered because the backlog was full."""
        return self._delivery.dropped

    @property
    def pending(self) -> bool:
        """Is an event queued, or being delivered?"""
        return self._delivery.pending

    def then(self, call: Callable[[], object]) -> None:
        """Call the function in the delivery thread after the events that were published so far."""
        self._delivery.put(call, always=True)

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until the events published so far are delivered; False after `timeout` seconds. A listener
        need not wait."""
        return self._delivery.flush(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Deliver the pending events and end the delivery thread. The next event starts it again."""
        self._delivery.close(timeout)

    @contextlib.contextmanager
    def collect(self, *kinds: type[E]) -> Iterator[Collected[E]]:
        """Collect the events published inside the block (`Event`: of every kind), and wait for them: for
        tests."""
        collected: Collected[E] = Collected()
        unsubscribe = self.subscribe(kinds, collected.add, inline=True)
        try:
            yield collected
        finally:
            unsubscribe()


def log_events(
    bus: Bus, logger: logging.Logger | None = None, level: int = logging.INFO
) -> Callable[[], None]:
    """Write events to `logger` (default `towpath`) by their sentence, with the event itself as
    `record.event`. Kinds below `level` are not subscribed to, so that no publisher builds them. The returned
    function ends it."""
    target = logger or get_logger("towpath")

    def write(event: Event) -> None:
        if target.isEnabledFor(event.level):
            target.log(event.level, "%s", escape(str(event)), extra={"event": event})

    return bus.subscribe(tuple(kind for kind in KINDS if kind.level >= level), write)
