"""Messages by hand: put, get, ack, nack, extend."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from towpath import Claim, Ledger, Spec, State, commands
from towpath.cli.base import Session, command, names, pass_session
from towpath.cli.failures import NOTHING, OK, REFUSED, Failure, say
from towpath.cli.output import body, moment, pairs, show, shown_body
from towpath.cli.specs import SpecOptions, append, spec_options, tell
from towpath.cli.values import Json, Receipt, ReceiptType, Span
from towpath.errors import LostClaim, UnknownJob

LOOK_AGAIN = 0.25
"""Seconds after which a waiting `get` looks again, for jobs that come due without anybody's commit."""


@command("put")
@click.argument("queue")
@click.argument("data", required=False)
@click.option("--content-type", help="What the data is; else JSON if it parses as JSON, text or bytes if not.")
@spec_options
@pass_session
def put(session: Session, /, queue: str, data: str | None, content_type: str | None, **options: Any) -> int:
    """Put a message into a queue. DATA is taken as it is; `-` reads stdin; without it the message is empty."""
    payload = sys.stdin.buffer.read() if data == "-" else os.fsencode(data or "")
    kind = content_type or {"json": "application/json", "text": "text/plain"}.get(body(payload)[1], "application/octet-stream")
    spec = Spec(queue=queue, payload=payload, content_type=kind, **SpecOptions(**options).fields())
    with session.ledger(make=True) as ledger:
        placed = append(ledger, spec)
    show(session.json, placed, placed["id"])
    return OK


@command("get")
@click.argument("queue")
@click.option("--wait", type=Span(), default="0", help="Wait so long for a message; else take what is there.")
@click.option("--lease", type=Span(), default="30", show_default=True, help="How long it is yours before others may have it.")
@click.option("-n", "count", type=click.IntRange(1, 10_000), default=1, help="At most so many at once.")
@click.option("--name", help="Who takes them, as `jobs show` will say.")
@pass_session
def get(session: Session, /, queue: str, wait: int, lease: int, count: int, name: str | None) -> int:
    """Take messages from QUEUE (or a pattern with *). Each has a receipt, ID:FENCE, for `ack`, `nack` and `extend`.

    With --json one document per line. Exit code 3 if there is none.
    """
    want = commands.Want(queue, count)
    claim = commands.Claim(owner=name or f"towpath get {os.getpid()}", wants=(want,), lease=lease)
    with session.ledger(make=True) as ledger:
        claims = _wait_for(ledger, claim, wait / 1_000_000)
        if not claims:
            _say_why(ledger, queue, session.json)
            return NOTHING
        for number, each in enumerate(claims):
            if not session.json and number:
                click.echo()
            _show_claim(session, each)
    return OK


def _wait_for(ledger: Ledger, claim: commands.Claim, wait: float) -> Sequence[Claim]:
    """Claim, and look again until the time is up. Upkeep goes before it: without a worker nobody else takes back lost leases."""
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
        ledger.wait(seen, min(left, LOOK_AGAIN))


def _say_why(ledger: Ledger, queue: str, as_json: bool) -> None:
    known = ledger.queues()
    if as_json:
        return
    if "*" not in queue and "," not in queue and queue not in known:
        say([f"There is no message: nothing was ever put into {queue}. Queues: {names(sorted(known))}"])
    elif queue in known and known[queue].paused:
        say([f"There is no message: {queue} is paused. `towpath queues resume {queue}` opens it."])
    else:
        say(["There is no message."])


def _show_claim(session: Session, claim: Claim) -> None:
    job, receipt = claim.job, f"{claim.id}:{claim.fence}"
    value, encoding = body(job.payload, job.content_type)
    data = {
        "id": job.id,
        "fence": job.fence,
        "receipt": receipt,
        "queue": job.queue,
        "kind": job.kind,
        "attempt": job.attempts,
        "lease_until": moment(job.lease_until),
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
        "lease until": moment(job.lease_until),
    }
    # A header must not stand in the place of what is ours.
    headers = {f"header {name}" if name in (*people, "payload") else name: value for name, value in job.headers.items()}
    show(session.json, data, pairs({**people, **headers, "payload": shown_body(job.payload)}))


@command("ack")
@click.argument("receipt", type=ReceiptType())
@click.option("--result", type=Json(), help="JSON to keep with the job as its result; @file reads a file.")
@pass_session
def ack(session: Session, /, receipt: Receipt, result: bytes | None) -> int:
    """The message is done. Its state note (what `Message.state` saved) goes with it, in the same transaction."""
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
    outcome: commands.Outcome = commands.Snooze(delay) if defer else commands.Retry(delay, reason)
    return _settle(session, commands.Settle(receipt.id, receipt.fence, outcome))


def _settle(session: Session, settle: commands.Settle) -> int:
    with session.ledger() as ledger:
        _known(ledger, settle.id)
        answer = tell(ledger, settle)
    assert isinstance(answer, commands.Settled)
    # A receipt that was used before gets the answer it got then, which need not be what is asked now.
    if (answer.state is State.DONE) is not isinstance(settle.outcome, commands.Done):
        step = "Each delivery has its own receipt; `towpath jobs show` says where the message is now."
        raise Failure(f"This receipt was used before: the message became {answer.state} then.", REFUSED, step)
    show(session.json, {"id": answer.id, "state": answer.state}, f"{answer.id} is {answer.state}")
    return OK


@command("extend")
@click.argument("receipt", type=ReceiptType())
@click.argument("span", type=Span(), metavar="SECONDS")
@pass_session
def extend(session: Session, /, receipt: Receipt, span: int) -> int:
    """Keep the message for SECONDS from now."""
    renew = commands.Renew(((receipt.id, receipt.fence),), span)
    with session.ledger() as ledger:
        _known(ledger, receipt.id)
        answer = tell(ledger, renew)
    assert isinstance(answer, commands.Renewed)
    if answer.lost:
        raise LostClaim(id=receipt.id, fence=receipt.fence)
    asked = next((reason for _, reason in answer.cancel), None)
    data = {"id": receipt.id, "lease_until": moment(answer.until), "cancel_requested": asked}
    stop = f"; it was asked to stop ({asked})" if asked else ""
    show(session.json, data, f"{receipt.id} is yours until {moment(answer.until)}{stop}")
    return OK


def _known(ledger: Ledger, id: str) -> None:
    if ledger.get(id) is None:
        raise UnknownJob(id=id)
