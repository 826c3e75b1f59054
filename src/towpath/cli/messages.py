"""`put`, `enqueue`, `get`, `ack`, `nack` and `extend`: create jobs, and consume messages by hand."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath import After, Ledger, commands, new_id
from towpath.cli.base import (
    NOT_FOUND,
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
from towpath.cli.output import decode_body, format_body, format_pairs, format_time, print_result
from towpath.cli.targets import find_job, find_task, include_option, known_group, known_job, load_app
from towpath.cli.values import Header, Json, Moment, Priority, ReceiptType, Span
from towpath.commands import ClaimedJob, Key, KeyPolicy, Spec
from towpath.errors import InvalidInput, LostClaim, Refused
from towpath.queues import blobs, receipts
from towpath.queues.receipts import Receipt
from towpath.settings import resolve

if TYPE_CHECKING:
    from towpath.app import App

CONFLICTS = {"keep": KeyPolicy.UNIQUE, "replace": KeyPolicy.REPLACE, "serial": KeyPolicy.SERIAL}


class SpecOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `put` and `enqueue` that describe a new job; None where an option was not given."""

    delay: int | None = None
    at: int | None = None
    ttl: int | None = None
    priority: int | str | None = None
    part: str | None = None
    key: str | None = None
    on_conflict: str | None = None
    window: int | None = None
    id: str | None = None
    header: tuple[tuple[str, str], ...] = ()
    correlation_id: str | None = None
    max_attempts: int | None = None
    timeout: int | None = None
    retention: int | None = None
    after: tuple[str, ...] = ()
    group: str | None = None

    def __post_init__(self) -> None:
        if self.delay is not None and self.at is not None:
            message = "--delay and --at exclude each other: give one of them."
            raise InvalidInput(field="--at", value=self.at, expected="left out", message=message)
        if self.key is None and (self.on_conflict is not None or self.window is not None):
            message = "--on-conflict and --window need --key: they apply to messages with the same key."
            raise InvalidInput(field="--key", value=None, expected="a key", message=message)

    def fields(self) -> dict[str, Any]:
        """The given options as fields of a `Spec`."""
        given: dict[str, Any] = {
            "delay": self.delay,
            "ready_at": self.at,
            "ttl": self.ttl,
            "priority": None if self.priority is None else resolve().rank(self.priority),
            "part": self.part,
            "correlation_id": self.correlation_id,
            "max_attempts": self.max_attempts,
            "timeout": self.timeout,
            "retention": self.retention,
            "group": self.group,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        if self.header:
            fields["headers"] = dict(self.header)
        if self.after:
            fields["after"] = tuple(After(id) for id in self.after)
        if self.key is not None:
            fields["key"] = Key(self.key, CONFLICTS[self.on_conflict or "keep"], self.window or 0)
        return {**fields, "id": self.id or new_id()}

    def call_options(self, queue: str | None) -> dict[str, Any]:
        """The given options as arguments of `task.options(...)`: spans in seconds, the time as a datetime."""
        spans = {name: getattr(self, name) for name in ("delay", "ttl", "window", "timeout", "retention")}
        given = {name: value / 1_000_000 for name, value in spans.items() if value is not None}
        same = ("priority", "part", "key", "on_conflict", "id", "correlation_id", "max_attempts", "group")
        given |= {name: value for name in same if (value := getattr(self, name)) is not None}
        if self.at is not None:
            given["at"] = datetime.fromtimestamp(self.at / 1_000_000, UTC)
        if self.header:
            given["headers"] = dict(self.header)
        if self.after:
            given["after"] = self.after
        return given if queue is None else {**given, "queue": queue}


spec_options = combine(
    click.option("--delay", type=Span(), help="Start only after this span."),
    click.option("--at", type=Moment(past=False), help="Start only after this time (ISO 8601)."),
    click.option("--ttl", type=Span(), help="Expire if not started within this span."),
    click.option(
        "--priority",
        type=Priority(),
        help="high, normal, low, a name from the settings, or a number; smaller starts sooner.",
    ),
    click.option("--part", help="Partition of the queue with its own limits, such as a customer."),
    click.option("--key", help="Unique key: at most one unfinished job has it."),
    click.option(
        "--on-conflict",
        type=click.Choice(list(CONFLICTS)),
        help="If the key is taken. Default: keep (the first job stays).",
    ),
    click.option("--window", type=Span(), help="Time after the append during which the key stays taken."),
    click.option("--id", help="Your own id. A second append with the same id creates no job."),
    click.option("--header", type=Header(), multiple=True, help="Header NAME=VALUE. Repeatable."),
    click.option("--correlation-id", help="Common id of related jobs."),
    click.option(
        "--max-attempts", type=int, help="Failed attempts after which it becomes a dead letter. Default: 20."
    ),
    click.option("--timeout", type=Span(), help="Time limit of one attempt."),
    click.option("--retention", type=Span(), help="Time for which the finished job is kept."),
    click.option(
        "--after", multiple=True, metavar="ID", help="Start only after this job is done. Repeatable."
    ),
    click.option("--group", help="Open group to join."),
)


def append(ledger: Ledger, spec: Spec) -> dict[str, Any]:
    """Append one job and return its id. `new` is false if its id or key was taken; `id` is then the id of the
    existing job."""
    spec = msgspec.structs.replace(
        spec,
        after=tuple(After(known_job(ledger, each.id)) for each in spec.after),
        group=None if spec.group is None else known_group(ledger, spec.group),
    )
    before = ledger.get(spec.id) is not None
    answer = apply_one(ledger, commands.Append((spec,)))
    assert isinstance(answer, commands.Appended)
    [placed] = answer.jobs
    return {
        "id": placed.id,
        "seq": placed.seq,
        "queue": spec.queue,
        "new": placed.id == spec.id and not before,
    }


def apply_one(ledger: Ledger, command: commands.Command) -> commands.Result:
    """Apply one command and raise if it is refused."""
    [answer] = ledger.apply([command])
    if isinstance(answer, Refused):
        raise answer
    return answer


@command("enqueue")
@click.argument("kind")
@click.option(
    "--args",
    "arguments",
    type=Json(object_only=True),
    default="{}",
    help='Arguments as a JSON object, such as {"to": "ada"}, or @file.',
)
@click.option("--queue", help="Queue. Default with --app: the queue of the task.")
@click.option(
    "--app", "target", metavar="MODULE:APP", help="Check KIND and arguments against the tasks of this app."
)
@include_option
@spec_options
@pass_session
def enqueue(
    session: Session,
    /,
    kind: str,
    arguments: bytes,
    queue: str | None,
    target: str | None,
    include: tuple[str, ...],
    **options: Any,
) -> int:
    """Enqueue a job for the task KIND. Without --app the existence of the task is not checked, and --queue is
    required."""
    wanted = SpecOptions(**options)
    if target is not None:
        app = load_app(target, session.url, include)
        placed = _append_by_task(app, target, kind, arguments, wanted.call_options(queue))
    elif include:
        raise click.UsageError("--include needs --app.", click.get_current_context())
    elif queue is None:
        raise click.UsageError(
            "Missing option '--queue' (or '--app', which defines the task's queue).",
            click.get_current_context(),
        )
    else:
        spec = Spec(queue=queue, kind=kind, payload=arguments, **wanted.fields())
        with session.ledger(make=True) as ledger:
            placed = append(ledger, spec)
    print_result(session.json, placed, placed["id"])
    return OK


def _append_by_task(
    app: App, target: str, kind: str, arguments: bytes, options: dict[str, Any]
) -> dict[str, Any]:
    """Append the job that the task itself would enqueue: its queue, options and key. Its signature checks the
    arguments."""
    task = find_task(app, target, kind)
    args, kwargs = task.codec.decode(arguments)
    spec = task.options(**options).spec_for(args, kwargs)
    with app:
        return append(app.ledger, spec)


POLL_INTERVAL = 0.25
"""Seconds between two claims of a waiting `get`: a job can become ready without a commit that would wake
it."""


@command("put")
@click.argument("queue")
@click.argument("data", required=False)
@click.option(
    "--content-type", help="Content type. Default: JSON if DATA parses as JSON, else text or bytes."
)
@spec_options
@pass_session
def put(session: Session, /, queue: str, data: str | None, content_type: str | None, **options: Any) -> int:
    """Put a message into a queue. DATA is stored unchanged; `-` reads stdin; without DATA the message is
    empty."""
    payload = sys.stdin.buffer.read() if data == "-" else os.fsencode(data or "")
    kind = content_type or {"json": "application/json", "text": "text/plain"}.get(
        decode_body(payload)[1], "application/octet-stream"
    )
    spec = Spec(queue=queue, payload=payload, content_type=kind, **SpecOptions(**options).fields())
    with session.ledger(make=True) as ledger:
        placed = append(ledger, spec)
    print_result(session.json, placed, placed["id"])
    return OK


@command("get")
@click.argument("queue")
@click.option("--wait", type=Span(), default="0", help="Maximum time to wait for a message. Default: 0.")
@click.option(
    "--lease",
    type=Span(),
    default="30",
    show_default=True,
    help="Time after which another consumer may claim the message.",
)
@click.option("-n", "count", type=click.IntRange(1, 10_000), default=1, help="Maximum number of messages.")
@click.option("--name", help="Name of the consumer in `jobs show`.")
@pass_session
def get(session: Session, /, queue: str, wait: int, lease: int, count: int, name: str | None) -> int:
    """Claim messages from QUEUE (or a pattern with *). Each has a receipt, ID:FENCE, for `ack`, `nack` and
    `extend`.

    With --json one document per line. Exit code 3 if no message is available.
    """
    want = commands.Want(queue, count)
    claim = commands.Claim(owner=name or f"towpath get {os.getpid()}", wants=(want,), lease=lease)
    with session.ledger(make=True) as ledger:
        claims = _wait_for(ledger, claim, wait / 1_000_000)
        if not claims:
            _explain_empty(ledger, queue, session.json)
            return NOT_FOUND
        for number, each in enumerate(claims):
            if not session.json and number:
                click.echo()
            _show_claim(session, ledger, each)
    return OK


def _wait_for(ledger: Ledger, claim: commands.Claim, wait: float) -> Sequence[ClaimedJob]:
    """Claim repeatedly until a message is claimed or the time is over. Upkeep is applied first: without a
    worker no other process releases expired leases."""
    deadline = time.monotonic() + wait
    while True:
        seen = ledger.version()
        *_, answer = ledger.apply([commands.Upkeep(), claim])
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, commands.Claimed)
        left = deadline - time.monotonic()
        if answer.claims or left <= 0:
            return answer.claims
        ledger.wait(seen, min(left, POLL_INTERVAL))


