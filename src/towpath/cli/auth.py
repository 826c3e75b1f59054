"""`auth`: tokens and certificates for clients of the HTTP server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towpath.cli.base import OK, CliGroup, Failure, Session, combine, not_found, pass_session
from towpath.cli.output import format_age, format_time, print_result, table
from towpath.cli.values import Moment, now
from towpath.errors import InvalidInput

if TYPE_CHECKING:
    from towpath.http.certificates import CertificateRequest, CertificateView
    from towpath.http.tokens import TokenRecord

_file = click.Path(dir_okay=False, path_type=Path)
RIGHTS = ("produce", "consume", "monitor", "admin")


@click.group("auth", cls=CliGroup)
def auth() -> None:
    """Make tokens and certificates for clients of the HTTP server."""


@auth.group("token", cls=CliGroup)
def token() -> None:
    """Make, list and revoke tokens. They are stored in the ledger, as digests."""


@token.command("new")
@click.argument("name")
@click.option(
    "--right",
    "rights",
    type=click.Choice(RIGHTS),
    multiple=True,
    required=True,
    help="Right of the token. Repeatable.",
)
@click.option(
    "--namespace", "namespaces", multiple=True, help="Namespace of the rights. Repeatable. Default: all."
)
@click.option(
    "--queue-prefix",
    "prefixes",
    multiple=True,
    help="Beginning of the names of its queues; then no locks. Repeatable. Default: all queues.",
)
@click.option(
    "--expires",
    type=Moment(past=False),
    help="End of its validity: a time, or a span from now. Default: none.",
)
@pass_session
def new_token(
    session: Session,
    /,
    name: str,
    rights: Sequence[str],
    namespaces: Sequence[str],
    prefixes: Sequence[str],
    expires: int | None,
) -> int:
    """Make a token with the name NAME and print it. It cannot be printed again."""
    from towpath.http.access import Grant, Right, checked_namespace, checked_prefix
    from towpath.http.tokens import create_token

    granted = frozenset(map(Right, rights))
    grants = [
        Grant(granted, space, prefix)
        for space in dict.fromkeys(map(checked_namespace, namespaces or ("*",)))
        for prefix in (dict.fromkeys(map(checked_prefix, prefixes)) if prefixes else ("",))
    ]
    with session.ledger(make=True) as ledger:
        record, text = create_token(ledger, name, grants, now(), expires)
    print_result(session.json, {"token": text} | _data(record), text)
    return OK


@token.command("list")
@pass_session
def list_tokens(session: Session, /) -> int:
    """List the tokens, without their secrets."""
    from towpath.http.tokens import load_tokens

    with session.ledger() as ledger:
        found = [*load_tokens(ledger).values()]
    print_result(session.json, {"tokens": [_data(each) for each in found]}, lambda: _token_table(found))
    return OK


@token.command("revoke")
@click.argument("id")
@pass_session
def revoke(session: Session, /, id: str) -> int:
    """Delete the token ID. Servers refuse it within some seconds, and end its requests."""
    from towpath.http.tokens import revoke_token

    with session.ledger() as ledger:
        found = revoke_token(ledger, id)
    if found is None:
        raise not_found(f"There is no token {id}.", "`towpath auth token list` lists the tokens.")
    print_result(session.json, {"revoked": _data(found)}, f"token {id} ({found.name}) is revoked")
    return OK


def _data(record: TokenRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "grants": [
            {
                "rights": sorted(right.value for right in each.rights),
                "namespace": each.namespace,
                "queue_prefix": each.prefix,
            }
            for each in record.grants
        ],
        "created_at": format_time(record.created_at),
        "expires_at": format_time(record.expires_at),
        "expired": not record.is_valid(now()),
    }


def _token_table(records: Sequence[TokenRecord]) -> object:
    if not records:
        return "There are no tokens."
    rows = [
        (
            each.id,
            each.name,
            ",".join(sorted(right.value for right in each.grants[0].rights)),
            ",".join(dict.fromkeys(grant.namespace for grant in each.grants)),
            ",".join(dict.fromkeys(grant.prefix for grant in each.grants if grant.prefix)) or "-",
            format_age(each.created_at, now()),
            (format_time(each.expires_at) or "-") if each.is_valid(now()) else "expired",
        )
        for each in records
    ]
    return table(("id", "name", "rights", "namespaces", "queue prefixes", "age", "expires"), rows)


def _made(days: int) -> Callable[[Any], Any]:
    """The options of every command that makes a certificate."""
    return combine(
        click.option("--out", type=_file, metavar="FILE", required=True, help="File to write, mode 0600."),
        click.option("--days", type=int, default=days, show_default=True, help="Days of validity."),
        click.option("--force", is_flag=True, help="Replace an existing file."),
    )


_ca = click.option("--ca", type=_file, metavar="FILE", required=True, help="File of `towpath auth new ca`.")


@auth.group("new", cls=CliGroup)
def new() -> None:
    """Make a CA, and certificates of servers and clients: bundles in one PEM file, as lockd has them."""


@new.command("ca")
@click.option("--cn", metavar="NAME", default="towpath-ca", show_default=True, help="Common name.")
@_made(3650)
@pass_session
def new_ca(session: Session, /, cn: str, days: int, out: Path, force: bool) -> int:
    """Make a CA. Its file has its private key: keep it away from servers and clients."""
    return _write(session, out, force, _certificates().new_ca(_request(cn, days)))


@new.command("server")
@_ca
@click.option("--cn", metavar="NAME", default="towpath-server", show_default=True, help="Common name.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Host name or IP address of the server. Repeatable. Default: those of this machine on loopback.",
)
@_made(365)
@pass_session
def new_server(session: Session, /, ca: Path, cn: str, hosts: Sequence[str], days: int, **more: Any) -> int:
    """Make the bundle of a server, for `towpath serve --bundle`."""
    names = hosts or tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", socket.gethostname())))
    found = _certificates()
    made = found.new_server(found.Bundle(ca), _request(cn, days), names)
    return _write(session, more["out"], more["force"], made)


@new.command("client")
@_ca
@click.option("--cn", metavar="NAME", required=True, help="Common name: the name of the client.")
@click.option(
    "--namespace",
    "namespaces",
    metavar="NAME[=PERM]",
    multiple=True,
    help="A claim: a namespace or ALL, and r (consume), w (produce) or rw. Repeatable. Default: rw.",
)
@click.option(
    "--right",
    "rights",
    type=click.Choice(RIGHTS),
    multiple=True,
    help="A right in all namespaces. Repeatable.",
)
@_made(365)
@pass_session
def new_client(
    session: Session, /, ca: Path, cn: str, namespaces: Sequence[str], rights: Sequence[str], **more: Any
) -> int:
    """Make the bundle of a client, with its rights."""
    if not (namespaces or rights):
        raise click.UsageError("Give the client a --namespace or a --right.", click.get_current_context())
    found = _certificates()
    pairs = [each.partition("=") for each in namespaces]
    claims = [found.claim_of(name, permission or "rw") for name, _, permission in pairs]
    claims += [f"towpath://{each}" for each in rights]
    made = found.new_client(found.Bundle(ca), _request(cn, more["days"]), claims)
    return _write(session, more["out"], more["force"], made)


@auth.command("revoke")
@click.argument("bundle", type=_file)
@click.argument("clients", nargs=-1, required=True)
@pass_session
def revoke_certificates(session: Session, /, bundle: Path, clients: Sequence[str]) -> int:
    """Revoke certificates in the BUNDLE of a server.

    CLIENTS are files or serial numbers. They are added to the denylist in the bundle. A running server reads
    the changed file within some seconds, and ends the requests of these clients."""
    found = _certificates().deny(bundle, [_serial(each) for each in clients])
    names = [f"{each:x}" for each in found]
    print_result(session.json, {"bundle": str(bundle), "denylist": names}, [f"{bundle} denies:", *names])
    return OK


def _serial(text: str) -> int:
    found = _certificates()
    serial: int
    if Path(text).is_file():
        leaf = found.Bundle(Path(text)).leaf
        if leaf is None:
            raise InvalidInput(field="clients", value=text, expected="the bundle of a client")
        serial = leaf.serial_number
    else:
        serial = found.serial_of(text)
    return serial


@auth.command("inspect")
@click.argument("file", type=_file)
@pass_session
def inspect(session: Session, /, file: Path) -> int:
    """Show the certificates in FILE.

    Names, claims, validity and revocation are printed, private keys are not."""
    module = _certificates()
    bundle = module.Bundle(file)
    found = module.describe(bundle)
    denied = sorted(f"{each:x}" for each in bundle.denylist)
    data = {"certificates": [_view_data(each) for each in found], "denylist": denied}
    print_result(session.json, data, lambda: _view_lines(found, denied))
    return OK


def _view_data(view: CertificateView) -> dict[str, Any]:
    data = {name: getattr(view, name) for name in view.__struct_fields__}
    return data | {"not_before": format_time(view.not_before), "not_after": format_time(view.not_after)}


def _view_lines(views: Sequence[CertificateView], denied: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for view in views:
        revoked = ", revoked" if view.revoked else ""
        lines.append(f"{view.kind}  {view.subject}, serial number {view.serial}{revoked}")
        lines.append(f"  valid from {format_time(view.not_before)} to {format_time(view.not_after)}")
        lines += [f"  {name}" for name in view.names]
        lines += ["  with its private key"] if view.has_key else []
    return [*lines, *(f"denied  {each}" for each in denied)]


def _certificates() -> Any:
    """The module of certificates; its package is optional."""
    try:
        from towpath.http import certificates
    except ImportError as error:
        step = "pip install 'towpath[server]'"
        raise Failure(f"Certificates need the package {error.name}.", step=step) from error
    return certificates


def _request(common_name: str, days: int) -> CertificateRequest:
    made: CertificateRequest = _certificates().CertificateRequest(
        common_name=common_name, days=days, now=now()
    )
    return made


def _write(session: Session, out: Path, force: bool, content: bytes) -> int:
    found = _certificates()
    found.write_private(out, content, force)
    made = found.describe(found.Bundle(out))[-1]
    data = {"file": str(out)} | _view_data(made)
    print_result(session.json, data, f"{out}: {made.subject}, serial number {made.serial}")
    return OK
