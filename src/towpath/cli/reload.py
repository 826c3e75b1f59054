"""`dev`: a child that works, and a parent that starts it again when one of the program's files has changed.

The child tells the parent through a file which modules it has imported; the parent looks at their times twice a second. If the child
cannot even import the program, the parent waits for a change.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from sysconfig import get_paths

from towpath.cli.doors import files_of
from towpath.cli.failures import OK, say
from towpath.cli.family import Child, caught

REPORT = "TOWPATH_DEV_FILES"
"""The variable with the file into which the child writes what it has imported."""
LOOK = 0.5
GRACE = 5.0

Times = dict[Path, int | None]


def keep_running(arguments: list[str], target: str) -> int:
    """Until a stop signal; the exit code."""
    asked = threading.Event()
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="towpath-dev-") as folder, caught(children, asked):
        report = Path(folder) / "files"
        report.touch()
        while not asked.is_set():
            child = Child(arguments, {REPORT: str(report)})
            children[:] = [child]
            changed = _until_change(child, _watched(report, target), asked, report, target)
            child.close(GRACE)
            if changed is not None:
                say([f"Changed: {changed}. Starting again."])
    return OK


def _until_change(child: Child, times: Times, asked: threading.Event, report: Path, target: str) -> Path | None:
    """The file that changed; None if we are asked to stop."""
    told = False
    while not asked.wait(LOOK):
        for path, time in times.items():
            if _time(path) != time:
                return path
        # Modules that the child has imported meanwhile are watched from now on.
        times |= {path: time for path, time in _watched(report, target).items() if path not in times}
        if child.code is not None and not told:
            told = True
            say([f"The worker ended with code {child.code}. Waiting for a change of the code (Ctrl-C ends)."])
    return None


def _watched(report: Path, target: str) -> Times:
    listed = [Path(line) for line in report.read_text("utf-8").splitlines() if line]
    return {path: _time(path) for path in (*files_of(target), *listed)}


def _time(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def report_modules() -> None:
    """In the child: keep the list of the program's files up to date, for as long as it lives."""
    target = os.environ.get(REPORT)
    if target is None:
        return

    def keep() -> None:
        known: set[str] = set()
        while True:
            found = set(project_files(sys.modules.copy().values()))
            if found - known:
                known |= found
                _write(Path(target), known)
            threading.Event().wait(LOOK)

    threading.Thread(target=keep, name="towpath-dev", daemon=True).start()


def _write(path: Path, lines: Iterable[str]) -> None:
    """Whole or not at all: the parent reads it at any time."""
    beside = path.with_suffix(".new")
    try:
        beside.write_text("\n".join(sorted(lines)), "utf-8")
        beside.replace(path)
    except OSError:
        pass  # the parent is gone, and with it the directory


def project_files(modules: Iterable[object]) -> list[str]:
    """The source files of modules that are neither Python's nor installed."""
    known = get_paths()
    foreign = tuple(os.path.join(known[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    files = (getattr(module, "__file__", None) for module in modules)
    return [file for file in files if file and file.endswith(".py") and not os.path.abspath(file).startswith(foreign)]
