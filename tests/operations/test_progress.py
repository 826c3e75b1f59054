"""`app.progress()`, `app.show_progress()` and `app.history()` with real workers. Handlers wait for the test,
so every snapshot is exact."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import msgspec
import pytest

import towpath
from tests.support.running import working
from tests.support.waiting import WAIT
from towpath import App, Lane
from towpath.commands import ClaimedJob, Progress
from towpath.errors import UnknownGroup
from towpath.events import JobSettled
from towpath.operations.display import drawn, sentence
from towpath.operations.progress import LiveProgress, Tally, size_of
from towpath.tasks.attempt import Attempt

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


class Transfers:
    """Two kinds of transfers that wait until the test continues them."""

    def __init__(self, app: App) -> None:
        self.go_on = threading.Event()
        self._begun = threading.Semaphore(0)

        def hold(size: int) -> None:
            towpath.current().progress(size // 2, size)
            self._begun.release()
            assert self.go_on.wait(WAIT)
            towpath.current().progress(size, size)

        @app.task(queue="net")
        def fetch(size: int) -> None:
            hold(size)

        @app.task(queue="net")
        def push(size: int) -> None:
            hold(size)

        self.fetch, self.push = fetch, push

    def await_running(self, count: int) -> None:
        for _ in range(count):
            assert self._begun.acquire(timeout=WAIT)


def named(transfers: Transfers) -> dict[str, str]:
    return {transfers.fetch.kind: "downloading", transfers.push.kind: "uploading"}


def test_a_picture_of_what_runs_and_waits(app: App) -> None:
    transfers = Transfers(app)
    for _ in range(3):
        transfers.fetch.enqueue(700_000_000)
    for _ in range(17):
        transfers.push.enqueue(10)
    with working(app, concurrency=8):
        transfers.await_running(8)
        seen = app.progress()
        assert len(seen.running) == 8
        assert seen.queues == {"net": 8}
        assert seen.kinds[transfers.fetch.kind].running == 3
        assert seen.kinds[transfers.fetch.kind].done == 3 * 350_000_000
        assert seen.in_flight == 3 * 350_000_000 + 5 * 5
        assert seen.in_flight_total == 3 * 700_000_000 + 5 * 10
        assert seen.summary(named(transfers)).startswith("3 downloading (2.1 GB), 5 uploading (50 B), ")
        # Besides the running jobs, one claim may be prefetched: it does not count as waiting.
        assert 12 - 1 <= seen.waits <= 12
        assert {job.attempt for job in seen.running} == {1}
        with app.bus.collect(JobSettled) as settled:
            transfers.go_on.set()
            settled.expect(20, timeout=WAIT)
        after = app.progress()
        assert (after.running, after.in_flight) == ((), 0)
        assert sum(kind.finished for kind in after.kinds.values()) == 20
        assert after.jobs_rate > 0


def test_what_runs_is_counted_by_lane_and_kind(app: App) -> None:
    transfers = Transfers(app)
    transfers.fetch.enqueue(10)
    for _ in range(2):
        transfers.push.options(queue="bulk").enqueue(10)
    lanes = {
        name: Lane(queues=queues, reserved=1)
        for name, queues in (("a", ("net",)), ("b", ("bulk",)), ("c", ("none",)))
    }
    with working(app, concurrency=4, lanes=lanes):
        transfers.await_running(3)
        seen = app.progress()
        assert seen.lanes == {"a": {transfers.fetch.kind: 1}, "b": {transfers.push.kind: 2}, "c": {}}
        assert {(job.lane, job.queue) for job in seen.running} == {("a", "net"), ("b", "bulk")}
        assert seen.by_lane(named(transfers)) == "a: 1 downloading; b: 2 uploading; c: nothing"
        file = io.StringIO()
        with app.show_progress(named(transfers), file=file):
            pass
        assert "a: 1 downloading; b: 2 uploading; c: nothing" in file.getvalue()
        transfers.go_on.set()
    assert app.progress().lanes == {}


def test_nothing_is_measured_before_the_first_snapshot(app: App) -> None:
    assert not app.bus.wants(JobSettled)
    app.progress()
    assert app.bus.wants(JobSettled)


def test_a_picture_needs_no_query_but_the_first_look(app: App) -> None:
    now = [0.0]
    live = LiveProgress(app.engine, lambda: now[0])
    app.queue("q").put(b"1")
    assert live.snapshot().waiting == {"q": 1}
    app.queue("q").put(b"2")
    now[0] = 0.9
    seen = live.snapshot()
    assert (seen.waiting, seen.age) == ({"q": 1}, 0.9)
    now[0] = 1.5
    live.snapshot()
    for thread in threading.enumerate():
        if thread.name == "towpath-progress":
            thread.join(WAIT)
    assert (live.snapshot().waiting, live.snapshot().age) == ({"q": 2}, 0.0)


def test_a_group_has_its_own_picture(app: App) -> None:
    transfers = Transfers(app)
    transfers.push.enqueue(8)
    group = app.group([transfers.fetch.of(100) for _ in range(4)])
    with working(app, concurrency=3):
        transfers.await_running(3)
        seen = app.progress(group=group.id)
        assert [(job.kind, job.group) for job in seen.running] == [(transfers.fetch.kind, group.id)] * 2
        assert seen.waits == 2
        assert seen.group is not None
        assert seen.group.unfinished == 4
        assert list(seen.kinds) == [transfers.fetch.kind]
        transfers.go_on.set()
        group.closed(timeout=WAIT)
    with pytest.raises(UnknownGroup):
        app.progress(group="nobody")


def test_history_is_there_after_exit(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'history.db'}"
    with App(url) as app:
        transfers = Transfers(app)
        transfers.go_on.set()
        transfers.push.enqueue(8)
        group = app.group([transfers.fetch.of(100) for _ in range(4)])
        app.run(burst=True)
        fetch, push = transfers.fetch.kind, transfers.push.kind
    with App(url) as later:
        first, second = later.history()
        assert [(each.kind, each.counts.done, each.done) for each in (first, second)] == [
            (fetch, 4, 400),
            (push, 1, 8),
        ]
        assert first.first_start is not None
        assert first.last_end is not None
        assert first.first_start <= first.last_end
        assert [each.kind for each in later.history(group=group.id)] == [fetch]
        with pytest.raises(UnknownGroup):
            later.history(group="nobody")


def test_history_reads_every_page() -> None:
    with App("memory://") as app:
        app.queue("q").put_many([b"x"] * 2500)
        (only,) = app.history()
        assert only.counts.ready == 2500
        assert (only.first_start, only.last_end, only.done) == (None, None, 0)


def test_the_display_ends_with_the_last_picture(app: App) -> None:
    transfers, file = Transfers(app), io.StringIO()
    transfers.fetch.enqueue(2_100_000_000)
    with working(app, concurrency=8):
        with app.show_progress(named(transfers), file=file):
            transfers.await_running(1)
        transfers.go_on.set()
    text = file.getvalue()
    assert "downloading" in text
    assert "1.1 GB of 2.1 GB" in text
    assert "\n1 downloading (2.1 GB), " in text


def test_many_transfers_are_cut_short(app: App) -> None:
    transfers = Transfers(app)
    for _ in range(15):
        transfers.push.enqueue(10)
    with working(app, concurrency=15):
        transfers.await_running(15)
        rich = pytest.importorskip("rich.console")
        console = rich.Console(file=io.StringIO(), width=120)
        console.print(drawn(app.progress(), {}))
        transfers.go_on.set()
    assert console.file.getvalue().count("5 of 10") == 12
    assert "and 3 more" in console.file.getvalue()


def test_rates_of_a_transfer_come_from_what_it_moved_while_watched(app: App) -> None:
    now = [0.0]
    live = LiveProgress(app.engine, lambda: now[0])
    stepped, go_on = threading.Semaphore(0), threading.Semaphore(0)

    @app.task
    def fetch() -> None:
        for done in (0, 1_000_000, 3_000_000):
            towpath.current().progress(done, 10_000_000)
            stepped.release()
            assert go_on.acquire(timeout=WAIT)

    fetch.enqueue()
    with working(app):
        for at, rate, eta in (
            (0.0, 0.0, None),
            (1.0, 1_000_000.0, 9.0),
            (2.0, 1_500_000.0, 7_000_000 / 1_500_000),
        ):
            assert stepped.acquire(timeout=WAIT)
            now[0] = at
            (job,) = live.snapshot().running
            assert (job.rate, job.eta) == (rate, eta)
            shown = sentence(live.snapshot(), {fetch.kind: "downloading"})
            assert shown.startswith("1 downloading (10.0 MB), ")
            assert ("1.5 MB/s" in shown) == (at == 2.0)
            go_on.release()


def test_a_tally_forgets() -> None:
    tally = Tally(0.0)
    for second in range(5):
        tally.add(float(second), 10)
    assert tally.rate(5.0) == 10.0
    assert tally.rate(100.0) == 0.0
    assert tally.total == 50


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_999, "1.0 MB"),
        (2_100_000_000, "2.1 GB"),
        (5e15, "5000.0 TB"),
    ],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert size_of(count) == text


def fetch_apart() -> None:
    raise NotImplementedError


def test_progress_of_a_handler_in_another_process_is_shown(app: App) -> None:
    """The progress arrives as a message through the pipe."""
    fetch = app.task(process=True)(fetch_apart)
    job = msgspec.structs.replace(fetch.enqueue().record(), fence=1)
    attempt = Attempt(app._registry, ClaimedJob(job), fetch)
    assert attempt.receive(msgspec.msgpack.encode(Progress(job.id, job.fence, 4, 10))) is None
    assert attempt.running.at == (4, 10)
