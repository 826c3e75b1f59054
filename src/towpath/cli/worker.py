"""`worker` and `dev`: run an app's tasks in one or several processes, with metrics for Prometheus."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging import INFO
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath.cli import version
from towpath.cli.base import (
    OK,
    REFUSED,
    Failure,
    Session,
    bad_input,
    combine,
    command,
    join_names,
    pass_session,
    print_stderr,
)
from towpath.cli.logs import LogArguments, log_options
from towpath.cli.output import print_json
from towpath.cli.processes import (
    ChildProcess,
    ImportReporter,
    forward_signals,
    run_with_reload,
    stop_with_parent,
)
from towpath.cli.targets import include_option, load_app
from towpath.cli.values import Span
from towpath.operations.startup import Startup, log_startup
from towpath.settings import lanes_of, resolve

if TYPE_CHECKING:
    from towpath.app import App

LAST_PORT = 65_535

metrics_options = combine(
    click.option(
        "--metrics",
        metavar="PORT",
        type=click.IntRange(0, LAST_PORT),
        help="Serve Prometheus metrics on this port; 0 selects a free port. "
        "With --processes each process has its own port: PORT, PORT+1, ...",
    ),
    click.option(
        "--metrics-host",
        metavar="HOST",
        help="Address to serve metrics on. Default: 127.0.0.1. Needs --metrics.",
    ),
)


class Exporter(msgspec.Struct, frozen=True):
    """Host and port of a worker's metrics."""

    port: int
    host: str

    @classmethod
    def of(cls, port: int | None, host: str | None) -> Exporter | None:
        """The exporter of `--metrics` and `--metrics-host`; None without `--metrics`."""
        if port is None:
            if host is not None:
                raise click.UsageError("--metrics-host needs --metrics PORT.", click.get_current_context())
            return None
        return cls(port, host or "127.0.0.1")

    def of_process(self, number: int) -> Exporter:
        """The exporter of process `number`, counted from 1: each process has its own metrics and port."""
        return Exporter(self.port and self.port + number - 1, self.host)

    def arguments(self) -> list[str]:
        return ["--metrics", str(self.port), "--metrics-host", self.host]

    def check(self, processes: int) -> None:
        """Raise if a process could not bind its port: that process would be restarted for ever."""
        _require_prometheus()
        if self.of_process(processes).port > LAST_PORT:
            last = f"{processes} processes need the ports {self.port} to {self.port + processes - 1}"
            raise bad_input(f"{last}; the highest port is {LAST_PORT}.", "Use a smaller --metrics PORT.")
        for number in range(1, processes + 1):
            place = self.of_process(number)
            try:
                found = socket.getaddrinfo(
                    place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
                socket.create_server(found[0][4][:2], family=found[0][0]).close()
            except (OSError, UnicodeError) as error:
                raise place.refused(error) from error

    def refused(self, error: Exception) -> Failure:
        if isinstance(error, socket.gaierror | UnicodeError):
            return bad_input(
                f"Metrics cannot be served: there is no host {self.host!r}.",
                "Use an address of this machine for --metrics-host.",
            )
        # Python may append the address to the text of the error, so use the plain text of its number.
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        step = "Use another port: --metrics PORT. 0 selects a free port."
        return Failure(f"Metrics cannot be served at {self.host}, port {self.port}: {why}.", step=step)


@contextmanager
def serve_metrics(app: App, exporter: Exporter | None) -> Iterator[str | None]:
    """Serve the default registry, including the program's own metrics, while the block runs. Yields the
    URL."""
    if exporter is None:
        yield None
        return
    _require_prometheus()
    from towpath.observe.metrics import install, serve

    try:
        remove = install(app.bus, app.ledger, clock=app.engine.clock)
    except ValueError as error:
        message = "The program has already installed towpath.observe.metrics."
        raise bad_input(
            message, "Remove `install` from the program, or --metrics from the command."
        ) from error
    try:
        try:
            stop = serve(exporter.port, exporter.host)
        except (OSError, UnicodeError) as error:
            raise exporter.refused(error) from error
        try:
            yield stop.url
        finally:
            stop()
    finally:
        remove()


def _require_prometheus() -> None:
    try:
        import towpath.observe.metrics  # noqa: F401
    except ImportError as error:
        raise Failure("--metrics needs prometheus-client.", step="pip install 'towpath[metrics]'") from error


POLL_INTERVAL = 0.2
"""Seconds between two checks of the child processes."""
RESTART_DELAYS = (1.0, 2.0, 5.0, 15.0, 30.0)
"""Seconds before a failed process is restarted; the last value repeats."""
STABLE_AFTER = 60.0
"""Seconds after which a running process resets its restart delay."""


class WorkerArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `worker` as given; None leaves the value to the settings."""

    queues: str | None
    concurrency: int | None
    lease: int | None
    grace: int | None
    deploy_window: int | None
    name: str | None
    lanes: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    burst: bool = False

    def given(self) -> dict[str, Any]:
        """Keyword arguments for `app.run`. Raises InvalidInput."""
        queues = (
            None
            if self.queues is None
            else tuple(each.strip() for each in self.queues.split(",") if each.strip())
        )
        spans = {"lease": self.lease, "grace": self.grace, "deploy_window": self.deploy_window}
        lanes = lanes_of(self.lanes) or None
        options = {
            "queues": queues,
            "lanes": lanes,
            "concurrency": self.concurrency,
            **{name: None if span is None else span / 1_000_000 for name, span in spans.items()},
        }
        resolve(None, options)
        return {**options, "burst": self.burst}

    def arguments(self) -> list[str]:
        """The same options as arguments of a child's command line."""
        spans = {"--lease": self.lease, "--grace": self.grace, "--deploy-window": self.deploy_window}
        given = {name: None if span is None else f"{span / 1_000_000:.6f}" for name, span in spans.items()}
        given |= {
            "--queues": self.queues,
            "--concurrency": None if self.concurrency is None else str(self.concurrency),
        }
        words = [word for name, value in given.items() if value is not None for word in (name, value)]
        words += [word for lane in self.lanes for word in ("--lane", lane)]
        words += [word for module in self.include for word in ("--include", module)]
        return [*words, "--burst"] if self.burst else words


worker_options = combine(
    click.option(
        "--queues",
        metavar="A,B",
        help="Queues or patterns to consume. Default: the queues of the app's tasks.",
    ),
    click.option(
        "--lane",
        "lanes",
        multiple=True,
        metavar="NAME[:N]=A,B",
        help="A lane: queues with N reserved slots. Repeatable.",
    ),
    click.option(
        "--concurrency", type=click.IntRange(1, 10_000), help="Maximum number of jobs at once. Default: 32."
    ),
    click.option("--lease", type=Span(), help="Lease of a job without a heartbeat. Default: 30 s."),
    click.option(
        "--grace", type=Span(), help="Time for running jobs to finish after a stop signal. Default: 30 s."
    ),
    click.option(
        "--deploy-window",
        type=Span(),
        help="How long a job with unfit arguments waits for a worker with other code. Default: 1 h.",
    ),
    click.option("--name", help="Name of the worker in `workers list` and `jobs show`."),
    include_option,
)


@command("worker")
@click.argument("target", metavar="MODULE:APP")
@worker_options
@click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    help="Number of processes, each with --concurrency jobs. Default: 1.",
)
@click.option(
    "--burst",
    is_flag=True,
    help="End when no job is running and none can start now. Jobs scheduled for later stay.",
)
@metrics_options
@log_options
@pass_session
def worker(
    session: Session,
    /,
    target: str,
    processes: int | None,
    burst: bool,
    metrics: int | None,
    metrics_host: str | None,
    **options: Any,
) -> int:
    """Run the jobs of an app's tasks.

    The first SIGINT or SIGTERM stops claiming and lets running jobs finish. The second ends the worker at
    once; its jobs run again on another worker. SIGHUP reloads the settings."""
    stop_with_parent()
    log = _log_arguments(options)
    wanted = WorkerArguments(**options, burst=burst)
    given = wanted.given()
    exporter = Exporter.of(metrics, metrics_host)
    reporter = ImportReporter.of_dev()
    try:
        app = load_app(target, session.url, wanted.include)
    except Failure as failure:
        if reporter is not None:
            reporter.failed(failure)
        raise
    if reporter is not None:
        reporter.loaded()
    if (count := processes or app.settings.processes) > 1:
        if exporter is not None:
            exporter.check(count)
        each = [
            [*_child_arguments(session, target, wanted, number, exporter), *log.arguments()]
            for number in range(1, count + 1)
        ]
        return _run_processes(session, each)
    if wanted.name is not None:
        app.engine.name = wanted.name
    log.configure()
    # Closing releases the caretaker role, so that another process can take it at once.
    with app, serve_metrics(app, exporter) as url:
        app.run(
            **given,
            announce=lambda found: _announce(target, log, found, url),
            process_setup=log.configure_process,
        )
    return OK


