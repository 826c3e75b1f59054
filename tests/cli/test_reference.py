"""docs/cli.md: every command and exit code is in it, and every example parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from tests.support.reference import PATH, leaves, with_tables
from towpath.cli.base import EXIT_CODES, CliCommand, root

PAGE = PATH.read_text("utf-8")
EXAMPLES = [
    line.removeprefix("$ ") for line in PAGE.splitlines() if line.startswith("$ ") and "towpath" in line
]


LEAVES = dict(leaves())


def parsed(example: str) -> str:
    """The command an example calls, after it has taken all of the arguments."""
    example = re.sub(r'^eval "\$\((.*)\)"$', r"\1", example)
    [words] = [shlex.split(part) for part in example.split(" | ") if "towpath" in part]
    assert words.pop(0) == "towpath"
    command: click.Command = root
    path, context = "towpath", None
    while isinstance(command, click.Group):
        context = command.make_context(path, words, parent=context)
        name, inner, words = command.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None
        command, path = inner, f"{path} {name}"
    command.make_context(path, words, parent=context)
    return path


def test_every_command_has_a_section_and_no_section_is_left_over() -> None:
    assert sorted(re.findall(r"^### `(towpath [^`]+)`$", PAGE, re.MULTILINE)) == sorted(LEAVES)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_parse(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("arguments.json").write_text("{}")
    Path("serve.toml").write_text("")
    directory = re.search(r"--dir (\S+)", example)
    parsed(example if directory is None else example.replace(directory[1], str(tmp_path)))


def test_every_command_has_an_example() -> None:
    called = {path for path in LEAVES for example in EXAMPLES if f"{path} " in f"{example} "}
    assert called == set(LEAVES)


def test_the_option_tables_match_the_commands() -> None:
    assert with_tables(PAGE) == PAGE, "run `make reference`"


def test_a_wrong_table_would_be_noticed() -> None:
    renamed = PAGE.replace("| `--wait SPAN` |", "| `--wait TIME` |")
    shorter = re.sub(r"\| `--yes, -y` .*\n", "", PAGE)
    for wrong in (renamed, shorter):
        assert wrong != PAGE
        assert with_tables(wrong) == PAGE


def test_the_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_has_json_and_help(path: str) -> None:
    command = LEAVES[path]
    assert isinstance(command, CliCommand)
    assert {"--json", "--url"} <= {option for parameter in command.params for option in parameter.opts}
    assert command.help
    bare = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
    assert bare == []
    short = command.get_short_help_str(60)
    assert len(short) < 60
    assert not short.endswith("..."), "the first sentence does not fit into the list of commands"


def test_a_wrong_example_would_be_noticed() -> None:
    for wrong in ("towpath stats --wach", "towpath job list", "towpath put", "towpath ack nonsense"):
        with pytest.raises(click.UsageError):
            parsed(wrong)
