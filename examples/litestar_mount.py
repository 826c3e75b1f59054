"""Litestar with the queues of Towpath under `/work`, and a worker in the same process.

Run it with `uvicorn litestar_mount:web --timeout-graceful-shutdown 10`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar, post
from litestar.handlers import asgi
from litestar.params import FromPath

from towpath import App
from towpath.http.mount import MountedServer

jobs = App("sqlite:///jobs.db")
queues = MountedServer(jobs)


@jobs.task(name="greet")
async def greet(name: str) -> str:
    return f"hello {name}"


@post("/greetings/{name:str}")
async def create(name: FromPath[str]) -> dict[str, str]:
    job = await greet.aenqueue(name)
    return {"result": await job.aresult(timeout=10)}


@asynccontextmanager
async def lifespan(web: Litestar) -> AsyncIterator[None]:
    async with jobs, queues:
        worker = asyncio.create_task(jobs.arun())
        yield
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


mounted = asgi("/work", is_mount=True, copy_scope=False)(queues)
web = Litestar([create, mounted], lifespan=[lifespan], logging_config=None)

if __name__ == "__main__":
    from litestar.testing import TestClient

    with TestClient(web) as client:
        print(client.post("/greetings/ada").json())
        parts = {"meta": (None, b'{"queue": "orders"}'), "payload": (None, b"lamp")}
        sent = client.post("/work/v1/queue/enqueue", files=parts).json()
        print(sent["queue"], "has a message of", sent["payload_bytes"], "bytes")
        found = client.post("/work/v1/queue/stats", json={"queue": "orders"}).json()
        print("head:", found["head_message_id"] == sent["message_id"])
