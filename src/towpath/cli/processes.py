"""Child processes that end with their parent: started apart from the terminal's signals, stopped politely,
then not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from sysconfig import get_paths
from types import FrameType

from towpath.cli.base import OK, print_stderr
from towpath.cli.targets import module_files

PARENT_PIPE = "TOWPATH_PARENT_PIPE"
"""The variable with the number of a pipe that closes when the parent is gone."""
FORCED_STOP = 2.0
"""Seconds for a child that was asked twice."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ChildProcess:
    """`towpath` itself with other arguments, in a process group of its own: Ctrl-C reaches it only through
    us, once."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, quiet: bool = False
    ) -> None:
        self.stop_requested = False
        """Was it asked to stop?"""
        near, self._parent_pipe = os.pipe()
        output = subprocess.DEVNULL if quiet else None
        command = [sys.executable, "-m", "towpath", *arguments]
        try:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {}), PARENT_PIPE: str(near)},
                pass_fds=(near,),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        finally:
            os.close(near)

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.stop_requested = self.stop_requested or how in STOP_SIGNALS
        if self.process.poll() is None:
            self.process.send_signal(how)

    def wait(self, timeout: float | None = None) -> bool:
        """Has it ended within the time?"""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, grace: float = 0.0) -> int:
        """Ask it to end, ask it to leave at once, end it; its exit code."""
        for patience in (grace, FORCED_STOP):
            self.stop()
            if self.wait(patience):
                break
        else:
            self.process.kill()
        code = self.process.wait()
        os.close(self._parent_pipe)
        return code


def stop_with_parent() -> None:
    """In a child: if the parent dies without a word, do as if it had said to stop."""
    number = os.environ.pop(PARENT_PIPE, None)
    if number is None:
        return
    pipe = int(number)
    os.set_inheritable(pipe, False)

    def watch() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="towpath-parent-pipe", daemon=True).start()


@contextmanager
def forward_signals(
    children: list[ChildProcess], asked: threading.Event, reload: bool = False
) -> Iterator[None]:
    """Pass every stop signal on to the children, and remember that one came. Each one counts: the second means at once. With
    `reload` SIGHUP is passed on too, unless it says that the terminal was closed: the children have none."""
    terminal = os.isatty(0)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and terminal and not os.isatty(0):
            number = signal.SIGTERM
        if number != signal.SIGHUP:
            asked.set()
        for child in children:
            child.stop(number)

    before = {
        number: signal.signal(number, pass_on)
        for number in (*STOP_SIGNALS, *([signal.SIGHUP] if reload else []))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


IMPORTS_FILE = "TOWPATH_DEV_FILES"
"""The variable with the file into which the child writes what it has imported."""
POLL_INTERVAL = 0.5
RESTART_GRACE = 5.0

FileTimes = dict[Path, int | None]


def run_with_reload(arguments: list[str], target: str) -> int:
    """Until a stop signal; the exit code."""
    asked = threading.Event()
    children: list[ChildProcess] = []
    with tempfile.TemporaryDirectory(prefix="towpath-dev-") as folder, forward_signals(children, asked):
        report = Path(folder) / "files"
        while not asked.is_set():
            report.write_text("")
            times = {path: _mtime(path) for path in module_files(target)}
            child = ChildProcess(arguments, {IMPORTS_FILE: str(report)})
            children[:] = [child]
            changed = _wait_for_change(child, times, asked, report)
            if changed is None:
                child.wait()  # it was asked to stop and has its own grace; a second Ctrl-C reaches it too
            child.close(RESTART_GRACE)
            if changed is not None:
                print_stderr([f"Changed: {changed}. Starting again."])
    return OK


def _wait_for_change(
    child: ChildProcess, times: FileTimes, asked: threading.Event, report: Path
) -> Path | None:
    """The file that changed; None if we are asked to stop."""
    told = False
    while not asked.wait(POLL_INTERVAL):
        times = _reported(report) | times
        for path, then in times.items():
            if _mtime(path) != then:
                return path
        if child.code is not None and not told:
            told = True
            print_stderr(
                [f"The worker ended with code {child.code}. Waiting for a change of the code (Ctrl-C ends)."]
            )
    return None


def _reported(report: Path) -> FileTimes:
    lines = (line.partition(" ") for line in report.read_text("utf-8").splitlines())
    return {Path(path): None if then == "None" else int(then) for then, _, path in lines}


def _mtime(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class ImportReporter:
    """In the child: keeps the list of the program's files up to date for as long as it lives."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._times: FileTimes = {}
        threading.Thread(target=self._keep, name="towpath-dev", daemon=True).start()

    @classmethod
    def of_dev(cls) -> ImportReporter | None:
        """None unless `dev` started this process."""
        target = os.environ.pop(IMPORTS_FILE, None)
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
            time.sleep(POLL_INTERVAL)
            self.loaded()

    def _add(self, files: Iterable[str]) -> None:
        with self._lock:
            new = {path: _mtime(path) for path in map(Path, files) if path not in self._times}
            if new:
                self._times |= new
                _replace_file(self._target, (f"{then} {path}" for path, then in self._times.items()))


def _replace_file(path: Path, lines: Iterable[str]) -> None:
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
    return [
        file
        for file in files
        if file and file.endswith(".py") and not os.path.abspath(file).startswith(foreign)
    ]
