"""docs/api.md: its tables are those of the server, and each example of each endpoint answers as it states."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.api_reference import PATH, routes, with_tables
from tests.support.wire import Remote, serving
from towpath import App
from towpath.core.breaker import Breaker
from towpath.core.fleet import LaneView
from towpath.core.job import Spec
from towpath.core.schedule import Schedule
from towpath.operations.schedules import register
from towpath.operations.workers import Registration

PAGE = PATH.read_text("utf-8")
ADDRESS = "http://127.0.0.1:9341"
SECTIONS: dict[str, str] = dict(
    re.findall(r"^### `([A-Z]+ /[^`]*)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
)


def test_the_tables_are_those_of_the_server() -> None:
    assert with_tables(PAGE) == PAGE, "run `make reference`"


def test_every_endpoint_has_a_section() -> None:
    assert sorted(SECTIONS) == sorted(f"{route.method} {route.path}" for route in routes())


@pytest.fixture(scope="module")
def documented() -> Iterator[Remote]:
    """A server with the names of the examples."""
    with App("memory://") as app, serving(app) as remote:
        engine = app.engine
        every = Schedule(name="daily", cron="0 3 * * *", spec=Spec(id="x", queue="reports", kind="report"))
        register(engine, every)
        place = ("mail", "breaker:mail")
        engine.components.breakers.declare(Breaker("mail"), [place], engine.clock.now())
        worker = Registration(engine, "box-1#1")
        worker.register()
        lane = LaneView(name="fast", queues=("orders",), reserved=1, running=0)
        report: dict[str, Any] = {"queues": ("orders",), "concurrency": 4, "running": 0, "draining": False}
        worker.report(**report, lanes=(lane,), limits=())
        yield remote


def variables(remote: Remote, section: str) -> dict[str, str]:
    """The variables of an example: those of a delivery or of a lease."""
    if "$MESSAGE" in section:
        remote.enqueue("orders")
        taken = remote.take("orders")
        names = {"MESSAGE": "message_id", "LEASE": "lease_id", "TOKEN": "fencing_token", "ETAG": "meta_etag"}
        return {name: str(taken[field]) for name, field in names.items()}
    if "$TOKEN" in section:
        lease = remote.call("acquire", key="accounts", owner="me", ttl_seconds=60, block_seconds=60).json
        found = {"LEASE": lease["lease_id"], "TXN": lease["txn_id"], "TOKEN": str(lease["fencing_token"])}
        headers = {f"X-{name}": found[key] for name, key in _HEADERS}
        assert remote.post("/v1/update?key=accounts", b"{}", headers).status == 200
        return found
    if "queue/dequeue" in section or "queue/subscribe" in section:
        remote.enqueue("orders")
    return {}


_HEADERS = (("Lease-ID", "LEASE"), ("Txn-ID", "TXN"), ("Fencing-Token", "TOKEN"))


def released(remote: Remote, found: dict[str, str]) -> None:
    """End the lease of an example, unless it has done so."""
    if "TXN" in found:
        body = b'{"key":"accounts","lease_id":"%b","txn_id":"%b"}' % (
            found["LEASE"].encode(),
            found["TXN"].encode(),
        )
        remote.post("/v1/release", body, {"X-Fencing-Token": found["TOKEN"]})


def test_the_examples(documented: Remote) -> None:
    """In the order of the page, because an example may use the job of another one."""
    for name, section in SECTIONS.items():
        [(command, status)] = re.findall(r"^\$ (curl .*)\n(\d{3})$", section, re.MULTILINE)
        found = variables(documented, section)
        command = command.replace(ADDRESS, documented.address).replace("--max-time 1", "--max-time 0.4")
        method, path = name.split(" ")
        assert re.search(re.sub(r"\{\w+\}", r"[^/'?]+", path), command), name
        ended = subprocess.run(
            ["bash", "-c", command.replace("curl ", "curl -sS -o /dev/null -w '%{http_code} %{method}' ", 1)],
            env={**os.environ, **found},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        is_endless = ended.returncode == 28 and "--max-time" in command
        assert ended.returncode == 0 or is_endless, (name, ended.stderr)
        assert ended.stdout == f"{status} {method}", (name, ended)
        released(documented, found)
