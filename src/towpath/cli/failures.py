"""How a command ends when it does not end well: the exit code, the sentence, and the next step."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec

from towpath import errors
from towpath.escapes import escape, escape_json

OK, REFUSED, BAD_INPUT, NOTHING, UNAVAILABLE, STUCK, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130

EXIT_CODES: Mapping[int, str] = {
    OK: "it is done",
    REFUSED: "refused or failed; the reason is on stderr",
    BAD_INPUT: "wrong usage or bad input; nothing was done",
    NOTHING: "nothing there: no message to get, an unknown id, queue or group",
    UNAVAILABLE: "the ledger is unavailable: not there, busy, read-only, full, damaged or not a ledger",
    STUCK: "the worker ended because all of its slots were held by handlers that do not stop; start it again",
    INTERRUPTED: "interrupted with Ctrl-C, or a question was answered with no",
}

NEXT: Mapping[type[errors.TowpathError], str] = {
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

SERVER_NEXT: Mapping[type[errors.TowpathError], str] = {
    errors.NotALedger: "Check the URL: postgresql://user:password@host:5432/database. docs/deploy-postgres.md says which rights it needs.",
    errors.DiskFull: "Free space on the server and try again. `towpath jobs purge` and `towpath ledger vacuum` make room.",
    errors.ReadOnly: "This is a standby, or the database is read-only: name the primary server.",
    errors.Damaged: "Stop every process, keep a dump, restore a backup.",
}
"""Of a ledger on a server."""


class Failure(Exception):
    """A command cannot go on. `step` is what the user can do next."""

    def __init__(self, message: str, code: int = REFUSED, step: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.step = message, code, step
        self.kind = "Failure"
        self.details = dict(details or {})


def nothing(message: str, step: str = "") -> Failure:
    failure = Failure(message, NOTHING, step)
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


def code_of(error: errors.TowpathError) -> int:
    if isinstance(error, errors.UnknownJob | errors.UnknownGroup):
        return NOTHING
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
            return _of_towpath(error)
        case click.exceptions.NoArgsIsHelpError():
            return _named("Usage", bad_input(error.format_message()))
        case click.UsageError():
            return _named("Usage", bad_input(error.format_message(), _usage_step(error)))
        case click.Abort() | KeyboardInterrupt():
            return _named("Interrupted", Failure("interrupted", INTERRUPTED))
        case click.ClickException():
            return bad_input(error.format_message())
        case click.exceptions.Exit():
            return Failure("", error.exit_code)
        case SystemExit():
            code = error.code if isinstance(error.code, int) else REFUSED
            return Failure("" if code == OK else f"the program ended itself: {error.code}", code)
        case OSError():
            return _named(type(error).__name__, Failure(f"{error.filename or 'the system'}: {error.strerror or error}"))
    step = "This is a defect of Towpath: please report it. TOWPATH_DEBUG=1 shows where it happened."
    return _named(type(error).__name__, Failure(f"{type(error).__name__}: {error}", REFUSED, step))


def _of_towpath(error: errors.TowpathError) -> Failure:
    step = next((NEXT[kind] for kind in type(error).__mro__ if kind in NEXT), "")
    if str(error.details.get("path", "")).startswith("postgresql:"):
        step = SERVER_NEXT.get(type(error), step)
    failure = Failure(str(error), code_of(error), step.format_map(_Named(error.details)), _plain(error.details))
    return _named(type(error).__name__, failure)


class _Named(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return f"<{key}>"


def _plain(details: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, int | float | None) else str(value) for name, value in details.items()}


def _named(kind: str, failure: Failure) -> Failure:
    failure.kind = kind
    return failure


def _usage_step(error: click.UsageError) -> str:
    return f"Try: {error.ctx.command_path} --help" if error.ctx is not None else "Try: towpath --help"


def report(failure: Failure, as_json: bool) -> int:
    """Say it on stderr; the exit code."""
    if failure.message and as_json:
        content = {"type": failure.kind, "message": failure.message, "code": failure.code, "next": failure.step or None}
        content["details"] = failure.details
        say([escape_json(msgspec.json.encode({"error": content}).decode())])
    elif failure.message:
        first, *more = failure.message.split("\n")
        is_usage = first.startswith("Usage:")
        say([first if is_usage else f"Error: {first}", *(line if is_usage else f"  {line}" for line in more)])
        say([*filter(None, [failure.step])])
    return failure.code


def say(lines: Sequence[str]) -> None:
    """Lines to stderr; if nobody reads them there, that is no error."""
    try:
        # In one piece, so that two processes do not write into each other's lines.
        sys.stderr.write("".join(f"{escape(line)}\n" for line in lines))
        sys.stderr.flush()
    except OSError:
        pass