def _explain_empty(ledger: Ledger, queue: str, as_json: bool) -> None:
    if as_json:
        return
    one = "*" not in queue and "," not in queue
    view = ledger.queue(queue) if one else None
    if one and view is None:
        known = join_names(sorted(ledger.queues()))
        print_stderr([f"No message: queue {queue} does not exist. Queues: {known}"])
    elif view is not None and view.paused:
        print_stderr([f"No message: queue {queue} is paused. To resume it: `towpath queues resume {queue}`"])
    else:
        print_stderr(["No message."])


def _show_claim(session: Session, ledger: Ledger, claim: ClaimedJob) -> None:
    """A large payload is shown by its size."""
    job, receipt = claim.job, str(Receipt.of(claim))
    payload = None if blobs.is_large(job) else blobs.whole(job, ledger.chunk)
    value, encoding = decode_body(payload, job.content_type)
    data = {
        "id": job.id,
        "fence": job.fence,
        "receipt": receipt,
        "queue": job.queue,
        "kind": job.kind,
        "attempt": job.attempts,
        "lease_until": format_time(job.lease_until),
        "headers": blobs.without_blob(job.headers),
        "content_type": job.content_type,
        "size": job.size,
        "payload": value,
        "payload_encoding": encoding,
    }
    fields = {
        "id": job.id,
        "fence": job.fence,
        "receipt": receipt,
        "attempt": job.attempts,
        "lease until": format_time(job.lease_until),
    }
    # A header must not replace a field of the same name.
    headers = {
        f"header {name}" if name in (*fields, "payload") else name: value
        for name, value in blobs.without_blob(job.headers).items()
    }
    shown = f"{job.size} bytes" if payload is None else format_body(payload)
    print_result(session.json, data, format_pairs({**fields, **headers, "payload": shown}))


