"""Messages by hand: put, get, and one word about each. No tasks, no worker."""

from towpath import App

with App("sqlite:///messages.db") as app:
    orders = app.queue("orders")
    orders.put({"id": 1, "item": "rope"})
    orders.put({"id": 2, "item": "lamp"}, priority="high")

    # The lamp is first. Leaving the block without a word would be a nack.
    for message in orders.get_many(1, wait=5):
        with message:
            print("attempt", message.attempt, "at", message.json()["item"])
            message.ack()

    # An error gives the message back, and the next holder sees why.
    try:
        for message in orders.get_many(1, wait=5):
            with message:
                message.state.save({"packed": True})
                raise RuntimeError("no stock")
    except RuntimeError:
        print("given back")

    # `for message in orders.subscribe()` waits for ever; this takes what is there.
    for message in orders.get_many(10, wait=5):
        print("attempt", message.attempt, "at", message.json()["item"], "after", message.job.error)
        print("state:", message.state.value)
        message.ack()

    print("left:", app.ledger.queues()["orders"].counts.waiting)
