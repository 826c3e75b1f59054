"""Two lanes in one worker, and an adaptive limit for a service that accepts 5 calls at once.

    python examples/lanes.py

Large copies go to the lane `bulk`, everything else to `interactive`; each has reserved slots. `interactive`
keeps its free slots, so that a small copy never waits for a large one; `bulk` lends free slots. Calls to the
service have their own queue, and the worker finds out how many calls the service accepts at once."""

from __future__ import annotations

import threading
import time

from towpath import App, Lane, Throttled
from towpath.events import JobStarted, LimitChanged

app = App("memory://")
app.resource("shop-api", max=32)
TEN_MEGABYTES = 10_000_000


def by_size(name: str, size: int = 0) -> str:
    return "bulk" if size >= TEN_MEGABYTES else "interactive"


@app.task(route=by_size)
def copy(name: str, size: int = 0) -> None:
    time.sleep(size / TEN_MEGABYTES / 50)


class Shop:
    """A service that rejects more than five calls at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def ask(self) -> None:
        with self._lock:
            if self._inside == 5:
                raise Throttled("429 Too Many Requests")
            self._inside += 1
        time.sleep(0.01)
        with self._lock:
            self._inside -= 1


shop = Shop()


@app.task(queue="shop", resource="shop-api", backoff=0, max_attempts=100)
def price(item: int) -> None:
    shop.ask()


LANES = {
    "interactive": Lane(queues=("interactive", "shop"), reserved=8),
    "bulk": Lane(queues=("bulk",), reserved=2, lends=True, ageing=300),
}

if __name__ == "__main__":
    started: list[str] = []
    limits: list[int] = []
    app.bus.subscribe(JobStarted, lambda event: started.append(event.queue))
    app.bus.subscribe(LimitChanged, lambda event: limits.append(event.limit))
    with app:
        copy.enqueue_many([copy.of(f"film {n}", size=TEN_MEGABYTES) for n in range(100)])
        copy.enqueue_many([copy.of(f"note {n}") for n in range(20)])
        price.enqueue_many([price.of(n) for n in range(300)])
        app.run(lanes=LANES, concurrency=16, burst=True)
        films, prices = (app.queue(name).stats().counts.done for name in ("bulk", "shop"))
    notes = [n for n, queue in enumerate(started) if queue == "interactive"]
    print(f"{films} films copied; the last of 20 notes was start number {notes[-1] + 1} of {len(started)}")
    print(f"{prices} prices fetched; limits that were tried: {limits}")
