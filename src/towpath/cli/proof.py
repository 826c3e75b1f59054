"""What the demonstration claims, read back from the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise

import msgspec

from towpath import App, Job, Ledger, Reason, State, commands, micros
from towpath.errors import LostClaim

DELAY = 1.0
"""Seconds before a reminder may run."""
PAGE = 1000


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of all that was written down."""

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
        return [*self.mail, *self.reminders, self.call, self.fax, self.read, *self.counts, self.total, *self.ferries]


class Crash(msgspec.Struct, frozen=True):
    """What the worker that was killed had in its hands (id -> fence), and when it died."""

    held: Mapping[str, int]
    at: int


class Check(msgspec.Struct, frozen=True):
    name: str
    ok: bool
    what: str


def prove(app: App, written: Written, crash: Crash) -> list[Check]:
    jobs = jobs_of(app.ledger, written.ids)
    return [
        _nothing_lost(app.ledger, written, jobs),
        *_single_acts(jobs, written),
        _graph(jobs, written),
        _ferries(app, written, jobs, crash),
        _recounted(app.ledger),
    ]


def jobs_of(ledger: Ledger, ids: Sequence[str]) -> dict[str, Job]:
    pages = (ledger.get_many(ids[at : at + PAGE]) for at in range(0, len(ids), PAGE))
    return dict(chain.from_iterable(page.items() for page in pages))


def _nothing_lost(ledger: Ledger, written: Written, jobs: Mapping[str, Job]) -> Check:
    missing = sum(id not in jobs for id in written.ids)
    wrong = [job for job in jobs.values() if job.state is not (State.FAILED if job.id == written.fax else State.DONE)]
    counts = [view.counts for view in ledger.queues().values()]
    done, failed, others = (sum(getattr(each, name) for each in counts) for name in ("done", "failed", "waiting"))
    running = sum(each.running for each in counts)
    ok = not (missing or wrong or others or running) and (done, failed) == (len(written.ids) - 1, 1)
    what = f"{len(written.ids):,} were written down: {done:,} done, {failed} dead, {missing} missing, {others + running} unfinished"
    return Check("all jobs", ok, what)


def _single_acts(jobs: Mapping[str, Job], written: Written) -> Iterator[Check]:
    starts: dict[int, list[int]] = {}
    for job in (jobs[id] for id in written.mail if id in jobs):
        if job.started_at is not None:
            starts.setdefault(job.priority, []).append(job.started_at)
    ranks = [starts[priority] for priority in sorted(starts)]
    ordered = all(max(sooner) <= min(later) for sooner, later in pairwise(ranks))
    ok = ordered and len(ranks) == 3 and sum(map(len, ranks)) == len(written.mail)
    how = "the urgent ones first" if ordered else "not in the order of their priority"
    yield Check("mail", ok, f"{', then '.join(f'{len(rank):,}' for rank in ranks) or 'none'}: {how}")

    reminders = [jobs[id] for id in written.reminders if id in jobs]
    waits = [(job.started_at or 0) - job.created_at for job in reminders]
    least = min(waits, default=0)
    yield Check(
        "reminders", least >= micros(DELAY), f"{len(waits)} ran {least / 1e6:.2f} s after they were written down, or later"
    )

    call = jobs[written.call]
    ok = call.state is State.DONE and (call.attempts, call.failures, call.result) == (3, 2, b'"hello"')
    yield Check("call", ok, f"{call.state} at attempt {call.attempts}, after {call.failures} failures: {_text(call.result)}")

    fax = jobs[written.fax]
    ok = fax.reason is Reason.EXHAUSTED and (fax.error or "").startswith("OSError: no line to")
    yield Check("fax", ok, f"a dead letter after {fax.attempts} attempts: {(fax.error or '').partition(chr(10))[0]}")


def _graph(jobs: Mapping[str, Job], written: Written) -> Check:
    read, total = jobs[written.read], jobs[written.total]
    counts = [jobs[id] for id in written.counts]
    ok = all(_before(read, count) and _before(count, total) for count in counts) and total.result == b"9"
    return Check("graph", ok, f"read, then {len(counts)} counted side by side, then a total of {_text(total.result)} words")


def _before(first: Job, second: Job) -> bool:
    return first.finished_at is not None and second.started_at is not None and first.finished_at <= second.started_at


def _ferries(app: App, written: Written, jobs: Mapping[str, Job], crash: Crash) -> Check:
    ferries = [jobs[id] for id in written.ferries]
    back = [job for job in ferries if (job.state, job.losses, job.attempts) == (State.DONE, 1, 2)]
    took = (max(job.finished_at or 0 for job in ferries) - crash.at) / 1e6
    late = _late_answer(app, crash)
    ok = len(back) == len(ferries) == len(crash.held) and late == "refused"
    what = f"{len(back)} of {len(crash.held)} that the dead worker held were done by another within {took:.1f} s; its own answer is {late}"
    return Check("ferries", ok, what)


def _late_answer(app: App, crash: Crash) -> str:
    """What the dead worker would hear if it came back and said that it is done."""
    id, fence = next(iter(crash.held.items()))
    try:
        app.call(commands.Settle(id, fence, commands.Done(b'"I am late"')))
    except LostClaim:
        return "refused"
    return "taken"


def _recounted(ledger: Ledger) -> Check:
    problems = ledger.check()
    return Check("ledger", not problems, "; ".join(problems) or "recounted, and everything adds up")


def _text(data: bytes | None) -> str:
    return "nothing" if data is None else data.decode()
