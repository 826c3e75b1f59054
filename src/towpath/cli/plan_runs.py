"""`plan` commands that take time: run, watch, dry-run and agent; and submit and check."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath.cli.base import (
    LEFT,
    OK,
    REFUSED,
    Failure,
    Session,
    combine,
    command,
    join_names,
    pass_session,
    print_stderr,
)
from towpath.cli.logs import LogArguments, log_options
from towpath.cli.output import format_span, print_result, table
from towpath.cli.plan_files import file_options, load_plan
from towpath.cli.plan_views import (
    code_of,
    counted,
    failed_steps,
    failure_lines,
    open_plan,
    running_steps,
    status_data,
    status_lines,
    took,
)
from towpath.cli.processes import STOP_SIGNALS, stop_with_parent
from towpath.cli.targets import usable_url
from towpath.cli.values import Span, now
from towpath.errors import PlanRefused
from towpath.escapes import escape, get_logger
from towpath.flows.kinds import PlanState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from towpath.app import App
    from towpath.flows.plan import Plan
    from towpath.flows.status import PlanStatus, StepStatus
    from towpath.operations.plans import PlanHandle
    from towpath.operations.startup import Startup

POLL_SECONDS = 0.25
"""Seconds between two reads of the status."""
MAX_RUNNING = 10
"""Running steps that are shown one by one."""

id_option = click.option("--id", "new_id", help="Id of the plan. Default: its name and a random part.")
by_option = click.option("--by", help="Your name in the audit. Default: the user of this process.")
here_option = click.option(
    "--here",
    is_flag=True,
    help="Run the steps in this process, for all nodes of the plan. Otherwise their agents must be running.",
)


@command("check")
@file_options
@pass_session
def check(session: Session, /, file: str, arguments: tuple[str, ...]) -> int:
    """Validate a plan without a ledger, and print it."""
    loaded = load_plan(session, file, arguments)
    from towpath.settings import resolve

    loaded.plan.check(tuple(resolve(session.url).nodes) or None)
    data = {"name": loaded.plan.name, "hash": loaded.plan.content_hash, "steps": len(loaded.plan.steps)}
    plan = msgspec.json.decode(loaded.plan.to_json())
    print_result(
        session.json, {**data, "plan": plan}, lambda: [*str(loaded.plan).splitlines(), "The plan is valid."]
    )
    return OK


@command("submit")
@file_options
@id_option
@by_option
@pass_session
def submit(
    session: Session, /, file: str, arguments: tuple[str, ...], new_id: str | None, by: str | None
) -> int:
    """Store a plan; agents run it. Prints its id.

    A second submit of the same plan with the same id changes nothing."""
    loaded = load_plan(session, file, arguments)
    with loaded.app(session) as app:
        handle = app.plans.submit(loaded.plan, id=new_id, by=by)
        _warn_of_missing_agents(app, loaded.plan)
        data = status_data(handle.status())
    print_result(session.json, data, handle.id)
    return OK


@command("dry-run")
@file_options
@here_option
@click.option("--timeout", type=Span(), help="Maximum time for all checks. Default: 60 s.")
@pass_session
def dry_run(
    session: Session, /, file: str, arguments: tuple[str, ...], here: bool, timeout: int | None
) -> int:
    """Run the checks of all steps on their nodes, and no action.

    The exit code is 1 if a check has no answer."""
    loaded = load_plan(session, file, arguments)
    with loaded.app(session) as app, _worker_here(app, loaded.plan) if here else nullcontext():
        if not here:
            _warn_of_missing_agents(app, loaded.plan)
        try:
            found = app.plans.dry_run(loaded.plan, timeout=60.0 if timeout is None else timeout / 1e6)
        except TimeoutError as error:
            step = "Start agents for its nodes (`towpath plan agent --node NAME`), or add --here."
            raise Failure("The checks have not ended in time.", REFUSED, step) from error
    rows = [(each.step, each.node or None, each.answer, each.error) for each in found]
    data = {"name": loaded.plan.name, "steps": [msgspec.to_builtins(each) for each in found]}
    print_result(session.json, data, lambda: table(("step", "node", "answer", "error"), rows))
    return REFUSED if any(each.answer == "unknown" for each in found) else OK


@command("run")
@file_options
@id_option
@by_option
@here_option
@click.option(
    "--timeout",
    type=Span(),
    help="After this time the plan is aborted: rolled back before its pivot, completed after it.",
)
@pass_session
def run(session: Session, /, file: str, arguments: tuple[str, ...], **options: Any) -> int:
    """Store a plan, wait for its end, and show its progress.

    Ctrl-C aborts the plan: before its pivot it is rolled back, after it the plan is completed, and the
    command prints which. A second Ctrl-C leaves at once; the plan goes on in the ledger. With the id of a
    plan that was submitted before, the command waits for that plan."""
    loaded = load_plan(session, file, arguments)
    span = options["timeout"]
    with loaded.app(session) as app, _signals() as asked:
        # The worker starts first, so that its errors prevent the submit.
        with _worker_here(app, loaded.plan) if options["here"] else nullcontext(_nothing) as check_worker:
            handle = app.plans.submit(loaded.plan, id=options["new_id"], by=options["by"])
            if not session.json:
                print_stderr([f"Plan {handle.id}: {len(loaded.plan.steps)} steps. Ctrl-C aborts it."])
            if not options["here"]:
                _warn_of_missing_agents(app, loaded.plan)
            end = None if span is None else time.monotonic() + span / 1e6
            status = _waited(session, app, handle, _Limits(asked, end, check_worker))
        failed = failed_steps(handle, status)
    return _print_end(session, status, failed)


@command("watch")
@click.argument("plan")
@pass_session
def watch(session: Session, /, plan: str) -> int:
    """Show the progress of a plan until it has ended. Ctrl-C leaves; the plan goes on."""
    with open_plan(session, plan) as (app, handle):
        try:
            status, code = _waited(session, app, handle, _Limits(_StopSignals())), None
        except KeyboardInterrupt:
            status, code = handle.status(), LEFT
        failed = failed_steps(handle, status)
    ended = _print_end(session, status, failed)
    return ended if code is None else code


def _print_end(session: Session, status: PlanStatus, failed: Sequence[StepStatus]) -> int:
    data = {**status_data(status), "failed": [step.as_dict() for step in failed]}
    print_result(session.json, data, lambda: [*status_lines(status, now()), *failure_lines(failed)])
    return code_of(status)


# Waiting


class _StopSignals:
    """The stop signals that have arrived."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # At once: the ledger is consistent, and another worker runs what this process has begun.
            os.write(2, b"Left. The plan goes on in the ledger; `towpath plan watch` shows it.\n")
            os._exit(LEFT)
        self.signal = number


