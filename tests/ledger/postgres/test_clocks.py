"""Workers with wrong clocks: the time of the database decides, so none of them loses a claim, gets a job of
another worker, or runs a job too early."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.support.postgres_fleet import Fleet, at_rest, judge
from tests.support.postgres_member import Skewed, Tasks
from towpath import App
from towpath.clock import SystemClock
from towpath.core.checks import SECOND

HOUR = 3600.0
SKEWS = [0.0, HOUR, -HOUR]
LEASE = 2.0
HELD = 6
NEAR = 60 * SECOND


@pytest.fixture(params=SKEWS, ids=["right", "an hour ahead", "an hour behind"])
def app(postgres_url: str, request: pytest.FixtureRequest) -> App:
    """A producer may have any clock as well."""
    return App(postgres_url, clock=Skewed(request.param))


def test_no_claim_is_lost_or_given_to_two_workers(app: App, postgres_url: str, tmp_path: Path) -> None:
    began = SystemClock().now()
    with app, Fleet(postgres_url, tmp_path, SKEWS, lease=LEASE) as fleet:
        tasks = Tasks(app)
        fleet.wait_for_all(app)
        held = [tasks.hold.enqueue("held") for _ in range(HELD)]
        asked = time.monotonic_ns()
        late = [tasks.step.options(delay=1.5).enqueue("late") for _ in range(10)]
        fleet.wait_for_runs("began", "held", HELD)
        ran = fleet.wait_for_runs("returned", "late", len(late))
        # For two leases only heartbeats keep the jobs, while the other workers reap ended leases.
        threading.Event().wait(2 * LEASE)
        fleet.release()
        fleet.until(lambda: at_rest(app), "everything is done")
        assert [job.record().fence for job in (*held, *late)] == [1] * (HELD + len(late)), (
            "no worker got a job of another one"
        )
        assert min(line.at for line in ran) - asked >= 1.5e9, "a delay is a delay"
        ended = SystemClock().now()
        for job in judge(app, fleet).values():
            for moment in (job.created_at, job.started_at, job.finished_at):
                assert moment is not None
                assert began - NEAR < moment < ended + NEAR, "the times are the database's"


@pytest.mark.parametrize("victim", range(len(SKEWS)))
def test_the_claims_of_the_dead_are_free_after_a_lease(
    victim: int, postgres_url: str, tmp_path: Path
) -> None:
    """Not at once if a clock is ahead, and not an hour late if one is behind."""
    with App(postgres_url) as app, Fleet(postgres_url, tmp_path, SKEWS, lease=LEASE) as fleet:
        tasks = Tasks(app)
        fleet.wait_for_all(app)
        for name in fleet.members.keys() - {f"w{victim}"}:
            app.workers.pause(name)
        fleet.until(
            lambda: sum(view.paused for view in app.workers.list()) == len(SKEWS) - 1, "the others are paused"
        )
        job = tasks.hold.enqueue("held")
        (first,) = fleet.wait_for_runs("began", "held", 1)
        fleet.kill(f"w{victim}")
        killed = time.monotonic_ns()
        for name in fleet.members.keys() - {f"w{victim}"}:
            app.workers.resume(name)
        _, second = sorted(fleet.wait_for_runs("began", "held", 2), key=lambda line: line.at)
        fleet.release()
        assert job.result(30) == "held"
        assert (first.id, first.fence, second.id, second.fence) == (job.id, 1, job.id, 2)
        # The last heartbeat was at most a third of a lease before; the rest of the bound is for a busy
        # machine.
        assert LEASE / 2 < (second.at - killed) / 1e9 < LEASE + 20
        assert job.status().losses == 1
