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
    "demo": ("demo:demo", "A demonstration with real work."),
    "worker": ("worker:worker", "Run the jobs of an app's tasks."),
    "dev": ("worker:dev", "A worker that restarts when your code changes."),
    "enqueue": ("enqueue:enqueue", "Enqueue a job for the task KIND."),
    "put": ("messages:put", "Put a message into a queue."),
    "get": ("messages:get", "Take messages from QUEUE (or a pattern with *)."),
    "ack": ("messages:ack", "The message is done."),
    "nack": ("messages:nack", "Give the message back."),
    "extend": ("messages:extend", "Keep the message for SECONDS from now."),
    "stats": ("stats:stats", "What every queue holds."),
    "jobs": ("jobs:jobs", "Look at jobs, and bring them back, stop or delete them."),
    "dead": ("dead:dead", "Dead letters: jobs that failed for good."),
    "queues": ("queues:queues", "List queues, pause them, set their limits."),
    "parts": ("queues:parts", "Parts of a queue, each with limits of its own."),
    "breakers": ("breakers:breakers", "Circuit breakers: look at them, open and close them."),
    "workers": ("workers:workers", "Workers on this ledger: list, pause, resume and end them."),
    "lanes": ("lanes:lanes", "Lanes of the workers: list, pause and resume them."),
    "groups": ("groups:groups", "Groups of jobs with one fate."),
    "schedules": ("schedules:schedules", "Schedules: jobs that come again."),
    "backup": ("care:backup", "Copy the ledger to a new file while work goes on."),
    "ledger": ("ledger:ledger", "The ledger as a whole: its schema, its room, its copy in another place."),
    "check": ("care:check", "Recount the whole ledger."),
    "doctor": ("doctor:doctor", "What is wrong, and what to do about it."),
    "bench": ("bench:bench", "How fast a ledger is on this disk."),
}
"""The commands in the order of the list, which loads none of them: where each is, and the first line of its help."""


@click.group(cls=Root, parts=PARTS)
@click.option("--version", is_flag=True, expose_value=False, callback=_version, help="The version, and nothing else.")
@click.pass_context
def root(ctx: click.Context) -> None:
    """Durable work for Python, from the command line.

    `towpath demo` shows what it does. `towpath COMMAND --help` explains a command. --url and --json go with every command,
    before or after its name. Spans are seconds, or a number with a unit: 30, 1.5s, 5m, 2h, 7d.
    """
    ctx.ensure_object(Session)
