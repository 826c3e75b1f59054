"""The public surface is a promise: it changes on purpose, here, and nowhere by accident."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import ModuleType

import msgspec
import pytest

import towpath
import towpath.commands
import towpath.core.commands
from towpath import testing
from towpath.core import checks, history, job, schedule, views
from towpath.observe import metrics
from towpath.runtime.engine import Engine
from towpath.tasks import new_jobs

SURFACE = [
    "After",
    "App",
    "Bandwidth",
    "Breaker",
    "BreakerOpen",
    "Call",
    "Cancel",
    "Explanation",
    "Exponential",
    "Fail",
    "GroupHandle",
    "GroupStatus",
    "Hooks",
    "Http",
    "JobFailure",
    "JobHandle",
    "JobLogFilter",
    "JobStatus",
    "Lane",
    "Ledger",
    "Message",
    "PartStatus",
    "Plan",
    "PlanStatus",
    "Policy",
    "Queue",
    "QueueStatus",
    "Rate",
    "Reason",
    "Retry",
    "Running",
    "Shell",
    "Snapshot",
    "Snooze",
    "Sql",
    "SqliteLedger",
    "SqliteOptions",
    "State",
    "Step",
    "StepKind",
    "StepRetry",
    "StopRequested",
    "Task",
    "Throttled",
    "breaker",
    "commands",
    "current",
    "errors",
    "events",
    "new_id",
    "open_ledger",
    "provided",
    "step",
]

MOST_NAMES = 60
MOST_APP_NAMES = 33


def test_the_surface_is_exactly_this() -> None:
    assert sorted(towpath.__all__) == sorted(SURFACE)


def test_the_surface_is_small() -> None:
    assert len(towpath.__all__) == len(set(towpath.__all__)) <= MOST_NAMES


def test_an_app_has_few_public_names() -> None:
    names = [name for name in dir(towpath.App("memory://")) if not name.startswith("_")]
    assert len(names) <= MOST_APP_NAMES, names


def test_an_app_has_an_engine_and_is_none() -> None:
    assert towpath.App.__mro__ == (towpath.App, object)
    assert isinstance(towpath.App("memory://").engine, Engine)


LEDGER_NAMES = "ClaimedJob GroupView Job Key KeyPolicy NoteView PartView Query QueueView Schedule Selector"


@pytest.mark.parametrize("name", [*LEDGER_NAMES.split(), "Spec", "micros", "next_fire"])
def test_a_name_of_the_ledger_language_can_be_imported_from_the_top(name: str) -> None:
    assert getattr(towpath, name) is getattr(towpath.commands, name)


@pytest.mark.parametrize("name", SURFACE)
def test_every_name_exists_and_has_a_docstring(name: str) -> None:
    thing = getattr(towpath, name)
    assert thing.__doc__, f"towpath.{name} has no docstring"
    assert isinstance(thing, ModuleType) or thing.__doc__ != object.__doc__


def test_star_import_gives_the_surface() -> None:
    names: dict[str, object] = {}
    exec("from towpath import *", names)
    assert set(SURFACE) == names.keys() - {"__builtins__"}


def test_public_modules_state_their_names() -> None:
    assert sorted(metrics.__all__) == ["Served", "install", "serve"]
    assert sorted(testing.__all__) == ["ManualClock", "START"]


def test_names_come_when_they_are_used() -> None:
    program = (
        "import sys, towpath; before = set(sys.modules); towpath.State; print(*sorted(set(sys.modules) -"
        " before))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    ours = [name for name in ended.stdout.split() if name.startswith("towpath")]
    assert ours == [
        "towpath.core",
        "towpath.core.blobs",
        "towpath.core.checks",
        "towpath.core.ids",
        "towpath.core.job",
        "towpath.errors",
        "towpath.escapes",
    ]


def test_type_checkers_import_from_the_same_modules() -> None:
    tree = ast.parse(inspect.getsource(towpath))
    homes = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == {**towpath._HOME, "commands": "towpath", "errors": "towpath", "events": "towpath"}
    assert homes.keys() == {*towpath.__all__, *LEDGER_NAMES.split(), "Spec", "micros", "next_fire"}


def test_a_name_that_is_not_there() -> None:
    assert dir(towpath) == sorted(SURFACE)
    with pytest.raises(AttributeError, match="module 'towpath' has no attribute 'Nothing'"):
        towpath.Nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from towpath import Nothing  # type: ignore[attr-defined]  # noqa: F401


LANGUAGE = tuple(
    f"towpath.core.{name}" for name in ("blobs", "commands", "group_commands", "results", "selection")
)
OUTCOMES = ["Outcome", *(each.__name__ for each in job.Outcome.__args__)]
READS = {
    **dict.fromkeys(["GroupPage", "GroupQuery", "GroupView", "NotePage", "NoteQuery"], views),
    **dict.fromkeys(["NoteView", "Page", "PartView", "Query", "QueueView"], views),
    **dict.fromkeys(["AttemptOutcome", "AttemptRecord"], history),
    **dict.fromkeys(["ClaimedJob", "Job", "Key", "KeyPolicy", "Spec"], job),
    **dict.fromkeys(["micros", "utc"], checks),
    **dict.fromkeys(["Schedule", "next_fire"], schedule),
}


def _language() -> Iterator[str]:
    """Every public class of core.commands, and the two unions."""
    module = towpath.core.commands
    for name, value in vars(module).items():
        if name in ("Command", "Result") or (
            inspect.isclass(value) and value.__module__ in LANGUAGE and name[0] != "_"
        ):
            yield name


def test_commands_are_all_there() -> None:
    assert sorted(towpath.commands.__all__) == sorted([*_language(), *OUTCOMES, *READS])
    homes = {**READS, **dict.fromkeys(OUTCOMES, job)}
    for name in towpath.commands.__all__:
        home = homes.get(name, towpath.core.commands)
        assert getattr(towpath.commands, name) is getattr(home, name)


def test_every_command_has_its_own_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in towpath.core.commands.Command.__args__]
    assert None not in tags
    assert len(tags) == len(set(tags))
    assert all(issubclass(kind, msgspec.Struct) for kind in towpath.core.commands.Result.__args__)


def test_only_cancel_is_both_a_public_name_and_a_command() -> None:
    shared = set(towpath.__all__) & set(towpath.commands.__all__)
    assert {name for name in shared if getattr(towpath, name) is not getattr(towpath.commands, name)} == {
        "Cancel"
    }
    assert issubclass(towpath.Cancel, Exception)
    assert issubclass(towpath.commands.Cancel, msgspec.Struct)


@pytest.mark.parametrize("name", ["Retry", "Snooze", "Fail"])
def test_a_handler_raises_an_exception_and_a_ledger_stores_an_outcome(name: str) -> None:
    assert issubclass(getattr(towpath, name), Exception)
    assert issubclass(getattr(towpath.commands, f"{name}Outcome"), msgspec.Struct)


def test_new_ids_grow() -> None:
    ids = [towpath.new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert {len(id) for id in ids} == {36}
    assert {id[14] for id in ids} == {"7"}


def test_new_ids_of_many_threads_are_different() -> None:
    made: list[list[str]] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        made.append([towpath.new_id() for _ in range(2_000)])

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id for ids in made for id in ids}) == 16_000
    assert all(ids == sorted(ids) for ids in made)


def _send_ids(pipe: Connection) -> None:
    pipe.send([towpath.new_id() for _ in range(1_000)])
    pipe.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_ids_of_its_own_even_if_the_lock_was_held() -> None:
    towpath.new_id()
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    with new_jobs._source._lock:
        child = context.Process(target=_send_ids, args=(far,))
        child.start()
    assert near.poll(30), "the child hangs: it waits for a lock of its parent"
    theirs = near.recv()
    child.join()
    assert not set(theirs) & {towpath.new_id() for _ in range(1_000)}
