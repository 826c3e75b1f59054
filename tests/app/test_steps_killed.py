"""Durable functions with a worker that is killed or frozen: another worker continues after the last finished
step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import stepper
from tests.support.processes import WatchedProcess, enqueue
from tests.support.waiting import WAIT, until
from towpath import App, JobHandle, PlanStatus, State
from towpath.core.views import NoteQuery
from towpath.flows.kinds import PlanState

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


@contextmanager
def worker(app: App, name: str, lease: float = 60.0) -> Iterator[WatchedProcess]:
    program = [sys.executable, "-u", stepper.__file__, app.engine.url, name, str(lease)]
    watched = WatchedProcess(
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    )
    try:
        yield watched
    finally:
        assert watched.close()


def begin(app: App, kind: str, folder: Path, stop: str, **fields: Any) -> JobHandle[Any]:
    return enqueue(app, kind, json.dumps({"folder": str(folder), "stop": stop}).encode(), **fields)


def effects(folder: Path) -> list[str]:
    return (folder / "effects").read_text().splitlines()


def kept(app: App) -> list[str]:
    return [note.key for note in app.ledger.notes(NoteQuery(prefix="step/")).notes]


def rolled_back(app: App, job: JobHandle[Any]) -> PlanStatus:
    until(lambda: app.plans.list(prefix=f"saga-{job.id}"))
    return app.plans.get(app.plans.list()[0].id).wait(timeout=WAIT)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("plain", "after-one"), ("plain", "in-two"), ("coroutine", "after-two"), ("process", "after-one")],
)
def test_another_worker_continues_after_a_kill(app: App, tmp_path: Path, kind: str, place: str) -> None:
    job = begin(app, kind, tmp_path, f"first kill {place}")
    before = ["one", "two"] if place == "after-two" else ["one"]
    rest = [name for name in ("one", "two", "three") if name not in before]
    with worker(app, "first") as first:
        first.until(f"at {place}")
        assert kept(app) == [f"step/{job.id}/{n:04}" for n in range(1, len(before) + 1)]
        with worker(app, "second"):
            first.end(signal.SIGKILL)
            result = job.result(timeout=WAIT)
    assert result == [*[f"{name} by first" for name in before], *[f"{name} by second" for name in rest], "2"]
    begun = [*before, "two"] if place == "in-two" else before
    assert effects(tmp_path) == [f"{name} first" for name in begun] + [f"{name} second" for name in rest]
    assert kept(app) == []


def test_a_frozen_worker_writes_nothing_after_its_lease(app: App, tmp_path: Path) -> None:
    _freeze(app, tmp_path, "plain")


@pytest.mark.ledgers("sqlite")
def test_a_frozen_worker_of_a_coroutine_writes_nothing_after_its_lease(app: App, tmp_path: Path) -> None:
    _freeze(app, tmp_path, "coroutine")


def _freeze(app: App, tmp_path: Path, kind: str) -> None:
    job = begin(app, kind, tmp_path, "first freeze in-two")
    with worker(app, "first", lease=0.5) as first:
        first.until("at in-two")
        with worker(app, "second"):
            result = job.result(timeout=WAIT)
            # The first worker continues inside its second step, and finds its claim lost.
            (tmp_path / "go").touch()
            first.process.send_signal(signal.SIGCONT)
            first.until("lost")
    assert result == ["one by first", "two by second", "three by second", "2"]
    assert effects(tmp_path) == ["one first", "two first", "two second", "three second"]
    assert kept(app) == []


@pytest.mark.parametrize(
    ("place", "undone"),
    [
        ("in-one", ["one"]),
        ("after-one", ["one"]),
        ("in-two", ["two", "one"]),
        ("in-undo-two", ["two", "one"]),
    ],
)
def test_the_rollback_survives_a_kill(app: App, tmp_path: Path, place: str, undone: list[str]) -> None:
    """The job has a single attempt, so that its loss ends it. A step or an undo during the kill may have
    taken effect: the undo runs again."""
    job = begin(app, "saga", tmp_path, f"first kill {place}", max_attempts=1)
    with worker(app, "first") as first:
        first.until(f"at {place}")
        with worker(app, "second"):
            first.end(signal.SIGKILL)
            plan = rolled_back(app, job)
            # The job that deletes the notes may have been killed too, and runs again.
            until(lambda: kept(app) == [])
    assert job.status().state is State.FAILED
    assert plan.state is PlanState.ROLLED_BACK
    by_second = [line for line in effects(tmp_path) if line.endswith("second")]
    assert by_second == [f"undo-{name} second" for name in undone]
