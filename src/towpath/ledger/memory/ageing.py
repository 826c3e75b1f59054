"""Hasten: what has waited long becomes urgent."""

from __future__ import annotations

from msgspec.structs import replace

from towpath.core import checks
from towpath.core.commands import Hasten, Hastened
from towpath.core.job import SUSPECT
from towpath.ledger.memory.book import Book


def hasten(book: Book, command: Hasten, now: int) -> Hastened:
    found = [
        job
        for name in sorted(book.queues)
        if checks.matches(command.queue, name)
        for line in (book.queues[name].loose, *(part.line for part in book.queues[name].parts.values()))
        for job in {seq: book.jobs[seq] for _, seq in line}.values()
        if job.priority > command.priority and job.ready_at <= now - command.waited
    ]
    found.sort(key=lambda job: (job.queue, job.losses >= SUSPECT, job.part is not None, job.part or "", job.priority, job.seq))
    for job in found[: command.limit]:
        book.hasten(replace(job, priority=command.priority))
    return Hastened(min(len(found), command.limit), len(found) > command.limit)
