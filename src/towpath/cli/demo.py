"""`demo`: enqueue some thousand jobs on a new ledger, kill a worker, run everything, and verify the result.

The output is progress bars on a terminal, plain lines in a pipe, one document with --json.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from towpath import App, Ledger, Reason, State, commands
from towpath.cli import demo_tasks
from towpath.cli.base import OK, REFUSED, Failure, Session, bad_input, command, pass_session
from towpath.cli.demo_tasks import app
from towpath.cli.output import console, print_json
from towpath.cli.processes import ChildProcess
from towpath.commands import Job, Query, micros
from towpath.errors import LostClaim
from towpath.escapes import escape, get_logger

Draw = Callable[[Mapping[str, int]], None]

LINE_INTERVAL = 1.0
"""Seconds between two progress lines in a pipe."""


class DemoOutput:
    def __init__(self, as_json: bool) -> None:
        self._quiet = as_json
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def line(self, text: str = "", bold: bool = False) -> None:
        if not self._quiet:
            console().print(escape(text, lines=True), style="bold" if bold else None, soft_wrap=True)

    @contextmanager
    def bars(self, totals: Mapping[str, int]) -> Iterator[Draw]:
        """A progress bar per name. The returned function updates all bars."""
        if self._quiet or not sys.stdout.isatty():
            yield self._lines(sum(totals.values()))
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("  {task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console()) as progress:
            bars = {name: progress.add_task(name, total=total) for name, total in totals.items()}

            def draw(done: Mapping[str, int]) -> None:
                for name, bar in bars.items():
                    progress.update(bar, completed=done.get(name, 0))

            yield draw

    def _lines(self, total: int) -> Draw:
        start, lines = time.perf_counter(), 0

        def draw(done: Mapping[str, int]) -> None:
            nonlocal lines
            passed, ended = time.perf_counter() - start, sum(done.values())
            if ended == total or passed >= LINE_INTERVAL * (lines + 1):
                lines = int(passed / LINE_INTERVAL)
                self.line(f"  {passed:4.1f} s  {ended:,} of {total:,}")

        return draw


DELAY = 1.0
"""Delay of a reminder in seconds."""
PAGE = 1000


class DemoJobs(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of all enqueued jobs."""

    mail: list[str]
    reminders: list[str]
    call: str
    fax: str
    read: str
    counts: list[str]
    total: str
    ferries: list[str]

    @property
    def ids(self) -> list[str]:
        return [
            *self.mail,
            *self.reminders,
            self.call,
            self.fax,
            self.read,
            *self.counts,
            self.total,
            *self.ferries,
        ]


class KilledWorker(msgspec.Struct, frozen=True):
    """The jobs that the killed worker held (id -> fence), and the time of its death."""

    held: Mapping[str, int]
    at: int


class DemoCheck(msgspec.Struct, frozen=True):
    name: str
    ok: bool
    what: str


def verify(app: App, enqueued: DemoJobs, killed: KilledWorker) -> list[DemoCheck]:
    jobs = jobs_of(app.ledger, enqueued.ids)
    return [
        _check_all_jobs(app.ledger, enqueued, jobs),
        *_check_single_jobs(jobs, enqueued),
        _check_graph(jobs, enqueued),
        _check_ferries(app, enqueued, jobs, killed),
        _check_ledger(app.ledger),
    ]


def jobs_of(ledger: Ledger, ids: Sequence[str]) -> dict[str, Job]:
    pages = (ledger.get_many(ids[at : at + PAGE]) for at in range(0, len(ids), PAGE))
    return dict(chain.from_iterable(page.items() for page in pages))


def _check_all_jobs(ledger: Ledger, enqueued: DemoJobs, jobs: Mapping[str, Job]) -> DemoCheck:
    missing = sum(id not in jobs for id in enqueued.ids)
    wrong = [
        job
        for job in jobs.values()
        if job.state is not (State.FAILED if job.id == enqueued.fax else State.DONE)
    ]
    counts = [view.counts for view in ledger.queues().values()]
    done, failed, others = (
        sum(getattr(each, name) for each in counts) for name in ("done", "failed", "waiting")
    )
    running = sum(each.running for each in counts)
    ok = not (missing or wrong or others or running) and (done, failed) == (len(enqueued.ids) - 1, 1)
    what = (
        f"{len(enqueued.ids):,} enqueued: {done:,} done, {failed} dead, {missing} missing, "
        f"{others + running} unfinished"
    )
    return DemoCheck("all jobs", ok, what)


