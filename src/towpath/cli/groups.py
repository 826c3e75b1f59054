"""`groups`: list, show, pause, abort and retry groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from towpath import State, commands
from towpath.cli.base import OK, REFUSED, CliGroup, Session, pass_session, print_stderr
from towpath.cli.jobs import describe_revived, revive_matching
from towpath.cli.messages import apply_one
from towpath.cli.output import format_pairs, format_span, format_time, print_result, table
from towpath.cli.targets import find_group
from towpath.cli.values import now
from towpath.commands import GroupState, GroupView


@click.group("groups", cls=CliGroup)
def groups() -> None:
    """List, show, pause, abort and retry groups."""


_GROUP_STATES = ("open", "sealed", "aborting", "closed")
_OUTCOMES = ("done", "failed", "canceled")


@groups.command("list")
@click.option("--state", type=click.Choice(_GROUP_STATES), multiple=True, help="State. Repeatable.")
@click.option("--outcome", type=click.Choice(_OUTCOMES), multiple=True, help="How it ended. Repeatable.")
@click.option("--prefix", default="", help="Beginning of the id.")
@click.option("--ascending", is_flag=True, help="In the order of the ids. Default: the last ids first.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Maximum number of groups."
)
@click.option("--page", help="Continue from here: `next` of an earlier result.")
@pass_session
def list_groups(session: Session, /, ascending: bool, **options: Any) -> int:
    """List groups. Ids that Towpath creates grow with time, so the newest of them come first."""
    options |= {"states": options.pop("state"), "outcomes": options.pop("outcome")}
    with session.ledger() as ledger:
        page = ledger.groups(commands.GroupQuery(**options, descending=not ascending))
    data = {"groups": [_group_data(view) for view in page.groups], "next": page.next}
    print_result(session.json, data, lambda: _group_table(page.groups))
    if page.next is not None and not session.json:
        print_stderr([f"There are more: --page {page.next}"])
    return OK


def _group_table(views: Sequence[GroupView]) -> object:
    if not views:
        return "No group matches."
    at = now()
    rows = [
        (
            view.id,
            view.outcome or ("paused" if view.paused else view.state),
            f"{view.total - view.unfinished}/{view.total}",
            view.failed,
            view.canceled,
            format_span(at - view.created_at),
        )
        for view in views
    ]
    return table(("id", "state", "ended", "failed", "canceled", "age"), rows)


def _group_data(view: GroupView) -> dict[str, Any]:
    data = {name: getattr(view, name) for name in view.__struct_fields__}
    return data | {"created_at": format_time(view.created_at), "closed_at": format_time(view.closed_at)}


@groups.command("abort")
@click.argument("id")
@click.option("--stop", is_flag=True, help="Let running jobs end; cancel only the waiting jobs.")
@pass_session
def abort_group(session: Session, /, id: str, stop: bool) -> int:
    """Cancel all jobs of a group. Running jobs are asked to stop.

    With --stop running jobs are not interrupted, and none of them is retried."""
    states = (GroupState.ABORTING, GroupState.CLOSED)
    became = "is stopped" if stop else "is aborted"
    return _set_group_state(session, id, lambda group: commands.Abort(group, stop), became, states)


@groups.command("retry")
@click.argument("id")
@pass_session
def retry_group(session: Session, /, id: str) -> int:
    """Retry the failed and canceled jobs of a group. The group is open again until they have ended, and its
    callbacks follow the new outcome."""
    with session.ledger() as ledger:
        id = find_group(ledger, id).id
        states = (State.FAILED, State.CANCELED)
        data, code = revive_matching(ledger, commands.Selector(group=id, states=states))
    print_result(session.json, {"id": id, **data}, lambda: "\n".join(describe_revived(data)))
    return code


@groups.command("pause")
@click.argument("id")
@click.option("--why", help="Reason, shown by `explain`.")
@pass_session
def pause_group(session: Session, /, id: str, why: str | None) -> int:
    """Start no job of this group until `resume`. Running jobs continue."""
    states = (GroupState.OPEN,)
    return _set_group_state(session, id, lambda group: commands.Unseal(group, why), "is paused", states)


@groups.command("resume")
@click.argument("id")
@pass_session
def resume_group(session: Session, /, id: str) -> int:
    """Resume a paused group."""
    states = (GroupState.SEALED, GroupState.CLOSED)
    return _set_group_state(session, id, commands.Seal, "is resumed", states)


def _set_group_state(
    session: Session,
    id: str,
    command: Callable[[str], commands.Unseal | commands.Seal | commands.Abort],
    became: str,
    states: tuple[GroupState, ...],
) -> int:
    with session.ledger() as ledger:
        id = find_group(ledger, id).id
        apply_one(ledger, command(id))
        view = ledger.group(id)
    assert view is not None
    well = view.state in states
    print_result(
        session.json,
        {"id": view.id, "state": view.state},
        f"group {view.id} {became if well else f'stays {view.state}'}",
    )
    return OK if well else REFUSED


@groups.command("show")
@click.argument("id")
@pass_session
def show_group(session: Session, /, id: str) -> int:
    """Show the state of a group and the counts of its jobs. `jobs list --group ID` lists the jobs."""
    with session.ledger() as ledger:
        view = find_group(ledger, id)
    data = _group_data(view)
    print_result(
        session.json, data, format_pairs({name.replace("_", " "): value for name, value in data.items()})
    )
    return OK
