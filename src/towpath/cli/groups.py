"""`groups`: where a group is in its life, and pausing it."""

from __future__ import annotations

import click

from towpath import commands
from towpath.cli.base import Branch, Session, pass_session
from towpath.cli.failures import OK, REFUSED
from towpath.cli.output import moment, pairs, show
from towpath.cli.specs import tell
from towpath.commands import GroupState
from towpath.errors import UnknownGroup


@click.group("groups", cls=Branch)
def groups() -> None:
    """Groups of jobs with one fate."""


@groups.command("pause")
@click.argument("id")
@click.option("--why", help="The reason, for whoever asks why nothing runs.")
@pass_session
def pause_group(session: Session, /, id: str, why: str | None) -> int:
    """Start nothing of this group until `resume`. What runs goes on."""
    return _told(session, commands.Unseal(id, why), "is paused", (GroupState.OPEN,))


@groups.command("resume")
@click.argument("id")
@pass_session
def resume_group(session: Session, /, id: str) -> int:
    """Let a paused group go on."""
    return _told(session, commands.Seal(id), "goes on", (GroupState.SEALED, GroupState.CLOSED))


def _told(session: Session, command: commands.Unseal | commands.Seal, became: str, states: tuple[GroupState, ...]) -> int:
    with session.ledger() as ledger:
        tell(ledger, command)
        view = ledger.group(command.group)
    assert view is not None
    well = view.state in states
    show(session.json, {"id": view.id, "state": view.state}, f"group {view.id} {became if well else f'stays {view.state}'}")
    return OK if well else REFUSED


@groups.command("show")
@click.argument("id")
@pass_session
def show_group(session: Session, /, id: str) -> int:
    """The state of a group and the counts of its members. `jobs list --group ID` lists them."""
    with session.ledger() as ledger:
        view = ledger.group(id)
    if view is None:
        raise UnknownGroup(group=id)
    data = {name: getattr(view, name) for name in view.__struct_fields__}
    data |= {"created_at": moment(view.created_at), "closed_at": moment(view.closed_at)}
    show(session.json, data, pairs({name.replace("_", " "): value for name, value in data.items()}))
    return OK
