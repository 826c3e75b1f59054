"""HTTP requests of plans to a real server on loopback: statuses, lost replies, hangs, bounds, secrets."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.actions import action_context
from tests.support.waiting import auntil
from towpath.errors import ActionFailed, ActionRefused, NodeAway, TimedOut
from towpath.flows.actions import Answer, Http
from towpath.operations.actions.http import HttpExecutor, HttpResult

executor = HttpExecutor()


class Handler(BaseHTTPRequestHandler):
    """`/status/N` answers N, `/echo` the headers and the body, `/hang` nothing, `/lost` closes after the
    request, `/endless` a body without an end, `/away` redirects."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        server: Any = self.server
        server.requests.append((self.command, self.path, dict(self.headers), body))
        _, what, *rest = self.path.split("/")
        if what == "status":
            self._answer(int(rest[0]), b"the text of " + rest[0].encode())
        elif what == "echo":
            self._answer(200, self.headers.get("Authorization", "none").encode() + b" " + body)
        elif what == "away":
            self._answer(302, b"", location="http://127.0.0.1:1/")
        elif what == "hang":
            server.released.wait(60)
        elif what == "endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * 65_536)
            except OSError:
                server.refused.set()
        self.close_connection = what in ("lost", "hang", "endless")

    do_POST = do_DELETE = do_PUT = do_GET  # noqa: N815

    def _answer(self, status: int, body: bytes, location: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.released, self.refused = threading.Event(), threading.Event()
        self.address = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def run(web: WebServer, action: Http, **more: Any) -> HttpResult:
    given = {"address": web.address, **more}
    return asyncio.run(executor.run(action, "api", action_context("api", **given)))


def test_a_request_below_the_address(web: WebServer) -> None:
    action = Http("post", "/echo?a=1", headers={"X-Trace": "7"}, body='{"n": 1}')
    assert run(web, action, address=f"{web.address}/echo/") == HttpResult(200, 'none {"n": 1}')
    [(method, path, headers, body)] = web.requests
    assert (method, path, headers["X-Trace"], body) == ("POST", "/echo/echo?a=1", "7", b'{"n": 1}')


@pytest.mark.parametrize("status", [200, 201, 204])
def test_statuses_of_success(web: WebServer, status: int) -> None:
    assert run(web, Http("GET", f"/status/{status}")).status == status


def test_expected_statuses_replace_the_default(web: WebServer) -> None:
    assert run(web, Http("DELETE", "/status/404", expect=(200, 404))).status == 404
    with pytest.raises(ActionRefused, match="status 201"):
        run(web, Http("PUT", "/status/201", expect=(200,)))


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_statuses_that_are_retried(web: WebServer, status: int) -> None:
    with pytest.raises(ActionFailed, match=f"node api: GET /status/{status}: status {status}: the text of"):
        run(web, Http("GET", f"/status/{status}"))


@pytest.mark.parametrize("path", ["/status/400", "/status/403", "/status/404", "/away"])
def test_statuses_that_are_final(web: WebServer, path: str) -> None:
    with pytest.raises(ActionRefused):
        run(web, Http("GET", path))
    assert len(web.requests) == 1  # a redirect is not followed


def test_a_lost_reply_is_an_unknown_effect(web: WebServer) -> None:
    with pytest.raises(NodeAway) as caught:
        run(web, Http("POST", "/lost"))
    assert caught.value.sent
    assert len(web.requests) == 1  # not sent again by the executor


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(NodeAway) as caught:
        asyncio.run(
            executor.run(Http("GET", "/"), "api", action_context("api", address="http://127.0.0.1:1"))
        )
    assert not caught.value.sent


def test_a_server_that_hangs(web: WebServer) -> None:
    with pytest.raises(TimedOut):
        run(web, Http("GET", "/hang"), step_timeout=0.3)


def test_a_cancellation_closes_the_connection(web: WebServer) -> None:
    async def canceled() -> None:
        context = action_context("api", address=web.address)
        task = asyncio.create_task(executor.run(Http("GET", "/hang"), "api", context))
        await auntil(lambda: web.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(canceled())


def test_a_body_without_an_end_is_bounded(web: WebServer) -> None:
    result = run(web, Http("GET", "/endless"), max_output=1000)
    assert result.cut
    assert len(result.body) < 1100
    assert web.refused.wait(60)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, Answer.APPLIED),
        (204, Answer.APPLIED),
        (202, Answer.RUNNING),
        (404, Answer.NOT_APPLIED),
        (410, Answer.NOT_APPLIED),
        (403, Answer.UNKNOWN),
        (500, Answer.UNKNOWN),
    ],
)
def test_the_answer_is_the_status(web: WebServer, status: int, expected: Answer) -> None:
    context = action_context("api", address=web.address)
    assert asyncio.run(executor.answer(Http("GET", f"/status/{status}"), "api", context)) is expected


def test_credentials_go_to_the_address_of_the_node_only(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "geheim-5")
    result = run(web, Http("GET", "/echo"), token_env="API_TOKEN")
    assert web.requests[0][2]["Authorization"] == "Bearer geheim-5"
    assert result.body == "Bearer *** "
    with pytest.raises(ActionRefused, match="not below the address") as caught:
        run(web, Http("GET", f"{web.address}/echo"), address="http://127.0.0.1:1", token_env="API_TOKEN")
    assert "geheim" not in str(caught.value)
    assert run(web, Http("GET", f"{web.address}/echo"), token_env="API_TOKEN").body == "Bearer *** "
    # Without an address there is no origin that the credentials belong to.
    context = action_context("api", token_env="API_TOKEN")
    plain = asyncio.run(executor.run(Http("GET", f"{web.address}/echo"), "api", context))
    assert plain.body == "none "


def test_a_password_is_that_of_the_user_in_the_address(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_PASSWORD", "geheim-6")
    address = web.address.replace("//", "//ada@")
    run(web, Http("GET", "/echo"), address=address, password_env="API_PASSWORD")
    scheme, _, value = web.requests[0][2]["Authorization"].partition(" ")
    assert (scheme, base64.b64decode(value)) == ("Basic", b"ada:geheim-6")


def test_proxies_of_the_environment_are_not_used(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert run(web, Http("GET", "/status/200")).status == 200