def _log_arguments(options: dict[str, Any]) -> LogArguments:
    """Take the options of the log out of the options of a command."""
    return LogArguments(**{name: options.pop(name) for name in LogArguments.__struct_fields__})


PROCESS = "TOWPATH_PROCESS"
"""Environment variable: the number of a process of `--processes`. The first one prints the whole banner."""


def _announce(target: str, log: LogArguments, found: Startup, metrics: str | None) -> None:
    """Print what the worker consists of; as a log line if log lines are JSON."""
    found = msgspec.structs.replace(found, version=version())
    if log.json:
        log_startup(found, {"target": target, "pid": os.getpid(), "metrics": metrics})
    elif log.level <= INFO:
        what = f"Worker {os.getpid()} of {target}, Towpath {found.version}."
        lines = [f"{what} Ctrl-C: finish running jobs and stop."]
        if os.environ.get(PROCESS, "1") == "1":
            lines += [
                f"Ledger: {found.ledger}",
                f"Tasks: {join_names(found.tasks)}",
                f"Queues: {join_names(found.queues)}",
                f"Schedules: {join_names(found.schedules)}",
                f"Concurrency: {found.concurrency}",
            ]
        print_stderr([*lines, *([] if metrics is None else [f"Metrics: {metrics}"])])


def _run_processes(session: Session, processes: list[list[str]]) -> int:
    """Start the processes, restart failed ones and forward signals. Returns when every process has ended with
    exit code 0: after a burst, or because it was drained."""
    asked = threading.Event()
    slots = [_ProcessSlot(arguments, number) for number, arguments in enumerate(processes, 1)]
    children: list[ChildProcess] = []
    with forward_signals(children, asked, reload=True):
        while any(slot.alive or not (slot.finished or asked.is_set()) for slot in slots):
            for slot in slots:
                slot.poll(stopping=asked.is_set())
            children[:] = [slot.child for slot in slots if slot.child is not None]
            for child in children:
                if asked.is_set() and not child.stop_requested:
                    # The signal arrived while this child was being started, so it was not forwarded.
                    child.stop()
            time.sleep(POLL_INTERVAL)
        for slot in slots:
            slot.poll(stopping=True)
    codes = [slot.code for slot in slots]
    if session.json:
        print_json(
            {"processes": len(slots), "codes": codes, "restarts": sum(slot.restarts for slot in slots)}
        )
    return OK if all(code == OK for code in codes) else REFUSED


