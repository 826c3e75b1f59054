"""The option tables of docs/cli.md, made from the commands: `make reference` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from towpath.cli.base import root, shared_options
from towpath.cli.client_base import connection_options

PATH = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
HEAD = "| option | meaning |\n|---|---|\n"
SHARED = {parameter.name for parameter in [*shared_options(), *connection_options()]}
"""Options that all commands have, or all commands of `client`: the page describes them once."""


def leaves(command: click.Command = root, path: str = "towpath") -> Iterator[tuple[str, click.Command]]:
    """Every command that is not a group, by the words that call it."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from leaves(inner, f"{path} {name}")


def table(command: click.Command) -> str:
    """The options of a command that not all commands have; empty if there are none."""
    context = click.Context(command)
    options = [each for each in command.params if isinstance(each, click.Option) and each.name not in SHARED]
    return HEAD + "".join(_row(each, context) for each in options) if options else ""


def _row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(option.opts + option.secondary_opts)
    metavar = "" if option.is_flag or option.count else f" {_metavar(option, context)}"
    meaning = (option.help or "").replace("|", "\\|")
    default = option.default
    if option.show_default and default is not None:
        meaning += f" Default: {default}."
    return f"| `{names}{metavar}` | {meaning} |\n"


def _metavar(option: click.Option, context: click.Context) -> str:
    shown = option.make_metavar(context)
    if isinstance(option.type, click.Choice):
        return shown.strip("[]").replace("|", "\\|")
    return {"INTEGER RANGE": "N", "INTEGER": "N", "FLOAT RANGE": "NUMBER"}.get(shown, shown)


def with_tables(page: str) -> str:
    """The page with the table of every command at the end of its section."""
    commands = dict(leaves())
    sections = re.split(r"(?m)^(?=##+ )", page)
    return "".join(_with_table(section, commands) for section in sections).rstrip("\n") + "\n"


def _with_table(section: str, commands: dict[str, click.Command]) -> str:
    heading = re.match(r"### `(towpath [^`]+)`\n", section)
    if heading is None or heading[1] not in commands:
        return section
    text = re.sub(rf"\n{re.escape(HEAD)}(\| `-.*\n)*", "", section).rstrip("\n") + "\n"
    made = table(commands[heading[1]])
    return text + (f"\n{made}\n" if made else "\n")


if __name__ == "__main__":
    PATH.write_text(with_tables(PATH.read_text("utf-8")), "utf-8")
