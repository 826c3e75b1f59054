"""A consumer of messages over HTTP. Here it starts its own server; give it the address of yours instead."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from towpath.http.client import QueueClient, ReceivedMessage

packed: list[str] = []


def pack(message: ReceivedMessage) -> None:
    """Returning acknowledges the message; an exception returns it to the queue, as `nack` does. Its lease is
    extended meanwhile."""
    order = message.json()
    if order["item"] == "rope" and message.attempts == 1:
        message.nack(reason="no stock")
        return
    if message.attempts > 1:
        print("attempt", message.attempts, "of", order["item"])
    print("packed", order["item"])
    packed.append(order["item"])
    if len(packed) == 3:
        consumer.stop()


@contextmanager
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "towpath", "serve", "--store", "memory://", "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--json", "--quiet"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


if __name__ == "__main__":
    with server() as address, QueueClient(address) as client:
        for item in ("lamp", "rope", "sail"):
            client.enqueue("orders", json.dumps({"item": item}), content_type="application/json")
        print("stored 3 orders")
        consumer = client.consumer("orders", pack, concurrency=2)
        consumer.run()
        print("left:", client.stats("orders").available)
