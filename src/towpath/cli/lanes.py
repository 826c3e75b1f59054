"""`lanes`: what the lanes of the workers do, and pausing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from towpath.cli.base import Branch, Session, pass_session
from towpath.cli.doors import must_be_there
from towpath.cli.failures import OK, nothing
from towpath.cli.output import show, table
from towpath.errors import InvalidInput

if TYPE_CHECKING:
    from towpath.operations.workers import Lanes, LaneView


@click.group("lanes", cls=Branch)
def lanes() -> None:
    """Lanes of the workers: list, pause and resume them."""


@contextmanager
def _lanes(session: Session, name: str = "") -> Iterator[Lanes]:
    from towpath.app import App

    with App(must_be_there(session.url)) as app:
        try:
            yield app.lanes
        except InvalidInput as error:
            if error.details["field"] != "lane":
                raise
            raise nothing(f"There is no lane {name}.", f"Expected {error.details['expected']}.") from error


@lanes.command("list")
@pass_session
def list_lanes(session: Session, /) -> int:
    """The lanes of the workers that are there, as each said at most ten seconds ago, and those that are paused."""
    with _lanes(session) as desk:
        found = desk.list()
    data = [{name: getattr(each, name) for name in each.__struct_fields__} for each in found]
    show(session.json, {"lanes": data}, lambda: _table(found))
    return OK


def _table(found: Sequence[LaneView]) -> object:
    if not found:
        return "No worker that is there has lanes, and none is paused."
    rows = [
        (each.name, "paused" if each.paused else "working", each.workers, each.running, each.reserved, queues, each.why)
        for each in found
        for queues in [",".join(each.queues)]
    ]
    columns = ("lane", "state", "workers", "running", "reserved", "queues", "why")
    return table(columns, rows, numbers=("workers", "running", "reserved"))


@lanes.command("pause")
@click.argument("name")
@click.option("--why", help="The reason, for whoever asks why nothing runs.")
@pass_session
def pause(session: Session, /, name: str, why: str | None) -> int:
    """Start nothing of this lane until `resume`, in every worker that has it. What runs goes on; its slots are lent."""
    with _lanes(session, name) as desk:
        desk.pause(name, why)
    show(session.json, {"lane": name, "paused": True, "why": why}, f"lane {name} is paused")
    return OK


@lanes.command("resume")
@click.argument("name")
@pass_session
def resume(session: Session, /, name: str) -> int:
    """Let a paused lane go on."""
    with _lanes(session, name) as desk:
        paused = desk.resume(name)
    said = "goes on" if paused else "was not paused"
    show(session.json, {"lane": name, "paused": False, "was_paused": paused}, f"lane {name} {said}")
    return OK
