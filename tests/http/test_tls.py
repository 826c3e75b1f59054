"""TLS with real sockets: certificates of clients, their claims, the denylist, and changed files."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.support.certificates import Authority, tls_client
from tests.support.waiting import WAIT, until
from tests.support.wire import MULTIPART, Remote, Wire, form, serving
from towpath import App
from towpath.clock import SystemClock
from towpath.errors import InvalidInput
from towpath.http import certificates, server
from towpath.http.access import Grant, Right
from towpath.http.certificates import Bundle, CertificateRequest, deny, new_server, write_private
from towpath.http.tls import TlsFiles
from towpath.http.tokens import create_token
from towpath.ledger import open_ledger

ALL = "lockd://ns/ALL"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[Remote]:
    """A server that needs client certificates."""
    with App("memory://") as app, serving(app, tls=TlsFiles(bundle=authority.server)) as remote:
        assert remote.address.startswith("https://127.0.0.1:")
        yield remote


def client(remote: Remote, authority: Authority, *claims: str, name: str = "client") -> Remote:
    bundle = authority.client(name, *claims)
    return remote.client(tls=tls_client(authority.path, bundle))


def refused(remote: Remote, context: ssl.SSLContext) -> bool:
    """Whether the server ends the connection without an answer. With TLS 1.3 the client learns it after its
    own handshake."""
    try:
        with Wire(remote.address, context) as wire:
            wire.request("/healthz")
            wire.answer()
    except (ssl.SSLError, ConnectionError, EOFError):
        return True
    return False


@pytest.mark.parametrize(
    ("claims", "statuses"),
    [
        ((ALL,), (200, 200, 200, 403)),
        (("lockd://ns/ALL?perm=r",), (403, 200, 200, 403)),
        (("lockd://ns/ALL?perm=W",), (200, 403, 403, 403)),
        (("lockd://ns/shop?perm=rw",), (200, 200, 403, 403)),
        (("lockd://ns/Shop?perm=r", "lockd://ns/shop?perm=w"), (200, 200, 403, 403)),
        # The claim for a namespace replaces that for all.
        ((ALL, "lockd://ns/shop?perm=r"), (403, 200, 200, 403)),
        (("towpath://admin",), (200, 200, 200, 200)),
        (("towpath://monitor", "lockd://ns/shop"), (200, 200, 403, 200)),
    ],
)
def test_claims(
    secure: Remote, authority: Authority, claims: tuple[str, ...], statuses: tuple[int, ...]
) -> None:
    found = client(secure, authority, *claims)
    body = form(("meta", b'{"queue":"a","namespace":"shop"}'))
    assert (
        found.post("/v1/queue/enqueue", body, {"Content-Type": MULTIPART}).status,
        found.call("queue/stats", queue="a", namespace="shop").status,
        found.call("queue/stats", queue="a", namespace="other").status,
        found.post("/metrics").status,
    ) == statuses


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ((), "namespace_forbidden"),
        (("lockd://other/a",), "namespace_forbidden"),
        (("lockd://ns/a?perm=x",), "invalid_namespace_claims"),
        (("lockd://ns/a?perm=r&perm=w",), "invalid_namespace_claims"),
        (("lockd://ns/",), "invalid_namespace_claims"),
        (("lockd://ns/a/b",), "invalid_namespace_claims"),
        (("lockd://ns/.a",), "invalid_namespace_claims"),
        ((ALL, "towpath://root"), "invalid_namespace_claims"),
    ],
)
def test_wrong_claims(secure: Remote, authority: Authority, claims: tuple[str, ...], code: str) -> None:
    answer = client(secure, authority, *claims).call("queue/stats", queue="a")
    assert (answer.status, answer.error) == (403, code)


def test_a_certificate_without_an_identity(secure: Remote, authority: Authority) -> None:
    claim = x509.UniformResourceIdentifier(ALL)
    request = CertificateRequest(common_name="x", days=1, now=SystemClock().now())
    path = authority.folder / "anonymous.pem"
    use = ExtendedKeyUsageOID.CLIENT_AUTH
    path.write_bytes(certificates._issue(Bundle(authority.path), request, [claim], [use]))
    answer = secure.client(tls=tls_client(authority.path, path)).call("queue/stats", queue="a")
    assert (answer.status, answer.error) == (403, "namespace_forbidden")
    assert "SPIFFE" in answer.json["detail"]


def test_the_certificate_of_a_server_is_no_client(secure: Remote, authority: Authority) -> None:
    found = secure.client(tls=tls_client(authority.path, authority.server))
    assert found.call("queue/stats", queue="a").error == "namespace_forbidden"


def test_owners_have_the_subject_and_the_serial(secure: Remote, authority: Authority) -> None:
    found = client(secure, authority, ALL, name="billing")
    leaf = Bundle(authority.folder / "billing.pem").leaf
    assert leaf is not None
    answer = found.call("acquire", key="a", owner="me", ttl_seconds=5)
    assert answer.json["owner"] == f"me/CN=billing#{leaf.serial_number:x}"


def test_connections_that_are_refused(secure: Remote, authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    assert not refused(secure, tls_client(authority.path, authority.client("good", ALL)))
    assert refused(secure, tls_client(authority.path))
    assert refused(secure, tls_client(authority.path, other.client("foreign", ALL)))
    assert refused(secure, tls_client(authority.path, authority.client("old", ALL, expired=True)))
    old = tls_client(authority.path, authority.client("tls11", ALL))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert not refused(secure, old)
    with pytest.raises(ssl.SSLError):  # the client verifies the server
        Wire(secure.address, tls_client(other.path))
    with socket.create_connection(("127.0.0.1", int(secure.address.rpartition(":")[2])), WAIT) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP/1.1 200" not in plain.recv(1000)


def test_a_client_of_http2_gets_http1(secure: Remote, authority: Authority) -> None:
    context = tls_client(authority.path, authority.client("go", ALL), protocols=["h2", "http/1.1"])
    with Wire(secure.address, context) as wire:
        assert isinstance(wire.socket, ssl.SSLSocket)
        assert wire.socket.selected_alpn_protocol() == "http/1.1"
        wire.request("/healthz")
        assert wire.answer().status == 200


def test_a_bundle_of_lockd(authority: Authority, tmp_path: Path) -> None:
    """Its CA comes first."""
    text = authority.server.read_text()
    end = text.index("-----END PRIVATE KEY-----\n") + len("-----END PRIVATE KEY-----\n")
    path = tmp_path / "server.pem"
    path.write_text(text[end:] + text[:end])
    with App("memory://") as app, serving(app, tls=TlsFiles(bundle=path)) as remote:
        assert client(remote, authority, ALL).call("queue/stats", queue="a").status == 200


def test_the_denylist_and_a_new_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server reads its bundle again when the file has changed."""
    monkeypatch.setattr(server, "TICKS", 1)
    authority = Authority(tmp_path / "ca")
    good, bad = authority.client("good", ALL), authority.client("bad", ALL)
    with App("memory://") as app, serving(app, tls=TlsFiles(bundle=authority.server)) as remote:
        kept = remote.client(tls=tls_client(authority.path, good))
        revoked = remote.client(tls=tls_client(authority.path, bad))
        with revoked.connect() as waiting:
            waiting.request("/v1/queue/dequeue", b'{"queue":"a","owner":"me"}')
            until(lambda: kept.call("queue/stats", queue="a").json["waiting_consumers"] == 1)
            leaf = Bundle(bad).leaf
            assert leaf is not None
            deny(authority.server, [leaf.serial_number])
            assert Bundle(authority.server).denylist == {leaf.serial_number}
            until(lambda: revoked.call("queue/stats", queue="a").status == 401)
            assert waiting.answer().error == "unauthorized"
        assert kept.call("queue/stats", queue="a").status == 200
        before = _serial(remote, authority.path, good)
        # A file that cannot be used changes nothing.
        authority.server.write_text("nothing")
        assert kept.call("queue/stats", queue="a").status == 200
        _renew(authority)
        until(lambda: _serial(remote, authority.path, good) != before)


