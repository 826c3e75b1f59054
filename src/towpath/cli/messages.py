"""The options that describe a new job, shared by `put` and `enqueue`, and the `Spec` they make."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from towpath import After, ClaimedJob, Key, KeyPolicy, Ledger, Spec, State, commands, new_id
from towpath.cli.base import (
    NOT_FOUND,
    OK,
    REFUSED,
    Failure,
    Session,
    bad_input,
    combine,
    command,
    join_names,
    pass_session,
    print_stderr,
)
from towpath.cli.output import decode_body, format_body, format_pairs, format_time, print_result
from towpath.cli.targets import load_app
from towpath.cli.values import Header, Json, Moment, Priority, Receipt, ReceiptType, Span
from towpath.errors import InvalidInput, LostClaim, Refused, UnknownJob
from towpath.settings import resolve

CONFLICTS = {"keep": KeyPolicy.UNIQUE, "replace": KeyPolicy.REPLACE, "serial": KeyPolicy.SERIAL}


class SpecOptions(msgspec.Struct, frozen=True, kw_only=True):
    """As the options say it; None where nothing was said."""

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
        if self.key is None and (self.on_conflict is not None or self.window is not None):
            raise InvalidInput(
                field="--on-conflict and --window", value="without --key", expected="a --key they are about"
            )

    def fields(self) -> dict[str, Any]:
        """The fields of a `Spec` that were given."""
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
        """The same as `task.options(...)` takes it: spans in seconds, the time as a datetime."""
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
    click.option("--delay", type=Span(), help="Not before this span has passed."),
    click.option("--at", type=Moment(past=False), help="Not before this time (ISO 8601)."),
    click.option("--ttl", type=Span(), help="Give it up if it has not started after this span."),
    click.option(
        "--priority",
        type=Priority(),
        help="high, normal, low, a name of the settings, or a number; smaller is sooner.",
    ),
    click.option("--part", help="The slice of the queue with limits of its own, such as a customer."),
    click.option("--key", help="At most one unfinished job has this key."),
    click.option(
        "--on-conflict", type=click.Choice(list(CONFLICTS)), help="What a second job with the key does: keep."
    ),
    click.option("--window", type=Span(), help="The key stays taken so long after the append."),
    click.option("--id", help="An id of your own; the same id twice is one job."),
    click.option("--header", type=Header(), multiple=True, help="NAME=VALUE, as often as you like."),
    click.option("--correlation-id", help="A name for all that belongs together."),
    click.option("--max-attempts", type=int, help="Failures after which it is a dead letter: 20."),
    click.option("--timeout", type=Span(), help="How long one attempt may take."),
    click.option("--retention", type=Span(), help="How long it is kept after it is done."),
    click.option(
        "--after", multiple=True, metavar="ID", help="Wait until this job is done; as often as you like."
    ),
    click.option("--group", help="The open group it joins."),
)


def append(ledger: Ledger, spec: Spec) -> dict[str, Any]:
    """Append one job; what became of it. `new` is false where its id or key was taken: `id` is then the job
    that has it."""
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
    help='The arguments: {"to": "ada"}, or @file.',
)
@click.option("--queue", help="The queue; with --app the task's own if left out.")
@click.option(
    "--app", "target", metavar="MODULE:APP", help="Check kind and arguments against the tasks of this app."
)
@spec_options
@pass_session
def enqueue(
    session: Session, /, kind: str, arguments: bytes, queue: str | None, target: str | None, **options: Any
) -> int:
    """Enqueue a job for the task KIND. Without --app nobody checks that such a task exists, and --queue is
    needed."""
    wanted = SpecOptions(**options)
    if target is not None:
        placed = _append_by_task(session, target, kind, arguments, wanted.call_options(queue))
    elif queue is None:
        raise click.UsageError(
            "Missing option '--queue' (or '--app', which knows the task's queue).",
            click.get_current_context(),
        )
    else:
        spec = Spec(queue=queue, kind=kind, payload=arguments, **wanted.fields())
        with session.ledger(make=True) as ledger:
            placed = append(ledger, spec)
    print_result(session.json, placed, placed["id"])
    return OK


def _append_by_task(
    session: Session, target: str, kind: str, arguments: bytes, options: dict[str, Any]
) -> dict[str, Any]:
    """The spec that the task itself would make: its queue, its options, its key; the arguments checked by its
    signature."""
    app = load_app(target, session.url)
    task = app.tasks.get(kind)
    if task is None:
        raise bad_input(f"{target} has no task {kind}.", f"Its tasks: {join_names(sorted(app.tasks))}")
    args, kwargs = task.codec.decode(arguments)
    spec = task.options(**options).spec_for(args, kwargs)
    with app:
        return append(app.ledger, spec)


POLL_INTERVAL = 0.25
"""Seconds after which a waiting `get` looks again, for jobs that come due without anybody's commit."""