def _child_arguments(
    session: Session, target: str, wanted: WorkerArguments, number: int, exporter: Exporter | None = None
) -> list[str]:
    url = [] if session.url is None else ["--url", session.url]
    name = [] if wanted.name is None else ["--name", f"{wanted.name}-{number}"]
    metrics = [] if exporter is None else exporter.of_process(number).arguments()
    return [*url, "worker", target, *wanted.arguments(), *name, *metrics, "--processes", "1"]


class _ProcessSlot:
    """One process and its restarts."""

    def __init__(self, arguments: list[str], number: int) -> None:
        self._arguments, self._number = arguments, number
        self.finished = False
        """True once the process ended with exit code 0; it is not restarted."""
        self.child: ChildProcess | None = None
        self.code: int | None = OK
        self.restarts = self._deaths = 0
        self._since = self._due = 0.0

    @property
    def alive(self) -> bool:
        return self.child is not None and self.child.code is None

    def poll(self, stopping: bool) -> None:
        now = time.monotonic()
        if self.child is not None and (code := self.child.code) is not None:
            self.code = self.child.close()
            self.child = None
            # Exit code 0: its burst is over, or it was drained.
            self.finished = code == OK
            if stopping or self.finished:
                return
            self._deaths = 0 if now - self._since > STABLE_AFTER else self._deaths + 1
            pause = RESTART_DELAYS[min(max(self._deaths, 1), len(RESTART_DELAYS)) - 1]
            self._due, self.restarts = now + pause, self.restarts + 1
            print_stderr(
                [f"Worker process {self._number} ended with code {code}; it restarts in {pause:g} s."]
            )
        if self.child is None and not (stopping or self.finished) and now >= self._due:
            environment = {PROCESS: str(self._number)}
            self.child, self._since = ChildProcess(self._arguments, environment), now


@command("dev")
@click.argument("target", metavar="MODULE:APP")
@worker_options
@log_options
@pass_session
def dev(session: Session, /, target: str, **options: Any) -> int:
    """Run a worker that restarts when your code changes.

    Like `worker`, in a child process. The imported files of your program are checked twice a second."""
    log = _log_arguments(options)
    child = _child_arguments(session, target, WorkerArguments(**options), 1)
    return run_with_reload([*child, *log.arguments()], target)
