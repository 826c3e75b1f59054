"""Every example runs unchanged, in a process and a directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

OUTPUT = {
    "quickstart.py": ["ready, first in queue mail", "sent 'Hello' to ada@example.com"],
    "messages.py": [
        "attempt 1 at lamp",
        "returned to the queue",
        "attempt 2 at rope after RuntimeError: no stock",
        "{'packed': True}",
        "left: 0",
    ],
    "retries.py": [
        "example.com after 3 attempts",
        "busy: failed exhausted, 2 attempts, 2 failures",
        "night: scheduled snoozed",
        "stolen: failed fatal, 1 attempts",
        "withdrawn: canceled handler",
        "revived: ready",
    ],
    "progress.py": [
        "8 waiting",
        "progress.download: 8 done, 8,000,000 bytes",
        "8,000,000 bytes passed the limit",
    ],
    "durable_function.py": [
        "booked a hotel in Oslo\nbooked a flight to Oslo\n{'attempt': 2, 'hotel': 17, 'flight': 42}",
        "canceled the flight to Rome\ncanceled the hotel in Rome",
        "trip to Rome: failed",
        "rolled_back job",
    ],
    "dag.py": ["waits for 1 job", "counts: [5, 3, 1]", "The towpath: 9 words"],
    "plan.py": [
        "└─ page on laptop\n   ↓ index on laptop also after notes",
        "first: rolled_back, files: []",
        "index failed: Fail: there is no folder site",
        "second: done, files: ['index.html', 'notes.txt', 'page.html']",
    ],
    "breaker.py": [
        "5 calls, then open",
        "breaker platform-x is open until",
        "8 calls after 90 s",
        "closed: 100 done, the last was 990",
        "attempts of a job that waited: 1",
    ],
    "lanes.py": [
        "100 films copied; the last of 20 notes",
        "300 prices fetched; limits that were tried: [4, 5,",
    ],
    "transactions.py": ["jobs before: 0", "order 18 is not paid", "waiting: 1", "(17, 'label-17')"],
    "sqlalchemy_session.py": [
        "import: the price of chair is -1; 2 products are stored",
        "engine closed\nengine closed",
        "total: 42",
    ],
    "fastapi_app.py": ["202 ['id']", "attempt 1 at convert", "{'result': 235.0}", "404", "client closed"],
    "fastapi_mount.py": [
        "{'result': 'cat-small.webp'}",
        "orders has a message of 4 bytes",
        "received b'lamp'",
        "ready: 200",
    ],
    "litestar_mount.py": ["{'result': 'hello ada'}", "orders has a message of 4 bytes", "head: True"],
    "http_consumer.py": [
        "stored 3 orders",
        "attempt 2 of rope",
        "packed lamp",
        "packed rope",
        "packed sail",
        "left: False",
    ],
    "cron_in_tests.py": ["a month of cron_in_tests.nightly, cron_in_tests.sweep has passed"],
}


def test_every_example_is_run() -> None:
    assert sorted(OUTPUT) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", OUTPUT)
def test_example(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(EXAMPLES / name)]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    for words in OUTPUT[name]:
        assert words in ended.stdout