@command("ack")
@click.argument("receipt", type=ReceiptType())
@click.option("--result", type=Json(), help="JSON to store as the result; @file reads a file.")
@pass_session
def ack(session: Session, /, receipt: Receipt, result: bytes | None) -> int:
    """Mark a message as done. The note of `Message.state` is deleted in the same transaction."""
    return _settle(session, receipt, lambda found: receipts.ack(found, result))


@command("nack")
@click.argument("receipt", type=ReceiptType())
@click.option("--delay", type=Span(), default="0", help="Deliver again only after this span.")
@click.option("--reason", help="Reason, shown by `jobs show`.")
@click.option("--defer", is_flag=True, help="Deliver later without counting a failed attempt.")
@pass_session
def nack(session: Session, /, receipt: Receipt, delay: int, reason: str | None, defer: bool) -> int:
    """Return a message to its queue. After --max-attempts failures it becomes a dead letter."""
    return _settle(session, receipt, lambda found: receipts.nack(found, delay, reason, defer))


def _settle(session: Session, receipt: Receipt, make: Callable[[Receipt], commands.Settle]) -> int:
    with session.ledger() as ledger:
        command = make(Receipt(find_job(ledger, receipt.id).id, receipt.fence))
        answer = apply_one(ledger, command)
    assert isinstance(answer, commands.Settled)
    try:
        receipts.settled(command, answer)
    except LostClaim:
        step = "Each delivery has its own receipt. `towpath jobs show` shows the state of the message."
        raise Failure(
            f"This delivery was {receipts.outcome_of(answer)} already; the message became {answer.state}.",
            REFUSED,
            step,
        ) from None
    print_result(session.json, {"id": answer.id, "state": answer.state}, f"{answer.id} is {answer.state}")
    return OK


@command("extend")
@click.argument("receipt", type=ReceiptType())
@click.argument("span", type=Span(), metavar="SECONDS")
@pass_session
def extend(session: Session, /, receipt: Receipt, span: int) -> int:
    """Extend the lease of a message to SECONDS from now."""
    with session.ledger() as ledger:
        id = find_job(ledger, receipt.id).id
        held = Receipt(id, receipt.fence)
        answer = receipts.extended(held, apply_one(ledger, receipts.extend(held, span)))
    asked = next((reason for _, reason in answer.cancel), None)
    data = {"id": id, "lease_until": format_time(answer.until), "cancel_requested": asked}
    stop = f"; cancellation was requested ({asked})" if asked else ""
    print_result(session.json, data, f"{id} is leased until {format_time(answer.until)}{stop}")
    return OK