def _renew(authority: Authority) -> None:
    request = CertificateRequest(common_name="server", days=1, now=SystemClock().now())
    write_private(authority.server, new_server(Bundle(authority.path), request, ["localhost"]), force=True)


def _serial(remote: Remote, ca: Path, bundle: Path) -> str:
    with Wire(remote.address, tls_client(ca, bundle)) as wire:
        assert isinstance(wire.socket, ssl.SSLSocket)
        found = wire.socket.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


def test_tokens_and_certificates(authority: Authority, tmp_path: Path) -> None:
    """With both, either is enough, and a token precedes a certificate."""
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with closing(open_ledger(url)) as ledger:
        grants = [Grant(frozenset({Right.PRODUCE}))]
        token = create_token(ledger, "a", grants, SystemClock().now())[1]
    options = {"tls": TlsFiles(bundle=authority.server), "require_token": True}
    with App(url) as app, serving(app, **options) as remote:
        plain = tls_client(authority.path)
        assert remote.client(tls=plain).call("queue/stats", queue="a").status == 401
        assert remote.client(tls=plain).post("/healthz").status == 200
        assert remote.client(token, plain).call("queue/stats", queue="a").status == 403
        assert remote.client(token, plain).enqueue("a")["queue"] == "a"
        certified = client(remote, authority, ALL)
        assert certified.call("queue/stats", queue="a").status == 200
        assert certified.client(token).call("queue/stats", queue="a").status == 403
        assert certified.client("tp_x").call("queue/stats", queue="a").status == 401
        foreign = Authority(tmp_path / "foreign").client("foreign", ALL)
        assert refused(remote, tls_client(authority.path, foreign))


