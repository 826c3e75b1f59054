"""The tree of commands."""

from __future__ import annotations

import click

from towpath.cli.base import Root, Session


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        from towpath.cli.output import show

        number = version("towpath")
        show(ctx.ensure_object(Session).json, {"towpath": number}, f"towpath {number}")
        ctx.exit(0)


PARTS = {
    "demo": "demo:demo",
    "worker": "worker:worker",
    "dev": "worker:dev",
    "enqueue": "enqueue:enqueue",
    "put": "messages:put",
    "get": "messages:get",
    "ack": "messages:ack",
    "nack": "messages:nack",
    "extend": "messages:extend",
    "stats": "stats:stats",
    "jobs": "jobs:jobs",
    "dead": "dead:dead",
    "queues": "queues:queues",
    "parts": "queues:parts",
    "groups": "groups:groups",
    "schedules": "schedules:schedules",
    "backup": "care:backup",
    "check": "care:check",
    "doctor": "doctor:doctor",
    "bench": "bench:bench",
}


@click.group(cls=Root, parts=PARTS)
@click.option("--version", is_flag=True, expose_value=False, callback=_version, help="The version, and nothing else.")
@click.pass_context
def root(ctx: click.Context) -> None:
    """Durable work for Python, from the command line.

    `towpath demo` shows what it does. `towpath COMMAND --help` explains a command. --url and --json go with every command,
    before or after its name. Spans are seconds, or a number with a unit: 30, 1.5s, 5m, 2h, 7d.
    """
    ctx.ensure_object(Session)
