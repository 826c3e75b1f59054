"""`towpath auth`: tokens, certificates and bundles."""

from __future__ import annotations

import base64
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.shell import Shell
from towpath.http.certificates import Bundle


def test_tokens(shell: Shell) -> None:
    made = shell("auth", "token", "new", "billing", "--right", "produce", "--right", "consume", "--json").json
    assert made["token"].startswith(f"tp_{made['id']}_")
    assert made["grants"] == [{"rights": ["consume", "produce"], "namespace": "*", "queue_prefix": ""}]
    text = shell(
        *("auth", "token", "new", "mail", "--right", "consume", "--namespace", "Shop", "--namespace", "b"),
        *("--queue-prefix", "Mail-", "--expires", "2h"),
    ).out.strip()
    listed = shell("auth", "token", "list", "--json").json["tokens"]
    assert [each["name"] for each in listed] == ["billing", "mail"]
    assert [(each["namespace"], each["queue_prefix"]) for each in listed[1]["grants"]] == [
        ("shop", "mail-"),
        ("b", "mail-"),
    ]
    assert listed[1]["expires_at"] is not None
    table = shell("auth", "token", "list").out
    assert "consume,produce" in table
    for secret in (made["token"].rpartition("_")[2], text.rpartition("_")[2]):
        assert secret not in table
        assert secret not in str(listed)
    assert "is revoked" in shell("auth", "token", "revoke", made["id"]).out
    assert shell("auth", "token", "revoke", made["id"], "--json", code=3).error["code"] == 3
    assert [each["name"] for each in shell("auth", "token", "list", "--json").json["tokens"]] == ["mail"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("a",), "--right"),
        (("a", "--right", "root"), "root"),
        (("", "--right", "admin"), "name"),
        (("x" * 101, "--right", "admin"), "name"),
        (("a", "--right", "admin", "--namespace", "a/b"), "namespace must be"),
        (("a", "--right", "admin", "--queue-prefix", "a/b"), "queue must be"),
        (("a", "--right", "admin", "--expires", "never"), "time such as"),
        (("a", "--right", "admin", "--expires", "2020-01-01"), "future"),
        (("a", "--right", "admin", *(f"--namespace=n{n}" for n in range(17))), "1 to 16 grants"),
    ],
)
def test_tokens_that_cannot_be_made(shell: Shell, arguments: tuple[str, ...], why: str) -> None:
    ran = shell("auth", "token", "new", *arguments, code=2)
    assert why in ran.err
    assert "Traceback" not in ran.err


def test_bundles(shell: Shell) -> None:
    for arguments in (
        ("ca", "--out", "ca.pem"),
        ("server", "--ca", "ca.pem", "--out", "server.pem", "--host", "q.example.org", "--host", "10.0.0.1"),
        ("client", "--ca=ca.pem", "--out=client.pem", "--cn=a_b", "--namespace=shop=r", "--right=monitor"),
    ):
        made = shell("auth", "new", *arguments, "--json").json
        assert stat.S_IMODE(Path(made["file"]).stat().st_mode) == 0o600
        refused = shell("auth", "new", *arguments, code=2)
        assert "--force" in refused.err
    server = shell("auth", "inspect", "server.pem", "--json").json["certificates"]
    assert [(each["kind"], each["has_key"]) for each in server] == [("ca", False), ("server", True)]
    assert server[1]["names"] == ["q.example.org", "10.0.0.1", "spiffe://lockd/server/towpath-server"]
    client = shell("auth", "inspect", "client.pem", "--json").json["certificates"][1]
    assert client["kind"] == "client"
    assert client["names"] == ["spiffe://lockd/sdk/a_b", "lockd://ns/shop?perm=r", "towpath://monitor"]
    shown = shell("auth", "inspect", "client.pem").out
    assert "lockd://ns/shop?perm=r" in shown
    assert "PRIVATE" not in shown + str(server)
    before = Path("server.pem").read_bytes()
    shell("auth", "new", "server", "--ca", "ca.pem", "--out", "server.pem", "--force")
    assert Path("server.pem").read_bytes() != before
    assert stat.S_IMODE(Path("server.pem").stat().st_mode) == 0o600
    verified = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "server.pem", "client.pem"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert verified.returncode == 0, verified


def test_the_denylist(shell: Shell) -> None:
    shell("auth", "new", "ca", "--out", "ca.pem")
    shell("auth", "new", "server", "--ca", "ca.pem", "--out", "server.pem")
    shell("auth", "new", "client", "--ca", "ca.pem", "--cn", "a", "--namespace", "ALL", "--out", "a.pem")
    serial = shell("auth", "inspect", "a.pem", "--json").json["certificates"][1]["serial"]
    found = shell("auth", "revoke", "server.pem", "a.pem", "AB:cd", "--json").json
    assert found["denylist"] == sorted(["abcd", serial], key=lambda each: int(each, 16))
    assert shell("auth", "revoke", "server.pem", "1", "--json").json["denylist"][0] == "1"
    text = Path("server.pem").read_text()
    assert text.count("-----BEGIN LOCKD DENYLIST-----") == 1
    block = text.partition("DENYLIST-----\n")[2].partition("-----END")[0]
    assert set(base64.b64decode(block).decode().split("\n")) == {"1", "abcd", serial}  # as lockd writes it
    assert Bundle(Path("server.pem")).key is not None
    assert "serial" in shell("auth", "revoke", "server.pem", "xyz", code=2).err
    assert "No such file" in shell("auth", "revoke", "missing.pem", "1", code=1).err
    Path("empty.pem").write_text("")
    assert "no PEM blocks" in shell("auth", "inspect", "empty.pem", code=2).err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("client", "--ca", "ca.pem", "--cn", "a", "--out", "x.pem"), "--namespace or a --right"),
        (("client", "--ca", "ca.pem", "--cn", "", "--namespace", "a", "--out", "x.pem"), "common name"),
        (("client", "--ca", "ca.pem", "--cn", "a", "--namespace", "a=x", "--out", "x.pem"), "r, w or rw"),
        (("client", "--ca", "ca.pem", "--cn", "a", "--namespace", "a/b", "--out", "x.pem"), "namespace must"),
        (("server", "--ca", "ca.pem", "--host", "a b", "--out", "x.pem"), "host name"),
        (("server", "--ca", "ca.pem", "--days", "0", "--out", "x.pem"), "days"),
        (("server", "--ca", "server.pem", "--out", "x.pem"), "no CA with its private key"),
        (("ca", "--out", "missing/ca.pem"), "No such file"),
    ],
)
def test_certificates_that_cannot_be_made(shell: Shell, arguments: tuple[str, ...], why: str) -> None:
    shell("auth", "new", "ca", "--out", "ca.pem")
    shell("auth", "new", "server", "--ca", "ca.pem", "--out", "server.pem")
    ran = shell("auth", "new", *arguments, code=1 if "missing" in arguments[-1] else 2)
    assert why in ran.err
    assert not Path("x.pem").exists()
