"""Metrics as Prometheus reads them: the text of a real registry over a real ledger."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engine import expire
from tests.support.running import working
from tests.support.waiting import WAIT, in_thread
from towpath import App
from towpath.core.breaker import Breaker
from towpath.core.commands import Append, Claim, SetQueue, Settle, Want
from towpath.core.commands import Claimed as ClaimedAnswer
from towpath.core.job import Done, Spec
from towpath.errors import QueueFull
from towpath.events import (
    BatchCommitted,
    BatchFailed,
    BreakerChanged,
    Bus,
    Event,
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
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.sqlite.ledger import SqliteLedger
from towpath.observe import metrics
from towpath.runtime.breakers import Breakers
from towpath.runtime.commit.committer import Committer
from towpath.testing import ManualClock

SECOND = 1_000_000


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"towpath_{name}", labels)


def settled(state: str, outcome: str, kind: str = "mail") -> JobSettled:
    return JobSettled(kind=kind, queue="q", state=state, outcome=outcome, duration=0.02, attempt=1, id="1")


def installed(*events: Event) -> CollectorRegistry:
    bus, registry = Bus(), CollectorRegistry()
    metrics.install(bus, MemoryLedger(), registry)
    for event in events:
        bus.publish(event)
    return registry


def test_fast_paths_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger, registry = SqliteLedger(tmp_path / "a.db"), CollectorRegistry()
    metrics.install(Bus(), ledger, registry)
    for n in range(3):
        ledger.apply([Append((Spec(id=f"j{n}", queue="q", payload=b"1"),))])
    assert sample(registry, "fast_path_taken_total", path="append") == 2
    assert sample(registry, "fast_path_refused_total", path="append", reason="queue") == 1
    assert sample(registry, "fast_path_errors_total", path="append") is None
    for _ in range(2):
        ledger.fast_paths.fail("append", ValueError("a defect"))
    assert sample(registry, "fast_path_errors_total", path="append") == 2
    assert [record.message.count("ValueError: a defect") for record in caplog.records] == [1]
    ledger.close()


def test_depth_and_age_are_the_ledgers_at_the_time_of_the_scrape() -> None:
    clock = ManualClock()
    ledger, registry = MemoryLedger(clock), CollectorRegistry()
    metrics.install(Bus(), ledger, registry, clock)
    assert sample(registry, "ledger_up") == 1
    ledger.apply([Append(tuple(Spec(id=f"j{n}", queue="orders") for n in range(3)))])
    ledger.apply(
        [Append((Spec(id="later", queue="orders", delay=60 * SECOND),)), SetQueue(queue="slow", paused=True)]
    )
    clock.advance(5)
    (claimed,) = ledger.apply([Claim(owner="w", wants=(Want("orders", 1),), lease=60 * SECOND)])
    assert isinstance(claimed, ClaimedAnswer)
    ledger.apply([Settle(claim.id, claim.fence, Done()) for claim in claimed.claims])
    found = {
        state: sample(registry, "queue_depth", queue="orders", state=state)
        for state in ("ready", "scheduled", "done", "running")
    }
    assert found == {"ready": 2, "scheduled": 1, "done": 1, "running": 0}
    assert sample(registry, "queue_oldest_ready_seconds", queue="orders") == 5
    clock.advance(2)
    assert sample(registry, "queue_oldest_ready_seconds", queue="orders") == 7
    assert sample(registry, "queue_oldest_ready_seconds", queue="slow") == 0
    assert sample(registry, "queue_paused", queue="slow") == 1
    assert sample(registry, "queue_paused", queue="orders") == 0


def test_the_states_of_breakers_are_the_fleets() -> None:
    clock = ManualClock()
    ledger, registry, bus = MemoryLedger(clock), CollectorRegistry(), Bus()
    metrics.install(bus, ledger, registry, clock)
    breaker = Breaker("x", failures=1, cooldown=30)
    committer = Committer(ledger, bus=bus)
    committer.start()
    try:
        with bus.collect(BreakerChanged) as changed:
            Breakers(ledger, committer).report(breaker, None, False, clock.now(), clock.now())
            changed.expect(1)

        def states() -> list[float | None]:
            return [
                sample(registry, "breaker_state", breaker="x", state=state)
                for state in ("closed", "open", "half-open")
            ]

        assert states() == [0, 1, 0]
        clock.advance(30)
        assert states() == [0, 0, 1]
        assert sample(registry, "breaker_changes_total", breaker="x", state="open") == 1
    finally:
        committer.close()


def test_a_ledger_that_cannot_be_read_is_down_and_other_metrics_are_exported(tmp_path: Path) -> None:
    bus, ledger, registry = Bus(), SqliteLedger(tmp_path / "w.db"), CollectorRegistry()
    metrics.install(bus, ledger, registry)
    bus.publish(settled("done", "done"))
    ledger.close()
    text = generate_latest(registry).decode()
    assert "towpath_ledger_up 0.0" in text
    assert 'towpath_jobs_done_total{kind="mail"} 1.0' in text
    assert "towpath_queue_depth" not in text


def test_attempts_by_how_they_ended() -> None:
    registry = installed(
        settled("done", "done"),
        settled("done", "done"),
        settled("failed", "retry"),
        settled("failed", "fail"),
        settled("failed", "fail"),
        settled("canceled", "stop"),
        settled("scheduled", "retry"),
        settled("scheduled", "snooze"),
        settled("ready", "release"),
        settled("scheduled", "refuse"),
    )
    assert sample(registry, "jobs_done_total", kind="mail") == 2
    assert sample(registry, "jobs_failed_total", kind="mail", reason="exhausted") == 1
    assert sample(registry, "jobs_failed_total", kind="mail", reason="fatal") == 2
    assert sample(registry, "jobs_canceled_total", kind="mail") == 1
    assert sample(registry, "attempts_failed_total", kind="mail") == 1
    assert sample(registry, "job_duration_seconds_count", kind="mail") == 8, "what never ran took no time"
    assert sample(registry, "job_duration_seconds_sum", kind="mail") == pytest.approx(0.16)


def test_latency_and_commits_are_histograms() -> None:
    registry = installed(
        JobStarted(id="1", kind="mail", queue="q", attempt=1, waited=0.003),
        JobStarted(id="2", kind="mail", queue="q", attempt=1, waited=0.2),
        BatchCommitted(commands=4, jobs=150, seconds=0.004),
    )
    assert sample(registry, "dequeue_latency_seconds_bucket", queue="q", le="0.0025") == 0
    assert sample(registry, "dequeue_latency_seconds_bucket", queue="q", le="0.005") == 1
    assert sample(registry, "dequeue_latency_seconds_count", queue="q") == 2
    assert sample(registry, "commit_batch_jobs_bucket", le="100.0") == 0
    assert sample(registry, "commit_batch_jobs_bucket", le="200.0") == 1
    assert sample(registry, "commit_seconds_sum") == pytest.approx(0.004)


def test_what_else_is_counted() -> None:
    registry = installed(
        JobsAppended(queue="q", ids=("1", "2", "3")),
        LeaseLost(id="1", kind="mail", queue="q", attempt=1, owner="w"),
        HandlerBlocked(id="1", kind="mail", seconds=2.0, where="a.py:1"),
        QueueFullSeen(queue="q", depth=10, capacity=10),
        ScheduleFired(name="nightly", id="1", due=datetime.now(UTC)),
        BatchFailed(commands=2, error="locked", retryable=True),
        UpkeepDone(reaped=3, expired=2),
    )
    assert sample(registry, "jobs_appended_total", queue="q") == 3
    assert sample(registry, "lease_losses_total", queue="q") == 1
    assert sample(registry, "handlers_blocked_total", kind="mail") == 1
    assert sample(registry, "queue_full_total", queue="q") == 1
    assert sample(registry, "schedules_fired_total", schedule="nightly") == 1
    assert sample(registry, "commit_failures_total", retryable="true") == 1
    assert sample(registry, "leases_reaped_total") == 3
    assert sample(registry, "jobs_expired_total") == 2


def test_taking_it_out_leaves_no_trace() -> None:
    bus, registry = Bus(), CollectorRegistry()
    remove = metrics.install(bus, MemoryLedger(), registry)
    assert bus.wants(JobSettled)
    remove()
    assert not bus.wants(JobSettled)
    assert generate_latest(registry) == b""
    metrics.install(bus, MemoryLedger(), registry)


def test_a_second_app_in_one_registry_is_refused_and_leaves_no_half() -> None:
    bus, registry = Bus(), CollectorRegistry()
    metrics.install(Bus(), MemoryLedger(), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.install(bus, MemoryLedger(), registry)
    assert not bus.wants(JobSettled)
    assert sample(registry, "ledger_up") == 1


def test_installing_does_not_touch_the_ledger(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "w.db")
    ledger.close()
    metrics.install(Bus(), ledger, CollectorRegistry(auto_describe=True))


def test_serving_over_http() -> None:
    registry = installed(settled("done", "done"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = metrics.serve(port, registry=registry)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    stop()
    assert 'towpath_jobs_done_total{kind="mail"} 1.0' in text
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_health_of_a_process_does_not_depend_on_the_ledger() -> None:
    """A ledger with reads that never return, as in an outage without a reply of the server."""
    stuck = threading.Event()

    class Stuck:
        def collect(self) -> list[Metric]:
            assert stuck.wait(WAIT)
            return []

    registry = CollectorRegistry()
    registry.register(Stuck())
    stop = metrics.serve(0, registry=registry)
    scrape = in_thread(lambda: urllib.request.urlopen(stop.url, timeout=WAIT).read())
    with urllib.request.urlopen(stop.url.replace("/metrics", "/healthz"), timeout=WAIT) as answer:
        assert (answer.status, answer.read()) == (200, b"ok\n")
    stuck.set()
    scrape()
    stop()


def test_without_prometheus_the_error_names_the_package() -> None:
    program = "import sys; sys.modules['prometheus_client'] = None; import towpath.observe.metrics"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'towpath[metrics]'" in ended.stderr.splitlines()[-1]


def scraped(url: str) -> dict[str, float]:
    """Every sample by its name and labels, as Prometheus reads them."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    found = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {f"{each.name}{sorted(each.labels.items())}": each.value for each in found}


