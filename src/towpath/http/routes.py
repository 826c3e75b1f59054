"""The route table of a server as a litestar application."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from litestar import Litestar, MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import asgi
from litestar.handlers.asgi_handlers import ASGIRouteHandler
from litestar.types import Receive, Scope, Send

from towpath.app import App
from towpath.errors import TowpathError
from towpath.http.api import api_routes
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.health import HealthRoutes
from towpath.http.ledger_routes import ledger_routes
from towpath.http.lockd import lockd_routes
from towpath.http.openapi import DocumentRoute
from towpath.http.paths import Application, canonical_only, is_spelled, not_found
from towpath.http.problems import Disconnected, Problem, problem_of, unexpected
from towpath.http.table import Route, by_path, next_step

Methods = Mapping[str, Route]
"""The routes of one path by method."""
Find = Callable[[Exchange], Methods]


def route_table(context: ServerContext, health: HealthRoutes, app: App) -> tuple[Route, ...]:
    """Every route of a server, in the order of the reference."""
    routes = (*lockd_routes(context, health), *api_routes(context, app), *ledger_routes(context))
    return (*routes, DocumentRoute(routes).route)


def application(context: ServerContext, health: HealthRoutes, app: App) -> Application:
    """The routes as an ASGI application. A handler writes its response itself, because the protocol fixes
    every header and byte."""
    paths = by_path(route_table(context, health, app))
    trees = [PathTree(prefix, paths) for prefix in sorted({_static(path) for path in paths if "{" in path})]
    plain = [path for path in paths if not any(tree.covers(path) for tree in trees)]
    litestar = Litestar(
        [
            *[_endpoint(path, _only(paths[path]), context) for path in plain],
            *[_endpoint(tree.prefix, tree.find, context, is_mount=True) for tree in trees],
        ],
        exception_handlers={HTTPException: _not_routed},
        openapi_config=None,
        logging_config=None,
    )
    return canonical_only(litestar)


def _static(path: str) -> str:
    return path[: path.index("/{")]


def _only(methods: Methods) -> Find:
    return lambda exchange: methods


class PathTree:
    """The paths below a prefix, with parameters. A parameter is a segment of the path as it was sent, so that
    it may contain an encoded slash; litestar would get it decoded and divided."""

    def __init__(self, prefix: str, paths: Mapping[str, Methods]) -> None:
        self.prefix = prefix
        found = [(tuple(path.split("/")), methods) for path, methods in paths.items() if self.covers(path)]
        # A constant segment is preferred to a parameter.
        self._patterns = sorted(found, key=lambda each: [part.startswith("{") for part in each[0]])

    def covers(self, path: str) -> bool:
        return path == self.prefix or path.startswith(f"{self.prefix}/")

    def find(self, exchange: Exchange) -> Methods:
        """The routes of the requested path. Raises a `Problem`."""
        _, prefix, rest = _raw_path(exchange.scope).partition(self.prefix)
        parts = tuple((prefix + rest).split("/"))
        for pattern, methods in self._patterns:
            if len(pattern) == len(parts) and all(
                bool(part) if wanted.startswith("{") else wanted == part
                for wanted, part in zip(pattern, parts, strict=True)
            ):
                exchange.path = {
                    wanted[1:-1]: _decoded(part)
                    for wanted, part in zip(pattern, parts, strict=True)
                    if wanted.startswith("{")
                }
                return methods
        raise Problem(404, "unknown_path", "the server has no such path")


def _raw_path(scope: Any) -> str:
    raw: bytes | None = scope.get("raw_path")
    path: str = scope["path"] if raw is None else raw.decode("latin-1").partition("?")[0]
    return path


def _decoded(segment: str) -> str:
    try:
        return unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise Problem(400, "invalid_argument", "the path is not UTF-8") from None


def _endpoint(path: str, find: Find, context: ServerContext, is_mount: bool = False) -> ASGIRouteHandler:
    @asgi(path, copy_scope=False, is_mount=is_mount)
    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        if not is_mount and not is_spelled(scope, path):
            await not_found(send)
            return
        exchange = Exchange(scope, receive, send, context.extra)
        route: Route | None = None

        async def dispatch(exchange: Exchange) -> None:
            nonlocal route
            route = _route_of(exchange, find(exchange))
            await route.handler(exchange)

        try:
            try:
                await context.access.run(exchange, path, dispatch)
            except Problem as problem:
                await _refuse(exchange, problem, route)
            except TowpathError as error:
                await _refuse(exchange, problem_of(error), route)
        except Disconnected:
            return
        except Exception as error:
            await _refuse(exchange, unexpected(error), route)

    return endpoint


def _route_of(exchange: Exchange, methods: Methods) -> Route:
    """The route of the request's method. Raises a `Problem`."""
    method = exchange.scope["method"]
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        first = next(iter(methods.values()))
        if first.any_method:
            return first
        raise not_allowed(method, methods)
    if not route.any_method and route.arguments is None and exchange.scope["query_string"]:
        raise Problem(400, "invalid_argument", "this call has no arguments in the query string")
    return route


def not_allowed(method: str, methods: Sequence[str] | Methods) -> Problem:
    names = ", ".join(methods)
    problem = Problem(405, "method_not_allowed", f"{method} is not a method of this path: use {names}")
    problem.allow = names
    return problem


async def _refuse(exchange: Exchange, problem: Problem, route: Route | None) -> None:
    if exchange.started:
        # The status is sent. Ending the connection shows the client that the response is not complete.
        raise problem
    if route is None or not route.any_method:
        problem.envelope.next_step = next_step(problem.code)
    await exchange.refuse(problem)


def _not_routed(request: Request[Any, Any, Any], error: HTTPException) -> Response[str]:
    status = error.status_code
    text = "404 page not found\n" if status == 404 else f"{error.detail}\n"
    return Response(text, status_code=status, media_type=MediaType.TEXT)
