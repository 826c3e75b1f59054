"""An app for workers in processes of their own: quick jobs that write a byte when they end, and one that
waits for a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from towpath import App

app = App()


@app.task(queue="work")
async def mark(path: str) -> None:
    """Write one byte, in one call."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b".")
    os.close(file)


@app.task(queue="work")
def quick(n: int) -> int:
    return n


@app.task(queue="work", timeout=60)
def wait_for(path: str) -> str:
    Path(path + ".begun").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return path
