"""`dead`: the jobs that failed for good, to be read, brought back or deleted."""

from __future__ import annotations

from typing import Any

import click

from towpath import State
from towpath.cli.base import Branch, Session, pass_session
from towpath.cli.bulk import Where, selectors
from towpath.cli.failures import bad_input
from towpath.cli.jobs import Filter, listed, purged, revived
from towpath.cli.values import Moment

FAILED = (State.FAILED,)


@click.group("dead", cls=Branch)
def dead() -> None:
    """Dead letters: jobs that failed for good. They stay until somebody decides."""


@dead.command("list")
@click.option("--queue", help="Of this queue, or pattern with *.")
@click.option("--kind", help="Of this kind (task name).")
@click.option("--since", type=Moment(past=True), help="Created since a time, or within a span such as 2h.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="At most so many.")
@click.option("--page", help="Go on from here: the `next` of an earlier answer.")
@pass_session
def list_dead(session: Session, /, **options: Any) -> int:
    """Failed jobs with their errors, newest first."""
    rest: dict[str, Any] = dict.fromkeys(("part", "group", "key", "owner", "correlation_id", "header", "until"))
    return listed(session, Filter(**options, **rest, state=("failed",), oldest_first=False))


@dead.command("retry")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors(states=False)
@pass_session
def retry(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Bring failed jobs back.

    By id, all of a queue or kind, or --all. Exit code 1 if any is refused.
    """
    return revived(session, _failed(session, ids, options), yes, FAILED)


@dead.command("purge")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@selectors(states=False)
@pass_session
def purge(session: Session, /, ids: tuple[str, ...], yes: bool, **options: Any) -> int:
    """Delete failed jobs for good.

    By id, all of a queue or kind, or --all.
    """
    return purged(session, _failed(session, ids, options), yes, FAILED)


def _failed(session: Session, ids: tuple[str, ...], options: dict[str, Any]) -> Where:
    """An id that is not a dead letter is a mistake here, though `jobs` would take it."""
    if ids:
        with session.ledger() as ledger:
            for id in ids:
                job = ledger.get(id)
                if job is not None and job.state is not State.FAILED:
                    raise bad_input(f"Job {id} is {job.state}, not a dead letter.", f"See `towpath jobs show {id}`.")
    return Where(ids=ids, **options)
