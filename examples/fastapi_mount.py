"""FastAPI with the queues of Towpath under `/work`, and a worker in the same process.

Run it with `uvicorn fastapi_mount:api --timeout-graceful-shutdown 10`. Programs in other languages enqueue
and consume messages at `/work/v1/queue/...`; Python programs use the same ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from towpath import App
from towpath.http.mount import MountedServer

jobs = App("sqlite:///jobs.db")
queues = MountedServer(jobs)


@jobs.task(name="resize")
async def resize(picture: str) -> str:
    return f"{picture}-small.webp"


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    async with jobs, queues:
        worker = asyncio.create_task(jobs.arun())
        yield
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


api = FastAPI(lifespan=lifespan)
api.mount("/work", queues)


@api.post("/pictures/{name}")
async def create(name: str) -> dict[str, str]:
    job = await resize.aenqueue(name)
    return {"result": await job.aresult(timeout=10)}


if __name__ == "__main__":
    from fastapi.testclient import TestClient

    with TestClient(api) as client:
        print(client.post("/pictures/cat").json())
        parts = {"meta": (None, b'{"queue": "orders"}'), "payload": (None, b"lamp")}
        sent = client.post("/work/v1/queue/enqueue", files=parts).json()
        print(sent["queue"], "has a message of", sent["payload_bytes"], "bytes")
        [message] = jobs.queue("orders").get_many(1)
        print("received", message.payload)
        message.ack()
        print("ready:", client.get("/work/readyz").status_code)
