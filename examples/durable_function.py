"""A durable function: each step runs once, a retry goes on after the last one, and a failure undoes them."""

from __future__ import annotations

import towpath
from towpath import App, step

app = App("memory://")
weather = {"stormy": True}


def book_hotel(city: str) -> int:
    print(f"booked a hotel in {city}")
    return 17


def book_flight(city: str) -> int:
    if weather["stormy"]:
        raise ConnectionError("no flights today")
    print(f"booked a flight to {city}")
    return 42


@app.task
def cancel_hotel(city: str) -> None:
    print(f"canceled the hotel in {city}")


@app.task
def cancel_flight(city: str) -> None:
    print(f"canceled the flight to {city}")


@app.task(max_attempts=2, backoff=[3600])
def book(city: str) -> dict[str, int]:
    # The undo is stored before the function is called. The result is stored when it has returned.
    hotel = step(book_hotel, city, undo=cancel_hotel.of(city))
    flight = step(book_flight, city, undo=cancel_flight.of(city))
    return {"attempt": towpath.current().attempt, "hotel": hotel, "flight": flight}


if __name__ == "__main__":
    with app.testing() as bench:
        trip = book.enqueue("Oslo")
        bench.drain()
        weather["stormy"] = False
        bench.advance(3600)
        print(trip.result())

        weather["stormy"] = True
        trip = book.enqueue("Rome")
        bench.drain()
        bench.advance(3600)
        print("trip to Rome:", trip.status().state)
        (plan,) = app.plans.list(prefix=f"saga-{trip.id}")
        print(plan.state, plan.why)
