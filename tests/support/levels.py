"""What a server of this process holds: a leak shows as a level that does not return."""

from __future__ import annotations

import asyncio
import os
from typing import NamedTuple

from tests.support.waiting import until
from tests.support.wire import Remote
from towpath.http.context import ServerContext


class Levels(NamedTuple):
    """`files` is the number of file descriptors of the process, `held` the size of the cache of delivered
    messages."""

    files: int
    tasks: int
    connections: int
    consumers: int
    waiters: int
    held: int


def server_context(remote: Remote) -> ServerContext:
    assert remote.server._runner is not None
    return remote.server._runner._context


def levels(remote: Remote) -> Levels:
    runner, context = remote.server._runner, server_context(remote)
    assert runner is not None
    assert runner._loop is not None
    return Levels(
        len(os.listdir("/proc/self/fd")),
        len(asyncio.all_tasks(runner._loop)),
        len(runner.server_state.connections),
        context.consumers.total,
        context.engine.dispatcher.waiting,
        len(context.held),
    )


def returned(remote: Remote, before: Levels) -> None:
    """Wait until no level is above the one before."""
    until(
        lambda: all(now <= then for now, then in zip(levels(remote), before, strict=True)),
        explain=lambda: (before, levels(remote)),
    )
