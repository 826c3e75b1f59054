"""`breakers`: circuit breakers of the whole fleet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from towpath.cli.base import Branch, Session, names, pass_session
from towpath.cli.doors import must_be_there
from towpath.cli.failures import OK, nothing
from towpath.cli.output import moment, show, spell, table
from towpath.cli.values import Span, now

if TYPE_CHECKING:
    from towpath.app import App
    from towpath.operations.breakers import Record

FAR = 100 * 365 * 86400 * 1_000_000
"""Longer than anybody means by a time: open until somebody closes it."""


@click.group("breakers", cls=Branch)
def breakers() -> None:
    """Circuit breakers: look at them, open and close them. Tasks have them; a change holds for the whole fleet."""


@contextmanager
def _host(session: Session, name: str | None = None) -> Iterator[App]:
    from towpath.app import App

    with App(must_be_there(session.url)) as app:
        if name is not None:
            known = [record.breaker.name for record in app.breakers.list()]
            if name not in known:
                raise nothing(
                    f"There is no breaker {name}.", f"Breakers: {names(known)}. A worker declares those of its tasks."
                )
        yield app


def data_of(record: Record) -> dict[str, Any]:
    at, status, settings = now(), record.status, record.breaker
    phase, (failed, calls) = status.phase(at), record.counted(at)
    return {
        "name": settings.name,
        "state": phase.value,
        "until": moment(status.until) if phase == "open" and status.until - at < FAR else None,
        "why": status.why or None,
        "since": moment(status.since) if status.since else None,
        "failed": failed,
        "calls": None if settings.ratio is None else calls,
        "ratio": settings.ratio,
        "volume": None if settings.ratio is None else settings.volume,
        "failures": settings.failures,
        "window": settings.window,
        "cooldown": settings.cooldown,
        "probes": settings.probes,
        "trips": status.trips,
        "gates": [{"queue": gate.queue, "part": gate.part} for gate in record.gates],
    }


@breakers.command("list")
@pass_session
def list_all(session: Session, /) -> int:
    """Every breaker with its state, its numbers and the gates that it shuts."""
    with _host(session) as app:
        found = app.breakers.list()
    show(session.json, {"breakers": [data_of(record) for record in found]}, lambda: _table(found))
    return OK


def _table(found: list[Record]) -> object:
    if not found:
        return "There are no breakers. Tasks have them: @app.task(breaker=...)."
    at, rows = now(), []
    for record in found:
        data = data_of(record)
        left = None if data["until"] is None else f"in {spell(max(0, record.status.until - at))}"
        failed = f"{data['failed']} of {data['failures']} in {data['window']:g} s"
        if data["ratio"] is not None:
            failed = f"{data['failed']} of {data['calls']} calls in {data['window']:g} s, opens at {data['ratio']:.0%}"
        gates = ", ".join(gate.queue if gate.part is None else f"{gate.queue} {gate.part}" for gate in record.gates)
        rows.append((data["name"], data["state"], left, failed, data["trips"], gates or None, data["why"]))
    return table(("name", "state", "probes", "failures", "trips", "gates", "why"), rows, numbers=("trips",))


@breakers.command("open")
@click.argument("name")
@click.option("--for", "span", type=Span(), help="So long, then probes may try. Without it: until `close`.")
@click.option("--why", default="", help="The reason, for whoever asks why nothing runs.")
@pass_session
def open_one(session: Session, /, name: str, span: int | None, why: str) -> int:
    """Nothing passes it from now on, in the whole fleet; what runs goes on, what waits stays."""
    with _host(session, name) as app:
        record = app.breakers.open(name, why, None if span is None else span / 1_000_000)
    until = "until somebody closes it" if span is None else f"until {moment(record.status.until)}"
    return _shown(session, record, f"{name} is open {until}")


@breakers.command("close")
@click.argument("name")
@pass_session
def close_one(session: Session, /, name: str) -> int:
    """Let everything pass at once; the failures so far are forgotten."""
    with _host(session, name) as app:
        return _shown(session, app.breakers.close(name), f"{name} is closed")


@breakers.command("reset")
@click.argument("name")
@pass_session
def reset_one(session: Session, /, name: str) -> int:
    """Close it and forget it. A worker whose tasks have it declares it anew when it starts."""
    with _host(session, name) as app:
        app.breakers.reset(name)
    show(session.json, {"name": name, "reset": True}, f"{name} is forgotten")
    return OK


def _shown(session: Session, record: Record, sentence: str) -> int:
    show(session.json, data_of(record), sentence)
    return OK