def test_a_worker_from_its_first_job_to_a_lost_lease(tmp_path: Path) -> None:
    """Each metric after real work, over a real socket."""
    clock, registry = ManualClock(), CollectorRegistry()
    app = App(f"sqlite:///{tmp_path / 'w.db'}", clock=clock)
    started, go_on = threading.Event(), threading.Event()

    @app.task(name="add", queue="sums")
    async def add(a: int, b: int) -> int:
        clock.advance(0.5)
        return a + b

    @app.task(name="fails", queue="sums", max_attempts=2, backoff=0)
    def fails() -> None:
        raise ValueError("no")

    @app.task(name="slow", queue="sums")
    def slow() -> None:
        started.set()
        assert go_on.wait(WAIT)

    with app:
        remove = metrics.install(app.bus, app.ledger, registry, clock)
        stop = metrics.serve(0, registry=registry)
        app.engine.call(SetQueue(queue="attic", capacity=2))
        app.queue("attic").put_many(["a", "b"])
        with pytest.raises(QueueFull):
            app.queue("attic").put("c")
        clock.advance(30)
        first = add.enqueue(1, 2)
        clock.advance(2)
        with app.bus.collect(JobSettled) as settles, app.bus.collect(LeaseLost) as losses, working(app):
            assert first.result(WAIT) == 3
            fails.enqueue().finished(WAIT)
            settles.expect(3, timeout=WAIT)
            lost = slow.enqueue()
            assert started.wait(WAIT)
            app.engine.call(SetQueue(queue="sums", paused=True))
            expire(app.ledger, lost.record())
            seen = scraped(stop.url)
            go_on.set()
            losses.expect(timeout=WAIT)
            later = scraped(stop.url)
        stop()
        remove()
    assert seen["towpath_ledger_up[]"] == 1
    assert seen["towpath_queue_depth[('queue', 'attic'), ('state', 'ready')]"] == 2
    assert seen["towpath_queue_oldest_ready_seconds[('queue', 'attic')]"] == 32.5
    assert seen["towpath_queue_depth[('queue', 'sums'), ('state', 'done')]"] == 1
    assert seen["towpath_queue_depth[('queue', 'sums'), ('state', 'failed')]"] == 1
    assert seen["towpath_queue_paused[('queue', 'sums')]"] == 1
    assert seen["towpath_jobs_appended_total[('queue', 'sums')]"] == 3
    assert seen["towpath_jobs_appended_total[('queue', 'attic')]"] == 2
    assert seen["towpath_queue_full_total[('queue', 'attic')]"] == 1
    assert seen["towpath_dequeue_latency_seconds_count[('queue', 'sums')]"] == 4
    assert seen["towpath_dequeue_latency_seconds_sum[('queue', 'sums')]"] == pytest.approx(2.0)
    assert seen["towpath_job_duration_seconds_count[('kind', 'add')]"] == 1
    assert seen["towpath_job_duration_seconds_count[('kind', 'fails')]"] == 2
    assert seen["towpath_job_duration_seconds_sum[('kind', 'fails')]"] > 0
    assert seen["towpath_jobs_done_total[('kind', 'add')]"] == 1
    assert seen["towpath_attempts_failed_total[('kind', 'fails')]"] == 1
    assert seen["towpath_jobs_failed_total[('kind', 'fails'), ('reason', 'exhausted')]"] == 1
    # Appended: 2, 1, 1, 1 (a refused one is none). Claimed and settled: four and three.
    assert seen["towpath_commit_batch_jobs_sum[]"] == 5 + 4 + 3
    assert seen["towpath_commit_seconds_count[]"] >= seen["towpath_commit_batch_jobs_count[]"] >= 4
    assert "towpath_lease_losses_total[('queue', 'sums')]" not in seen
    assert later["towpath_lease_losses_total[('queue', 'sums')]"] == 1


def test_the_limit_of_a_resource() -> None:
    registry = installed(
        LimitChanged("api", 4, 0),
        LimitChanged("api", 5, 4),
        LimitChanged("api", 2, 5),
        LimitChanged("db", 9, 0),
    )
    assert sample(registry, "resource_limit", resource="api") == 2
    assert sample(registry, "resource_limit", resource="db") == 9
    assert sample(registry, "resource_throttled_total", resource="api") == 1
