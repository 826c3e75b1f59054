"""What all commands share: the options `--url` and `--json`, exit codes, errors with a next step, and the
list of commands. A command's module is imported when the command runs, so that `towpath --help` stays
fast."""

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
    from click.shell_completion import CompletionItem

    from towpath import Ledger

F = TypeVar("F", bound=Callable[..., Any])


class Session:
    """The values of `--url` and `--json`, given before or after the command's name."""

    def __init__(self) -> None:
        self.url: str | None = None
        self.json = False

    @contextmanager
    def ledger(self, make: bool = False) -> Iterator[Ledger]:
        """Open the ledger of `--url` or of the settings. Unless `make`, a missing ledger is an error, so that
        a mistyped URL creates no file."""
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
    url = (
        "Ledger URL, such as sqlite:///work.db. Default: TOWPATH_URL, towpath.toml, pyproject.toml, then "
        "sqlite:///towpath.db."
    )
    return [
        click.Option(["--url"], metavar="URL", help=url, callback=_store_url, expose_value=False),
        click.Option(
            ["--json"], is_flag=True, help="Print JSON on stdout.", callback=_store_json, expose_value=False
        ),
    ]


COMPLETE_VARIABLE = "_TOWPATH_COMPLETE"
"""Environment variable: set by the completion script of the shell."""
COMPLETED = ("queue", "kind", "group", "plan", "id", "ids", "after")
"""Parameters that the shell completes from the ledger."""


class CompletedText(click.types.StringParamType):
    """Text that the shell completes."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        from towpath.cli.completion import proposed

        return proposed(ctx, param.name or "", incomplete)


class CliCommand(click.Command):
    """A command with the shared options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())
        for each in self.params:
            # `--id` is the id of a new job.
            if each.name in COMPLETED and each.type is click.STRING and "--id" not in each.opts:
                each.type = CompletedText()


class CliGroup(click.Group):
    """A group of commands, with the shared options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())

    command_class = CliCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command '{name}'.{self._similar(ctx, name)}", ctx)
        return super().resolve_command(ctx, args)

    def _similar(self, ctx: click.Context, name: str) -> str:
        """A question with the commands that the user may have meant: a similar name, or the same name in a
        group."""
        from difflib import get_close_matches

        known = self.list_commands(ctx)
        found = get_close_matches(name.lower(), known, n=3, cutoff=0.6)
        groups = [(each, self.get_command(ctx, each)) for each in ([] if found else known)]
        found += [
            f"{each} {name}"
            for each, group in groups
            if isinstance(group, click.Group) and name in group.commands
        ]
        return f" Did you mean {' or '.join(found[:3])}?" if found else ""


class LazyGroup(CliGroup):
    """A group that imports a command's module when the command runs, not when commands are listed.

    `lazy` maps a name to ("module:attribute" in this package, its line in the list)."""

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
    """Combine several options into one decorator, in the order given."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def confirm(question: str, yes: bool) -> None:
    """Ask before a bulk change. Without a terminal `--yes` is required."""
    import sys

    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"{question} Confirm with --yes.", click.get_current_context())
    if not click.confirm(escape(question), err=True):
        raise click.Abort


def join_names(values: Sequence[str], most: int = 8) -> str:
    """Join names for a sentence; the first `most`, then a count of the others."""
    shown = ", ".join(values[:most]) or "none"
    return shown + (f" and {len(values) - most} more" if len(values) > most else "")


OK, REFUSED, BAD_INPUT, NOT_FOUND, UNAVAILABLE, STUCK, PARKED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 7, 130
LEFT = 4

EXIT_CODES: Mapping[int, str] = {
    OK: "success",
    REFUSED: "refused or failed; the reason is on stderr",
    BAD_INPUT: "wrong usage or invalid input; nothing was changed",
    NOT_FOUND: "not found: no message available, or an unknown id, queue or group",
    UNAVAILABLE: (
        "the ledger is unavailable: missing, busy, read-only, full, damaged or not a ledger; "
        "or the HTTP server is; or a `plan` command was left before the plan ended"
    ),
    STUCK: "the worker ended because handlers that do not stop held all of its slots; start it again",
    PARKED: "the plan is parked, or its rollback failed: a person has to decide",
    INTERRUPTED: "interrupted by Ctrl-C, or a confirmation was declined",
}

