"""`demo`: what Towpath does, shown with real work on a fresh SQLite ledger. It ends by itself in a few seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from towpath import After, Claim, Job, Ledger, Selector, Spec, State, commands, micros, new_id, open_ledger
from towpath.cli.base import Session, command, pass_session
from towpath.cli.failures import OK, REFUSED, Failure, bad_input
from towpath.cli.output import emit
from towpath.cli.specs import tell
from towpath.cli.stage import Advance, Stage
from towpath.commands import Done, Retry

Handler = Callable[[Job], Done | Retry]

HELD = 200
LEASE = 1.5
PATIENCE = 20.0


@command("demo")
@click.option("--jobs", type=click.IntRange(300, 1_000_000), default=6000, show_default=True, help="Jobs of the first act.")
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="FILE", help="Keep the ledger in this new file, to look at it."
)
@pass_session
def demo(session: Session, /, jobs: int, keep: Path | None) -> int:
    """A demonstration with real work.

    Some thousand jobs on a fresh ledger: priorities, a delay, a dead letter, a graph, a group, and a worker that is killed.
    """
    if keep is not None and (keep.exists() or not keep.absolute().parent.is_dir()):
        raise bad_input(f"{keep} is there already, or its directory is not.", "Name a new file.")
    stage = Stage(session.json)
    with tempfile.TemporaryDirectory(prefix="towpath-demo-") as folder:
        url = f"sqlite:///{keep.absolute() if keep else Path(folder) / 'work.db'}"
        ledger = open_ledger(url)
        try:
            stage.say(f"A new ledger: {url}, every commit synced to disk\n")
            priorities(stage, ledger, jobs)
            delay(stage, ledger)
            dead_letter(stage, ledger)
            graph(stage, ledger)
            group(stage, ledger)
            crash(stage, ledger, url)
            problems = summary(stage, ledger)
        finally:
            ledger.close()
    if session.json:
        emit({"ok": not problems, "jobs": stage.jobs, "seconds": round(stage.seconds, 3), **stage.facts, "problems": problems})
    else:
        advise(stage, keep)
    return REFUSED if problems else OK


def priorities(stage: Stage, ledger: Ledger, jobs: int) -> None:
    names = ("low", "normal", "high")
    specs = [Spec(id=new_id(), queue="mail", payload=b'{"to": "ada"}', priority=names[n % 3]) for n in range(jobs)]
    with stage.act(f"{jobs:,} jobs of three priorities are written down, ...", jobs) as advance:
        start = time.perf_counter()
        for at in range(0, jobs, 1000):
            tell(ledger, commands.Append(tuple(specs[at : at + 1000])))
            advance(len(specs[at : at + 1000]))
        wrote = time.perf_counter() - start
        stage.cost("appended", "appended", jobs, wrote)
    order: list[int] = []

    def handle(job: Job) -> Done:
        order.append(job.priority)
        return Done()

    with stage.act("... and done, the urgent ones first", jobs) as advance:
        start = time.perf_counter()
        stage.jobs += drain(ledger, "mail", handle, advance)
        stage.cost("worked", "claimed and settled", jobs, time.perf_counter() - start)
        counts = ", ".join(f"{count:,} of priority {rank}" for rank, count in Counter(order).items())
        stage.say(f"  in the order of priority: {'yes' if order == sorted(order) else 'no'} ({counts})")
    stage.facts["in_order"] = order == sorted(order)


def delay(stage: Stage, ledger: Ledger) -> None:
    with stage.act("A job for later") as advance:
        later = Spec(id=new_id(), queue="later", delay=micros(0.3))
        tell(ledger, commands.Append((later,)))
        stage.say(f"  {ledger.explain(later.id)}")
        start = time.perf_counter()
        while drain(ledger, "later", lambda _: Done(), advance) == 0:
            time.sleep(0.01)
        stage.jobs += 1
        stage.say(f"  it ran after {time.perf_counter() - start:.2f} s")


def dead_letter(stage: Stage, ledger: Ledger) -> None:
    with stage.act(
        "A job that fails, is tried again, becomes a dead letter, and is brought back; another one stays dead"
    ) as advance:
        call = Spec(id=new_id(), queue="calls", kind="call", max_attempts=2)
        tell(ledger, commands.Append((call,)))
        tries = drain(ledger, "calls", lambda job: Retry(error=f"attempt {job.attempts}: nobody answers"), advance)
        job = found(ledger, call.id)
        stage.say(f"  after {tries} attempts: {job.state} ({job.reason}), {job.error!r}")
        tell(ledger, commands.Revive(where=Selector(queue="calls", states=(State.FAILED,))))
        stage.jobs += drain(ledger, "calls", lambda _: Done(b'"hello"'), advance)
        job = found(ledger, call.id)
        stage.say(f"  brought back: {job.state}, result {(job.result or b'').decode()}")
        tell(ledger, commands.Append((Spec(id=new_id(), queue="calls", kind="fax", max_attempts=1),)))
        drain(ledger, "calls", lambda _: Retry(error="no such line"), advance)


def graph(stage: Stage, ledger: Ledger) -> None:
    with stage.act(
        "A graph: one reads, three work side by side, one writes; another waits for something that fails", 6
    ) as advance:
        read = Spec(id=new_id(), queue="graph", kind="read")
        work = [Spec(id=new_id(), queue="graph", kind=f"work {n}", after=(After(read.id),)) for n in (1, 2, 3)]
        write = Spec(id=new_id(), queue="graph", kind="write", after=tuple(After(spec.id) for spec in work))
        broken = Spec(id=new_id(), queue="graph", kind="broken", max_attempts=1, priority="low")
        orphan = Spec(id=new_id(), queue="graph", kind="orphan", after=(After(broken.id),))
        # In any order: what depends on what is sorted out by the ledger.
        tell(ledger, commands.Append((write, orphan, *work, read, broken)))
        stage.say(f"  {ledger.explain(write.id)}")
        seen: list[str] = []

        def handle(job: Job) -> Done | Retry:
            seen.append(job.kind)
            return Retry(error="out of order") if job.kind == "broken" else Done()

        stage.jobs += drain(ledger, "graph", handle, advance)
        stage.say(f"  ran: {', '.join(seen)}")
        stage.say(f"  {ledger.explain(orphan.id)}")


def group(stage: Stage, ledger: Ledger) -> None:
    with stage.act("A group of 50 with a callback when all are done", 51) as advance:
        name = new_id()
        report = Spec(id=new_id(), queue="reports", kind="report")
        tell(ledger, commands.Open(name, then={"done": (report,)}))
        tell(ledger, commands.Append(tuple(Spec(id=new_id(), queue="pages", group=name) for _ in range(50))))
        early = drain(ledger, "pages", lambda _: Done(), advance)
        tell(ledger, commands.Seal(name))
        ran = drain(ledger, "pages", lambda _: Done(), advance)
        view = ledger.group(name)
        assert view is not None
        stage.say(f"  before the seal {early} ran, after it {ran}; the group is {view.state}, {view.outcome}")
        called = drain(ledger, "reports", lambda _: Done(), advance)
        stage.jobs += early + ran + called
        stage.say(f"  callbacks that ran: {called}")


def crash(stage: Stage, ledger: Ledger, url: str) -> None:
    with stage.act(f"A worker process that is killed while it holds {HELD} jobs", HELD) as advance:
        tell(ledger, commands.Append(tuple(Spec(id=new_id(), queue="crash") for _ in range(HELD))))
        command = [sys.executable, "-m", "towpath.cli.doomed", url, "crash", str(HELD), str(LEASE)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            held = [line.split() for line in worker.stdout.readline().split(",") if line.strip()]
            worker.kill()
        stage.say(
            f"  process {worker.pid} held {len(held)}, then kill -9; counted as running: {ledger.queues()['crash'].counts.running}"
        )
        start, reaped = time.perf_counter(), 0
        while reaped < len(held):
            if time.perf_counter() - start > PATIENCE:
                raise Failure(
                    f"Only {reaped} of {len(held)} leases came back.", REFUSED, "Is the clock of this machine moving?"
                )
            answer = tell(ledger, commands.Upkeep())
            reaped += answer.reaped if isinstance(answer, commands.Upkept) else 0
            time.sleep(0.02)
        took = time.perf_counter() - start
        stage.say(f"  upkeep took back {reaped} leases after {took:.2f} s (a lease of {LEASE} s)")
        ran = drain(ledger, "crash", lambda _: Done(), advance)
        stage.jobs += ran
        stage.say(f"  done by the living: {ran}, none lost")
        id, fence = held[0]
        [late] = ledger.apply([commands.Settle(id, int(fence), Done(b'"I am late"'))])
        stage.say(f"  the dead worker's own answer would be refused: {type(late).__name__}: {late}")
    stage.facts["crash"] = {"held": len(held), "reaped": reaped, "recovered": ran, "seconds": round(took, 3)}


def summary(stage: Stage, ledger: Ledger) -> list[str]:
    stage.say("What the ledger knows, without counting")
    for name, queue in sorted(ledger.queues().items()):
        counts = {state.value: getattr(queue.counts, state) for state in State if getattr(queue.counts, state)}
        stage.say(f"  {name:8} {', '.join(f'{count:,} {state}' for state, count in counts.items())}")
    problems = ledger.check()
    stage.say(f"  recounted: {'; '.join(problems) or 'everything adds up'}\n")
    return problems


def advise(stage: Stage, keep: Path | None) -> None:
    cost = stage.facts["worked"]["us_per_job"] + stage.facts["appended"]["us_per_job"]
    stage.say(
        f"{stage.jobs:,} jobs in {stage.seconds:.1f} s. A job cost {cost:.0f} µs, written down, claimed and settled on disk.\n"
    )
    program = (
        "towpath" if shutil.which("towpath") else sys.argv[0] if Path(sys.argv[0]).stem == "towpath" else "python -m towpath"
    )
    if keep is not None:
        program = f"{program} --url sqlite:///{keep.absolute()}"
        tries = [f"{program} stats", f"{program} dead list", f"{program} dead retry --all --yes"]
    else:
        tries = [f"{program} put orders '{{\"item\": 1}}'", f"{program} get orders", f"{program} stats --watch"]
    stage.say("\n".join(["Try next:", *(f"  {line}" for line in tries)]))


def drain(ledger: Ledger, queue: str, handle: Handler, advance: Advance, batch: int = 500) -> int:
    """Run everything that is ready in a queue; how many attempts that took. Each commit settles a batch and claims the next."""
    want = commands.Claim(owner="demo", wants=(commands.Want(queue, batch),), lease=micros(30))
    claims: Sequence[Claim] = ()
    ran = 0
    while True:
        settles = [commands.Settle(claim.id, claim.fence, handle(claim.job)) for claim in claims]
        *settled, claimed = ledger.apply([*settles, want])
        assert all(isinstance(answer, commands.Settled) for answer in settled), settled
        assert isinstance(claimed, commands.Claimed), claimed
        ran += len(settled)
        advance(len(settled))
        claims = claimed.claims
        if not claims:
            return ran


def found(ledger: Ledger, id: str) -> Job:
    job = ledger.get(id)
    assert job is not None
    return job
