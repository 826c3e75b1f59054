"""The worker is killed (SIGKILL) at each point of its work, and another worker continues: every effect is
stored exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from reconciliation import store
from reconciliation.platforms import Platform, Simulator
from reconciliation.rules import Numbers

from towpath import App
from towpath.runtime.caretaker import CARETAKER_KEY as CARETAKER

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

WORKER = """
import os, signal, sys
from reconciliation import store, work
from towpath.events import JobSettled

where, marker = sys.argv[1], sys.argv[2]

def reached(point):
    if point == where and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

def before_and_after(module, name):
    inner = getattr(module, name)
    def outer(*args):
        reached(f"before {name}")
        try:
            return inner(*args)
        finally:
            reached(f"after {name}")
    setattr(module, name, outer)

before_and_after(work, "fetch")
before_and_after(work, "look_again")
before_and_after(store, "record")  # inside the transaction
work.app.bus.subscribe(JobSettled, lambda event: reached("after the commit"))
work.app.run(lease=0.5, grace=0, burst=True)
"""
SUBMIT = """
import sys
from reconciliation import store, work
work.prepare()
db = store.connect(work.DATABASE)
for n in range(int(sys.argv[1])):
    numbers = {"views": 1600, "clicks": 100, "conversions": 10}
    work.submit(db, {"report": f"r{n}", "affiliate": "eve", "platform": "clicktube", "post": f"p{n}",
        **numbers})
"""


@contextmanager
def stage(folder: Path) -> Iterator[tuple[Platform, dict[str, str]]]:
    platform = Platform()
    with Simulator({"clicktube": platform}) as simulator:
        # Half an hour until the second request is 0.03 s here.
        settings = {"RECONCILIATION_DB": str(folder / "work.db"), "RECONCILIATION_MINUTE": "0.001"}
        # The test is the caretaker: a killed caretaker would be replaced only after five seconds.
        with App(f"sqlite:///{folder / 'work.db'}") as keeper:
            keeper.engine.start_caretaker()
            while (seen := keeper.ledger.version()) is not None and keeper.ledger.note(CARETAKER) is None:
                keeper.ledger.wait(seen, 0.1)
            yield platform, {**os.environ, **settings, "RECONCILIATION_PLATFORMS": simulator.url}
            assert keeper.ledger.check() == []


def run(program: str, environment: dict[str, str], *arguments: str) -> int:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=EXAMPLES, env=environment, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    "where",
    [
        "before fetch",
        "after fetch",
        "before look_again",
        "after look_again",
        "before record",
        "after record",
        "after the commit",
    ],
)
def test_killed_anywhere(tmp_path: Path, where: str) -> None:
    with stage(tmp_path) as (platform, environment):
        for n in range(3):
            platform.posts[f"p{n}"] = Numbers(1000, 100, 10)
        if "look_again" in where:
            # Never whole numbers: the verdict is `incomplete` after the second request.
            platform.posts["p0"] = Numbers(1000, None, 10)
        assert run(SUBMIT, environment, "3") == 0
        assert run(WORKER, environment, where, str(tmp_path / "killed")) == -9
        # The burst waits for the leases of the dead worker: running jobs of other workers count.
        while run(WORKER, environment, where, str(tmp_path / "killed")) == 0:
            with closing(store.connect(environment["RECONCILIATION_DB"])) as db:
                rows = db.execute("SELECT count(*) FROM reconciliation").get
                trust = store.trust(db, "eve")
                alerts = db.execute("SELECT count(*) FROM alert").get
            if rows == 3:
                break
        incomplete = "look_again" in where
        assert (rows, trust, alerts) == (3, 0.3 if incomplete else 0.2, 2 if incomplete else 3)


def test_the_demonstration(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "error", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "reconciliation"]
    ended = subprocess.run(
        command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended
    assert ended.stderr == ""
    assert "worker-1 was killed with the jobs it held" in ended.stdout
    assert "clicktube open (5 failures in 60 s)" in ended.stdout
    assert "clicktube is back. Its breaker had opened" in ended.stdout
    assert (
        "breakers: clicktube closed (2 probes succeeded), instapix closed, snapreel closed, tiktalk closed"
        in ended.stdout
    )
    assert "120 of 120 reports reconciled, each with its effect on trust exactly once" in ended.stdout
    assert list(tmp_path.iterdir()) == []
