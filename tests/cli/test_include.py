"""Projects of several modules: the example of docs/projects.md, and `--include`."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.shell import Shell, python

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shop"


def test_the_example_runs(shell: Shell) -> None:
    shutil.copytree(EXAMPLE, shell.folder, dirs_exist_ok=True)
    id = python(shell.folder, "import enqueue").out.strip()
    log = shell.run("worker", "shop.app:app", "--burst").err
    assert "Tasks: shop.mail.tasks.welcome, shop.reports.tasks.count, shop.reports.tasks.nightly\n" in log
    assert "Schedules: nightly\n" in log
    assert shell("jobs", "show", id, "--json").json["result"] == 2
    assert shell("stats", "--json").json["total"]["done"] == 3


def test_include_on_the_command_line(shell: Shell) -> None:
    (shell.folder / "dock.py").write_text("from towpath import App\napp = App()\n")
    (shell.folder / "cranes.py").write_text("from dock import app\n\n@app.task\ndef lift() -> None: ...\n")
    (shell.folder / "cracked.py").write_text("\n1 / 0\n")
    shell("enqueue", "cranes.lift", "--app", "dock:app", "--include", "cranes")
    log = shell.run("worker", "dock:app", "--burst", "--include", "cranes", "--processes", "2").err
    assert "Tasks: cranes.lift\n" in log
    assert shell("stats", "--json").json["total"]["done"] == 1
    failed = shell("worker", "dock:app", "--include", "cracked", code=2).err
    assert "Module cracked cannot be imported: ZeroDivisionError" in failed
    assert f"{shell.folder / 'cracked.py'}, line 2" in failed
    assert "There is no module nowhere" in shell("worker", "dock:app", "--include", "nowhere", code=2).err
    assert "--include" in shell("worker", "dock:app", "--include", "no/where", code=2).err