NEXT_STEPS: Mapping[type[errors.TowpathError], str] = {
    errors.LostClaim: (
        "The lease expired, or another consumer settled the message. Get the message again; "
        "`towpath jobs show {id}` shows its state."
    ),
    errors.UnknownJob: (
        "`towpath jobs list` lists the jobs. Finished jobs are deleted after their retention. The beginning "
        "of an id needs at least 6 characters."
    ),
    errors.UnknownGroup: "Check the id. The program that fills a group creates it.",
    errors.UnknownDependency: "Append the job that it waits for first.",
    errors.QueueFull: "Try again later, or raise the limit: `towpath queues set {queue} --capacity N`.",
    errors.PartFull: "Try again later, or raise the limit: `towpath parts set {queue} {part} --capacity N`.",
    errors.TooManyAppends: (
        "Try again later, or raise the limit: `towpath parts set {queue} {part} --append-rate RATE`."
    ),
    errors.NotRevivable: "Append a new job instead.",
    errors.NotResolvable: "`towpath jobs show {id}` shows its state.",
    errors.LedgerBusy: (
        "Another process holds a long transaction on this ledger, often your own program. End it, then try "
        "again."
    ),
    errors.DiskFull: "Free disk space, then try again. `towpath jobs purge` frees space inside the file.",
    errors.LedgerGone: (
        "Stop every process, put the right file back (from a backup if needed), then start the processes "
        "again."
    ),
    errors.OrphanedLog: (
        "Put the database file back: it was moved, or a disk is not mounted. If the commits in the log are "
        "not needed, move the log away."
    ),
    errors.NotALedger: (
        "Check the URL: sqlite:///file.db is relative, sqlite:////absolute/file.db is absolute. `towpath "
        "doctor` shows the URL in use."
    ),
    errors.NotInstalled: "Install it, then try again.",
    errors.LedgerAway: (
        "Check that the server is running and that the address is right. `towpath doctor` shows the URL in "
        "use."
    ),
    errors.NewerSchema: "Upgrade Towpath: pip install --upgrade towpath",
    errors.ReadOnly: (
        "SQLite also writes next to the file, so the directory must be writable. Run as the owner, or chown "
        "both."
    ),
    errors.NetworkFileSystem: "Move the file to a local disk.",
    errors.Damaged: "Stop every process, keep a copy of the file, restore a backup.",
    errors.WorkerStuck: (
        "Start the worker again. Give these tasks timeouts inside the handler, `current().check()`, or "
        "process=True."
    ),
    errors.NotAllowed: "Give a valid token (--token-file, TOWPATH_TOKEN) or --bundle, or ask for the right.",
    errors.LostLease: "Dequeue the message again. For long work extend it, or use a longer --visibility.",
    errors.LockBusy: "Try again later, or with a longer --block.",
    errors.ServerBusy: "Try again later.",
    errors.ServerAway: "Check that the server is running (`towpath serve`) and that --server is right.",
    errors.BadResponse: "Check --server: the answer may be that of another program or of a proxy.",
    errors.UnknownPlan: "`towpath plan list` lists the plans.",
    errors.PlanRefused: "`towpath plan status {id}` shows the state of the plan.",
    errors.InvalidInput: "Nothing was changed. Add --help to the command to see its arguments.",
    errors.LedgerError: "`towpath doctor` checks the ledger and its environment.",
}

SERVER_NEXT_STEPS: Mapping[type[errors.TowpathError], str] = {
    errors.NotALedger: (
        "Check the URL: postgresql://user:password@host:5432/database. docs/deploy-postgres.md lists the "
        "rights that the role needs."
    ),
    errors.DiskFull: (
        "Free disk space on the server, then try again. `towpath jobs purge` and `towpath ledger vacuum` "
        "free space inside the database."
    ),
    errors.ReadOnly: (
        "The server is a standby, or the database is read-only. Use the URL of the primary server."
    ),
    errors.Damaged: "Stop every process, keep a dump, restore a backup.",
}
"""Replacements for ledgers on PostgreSQL."""

HTTP_NEXT_STEPS: Mapping[type[errors.TowpathError], str] = {
    errors.NotALedger: (
        "Check the URL: http://host:port, https://host:port or unix:///path/of/socket. docs/remote.md "
        "describes tokens and certificates."
    ),
    errors.LedgerAway: "Check that `towpath serve` is running there and that the address is right.",
}
"""Replacements for ledgers of an HTTP server."""


class Failure(Exception):
    """A command cannot continue. `step` is the next step for the user."""

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
    if isinstance(error, errors.UnknownJob | errors.UnknownGroup | errors.UnknownPlan):
        return NOT_FOUND
    if isinstance(error, errors.InvalidInput):
        return BAD_INPUT
    if isinstance(error, errors.WorkerStuck):
        return STUCK
    away = errors.LedgerError | errors.ServerAway | errors.ServerBusy
    return UNAVAILABLE if isinstance(error, away) else REFUSED


