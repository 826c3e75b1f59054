"""Eight processes with groups, dependencies, keys and parts: no job lost, doubled or out of order, no
deadlock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres_fleet import Fleet, at_rest, judge, judge_order
from tests.support.postgres_member import CAPS
from towpath import App
from towpath.testing.postgres import Server

PROCESSES = 8
SECONDS = float(os.environ.get("TOWPATH_SOAK_SECONDS", "3"))
"""`make soak-postgres` takes longer."""

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


@pytest.fixture
def fleet_url(request: pytest.FixtureRequest, url: str) -> Iterator[str]:
    yield url
    if url.startswith("sqlite"):
        return
    server: Server = request.getfixturevalue("postgres")
    # A deadlock would not be noticed, because the batch is applied again. The order of locks prevents it.
    database = url.rpartition("/")[2]
    assert server.query("SELECT deadlocks FROM pg_stat_database WHERE datname = %s", [database]) == [(0,)]


@pytest.mark.timeout(300 + 10 * SECONDS)
def test_eight_processes(fleet_url: str, tmp_path: Path) -> None:
    url = fleet_url
    with App(url) as app:
        for part, cap in CAPS.items():
            app.queue("fleet").part(part).configure(cap=cap)
        with Fleet(url, tmp_path, [0] * PROCESSES, feed=SECONDS) as fleet:
            fleet.until(lambda: len(list(tmp_path.glob("*.fed"))) == PROCESSES, "all have fed", SECONDS + 120)
            fleet.until(lambda: at_rest(app), "everything is done", 120)
        jobs = judge(app, fleet)
        judge_order(fleet, jobs)
        ran = {name: len(fleet.runs(name)) for name in fleet.members}
        assert min(ran.values()) > 0, f"a process never had a job: {ran}"
        print(f"{len(jobs)} jobs; runs: {ran}")
