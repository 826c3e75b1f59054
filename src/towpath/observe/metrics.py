"""Prometheus metrics: `pip install 'towpath[metrics]'`, then `install(app.bus, app.ledger)` and
`serve(9100)`.

The depth and oldest age of a queue are read from the ledger at each scrape, so they are right for the whole
fleet; everything else is counted from the events of this process. All names start with `towpath_`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

try:
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        REGISTRY,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        ProcessCollector,
        generate_latest,
        start_http_server,
    )
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "towpath.observe.metrics needs prometheus-client: pip install 'towpath[metrics]'"
    ) from error

from towpath.clock import Clock, SystemClock
from towpath.core import breaker as breakers
from towpath.core.job import State
from towpath.errors import TowpathError
from towpath.escapes import get_logger
from towpath.events import (
    BatchCommitted,
    BatchFailed,
    BreakerChanged,
    Bus,
    HandlerBlocked,
    JobsAppended,
    JobSettled,
    JobStarted,
    LeaseLost,
    LimitChanged,
    QueueFullSeen,
    ScheduleFired,
    UpkeepDone,
)
from towpath.ledger import HasFastPaths, Ledger

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

__all__ = ["Served", "install", "serve"]

log = get_logger("towpath.metrics")

LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
DURATIONS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
COMMITS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


class LedgerCollector:
    """Depth and age of every queue as they are at the time of the scrape; `towpath_ledger_up` 0 if they
    cannot be read."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock

    @staticmethod
    def describe() -> list[GaugeMetricFamily]:
        """The families of `collect` without values: registering must not read the ledger."""
        return [
            GaugeMetricFamily(
                "towpath_queue_depth", "Jobs of a queue by their state.", labels=["queue", "state"]
            ),
            GaugeMetricFamily(
                "towpath_queue_oldest_ready_seconds",
                "How long the longest-waiting ready job could have run.",
                labels=["queue"],
            ),
            GaugeMetricFamily("towpath_queue_paused", "1 if the queue is paused.", labels=["queue"]),
            GaugeMetricFamily(
                "towpath_breaker_state",
                "1 for the state that a circuit breaker is in.",
                labels=["breaker", "state"],
            ),
            GaugeMetricFamily("towpath_ledger_up", "1 if the ledger could be read."),
        ]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        depth, oldest, paused, breaker, up = families = self.describe()
        try:
            queues = self._ledger.queues()
            records = breakers.BREAKERS.all(self._ledger).values()
        except TowpathError as error:
            log.warning("queue metrics are not available: %s", error)
            up.add_metric([], 0)
            yield up
            return
        now = self._clock.now()
        for name, view in queues.items():
            for state in State:
                depth.add_metric([name, state.value], getattr(view.counts, state.value))
            waited = 0 if view.oldest_ready is None else max(0, now - view.oldest_ready)
            oldest.add_metric([name], waited / 1e6)
            paused.add_metric([name], int(view.paused))
        for record in records:
            for phase in breakers.Phase:
                breaker.add_metric([record.breaker.name, phase.value], int(record.status.phase(now) is phase))
        up.add_metric([], 1)
        yield from families


