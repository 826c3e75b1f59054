"""`workers`, `lanes` and `breakers`: list them, and control them from any machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from towpath.cli.base import OK, CliGroup, Session, join_names, not_found, pass_session
from towpath.cli.output import format_span, format_time, print_result, table
from towpath.cli.targets import existing_url
from towpath.cli.values import Span, now
from towpath.commands import micros
from towpath.errors import InvalidInput
from towpath.fleet import KEY, WorkerView, decoded, workers_of

if TYPE_CHECKING:
    from towpath.operations.workers import Workers


@click.group("workers", cls=CliGroup)
def workers() -> None:
    """List, pause, resume and drain workers. NAME may contain *; * alone matches all."""


@contextmanager
def _open_workers(session: Session) -> Iterator[Workers]:
    from towpath.app import App

    with App(existing_url(session.url)) as app:
        yield app.workers


def _data(view: WorkerView) -> dict[str, Any]:
    data = {name: getattr(view, name) for name in view.__struct_fields__}
    limits = [
        {name: getattr(limit, name) for name in limit.__struct_fields__} | {"until": format_time(limit.until)}
        for limit in view.limits
    ]
    times = {"started_at": format_time(view.started_at), "seen_at": format_time(view.seen_at)}
    return {**data, **times, "limits": limits}


@workers.command("list")
@pass_session
def list_workers(session: Session, /) -> int:
    """List running workers, and the pauses in effect.

    Each worker as of its last heartbeat, which is at most ten seconds old.
    """
    with session.ledger() as ledger:
        found, paused = workers_of(ledger), decoded(ledger.note(KEY)).paused
    print_result(
        session.json,
        {"workers": [_data(each) for each in found], "paused": paused},
        lambda: _worker_table(found, paused),
    )
    return OK


def _worker_table(found: Sequence[WorkerView], paused: dict[str, str | None]) -> object:
    pauses = [f"Paused: {name} ({why})" if why else f"Paused: {name}" for name, why in sorted(paused.items())]
    if not found:
        return ["No worker is running.", *pauses]
    at, rows = now(), []
    for each in found:
        state = "draining" if each.draining else "paused" if each.paused else "working"
        slots = f"{each.running}/{each.concurrency}"
        rows.append(
            (
                each.name,
                each.host,
                each.pid,
                state,
                slots,
                ",".join(each.queues),
                format_span(at - each.started_at),
                each.why,
            )
        )
    return table(
        ("worker", "host", "pid", "state", "busy", "queues", "up", "why"), rows, numbers=("pid", "busy")
    )


@workers.command("pause")
@click.argument("name")
@click.option("--why", help="Reason, shown by `explain`.")
@pass_session
def pause_worker(session: Session, /, name: str, why: str | None) -> int:
    """Stop workers from starting jobs until `resume`. Running jobs continue. Workers of that name that start
    later are paused too."""
    with _open_workers(session) as fleet:
        matching = fleet.pause(name, why)
    affected = join_names([each.name for each in matching]) if matching else "no running worker matches"
    print_result(
        session.json,
        {"paused": name, "why": why, "workers": [each.name for each in matching]},
        f"{name} is paused: {affected}",
    )
    return OK


@workers.command("resume")
@click.argument("name")
@pass_session
def resume_worker(session: Session, /, name: str) -> int:
    """Remove the pauses with this name. A pattern removes all pauses that it matches."""
    with _open_workers(session) as fleet:
        lifted = list(fleet.resume(name))
        left = fleet.paused()
    if not lifted:
        raise not_found(f"There is no pause of {name}.", f"Pauses: {join_names(sorted(left))}")
    print_result(session.json, {"resumed": lifted, "paused": left}, f"{join_names(lifted)}: resumed")
    return OK


@workers.command("drain")
@click.argument("name")
@pass_session
def drain(session: Session, /, name: str) -> int:
    """Let workers finish their running jobs and end.

    As after a first SIGTERM. Workers that start later are not affected.
    """
    with _open_workers(session) as fleet:
        matching = fleet.drain(name)
        known = [each.name for each in fleet.list()]
    if not matching:
        raise not_found(f"There is no worker {name}.", f"Workers: {join_names(known)}")
    print_result(
        session.json,
        {"draining": [each.owner for each in matching]},
        f"Draining: {join_names([each.name for each in matching])}",
    )
    return OK


if TYPE_CHECKING:
    from towpath.operations.workers import Lanes, LaneView


@click.group("lanes", cls=CliGroup)
def lanes() -> None:
    """List, pause and resume lanes of workers."""


@contextmanager
def _open_lanes(session: Session, name: str = "") -> Iterator[Lanes]:
    from towpath.app import App

    with App(existing_url(session.url)) as app:
        try:
            yield app.workers.lanes
        except InvalidInput as error:
            if error.details["field"] != "lane":
                raise
            raise not_found(f"There is no lane {name}.", f"Expected {error.details['expected']}.") from error


@lanes.command("list")
@pass_session
def list_lanes(session: Session, /) -> int:
    """List lanes of running workers, and paused lanes.

    Each lane as of the last heartbeat of its workers, which is at most ten seconds old.
    """
    with _open_lanes(session) as lanes_api:
        found = lanes_api.list()
    data = [{name: getattr(each, name) for name in each.__struct_fields__} for each in found]
    print_result(session.json, {"lanes": data}, lambda: _lane_table(found))
    return OK


def _lane_table(found: Sequence[LaneView]) -> object:
    if not found:
        return "No running worker has lanes, and no lane is paused."
    rows = [
        (
            each.name,
            "paused" if each.paused else "working",
            each.workers,
            each.running,
            each.reserved,
            queues,
            each.why,
        )
        for each in found
        for queues in [",".join(each.queues)]
    ]
    columns = ("lane", "state", "workers", "running", "reserved", "queues", "why")
    return table(columns, rows, numbers=("workers", "running", "reserved"))


@lanes.command("pause")
@click.argument("name")
@click.option("--why", help="Reason, shown by `explain`.")
@pass_session
def pause_lane(session: Session, /, name: str, why: str | None) -> int:
    """Start no job of this lane until `resume`.

    In every worker that has it. Running jobs continue; other lanes may use its slots.
    """
    with _open_lanes(session, name) as lanes_api:
        lanes_api.pause(name, why)
    print_result(session.json, {"lane": name, "paused": True, "why": why}, f"lane {name} is paused")
    return OK


@lanes.command("resume")
@click.argument("name")
@pass_session
def resume_lane(session: Session, /, name: str) -> int:
    """Resume a paused lane."""
    with _open_lanes(session, name) as lanes_api:
        paused = lanes_api.resume(name)
    became = "is resumed" if paused else "was not paused"
    print_result(session.json, {"lane": name, "paused": False, "was_paused": paused}, f"lane {name} {became}")
    return OK


if TYPE_CHECKING:
    from towpath.app import App
    from towpath.operations.breakers import BreakerStatus


@click.group("breakers", cls=CliGroup)
def breakers() -> None:
    """List, open, close and reset circuit breakers. A change applies to all workers of the ledger."""


@contextmanager
def _open_app(session: Session, name: str | None = None) -> Iterator[App]:
    from towpath.app import App

    with App(existing_url(session.url)) as app:
        if name is not None:
            known = [each.name for each in app.breakers.list()]
            if name not in known:
                raise not_found(
                    f"There is no breaker {name}.",
                    f"Breakers: {join_names(known)}. A worker creates the breakers of its tasks when it "
                    "starts.",
                )
        yield app


@breakers.command("list")
@pass_session
def list_all(session: Session, /) -> int:
    """List breakers with their states and counts.

    Also the queues and parts that each breaker closes.
    """
    with _open_app(session) as app:
        found = app.breakers.list()
    print_result(
        session.json, {"breakers": [each.as_dict() for each in found]}, lambda: _breaker_table(found)
    )
    return OK


def _breaker_table(found: list[BreakerStatus]) -> object:
    if not found:
        return "There are no breakers. Declare one with @app.task(breaker=...)."
    at, rows = now(), []
    for each in found:
        left = (
            None if each.until is None else f"in {format_span(max(0, micros(each.until.timestamp()) - at))}"
        )
        failed = f"{each.failed} of {each.failures} in {each.window:g} s"
        if each.ratio is not None:
            failed = f"{each.failed} of {each.calls} calls in {each.window:g} s, opens at {each.ratio:.0%}"
        gates = ", ".join(
            gate.queue if gate.part is None else f"{gate.queue} {gate.part}" for gate in each.gates
        )
        rows.append((each.name, each.state.value, left, failed, each.trips, gates or None, each.why))
    return table(("name", "state", "probes", "failures", "trips", "gates", "why"), rows, numbers=("trips",))


@breakers.command("open")
@click.argument("name")
@click.option("--for", "span", type=Span(), help="Time until probes may run. Default: until `close`.")
@click.option("--why", default="", help="Reason, shown by `explain`.")
@pass_session
def open_one(session: Session, /, name: str, span: int | None, why: str) -> int:
    """Open a breaker: its jobs do not start, in all workers. Running jobs continue; waiting jobs stay."""
    with _open_app(session, name) as app:
        found = app.breakers.open(name, why, None if span is None else span / 1_000_000)
    until = "until it is closed by hand" if span is None else f"until {format_time(found.until)}"
    return _print_breaker(session, found, f"{name} is open {until}")


@breakers.command("close")
@click.argument("name")
@pass_session
def close_one(session: Session, /, name: str) -> int:
    """Close a breaker and clear its failure count. Its jobs may start at once."""
    with _open_app(session, name) as app:
        return _print_breaker(session, app.breakers.close(name), f"{name} is closed")


@breakers.command("reset")
@click.argument("name")
@pass_session
def reset_one(session: Session, /, name: str) -> int:
    """Close a breaker and delete it. A worker with tasks that use it creates it again when it starts."""
    with _open_app(session, name) as app:
        app.breakers.reset(name)
    print_result(session.json, {"name": name, "reset": True}, f"{name} is deleted")
    return OK


def _print_breaker(session: Session, found: BreakerStatus, sentence: str) -> int:
    print_result(session.json, found.as_dict(), sentence)
    return OK
