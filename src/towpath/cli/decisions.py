"""`jobs mark-done` and `jobs skip`: a person makes a job done."""

from __future__ import annotations

import getpass

import click

from towpath.cli.base import OK, F, Session, bad_input, combine, command, pass_session
from towpath.cli.messages import apply_one
from towpath.cli.output import print_result
from towpath.cli.targets import find_job
from towpath.cli.values import Json
from towpath.commands import Resolution, Resolve


def _decision(function: F) -> F:
    return combine(
        click.argument("id"),
        click.option("--reason", required=True, help="Reason, kept with the job."),
        click.option("--by", help="Name of the person, kept with the job. Default: the login name."),
    )(function)


@command("mark-done")
@_decision
@click.option("--result", type=Json(), help="Result of the job, as JSON, or @FILE.")
@pass_session
def mark_done(session: Session, /, id: str, reason: str, by: str | None, result: bytes | None) -> int:
    """Make a job done if its effect exists.

    A waiting, failed or canceled job becomes done, without an attempt. Jobs that wait for it can start, and
    jobs that ended only because of it are retried. Exit code 1 if the job runs or is done."""
    return _resolve(session, id, Resolution.MARKED, reason, by, result)


@command("skip")
@_decision
@pass_session
def skip(session: Session, /, id: str, reason: str, by: str | None) -> int:
    """Make a job done that is not needed.

    As `mark-done`, with another reason."""
    return _resolve(session, id, Resolution.SKIPPED, reason, by, None)


def _resolve(
    session: Session, id: str, outcome: Resolution, reason: str, by: str | None, result: bytes | None
) -> int:
    by = _login_name() if by is None else by
    with session.ledger() as ledger:
        id = find_job(ledger, id).id
        apply_one(ledger, Resolve(id, outcome, reason, by, result))
    data = {"id": id, "state": "done", "reason": outcome, "why": reason, "by": by}
    print_result(session.json, data, f"{id} is done ({outcome} by {by}: {reason})")
    return OK


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        # The user of the process has no name: a container.
        raise bad_input("The login name is unknown.", "Give --by NAME.") from None
