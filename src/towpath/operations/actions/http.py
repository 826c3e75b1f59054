"""HTTP requests of plans, over httpx2: without redirects, without proxies of the environment, with bounded
bodies."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from towpath.errors import ActionFailed, ActionRefused, NodeAway, NodeError, NotInstalled
from towpath.flows.actions import Answer, Http
from towpath.operations.actions.common import (
    BoundedOutput,
    Credentials,
    Target,
    time_limit,
)
from towpath.operations.executors import ActionContext

AGAIN = (408, 425, 429)
"""Statuses, beside 5xx, after which another attempt may succeed."""
MAX_TAIL = 500
"""Characters of the body in an error."""


class HttpResult(msgspec.Struct, frozen=True):
    """A response. `cut`: a part of the body was left out."""

    status: int
    body: str
    cut: bool = False


class HttpExecutor:
    """HTTP requests to the node's address."""

    async def run(self, action: Http, node: str, context: ActionContext) -> HttpResult:
        """Send the request. A status that is not in `expect`, by default 2xx, is a failure."""
        target = Target.of(node, context)
        result = await _response(action, target)
        expected = result.status in action.expect if action.expect else 200 <= result.status < 300
        if not expected:
            again = result.status in AGAIN or result.status >= 500
            why = f"{action.method} {action.url}: status {result.status}"
            if tail := result.body.strip()[:MAX_TAIL]:
                why += f": {tail}"
            failure = ActionFailed if again else ActionRefused
            raise failure(node=target.node.name, why=why, status=result.status)
        return result

    async def answer(self, action: Http, node: str, context: ActionContext) -> Answer:
        """202: running, other 2xx: applied, 404 and 410: not applied, others: unknown."""
        status = (await _response(action, Target.of(node, context))).status
        if status == 202:
            return Answer.RUNNING
        if 200 <= status < 300:
            return Answer.APPLIED
        return Answer.NOT_APPLIED if status in (404, 410) else Answer.UNKNOWN


def _url(action: Http, target: Target) -> tuple[str, bool]:
    """The URL, and whether it is of the node's own origin: only there the credentials are sent."""
    wanted = urlsplit(action.url)
    if not wanted.scheme and not wanted.netloc:
        return target.address().rstrip("/") + "/" + action.url.lstrip("/"), True
    base = urlsplit(target.node.address or "")
    own = (wanted.scheme, wanted.hostname, wanted.port) == (base.scheme, base.hostname, base.port)
    if target.node.address is not None and not own:
        raise ActionRefused(node=target.node.name, why=f"{action.url} is not below the address of the node")
    return action.url, own


async def _response(action: Http, target: Target) -> HttpResult:
    httpx2 = _httpx2()
    credentials = Credentials.of(target.node)
    url, own = _url(action, target)
    headers = dict(action.headers)
    auth = None
    if own and credentials.token is not None:
        headers["Authorization"] = f"Bearer {credentials.token}"
    elif own and credentials.password is not None:
        auth = httpx2.BasicAuth(urlsplit(target.address()).username or "", credentials.password)
    timeout = httpx2.Timeout(None, connect=target.node.connect_timeout)
    body = BoundedOutput(target.node.max_output)
    try:
        async with (
            time_limit(target.seconds),
            httpx2.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=False) as client,
            client.stream(action.method, url, headers=headers, content=action.body, auth=auth) as response,
        ):
            async for piece in response.aiter_bytes():
                body.add(piece)
                if body.cut:
                    break
            status = response.status_code
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise _translated(error, target, credentials) from None
    return HttpResult(status, body.text(credentials), body.cut)


def _httpx2() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise NotInstalled(package="httpx2", why=str(error), extra="client") from None
    return httpx2


def _translated(error: Exception, target: Target, credentials: Credentials) -> NodeError:
    httpx2 = _httpx2()
    why = credentials.why(error)
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL | httpx2.LocalProtocolError):
        return ActionRefused(node=target.node.name, why=why)
    unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
    return NodeAway(node=target.node.name, why=f"{type(error).__name__}: {why}", sent=not unsent)
