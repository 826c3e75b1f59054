"""The modules that `--version` and `--help` import, by name: both must start fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
import pytest

from tests.support.shell import python
from towpath.cli.base import COMMANDS, root

LOADED = """
import contextlib, io, json, sys
before = set(sys.modules)
from towpath.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(sys.argv[1:]) == 0
print(json.dumps(sorted(set(sys.modules) - before)))
"""
FRONT = ["towpath", "towpath.cli"]
HEAVY = {"asyncio", "multiprocessing", "concurrent.futures", "subprocess"}


def loaded(folder: Path, *arguments: str) -> tuple[list[str], set[str], set[str]]:
    """Modules of Towpath, third-party packages, and the expensive modules of the standard library."""
    ran = python(folder, LOADED, *arguments)
    assert ran.code == 0, ran.err
    names: list[str] = json.loads(ran.out)
    tops = {name.partition(".")[0] for name in names} - {"towpath"}
    ours = [name for name in names if name.partition(".")[0] == "towpath"]
    return ours, tops - sys.stdlib_module_names, HEAVY & set(names)


def test_version(tmp_path: Path) -> None:
    assert loaded(tmp_path, "--version") == (FRONT, set(), set())


def test_help(tmp_path: Path) -> None:
    ours, others, heavy = loaded(tmp_path, "--help")
    assert ours == [*FRONT, "towpath.cli.base", "towpath.errors", "towpath.escapes"]
    assert others <= {"click", "msgspec", "typing_extensions"}
    assert heavy == set()


def test_a_look_at_the_ledger_loads_no_engine(tmp_path: Path) -> None:
    (tmp_path / "towpath.toml").write_text('url = "sqlite:///work.db"\n')
    python(tmp_path, "import towpath; towpath.open_ledger('sqlite:///work.db').close()")
    ours, others, _ = loaded(tmp_path, "stats", "--json")
    assert "towpath.ledger.sqlite" in ours
    assert [
        name for name in ours if name.startswith(("towpath.app", "towpath.runtime", "towpath.tasks"))
    ] == []
    assert "rich" not in others


def test_an_app_that_only_enqueues_loads_no_processes(tmp_path: Path) -> None:
    program = """
import sys, towpath
with towpath.App("memory://") as app:
    app.task(name="print")(print).enqueue()
print(*{"multiprocessing", "importlib.metadata"} & set(sys.modules))
"""
    assert python(tmp_path, program).out == "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_has_the_help_of_each_command(name: str) -> None:
    command = root.get_command(click.Context(root), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(200) == COMMANDS[name][1]