def test_a_certificate_with_its_key(authority: Authority, tmp_path: Path) -> None:
    """Without --bundle; clients have tokens."""
    files = TlsFiles(cert=authority.server, key=authority.server)
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with closing(open_ledger(url)) as ledger:
        token = create_token(ledger, "a", [Grant(frozenset({Right.CONSUME}))], SystemClock().now())[1]
    with App(url) as app, serving(app, tls=files, require_token=True) as remote:
        found = remote.client(token, tls_client(authority.path))
        assert found.call("queue/stats", queue="a").status == 200
        assert remote.client(tls=tls_client(authority.path)).call("queue/stats", queue="a").status == 401
    with App("memory://") as app, serving(app, tls=files) as remote:  # on loopback, for everybody
        assert remote.client(tls=tls_client(authority.path)).call("queue/stats", queue="a").status == 200


def test_clients_that_are_too_slow(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.05)
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.2)
    with App("memory://") as app, serving(app, tls=TlsFiles(bundle=authority.server)) as remote:
        with client(remote, authority, ALL).connect() as wire:
            wire.send(b"GET /healthz HTTP/1.1\r\n")
            assert wire.closed()
        # Far less than the default of the event loop, 60 s.
        with socket.create_connection(("127.0.0.1", int(remote.address.rpartition(":")[2])), 20) as silent:
            assert silent.recv(1) == b""


def test_a_client_that_does_not_read_its_response(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.1)
    with App("memory://") as app, serving(app, tls=TlsFiles(bundle=authority.server)) as remote:
        found = client(remote, authority, ALL)
        found.enqueue("large", b"x" * 16_000_000)
        with found.connect() as wire:
            wire.request("/v1/queue/dequeue", b'{"queue":"large","owner":"me"}')
            until(lambda: not remote.connections())


def test_requests_that_are_refused_before_they_are_read(authority: Authority) -> None:
    with App("memory://") as app:
        files = TlsFiles(bundle=authority.server)
        with serving(app, tls=files, max_peer_connections=1) as remote:
            found = client(remote, authority, ALL)
            with found.connect() as wire:
                wire.send(b"GARBAGE\r\n\r\n")
                status, headers = wire.head()
                assert (status, headers["connection"]) == (400, "close")
                with found.connect() as other:
                    assert other.head()[0] == 503


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "needs a bundle"),
        ({"bundle": "server", "cert": "server"}, "needs a bundle"),
        ({"cert": "server"}, "--tls-cert and --tls-key"),
        ({"client_ca": "ca"}, "needs a bundle"),
    ],
)
def test_files_that_do_not_fit(authority: Authority, fields: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        TlsFiles(**{name: authority.folder / f"{each}.pem" for name, each in fields.items()})


def test_files_that_cannot_be_used(authority: Authority, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("no blocks")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    client_only = authority.client("only", ALL)
    for files, why in (
        (TlsFiles(bundle=empty), "no PEM blocks"),
        (TlsFiles(bundle=broken), "cannot be read"),
        (TlsFiles(bundle=authority.path), "no certificate with its private key"),
        (TlsFiles(cert=client_only, key=authority.path), "cannot be used"),
        (TlsFiles(cert=authority.server, key=authority.server, client_ca=empty), "no PEM blocks"),
    ):
        with App("memory://") as app, pytest.raises(InvalidInput, match=why), serving(app, tls=files):
            pass
    with App("memory://") as app, pytest.raises(FileNotFoundError):
        serving(app, tls=TlsFiles(bundle=tmp_path / "missing.pem")).__enter__()


def test_no_file_handle_is_left(secure: Remote, authority: Authority) -> None:
    context, wrong = tls_client(authority.path, authority.client("files", ALL)), tls_client(authority.path)
    assert not refused(secure, context)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        assert refused(secure, wrong)
        assert not refused(secure, context)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)
