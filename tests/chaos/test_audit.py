"""The audit of `make chaos` can fail: losses, doubles and reruns without a cause that are planted are
found."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.chaos import __main__ as program
from tests.chaos.audit import ALL_PROCESSES, SETTLING, Event, Findings, Record, Run, audit
from tests.chaos.power import damage, power_cuts
from tests.chaos.stores import NotPermitted
from towpath import State
from towpath.commands import Job, Spec
from towpath.core import admission
from towpath.core.facts import AppendFacts

(PLAIN,) = admission.admit([Spec(id="a", queue="q", kind="plain")], AppendFacts(), 1, 1).jobs
DONE = replace(PLAIN, state=State.DONE, settled_fence=2)
JOBS = {"a": DONE, "b": replace(DONE, id="b", kind="apply", settled_fence=1)}
KILL = Event("kill", "w1", 15, 15)
RUNS = (Run("a", 1, "w1", 10), Run("a", 2, "w2", 20, "returned"), Run("b", 1, "w2", 30, "returned"))
RECORD = Record([KILL], ["a", "b"], RUNS, {"b": 1})


def numbers(found: Findings) -> tuple[int, int, int, int]:
    return found.lost, found.doubled, found.rerun, found.unexplained


def test_what_is_well() -> None:
    found = audit(RECORD, JOBS, [])
    assert (found.events, found.jobs, *numbers(found), found.clean) == (1, 2, 0, 0, 1, 0, True)


@pytest.mark.parametrize(
    ("record", "jobs", "check", "expected"),
    [
        ({"asked": ["a", "b", "c"]}, {}, [], (1, 0, 1, 0)),
        ({}, {"a": replace(DONE, state=State.READY)}, [], (1, 0, 1, 0)),
        ({}, {"a": replace(DONE, settled_fence=3)}, [], (0, 0, 1, 1)),
        ({"runs": (*RUNS, Run("gone", 1, "w2", 40, "returned"))}, {}, [], (1, 0, 1, 0)),
        ({"applied": {"b": 2}}, {}, [], (0, 1, 1, 0)),
        ({"applied": {}}, {}, [], (1, 0, 1, 0)),
        ({"applied": {"b": 1, "a": 1}}, {"a": PLAIN}, [], (1, 0, 1, 1)),
        ({"runs": (*RUNS, Run("b", 1, "w1", 14, "returned"))}, {}, [], (0, 1, 2, 0)),
        ({"events": []}, {}, [], (0, 0, 1, 1)),
        ({"events": [replace(KILL, victim="w2")]}, {}, [], (0, 0, 1, 1)),
        ({"events": [Event("freeze", "w1", 21, 22)]}, {}, [], (0, 0, 1, 1)),
        ({"events": [Event("outage", ALL_PROCESSES, 12, 13)]}, {}, [], (0, 0, 1, 0)),
        ({"events": [Event("outage", ALL_PROCESSES, 30 + SETTLING, 40 + SETTLING)]}, {}, [], (0, 0, 1, 1)),
        ({"events": [], "runs": (replace(RUNS[0], ended="raised"), *RUNS[1:])}, {}, [], (0, 0, 0, 0)),
        ({}, {}, ["a count is wrong"], (0, 0, 1, 1)),
    ],
)
def test_what_is_planted_is_found(
    record: dict[str, Any], jobs: dict[str, Job], check: list[str], expected: Any
) -> None:
    found = audit(replace(RECORD, **record), {**JOBS, **jobs}, check)
    assert numbers(found) == expected
    assert found.clean == (expected[:2] == (0, 0) and expected[3] == 0)


def test_a_power_cut_on_a_disk_that_ignores_syncs_is_found() -> None:
    assert power_cuts(seed=3, cuts=2).clean
    assert power_cuts(seed=3, cuts=4, lies=True).lost > 0


def test_damage_is_noticed() -> None:
    found = damage(seed=1, cases=6)
    assert (found.events, found.clean) == (6, True)


def test_the_program_fails_for_a_loss_and_lists_what_was_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(seed: int, seconds: float) -> Findings:
        raise NotPermitted("no root here")

    clean = Findings(events=1, jobs=2)
    monkeypatch.setattr(
        program,
        "EXPERIMENTS",
        {("sqlite", "kill"): lambda *_: replace(clean, notes=[]), ("sqlite", "x"): refused},
    )
    assert program.main(["--seed", "1"]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[1].split() == list(program.COLUMNS)
    assert "sqlite x: not run: no root here" in output
    assert program.main(["--only", "kill", "--plant"]) == 1
    assert "lost: planted" in capsys.readouterr().out
