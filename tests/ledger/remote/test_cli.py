"""The command line on the URL of a server, as processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import SHOP, command
from tests.support.shell import Shell


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A directory with an app that takes its URL from the settings."""
    for name in [name for name in os.environ if name.startswith("TOWPATH_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "shop.py").write_text(SHOP.replace('"sqlite:///towpath.db"', ""))
    return Shell(tmp_path)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    there = Shell(tmp_path_factory.mktemp("server"))
    with command(there, "serve", "--listen", "127.0.0.1:0") as server:
        yield server.until("serves").rpartition(" ")[2]
        assert server.end(signal.SIGTERM) == 0


def test_a_worker_far_from_the_ledger(shop: Shell, address: str) -> None:
    """Jobs that another process enqueues over HTTP; no file is created where the worker runs."""
    ids = [
        shop(
            "--url", address, "enqueue", "greet", "--queue", "hall", "--args", f'{{"name": "{name}"}}'
        ).out.strip()
        for name in ("ada", "bob")
    ]
    with command(shop, "--url", address, "worker", "shop:app") as worker:
        assert {worker.until("hello ")[:9] for _ in ids} == {"hello ada", "hello bob"}
        third = shop(
            "--url", address, "enqueue", "greet", "--queue", "hall", "--args", '{"name": "eve"}'
        ).out.strip()
        worker.until("hello eve")
        workers = shop("--url", address, "workers", "list", "--json").out
        assert str(worker.process.pid) in workers
        assert worker.end(signal.SIGTERM) == 0
    for id in (*ids, third):
        assert shop("--url", address, "jobs", "show", id, "--json").json["state"] == "done"
    assert shop("--url", address, "jobs", "list").out.count("done") == 3
    assert shop("--url", address, "queues", "list", "--json").out
    assert [path.name for path in shop.folder.iterdir() if path.name != "__pycache__"] == ["shop.py"]


def test_the_doctor(shop: Shell, address: str) -> None:
    ran = shop("--url", address, "doctor", "--json")
    assert ran.json["ledger"]["state"] == "open"
    assert ran.json["findings"] == []
    assert shop("--url", address, "check").out == "No problems found.\n"


def test_the_doctor_without_a_server(shop: Shell) -> None:
    ran = shop("--url", "http://127.0.0.1:1", "doctor", "--json", code=4)
    assert ran.json["ledger"]["state"] == "unavailable"
    [finding] = ran.json["findings"]
    assert "http://127.0.0.1:1 cannot do it now" in finding["what"]
    assert "towpath serve" in finding["advice"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("backup", "copy.db"),
        ("ledger", "migrate"),
        ("ledger", "vacuum"),
    ],
)
def test_maintenance_is_for_the_machine_of_the_ledger(
    shop: Shell, address: str, arguments: tuple[str, ...]
) -> None:
    ran = shop("--url", address, *arguments, code=2 if arguments[0] == "ledger" else 1)
    assert "towpath serve" in ran.err


def test_the_wrong_kind_of_server(shop: Shell, address: str) -> None:
    ran = shop("--url", f"{address}/x", "jobs", "list", code=4)
    assert "is not a Towpath server" in ran.err
    assert "docs/remote.md" in ran.err