class FastPathCollector:
    """The counts of this process for the fast paths of its ledger; no samples for a ledger without them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @staticmethod
    def describe() -> list[CounterMetricFamily]:
        return [
            CounterMetricFamily(
                "towpath_fast_path_taken", "Batches that a fast path of the ledger applied.", labels=["path"]
            ),
            CounterMetricFamily(
                "towpath_fast_path_refused",
                "Batches that a rule kept from a fast path; the general path applied them.",
                labels=["path", "reason"],
            ),
            CounterMetricFamily(
                "towpath_fast_path_errors",
                "Errors inside a fast path; the general path applied the batch.",
                labels=["path"],
            ),
        ]

    def collect(self) -> Iterator[CounterMetricFamily]:
        taken, refused, errors = families = self.describe()
        if isinstance(self._ledger, HasFastPaths):
            counts = self._ledger.fast_paths
            for path, n in dict(counts.taken).items():
                taken.add_metric([path], n)
            for (path, reason), n in dict(counts.refused).items():
                refused.add_metric([path, reason], n)
            for path, n in dict(counts.failed).items():
                errors.add_metric([path], n)
        yield from families


class _Counts:
    """The metrics that are counted from events."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"towpath_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"towpath_{name}", text, labels, buckets=buckets, registry=registry)

        self.waited = histogram(
            "dequeue_latency_seconds", "From when a job could run to its handler's start.", LATENCIES, "queue"
        )
        self.duration = histogram("job_duration_seconds", "How long an attempt took.", DURATIONS, "kind")
        self.appended = counter("jobs_appended_total", "Jobs appended by this process.", "queue")
        self.done = counter("jobs_done_total", "Jobs that ended with success.", "kind")
        self.failed = counter("jobs_failed_total", "Jobs that became dead letters here.", "kind", "reason")
        self.canceled = counter(
            "jobs_canceled_total", "Jobs that stopped because they were asked to.", "kind"
        )
        self.retried = counter(
            "attempts_failed_total", "Attempts that failed and will be tried again.", "kind"
        )
        self.lost = counter("lease_losses_total", "Leases this process lost while it worked.", "queue")
        self.reaped = counter("leases_reaped_total", "Leases of dead or stuck holders that upkeep ended.")
        self.expired = counter("jobs_expired_total", "Jobs that expired: their time to live ran out.")
        self.blocked = counter("handlers_blocked_total", "Handlers that blocked the event loop.", "kind")
        self.full = counter("queue_full_total", "Appends refused because a queue was full.", "queue")
        self.breakers = counter(
            "breaker_changes_total",
            "Circuit breakers that this process opened, closed or saw half open.",
            "breaker",
            "state",
        )
        self.fired = counter("schedules_fired_total", "Jobs appended by a schedule.", "schedule")
        self.batch = histogram(
            "commit_batch_jobs", "Jobs appended, settled and claimed by a commit that had any.", SIZES
        )
        self.commit = histogram("commit_seconds", "How long a commit took.", COMMITS)
        self.limit = Gauge(
            "towpath_resource_limit",
            "Jobs of this process that may use a resource at once.",
            ["resource"],
            registry=registry,
        )
        self.cuts = counter(
            "resource_throttled_total",
            "Reductions of a resource's limit because the service was overloaded.",
            "resource",
        )
        self.failures = counter(
            "commit_failures_total", "Batches that the ledger refused as a whole.", "retryable"
        )
        self._all = tuple(vars(self).values())

    def unregister(self, registry: CollectorRegistry) -> None:
        for metric in self._all:
            registry.unregister(metric)

    def settled(self, event: JobSettled) -> None:
        if event.outcome in ("release", "refuse"):
            return
        self.duration.labels(event.kind).observe(event.duration)
        if event.state == "done":
            self.done.labels(event.kind).inc()
        elif event.state == "failed":
            self.failed.labels(event.kind, event.reason).inc()
        elif event.state == "canceled":
            self.canceled.labels(event.kind).inc()
        elif event.outcome == "retry":
            self.retried.labels(event.kind).inc()

    def committed(self, event: BatchCommitted) -> None:
        if event.jobs:
            # Heartbeats and notes are commits too, but no batches of jobs.
            self.batch.observe(event.jobs)
        self.commit.observe(event.seconds)

    def limited(self, event: LimitChanged) -> None:
        self.limit.labels(event.resource).set(event.limit)
        if event.limit < event.before:
            self.cuts.labels(event.resource).inc()

    def upkept(self, event: UpkeepDone) -> None:
        self.reaped.inc(event.reaped)
        self.expired.inc(event.expired)

    def listen(self, bus: Bus) -> Iterator[Callable[[], None]]:
        """Subscribe to every counted event; each yielded function ends one subscription."""
        yield bus.subscribe(JobSettled, self.settled, inline=True)
        yield bus.subscribe(
            JobStarted, lambda event: self.waited.labels(event.queue).observe(event.waited), inline=True
        )
        yield bus.subscribe(
            JobsAppended, lambda event: self.appended.labels(event.queue).inc(len(event.ids)), inline=True
        )
        yield bus.subscribe(LeaseLost, lambda event: self.lost.labels(event.queue).inc(), inline=True)
        yield bus.subscribe(HandlerBlocked, lambda event: self.blocked.labels(event.kind).inc(), inline=True)
        yield bus.subscribe(QueueFullSeen, lambda event: self.full.labels(event.queue).inc(), inline=True)
        yield bus.subscribe(ScheduleFired, lambda event: self.fired.labels(event.name).inc(), inline=True)
        yield bus.subscribe(
            BreakerChanged, lambda event: self.breakers.labels(event.name, event.state).inc(), inline=True
        )
        yield bus.subscribe(LimitChanged, self.limited, inline=True)
        yield bus.subscribe(BatchCommitted, self.committed, inline=True)
        yield bus.subscribe(
            BatchFailed, lambda event: self.failures.labels(str(event.retryable).lower()).inc(), inline=True
        )
        yield bus.subscribe(UpkeepDone, self.upkept, inline=True)


def install(
    bus: Bus, ledger: Ledger, registry: CollectorRegistry | None = None, clock: Clock | None = None
) -> Callable[[], None]:
    """Count the events of the bus, and read `ledger` at every scrape. A registry takes one App. The returned
    function removes the metrics."""
    target = registry or REGISTRY
    collectors: list[Any] = [LedgerCollector(ledger, clock or SystemClock()), FastPathCollector(ledger)]
    undo = contextlib.ExitStack()
    try:
        counts = _Counts(target)
        undo.callback(counts.unregister, target)
        for collector in collectors:
            target.register(collector)
            undo.callback(target.unregister, collector)
        for unsubscribe in counts.listen(bus):
            undo.callback(unsubscribe)
    except BaseException:
        undo.close()
        raise
    return undo.close


class Served:
    """A server of `GET /metrics` and `GET /healthz`; calling it stops it."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        self._server, self._thread = start_http_server(port, host, registry)
        self._metrics = self._server.get_app()
        self._server.set_app(self._answer)
        self.port: int = self._server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """`/healthz` does not read the ledger: a probe must not restart a worker because of an outage."""
        if environ["PATH_INFO"] == "/healthz":
            start_response("200 OK", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"ok\n"]
        assert self._metrics is not None
        return self._metrics(environ, start_response)

    def __call__(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(port: int, host: str = "127.0.0.1", registry: CollectorRegistry | None = None) -> Served:
    """Serve `GET /metrics` and `GET /healthz` from a thread of its own. Port 0 takes a free port; `port` of
    the returned object is its number. Calling the object stops the server."""
    return Served(port, host, registry or REGISTRY)


class ServedMetrics:
    """The metrics of one App as text, for a server that has a route for them. They have a registry of their
    own."""

    def __init__(self, bus: Bus, ledger: Ledger, clock: Clock) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.close = install(bus, ledger, self._registry, clock)

    def text(self) -> tuple[bytes, str]:
        """The text and its content type. Reads the ledger."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
