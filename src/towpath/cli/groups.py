"""`groups`: where a group is in its life."""

from __future__ import annotations

import click

from towpath.cli.base import Branch, Session, pass_session
from towpath.cli.failures import OK
from towpath.cli.output import moment, pairs, show
from towpath.errors import UnknownGroup


@click.group("groups", cls=Branch)
def groups() -> None:
    """Groups of jobs with one fate."""


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
