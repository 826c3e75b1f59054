"""Tasks of `towpath demo`, written as in any program. The demonstration sets the URL and enqueues the
jobs."""

from __future__ import annotations

import asyncio

from towpath import App, current

app = App()


@app.task(name="send", queue="mail")
async def send(to: str) -> str:
    return f"sent to {to}"


@app.task(name="remind", queue="reminders")
def remind(whom: str) -> str:
    return f"{whom} remembers"


@app.task(name="call", queue="calls", backoff=0.2)
def call(number: str) -> str:
    """Fails twice, then succeeds."""
    if current().attempt < 3:
        raise ConnectionError(f"{number} does not answer")
    return "hello"


@app.task(name="fax", queue="faxes", max_attempts=2, backoff=0.2)
def fax(number: str) -> str:
    """Fails twice and becomes a dead letter. It succeeds when it is retried by hand."""
    if current().attempt <= 2:
        raise OSError(f"no line to {number}")
    return "received"


@app.task(name="read", queue="graph")
async def read() -> list[str]:
    return ["to the lock and back", "along the canal", "home"]


@app.task(name="count", queue="graph")
async def count(page: int) -> int:
    [pages] = current().results()
    return len(pages[page].split())


@app.task(name="total", queue="graph")
async def total() -> int:
    return sum(current().results())


@app.task(name="ferry", queue="ferries")
async def ferry(passenger: int) -> int:
    """The first attempt runs until its worker is killed; the second returns at once."""
    if current().attempt == 1:
        await asyncio.sleep(3600)
    return passenger
