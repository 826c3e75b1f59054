"""Kill -9 anywhere inside a batch: acknowledged batches are stored; any other batch is stored as a whole or
not at all."""

from __future__ import annotations

import ast
import inspect
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from tests.support import sqlite_workload
from tests.support.sqlite_recovery import prove
from tests.support.sqlite_workload import script
from towpath.core.commands import Cancel, Claim, Command, Settle
from towpath.errors import InvalidInput
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.sqlite import ledger as sqlite
from towpath.ledger.sqlite.ledger import FAULT_POINTS
from towpath.testing import ManualClock, faults

EVERY_BATCH = [point for point in FAULT_POINTS if point != "checkpointed"]


def first(kind: type[Command]) -> int:
    """The number of the first batch with such a command."""
    return next(
        number
        for number, (batch, _) in enumerate(script().batches, 1)
        if any(isinstance(each, kind) for each in batch)
    )


HITS = (1, first(Claim), first(Settle), first(Cancel), len(script().batches))


def play(path: Path, *how: str) -> tuple[int, int, list[str]]:
    """Run the history in a child; return its exit code, the number of acknowledged batches, and its trace."""
    command = [sys.executable, sqlite_workload.__file__, str(path), *how]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = child.stdout.splitlines()
    assert lines == [str(n) for n in range(1, len(lines) + 1)]
    return child.returncode, len(lines), child.stderr.splitlines()


def killed(path: Path, *how: str) -> int:
    code, acknowledged, trace = play(path, *how)
    assert code == -signal.SIGKILL, trace
    return acknowledged


def test_the_points_are_passed_by_the_ledger() -> None:
    tree = ast.parse(inspect.getsource(sqlite))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._fault"
    ]
    assert {ast.literal_eval(call.args[0]) for call in calls} == set(FAULT_POINTS)
    assert faults.points() == FAULT_POINTS


def test_a_point_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="point is 'commited'"):
        faults.die_at("commited")
    with pytest.raises(InvalidInput, match="nth is 0"):
        faults.die_at("committed", 0)


def test_the_history_may_be_repeated_batch_by_batch() -> None:
    """The assumptions of the tests below."""
    history, model = script(), MemoryLedger(ManualClock())
    for (commands, now), dump, answers in zip(
        history.batches, history.dumps[1:], history.answers, strict=True
    ):
        assert model.apply(commands, now) == answers
        model.apply(commands, now)
        assert model.dump() == dump
    used = {type(command) for commands, _ in history.batches for command in commands}
    assert used == set(get_args(Command))


def test_without_a_crash_the_ledgers_agree(tmp_path: Path) -> None:
    code, acknowledged, _ = play(tmp_path / "a.db", "trace")
    assert (code, acknowledged) == (0, len(script().batches))
    prove(tmp_path / "a.db", acknowledged, big=False)


@pytest.mark.parametrize("nth", HITS)
@pytest.mark.parametrize("point", EVERY_BATCH)
def test_killed_at_a_point(tmp_path: Path, point: str, nth: int) -> None:
    acknowledged = killed(tmp_path / "a.db", "point", point, str(nth))
    assert acknowledged == nth - 1
    survives = FAULT_POINTS.index(point) >= FAULT_POINTS.index("committed")
    assert prove(tmp_path / "a.db", acknowledged, big=False) == acknowledged + survives


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("point", [point for point in FAULT_POINTS if point not in EVERY_BATCH])
def test_killed_after_a_checkpoint(tmp_path: Path, point: str, nth: int) -> None:
    prove(tmp_path / "a.db", killed(tmp_path / "a.db", "point", point, str(nth), "big"), big=True)


@pytest.fixture(scope="module")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return play(tmp_path_factory.mktemp("small") / "a.db", "trace")[2]


@pytest.fixture(scope="module")
def big_trace(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return play(tmp_path_factory.mktemp("big") / "a.db", "trace", "big")[2]


def sample(trace: Sequence[str], what: str, share: float) -> int:
    """The number of the operation that lies at `share` of all operations of this kind."""
    numbers = [number for number, line in enumerate(trace, 1) if line == what]
    return numbers[min(int(share * len(numbers)), len(numbers) - 1)]


def evenly(count: int) -> list[float]:
    return [n / (count - 1) for n in range(count)]


@pytest.mark.parametrize("share", evenly(10))
def test_killed_before_a_write_of_the_log(tmp_path: Path, small_trace: list[str], share: float) -> None:
    nth = sample(small_trace, "write -wal", share)
    torn = ["torn"] if round(share * 9) % 2 else []
    prove(tmp_path / "a.db", killed(tmp_path / "a.db", "io", str(nth), *torn), big=False)


@pytest.mark.parametrize("share", evenly(5))
def test_killed_before_a_sync_of_the_log(tmp_path: Path, small_trace: list[str], share: float) -> None:
    nth = sample(small_trace, "sync -wal", share)
    prove(tmp_path / "a.db", killed(tmp_path / "a.db", "io", str(nth)), big=False)


@pytest.mark.parametrize("share", evenly(3))
def test_killed_while_the_log_is_copied_at_the_end(
    tmp_path: Path, small_trace: list[str], share: float
) -> None:
    nth = sample(small_trace, "write -db", share)
    prove(tmp_path / "a.db", killed(tmp_path / "a.db", "io", str(nth), "torn"), big=False)


@pytest.mark.parametrize("what", ["write -journal", "sync -journal"])
def test_killed_while_the_file_is_made(tmp_path: Path, small_trace: list[str], what: str) -> None:
    nth = sample(small_trace, what, 1.0)
    assert killed(tmp_path / "a.db", "io", str(nth)) == 0
    prove(tmp_path / "a.db", 0, big=False)


@pytest.mark.parametrize(
    ("what", "share"),
    [
        *(("write -db", share) for share in evenly(5)),
        *(("sync -db", share) for share in evenly(3)),
        ("write -wal", 0.9),
    ],
)
def test_killed_while_the_log_is_copied_between_batches(
    tmp_path: Path, big_trace: list[str], what: str, share: float
) -> None:
    torn = ["torn"] if what.startswith("write") else []
    prove(
        tmp_path / "a.db",
        killed(tmp_path / "a.db", "io", str(sample(big_trace, what, share)), *torn, "big"),
        big=True,
    )
