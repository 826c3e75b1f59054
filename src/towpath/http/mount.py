"""The routes of the server as a part of another ASGI application, for instance of FastAPI or Litestar."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from towpath.app import App
from towpath.http.context import ServerContext
from towpath.http.exchange import Receive, Scope, Send
from towpath.http.health import HealthRoutes
from towpath.http.options import ServerOptions
from towpath.http.paths import Application
from towpath.http.routes import application


class MountedServer:
    """An ASGI application with the routes of `towpath serve`. It serves an app that is open, and leaves it
    open. `async with` it in the lifespan of the application around it: the end of the block ends all waits.

    Limits for connections, the size of a head and slow clients, as well as authentication, are those of the
    server and the application around it. Used on one event loop."""

    def __init__(self, app: App, options: ServerOptions | None = None) -> None:
        self._app = app
        self._options = options or ServerOptions()
        self._opened: tuple[ServerContext, HealthRoutes, Application] | None = None

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            context, health, _ = self._opened
            self._opened = None
            context.drain()
            health.close()
            context.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            # The state belongs to the application around this one, which may be a Litestar too.
            await self._open()({**scope, "state": {}}, receive, send)

    def _open(self) -> Application:
        """The routes. Without `async with` they are made for the first request."""
        if self._opened is None:
            engine = self._app.engine
            context = ServerContext(engine, self._options)
            health = HealthRoutes(self._app, context)
            engine.start_caretaker()
            self._opened = context, health, application(context, health, self._app)
        return self._opened[2]

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """If no other application is around this one."""
        async with self:
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
