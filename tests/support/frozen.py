"""A worker process that is frozen in a batch: `python frozen.py <url>` stops itself while it holds the lock
on relations."""

from __future__ import annotations

import os
import signal
import sys

from towpath import App
from towpath.ledger.postgres.transaction import PostgresTransaction

finish = PostgresTransaction.finish


def freeze(batch: PostgresTransaction) -> None:
    finish(batch)
    if batch.related:
        PostgresTransaction.finish = finish  # type: ignore[method-assign]
        os.write(1, b"frozen\n")
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    with App(sys.argv[1], name="frozen") as app:
        queue = app.queue("mail")
        setattr(PostgresTransaction, "finish", freeze)  # noqa: B010
        queue.put("from the frozen one", key="same")
        os.write(1, b"thawed\n")
