"""`client queue`: messages of an HTTP server."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath.cli.base import OK, Session, bad_input, combine, pass_session, print_stderr
from towpath.cli.client_base import (
    ClientGroup,
    connection_of,
    exports,
    needed,
    number,
    output_option,
    print_lines,
    read_payload,
    show,
    variable,
    wants_json,
)
from towpath.cli.output import format_pairs, print_json, print_result
from towpath.cli.values import Header, Span

if TYPE_CHECKING:
    from towpath.http.client import DeliveryReceipt, QueueClient, ReceivedMessage

MICRO = 1e6
FOREVER, NOWAIT = "forever", ("nowait", "-1")


@contextlib.contextmanager
def opened() -> Iterator[QueueClient]:
    client = connection_of(click.get_current_context()).open()
    with client:
        yield client


class Block(click.ParamType[Any]):
    """Seconds from a span; `forever` and, as in lockd, 0 are -1; `nowait` is 0."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if value in NOWAIT:
            return 0.0
        span: float = 0.0 if value == FOREVER else Span().convert(value, param, ctx) / MICRO
        return span or -1.0


@click.group("queue", cls=ClientGroup)
def queue() -> None:
    """Enqueue, receive and settle messages."""


queue_option = click.option(
    "--queue", "-q", "name", metavar="NAME", help="Queue. Default: TOWPATH_QUEUE_NAME."
)


@queue.command("enqueue")
@click.option("--queue", "-q", "name", required=True, metavar="NAME", help="Queue.")
@click.option("--data", "-d", metavar="TEXT", help="Payload.")
@click.option("--file", "-f", metavar="FILE", help="File with the payload; `-` reads stdin. It is streamed.")
@click.option("--content-type", metavar="TYPE", help="Content type of the payload.")
@click.option("--delay", type=Span(), help="Deliver only after this span.")
@click.option("--visibility", type=Span(), help="Sent for servers of lockd; the consumer decides.")
@click.option("--ttl", type=Span(), help="Discard the message if it waits longer.")
@click.option("--max-attempts", type=click.IntRange(1), help="Failed attempts until it is a dead letter.")
@click.option("--attr", type=Header(), multiple=True, metavar="K=V", help="Attribute. Repeatable.")
@output_option
@pass_session
def enqueue(
    session: Session, /, name: str, data: str | None, file: str | None, output: str | None, **options: Any
) -> int:
    """Store a message."""
    payload, close = read_payload(data, file)
    spans = {key: options[key] / MICRO for key in ("delay", "visibility", "ttl") if options[key] is not None}
    more: Any = {key: options[key] for key in ("content_type", "max_attempts") if options[key] is not None}
    if correlation := variable("CLIENT_CORRELATION_ID"):
        more["correlation_id"] = correlation
    try:
        with opened() as client:
            found = client.enqueue(name, payload, attributes=dict(options["attr"]), **spans, **more)
    finally:
        close()
    line = f"message_id={found.message_id} attempts={found.attempts} max_attempts={found.max_attempts}"
    print_result(wants_json(session, output), msgspec.to_builtins(found), line)
    return OK


@queue.command("dequeue")
@queue_option
@click.option("--owner", metavar="NAME", help="Name of the consumer. Default: host and process id.")
@click.option(
    "--block",
    type=Block(),
    metavar="SPAN",
    default=FOREVER,
    show_default=True,
    help="Wait so long for a message; 0 or `forever` without limit, -1 or `nowait` not at all.",
)
@click.option("--visibility", type=Span(), help="Lease of the message. Default: that of the server.")
@click.option(
    "--page-size",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Number of messages; more than one needs --json.",
)
@click.option("--start-after", metavar="CURSOR", help="Accepted for scripts of lockd; without effect.")
@click.option("--stateful", is_flag=True, help="Lease the state of the message, too.")
@click.option(
    "--payload-out", "-o", metavar="FILE", help="File for the payload; `-` is stdout. Default: a new file."
)
@output_option
@pass_session
def dequeue(session: Session, /, name: str | None, block: float, output: str | None, **options: Any) -> int:
    """Receive a message. Prints `export` lines for `eval`.

    The variables are those of `ack`, `nack` and `extend`. If no message is available the exit code is 0, and
    the lines remove the variables of an earlier message.
    """
    as_json, page = wants_json(session, output), options["page_size"]
    place: str | None = options["payload_out"]
    if page > 1 and (not as_json or place is not None):
        raise click.UsageError(
            "--page-size above 1 needs --json and no --payload-out.", click.get_current_context()
        )
    wait = None if block < 0 else block
    given: Any = {"wait": wait, "stateful": options["stateful"], **_consumer(options)}
    count = 0
    with opened() as client:
        for message in client.dequeue_many(needed(name, "--queue", "QUEUE_NAME"), page, **given):
            count += 1
            path = _save(message, place)
            _show_message(message, path, as_json, err=place == "-")
    if not count:
        print_stderr(["no messages available (try again later)"])
        if not as_json:
            print_lines(exports(dict.fromkeys(_variables(None, ""), "")), err=place == "-")
    return OK


