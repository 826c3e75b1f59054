"""Three servers for each test process, started by the first test that uses them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.shards import SETTINGS, Fleet
from towpath.ledger import open_ledger
from towpath.testing.postgres import Server

NODES = ("n1", "n2", "n3")


@pytest.fixture(scope="session")
def shard_servers(postgres_place: Path) -> Iterator[dict[str, Server]]:
    """Servers with logical replication. A test that stops one starts it again."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(NODES)) as threads:
        folders = [postgres_place / f"shards-{os.getpid()}-{node}" for node in NODES]
        started = list(threads.map(lambda folder: Server.start(folder, settings=SETTINGS), folders))
        for server in started:
            stack.enter_context(server)
        yield dict(zip(NODES, started, strict=True))


@pytest.fixture
def fleet(shard_servers: dict[str, Server]) -> Iterator[Fleet]:
    """A new database on each of three servers, and an empty catalogue."""
    urls = {node: server.create_database() for node, server in shard_servers.items()}
    with contextlib.closing(open_ledger("memory://")) as ledger:
        fleet = Fleet(urls, ledger)
        yield fleet
        fleet.clear()
    for node, server in shard_servers.items():
        server.drop_database(urls[node])


@pytest.fixture
def disk_fleet(shard_servers: dict[str, Server], tmp_path: Path) -> Iterator[Fleet]:
    """As `fleet`, with a ledger that other processes open too."""
    urls = {node: server.create_database() for node, server in shard_servers.items()}
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with contextlib.closing(open_ledger(url)) as ledger:
        fleet = Fleet(urls, ledger, url)
        yield fleet
        fleet.clear()
    for node, server in shard_servers.items():
        server.drop_database(urls[node])
