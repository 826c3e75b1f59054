"""What the commands of `client` share: the options of the connection, variables of the environment, `export`
lines."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towpath.cli.base import CliCommand, CliGroup, Failure, Session, bad_input
from towpath.cli.output import print_json
from towpath.cli.values import Span

if TYPE_CHECKING:
    from towpath.http.client import QueueClient

FAMILIES = ("TOWPATH", "LOCKD")
"""Each exported variable has both names; the first that is set is read."""
MAX_TOKEN_FILE = 64 * 1024


class Connection:
    """The options that say where the client connects to. They stand before or after the command's name."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def namespace(self) -> str:
        found: str = (
            self.given.get("namespace") or variable("QUEUE_NAMESPACE") or variable("CLIENT_NAMESPACE") or ""
        )
        return found

    def open(self) -> QueueClient:
        try:
            from towpath.http.client import QueueClient
        except ImportError as error:
            step = "pip install 'towpath[client]'"
            raise Failure(f"towpath client needs the package {error.name}.", step=step) from error
        given = self.given
        bundle = given.get("bundle")
        if given.get("disable_mtls") or variable("CLIENT_DISABLE_MTLS") in ("1", "true"):
            bundle = ""  # the variable is not read either
        return QueueClient(
            given.get("server"),
            token=self._token(),
            bundle=bundle,
            ca=given.get("ca"),
            timeout=given.get("timeout", 15_000_000) / 1e6,
            namespace=self.namespace(),
        )

    def _token(self) -> str | None:
        path = self.given.get("token_file")
        if path is None:
            return None
        try:
            with open(path, encoding="utf-8") as file:
                return file.read(MAX_TOKEN_FILE).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise bad_input(f"The token file {path} cannot be read: {reason}.") from None


def connection_of(ctx: click.Context) -> Connection:
    found: Connection = ctx.find_root().meta.setdefault("towpath.client", Connection())
    return found


def _store(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None and value is not False and param.name is not None:
        connection_of(ctx).given[param.name] = value


def connection_options() -> list[click.Parameter]:
    def option(*names: str, help: str, **more: Any) -> click.Option:
        return click.Option(names, help=help, callback=_store, expose_value=False, **more)

    return [
        option(
            "--server",
            "-s",
            metavar="URL",
            help="http://host:port, https://host:port or unix:///path; several with commas. Default: "
            "TOWPATH_SERVER or LOCKD_CLIENT_SERVER, then http://127.0.0.1:9341.",
        ),
        option("--namespace", "-n", metavar="NAME", help="Namespace. Default: that of the server."),
        option(
            "--bundle",
            "-b",
            metavar="FILE",
            help="PEM file with CA, certificate and key. Default: TOWPATH_BUNDLE or LOCKD_CLIENT_BUNDLE.",
        ),
        option("--ca", metavar="FILE", help="PEM file with the CA of the server."),
        option("--disable-mtls", is_flag=True, help="Use no bundle, also if a variable names one."),
        option(
            "--token-file",
            metavar="FILE",
            envvar="TOWPATH_TOKEN_FILE",
            help="File with the bearer token. Default: the token in TOWPATH_TOKEN.",
        ),
        option("--timeout", type=Span(), help="Time for an answer, besides a wait. Default: 15s."),
    ]


class ClientCommand(CliCommand):
    """A command with the options of the connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params[-2:-2] = connection_options()


class ClientGroup(CliGroup):
    command_class = ClientCommand

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params[-2:-2] = connection_options()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, {"q": "queue"}.get(cmd_name, cmd_name))


def variable(name: str) -> str | None:
    """The value of TOWPATH_<name> or LOCKD_<name>."""
    found = (os.environ.get(f"{family}_{name}") for family in FAMILIES)
    return next(filter(None, found), None)


def needed(value: str | None, option: str, name: str) -> str:
    """The value of an option, or of its variable."""
    if found := value or variable(name):
        return found
    raise click.UsageError(
        f"Missing option '{option}' (or the variable {FAMILIES[0]}_{name}).", click.get_current_context()
    )


def number(value: int | None, name: str) -> int:
    """A whole number from an option or its variable; 0 without both."""
    if value is not None:
        return value
    text = variable(name) or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise bad_input(f"The variable {FAMILIES[0]}_{name} is {text!r}; it must be a whole number.")
    return int(text)


def exports(values: Mapping[str, object]) -> list[str]:
    """Lines for `eval`: each value under both names. A value that is empty removes the variable of an earlier
    command. Values come from the server: they are quoted, and control characters are refused."""
    lines = []
    for name, value in values.items():
        text = "" if value in (None, 0) else str(value)
        if not text.isprintable():
            raise Failure(f"The server sent control characters as {name}.")
        names = [f"{family}_{name}" for family in FAMILIES]
        if text:
            lines += [f"export {each}={shlex.quote(text)}" for each in names]
        else:
            lines.append(f"unset {' '.join(names)}")
    return lines


def print_lines(lines: Iterable[str], err: bool = False) -> None:
    """Lines for a shell, not escaped: `exports` has checked them."""
    click.echo("\n".join(lines), err=err)
    (sys.stderr if err else sys.stdout).flush()


output_option = click.option(
    "--output", type=click.Choice(["text", "json"]), help="`json` is the same as --json."
)


def wants_json(session: Session, output: str | None) -> bool:
    return session.json or output == "json"


def show(as_json: bool, data: object, lines: list[str]) -> None:
    if as_json:
        print_json(data)
    else:
        print_lines(lines)


def read_payload(data: str | None, file: str | None) -> tuple[Any, Callable[[], object]]:
    """The payload of `--data` or `--file`, and a function that closes it. `-` is stdin."""
    if data is not None and file is not None:
        raise click.UsageError("--data and --file exclude each other.", click.get_current_context())
    if file is None:
        return os.fsencode(data or ""), lambda: None
    if file == "-":
        return sys.stdin.buffer, lambda: None
    try:
        opened = Path(file).open("rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise bad_input(f"{file} cannot be read: {error.strerror}.") from None
    return opened, opened.close