@contextmanager
def _signals() -> Iterator[_StopSignals]:
    asked = _StopSignals()
    before = {number: signal.signal(number, asked.on_signal) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing() -> None:
    pass


class _Limits(msgspec.Struct, frozen=True):
    """What ends the wait for a plan: a signal, a time of the monotonic clock, a worker that failed."""

    asked: _StopSignals
    end: float | None = None
    check_worker: Callable[[], None] = _nothing


def _waited(session: Session, app: App, handle: PlanHandle, limits: _Limits) -> PlanStatus:
    """Wait until the plan has ended; after a signal or the timeout abort it once, and wait on."""
    asked, aborted = limits.asked, False
    with _display(session, app) as show:
        while True:
            limits.check_worker()
            status = handle.status()
            show(status)
            if status.is_final:
                return status
            late = limits.end is not None and time.monotonic() >= limits.end
            if (asked.signal is not None or late) and not aborted:
                name = None if asked.signal is None else signal.Signals(asked.signal).name
                aborted = _abort(handle, "timeout of towpath plan run" if name is None else name)
            # Not an event that the signal handler sets: it may interrupt the wait while the event is locked.
            time.sleep(POLL_SECONDS)


def _abort(handle: PlanHandle, why: str) -> bool:
    """Abort the plan and print the consequence. False if the plan is about to change: try again."""
    head = f"Interrupted ({why})" if why.startswith("SIG") else "The time is over"
    try:
        rolls_back = handle.abort(why=why)
    except PlanRefused as refused:
        state = handle.status().state
        if state in (PlanState.ROLLING_BACK, PlanState.CLEANING_UP) or state.is_final:
            print_stderr([f"{head}: the plan is {state} already."])
            return True
        print_stderr([f"{head}: {refused}"])
        return False
    if rolls_back is None:
        text = "the pivot is running; if it takes effect the plan is completed, otherwise it is rolled back."
    elif rolls_back:
        text = "before the pivot, so the plan is rolled back."
    else:
        text = "after the pivot, so the plan is completed."
    print_stderr([f"{head}: {text} Ctrl-C again leaves at once; the plan goes on in the ledger."])
    return True


Show = Callable[["PlanStatus"], None]


@contextmanager
def _display(session: Session, app: App) -> Iterator[Show]:
    """A live view on a terminal; elsewhere a line for each change of the state; nothing with --json."""
    if session.json:
        yield lambda status: None
    elif not sys.stderr.isatty():
        yield _state_lines()
    else:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            yield lambda status: live.update(_drawn(app, status), refresh=True)


def _state_lines() -> Show:
    last: list[PlanState] = []

    def show(status: PlanStatus) -> None:
        if status.state not in last[-1:]:
            last.append(status.state)
            why = f": {status.why}" if status.why else ""
            print_stderr([f"{status.id}: {status.state}, {counted(status.steps) or 'no steps'}{why}"])

    return show


def _drawn(app: App, status: PlanStatus) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    counts = getattr(status, status.stage)
    ended = counts.total - counts.unfinished
    head = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(1, counts.total), completed=ended, width=30)
    head.add_row(Text(escape(status.id)), Text(status.state), bar, Text(f"{ended} of {counts.total}"))
    rows: list[RenderableType] = [head]
    at = now()
    for name, since in running_steps(app, status, MAX_RUNNING + 1)[:MAX_RUNNING]:
        rows.append(Text(f"  {escape(name)}  {format_span(max(0, at - since))}", style="cyan"))
    rows.append(Text(f"  {took(status, at)}  {escape(status.why or '')}".rstrip(), style="dim"))
    return Group(*rows)


