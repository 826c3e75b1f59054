"""What all commands share: `--url` and `--json` in every place, the session they fill, groups that load their parts late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from towpath.cli.failures import EXIT_CODES
from towpath.escapes import escape

if TYPE_CHECKING:
    from towpath import Ledger

F = TypeVar("F", bound=Callable[..., Any])


class Session:
    """The shared options of one run, wherever among the arguments they stood."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.json = False

    @contextmanager
    def ledger(self, make: bool = False) -> Iterator[Ledger]:
        """The ledger of `--url` or the settings. Unless `make`, one that is not there is an error and not a new file."""
        from towpath.cli.doors import open_door

        ledger = open_door(self.url, make)
        try:
            yield ledger
        finally:
            ledger.close()


def _keep_url(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Session).url = value


def _keep_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Session).json = True


def shared_options() -> list[click.Parameter]:
    url = "The ledger, such as sqlite:///work.db; else TOWPATH_URL, towpath.toml, pyproject.toml, sqlite:///towpath.db."
    return [
        click.Option(["--url"], metavar="URL", help=url, callback=_keep_url, expose_value=False),
        click.Option(["--json"], is_flag=True, help="JSON on stdout.", callback=_keep_json, expose_value=False),
    ]


class Leaf(click.Command):
    """A command: takes the shared options, and says in its help how it may end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())


class Branch(click.Group):
    """A command with commands below it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())

    command_class = Leaf


class Root(Branch):
    """A group whose commands are imported when they are asked for, and not to be listed. `parts`: name -> ("module:attribute" in
    this package, its line in the list)."""

    def __init__(self, *args: Any, parts: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = parts

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._parts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._parts:
            return None
        module, _, attribute = self._parts[cmd_name][0].partition(":")
        command = getattr(import_module(f"towpath.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self._parts.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])


def command(name: str) -> Callable[[Callable[..., int]], Leaf]:
    return click.command(name, cls=Leaf)


pass_session = click.make_pass_decorator(Session, ensure=True)


def all_of(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order written."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def confirm(question: str, yes: bool) -> None:
    """Ask before something large. Without a terminal nobody can answer, so `--yes` must say it."""
    import sys

    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"{question} Say so with --yes.", click.get_current_context())
    if not click.confirm(escape(question), err=True):
        raise click.Abort


def names(values: Sequence[str], most: int = 8) -> str:
    """Some names in a sentence."""
    shown = ", ".join(values[:most]) or "none"
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")
