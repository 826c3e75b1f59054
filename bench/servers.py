"""The other processes of bench/server.py. Each runs until its stdin ends.

python bench/servers.py echo        print the port of a bare litestar route that returns the request's body
python bench/servers.py serve URL   print the port of a Towpath server; same uvicorn, loop and protocol class
python bench/servers.py work URL    print 0; for each number on stdin complete so many jobs, print jobs/s
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from litestar import Litestar, MediaType, Request, Response, post
from workload import BenchApp

from towpath import App
from towpath.http.options import ServerOptions
from towpath.http.rates import PeerConnections
from towpath.http.server import HttpServer, LimitedProtocol, ServerConfig

HOST = "127.0.0.1"
MAX_CONSUMERS = 4_000


class AnnouncedServer(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


@post("/echo", status_code=200)
async def answer(request: Request[Any, Any, Any]) -> Response[bytes]:
    return Response(await request.body(), media_type=MediaType.TEXT)


def echo() -> None:
    config = ServerConfig(
        Litestar([answer], openapi_config=None, logging_config=None),
        host=HOST,
        port=0,
        http=LimitedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    config.options = ServerOptions()
    config.peers = PeerConnections(None)
    server = AnnouncedServer(config)
    _until_stdin_ends(lambda: setattr(server, "should_exit", True))
    server.run()


def serve(url: str) -> None:
    with App(url) as app:
        options = ServerOptions(listen=f"{HOST}:0", max_consumers=MAX_CONSUMERS, drain_grace=0.0)
        server = HttpServer(app, options)
        _until_stdin_ends(server.stop)
        server.run(lambda: print(server.address.rpartition(":")[2], flush=True))


def work(url: str) -> None:
    with BenchApp(url) as ours:
        print(0, flush=True)
        for line in sys.stdin:
            print(ours.complete(int(line), ours.noop), flush=True)


def _until_stdin_ends(stop: Callable[[], None]) -> None:
    def wait() -> None:
        sys.stdin.read()
        stop()

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {"echo": echo, "serve": serve, "work": work}
    programs[sys.argv[1]](*sys.argv[2:])
