"""The paths of the server and their handlers, as a litestar application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from litestar import Litestar, MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import asgi
from litestar.handlers.asgi_handlers import ASGIRouteHandler
from litestar.types import Receive, Scope, Send

from towpath.errors import TowpathError
from towpath.http.context import ServerContext
from towpath.http.deliveries import DeliveryRoutes
from towpath.http.documents import DocumentRoutes
from towpath.http.exchange import Exchange
from towpath.http.health import HealthRoutes
from towpath.http.lock_routes import LockRoutes
from towpath.http.paths import is_spelled, not_found
from towpath.http.problems import Disconnected, Problem, problem_of, unexpected
from towpath.http.queues import QueueRoutes
from towpath.http.receipts import ReceiptRoutes

Handler = Callable[[Exchange], Awaitable[None]]


def handlers_of(context: ServerContext, health: HealthRoutes) -> Mapping[str, Handler]:
    queues, deliveries, receipts = QueueRoutes(context), DeliveryRoutes(context), ReceiptRoutes(context)
    locks, documents = LockRoutes(context), DocumentRoutes(context)
    return {
        "/healthz": health.healthz,
        "/readyz": health.readyz,
        "/metrics": health.metrics,
        "/v1/queue/enqueue": queues.enqueue,
        "/v1/queue/stats": queues.stats,
        "/v1/queue/watch": queues.watch,
        "/v1/queue/dequeue": deliveries.dequeue,
        "/v1/queue/dequeueWithState": deliveries.dequeue_with_state,
        "/v1/queue/subscribe": deliveries.subscribe,
        "/v1/queue/subscribeWithState": deliveries.subscribe_with_state,
        "/v1/queue/ack": receipts.ack,
        "/v1/queue/nack": receipts.nack,
        "/v1/queue/extend": receipts.extend,
        "/v1/acquire": locks.acquire,
        "/v1/keepalive": locks.keepalive,
        "/v1/release": locks.release,
        "/v1/describe": locks.describe,
        "/v1/get": documents.get,
        "/v1/update": documents.update,
        "/v1/remove": documents.remove,
    }


def application(context: ServerContext, health: HealthRoutes) -> Litestar:
    """The routes as an ASGI application. A handler writes its response itself, because the protocol fixes
    every header and byte."""
    return Litestar(
        [_route(path, handler, context) for path, handler in handlers_of(context, health).items()],
        exception_handlers={HTTPException: _not_routed},
        openapi_config=None,
        logging_config=None,
    )


def _route(path: str, handler: Handler, context: ServerContext) -> ASGIRouteHandler:
    @asgi(path, copy_scope=False)
    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        if not is_spelled(scope, path):
            await not_found(send)
            return
        exchange = Exchange(scope, receive, send, context.extra)
        try:
            try:
                await handler(exchange)
            except Problem as problem:
                await _refuse(exchange, problem)
            except TowpathError as error:
                await _refuse(exchange, problem_of(error))
        except Disconnected:
            return
        except Exception as error:
            await _refuse(exchange, unexpected(error))

    return endpoint


async def _refuse(exchange: Exchange, problem: Problem) -> None:
    if exchange.started:
        # The status is sent. Ending the connection shows the client that the response is not complete.
        raise problem
    await exchange.refuse(problem)


def _not_routed(request: Request[Any, Any, Any], error: HTTPException) -> Response[str]:
    status = error.status_code
    text = "404 page not found\n" if status == 404 else f"{error.detail}\n"
    return Response(text, status_code=status, media_type=MediaType.TEXT)
