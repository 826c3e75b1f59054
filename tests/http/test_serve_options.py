"""Options of `towpath serve`: arguments, variables, the settings file, and authentication, as processes."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from tests.support.certificates import Authority, tls_client
from tests.support.processes import command
from tests.support.shell import Shell
from tests.support.wire import Wire
from towpath import App
from towpath.errors import InvalidInput
from towpath.http.options import ServerOptions, bind
from towpath.http.server import HttpServer
from towpath.http.tls import TlsFiles


def ask(address: str, path: str, token: str = "") -> tuple[int, str]:
    with Wire(address) as wire:
        wire.request(path, b'{"queue":"a"}', {"Authorization": f"Bearer {token}"} if token else {})
        answer = wire.answer()
        return answer.status, answer.body.decode()


def test_arguments_precede_variables_and_these_the_file(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shell.folder / "towpath.toml").write_text(
        '[serve]\nlisten = "file"\ndefault_ttl = "file"\nrate = 7\n', "utf-8"
    )
    assert "listen is 'file'" in shell("serve", "--default-ttl", "1s", "--rate", "1/s", code=2).err
    assert "'file'" in shell("serve", code=2).err
    monkeypatch.setenv("TOWPATH_DEFAULT_TTL", "2s")
    assert "'7'; it must be a rate" in shell("serve", code=2).err
    monkeypatch.setenv("TOWPATH_RATE", "5/s")
    monkeypatch.setenv("TOWPATH_LISTEN", "variable")
    assert "listen is 'variable'" in shell("serve", code=2).err
    assert "listen is 'argument'" in shell("serve", "--listen", "argument", code=2).err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[serve]\nport = 1\n", "port"),
        ("[serve]\nlisten = [1]\n", "one value"),
        ("serve = 1\n", "a table"),
        ("[serve]\nmax_connections = 0\n", "max-connections"),
        ("[serve]\nrequire_token = 'perhaps'\n", "require-token"),
        ("[serve]\nurl = 'memory://'\n", "url"),
    ],
)
def test_files_that_are_wrong(shell: Shell, text: str, why: str) -> None:
    (shell.folder / "towpath.toml").write_text(text, "utf-8")
    ran = shell("serve", code=2)
    assert why in ran.err
    assert "Traceback" not in ran.err


def test_a_server_from_a_file(shell: Shell) -> None:
    """With a token; its output and its metrics have no secret."""
    place = shell.folder / "etc"
    place.mkdir()
    (place / "towpath.toml").write_text(
        'url = "sqlite:///work.db"\n[serve]\nlisten = "127.0.0.1:0"\nrequire_token = true\nrate = "2/m"\n'
    )
    url = f"sqlite:///{place / 'work.db'}"
    made = shell("auth", "token", "new", "a", "--right", "consume", "--url", url, "--json").json
    file = ("--config", str(place / "towpath.toml"))
    with command(shell, "serve", *file, "--log-level", "debug", "--json") as server:
        found = json.loads(server.until("address"))
        assert found["store"] == url
        statuses = [ask(found["address"], "/v1/queue/stats", made["token"])[0] for _ in range(3)]
        assert statuses == [200, 200, 429]
        status, text = ask(found["address"], "/v1/queue/stats", made["token"] + "0")
        assert status == 401
        assert server.end(signal.SIGTERM) == 0
        assert server.silent()
        printed = "\n".join([*server.lines, text])
        assert "was refused" in printed
        assert made["token"][16:40] not in printed


def test_a_server_with_certificates(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files of `towpath auth`. A path in the settings file is relative to it."""
    shell("auth", "new", "ca", "--out", "ca.pem")
    shell("auth", "new", "server", "--ca", "ca.pem", "--out", "server.pem")
    shell("auth", "new", "client", "--ca", "ca.pem", "--cn", "a", "--namespace", "ALL", "--out", "a.pem")
    (shell.folder / "towpath.toml").write_text('[serve]\nbundle = "server.pem"\nlisten = "localhost:0"\n')
    (shell.folder / "elsewhere").mkdir()
    monkeypatch.chdir(shell.folder / "elsewhere")
    context = tls_client(shell.folder / "ca.pem", shell.folder / "a.pem")
    with command(shell, "serve", "--json") as server:
        address = json.loads(server.until("address"))["address"]
        assert address.startswith("https://")
        with Wire(address, context) as wire:
            wire.request("/v1/queue/stats", b'{"queue":"a"}')
            assert wire.answer().status == 200
        assert server.end(signal.SIGTERM) == 0


def test_a_socket_by_its_path(shell: Shell) -> None:
    path = shell.folder / "http.sock"
    arguments = ("--store", "memory://", "--listen-proto", "unix", "--listen", str(path))
    with command(shell, "serve", *arguments, "--json") as server:
        address = json.loads(server.until("address"))["address"]
        assert address == f"unix://{path}"
        assert ask(address, "/v1/queue/stats")[0] == 200
        assert server.end(signal.SIGTERM) == 0
    assert "path of the socket" in shell("serve", "--listen-proto", "unix", code=2).err


@pytest.mark.parametrize("listen", ["0.0.0.0:0", ":0", "[::]:0"])
def test_addresses_that_other_machines_can_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    authority = Authority(tmp_path / "ca")
    certificate = TlsFiles(cert=authority.server, key=authority.server)
    opened: list[object] = []
    real = socket.socket

    def recorded(*args: int, **kwargs: int) -> socket.socket:
        opened.append(args)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", recorded)
        for options, why in (
            (ServerOptions(listen=listen), "no authentication"),
            (ServerOptions(listen=listen, tls=certificate), "no authentication"),
            (ServerOptions(listen=listen, insecure_http=True), "no authentication"),
            (ServerOptions(listen=listen, require_token=True), "--insecure-http"),
        ):
            with App("memory://") as app, pytest.raises(InvalidInput, match=why):
                HttpServer(app, options)
        assert opened == []
    for options in (
        ServerOptions(listen=listen, tls=TlsFiles(bundle=authority.server)),
        ServerOptions(listen=listen, tls=certificate, require_token=True),
        ServerOptions(listen=listen, insecure_http=True, require_token=True),
    ):
        bind(options).close()


def test_tls_needs_tcp(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    options = ServerOptions(listen=f"unix://{tmp_path}/s", tls=TlsFiles(bundle=authority.server))
    with pytest.raises(InvalidInput, match="TLS is on"):
        bind(options)


def test_files_of_tls_that_are_missing(shell: Shell) -> None:
    assert "missing.pem" in shell("serve", "--bundle", "missing.pem", code=1).err
    assert "--tls-cert and --tls-key" in shell("serve", "--tls-cert", "a.pem", code=2).err
    (shell.folder / "a.pem").write_text("x")
    assert "no PEM blocks" in shell("serve", "--bundle", "a.pem", code=2).err
    assert "missing.toml" in shell("serve", "--config", "missing.toml", code=2).err
