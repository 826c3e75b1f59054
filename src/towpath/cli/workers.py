"""`workers`: who works on a ledger, and words for them from afar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from towpath.cli.base import Branch, Session, names, pass_session
from towpath.cli.doors import must_be_there
from towpath.cli.failures import OK, nothing
from towpath.cli.output import moment, show, spell, table
from towpath.cli.values import now

if TYPE_CHECKING:
    from towpath.operations.workers import Workers, WorkerView


@click.group("workers", cls=Branch)
def workers() -> None:
    """Workers on this ledger: list, pause, resume and end them. NAME may have * in it; * alone means all."""


@contextmanager
def _fleet(session: Session) -> Iterator[Workers]:
    from towpath.app import App

    with App(must_be_there(session.url)) as app:
        yield app.workers


def _data(view: WorkerView) -> dict[str, Any]:
    data = {name: getattr(view, name) for name in view.__struct_fields__}
    return {**data, "started_at": moment(view.started_at), "seen_at": moment(view.seen_at)}


@workers.command("list")
@pass_session
def list_workers(session: Session, /) -> int:
    """Who is there, as each said at most ten seconds ago, and which pauses are in force."""
    with _fleet(session) as fleet:
        found, paused = fleet.list(), fleet.paused()
    show(session.json, {"workers": [_data(each) for each in found], "paused": paused}, lambda: _table(found, paused))
    return OK


def _table(found: Sequence[WorkerView], paused: dict[str, str | None]) -> object:
    pauses = [f"Paused: {name} ({why})" if why else f"Paused: {name}" for name, why in sorted(paused.items())]
    if not found:
        return ["Nobody works here now.", *pauses]
    at, rows = now(), []
    for each in found:
        state = "draining" if each.draining else "paused" if each.paused else "working"
        slots = f"{each.running}/{each.concurrency}"
        rows.append(
            (each.name, each.host, each.pid, state, slots, ",".join(each.queues), spell(at - each.started_at), each.why)
        )
    return table(("worker", "host", "pid", "state", "busy", "queues", "up", "why"), rows, numbers=("pid", "busy"))


@workers.command("pause")
@click.argument("name")
@click.option("--why", help="The reason, for whoever asks why nothing runs.")
@pass_session
def pause(session: Session, /, name: str, why: str | None) -> int:
    """Start nothing new until `resume`. What runs goes on; workers of that name that start later are paused too."""
    with _fleet(session) as fleet:
        told = fleet.pause(name, why)
    who = names([each.name for each in told]) if told else "nobody who is there now"
    show(session.json, {"paused": name, "why": why, "workers": [each.name for each in told]}, f"{name} is paused: {who}")
    return OK


@workers.command("resume")
@click.argument("name")
@pass_session
def resume(session: Session, /, name: str) -> int:
    """Lift the pauses with this name. A pattern lifts all that it covers."""
    with _fleet(session) as fleet:
        lifted = list(fleet.resume(name))
        left = fleet.paused()
    if not lifted:
        raise nothing(f"There is no pause of {name}.", f"Pauses: {names(sorted(left))}")
    show(session.json, {"resumed": lifted, "paused": left}, f"{names(lifted)}: resumed")
    return OK


@workers.command("drain")
@click.argument("name")
@pass_session
def drain(session: Session, /, name: str) -> int:
    """Finish what runs and end. As after a first SIGTERM; who starts later is not concerned."""
    with _fleet(session) as fleet:
        told = fleet.drain(name)
        known = [each.name for each in fleet.list()]
    if not told:
        raise nothing(f"There is no worker {name}.", f"Workers: {names(known)}")
    show(session.json, {"draining": [each.owner for each in told]}, f"Told to end: {names([each.name for each in told])}")
    return OK
