"""What all commands share: `--url` and `--json` in every place, the session they fill, groups that load their
parts late."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from towpath import errors
from towpath.escapes import escape, escape_json

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
        """The ledger of `--url` or the settings. Unless `make`, one that is not there is an error and not a
        new file."""
        from towpath.cli.targets import open_target

        ledger = open_target(self.url, make)
        try:
            yield ledger
        finally:
            ledger.close()


def _store_url(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Session).url = value


def _store_json(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Session).json = True


def shared_options() -> list[click.Parameter]:
    url = "The ledger, such as sqlite:///work.db; else TOWPATH_URL, towpath.toml, pyproject.toml, sqlite:///towpath.db."
    return [
        click.Option(["--url"], metavar="URL", help=url, callback=_store_url, expose_value=False),
        click.Option(
            ["--json"], is_flag=True, help="JSON on stdout.", callback=_store_json, expose_value=False
        ),
    ]


class CliCommand(click.Command):
    """A command: takes the shared options, and says in its help how it may end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())


class CliGroup(click.Group):
    """A command with commands below it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())

    command_class = CliCommand


class LazyGroup(CliGroup):
    """A group whose commands are imported when they are asked for, and not to be listed. `lazy`: name ->
    ("module:attribute" in this package, its line in the list)."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command = getattr(import_module(f"towpath.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in self._lazy.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])


def command(name: str) -> Callable[[Callable[..., int]], CliCommand]:
    return click.command(name, cls=CliCommand)


pass_session = click.make_pass_decorator(Session, ensure=True)


def combine(*decorators: Callable[[F], F]) -> Callable[[F], F]:
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


def join_names(values: Sequence[str], most: int = 8) -> str:
    """Some names in a sentence."""
    shown = ", ".join(values[:most]) or "none"
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")


OK, REFUSED, BAD_INPUT, NOT_FOUND, UNAVAILABLE, STUCK, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EXIT_CODES: Mapping[int, str] = {
    OK: "it is done",
    REFUSED: "refused or failed; the reason is on stderr",
    BAD_INPUT: "wrong usage or bad input; nothing was done",
    NOT_FOUND: "nothing there: no message to get, an unknown id, queue or group",
    UNAVAILABLE: "the ledger is unavailable: not there, busy, read-only, full, damaged or not a ledger",
    STUCK: "the worker ended because all of its slots were held by handlers that do not stop; start it again",
    INTERRUPTED: "interrupted with Ctrl-C, or a question was answered with no",
}

NEXT_STEPS: Mapping[type[errors.TowpathError], str] = {
    errors.LostClaim: "The lease ran out or somebody else settled it. `towpath jobs show {id}` says who; get it again.",
    errors.UnknownJob: "`towpath jobs list` shows what is there; finished jobs are deleted after their retention.",
    errors.UnknownGroup: "Check the id; groups are opened by the program that fills them.",
    errors.UnknownDependency: "Append the job it waits for first.",
    errors.QueueFull: "Wait and try again, or raise it: `towpath queues set {queue} --capacity N`.",
    errors.PartFull: "Wait and try again, or raise it: `towpath parts set {queue} {part} --capacity N`.",
    errors.TooManyAppends: "Wait and try again, or raise it: `towpath parts set {queue} {part} --append-rate RATE`.",
    errors.NotRevivable: "Append a new job instead.",
    errors.LedgerBusy: "Find the long transaction (often a forgotten one of your own on this file), then try again.",
    errors.DiskFull: "Free space and try again. `towpath jobs purge` makes room inside the file.",
    errors.LedgerGone: "Stop every process, put the right file in its place (a backup, if need be), then start them again.",
    errors.OrphanedLog: "Find the database file (was it moved, or is a disk not mounted?) and put it back. If the commits in the log do not matter, move the log away.",
    errors.NotALedger: "Check the URL: sqlite:///file.db is relative, sqlite:////absolute/file.db absolute. `towpath doctor` shows it.",
    errors.NotInstalled: "Then try again.",
    errors.LedgerAway: "Is the server running, and is the address right? `towpath doctor` shows it.",
    errors.NewerSchema: "Upgrade: pip install --upgrade towpath.",
    errors.ReadOnly: "SQLite writes beside the file too, so the directory must be writable. Run as the owner, or chown both.",
    errors.NetworkFileSystem: "Move the file to a local disk.",
    errors.Damaged: "Stop every process, keep a copy of the file, restore a backup.",
    errors.WorkerStuck: "Start it again. Give these tasks timeouts inside the handler, `current().check()`, or process=True.",
    errors.InvalidInput: "Nothing was done. `--help` after the command says what it takes.",
    errors.LedgerError: "`towpath doctor` looks at the ledger and its surroundings.",
}

