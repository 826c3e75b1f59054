"""One spelling for each path. litestar serves `//v1/x`, `/v1/x/` and `/v1%2fx` as `/v1/x`; a proxy with rules
for paths sees other paths there, so that they would pass its rules."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Litestar
from litestar.routes import ASGIRoute

from towpath.http.exchange import Receive, Scope, Send

Application = Callable[[Any, Any, Any], Awaitable[None]]
_OTHER_SPELLING = re.compile(rb"//|/(?:\.|%2e){1,2}(?:/|\Z)|%5c|%00|\\", re.IGNORECASE)
_HEADERS = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"19")]


def canonical_only(application: Litestar) -> Application:
    """Answer 404 to paths with empty or dot segments, a slash at the end, a backslash or a NUL. The handler
    of a path without parameters is called directly: litestar would search its tree for it."""
    exact = _exact_paths(application)

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        path: bytes = scope.get("raw_path") or b""
        if (handler := exact.get(path)) is not None and scope["type"] == "http":
            await handler(scope, receive, send)
        elif path.endswith(b"/") or _OTHER_SPELLING.search(path) is not None:
            await not_found(send)
        else:
            await application(scope, receive, send)

    return guard


def _exact_paths(application: Litestar) -> dict[bytes, Application]:
    return {
        route.path.encode(): route.route_handler.fn
        for route in application.routes
        if isinstance(route, ASGIRoute) and not route.route_handler.is_mount
    }


def is_spelled(scope: Scope, path: str) -> bool:
    """Whether the request has this path as it stands, perhaps below the path of a mount."""
    raw: bytes = scope.get("raw_path") or b""
    return not raw or raw.endswith(path.encode())


async def not_found(send: Send) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": b"404 page not found\n"})