def _check_single_jobs(jobs: Mapping[str, Job], enqueued: DemoJobs) -> Iterator[DemoCheck]:
    starts: dict[int, list[int]] = {}
    for job in (jobs[id] for id in enqueued.mail if id in jobs):
        if job.started_at is not None:
            starts.setdefault(job.priority, []).append(job.started_at)
    ranks = [starts[priority] for priority in sorted(starts)]
    ordered = all(max(sooner) <= min(later) for sooner, later in pairwise(ranks))
    ok = ordered and len(ranks) == 3 and sum(map(len, ranks)) == len(enqueued.mail)
    how = "in order of priority" if ordered else "not in order of priority"
    yield DemoCheck("mail", ok, f"{', then '.join(f'{len(rank):,}' for rank in ranks) or 'none'}: {how}")

    reminders = [jobs[id] for id in enqueued.reminders if id in jobs]
    waits = [(job.started_at or 0) - job.created_at for job in reminders]
    least = min(waits, default=0)
    yield DemoCheck(
        "reminders",
        least >= micros(DELAY),
        f"{len(waits)} started at least {least / 1e6:.2f} s after they were enqueued",
    )

    call = jobs[enqueued.call]
    ok = call.state is State.DONE and (call.attempts, call.failures, call.result) == (3, 2, b'"hello"')
    yield DemoCheck(
        "call",
        ok,
        f"{call.state} on attempt {call.attempts}, after {call.failures} failures: {_decoded(call.result)}",
    )

    fax = jobs[enqueued.fax]
    ok = fax.reason is Reason.EXHAUSTED and (fax.error or "").startswith("OSError: no line to")
    yield DemoCheck(
        "fax", ok, f"dead letter after {fax.attempts} attempts: {(fax.error or '').partition(chr(10))[0]}"
    )


def _check_graph(jobs: Mapping[str, Job], enqueued: DemoJobs) -> DemoCheck:
    read, total = jobs[enqueued.read], jobs[enqueued.total]
    counts = [jobs[id] for id in enqueued.counts]
    ok = all(_before(read, count) and _before(count, total) for count in counts) and total.result == b"9"
    return DemoCheck(
        "graph",
        ok,
        f"read, then {len(counts)} counts in parallel, then a total of {_decoded(total.result)} words",
    )


def _before(first: Job, second: Job) -> bool:
    return (
        first.finished_at is not None
        and second.started_at is not None
        and first.finished_at <= second.started_at
    )


def _check_ferries(app: App, enqueued: DemoJobs, jobs: Mapping[str, Job], killed: KilledWorker) -> DemoCheck:
    ferries = [jobs[id] for id in enqueued.ferries]
    back = [job for job in ferries if (job.state, job.losses, job.attempts) == (State.DONE, 1, 2)]
    took = (max(job.finished_at or 0 for job in ferries) - killed.at) / 1e6
    late = _late_settle(app, killed)
    ok = len(back) == len(ferries) == len(killed.held) and late == "refused"
    what = (
        f"{len(back)} of {len(killed.held)} jobs of the killed worker were completed by another worker "
        f"within {took:.1f} s; a late result is {late}"
    )
    return DemoCheck("ferries", ok, what)


def _late_settle(app: App, killed: KilledWorker) -> str:
    """Settle a job with the fence of the killed worker, as if that worker had only been slow."""
    id, fence = next(iter(killed.held.items()))
    try:
        app.engine.call(commands.Settle(id, fence, commands.Done(b'"I am late"')))
    except LostClaim:
        return "refused"
    return "accepted"


def _check_ledger(ledger: Ledger) -> DemoCheck:
    problems = ledger.check()
    return DemoCheck("ledger", not problems, "; ".join(problems) or "verified, no problems")


def _decoded(data: bytes | None) -> str:
    return "nothing" if data is None else data.decode()


TARGET = "towpath.cli.demo_tasks:app"
FERRIES, REMINDERS = 100, 20
LEASE = 2.0
"""Seconds after which the jobs of the killed worker become ready at the latest; its end is usually noticed
earlier."""
STALL_LIMIT = 20.0
"""Seconds without any change after which the demonstration stops and reports the missing jobs."""


