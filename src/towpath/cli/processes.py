"""Child processes of `worker --processes`, `dev` and `demo`.

A child has its own process group, so that Ctrl-C reaches it only through the parent, once. It stops when its
parent ends. `dev` restarts its child when a file changes that the child has imported."""

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
"""Environment variable: number of a pipe that closes when the parent ends."""
FORCED_STOP = 2.0
"""Seconds between the second stop signal and SIGKILL."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ChildProcess:
    """A process that runs `towpath` with other arguments, in its own process group."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None = None, quiet: bool = False
    ) -> None:
        self.stop_requested = False
        """True once a stop signal was sent."""
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
        """The exit code; None while it runs."""
        return self.process.poll()

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.stop_requested = self.stop_requested or how in STOP_SIGNALS
        if self.process.poll() is None:
            self.process.send_signal(how)

    def wait(self, timeout: float | None = None) -> bool:
        """True if the process ended within the time."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, grace: float = 0.0) -> int:
        """Stop the process and return its exit code: SIGTERM, after `grace` a second SIGTERM, then
        SIGKILL."""
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
    """In a child: send SIGTERM to this process when the parent ends."""
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
    """Forward every stop signal to the children and set `asked`. The second signal makes a worker leave at
    once.

    With `reload` SIGHUP is forwarded too. A SIGHUP because the terminal was closed is forwarded as
    SIGTERM."""
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
"""Environment variable: the file into which the child writes the names of its imported files."""
POLL_INTERVAL = 0.5
RESTART_GRACE = 5.0

FileTimes = dict[Path, int | None]


def run_with_reload(arguments: list[str], target: str) -> int:
    """Run the child until a stop signal; restart it after a change of a file. Returns the exit code."""
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
                child.wait()  # its own --grace applies; a second Ctrl-C is forwarded too
            child.close(RESTART_GRACE)
            if changed is not None:
                print_stderr([f"Changed: {changed}. Restarting the worker."])
    return OK


def _wait_for_change(
    child: ChildProcess, times: FileTimes, asked: threading.Event, report: Path
) -> Path | None:
    """Return the file that changed, or None after a stop signal."""
    reported = False
    while not asked.wait(POLL_INTERVAL):
        times = _reported(report) | times
        for path, then in times.items():
            if _mtime(path) != then:
                return path
        if child.code is not None and not reported:
            reported = True
            print_stderr(
                [f"The worker ended with code {child.code}. Waiting for a change of the code (Ctrl-C stops)."]
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
    """In the child of `dev`: writes the list of the program's files, and updates it while the process
    runs."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._times: FileTimes = {}
        threading.Thread(target=self._keep, name="towpath-dev", daemon=True).start()

    @classmethod
    def of_dev(cls) -> ImportReporter | None:
        """A reporter if `dev` started this process, else None."""
        target = os.environ.pop(IMPORTS_FILE, None)
        return None if target is None else cls(Path(target))

    def loaded(self) -> None:
        """Add the files of all modules imported so far."""
        self._add(project_files(sys.modules.copy().values()))

    def failed(self, failure: BaseException) -> None:
        """The import failed: add the files of its traceback as well, because the fix will be in one of
        them."""
        files: set[str] = set(project_files(sys.modules.copy().values()))
        error: BaseException | None = failure
        while error is not None:
            files |= {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
            if isinstance(error, SyntaxError) and error.filename:
                files.add(error.filename)
            error = error.__cause__
        self._add(file for file in files if Path(file).is_file())

    def _keep(self) -> None:
        """Repeat, because a program may import more modules while it runs."""
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
    """Replace the file atomically, because the parent may read it at any time."""
    beside = path.with_suffix(".new")
    try:
        beside.write_text("\n".join(lines), "utf-8")
        beside.replace(path)
    except OSError:
        pass  # the parent has ended and removed the directory


def project_files(modules: Iterable[object]) -> list[str]:
    """Source files of modules outside the standard library, installed packages and Towpath."""
    known = get_paths()
    folders = [known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    foreign = tuple(os.path.join(folder, "") for folder in (*folders, str(Path(__file__).parents[1])))
    files = (getattr(module, "__file__", None) for module in modules)
    return [
        file
        for file in files
        if file and file.endswith(".py") and not os.path.abspath(file).startswith(foreign)
    ]
