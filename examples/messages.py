"""Messages by hand: put, get, then ack or nack each. No tasks, no worker."""

from towpath import App

with App("sqlite:///messages.db") as app:
    orders = app.queue("orders")
    orders.put({"id": 1, "item": "rope"})
    orders.put({"id": 2, "item": "lamp"}, priority="high")

    # The lamp has a higher priority. Leaving the block without ack would be a nack.
    for message in orders.get_many(1, wait=5):
        with message:
            print("attempt", message.attempt, "at", message.json()["item"])
            message.ack()

    # An exception returns the message to the queue; the next consumer sees the error.
    try:
        for message in orders.get_many(1, wait=5):
            with message:
                message.state.save({"packed": True})
                raise RuntimeError("no stock")
    except RuntimeError:
        print("returned to the queue")

    # `for message in orders.subscribe()` waits for ever; `get_many` returns the available messages.
    for message in orders.get_many(10, wait=5):
        print("attempt", message.attempt, "at", message.json()["item"], "after", message.job.error)
        print("state:", message.state.value)
        message.ack()

    print("left:", app.ledger.queues()["orders"].counts.waiting)
