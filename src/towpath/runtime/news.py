"""What a batch is told about, once it is durable. Nothing is built that nobody listens to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from towpath.core.commands import Append, Appended, Claimed, Command, Settle, Settled, Upkept
from towpath.core.job import DONE, Spec
from towpath.errors import QueueFull
from towpath.events import BatchCommitted, Bus, JobsAppended, QueueFullSeen, UpkeepDone
from towpath.ledger import Answer


def wanted(bus: Bus) -> bool:
    """Does anybody listen to what `tell` tells?"""
    wants = bus.wants
    return wants(BatchCommitted) or wants(JobsAppended) or wants(QueueFullSeen) or wants(UpkeepDone)


def tell(bus: Bus, commands: Sequence[Command], answers: Sequence[Answer], seconds: float) -> None:
    """`seconds` is how long the ledger took for it."""
    if bus.wants(BatchCommitted) and not all(_nothing(answer) for answer in answers):
        jobs = sum(_jobs(command, answer) for command, answer in zip(commands, answers, strict=True))
        bus.publish(BatchCommitted(len(commands), jobs, seconds))
    if bus.wants(JobsAppended):
        queues: dict[str, list[str]] = {}
        for command, answer in zip(commands, answers, strict=True):
            for spec in _new(command, answer):
                queues.setdefault(spec.queue, []).append(spec.id)
        for queue, ids in queues.items():
            bus.publish(JobsAppended(queue, tuple(ids)))
    if bus.wants(QueueFullSeen):
        for answer in answers:
            if isinstance(answer, QueueFull) and "capacity" in answer.details:
                bus.publish(QueueFullSeen(*[answer.details[name] for name in ("queue", "depth", "capacity", "asked")]))
    if bus.wants(UpkeepDone):
        for answer in answers:
            if isinstance(answer, Upkept) and not _nothing(answer):
                bus.publish(UpkeepDone(answer.reaped, answer.expired, answer.woken, answer.purged, answer.swept))


def _nothing(answer: Answer) -> bool:
    """A look that found nothing writes nothing: idle engines look several times a second."""
    if isinstance(answer, Upkept):
        return not (answer.reaped or answer.expired or answer.woken or answer.purged or answer.swept)
    return isinstance(answer, Claimed) and not answer.claims


def _jobs(command: Command, answer: Answer) -> int:
    if isinstance(answer, Claimed):
        return len(answer.claims)
    return isinstance(answer, Settled) + sum(1 for _ in _new(command, answer))


def _new(command: Command, answer: Answer) -> Iterator[Spec]:
    """What was appended, children of a settled job included. A spec whose key was taken is no new job."""
    if isinstance(command, Append) and isinstance(answer, Appended):
        for spec, placed in zip(command.specs, answer.jobs, strict=True):
            if placed.id == spec.id:
                yield spec
    elif isinstance(command, Settle) and command.spawn and isinstance(answer, Settled) and answer.state is DONE:
        yield from command.spawn
