"""The model, memory and SQLite give the same answers to the same history."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec import UNSET
from msgspec.structs import replace

from towpath.core.commands import (
    Append,
    Cancel,
    Command,
    Note,
    Open,
    Progress,
    Purge,
    Renew,
    Revive,
    SetPart,
    Upkeep,
)
from towpath.core.job import FINISHED, After, Reason, State
from towpath.core.lifecycle import REASONS
from towpath.ledger import Answer, Ledger
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.testing import START
from towpath.testing.histories import factory, play, replay
from towpath.testing.ledger_suite import Harness
from towpath.testing.machine import machine
from towpath.testing.moves import Moves
from towpath.testing.pair import Mismatch, Pair, differences
from towpath.testing.suite.harness import spec


@pytest.mark.parametrize("right", ["memory", "sqlite"])
@pytest.mark.parametrize("seed", range(1, 21))
def test_seeded_histories(seed: int, right: str, tmp_path: Path) -> None:
    play(seed, 120, factory("model", tmp_path), factory(right, tmp_path))


@pytest.mark.parametrize("seed", range(100, 120))
def test_the_same_ledger_twice(seed: int, tmp_path: Path) -> None:
    memory = factory("memory", tmp_path)
    turns = play(seed, 100, memory, memory)
    assert len(turns) == 100
    assert replay(turns, memory, memory) is None


def test_histories_go_everywhere() -> None:
    """Every command with every answer it can have, every state with every reason, every end of a group."""
    answers: set[tuple[str, str]] = set()
    states: set[tuple[State, Reason]] = set()
    ends: set[State | None] = set()
    for seed in range(40):
        moves, ledger, now = Moves(random.Random(seed)), MemoryLedger(), START
        for _ in range(150):
            now += moves.step()
            batch = moves.batch()
            found = ledger.apply(batch, now)
            moves.observe(found)
            answers |= {
                (type(command).__name__, type(answer).__name__)
                for command, answer in zip(batch, found, strict=True)
            }
            dump = ledger.dump()
            states |= {(job.state, job.reason) for job in dump["jobs"]}
            ends |= {view.outcome for view, _ in dump["groups"]}
    assert states == {(state, reason) for state, reasons in REASONS.items() for reason in reasons}
    assert ends == {None, *FINISHED}
    refusals = "UnknownDependency DependencyCycle UnknownGroup GroupClosed"
    for command in ("Append", "Settle"):
        assert {(command, refusal) for refusal in refusals.split()} <= answers
    assert {
        ("Append", "QueueFull"),
        ("Settle", "LostClaim"),
        ("Settle", "NoteConflict"),
        ("Progress", "LostClaim"),
    } <= answers
    assert {command for command, _ in answers} == {kind.__name__ for kind in get_args(Command)}


@pytest.mark.parametrize("right", ["memory", "sqlite"])
def test_a_state_machine(right: str, tmp_path: Path) -> None:
    made = machine(factory("model", tmp_path), factory(right, tmp_path))
    run_state_machine_as_test(made, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))


def _whole_append(command: Command) -> Command:
    if not isinstance(command, Append):
        return command
    return Append(
        tuple(
            replace(each, after=tuple(After(x.id, group=x.group) for x in each.after))
            for each in command.specs
        )
    )


FAULTS: dict[str, Callable[[Command], Command]] = {
    "leases are a microsecond longer": lambda each: (
        replace(each, lease=each.lease + 1) if isinstance(each, Renew) else each
    ),
    "progress loses the cursor": lambda each: (
        replace(each, cursor=None) if isinstance(each, Progress) else each
    ),
    "run_anyway is ignored": _whole_append,
    "weights are ignored": lambda each: replace(each, weight=UNSET) if isinstance(each, SetPart) else each,
    "tokens are ignored": lambda each: (
        replace(each, token="") if isinstance(each, Cancel | Revive | Purge) else each
    ),
    "upkeep has no limit": lambda each: Upkeep(10_000) if isinstance(each, Upkeep) else each,
    "notes never expire": lambda each: replace(each, ttl=None) if isinstance(each, Note) else each,
    "groups have no then": lambda each: replace(each, then={}) if isinstance(each, Open) else each,
}


class Faulty(MemoryLedger):
    """A ledger with one defect."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = FAULTS[fault]

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        return super().apply([self._fault(command) for command in commands], now)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_small_fault_is_noticed(fault: str) -> None:
    def hunt() -> None:
        for seed in range(20):
            play(seed, 60, MemoryLedger, lambda: Faulty(fault))

    with pytest.raises(Mismatch, match="The history, shortened"):
        hunt()


def test_a_difference_is_found_and_shortened(tmp_path: Path) -> None:
    """A ledger that already has a job is not the same as an empty one."""
    memory = factory("memory", tmp_path)

    def tampered() -> Ledger:
        ledger = memory()
        Harness(ledger).add("j1")
        return ledger

    with pytest.raises(Mismatch) as caught:
        play(7, 50, memory, tampered)
    assert "seed 7, step " in str(caught.value)
    assert "The history, shortened:" in str(caught.value)
    assert str(caught.value).count("µs") == 1


def test_differences_are_readable(tmp_path: Path) -> None:
    pair = Pair(factory("memory", tmp_path)(), factory("memory", tmp_path)())
    pair.apply([Append((spec("a"),))], 5)
    Harness(pair.right, 5).take()
    found = differences(pair.left.dump()["jobs"], pair.right.dump()["jobs"], "jobs")
    assert any("<a>.owner: left None, right 'worker'" in line for line in found)
    pair.close()
