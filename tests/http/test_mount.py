"""The server as a part of another ASGI application, over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import uvicorn
from litestar import Litestar, get
from litestar.handlers import asgi
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from tests.support.waiting import WAIT, until
from tests.support.wire import MULTIPART, Wire, form
from towpath import App
from towpath.http.mount import MountedServer
from towpath.http.options import ServerOptions

Parent = Callable[[MountedServer], Any]


def in_starlette(queues: MountedServer) -> Any:
    async def own(request: Request) -> PlainTextResponse:
        return PlainTextResponse("own")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with queues:
            yield

    return Starlette(routes=[Route("/own", own), Mount("/work", queues)], lifespan=lifespan)


def in_litestar(queues: MountedServer) -> Any:
    @get("/own", media_type="text/plain")
    async def own() -> str:
        return "own"

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        async with queues:
            yield

    mounted = asgi("/work", is_mount=True, copy_scope=False)(queues)
    return Litestar([own, mounted], lifespan=[lifespan], logging_config=None)


def without_lifespan(queues: MountedServer) -> Any:
    return Starlette(routes=[Mount("/work", queues)])


@contextmanager
def parent_server(application: Any) -> Iterator[str]:
    """The address of uvicorn with this application, with the options that uvicorn has by itself."""
    started = threading.Event()

    class Announced(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    config = uvicorn.Config(application, port=0, log_level="critical", ws="none", timeout_graceful_shutdown=1)
    server = Announced(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(WAIT)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def call(address: str, path: str, **fields: Any) -> Any:
    with Wire(address) as wire:
        wire.request(path, json.dumps(fields).encode())
        return wire.answer()


@pytest.mark.parametrize("parent", [in_starlette, in_litestar, without_lifespan])
def test_messages_through_another_application(parent: Parent) -> None:
    with App("memory://") as app:
        queues = MountedServer(app, ServerOptions(max_consumers=2))
        with parent_server(parent(queues)) as address:
            body = form(("meta", b'{"queue":"a"}'), ("payload", b"x"))
            with Wire(address) as wire:
                for _ in range(2):
                    wire.request("/work/v1/queue/enqueue", body, {"Content-Type": MULTIPART})
                    assert wire.answer().json["queue"] == "a"
                wire.request("/work/v1/queue/dequeue", b'{"queue":"a","owner":"me"}')
                [(message, payload)] = wire.answer().messages()
                assert (message["attempts"], payload) == (1, b"x")
            assert call(address, "/work/v1/queue/ack").error == "missing_fields"
            assert call(address, "/work/nothing").body == b"404 page not found\n"
            assert call(address, "/work/readyz/").status == 404
            assert call(address, "/v1/queue/dequeue", queue="a", owner="me").status == 404
            if parent is not without_lifespan:
                with Wire(address) as wire:
                    wire.send(b"GET /own HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert wire.answer().body == b"own"
        assert app.ledger.check() == []


@pytest.mark.parametrize("parent", [in_starlette, in_litestar])
def test_a_stream_through_another_application(parent: Parent) -> None:
    """Each message arrives at once, and a client that leaves takes none."""
    with App("memory://") as app:
        queues = MountedServer(app)
        with parent_server(parent(queues)) as address:
            with Wire(address) as wire:
                wire.request("/work/v1/queue/subscribe", b'{"queue":"a","owner":"me"}')
                until(lambda: app.engine.dispatcher.waiting == 1)
                for number in range(3):
                    app.queue("a").put(b"%d" % number)
                    wire.read_until(b"Content-Length: 1\r\n")
                    assert wire.read_until(b"\r\n--").split(b"\r\n\r\n")[1][:1] == b"%d" % number
            until(lambda: app.engine.dispatcher.waiting == 0)


def test_the_end_of_the_application_ends_waits() -> None:
    """uvicorn ends open requests after its own time, then the lifespan."""
    with App("memory://") as app:
        queues = MountedServer(app)
        with parent_server(in_starlette(queues)) as address, Wire(address) as wire:
            wire.request("/work/v1/queue/dequeue", b'{"queue":"a","owner":"me"}')
            until(lambda: app.engine.dispatcher.waiting == 1)
        assert app.engine.dispatcher.waiting == 0
        app.queue("a").put(b"kept")
        assert app.queue("a").stats().counts.ready == 1


def test_as_an_application_of_its_own() -> None:
    with App("memory://") as app:
        with parent_server(MountedServer(app)) as address:
            assert call(address, "/readyz").status == 200
