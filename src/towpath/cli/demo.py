"""`demo`: what Towpath does, shown with real work on a fresh SQLite ledger. The tasks are in `showcase.py`."""

from __future__ import annotations

import asyncio
import logging
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from towpath import Ledger, Query, State
from towpath.cli import showcase
from towpath.cli.base import Session, command, pass_session
from towpath.cli.failures import OK, REFUSED, Failure, bad_input
from towpath.cli.family import Child
from towpath.cli.output import emit
from towpath.cli.proof import DELAY, Check, Crash, Written, jobs_of, prove
from towpath.cli.showcase import app
from towpath.cli.stage import Stage
from towpath.escapes import get_logger

TARGET = "towpath.cli.showcase:app"
FERRIES, REMINDERS = 100, 20
LEASE = 2.0
"""Seconds that the jobs of a dead worker stay its own."""
STUCK = 20.0
"""Seconds without any change after which the demonstration gives up, and says what is missing."""


@command("demo")
@click.option("--jobs", type=click.IntRange(300, 1_000_000), default=10_000, show_default=True, help="How much mail.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The new file for the ledger; else in a temporary directory.",
)
@pass_session
def demo(session: Session, /, jobs: int, keep: Path | None) -> int:
    """A demonstration with real work.

    Some thousand jobs on a fresh ledger: priorities, delays, a retry, a dead letter, a graph, and a worker that is killed. What
    happened is read back from the ledger; exit code 1 if it is not as promised. The ledger stays, to look at it.
    """
    if keep is not None and (keep.exists() or not keep.absolute().parent.is_dir()):
        raise bad_input(f"{keep} is there already, or its directory is not.", "Name a new file.")
    # The worker logs failures, and here they are on purpose.
    get_logger("towpath").addHandler(logging.NullHandler())
    path = keep.absolute() if keep is not None else Path(tempfile.mkdtemp(prefix="towpath-demo-")) / "work.db"
    stage = Stage(session.json)
    app.url = f"sqlite:///{quote(str(path))}"
    with app:
        # This process looks after the ledger. It could be the doomed one, but then somebody would have to notice that first.
        app.attend()
        stage.say(f"A new ledger: {path}, every commit synced to disk\n", bold=True)
        written, wrote = write_down(stage, jobs)
        crash = kill_a_worker(stage)
        asyncio.run(work(stage, written))
        checks = prove(app, written, crash)
        cost = {"written_us": round(wrote / jobs * 1e6, 1), "run_us": round(_time_of_mail(app.ledger, written) / jobs * 1e6, 1)}
    ok = all(check.ok for check in checks)
    tries = [_typed(*words) for words in (("dead", "list"), ("dead", "retry", "--all", "--yes"), ("worker", TARGET, "--burst"))]
    if session.json:
        facts: dict[str, Any] = {"ok": ok, "jobs": len(written.ids), "seconds": round(stage.seconds, 3), "url": app.url}
        emit({**facts, "cost": cost, "checks": checks, "next": tries})
    else:
        tell(stage, checks, cost, tries)
    return OK if ok else REFUSED


def write_down(stage: Stage, jobs: int) -> tuple[Written, float]:
    """The ids of all jobs, and the seconds that the mail took."""
    stage.say("All work is written down first.", bold=True)
    urgencies = [showcase.send.options(priority=priority) for priority in ("low", "normal", "high")]
    mail: list[str] = []
    with stage.bars({"mail": jobs}) as draw:
        start = time.perf_counter()
        while len(mail) < jobs:
            calls = [urgencies[n % 3].of(f"guest {n}") for n in range(len(mail), min(jobs, len(mail) + 1000))]
            mail += [handle.id for handle in showcase.send.enqueue_many(calls)]
            draw({"mail": len(mail)})
        wrote = time.perf_counter() - start
    later = showcase.remind.options(delay=DELAY)
    reminders = later.enqueue_many(later.of(f"guest {n}") for n in range(REMINDERS))
    call, fax = showcase.call.enqueue("555-0100"), showcase.fax.enqueue("555-0199")
    read = showcase.read.enqueue()
    graph = app.group([showcase.count.options(after=read).of(page) for page in range(3)], then=showcase.total.of())
    assert graph.then is not None
    ferries = showcase.ferry.enqueue_many(showcase.ferry.of(n) for n in range(FERRIES))
    stage.say(f"  a reminder: {reminders[0].explain()}")
    stage.say(f"  the end of a graph: {graph.then.explain()}")
    written = Written(
        mail=mail,
        reminders=[handle.id for handle in reminders],
        call=call.id,
        fax=fax.id,
        read=read.id,
        counts=[handle.id for handle in graph.jobs],
        total=graph.then.id,
        ferries=[handle.id for handle in ferries],
    )
    return written, wrote


