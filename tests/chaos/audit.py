"""The audit of an experiment: what was acknowledged and run outside of the ledger, compared with what the
ledger has.

- **lost**: a job that was acknowledged and is not there, or has not ended as done; a done job without the row
of its commit function. - **doubled**: one claim that was run twice, or a commit function that was applied
more than once. - **rerun**: a further run of a job, which at-least-once allows. Each needs an event that
explains it. - **unexplained**: a rerun without such an event, a finding of `check()`, a process that ended by
itself, and the like."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from tests.support.postgres_member import Line
from towpath import State
from towpath.commands import Job

ALL_PROCESSES = "*"
"""The victim of an event that concerns all processes, such as an outage of the server."""
SETTLING = 15_000_000_000
"""Nanoseconds. A run that began before an event for all processes may be repeated for so long after it."""


class Event(msgspec.Struct):
    """Something that was done to a process: a kill, or a freeze or an outage from `at` to `until`
    (nanoseconds, monotonic)."""

    what: str
    victim: str
    at: int
    until: int


def event(what: str, victim: str, at: int | None = None) -> Event:
    now = time.monotonic_ns()
    return Event(what, victim, now if at is None else at, now)


class Run(msgspec.Struct):
    """A run of a handler in one process. `ended` is its end, None if the process ended before."""

    id: str
    fence: int
    process: str
    at: int
    ended: str | None = None


class Findings(msgspec.Struct):
    """A row of the table. `notes` explain each number."""

    events: int = 0
    jobs: int = 0
    lost: int = 0
    doubled: int = 0
    rerun: int = 0
    unexplained: int = 0
    notes: list[str] = []
    skipped: str = ""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.unexplained)

    def add_lost(self, why: str) -> None:
        self.lost += 1
        self.notes.append(f"lost: {why}")

    def add_doubled(self, why: str) -> None:
        self.doubled += 1
        self.notes.append(f"doubled: {why}")

    def add_unexplained(self, why: str) -> None:
        self.unexplained += 1
        self.notes.append(f"unexplained: {why}")


def runs_of(lines: Mapping[str, Iterable[Line]]) -> list[Run]:
    """The runs that the processes have recorded, by process."""
    found: list[Run] = []
    for process, recorded in lines.items():
        open_: dict[tuple[str, int], Run] = {}
        for line in recorded:
            if line.what == "began":
                run = Run(line.id, line.fence, process, line.at)
                open_[line.id, line.fence] = run
                found.append(run)
            elif (line.id, line.fence) in open_:
                open_[line.id, line.fence].ended = line.what
    return found


class Record(msgspec.Struct):
    """The facts from outside of the ledger. `applied`: rows of commit functions by job, None if there are
    none in this experiment."""

    events: Sequence[Event]
    asked: Sequence[str]
    runs: Sequence[Run]
    applied: Mapping[str, int] | None = None


def audit(record: Record, jobs: Mapping[str, Job], check: Sequence[str]) -> Findings:
    found = Findings(events=len(record.events), jobs=len(set(record.asked)))
    _acknowledged(found, record, jobs)
    _applied(found, record, jobs)
    _reruns(found, record)
    for line in check:
        found.add_unexplained(f"check: {line}")
    return found


def _acknowledged(found: Findings, record: Record, jobs: Mapping[str, Job]) -> None:
    returned = {(run.id, run.fence) for run in record.runs if run.ended == "returned"}
    for id in dict.fromkeys(record.asked):
        job = jobs.get(id)
        if job is None:
            found.add_lost(f"job {id} was acknowledged and is not there")
        elif job.state is not State.DONE:
            found.add_lost(
                f"job {id} is {job.state} ({job.reason}) after {job.losses} losses: {(job.error or '')[:80]}"
            )
        elif (id, job.settled_fence) not in returned:
            found.add_unexplained(
                f"job {id} is done by fence {job.settled_fence}, and no handler returned with it"
            )
    for id in sorted({run.id for run in record.runs} - jobs.keys()):
        found.add_lost(f"job {id} ran and is not there")


def _applied(found: Findings, record: Record, jobs: Mapping[str, Job]) -> None:
    if record.applied is None:
        return
    for id, rows in record.applied.items():
        job = jobs.get(id)
        if rows > 1:
            found.add_doubled(f"the commit function of job {id} was applied {rows} times")
        elif job is None or job.state is not State.DONE:
            found.add_unexplained(f"the commit function of job {id} was applied, and the job is not done")
    for job in jobs.values():
        if job.kind == "apply" and job.state is State.DONE and job.id not in record.applied:
            found.add_lost(f"job {job.id} is done, and its commit function was not applied")


def _reruns(found: Findings, record: Record) -> None:
    claims = Counter((run.id, run.fence) for run in record.runs)
    for (id, fence), count in claims.items():
        if count > 1:
            found.add_doubled(f"job {id} was run {count} times with fence {fence}")
    by_job: dict[str, list[Run]] = defaultdict(list)
    # A worker that was stopped may begin an older claim after the newer one ran.
    for run in sorted(record.runs, key=lambda run: (run.fence, run.at)):
        by_job[run.id].append(run)
    for id, runs in by_job.items():
        for run, later in pairwise(runs):
            if run.ended == "raised":
                continue
            found.rerun += 1
            if not any(_explains(each, run, later) for each in record.events):
                how = run.ended or "did not end"
                near = [
                    f"{each.what} of {each.victim} from {_seconds(each.at - run.at)} to"
                    f" {_seconds(each.until - run.at)}"
                    for each in record.events
                    if abs(each.at - run.at) < 2 * SETTLING
                ]
                found.add_unexplained(
                    f"job {id} ran again in {later.process} {_seconds(later.at - run.at)} later, with fence"
                    f" {later.fence}; its run in {run.process} with fence {run.fence} {how}, and no event"
                    f" explains it (events, counted from the run: {', '.join(near) or 'none'})"
                )


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.2f} s"


def _explains(event: Event, run: Run, later: Run) -> bool:
    if event.victim == ALL_PROCESSES:
        return event.at - SETTLING <= later.at and run.at <= event.until + SETTLING
    return event.victim == run.process and event.at <= max(run.at, later.at) and run.at <= event.until