# Workers


@contextmanager
def _worker_here(app: App, plan: Plan) -> Iterator[Callable[[], None]]:
    """A worker in a thread of this process, for the nodes of the plan. Yields a function that raises the
    error of a worker that has failed."""
    if not logging.root.handlers:
        # The command prints the errors of steps itself.
        get_logger("towpath").setLevel(logging.CRITICAL)
    begun = threading.Event()
    failed: list[BaseException] = []
    loop = asyncio.new_event_loop()
    queues = tuple(f"node/{node}" for node in plan.nodes) or ("node/none",)

    def announce(startup: Startup) -> None:
        begun.set()

    task = loop.create_task(app.arun(queues=queues, announce=announce))

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            failed.append(error)
        finally:
            begun.set()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def check_worker() -> None:
        if failed:
            raise failed[0]

    thread = threading.Thread(target=work, name="towpath-plan-worker", daemon=True)
    thread.start()
    begun.wait()
    try:
        check_worker()
        yield check_worker
    finally:
        if not failed:
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


def _warn_of_missing_agents(app: App, plan: Plan) -> None:
    """Print the nodes of the plan without a worker on their queues."""
    patterns = [each for worker in app.workers.list() for queue in worker.queues for each in queue.split(",")]
    missing = [node for node in plan.nodes if not any(fnmatchcase(f"node/{node}", each) for each in patterns)]
    if missing:
        step = f"towpath plan agent --node {missing[0]}"
        print_stderr([f"No agent is running for {join_names(missing)}. Start one: {step}"])


agent_options = combine(
    click.option("--node", "nodes", multiple=True, metavar="NAME", help="A node to serve. Repeatable."),
    click.option("--all-nodes", is_flag=True, help="Serve every node."),
    click.option("--concurrency", type=click.IntRange(1, 10_000), help="Maximum number of steps at once."),
    click.option("--lease", type=Span(), help="Lease of a step without a heartbeat. Default: 30 s."),
    click.option(
        "--grace", type=Span(), help="Time for running steps to finish after a stop signal. Default: 30 s."
    ),
    click.option("--name", help="Name of the worker in `workers list`."),
)


@command("agent")
@agent_options
@log_options
@pass_session
def agent(session: Session, /, nodes: tuple[str, ...], all_nodes: bool, **options: Any) -> int:
    """Run the steps of nodes: SQL, shell and HTTP.

    The settings of this process have the addresses and the names of the credentials of the nodes. Steps that
    call tasks need `towpath worker` with the app of the tasks. Signals are those of `towpath worker`."""
    from towpath.app import App

    if bool(nodes) == all_nodes:
        raise click.UsageError("Give --node NAME, or --all-nodes.", click.get_current_context())
    stop_with_parent()
    log = LogArguments(**{name: options.pop(name) for name in LogArguments.__struct_fields__})
    log.configure()
    name, concurrency = options["name"], options["concurrency"]
    spans = {each: None if options[each] is None else options[each] / 1e6 for each in ("lease", "grace")}
    queues = ("node/*",) if all_nodes else tuple(f"node/{node}" for node in nodes)
    with App(usable_url(session.url), name=name) as app:
        app.run(
            queues=queues,
            concurrency=concurrency,
            lease=spans["lease"],
            grace=spans["grace"],
            announce=lambda found: _announce(queues, log, found),
        )
    return OK


def _announce(queues: Sequence[str], log: LogArguments, found: Startup) -> None:
    if not log.quiet and not log.json:
        nodes = join_names([queue.removeprefix("node/") for queue in queues])
        print_stderr(
            [f"Agent {os.getpid()} of {nodes} on {found.ledger}. Ctrl-C: finish running steps and stop."]
        )
