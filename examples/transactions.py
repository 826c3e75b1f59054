"""Orders and their jobs in one transaction: when a job is enqueued, and when it is done."""

from __future__ import annotations

from typing import Any

import apsw

from towpath import App, current

app = App("sqlite:///shop.db")  # or postgresql://..., with a psycopg connection and %s for ?


@app.task
def ship(order: int) -> None:
    label = f"label-{order}"  # in a real program: the work

    def write(connection: Any) -> None:
        connection.execute("UPDATE orders SET label = ? WHERE id = ?", (label, order))

    current().commit(write)


def take_order(database: apsw.Connection, number: int, *, paid: bool) -> None:
    with database:
        database.execute("INSERT INTO orders (id) VALUES (?)", (number,))
        ship.options(on=database).enqueue(number)
        if not paid:
            raise ValueError(f"order {number} is not paid")


if __name__ == "__main__":
    with app:
        print("jobs before:", len(app.ledger.queues()))
        database = apsw.Connection("shop.db")
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, label TEXT)")
        take_order(database, 17, paid=True)
        try:
            take_order(database, 18, paid=False)
        except ValueError as error:
            print(error)
        print("waiting:", app.queue("default").stats().counts.ready)
        app.run(burst=True)
        for order in database.execute("SELECT id, label FROM orders"):
            print(order)
        database.close()
