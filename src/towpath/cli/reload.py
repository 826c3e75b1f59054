"""`dev`: a child that works, and a parent that starts it again when one of the program's files has changed.

The child tells the parent through a file which modules it has imported and what time their files had then; the parent looks at
these twice a second. If the child cannot even import the program, the parent waits for a change.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
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
        while not asked.is_set():
            report.write_text("")
            times = {path: _time(path) for path in files_of(target)}
            child = Child(arguments, {REPORT: str(report)})
            children[:] = [child]
            changed = _until_change(child, times, asked, report)
            if changed is None:
                child.wait()  # it was asked to stop and has its own grace; a second Ctrl-C reaches it too
            child.close(GRACE)
            if changed is not None:
                say([f"Changed: {changed}. Starting again."])
    return OK


def _until_change(child: Child, times: Times, asked: threading.Event, report: Path) -> Path | None:
    """The file that changed; None if we are asked to stop."""
    told = False
    while not asked.wait(LOOK):
        times = _reported(report) | times
        for path, then in times.items():
            if _time(path) != then:
                return path
        if child.code is not None and not told:
            told = True
            say([f"The worker ended with code {child.code}. Waiting for a change of the code (Ctrl-C ends)."])
    return None


def _reported(report: Path) -> Times:
    lines = (line.partition(" ") for line in report.read_text("utf-8").splitlines())
    return {Path(path): None if then == "None" else int(then) for then, _, path in lines}


def _time(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class Reporter:
    """In the child: keeps the list of the program's files up to date for as long as it lives."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._times: Times = {}
        threading.Thread(target=self._keep, name="towpath-dev", daemon=True).start()

    @classmethod
    def of_dev(cls) -> Reporter | None:
        """None unless `dev` started this process."""
        target = os.environ.pop(REPORT, None)
        return None if target is None else cls(Path(target))

    def loaded(self) -> None:
        """The program is imported: what it consists of, as of now."""
        self._add(project_files(sys.modules.copy().values()))

    def failed(self, failure: BaseException) -> None:
        """The program could not be imported: the files on the way to the error are what will be corrected."""
        files: set[str] = set(project_files(sys.modules.copy().values()))
        error: BaseException | None = failure
        while error is not None:
            files |= {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
            if isinstance(error, SyntaxError) and error.filename:
                files.add(error.filename)
            error = error.__cause__
        self._add(file for file in files if Path(file).is_file())

    def _keep(self) -> None:
        """A program may import more while it works."""
        while True:
            time.sleep(LOOK)
            self.loaded()

    def _add(self, files: Iterable[str]) -> None:
        with self._lock:
            new = {path: _time(path) for path in map(Path, files) if path not in self._times}
            if new:
                self._times |= new
                _write(self._target, (f"{then} {path}" for path, then in self._times.items()))


def _write(path: Path, lines: Iterable[str]) -> None:
    """Whole or not at all: the parent reads it at any time."""
    beside = path.with_suffix(".new")
    try:
        beside.write_text("\n".join(lines), "utf-8")
        beside.replace(path)
    except OSError:
        pass  # the parent is gone, and with it the directory


def project_files(modules: Iterable[object]) -> list[str]:
    """The source files of modules that are neither Python's, nor installed, nor ours."""
    known = get_paths()
    folders = [known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    foreign = tuple(os.path.join(folder, "") for folder in (*folders, str(Path(__file__).parents[1])))
    files = (getattr(module, "__file__", None) for module in modules)
    return [file for file in files if file and file.endswith(".py") and not os.path.abspath(file).startswith(foreign)]
