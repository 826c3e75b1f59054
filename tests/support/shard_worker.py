"""A worker of shard plans for the tests of faults: `python shard_worker.py <arguments as JSON>`. Its own
connections go through proxies; the nodes reach each other directly."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import Connection

from towpath import App
from towpath.apps.shards import moves as moves  # for its routines
from towpath.apps.shards.catalogue import Catalogue
from towpath.apps.shards.nodes import Nodes
from towpath.apps.shards.routines import Cluster, install
from towpath.clock import SystemClock

LIMIT = 1.0
"""Seconds of a statement: a connection that hangs is noticed after twice this time."""


class ProxiedNodes(Nodes):
    """Nodes to which this process connects by other addresses than the nodes among themselves."""

    def __init__(self, direct: dict[str, str], proxied: dict[str, str]) -> None:
        super().__init__(direct)
        self._through = Nodes(proxied)

    @contextmanager
    def connect(self, node: str, *, autocommit: bool = True, **options: str) -> Iterator[Connection[Any]]:
        with self._through.connect(node, autocommit=autocommit, **options) as connection:
            yield connection


def make_app(url: str, nodes: Nodes) -> App:
    app = App(url, name="shards")
    install(app, Cluster(nodes, Catalogue(app.ledger, SystemClock()), LIMIT))
    return app


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    app = make_app(given["url"], ProxiedNodes(given["direct"], given["proxied"]))
    app.run(queues=tuple(f"node/{node}" for node in given["direct"]), lease=2.0, grace=1.0)
    app.close()