def as_failure(error: BaseException) -> Failure:
    """The failure to report for any exception that ended the command."""
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
            return Failure("" if code == OK else f"the program called sys.exit: {error.code}", code)
        case OSError():
            return _with_kind(
                type(error).__name__, Failure(f"{error.filename or 'the system'}: {error.strerror or error}")
            )
    step = "This is a defect of Towpath: please report it. TOWPATH_DEBUG=1 prints the traceback."
    return _with_kind(type(error).__name__, Failure(f"{type(error).__name__}: {error}", REFUSED, step))


def _towpath_failure(error: errors.TowpathError) -> Failure:
    step = next((NEXT_STEPS[kind] for kind in type(error).__mro__ if kind in NEXT_STEPS), "")
    place = str(error.details.get("path", ""))
    if place.startswith("postgresql:"):
        step = SERVER_NEXT_STEPS.get(type(error), step)
    elif place.startswith(("http:", "https:", "unix:")):
        step = HTTP_NEXT_STEPS.get(type(error), step)
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
    """Print the failure on stderr and return its exit code."""
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
    """Print lines on stderr. A closed stderr is not an error."""
    try:
        # One write, so that lines of several processes do not mix.
        sys.stderr.write("".join(f"{escape(line)}\n" for line in lines))
        sys.stderr.flush()
    except OSError:
        pass


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from towpath.cli import version
        from towpath.cli.output import print_result

        number = version()
        print_result(ctx.ensure_object(Session).json, {"towpath": number}, f"towpath {number}")
        ctx.exit(0)


COMMANDS = {
    "demo": ("demo:demo", "Run a demonstration on a new ledger."),
    "worker": ("worker:worker", "Run the jobs of an app's tasks."),
    "dev": ("worker:dev", "Run a worker that restarts when your code changes."),
    "serve": ("serve:serve", "Serve queues and locks over HTTP."),
    "auth": ("auth:auth", "Make tokens and certificates for clients of the HTTP server."),
    "client": ("client:client", "Call an HTTP server: queues, locks, documents."),
    "enqueue": ("messages:enqueue", "Enqueue a job for the task KIND."),
    "put": ("messages:put", "Put a message into a queue."),
    "get": ("messages:get", "Claim messages from QUEUE (or a pattern with *)."),
    "ack": ("messages:ack", "Mark a message as done."),
    "nack": ("messages:nack", "Return a message to its queue."),
    "extend": ("messages:extend", "Extend the lease of a message to SECONDS from now."),
    "stats": ("stats:stats", "Show the number of jobs by queue and state."),
    "jobs": ("jobs:jobs", "List, show, explain, retry, cancel and delete jobs."),
    "history": ("history:history", "List finished jobs, newest first."),
    "dead": ("jobs:dead", "List, retry and delete dead letters: jobs that failed for good."),
    "queues": ("queues:queues", "List queues, pause them, set their limits."),
    "parts": ("queues:parts", "List parts of a queue, pause them, set their limits."),
    "breakers": ("fleet:breakers", "List, open, close and reset circuit breakers."),
    "workers": ("fleet:workers", "List, pause, resume and drain workers."),
    "lanes": ("fleet:lanes", "List, pause and resume lanes of workers."),
    "groups": ("groups:groups", "List, show, pause, abort and retry groups."),
    "plan": ("plans:plan", "Run plans: steps on many nodes, with dependencies and rollback."),
    "schedules": ("schedules:schedules", "List, change and trigger schedules of repeated jobs."),
    "backup": ("maintenance:backup", "Copy the ledger to a new file while workers run."),
    "ledger": (
        "maintenance:ledger",
        "Migrate, check, vacuum and copy the ledger.",
    ),
    "check": ("maintenance:check", "Verify the whole ledger."),
    "doctor": ("doctor:doctor", "Check settings and ledger, and report problems with advice."),
    "bench": ("bench:bench", "Measure the speed of a ledger on this disk."),
    "completion": ("completion:completion", "Print the completion script of a shell."),
}
"""Name -> (module:attribute, first line of the help), in the order of `towpath --help`, which imports none of
them."""


@click.group(cls=LazyGroup, lazy=COMMANDS)
@click.option("--version", is_flag=True, expose_value=False, callback=_version, help="Print the version.")
@click.pass_context
def root(ctx: click.Context) -> None:
    """Durable work for Python, from the command line.

    Start with `towpath demo`. `towpath COMMAND --help` explains a command. Every command takes --url and
    --json, before or after its name. A span is a number of seconds, or a number with a unit: 30, 1.5s, 5m,
    2h, 7d."""
    ctx.ensure_object(Session)
