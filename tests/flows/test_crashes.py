"""Plans whose workers are killed at every point: the end is that of a run without a crash."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import plan_worker
from tests.support.plan_worker import EDGES, World, build
from towpath import App
from towpath.flows.kinds import PlanState


def run(url: str, log: Path, plan: str, point: str, nth: int) -> int:
    command = [sys.executable, plan_worker.__file__, url, str(log), plan, point, str(nth)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode in (0, -9), ended.stderr
    return ended.returncode


def finish(app: App, log: Path, ending: str, kills: list[tuple[str, int]]) -> int:
    """Run the plan with processes that are killed, then with one that is not; return the number of kills."""
    handle = build(app, World(app, log), ending).submit(id=ending)
    for killed, (point, nth) in enumerate(kills):
        if run(app.url, log, ending, point, nth) == 0:
            return killed
    assert run(app.url, log, ending, "never", 0) == 0
    assert handle.status().is_final
    return len(kills)


def check_effects(log: Path, ending: str) -> None:
    """Each step took effect once, after the steps that it waits for; each undo once, before theirs."""
    lines = [line.split() for line in log.read_text().splitlines()]
    put = [name for verb, name in lines if verb == "put"]
    dropped = [name for verb, name in lines if verb == "drop"]
    assert len(set(put)) == len(put)
    assert len(set(dropped)) == len(dropped)
    steps = [name for name in EDGES if not (name == "h" and ending == "rolled_back")]
    assert sorted(put) == sorted([*steps, "z"])
    assert put[-1] == "z"
    for name in steps:
        for before in EDGES[name]:
            assert put.index(before) < put.index(name)
    if ending != "rolled_back":
        assert dropped == []
        return
    assert sorted(dropped) == sorted(steps)
    for name in steps:
        for before in EDGES[name]:
            assert dropped.index(name) < dropped.index(before)


@pytest.mark.ledgers("sqlite")
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("ending", ["done", "rolled_back", "pivot"])
def test_workers_killed_at_every_few_batches(app: App, tmp_path: Path, ending: str, point: str) -> None:
    """The deaths are in the steps, in the coordinators and in the rollback."""
    log = tmp_path / "log"
    killed = finish(app, log, ending, [(point, nth) for nth in (2, 4, 3, 5, 4, 6, 3, 5)])
    assert killed >= 3
    expected = PlanState.ROLLED_BACK if ending == "rolled_back" else PlanState.DONE
    assert app.plans.get(ending).status().state is expected
    check_effects(log, ending)


@pytest.mark.ledgers("sqlite", "postgres")
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_at_random_batches(app: App, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kills = [(rng.choice(["before", "after"]), rng.randint(2, 12)) for _ in range(5)]
    finish(app, tmp_path / "log", "rolled_back", kills)
    assert app.plans.get("rolled_back").status().state is PlanState.ROLLED_BACK
    check_effects(tmp_path / "log", "rolled_back")
