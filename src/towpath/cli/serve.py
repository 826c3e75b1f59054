"""`serve`: the HTTP server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from towpath.app import App
from towpath.cli import version
from towpath.cli.base import INTERRUPTED, OK, Failure, Session, command, pass_session, print_stderr
from towpath.cli.logs import LogArguments, log_options
from towpath.cli.output import print_result
from towpath.cli.targets import check_slashes, resolve_url
from towpath.cli.values import RateType, Span
from towpath.errors import InvalidInput
from towpath.operations.places import shown_url, warning_above
from towpath.settings import resolve

DOCS = "docs/server.md"
FILES = ("bundle", "tls_cert", "tls_key", "client_ca")
"""Options that are paths. In a settings file they are relative to its directory."""


def _use_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """The options in the settings file become the defaults: arguments and variables precede them."""
    if ctx.resilient_parsing:
        return value
    settings = resolve(file=value)
    place = settings.origins["serve"]
    options = {each.name: each for each in ctx.command.params if each.param_type_name == "option"}
    known = sorted(options.keys() - {"config", "url", "json", "store"})
    found: dict[str, Any] = {}
    for name, each in settings.serve.items():
        if name not in known:
            expected = f"one of {', '.join(known)}"
            raise InvalidInput(field=f"an option in [serve] of {place}", value=name, expected=expected)
        if isinstance(each, dict | list):
            raise InvalidInput(field=f"serve.{name} in {place}", value=each, expected="one value")
        text = str(Path(place).parent / each) if name in FILES and isinstance(each, str) else each
        found[name] = text if isinstance(text, bool) else str(text)
    ctx.default_map = found
    return value


_file = click.Path(dir_okay=False, path_type=Path)


@command("serve")
@click.option(
    "--config",
    type=_file,
    metavar="FILE",
    envvar="TOWPATH_CONFIG",
    is_eager=True,
    callback=_use_file,
    help="Settings file, instead of the nearest towpath.toml. Options are in its table [serve].",
)
@click.option("--store", metavar="URL", envvar="TOWPATH_STORE", help="Ledger URL; the same as --url.")
@click.option(
    "--listen",
    metavar="ADDRESS",
    envvar="TOWPATH_LISTEN",
    help="HOST:PORT or unix:///path. Beyond loopback only with authentication. Default: 127.0.0.1:9341.",
)
@click.option(
    "--listen-proto",
    type=click.Choice(("tcp", "unix")),
    envvar="TOWPATH_LISTEN_PROTO",
    help="unix: --listen is the path of a socket. Default: by the form of --listen.",
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
    "--queue-poll-interval",
    type=Span(),
    envvar="TOWPATH_QUEUE_POLL_INTERVAL",
    help="Interval of claims for waiting requests without a notification, on a ledger that is a server or is "
    "not watched. Default: 3s.",
)
@click.option(
    "--queue-poll-jitter",
    type=Span(),
    envvar="TOWPATH_QUEUE_POLL_JITTER",
    help="Random time that is added to the interval. Default: 500ms.",
)
@click.option(
    "--queue-resilient-poll-interval",
    type=Span(),
    envvar="TOWPATH_QUEUE_RESILIENT_POLL_INTERVAL",
    help="The interval on a ledger that is watched; 0 for no such claims. Default: 5m.",
)
@click.option(
    "--disk-queue-watch",
    type=bool,
    envvar="TOWPATH_DISK_QUEUE_WATCH",
    help="Rely on the watch of a SQLite file: claim at the resilient interval. Default: true.",
)
@click.option(
    "--disable-mem-queue-watch",
    type=bool,
    is_flag=False,
    flag_value=True,
    envvar="TOWPATH_DISABLE_MEM_QUEUE_WATCH",
    help="Claim from memory:// at the poll interval too. Default: false.",
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
    "--acquire-block",
    type=Span(),
    envvar="TOWPATH_ACQUIRE_BLOCK",
    help="Wait of an acquire that leaves it to the server. Default: 60s.",
)
@click.option(
    "--bundle",
    type=_file,
    metavar="FILE",
    envvar="TOWPATH_BUNDLE",
    help="PEM file for TLS: CA of the clients, certificate and key of the server, denylist.",
)
@click.option(
    "--tls-cert",
    type=_file,
    metavar="FILE",
    envvar="TOWPATH_TLS_CERT",
    help="PEM file for TLS, without --bundle: certificate of the server and its chain.",
)
@click.option(
    "--tls-key",
    type=_file,
    metavar="FILE",
    envvar="TOWPATH_TLS_KEY",
    help="PEM file with the key of --tls-cert.",
)
@click.option(
    "--client-ca",
    type=_file,
    metavar="FILE",
    envvar="TOWPATH_CLIENT_CA",
    help="PEM file with the CA of client certificates. Default: the CA of --bundle.",
)
@click.option(
    "--require-token",
    is_flag=True,
    default=None,
    envvar="TOWPATH_REQUIRE_TOKEN",
    help="Each request needs a token of `towpath auth token`, or a client certificate.",
)
@click.option(
    "--insecure-http",
    is_flag=True,
    default=None,
    envvar="TOWPATH_INSECURE_HTTP",
    help="Allow tokens without TLS beyond loopback, behind a proxy that speaks TLS.",
)
@click.option(
    "--rate",
    type=RateType(),
    envvar="TOWPATH_RATE",
    help="Requests of each client, such as 100/s; more are answered with 429. Default: no limit.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    envvar="TOWPATH_MAX_CONNECTIONS",
    help="Connections at once; more are answered with 503. Default: 10000.",
)
@click.option(
    "--max-peer-connections",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    envvar="TOWPATH_MAX_PEER_CONNECTIONS",
    help="Connections at once from one address. Default: no limit.",
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
def serve(session: Session, /, store: str | None, config: Path | None, **options: Any) -> int:
    """Serve queues and locks over HTTP."""
    log = LogArguments(**{name: options.pop(name) for name in LogArguments.__struct_fields__})
    if store is not None and session.url is not None and store != session.url:
        raise click.UsageError("--store and --url are the same option: give one of them.")
    url, origin = resolve_url(store if store is not None else session.url, config)
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
        server = _server(HttpServer, app, ServerOptions(**_given(options, url)))
        place = shown_url(url)
        content = {"address": server.address, "store": place}
        text = _welcome(server.address, place, server.options)
        drained = server.run(lambda: _announce(session.json, content, text))
    return OK if drained else INTERRUPTED


def _announce(as_json: bool, content: dict[str, str], text: list[str]) -> None:
    print_result(as_json, content, text)
    sys.stdout.flush()


def _server(make: Any, app: App, options: Any) -> Any:
    try:
        return make(app, options)
    except OSError as error:
        if error.filename is not None and options.tls is not None:
            raise  # a file of TLS
        step = "Use another address: --listen 127.0.0.1:0 selects a free port."
        raise Failure(
            f"The server cannot listen at {options.listen}: {error.strerror}.", step=step
        ) from error


def _given(options: dict[str, Any], url: str) -> dict[str, Any]:
    """The given options as fields of `ServerOptions`, for the ledger of the URL."""
    names = {"default_ttl": "visibility", "max_ttl": "max_visibility"}
    given = {
        names.get(name, name.removeprefix("queue_")): value
        for name, value in options.items()
        if value is not None
    }
    for name in ("drain_grace", "poll_interval", "poll_jitter", "resilient_poll_interval"):
        if name in given:
            given[name] /= 1_000_000
    watch_disk = given.pop("disk_queue_watch", True)
    watch_memory = not given.pop("disable_mem_queue_watch", False)
    given["watch"] = watch_memory if url.startswith("memory:") else watch_disk
    for name in ("visibility", "max_visibility", "acquire_block"):
        if name in given:
            if given[name] % 1_000_000:
                raise InvalidInput(field=name, value=given[name] / 1e6, expected="whole seconds")
            given[name] //= 1_000_000
    if given.pop("listen_proto", None) == "unix":
        if "listen" not in given:
            raise InvalidInput(field="listen", value=None, expected="the path of the socket")
        given["listen"] = f"unix://{given['listen'].removeprefix('unix://')}"
    return given | _tls(given)


def _tls(given: dict[str, Any]) -> dict[str, Any]:
    """The options of TLS, taken out of the given ones."""
    from towpath.http.tls import TlsFiles

    files = {name.removeprefix("tls_"): given.pop(name) for name in FILES if name in given}
    return {"tls": TlsFiles(**files)} if files else {}


def _welcome(address: str, store: str, options: Any) -> list[str]:
    base, socket = address, ""
    if address.startswith("unix://"):
        base, socket = "http://localhost", f" --unix-socket {address.removeprefix('unix://')}"
    if options.require_token:
        socket += ' -H "Authorization: Bearer $TOKEN"'
    elif options.verifies_clients:
        socket += " --cacert client.pem --cert client.pem"
    form = """-F 'meta={"queue":"orders"};type=application/json' -F payload=hello"""
    return [
        f"Towpath {version()} serves {store} at {address}",
        f"  Enqueue a message: curl{socket} {form} {base}/v1/queue/enqueue",
        f"  Documentation: {DOCS}",
        "  Ctrl-C stops it.",
    ]