def kill_a_worker(stage: Stage) -> Crash:
    """A real worker process takes all ferries, and is killed in the middle of them."""
    stage.say("\nA worker process takes the ferries ...", bold=True)
    words = ["worker", TARGET, "--queues", "ferries", "--concurrency", str(FERRIES), "--lease", f"{LEASE}s"]
    child = Child(["--url", app.url, *words, "--processes", "1", "--name", "doomed"], quiet=True)
    try:
        deadline = time.monotonic() + STUCK
        while True:
            seen = app.ledger.version()
            held = app.ledger.find(Query(queue="ferries", states=(State.RUNNING,), bodies=False, limit=FERRIES)).jobs
            if len(held) == FERRIES:
                break
            if child.code is not None or time.monotonic() > deadline:
                step = f"See what it says: {_typed(*words)}"
                raise Failure(f"The worker process did not take the ferries (exit code {child.code}).", REFUSED, step)
            app.ledger.wait(seen, 0.2)
        child.process.kill()
    finally:
        child.close()
    stage.say(f"  process {child.process.pid} held {len(held)} jobs, then kill -9; for the ledger they still run")
    stage.say(f"  {app.ledger.explain(held[0].id)}")
    return Crash({job.id: job.fence for job in held}, app.clock.now())


async def work(stage: Stage, written: Written) -> None:
    """A worker in this process does the rest, and the bars show what the ledger counts."""
    stage.say("\nAnother worker does all the rest, and the ferries when their lease is over.", bold=True)
    totals = {"mail": len(written.mail), "reminders": REMINDERS, "calls": 1, "faxes": 1, "graph": 5, "ferries": FERRIES}
    worker = asyncio.create_task(app.arun(queues=tuple(totals), concurrency=64, lease=30, grace=5))
    try:
        with stage.bars(totals) as draw:
            before, since = -1, time.monotonic()
            while not worker.done() and time.monotonic() - since < STUCK:
                ended = {name: view.counts.finished for name, view in app.ledger.queues().items()}
                draw(ended)
                if (now := sum(ended.values())) == len(written.ids):
                    break
                if now != before:
                    before, since = now, time.monotonic()
                await asyncio.sleep(0.05)
    finally:
        worker.cancel()
        [how] = await asyncio.gather(worker, return_exceptions=True)
    if isinstance(how, Exception):
        raise how


def _time_of_mail(ledger: Ledger, written: Written) -> float:
    """Seconds from the first start to the last end."""
    mail = jobs_of(ledger, written.mail).values()
    return (max(job.finished_at or 0 for job in mail) - min(job.started_at or 0 for job in mail)) / 1e6


def tell(stage: Stage, checks: Sequence[Check], cost: dict[str, float], tries: Sequence[str]) -> None:
    stage.say("\nWhat happened, read back from the ledger", bold=True)
    for check in checks:
        stage.say(f"  {'ok   ' if check.ok else 'WRONG'} {check.name:<9}  {check.what}")
    each, rate = cost["written_us"] + cost["run_us"], 1e6 / max(cost["run_us"], 0.1)
    stage.say(
        f"\nIt took {stage.seconds:.1f} s. A piece of mail cost {each:.0f} µs on disk: {cost['written_us']:.0f} to write it down, "
        f"{cost['run_us']:.0f} to claim, run and settle it ({rate:,.0f} a second)."
    )
    stage.say("\nThe ledger stays where it is. Try next: look at the dead letter, bring it back, and run it", bold=True)
    for line in tries:
        stage.say(f"  {line}")


def _typed(*words: str) -> str:
    """A command for this ledger as one types it."""
    beside = sys.argv[0] if Path(sys.argv[0]).stem == "towpath" else f"{sys.executable} -m towpath"
    program = "towpath" if shutil.which("towpath") else beside
    return f"{program} --url {shlex.quote(app.url)} {shlex.join(words)}"
