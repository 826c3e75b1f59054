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


@contextlib.contextmanager
def _new_fleet(servers: dict[str, Server], url: str) -> Iterator[Fleet]:
    """A new database on each server, and an empty catalogue in the ledger of this URL."""
    with ThreadPoolExecutor(len(NODES)) as threads:
        made = list(threads.map(Server.create_database, servers.values()))
        with contextlib.closing(open_ledger(url)) as ledger:
            fleet = Fleet(dict(zip(servers, made, strict=True)), ledger, url)
            yield fleet
            fleet.clear()
        list(threads.map(Server.drop_database, servers.values(), made))


@pytest.fixture
def fleet(shard_servers: dict[str, Server]) -> Iterator[Fleet]:
    with _new_fleet(shard_servers, "memory://") as fleet:
        yield fleet


@pytest.fixture
def disk_fleet(shard_servers: dict[str, Server], tmp_path: Path) -> Iterator[Fleet]:
    """As `fleet`, with a ledger that other processes open too."""
    with _new_fleet(shard_servers, f"sqlite:///{tmp_path / 'ledger.db'}") as fleet:
        yield fleet