@command("demo")
@click.option(
    "--jobs",
    type=click.IntRange(300, 1_000_000),
    default=10_000,
    show_default=True,
    help="Number of mail jobs.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="New file for the ledger. Default: a file in a temporary directory.",
)
@pass_session
def demo(session: Session, /, jobs: int, keep: Path | None) -> int:
    """Run a demonstration on a new ledger.

    Some thousand jobs with priorities, delays, a retry, a dead letter, a graph, and a worker process that is
    killed. The result is verified by reading the ledger; exit code 1 if it is wrong. The ledger is kept for
    other commands."""
    if keep is not None and keep.exists():
        raise bad_input(f"{keep} exists already.", "Use the name of a new file.")
    if keep is not None and not keep.absolute().parent.is_dir():
        raise bad_input(f"{keep.absolute().parent} is not a directory.", "Use a directory that exists.")
    # The worker logs failures; here they are intended.
    get_logger("towpath").addHandler(logging.NullHandler())
    path = keep.absolute() if keep is not None else Path(tempfile.mkdtemp(prefix="towpath-demo-")) / "work.db"
    output = DemoOutput(session.json)
    app.engine.url = f"sqlite:///{quote(str(path))}"
    with app:
        # Make this process the caretaker. If it were the worker that is killed, another process would first
        # have to take over, and the demonstration would take longer.
        app.engine.start_caretaker()
        output.line(f"New ledger {path}; every commit is synced to disk\n", bold=True)
        enqueued, wrote = enqueue_jobs(output, jobs)
        killed = kill_a_worker(output)
        asyncio.run(run_worker(output, enqueued))
        checks = verify(app, enqueued, killed)
        cost = {
            "written_us": round(wrote / jobs * 1e6, 1),
            "run_us": round(_mail_seconds(app.ledger, enqueued) / jobs * 1e6, 1),
        }
    ok = all(check.ok for check in checks)
    tries = [
        _command_line(*words)
        for words in (("dead", "list"), ("dead", "retry", "--all", "--yes"), ("worker", TARGET, "--burst"))
    ]
    if session.json:
        facts: dict[str, Any] = {
            "ok": ok,
            "jobs": len(enqueued.ids),
            "seconds": round(output.seconds, 3),
            "url": app.engine.url,
        }
        print_json({**facts, "cost": cost, "checks": checks, "next": tries})
    else:
        print_summary(output, checks, cost, tries)
    return OK if ok else REFUSED


def enqueue_jobs(output: DemoOutput, jobs: int) -> tuple[DemoJobs, float]:
    """Enqueue all jobs. Returns their ids and the seconds that the mail took."""
    output.line("Enqueue all jobs", bold=True)
    urgencies = [demo_tasks.send.options(priority=priority) for priority in ("low", "normal", "high")]
    mail: list[str] = []
    with output.bars({"mail": jobs}) as draw:
        start = time.perf_counter()
        while len(mail) < jobs:
            calls = [urgencies[n % 3].of(f"guest {n}") for n in range(len(mail), min(jobs, len(mail) + 1000))]
            mail += [handle.id for handle in demo_tasks.send.enqueue_many(calls)]
            draw({"mail": len(mail)})
        wrote = time.perf_counter() - start
    later = demo_tasks.remind.options(delay=DELAY)
    reminders = later.enqueue_many(later.of(f"guest {n}") for n in range(REMINDERS))
    call, fax = demo_tasks.call.enqueue("555-0100"), demo_tasks.fax.enqueue("555-0199")
    read = demo_tasks.read.enqueue()
    graph = app.group(
        [demo_tasks.count.options(after=read).of(page) for page in range(3)], then=demo_tasks.total.of()
    )
    assert graph.then is not None
    ferries = demo_tasks.ferry.enqueue_many(demo_tasks.ferry.of(n) for n in range(FERRIES))
    output.line(f"  explain a reminder: {reminders[0].explain()}")
    output.line(f"  explain the last job of the graph: {graph.then.explain()}")
    enqueued = DemoJobs(
        mail=mail,
        reminders=[handle.id for handle in reminders],
        call=call.id,
        fax=fax.id,
        read=read.id,
        counts=[handle.id for handle in graph.jobs],
        total=graph.then.id,
        ferries=[handle.id for handle in ferries],
    )
    return enqueued, wrote


