"""The command `towpath serve`, as a process."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
from typing import Any

import pytest

from tests.support.processes import command
from tests.support.shell import Shell
from tests.support.wire import Wire, receipt


def test_the_command_that_it_prints_works(shell: Shell) -> None:
    with command(shell, "serve", "--listen", "127.0.0.1:0") as server:
        first = server.until("serves")
        assert f"serves {shell.url} at http://127.0.0.1:" in first
        curl = server.until("curl").partition(": ")[2]
        server.until("docs/server.md")
        ran = subprocess.run(["bash", "-c", f"{curl} -s"], capture_output=True, text=True, check=True)
        sent = json.loads(ran.stdout)
        assert sent["payload_bytes"] == 5
        message = _taken(first.rpartition(" ")[2])
        assert message["message_id"] == sent["message_id"]
        server.end(signal.SIGKILL)
    # The lease of the message belongs to its consumer. The death of the server does not end it.
    with command(shell, "serve", "--listen", "127.0.0.1:0") as server:
        address = server.until("serves").rpartition(" ")[2]
        with Wire(address) as wire:
            wire.request("/v1/queue/ack", json.dumps(receipt(message)).encode())
            assert wire.answer().json["acked"] is True
        assert server.end(signal.SIGTERM) == 0
    assert shell("get", "orders", code=3).out == ""


def _taken(address: str) -> dict[str, Any]:
    with Wire(address) as wire:
        wire.request("/v1/queue/dequeue", b'{"queue":"orders","owner":"me"}')
        [(message, payload)] = wire.answer().messages()
        assert payload == b"hello"
        return message


def test_a_unix_socket_is_private_and_is_removed(shell: Shell) -> None:
    path = shell.folder / "http.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # by a server that was killed
    with command(shell, "serve", "--store", "memory://", "--listen", f"unix://{path}", "--json") as server:
        found = json.loads(server.until("address"))
        assert found == {"address": f"unix://{path}", "store": "memory://"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with Wire(found["address"]) as wire:
            wire.request("/v1/queue/stats", b'{"queue":"a"}')
            assert wire.answer().json["queue"] == "a"
        assert server.end(signal.SIGINT) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("0.0.0.0:9341", "no authentication"),
        (":9341", "no authentication"),
        ("[::]:9341", "no authentication"),
        ("127.0.0.1", "host:port"),
        ("127.0.0.1:99999", "host:port"),
        ("::1:80", "host:port"),
        ("unix://relative", "absolute"),
        ("unix:///" + "x" * 200, "shorter"),
    ],
)
def test_addresses_that_are_refused(shell: Shell, listen: str, why: str) -> None:
    ran = shell("serve", "--listen", listen, code=2)
    assert why in ran.err


def test_an_address_in_use(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = shell("serve", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", code=1)
    assert "Address already in use" in ran.err


def test_a_folder_that_others_can_write_to(shell: Shell) -> None:
    folder = shell.folder / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert "chmod go-w" in shell("serve", "--listen", f"unix://{folder}/x", code=2).err
    assert "No such file" in shell("serve", "--listen", "unix:///nowhere/at/all", code=1).err


def test_bad_options(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "same option" in shell("serve", "--store", "memory://", "--url", "sqlite:///a.db", code=2).err
    assert "whole seconds" in shell("serve", "--default-ttl", "1.5s", code=2).err
    assert "too few slashes" in shell("serve", "--store", "sqlite://a.db", code=2).err
    monkeypatch.setenv("TOWPATH_LISTEN", "nowhere")
    assert "listen is 'nowhere'" in shell("serve", code=2).err