@command("put")
@click.argument("queue")
@click.argument("data", required=False)
@click.option(
    "--content-type", help="What the data is; else JSON if it parses as JSON, text or bytes if not."
)
@spec_options
@pass_session
def put(session: Session, /, queue: str, data: str | None, content_type: str | None, **options: Any) -> int:
    """Put a message into a queue. DATA is taken as it is; `-` reads stdin; without it the message is
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
@click.option("--wait", type=Span(), default="0", help="Wait so long for a message; else take what is there.")
@click.option(
    "--lease",
    type=Span(),
    default="30",
    show_default=True,
    help="How long it is yours before others may have it.",
)
@click.option("-n", "count", type=click.IntRange(1, 10_000), default=1, help="At most so many at once.")
@click.option("--name", help="Who takes them, as `jobs show` will say.")
@pass_session
def get(session: Session, /, queue: str, wait: int, lease: int, count: int, name: str | None) -> int:
    """Take messages from QUEUE (or a pattern with *). Each has a receipt, ID:FENCE, for `ack`, `nack` and
    `extend`.

    With --json one document per line. Exit code 3 if there is none.
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
            _show_claim(session, each)
    return OK


def _wait_for(ledger: Ledger, claim: commands.Claim, wait: float) -> Sequence[ClaimedJob]:
    """Claim, and look again until the time is up. Upkeep goes before it: without a worker nobody else takes
    back lost leases."""
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
    known = ledger.queues()
    if as_json:
        return
    if "*" not in queue and "," not in queue and queue not in known:
        print_stderr(
            [f"There is no message: nothing was ever put into {queue}. Queues: {join_names(sorted(known))}"]
        )
    elif queue in known and known[queue].paused:
        print_stderr([f"There is no message: {queue} is paused. `towpath queues resume {queue}` opens it."])
    else:
        print_stderr(["There is no message."])


def _show_claim(session: Session, claim: ClaimedJob) -> None:
    job, receipt = claim.job, f"{claim.id}:{claim.fence}"
    value, encoding = decode_body(job.payload, job.content_type)
    data = {
        "id": job.id,
        "fence": job.fence,
        "receipt": receipt,
        "queue": job.queue,
        "kind": job.kind,
        "attempt": job.attempts,
        "lease_until": format_time(job.lease_until),
        "headers": job.headers,
        "content_type": job.content_type,
        "payload": value,
        "payload_encoding": encoding,
    }
    people = {
        "id": job.id,
        "fence": job.fence,
        "receipt": receipt,
        "attempt": job.attempts,
        "lease until": format_time(job.lease_until),
    }
    # A header must not stand in the place of what is ours.
    headers = {
        f"header {name}" if name in (*people, "payload") else name: value
        for name, value in job.headers.items()
    }
    print_result(session.json, data, format_pairs({**people, **headers, "payload": format_body(job.payload)}))


@command("ack")
@click.argument("receipt", type=ReceiptType())
@click.option("--result", type=Json(), help="JSON to keep with the job as its result; @file reads a file.")
@pass_session
def ack(session: Session, /, receipt: Receipt, result: bytes | None) -> int:
    """The message is done. Its state note (what `Message.state` saved) goes with it, in the same
    transaction."""
    note = commands.Note(key=f"state/{receipt.id}", value=None)
    return _settle(session, commands.Settle(receipt.id, receipt.fence, commands.Done(result), notes=(note,)))


@command("nack")
@click.argument("receipt", type=ReceiptType())
@click.option("--delay", type=Span(), default="0", help="Not again before this span has passed.")
@click.option("--reason", help="Why; `jobs show` will say it.")
@click.option("--defer", is_flag=True, help="Not a failure, only not now: spends no attempt of its budget.")
@pass_session
def nack(session: Session, /, receipt: Receipt, delay: int, reason: str | None, defer: bool) -> int:
    """Give the message back. After its last allowed failure it becomes a dead letter."""
    outcome: commands.Outcome = (
        commands.SnoozeOutcome(delay) if defer else commands.RetryOutcome(delay, reason)
    )
    return _settle(session, commands.Settle(receipt.id, receipt.fence, outcome))


def _settle(session: Session, settle: commands.Settle) -> int:
    with session.ledger() as ledger:
        _require_job(ledger, settle.id)
        answer = apply_one(ledger, settle)
    assert isinstance(answer, commands.Settled)
    # A receipt that was used before gets the answer it got then, which need not be what is asked now.
    if (answer.state is State.DONE) is not isinstance(settle.outcome, commands.Done):
        step = "Each delivery has its own receipt; `towpath jobs show` says where the message is now."
        raise Failure(f"This receipt was used before: the message became {answer.state} then.", REFUSED, step)
    print_result(session.json, {"id": answer.id, "state": answer.state}, f"{answer.id} is {answer.state}")
    return OK


@command("extend")
@click.argument("receipt", type=ReceiptType())
@click.argument("span", type=Span(), metavar="SECONDS")
@pass_session
def extend(session: Session, /, receipt: Receipt, span: int) -> int:
    """Keep the message for SECONDS from now."""
    renew = commands.Renew(((receipt.id, receipt.fence),), span)
    with session.ledger() as ledger:
        _require_job(ledger, receipt.id)
        answer = apply_one(ledger, renew)
    assert isinstance(answer, commands.Renewed)
    if answer.lost:
        raise LostClaim(id=receipt.id, fence=receipt.fence)
    asked = next((reason for _, reason in answer.cancel), None)
    data = {"id": receipt.id, "lease_until": format_time(answer.until), "cancel_requested": asked}
    stop = f"; it was asked to stop ({asked})" if asked else ""
    print_result(session.json, data, f"{receipt.id} is yours until {format_time(answer.until)}{stop}")
    return OK


def _require_job(ledger: Ledger, id: str) -> None:
    if ledger.get(id) is None:
        raise UnknownJob(id=id)