def _consumer(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options["visibility"] is not None:
        found["visibility"] = options["visibility"] / MICRO
    if options["owner"] is not None:
        found["owner"] = options["owner"]
    return found


def _save(message: ReceivedMessage, place: str | None, folder: str | None = None) -> str:
    """Write the payload; return the path."""
    if place == "-":
        for piece in message.pieces():
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return ""
    report: list[str] = []
    if place is None:
        handle, place = tempfile.mkstemp(prefix="towpath-", suffix=".bin", dir=folder)
        os.close(handle)
        report = [f"payload written to {place}"]
    try:
        message.save(place)
    except OSError as error:
        # The message goes back at once, not at the end of its lease.
        message.nack(defer=True)
        raise bad_input(f"{place} cannot be written: {error.strerror}.") from None
    print_stderr(report)
    return place


def _variables(message: ReceivedMessage | None, path: str) -> dict[str, object]:
    """Name -> value of the variables of a message; their names without one."""
    view: Any = None if message is None else message.view
    names = {
        "NAMESPACE": "namespace",
        "NAME": "queue",
        "MESSAGE_ID": "message_id",
        "LEASE": "lease_id",
        "FENCING_TOKEN": "fencing_token",
        "META_ETAG": "meta_etag",
        "TXN_ID": "txn_id",
        "STATE_LEASE": "state_lease_id",
        "STATE_FENCING_TOKEN": "state_fencing_token",
        "STATE_ETAG": "state_etag",
    }
    found = {f"QUEUE_{name}": getattr(view, field, "") for name, field in names.items()}
    return {**found, "QUEUE_PAYLOAD_PATH": path}


def _document(message: ReceivedMessage, path: str) -> dict[str, Any]:
    """The fields of lockd's JSON, and the others of the protocol."""
    found = {
        name: value
        for name, value in msgspec.structs.asdict(message.view).items()
        if message.view.state_lease_id or not name.startswith("state_")
    }
    found["visibility_timeout_secs"] = found.pop("visibility_timeout_seconds")
    return {**found, "cursor": "", "payload_path": path}


def _show_message(message: ReceivedMessage, path: str, as_json: bool, err: bool = False) -> None:
    if not as_json:
        print_lines(exports(_variables(message, path)), err)
    elif err:
        print_stderr([msgspec.json.encode(_document(message, path)).decode()])
    else:
        print_json(_document(message, path))


receipt_options: Callable[[Any], Any] = combine(
    queue_option,
    click.option("--message", metavar="ID", help="Message id. Default: TOWPATH_QUEUE_MESSAGE_ID."),
    click.option("--lease", metavar="ID", help="Lease id. Default: TOWPATH_QUEUE_LEASE."),
    click.option(
        "--meta-etag", metavar="ETAG", help="Etag of the message. Default: TOWPATH_QUEUE_META_ETAG."
    ),
    click.option("--fencing-token", type=int, help="Fencing token. Default: TOWPATH_QUEUE_FENCING_TOKEN."),
    click.option(
        "--state-lease", metavar="ID", help="Lease of the state. Default: TOWPATH_QUEUE_STATE_LEASE."
    ),
    click.option(
        "--state-fencing-token", type=int, help="Its token. Default: TOWPATH_QUEUE_STATE_FENCING_TOKEN."
    ),
    click.option("--state-etag", metavar="ETAG", help="Its etag. Default: TOWPATH_QUEUE_STATE_ETAG."),
    output_option,
)


def _receipt(options: dict[str, Any]) -> DeliveryReceipt:
    """The receipt in the options and variables. Ids of an option are not mixed with variables of another
    message."""
    from towpath.http.client import DeliveryReceipt

    own = options["lease"] is None
    queue = needed(options["name"], "--queue", "QUEUE_NAME")
    connection = connection_of(click.get_current_context())

    def text(option: str, name: str) -> str:
        return options[option] or (own and variable(name)) or ""

    return DeliveryReceipt(
        namespace=connection.namespace(),
        queue=queue,
        message_id=needed(options["message"], "--message", "QUEUE_MESSAGE_ID"),
        lease_id=needed(options["lease"], "--lease", "QUEUE_LEASE"),
        fencing_token=number(options["fencing_token"], "QUEUE_FENCING_TOKEN")
        if own
        else options["fencing_token"] or 0,
        meta_etag=needed(options["meta_etag"], "--meta-etag", "QUEUE_META_ETAG"),
        state_lease_id=text("state_lease", "QUEUE_STATE_LEASE"),
        state_fencing_token=number(options["state_fencing_token"], "QUEUE_STATE_FENCING_TOKEN")
        if own
        else options["state_fencing_token"] or 0,
        state_etag=text("state_etag", "QUEUE_STATE_ETAG"),
    )


@queue.command("ack")
@receipt_options
@pass_session
def ack(session: Session, /, output: str | None, **options: Any) -> int:
    """Mark a message as done."""
    with opened() as client:
        client.ack(_receipt(options))
    print_result(wants_json(session, output), {"acked": True}, "acknowledged")
    return OK


@queue.command("nack")
@receipt_options
@click.option("--delay", type=Span(), default="0", help="Deliver again only after this span.")
@click.option(
    "--intent",
    "-i",
    type=click.Choice(["failure", "defer"]),
    default="failure",
    show_default=True,
    help="`defer` counts as no failed attempt.",
)
@click.option("--reason", metavar="TEXT", help="Reason of the failure, stored with the message.")
@pass_session
def nack(
    session: Session, /, delay: int, intent: str, reason: str | None, output: str | None, **options: Any
) -> int:
    """Return a message to its queue."""
    if intent == "defer" and reason is not None:
        raise click.UsageError("--reason is for the intent failure.", click.get_current_context())
    with opened() as client:
        client.nack(_receipt(options), delay / MICRO, reason, defer=intent == "defer")
    print_result(wants_json(session, output), {"requeued": True}, "requeued")
    return OK


@queue.command("extend")
@receipt_options
@click.option("--extend", "span", type=Span(), help="New length of the lease, from now. Default: its own.")
@click.option("--export", "as_export", is_flag=True, help="Print the new etag as `export` lines for `eval`.")
@pass_session
def extend(session: Session, /, span: int | None, as_export: bool, output: str | None, **options: Any) -> int:
    """Extend the lease of a message."""
    with opened() as client:
        found = client.extend(_receipt(options), span / MICRO if span else None)
    line = (
        f"lease_expires_at_unix={found.lease_expires_at_unix} "
        f"visibility_timeout_seconds={found.visibility_timeout_seconds}"
    )
    lines = exports({"QUEUE_META_ETAG": found.meta_etag}) if as_export else [line]
    show(wants_json(session, output), msgspec.to_builtins(found), lines)
    return OK


@queue.command("stats")
@queue_option
@output_option
@pass_session
def stats(session: Session, /, name: str | None, output: str | None) -> int:
    """Show the head of a queue and its waiting consumers."""
    with opened() as client:
        found = msgspec.to_builtins(client.stats(needed(name, "--queue", "QUEUE_NAME")))
    print_result(wants_json(session, output), found, format_pairs(found))
    return OK


count_option = click.option("--count", type=click.IntRange(1), metavar="N", help="End after so many.")


@queue.command("watch")
@queue_option
@count_option
@output_option
@pass_session
def watch(session: Session, /, name: str | None, count: int | None, output: str | None) -> int:
    """Print the changes of a queue's head, one on a line."""
    as_json = wants_json(session, output)
    with opened() as client, client.watch(needed(name, "--queue", "QUEUE_NAME")) as events:
        for done, event in enumerate(events, 1):
            line = f"available={str(event.available).lower()} head_message_id={event.head_message_id}"
            print_result(
                as_json, msgspec.to_builtins(event), f"{line} changed_at_unix={event.changed_at_unix}"
            )
            sys.stdout.flush()
            if done == count:
                break
    return OK


@queue.command("subscribe")
@queue_option
@click.option("--owner", metavar="NAME", help="Name of the consumer. Default: host and process id.")
@click.option("--visibility", type=Span(), help="Lease of a message. Default: that of the server.")
@click.option("--stateful", is_flag=True, help="Lease the states of the messages, too.")
@click.option(
    "--prefetch", type=click.IntRange(1, 64), default=1, help="Messages that the server leases at once."
)
@click.option(
    "--payload-dir", metavar="DIR", help="Directory for the payloads. Default: that of temporary files."
)
@click.option("--auto-ack", is_flag=True, help="Acknowledge a message when its payload is written.")
@count_option
@pass_session
def subscribe(session: Session, /, name: str | None, count: int | None, **options: Any) -> int:
    """Receive messages as they arrive, one on a line.

    A line is the JSON document of `dequeue --json`. The lease of a message is not extended.
    """
    given: Any = {"stateful": options["stateful"], **_consumer(options)}
    with opened() as client:
        with client.subscribe(
            needed(name, "--queue", "QUEUE_NAME"), options["prefetch"], **given
        ) as messages:
            for done, message in enumerate(messages, 1):
                _show_message(message, _save(message, None, options["payload_dir"]), as_json=True)
                if options["auto_ack"]:
                    message.ack()
                if done == count:
                    break
    return OK