SERVER_NEXT_STEPS: Mapping[type[errors.TowpathError], str] = {
    errors.NotALedger: "Check the URL: postgresql://user:password@host:5432/database. docs/deploy-postgres.md says which rights it needs.",
    errors.DiskFull: "Free space on the server and try again. `towpath jobs purge` and `towpath ledger vacuum` make room.",
    errors.ReadOnly: "This is a standby, or the database is read-only: name the primary server.",
    errors.Damaged: "Stop every process, keep a dump, restore a backup.",
}
"""Of a ledger on a server."""


class Failure(Exception):
    """A command cannot go on. `step` is what the user can do next."""

    def __init__(
        self, message: str, code: int = REFUSED, step: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.step = message, code, step
        self.kind = "Failure"
        self.details = dict(details or {})


def not_found(message: str, step: str = "") -> Failure:
    failure = Failure(message, NOT_FOUND, step)
    failure.kind = "Nothing"
    return failure


def bad_input(message: str, step: str = "") -> Failure:
    failure = Failure(message, BAD_INPUT, step)
    failure.kind = "BadInput"
    return failure


def unavailable(message: str, step: str = "") -> Failure:
    failure = Failure(message, UNAVAILABLE, step)
    failure.kind = "Unavailable"
    return failure


def exit_code_of(error: errors.TowpathError) -> int:
    if isinstance(error, errors.UnknownJob | errors.UnknownGroup):
        return NOT_FOUND
    if isinstance(error, errors.InvalidInput):
        return BAD_INPUT
    if isinstance(error, errors.WorkerStuck):
        return STUCK
    return UNAVAILABLE if isinstance(error, errors.LedgerError) else REFUSED


def as_failure(error: BaseException) -> Failure:
    """Whatever ended the command, in our words."""
    match error:
        case Failure():
            return error
        case errors.TowpathError():
            return _towpath_failure(error)
        case click.exceptions.NoArgsIsHelpError():
            return _with_kind("Usage", bad_input(error.format_message()))
        case click.UsageError():
            return _with_kind("Usage", bad_input(error.format_message(), _usage_step(error)))
        case click.Abort() | KeyboardInterrupt():
            return _with_kind("Interrupted", Failure("interrupted", INTERRUPTED))
        case click.ClickException():
            return bad_input(error.format_message())
        case click.exceptions.Exit():
            return Failure("", error.exit_code)
        case SystemExit():
            code = error.code if isinstance(error.code, int) else REFUSED
            return Failure("" if code == OK else f"the program ended itself: {error.code}", code)
        case OSError():
            return _with_kind(
                type(error).__name__, Failure(f"{error.filename or 'the system'}: {error.strerror or error}")
            )
    step = "This is a defect of Towpath: please report it. TOWPATH_DEBUG=1 shows where it happened."
    return _with_kind(type(error).__name__, Failure(f"{type(error).__name__}: {error}", REFUSED, step))


def _towpath_failure(error: errors.TowpathError) -> Failure:
    step = next((NEXT_STEPS[kind] for kind in type(error).__mro__ if kind in NEXT_STEPS), "")
    if str(error.details.get("path", "")).startswith("postgresql:"):
        step = SERVER_NEXT_STEPS.get(type(error), step)
    failure = Failure(
        str(error),
        exit_code_of(error),
        step.format_map(_Placeholders(error.details)),
        _json_details(error.details),
    )
    return _with_kind(type(error).__name__, failure)


class _Placeholders(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return f"<{key}>"


def _json_details(details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int | float | None) else str(value)
        for name, value in details.items()
    }


def _with_kind(kind: str, failure: Failure) -> Failure:
    failure.kind = kind
    return failure


def _usage_step(error: click.UsageError) -> str:
    return f"Try: {error.ctx.command_path} --help" if error.ctx is not None else "Try: towpath --help"


def report(failure: Failure, as_json: bool) -> int:
    """Say it on stderr; the exit code."""
    if failure.message and as_json:
        content = {
            "type": failure.kind,
            "message": failure.message,
            "code": failure.code,
            "next": failure.step or None,
        }
        content["details"] = failure.details
        print_stderr([escape_json(msgspec.json.encode({"error": content}).decode())])
    elif failure.message:
        first, *more = failure.message.split("\n")
        is_usage = first.startswith("Usage:")
        print_stderr(
            [first if is_usage else f"Error: {first}", *(line if is_usage else f"  {line}" for line in more)]
        )
        print_stderr([*filter(None, [failure.step])])
    return failure.code


def print_stderr(lines: Sequence[str]) -> None:
    """Lines to stderr; if nobody reads them there, that is no error."""
    try:
        # In one piece, so that two processes do not write into each other's lines.
        sys.stderr.write("".join(f"{escape(line)}\n" for line in lines))
        sys.stderr.flush()
    except OSError:
        pass


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        from towpath.cli.output import print_result

        number = version("towpath")
        print_result(ctx.ensure_object(Session).json, {"towpath": number}, f"towpath {number}")
        ctx.exit(0)


COMMANDS = {
    "demo": ("demo:demo", "A demonstration with real work."),
    "worker": ("worker:worker", "Run the jobs of an app's tasks."),
    "dev": ("worker:dev", "A worker that restarts when your code changes."),
    "enqueue": ("messages:enqueue", "Enqueue a job for the task KIND."),
    "put": ("messages:put", "Put a message into a queue."),
    "get": ("messages:get", "Take messages from QUEUE (or a pattern with *)."),
    "ack": ("messages:ack", "The message is done."),
    "nack": ("messages:nack", "Give the message back."),
    "extend": ("messages:extend", "Keep the message for SECONDS from now."),
    "stats": ("stats:stats", "What every queue holds."),
    "jobs": ("jobs:jobs", "Look at jobs, and bring them back, stop or delete them."),
    "dead": ("jobs:dead", "Dead letters: jobs that failed for good."),
    "queues": ("queues:queues", "List queues, pause them, set their limits."),
    "parts": ("queues:parts", "Parts of a queue, each with limits of its own."),
    "breakers": ("fleet:breakers", "Circuit breakers: look at them, open and close them."),
    "workers": ("fleet:workers", "Workers on this ledger: list, pause, resume and end them."),
    "lanes": ("fleet:lanes", "Lanes of the workers: list, pause and resume them."),
    "groups": ("queues:groups", "Groups of jobs with one fate."),
    "schedules": ("schedules:schedules", "Schedules: jobs that come again."),
    "backup": ("maintenance:backup", "Copy the ledger to a new file while work goes on."),
    "ledger": (
        "maintenance:ledger",
        "The ledger as a whole: its schema, its room, its copy in another place.",
    ),
    "check": ("maintenance:check", "Recount the whole ledger."),
    "doctor": ("doctor:doctor", "What is wrong, and what to do about it."),
    "bench": ("bench:bench", "How fast a ledger is on this disk."),
}
"""The commands in the order of the list, which loads none of them: where each is, and the first line of its
help."""


@click.group(cls=LazyGroup, lazy=COMMANDS)
@click.option(
    "--version", is_flag=True, expose_value=False, callback=_version, help="The version, and nothing else."
)
@click.pass_context
def root(ctx: click.Context) -> None:
    """Durable work for Python, from the command line.

    `towpath demo` shows what it does. `towpath COMMAND --help` explains a command. --url and --json go with every command,
    before or after its name. Spans are seconds, or a number with a unit: 30, 1.5s, 5m, 2h, 7d.
    """
    ctx.ensure_object(Session)
