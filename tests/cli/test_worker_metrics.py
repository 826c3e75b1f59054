"""worker --metrics: a real worker, scraped over a real socket, and its errors."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.processes import SHOP, command, greet
from tests.support.shell import Shell

INSTALLS = SHOP + "\nfrom towpath.observe.metrics import install\ninstall(app.bus, app.ledger)\n"


@contextmanager
def taken(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that another server uses."""
    with socket.create_server((host, 0)) as other:
        yield other.getsockname()[1]


def free(count: int) -> int:
    """The first of so many ports in a row that are free now."""
    for _ in range(100):
        with ExitStack() as stack:
            first = stack.enter_context(taken())
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return first
    raise AssertionError("no ports in a row are free")


def scraped(url: str, words: str) -> str:
    """The metrics once they contain this text: a job is counted after its commit, not with it."""
    for _ in range(2000):
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            text: str = answer.read().decode()
        if words in text:
            return text
    raise AssertionError(f"{words} never came: {text}")


def test_a_worker_answers_prometheus(shop: Shell) -> None:
    greet(shop, "ada")
    shop("enqueue", "greet", "--queue", "attic", "--args", '{"name": "eve"}')
    with command(shop, "worker", "shop:app", "--metrics", "0") as worker:
        url = worker.until("Metrics: ").split()[1]
        assert url.startswith("http://127.0.0.1:")
        text = scraped(url, 'towpath_jobs_done_total{kind="greet"} 1.0')
        assert 'towpath_queue_depth{queue="attic",state="ready"} 1.0' in text
        assert 'towpath_dequeue_latency_seconds_count{queue="hall"} 1.0' in text
        assert "towpath_ledger_up 1.0" in text
        assert "python_info" in text, "the default registry: what the program counts is there too"
        assert worker.end() == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_each_process_has_its_own_port(shop: Shell) -> None:
    first = free(2)
    with command(shop, "worker", "shop:app", "--processes", "2", "--metrics", str(first)) as worker:
        urls = {worker.until("Metrics: ").split()[1] for _ in range(2)}
        assert urls == {f"http://127.0.0.1:{port}/metrics" for port in (first, first + 1)}
        for url in urls:
            scraped(url, "towpath_ledger_up 1.0")


def test_several_processes_on_free_ports(shop: Shell) -> None:
    options = ("--processes", "2", "--metrics", "0", "--metrics-host", "localhost")
    with command(shop, "worker", "shop:app", *options) as worker:
        urls = {worker.until("Metrics: ").split()[1] for _ in range(2)}
        assert len(urls) == 2
        assert all(url.startswith("http://localhost:") for url in urls)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_port_that_is_taken(shop: Shell, processes: int) -> None:
    for _ in range(10):
        with taken() as port:
            # With two processes, the port of the second. The first port may be in use by a connection of
            # another test.
            given = ("--processes", str(processes), "--metrics", str(port - processes + 1))
            ran = shop.run("worker", "shop:app", *given, code=1)
        if processes == 1 or f"port {port - 1}: Address already in use" not in ran.err:
            break
    assert f"Error: Metrics cannot be served at 127.0.0.1, port {port}: Address already in use." in ran.err
    assert "Use another port" in ran.err
    assert "Worker " not in ran.err


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--metrics", "70000"], 2, "--metrics"),
        (["--metrics", "http"], 2, "--metrics"),
        (["--metrics-host", "0.0.0.0"], 2, "--metrics-host needs --metrics PORT"),
        (["--metrics", "0", "--metrics-host", "no..where"], 2, "there is no host 'no..where'"),
        (["--metrics", "0", "--metrics-host", "192.0.2.1"], 1, "Cannot assign requested address"),
    ],
)
def test_invalid_addresses_are_refused(
    shop: Shell, options: list[str], processes: str, code: int, message: str
) -> None:
    ran = shop.run("worker", "shop:app", *options, "--processes", processes, code=code)
    assert message in ran.err
    assert "Worker " not in ran.err


def test_ports_that_do_not_exist(shop: Shell) -> None:
    ran = shop.run("worker", "shop:app", "--metrics", "65535", "--processes", "3", code=2)
    assert "3 processes need the ports 65535 to 65537" in ran.err


def test_a_program_that_has_metrics_already(shop: Shell) -> None:
    (shop.folder / "shop.py").write_text(INSTALLS)
    ran = shop.run("worker", "shop:app", "--metrics", "0", code=2)
    assert "has already installed towpath.observe.metrics" in ran.err


def test_without_the_library(shop: Shell) -> None:
    (shop.folder / "shop.py").write_text("import sys\nsys.modules['prometheus_client'] = None\n" + SHOP)
    for processes in ("1", "2"):
        ran = shop.run("worker", "shop:app", "--metrics", "0", "--processes", processes, code=1)
        assert "pip install 'towpath[metrics]'" in ran.err