def kill_a_worker(output: DemoOutput) -> KilledWorker:
    """Start a worker process that claims all ferries, and kill it with SIGKILL while they run."""
    output.line("\nStart a worker process for the ferries, and kill it", bold=True)
    words = ["worker", TARGET, "--queues", "ferries", "--concurrency", str(FERRIES), "--lease", f"{LEASE}s"]
    child = ChildProcess(
        ["--url", app.engine.url, *words, "--processes", "1", "--name", "doomed"], quiet=True
    )
    try:
        deadline = time.monotonic() + STALL_LIMIT
        while True:
            seen = app.ledger.version()
            held = app.ledger.find(
                Query(queue="ferries", states=(State.RUNNING,), bodies=False, limit=FERRIES)
            ).jobs
            if len(held) == FERRIES:
                break
            if child.code is not None or time.monotonic() > deadline:
                step = f"Run it by hand to see its output: {_command_line(*words)}"
                raise Failure(
                    f"The worker process did not claim the ferries (exit code {child.code}).", REFUSED, step
                )
            app.ledger.wait(seen, 0.2)
        child.process.kill()
    finally:
        child.close()
    output.line(f"  process {child.process.pid} held {len(held)} jobs and was killed with SIGKILL")
    output.line(f"  {app.ledger.explain(held[0].id)}")
    return KilledWorker({job.id: job.fence for job in held}, app.engine.clock.now())


async def run_worker(output: DemoOutput, enqueued: DemoJobs) -> None:
    """Run a worker in this process until all jobs have finished. The bars show the counts of the ledger."""
    output.line("\nRun all jobs with another worker, including the ferries of the killed one", bold=True)
    totals = {
        "mail": len(enqueued.mail),
        "reminders": REMINDERS,
        "calls": 1,
        "faxes": 1,
        "graph": 5,
        "ferries": FERRIES,
    }
    worker = asyncio.create_task(app.arun(queues=tuple(totals), concurrency=64, lease=30, grace=5))
    try:
        with output.bars(totals) as draw:
            before, since = -1, time.monotonic()
            while not worker.done() and time.monotonic() - since < STALL_LIMIT:
                ended = {name: view.counts.finished for name, view in app.ledger.queues().items()}
                draw(ended)
                if (now := sum(ended.values())) == len(enqueued.ids):
                    break
                if now != before:
                    before, since = now, time.monotonic()
                await asyncio.sleep(0.05)
    finally:
        worker.cancel()
        [how] = await asyncio.gather(worker, return_exceptions=True)
    if isinstance(how, Exception):
        raise how


def _mail_seconds(ledger: Ledger, enqueued: DemoJobs) -> float:
    """Seconds from the first start to the last end of a mail job."""
    mail = jobs_of(ledger, enqueued.mail).values()
    return (max(job.finished_at or 0 for job in mail) - min(job.started_at or 0 for job in mail)) / 1e6


def print_summary(
    output: DemoOutput, checks: Sequence[DemoCheck], cost: dict[str, float], tries: Sequence[str]
) -> None:
    output.line("\nResult, read from the ledger", bold=True)
    for check in checks:
        output.line(f"  {'ok   ' if check.ok else 'WRONG'} {check.name:<9}  {check.what}")
    each, rate = cost["written_us"] + cost["run_us"], 1e6 / max(cost["run_us"], 0.1)
    output.line(
        f"\nTotal {output.seconds:.1f} s. A mail job took {each:.0f} µs: {cost['written_us']:.0f} to "
        "enqueue, "
        f"{cost['run_us']:.0f} to claim, run and settle ({rate:,.0f} jobs per second)."
    )
    output.line(
        "\nThe ledger is kept. Next, list the dead letter, retry it, and run it",
        bold=True,
    )
    for line in tries:
        output.line(f"  {line}")


def _command_line(*words: str) -> str:
    """A command for this ledger, as typed in a shell."""
    beside = sys.argv[0] if Path(sys.argv[0]).stem == "towpath" else f"{sys.executable} -m towpath"
    program = "towpath" if shutil.which("towpath") else beside
    return f"{program} --url {shlex.quote(app.engine.url)} {shlex.join(words)}"
