"""`client lock` and `client state`: locks of an HTTP server, and the documents of locks and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath.cli.base import OK, Session, bad_input, combine, not_found, pass_session
from towpath.cli.client_base import (
    ClientGroup,
    connection_of,
    exports,
    needed,
    number,
    output_option,
    read_payload,
    show,
    variable,
    wants_json,
)
from towpath.cli.client_queue import MICRO, Block, opened
from towpath.cli.output import print_result
from towpath.cli.values import Span

if TYPE_CHECKING:
    from towpath.http.client import DocumentLease

key_option = click.option("--key", "-k", metavar="KEY", help="Key. Default: TOWPATH_CLIENT_KEY.")


@click.group("lock", cls=ClientGroup)
def lock() -> None:
    """Acquire, renew and release locks."""


@lock.command("acquire")
@click.option("--key", "-k", required=True, metavar="KEY", help="Key of the lock.")
@click.option("--owner", metavar="NAME", help="Name of the holder. Default: host and process id.")
@click.option("--ttl", type=Span(), default="30", show_default=True, help="Lease of the lock.")
@click.option(
    "--block",
    type=Block(),
    metavar="SPAN",
    default="forever",
    show_default=True,
    help="Wait so long for the lock; 0 or `forever` without limit, -1 or `nowait` not at all.",
)
@output_option
@pass_session
def acquire(
    session: Session, /, key: str, owner: str | None, ttl: int, block: float, output: str | None
) -> int:
    """Acquire a lock. Prints `export` lines for `eval`."""
    with opened() as client:
        held = client.locks.acquire(key, ttl / MICRO, None if block < 0 else block, owner)
    lease = held.lease
    values = {
        "CLIENT_KEY": lease.key,
        "CLIENT_LEASE": lease.lease_id,
        "CLIENT_FENCING_TOKEN": lease.fencing_token,
        "CLIENT_TXN_ID": lease.txn_id,
        "CLIENT_NAMESPACE": lease.namespace,
        "CLIENT_VERSION": held.version,
        "CLIENT_EXPIRES_UNIX": held.expires_at_unix,
    }
    data = {**msgspec.to_builtins(lease), "version": held.version, "expires_at_unix": held.expires_at_unix}
    show(wants_json(session, output), data, exports(values))
    return OK


lease_options: Callable[[Any], Any] = combine(
    key_option,
    click.option("--lease", metavar="ID", help="Lease id. Default: TOWPATH_CLIENT_LEASE."),
    click.option("--fencing-token", type=int, help="Fencing token. Default: TOWPATH_CLIENT_FENCING_TOKEN."),
    click.option("--txn-id", metavar="ID", help="Transaction id. Default: TOWPATH_CLIENT_TXN_ID."),
)


def _lease(options: dict[str, Any]) -> DocumentLease:
    from towpath.http.client import DocumentLease

    return DocumentLease(
        namespace=connection_of(click.get_current_context()).namespace(),
        key=needed(options["key"], "--key", "CLIENT_KEY"),
        lease_id=needed(options["lease"], "--lease", "CLIENT_LEASE"),
        fencing_token=number(options["fencing_token"], "CLIENT_FENCING_TOKEN"),
        txn_id=options["txn_id"] or variable("CLIENT_TXN_ID") or "",
    )


@lock.command("keepalive")
@lease_options
@click.option(
    "--ttl", type=Span(), default="30", show_default=True, help="New length of the lease, from now."
)
@output_option
@pass_session
def keepalive(session: Session, /, ttl: int, output: str | None, **options: Any) -> int:
    """Extend the lease of a lock."""
    with opened() as client:
        until = client.locks.keepalive(_lease(options), ttl / MICRO)
    print_result(wants_json(session, output), {"expires_at_unix": until}, f"expires_at_unix={until}")
    return OK


@lock.command("release")
@lease_options
@click.option("--rollback", is_flag=True, help="Drop the changes of the document.")
@output_option
@pass_session
def release(session: Session, /, rollback: bool, output: str | None, **options: Any) -> int:
    """Release a lock, and publish the changes of its document."""
    with opened() as client:
        client.locks.release(_lease(options), rollback)
    print_result(wants_json(session, output), {"released": True}, "released")
    return OK


@click.group("state", cls=ClientGroup)
def state() -> None:
    """Read and change the document of a lock or message."""


document_options: Callable[[Any], Any] = combine(
    lease_options,
    click.option(
        "--of-message",
        is_flag=True,
        help="The state of the message in the variables of `queue dequeue --stateful`.",
    ),
)


def _document_lease(options: dict[str, Any]) -> DocumentLease:
    if not options.pop("of_message"):
        return _lease(options)
    from towpath.http.client import DocumentLease

    queue, id = (needed(None, f"--{option}", name) for option, name in _MESSAGE)
    return DocumentLease(
        namespace=connection_of(click.get_current_context()).namespace(),
        key=f"q/{queue}/state/{id}",
        lease_id=needed(None, "--state-lease", "QUEUE_STATE_LEASE"),
        fencing_token=number(None, "QUEUE_STATE_FENCING_TOKEN"),
        txn_id=variable("QUEUE_TXN_ID") or "",
    )


_MESSAGE = (("queue", "QUEUE_NAME"), ("message", "QUEUE_MESSAGE_ID"))
expect_option = click.option(
    "--if-version", type=int, metavar="N", help="Only if the document has this version."
)


@state.command("get")
@document_options
@click.option("--public", is_flag=True, help="Without a lease, as it was published.")
@pass_session
def get(session: Session, /, public: bool, **options: Any) -> int:
    """Print the document as JSON. Exit code 3 if there is none."""
    with opened() as client:
        if public:
            found = client.locks.published(needed(options["key"], "--key", "CLIENT_KEY"))
        else:
            found = client.locks.document(_document_lease(options)).get()
    if found.value is None and not found.etag:
        raise not_found("There is no document.")
    print_result(
        session.json,
        {"document": found.value, "version": found.version, "etag": found.etag},
        [msgspec.json.encode(found.value).decode()],
    )
    return OK


@state.command("update")
@document_options
@click.option("--data", "-d", metavar="JSON", help="The document.")
@click.option("--file", "-f", metavar="FILE", help="File with the document; `-` reads stdin.")
@expect_option
@output_option
@pass_session
def update(
    session: Session,
    /,
    data: str | None,
    file: str | None,
    if_version: int | None,
    output: str | None,
    **options: Any,
) -> int:
    """Write the document."""
    content, close = read_payload(data, file)
    try:
        raw = content if isinstance(content, bytes) else content.read()
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_input(f"The document is not JSON: {error}.") from None
    finally:
        close()
    with opened() as client:
        found = client.locks.document(_document_lease(options)).update(value, if_version)
    print_result(
        wants_json(session, output),
        {"version": found.version, "etag": found.etag},
        f"version={found.version} etag={found.etag}",
    )
    return OK


@state.command("remove")
@document_options
@expect_option
@output_option
@pass_session
def remove(session: Session, /, if_version: int | None, output: str | None, **options: Any) -> int:
    """Delete the document."""
    with opened() as client:
        removed = client.locks.document(_document_lease(options)).remove(if_version)
    print_result(
        wants_json(session, output), {"removed": removed}, "removed" if removed else "there was none"
    )
    return OK
