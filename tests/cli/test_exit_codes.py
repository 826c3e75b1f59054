"""How commands end: exit codes, errors with their next step, pipes, interrupts. Never a traceback."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.support.shell import EXECUTABLE, Shell, python
from towpath import errors
from towpath.cli.base import BAD_INPUT, INTERRUPTED, NOT_FOUND, REFUSED, STUCK, UNAVAILABLE, as_failure


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nosuch"], "No such command"),
        (["put"], "Missing argument 'QUEUE'"),
        (["put", "bad name", "x"], "letters, digits"),
        (["put", "", "x"], "letters, digits"),
        (["put", "q", "x", "--delay", "soon"], "30, 1.5s, 2h"),
        (["put", "q", "x", "--at", "tomorrow"], "2026-01-31T12:00Z"),
        (["put", "q", "x", "--delay", "5", "--at", "2026-01-31"], "--delay and --at exclude each other"),
        (["put", "q", "x", "--priority", "urgent"], "high, normal, low"),
        (["put", "q", "x", "--header", "novalue"], "NAME=VALUE"),
        (["put", "q", "x", "--window", "5"], "--key"),
        (["put", "q", "x", "--max-attempts", "0"], "from 1"),
        (["put", "q", "x", "--key", ""], "1 to 512 characters"),
        (["enqueue", "k", "--queue", "q", "--key", ""], "1 to 512 characters"),
        (["enqueue", "k", "--queue", "q", "--args", '{"n": 1e999}'], "JSON"),
        (["enqueue", "k", "--queue", "q", "--args", "{"], "JSON"),
        (["enqueue", "k", "--queue", "q", "--args", "[1]"], "JSON object"),
        (["enqueue", "k", "--queue", "q", "--args", "@nofile"], "No such file"),
        (["get", "bad name"], "letters, digits"),
        (["get", "q", "-n", "0"], "range"),
        (["get", "q", "--lease", "2d"], "lease"),
        (["ack", "nonsense"], "ID:FENCE"),
        (["ack", "id:"], "ID:FENCE"),
        (["ack", ":1"], "ID:FENCE"),
        (["ack", "id:1", "--result", "{"], "JSON"),
        (["extend", "id:1", "long"], "30, 1.5s, 2h"),
        (["jobs", "list", "--state", "lost"], "is not one of"),
        (["jobs", "list", "--page", "!!"], "the `next` of an earlier page"),
        (["jobs", "list", "--since", "then"], "2026-01-31T12:00Z"),
        (["jobs", "list", "--limit", "0"], "range"),
        (["queues", "set", "bad name", "--cap", "1"], "letters, digits"),
        (["--url", "mysql://here", "stats"], "memory://, sqlite:///file.db"),
        (["--url", "sqlite:file.db", "put", "q"], "sqlite:///file.db"),
        (["--url", "memory://", "put", "q"], "is in the memory of one process"),
        (["bench", "--dir", "nodir"], "does not exist"),
        (["demo", "--keep", "no/dir/demo.db"], "no/dir is not a directory"),
    ],
)
def test_bad_input_is_2_and_makes_nothing(shell: Shell, arguments: list[str], reason: str) -> None:
    shell.put("known")
    before = shell("stats", "--json").json["total"]
    error = shell(*arguments, "--json", code=2).error
    assert reason in error["message"] + (error["next"] or "")
    ran = shell(*arguments, code=2)
    assert ran.out == ""
    assert ran.err.startswith("Error: ")
    assert shell("stats", "--json").json["total"] == before


def test_groups_without_a_command_show_their_help(shell: Shell) -> None:
    for arguments in ([], ["jobs"], ["queues"]):
        ran = shell(*arguments, code=2)
        assert ran.err.startswith("Usage: towpath")


def test_help_is_not_an_error(shell: Shell) -> None:
    ran = shell.run("--help")
    assert ran.err == ""
    for code in ("0", "1", "2", "3", "4", "130"):
        assert f"\n  {code} " in ran.out
    assert "Exit code 3" in shell("get", "--help").out


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats"],
        ["jobs", "list"],
        ["jobs", "show", "x"],
        ["ack", "x:1"],
        ["dead", "list"],
        ["queues", "list"],
        ["backup", "b.db"],
        ["check"],
        ["schedules", "list"],
        ["queues", "pause", "q"],
        ["groups", "show", "g"],
        ["parts", "list", "q"],
    ],
)
def test_a_ledger_that_is_not_there_is_not_made(shell: Shell, arguments: list[str]) -> None:
    error = shell(*arguments, "--url", "sqlite:///typo.db", "--json", code=4).error
    assert (error["type"], error["code"]) == ("Unavailable", 4)
    assert "typo.db" in error["message"]
    assert list(shell.folder.iterdir()) == []


@pytest.mark.parametrize("arguments", [["put", "q", "x"], ["stats"], ["get", "q"]])
def test_no_directory_no_database_no_file(shell: Shell, arguments: list[str]) -> None:
    (shell.folder / "text.db").write_text(
        "This is not a database, though it is long enough to look at. " * 50
    )
    for url, why in (
        ("no/such.db", "its directory does not exist"),
        ("text.db", "not an SQLite database"),
        ("", "is a directory"),
    ):
        path = shell.folder / url
        error = shell(*arguments, "--url", f"sqlite:///{path}", "--json", code=4).error
        assert error["type"] == "NotALedger"
        assert why in error["message"]
        assert error["next"]


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users can reach; pytest's own are closed to them."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    directory.chmod(0o777)
    shutil.rmtree(directory)


AS_ANOTHER_USER = """
# Import everything before the user id changes: another user may not be able to read Python's files.
import os, sys, importlib.util, locale, apsw, towpath.settings, towpath.ledger.sqlite
import towpath.cli, towpath.cli.base, towpath.cli.messages, towpath.cli.stats, towpath.cli.targets
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(towpath.cli.main(sys.argv[1:]))
"""


def test_a_read_only_ledger(open_directory: Path) -> None:
    shell = Shell(open_directory)
    shell.run("put", "orders", "x")
    for each in open_directory.iterdir():
        each.chmod(0o444)
    open_directory.chmod(0o555)
    ran = python(open_directory, AS_ANOTHER_USER, "put", "orders", "x")
    assert ran.code == 4
    assert "check the permissions" in ran.err
    assert "directory must be writable" in ran.err
    assert "Traceback" not in ran.err


def _errors() -> list[type[errors.TowpathError]]:
    found = [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.TowpathError)
    ]
    return [each for each in found if each.__module__ == errors.__name__]


class _Anything(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return key


@pytest.mark.parametrize("kind", _errors())
def test_every_error_of_the_library_has_a_code(kind: type[errors.TowpathError]) -> None:
    if issubclass(kind, errors.InvalidPlan):
        error: errors.TowpathError = kind(plan="p", reasons=["a cycle"])
    elif issubclass(kind, errors.InvalidInput):
        error = kind(field="field", value="value", expected="another")
    else:
        error = kind.__new__(kind)
        error.details = {}
        Exception.__init__(error, kind.sentence.format_map(_Anything()))
    failure = as_failure(error)
    if issubclass(kind, errors.LedgerError | errors.ServerAway | errors.ServerBusy):
        assert failure.code == UNAVAILABLE
        assert failure.step
    elif issubclass(kind, errors.UnknownJob | errors.UnknownGroup | errors.UnknownPlan):
        assert failure.code == NOT_FOUND
    elif issubclass(kind, errors.InvalidInput):
        assert failure.code == BAD_INPUT
    elif issubclass(kind, errors.WorkerStuck):
        assert failure.code == STUCK
    else:
        assert failure.code == REFUSED
    assert failure.kind == kind.__name__


def test_other_endings() -> None:
    assert as_failure(KeyboardInterrupt()).code == as_failure(click.Abort()).code == INTERRUPTED
    assert (
        as_failure(OSError(errno.ENOSPC, "No space left on device", "x.db")).message
        == "x.db: No space left on device"
    )
    assert as_failure(SystemExit(7)).code == 7
    defect = as_failure(ZeroDivisionError("of ours"))
    assert (defect.code, "report it" in defect.step) == (REFUSED, True)


def test_debug_shows_the_traceback(shell: Shell) -> None:
    command = [*EXECUTABLE, "jobs", "show", "x"]
    ran = python(
        shell.folder,
        "import os, sys; os.environ['TOWPATH_DEBUG'] = '1'; os.execv(sys.argv[1], sys.argv[1:])",
        *command,
    )
    assert ran.code == 4
    assert "Traceback" in ran.err
    assert ran.err.rstrip().endswith("creates a ledger.")


def test_an_interrupt_is_130(shell: Shell) -> None:
    shell.put()
    watching = shell.start("stats", "--watch", "--json", "--interval", "60")
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=30)
    assert watching.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_leaves_is_no_error(shell: Shell) -> None:
    shell.put()
    watching = shell.start("stats", "--watch", "--json", "--interval", "0.1")
    assert watching.stdout is not None
    assert watching.stderr is not None
    watching.stdout.readline()
    watching.stdout.close()
    assert watching.wait(30) == 0
    assert watching.stderr.read() == ""
    watching.stderr.close()


def test_what_the_encoding_cannot_spell_is_escaped(shell: Shell) -> None:
    shell.run("put", "orders", "-", input="☃".encode())
    shown = shell.run("get", "orders", env={"PYTHONIOENCODING": "latin-1"})
    assert "\\u2603" in shown.out


def test_arguments_that_are_not_utf_8_are_bytes(shell: Shell) -> None:
    program = (
        "import os, sys; os.execv(sys.argv[1].encode(), [sys.argv[1].encode(), b'put', b'raw', "
        "b'\\xff\\xfe'])"
    )
    assert python(shell.folder, program, *EXECUTABLE).code == 0
    assert shell("get", "raw", "--json").json["payload_encoding"] == "base64"


def test_a_pipe_has_no_colours(shell: Shell) -> None:
    shell.put()
    for arguments in (["stats"], ["jobs", "list"], ["queues", "list"], ["doctor"]):
        assert "\x1b" not in shell.run(*arguments, env={"TERM": "xterm-256color", "NO_COLOR": ""}).out


def test_shared_options_go_anywhere(shell: Shell) -> None:
    url = "sqlite:///other.db"
    shell("--url", url, "put", "q", "x")
    for arguments in (
        ["--json", "--url", url, "queues", "list"],
        ["queues", "--json", "--url", url, "list"],
        ["queues", "list", "--url", url, "--json"],
    ):
        assert shell(*arguments).json["queues"][0]["queue"] == "q"


def test_the_url_comes_from_the_settings(shell: Shell) -> None:
    shell.run("put", "q", "x", env={"TOWPATH_URL": "sqlite:///by-variable.db"})
    assert (shell.folder / "by-variable.db").exists()
    (shell.folder / "towpath.toml").write_text('url = "sqlite:///by-file.db"\n')
    below = shell.folder / "below"
    below.mkdir()
    os.chdir(below)
    shell("put", "q", "x")
    assert (shell.folder / "by-file.db").exists()
    (shell.folder / "towpath.toml").write_text("url = 5\n")
    assert "towpath.toml" in shell("stats", code=2).err


def test_python_m(shell: Shell) -> None:
    program = "import runpy, sys; sys.argv[0] = 'towpath'; runpy.run_module('towpath', run_name='__main__')"
    assert python(shell.folder, program, "--version").out.startswith("towpath ")


def test_the_version_is_quick(shell: Shell) -> None:
    """Nothing that only other commands need is imported."""
    program = (
        "import sys; from towpath.cli import main; main(['--version']); print([n for n in "
        "('click', 'rich', 'apsw') if n in sys.modules])"
    )
    assert python(shell.folder, program).out.splitlines()[1] == "[]"
    assert json.loads(shell("--json", "--version").out) == {"towpath": shell("--version").out.split()[1]}


def test_machines_do_not_wait_for_rich(shell: Shell) -> None:
    shell.put()
    program = (
        "import sys; from towpath.cli import main; main(['stats', '--json']); print('rich' in sys.modules)"
    )
    assert python(shell.folder, program).out.splitlines()[1] == "False"
