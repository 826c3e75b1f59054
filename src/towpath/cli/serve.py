"""`serve`: the HTTP server."""

from __future__ import annotations

import sys
from typing import Any

import click

from towpath.app import App
from towpath.cli import version
from towpath.cli.base import INTERRUPTED, OK, Failure, Session, command, pass_session, print_stderr
from towpath.cli.logs import LogArguments, log_options
from towpath.cli.output import print_result
from towpath.cli.targets import check_slashes, resolve_url
from towpath.cli.values import Span
from towpath.errors import InvalidInput
from towpath.operations.places import shown_url, warning_above

DOCS = "docs/server.md"


@command("serve")
@click.option("--store", metavar="URL", envvar="TOWPATH_STORE", help="Ledger URL; the same as --url.")
@click.option(
    "--listen",
    metavar="ADDRESS",
    envvar="TOWPATH_LISTEN",
    help="HOST:PORT or unix:///path. Loopback only. Default: 127.0.0.1:9341.",
)
@click.option(
    "--default-namespace",
    metavar="NAME",
    envvar="TOWPATH_DEFAULT_NAMESPACE",
    help="Namespace of requests that name none. Default: default.",
)
@click.option(
    "--queue-max-consumers",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    envvar="TOWPATH_QUEUE_MAX_CONSUMERS",
    help="Requests that wait for messages at once. Default: 64 for each CPU, from 128 to 4096.",
)
@click.option(
    "--default-ttl",
    type=Span(),
    envvar="TOWPATH_DEFAULT_TTL",
    help="Lease of a message if the consumer asks for none. Default: 30s.",
)
@click.option(
    "--max-ttl",
    type=Span(),
    envvar="TOWPATH_MAX_TTL",
    help="The longest lease that a consumer may ask for. Default: 30m.",
)
@click.option(
    "--drain-grace",
    type=Span(),
    envvar="TOWPATH_DRAIN_GRACE",
    help="After a signal to stop, wait so long for acks of delivered messages. Default: 10s.",
)
@click.option(
    "--max-payload",
    type=click.IntRange(0, 64 * 1024**3),
    metavar="BYTES",
    envvar="TOWPATH_MAX_PAYLOAD",
    help="The most bytes of a payload. Default: 1073741824 (1 GiB).",
)
@log_options
@pass_session
def serve(session: Session, /, store: str | None, **options: Any) -> int:
    """Serve queues and locks over HTTP."""
    log = LogArguments(**{name: options.pop(name) for name in LogArguments.__struct_fields__})
    if store is not None and session.url is not None and store != session.url:
        raise click.UsageError("--store and --url are the same option: give one of them.")
    url, origin = resolve_url(store if store is not None else session.url)
    check_slashes(url, origin)
    print_stderr([*filter(None, [warning_above(url)])])
    log.configure()
    try:
        from towpath.http.options import ServerOptions
        from towpath.http.server import HttpServer
    except ImportError as error:
        step = "pip install 'towpath[server]'"
        raise Failure(f"towpath serve needs the package {error.name}.", step=step) from error
    with App(url) as app:
        server = _server(HttpServer, app, ServerOptions(**_given(options)))
        place = shown_url(url)
        content = {"address": server.address, "store": place}
        text = _welcome(server.address, place)
        drained = server.run(lambda: _announce(session.json, content, text))
    return OK if drained else INTERRUPTED


def _announce(as_json: bool, content: dict[str, str], text: list[str]) -> None:
    print_result(as_json, content, text)
    sys.stdout.flush()


def _server(make: Any, app: App, options: Any) -> Any:
    try:
        return make(app, options)
    except OSError as error:
        step = "Use another address: --listen 127.0.0.1:0 selects a free port."
        raise Failure(
            f"The server cannot listen at {options.listen}: {error.strerror}.", step=step
        ) from error


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """The given options as fields of `ServerOptions`."""
    names = {"queue_max_consumers": "max_consumers", "default_ttl": "visibility", "max_ttl": "max_visibility"}
    given = {names.get(name, name): value for name, value in options.items() if value is not None}
    if "drain_grace" in given:
        given["drain_grace"] /= 1_000_000
    for name in ("visibility", "max_visibility"):
        if name in given:
            if given[name] % 1_000_000:
                raise InvalidInput(field=name, value=given[name] / 1e6, expected="whole seconds")
            given[name] //= 1_000_000
    return given


def _welcome(address: str, store: str) -> list[str]:
    base, socket = address, ""
    if address.startswith("unix://"):
        base, socket = "http://localhost", f" --unix-socket {address.removeprefix('unix://')}"
    form = """-F 'meta={"queue":"orders"};type=application/json' -F payload=hello"""
    return [
        f"Towpath {version()} serves {store} at {address}",
        f"  Enqueue a message: curl{socket} {form} {base}/v1/queue/enqueue",
        f"  Documentation: {DOCS}",
        "  Ctrl-C stops it.",
    ]
