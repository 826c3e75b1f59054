"""A queue of messages on each ledger, and both forms of every verb. Modules with a `ledger` of their own use that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.hosts import Desk, Verbs
from towpath.ledger import Ledger, open_ledger
from towpath.queues.message import Queue


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    ledger = open_ledger("memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/work.db")
    yield ledger
    ledger.close()


@pytest.fixture
def desk(ledger: Ledger) -> Iterator[Desk]:
    with Desk(ledger) as desk:
        yield desk


@pytest.fixture
def queue(desk: Desk) -> Queue:
    return Queue(desk, "orders")


@pytest.fixture(params=["sync", "async"])
def verbs(request: pytest.FixtureRequest) -> Verbs:
    return Verbs(request.param == "async")
