"""FastAPI with a worker in the same process: the API enqueues jobs and reads their results.

Run it with `uvicorn fastapi_app:api`. For a worker in a process of its own, remove it from `lifespan` and run
`towpath worker fastapi_app:jobs`: the hooks are the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

from towpath import App, Hooks, Running, provided
from towpath.errors import UnknownJob

hooks = Hooks()
jobs = App("sqlite:///jobs.db", hooks=hooks)


class Rates:
    """A client of another service; in a real program for instance an httpx.AsyncClient."""

    async def rate(self, currency: str) -> float:
        await asyncio.sleep(0)
        return {"EUR": 1.0, "CHF": 0.94}[currency]

    async def close(self) -> None:
        print("client closed")


@hooks.lifespan
async def rates() -> AsyncIterator[Rates]:
    """One client per worker. A process that only enqueues opens none."""
    rates = Rates()
    yield rates
    await rates.close()


@hooks.middleware
async def log_attempt(job: Running) -> AsyncIterator[None]:
    print("attempt", job.attempt, "at", job.kind)
    yield


@jobs.task(name="convert")
async def convert(amount: float, currency: str, rates: Rates = provided) -> float:
    return round(amount * await rates.rate(currency), 2)


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    async with jobs:
        worker = asyncio.create_task(jobs.arun())
        yield
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


api = FastAPI(lifespan=lifespan)


@api.post("/conversions", status_code=202)
async def create(amount: float, currency: str) -> dict[str, str]:
    job = await convert.aenqueue(amount, currency)
    return {"id": job.id}


@api.get("/conversions/{id}")
async def read(id: str) -> dict[str, float]:
    try:
        return {"result": await jobs.job(id).aresult(timeout=10)}
    except UnknownJob as error:
        raise HTTPException(404, str(error)) from error


if __name__ == "__main__":
    from fastapi.testclient import TestClient

    with TestClient(api) as client:
        answer = client.post("/conversions", params={"amount": 250, "currency": "CHF"})
        print(answer.status_code, list(answer.json()))
        print(client.get(f"/conversions/{answer.json()['id']}").json())
        print(client.get("/conversions/unknown").status_code)
