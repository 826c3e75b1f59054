"""Real workers and platforms that are down or refuse requests: the runs of the fleet, and its log."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from reconciliation import work
from reconciliation.platforms import Platform, Simulator
from reconciliation.rules import Numbers

from tests.support.waiting import until
from towpath import App, State
from towpath.commands import Job, Query
from towpath.core.breaker import Phase

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
REPORTS = 40
ONE, TWO = work.PLATFORMS[:2]

SUBMIT = """
import sys
from reconciliation import store, work
work.prepare()
db = store.connect(work.DATABASE)
for platform in sys.argv[2:]:
    for n in range(int(sys.argv[1])):
        numbers = {"views": 1000, "clicks": 100, "conversions": 10}
        work.submit(db, {"report": f"{platform}-{n}", "affiliate": "ada", "platform": platform,
            "post": f"p{n}", **numbers})
"""


class Fleet:
    """Two platforms, their reports in a ledger, and two workers. `app` only reads."""

    def __init__(self, app: App, platforms: dict[str, Platform], logs: list[Path]) -> None:
        self.app = app
        self.one, self.two = platforms[ONE], platforms[TWO]
        self._logs = logs

    def until(self, so: Callable[[], bool]) -> None:
        until(so, explain=lambda: (self.log, self.app.ledger.queues()))

    def done(self, platform: str) -> int:
        return self.app.queue(work.queue_of(platform)).stats().counts.done

    def jobs(self, platform: str) -> list[Job]:
        return list(self.app.ledger.find(Query(queue=work.queue_of(platform), limit=1000)).jobs)

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self._logs)


@contextmanager
def fleet(folder: Path, reports: int, *platforms: str) -> Iterator[Fleet]:
    simulated = {
        name: Platform({f"p{n}": Numbers(1000, 100, 10) for n in range(reports)}) for name in (ONE, TWO)
    }
    logs = [folder / f"worker-{n}.log" for n in range(2)]
    with Simulator(simulated) as simulator, App(f"sqlite:///{folder / 'work.db'}") as app:
        settings = {"RECONCILIATION_DB": str(folder / "work.db"), "RECONCILIATION_MINUTE": "0.01"}
        settings |= {"RECONCILIATION_COOLDOWN": "0.5", "RECONCILIATION_PLATFORMS": simulator.url}
        environment = {**os.environ, **settings}
        simulated[ONE].down = True
        submit = [sys.executable, "-c", SUBMIT, str(reports), *platforms]
        subprocess.run(submit, cwd=EXAMPLES, env=environment, timeout=60, check=True)
        workers = []
        try:
            for log in logs:
                command = [
                    sys.executable,
                    "-m",
                    "towpath",
                    "worker",
                    "reconciliation.work:app",
                    "--concurrency",
                    "16",
                ]
                with log.open("wb") as file:
                    workers.append(subprocess.Popen(command, cwd=EXAMPLES, env=environment, stderr=file))
            yield Fleet(app, simulated, logs)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(30)
        assert app.ledger.check() == []


def test_an_outage_is_left_to_the_breaker(tmp_path: Path) -> None:
    with fleet(tmp_path, REPORTS, ONE, TWO) as found:
        # The other platform works while this one is retried.
        found.until(lambda: found.done(TWO) == REPORTS and found.one.answered[503] >= 9)
        waiting = found.jobs(ONE)
        assert {job.state for job in waiting} <= {State.READY, State.SCHEDULED, State.RUNNING}
        untouched = [job for job in waiting if job.attempts == 0]
        assert len(untouched) >= REPORTS // 2
        assert {(job.state, job.failures, job.losses) for job in untouched} == {(State.READY, 0, 0)}
        asked = found.one.answered[503]
        [record] = [each for each in found.app.breakers.list() if each.name == ONE]
        # Five failures open the breaker; CAP - 1 jobs may run at that time; two probes follow each opening. A
        # worker does not see a failure of the other worker before it is committed, so one more job may start.
        assert asked <= 5 + work.CAP - 1 + 1 + 2 * record.trips
        last = untouched[-1].id
        found.until(lambda: f"breaker {ONE} is open until" in str(found.app.ledger.explain(last)))
        found.one.down = False
        found.until(lambda: found.done(ONE) == REPORTS)
        assert found.app.breakers.phase(ONE) is Phase.CLOSED
        # An attempt for each request, and no other.
        assert sum(job.attempts for job in found.jobs(ONE)) == len(found.one.asked)
        assert found.app.breakers.phase(TWO) is Phase.CLOSED


def test_nothing_fails_silently(tmp_path: Path) -> None:
    """An unexpected exception, and a permanent failure: both are in the log, and the dead letter is listed
    with its error."""
    with fleet(tmp_path, 1, ONE) as found:
        error = "ConnectionError: clicktube is unavailable"
        retried = rf" failed in \S+ s, attempt 1/\d+, next attempt at \S+Z: {error}"
        found.until(lambda: re.search(retried, found.log) is not None)
        found.one.down, found.one.status = False, 403
        found.until(lambda: "failed for good in" in found.log)
        command = [sys.executable, "-m", "towpath", "--url", found.app.engine.url, "dead", "list"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "clicktube rejects the key" in listed.stdout


LISTED = [
    line for line in (EXAMPLES / "reconciliation" / "README.md").read_text().splitlines() if "`test_" in line
]


@pytest.mark.parametrize("line", LISTED)
def test_the_list_of_failures_names_tests_that_are_there(line: str) -> None:
    [name] = [word for word in line.split("`") if word.startswith("test_")]
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert f"def {name}(" in tests
