"""`enqueue`: a job for a task, by the task's name."""

from __future__ import annotations

from typing import Any

import click

from towpath import Spec
from towpath.cli.base import Session, command, names, pass_session
from towpath.cli.doors import load_app
from towpath.cli.failures import OK, bad_input
from towpath.cli.output import show
from towpath.cli.specs import SpecOptions, append, spec_options
from towpath.cli.values import Json


@command("enqueue")
@click.argument("kind")
@click.option("--args", "arguments", type=Json(object_only=True), default="{}", help='The arguments: {"to": "ada"}, or @file.')
@click.option("--queue", help="The queue; with --app the task's own if left out.")
@click.option("--app", "target", metavar="MODULE:APP", help="Check kind and arguments against the tasks of this app.")
@spec_options
@pass_session
def enqueue(session: Session, /, kind: str, arguments: bytes, queue: str | None, target: str | None, **options: Any) -> int:
    """Enqueue a job for the task KIND. Without --app nobody checks that such a task exists, and --queue is needed."""
    wanted = SpecOptions(**options)
    if target is not None:
        placed = _by_app(session, target, kind, arguments, wanted.call_options(queue))
    elif queue is None:
        raise click.UsageError(
            "Missing option '--queue' (or '--app', which knows the task's queue).", click.get_current_context()
        )
    else:
        spec = Spec(queue=queue, kind=kind, payload=arguments, **wanted.fields())
        with session.ledger(make=True) as ledger:
            placed = append(ledger, spec)
    show(session.json, placed, placed["id"])
    return OK


def _by_app(session: Session, target: str, kind: str, arguments: bytes, options: dict[str, Any]) -> dict[str, Any]:
    """The spec that the task itself would make: its queue, its options, its key; the arguments checked by its signature."""
    app = load_app(target, session.url)
    task = app.tasks.get(kind)
    if task is None:
        raise bad_input(f"{target} has no task {kind}.", f"Its tasks: {names(sorted(app.tasks))}")
    args, kwargs = task.codec.decode(arguments)
    spec = task.options(**options).spec_for(args, kwargs)
    with app:
        return append(app.ledger, spec)
