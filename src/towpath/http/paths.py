"""One spelling for each path. litestar serves `//v1/x`, `/v1/x/` and `/v1%2fx` as `/v1/x`; a proxy with rules
for paths sees other paths there, so that they would pass its rules."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from towpath.http.exchange import Receive, Scope, Send

Application = Callable[[Any, Any, Any], Awaitable[None]]
_OTHER_SPELLING = re.compile(rb"//|/\.{1,2}(?:/|\Z)|%00|\\")
_ENCODED = re.compile(rb"%(?:2e|2f|5c)", re.IGNORECASE)
_HEADERS = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"19")]


def canonical_only(application: Application, prefixes: Sequence[str]) -> Application:
    """Answer 404 to paths with empty or dot segments, a slash at the end, an encoded NUL, or an encoded
    slash, backslash or dot. Behind the `prefixes` these characters are part of a parameter: the name of a
    queue may contain a slash."""
    parameters = re.compile(b"(?:%s)/.*" % b"|".join(re.escape(prefix.encode()) for prefix in prefixes))

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        path: bytes = scope.get("raw_path") or b""
        if (
            path.endswith(b"/")
            or _OTHER_SPELLING.search(path) is not None
            or (b"%" in path and _ENCODED.search(parameters.sub(b"", path)) is not None)
        ):
            await send({"type": "http.response.start", "status": 404, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": b"404 page not found\n"})
        else:
            await application(scope, receive, send)

    return guard
