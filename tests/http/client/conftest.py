"""Clients of both surfaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.surfaces import AsSync
from tests.support.wire import Remote
from towpath.http.client import AsyncQueueClient, QueueClient


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes clients of one surface; they are closed after the test."""
    for name in ("TOWPATH_SERVER", "TOWPATH_TOKEN", "TOWPATH_BUNDLE", "LOCKD_CLIENT_SERVER"):
        monkeypatch.delenv(name, raising=False)
    made: list[Any] = []
    loop = asyncio.new_event_loop()

    def make(*args: Any, **kwargs: Any) -> Any:
        if request.param == "sync":
            made.append(QueueClient(*args, **kwargs))
        else:
            made.append(AsSync(AsyncQueueClient(*args, **kwargs), loop))
        return made[-1]

    yield make
    for each in made:
        each.close()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture
def client(connect: Callable[..., Any], remote: Remote) -> Any:
    """A client of a server on each ledger."""
    return connect(remote.address)
