"""What a ledger does, shown on a fresh SQLite file in a temporary directory. Run it with `make run`; it ends by itself.

This speaks to the ledger directly, in batches, as the engine will: one `apply` settles what was done and claims what is next.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import towpath
from towpath import After, Claim, Done, Job, Ledger, Retry, Selector, Spec, State, commands, micros, new_id

Handler = Callable[[Job], Done | Retry]

JOBS = 6_000
HELD = 200
LEASE = micros(1.5)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="towpath-demo-") as folder:
        url = f"sqlite:///{Path(folder) / 'work.db'}"
        ledger = towpath.open_ledger(url)
        print(f"A new ledger: {url}, synchronous=FULL\n")
        try:
            priorities(ledger)
            delay(ledger)
            dead_letter(ledger)
            graph(ledger)
            group(ledger)
            crash(ledger, url)
            summary(ledger)
        finally:
            ledger.close()


def priorities(ledger: Ledger) -> None:
    title(f"{JOBS} jobs of three priorities")
    names = ("low", "normal", "high")
    specs = [Spec(id=new_id(), queue="mail", payload=b'{"to": "ada"}', priority=names[n % 3]) for n in range(JOBS)]
    start = time.perf_counter()
    for at in range(0, JOBS, 1000):
        tell(ledger, commands.Append(tuple(specs[at : at + 1000])))
    cost("appended", JOBS, time.perf_counter() - start)
    order: list[int] = []

    def handle(job: Job) -> Done:
        order.append(job.priority)
        return Done()

    start = time.perf_counter()
    drain(ledger, "mail", handle)
    cost("claimed and settled", JOBS, time.perf_counter() - start)
    print(f"  in the order of priority: {order == sorted(order)}, {dict(Counter(order))}\n")


def delay(ledger: Ledger) -> None:
    title("A job for later")
    later = Spec(id=new_id(), queue="later", delay=micros(0.3))
    tell(ledger, commands.Append((later,)))
    print(f"  {ledger.explain(later.id)}")
    start = time.perf_counter()
    while drain(ledger, "later", lambda _: Done()) == 0:
        time.sleep(0.01)
    print(f"  it ran after {time.perf_counter() - start:.2f} s\n")


def dead_letter(ledger: Ledger) -> None:
    title("A job that fails, becomes a dead letter, and is revived")
    call = Spec(id=new_id(), queue="calls", kind="call", max_attempts=2)
    tell(ledger, commands.Append((call,)))
    tries = drain(ledger, "calls", lambda job: Retry(error=f"attempt {job.attempts}: nobody answers"))
    job = found(ledger, call.id)
    print(f"  after {tries} attempts: {job.state}/{job.reason}, {job.error!r}")
    answer = tell(ledger, commands.Revive(where=Selector(queue="calls", states=(State.FAILED,))))
    drain(ledger, "calls", lambda _: Done(b'"hello"'))
    print(f"  {answer}")
    print(f"  after that: {found(ledger, call.id).state}, result {found(ledger, call.id).result!r}\n")


def graph(ledger: Ledger) -> None:
    title("A graph: one reads, three work side by side, one writes; another waits for something that fails")
    read = Spec(id=new_id(), queue="graph", kind="read")
    work = [Spec(id=new_id(), queue="graph", kind=f"work {n}", after=(After(read.id),)) for n in (1, 2, 3)]
    write = Spec(id=new_id(), queue="graph", kind="write", after=tuple(After(spec.id) for spec in work))
    broken = Spec(id=new_id(), queue="graph", kind="broken", max_attempts=1, priority="low")
    orphan = Spec(id=new_id(), queue="graph", kind="orphan", after=(After(broken.id),))
    # In any order: what depends on what is sorted out by the ledger.
    tell(ledger, commands.Append((write, orphan, *work, read, broken)))
    print(f"  {ledger.explain(write.id)}")
    seen: list[str] = []

    def handle(job: Job) -> Done | Retry:
        seen.append(job.kind)
        return Retry(error="out of order") if job.kind == "broken" else Done()

    drain(ledger, "graph", handle)
    print(f"  ran: {', '.join(seen)}")
    print(f"  {ledger.explain(orphan.id)}\n")


def group(ledger: Ledger) -> None:
    title("A group of 50 with a callback when all are done")
    name = new_id()
    report = Spec(id=new_id(), queue="reports", kind="report")
    tell(ledger, commands.Open(name, then={"done": (report,)}))
    tell(ledger, commands.Append(tuple(Spec(id=new_id(), queue="pages", group=name) for _ in range(50))))
    early = drain(ledger, "pages", lambda _: Done())
    tell(ledger, commands.Seal(name))
    ran = drain(ledger, "pages", lambda _: Done())
    view = ledger.group(name)
    assert view is not None
    print(f"  before the seal {early} ran, after it {ran}; the group is {view.state}, {view.outcome}")
    print(f"  callbacks that ran: {drain(ledger, 'reports', lambda _: Done())}\n")


def crash(ledger: Ledger, url: str) -> None:
    title(f"A worker process that is killed while it holds {HELD} jobs")
    tell(ledger, commands.Append(tuple(Spec(id=new_id(), queue="crash") for _ in range(HELD))))
    command = [sys.executable, __file__, "hold", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        held = [line.split() for line in iter(worker.stdout.readline, "\n")]
        worker.send_signal(signal.SIGKILL)
    print(f"  process {worker.pid} held {len(held)}, then kill -9; counts: {ledger.queues()['crash'].counts.running} running")
    start, reaped = time.perf_counter(), 0
    while reaped < len(held):
        answer = tell(ledger, commands.Upkeep())
        reaped += answer.reaped if isinstance(answer, commands.Upkept) else 0
        time.sleep(0.02)
    print(f"  upkeep took back {reaped} leases after {time.perf_counter() - start:.2f} s")
    id, fence = held[0]
    ran = drain(ledger, "crash", lambda _: Done())
    print(f"  done by the living: {ran}, each with {found(ledger, id).losses} loss and a higher fence")
    [late] = ledger.apply([commands.Settle(id, int(fence), Done(b'"I am late"'))])
    print(f"  the dead worker's own answer: {type(late).__name__}: {late}\n")


def hold(url: str) -> None:
    """The worker that will be killed: claims, says what it has, and hangs."""
    ledger = towpath.open_ledger(url)
    answer = tell(ledger, commands.Claim(owner="doomed", wants=(commands.Want("crash", HELD),), lease=LEASE))
    assert isinstance(answer, commands.Claimed)
    print(*(f"{claim.id} {claim.fence}" for claim in answer.claims), sep="\n", end="\n\n", flush=True)
    time.sleep(600)


def summary(ledger: Ledger) -> None:
    title("What the ledger knows, without counting")
    for name, queue in sorted(ledger.queues().items()):
        counts = {state.value: getattr(queue.counts, state) for state in State if getattr(queue.counts, state)}
        print(f"  {name:8} {counts}")
    problems = ledger.check()
    print(f"  recounted: {problems or 'everything adds up'}")
    if problems:
        sys.exit(1)


def drain(ledger: Ledger, queue: str, handle: Handler, batch: int = 500) -> int:
    """Run everything that is ready in a queue; how many attempts that took."""
    want = commands.Claim(owner="demo", wants=(commands.Want(queue, batch),), lease=micros(30))
    claims: Sequence[Claim] = ()
    ran = 0
    while True:
        settles = [commands.Settle(claim.id, claim.fence, handle(claim.job)) for claim in claims]
        *settled, claimed = ledger.apply([*settles, want])
        assert all(isinstance(answer, commands.Settled) for answer in settled), settled
        assert isinstance(claimed, commands.Claimed), claimed
        ran += len(settled)
        claims = claimed.claims
        if not claims:
            return ran


def tell(ledger: Ledger, command: commands.Command) -> commands.Result:
    """Apply one command and raise if it is refused."""
    [answer] = ledger.apply([command])
    if isinstance(answer, towpath.errors.Refused):
        raise answer
    return answer


def found(ledger: Ledger, id: str) -> Job:
    job = ledger.get(id)
    assert job is not None
    return job


def title(text: str) -> None:
    print(text)


def cost(what: str, jobs: int, seconds: float) -> None:
    print(f"  {what}: {seconds:.3f} s, {seconds / jobs * 1e6:.1f} µs a job")


if __name__ == "__main__":
    if sys.argv[1:2] == ["hold"]:
        hold(sys.argv[2])
    else:
        main()
