"""`client`: queues, locks and documents of an HTTP server, with the options and variables of lockd's."""

from __future__ import annotations

import click

from towpath.cli.client_base import ClientGroup
from towpath.cli.client_locks import lock, state
from towpath.cli.client_queue import queue


@click.group("client", cls=ClientGroup)
def client() -> None:
    """Call an HTTP server: queues, locks, documents."""


for each in (queue, lock, state):
    client.add_command(each)
