"""TLS: the one-file bundle of lockd, and a CA with host names."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support.surfaces import answer, request_of
from tests.support.waiting import WAIT
from towpath.clock import SystemClock
from towpath.errors import InvalidInput, ServerAway

STATS = (
    b'{"namespace":"d","queue":"a","waiting_consumers":0,"pending_candidates":0,"total_consumers":0,'
    b'"has_active_watcher":true,"available":false}'
)


class Certified(NamedTuple):
    certificate: str
    key: str


class Authority:
    """A CA."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        ca = x509.BasicConstraints(ca=True, path_length=None)
        built = self._builder(self._name, self._key).add_extension(ca, critical=True)
        self.certificate = _pem(built.sign(self._key, hashes.SHA256()))

    def _builder(self, name: x509.Name, key: Any) -> x509.CertificateBuilder:
        now = dt.datetime.fromtimestamp(SystemClock().now() / 1e6, dt.UTC)
        day = dt.timedelta(days=1)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - day).not_valid_after(now + day)

    def issue(self, usage: x509.ObjectIdentifier, host: str | None = None) -> Certified:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
        builder = self._builder(name, key).add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if host is not None:
            san = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
            builder = builder.add_extension(san, critical=False)
        plain = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return Certified(_pem(builder.sign(self._key, hashes.SHA256())), private.decode())


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


@contextlib.contextmanager
def tls_server(folder: Path, ca: Authority, own: Certified, ask: bool) -> Iterator[str]:
    """Answers each request with stats; with `ask` it requires a certificate of the client."""
    chain = folder / "server.pem"
    chain.write_text(own.certificate + own.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    if ask:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=ca.certificate)
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            plain, _ = listener.accept()
            plain.settimeout(WAIT)
            with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as connection:
                if request_of(connection):
                    connection.sendall(answer("200 OK", STATS, "Connection: close"))
            plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stopped.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join(WAIT)
        listener.close()


@pytest.fixture(scope="module")
def ca() -> Authority:
    return Authority()


def test_a_bundle(connect: Callable[..., Any], ca: Authority, tmp_path: Path) -> None:
    """CA first, as lockd writes it, with a block that is not for clients. The host name is not compared."""
    own = ca.issue(ExtendedKeyUsageOID.CLIENT_AUTH)
    bundle = tmp_path / "client.pem"
    deny = "-----BEGIN LOCKD DENYLIST-----\nYWJj\n-----END LOCKD DENYLIST-----\n"
    bundle.write_text("# a comment\n" + ca.certificate + own.certificate + own.key + deny)
    with tls_server(tmp_path, ca, ca.issue(ExtendedKeyUsageOID.SERVER_AUTH), ask=True) as address:
        assert connect(address, bundle=bundle).stats("a").queue == "a"
        # An address without a scheme is https if there is a bundle.
        assert connect(address.removeprefix("https://"), bundle=bundle).stats("a").queue == "a"
        with pytest.raises(ServerAway):
            connect(address).stats("a")


def test_a_server_of_another_ca_is_refused(
    connect: Callable[..., Any], ca: Authority, tmp_path: Path
) -> None:
    own = ca.issue(ExtendedKeyUsageOID.CLIENT_AUTH)
    bundle = tmp_path / "client.pem"
    bundle.write_text(ca.certificate + own.certificate + own.key)
    other = Authority()
    with tls_server(tmp_path, ca, other.issue(ExtendedKeyUsageOID.SERVER_AUTH), ask=False) as address:
        with pytest.raises(ServerAway, match="certificate") as caught:
            connect(address, bundle=bundle).stats("a")
        assert caught.value.sent is False
    # The certificate of a client is not that of a server.
    with tls_server(tmp_path, ca, ca.issue(ExtendedKeyUsageOID.CLIENT_AUTH), ask=False) as address:
        with pytest.raises(ServerAway, match="certificate"):
            connect(address, bundle=bundle).stats("a")


def test_a_ca_with_host_names(connect: Callable[..., Any], ca: Authority, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text(ca.certificate)
    right = ca.issue(ExtendedKeyUsageOID.SERVER_AUTH, "127.0.0.1")
    with tls_server(tmp_path, ca, right, ask=False) as address:
        assert connect(address, ca=path).stats("a").queue == "a"
        # The CAs of the system do not have this one.
        with pytest.raises(ServerAway, match="certificate"):
            connect(address).stats("a")
    with tls_server(
        tmp_path, ca, ca.issue(ExtendedKeyUsageOID.SERVER_AUTH, "127.0.0.2"), ask=False
    ) as address:
        with pytest.raises(ServerAway, match="certificate"):
            connect(address, ca=path).stats("a")


def test_files_that_are_wrong(connect: Callable[..., Any], ca: Authority, tmp_path: Path) -> None:
    own, other = (ca.issue(ExtendedKeyUsageOID.CLIENT_AUTH) for _ in range(2))
    contents = {
        "empty": "",
        "no key": ca.certificate + own.certificate,
        "two keys": ca.certificate + own.certificate + own.key + other.key,
        "another key": ca.certificate + own.certificate + other.key,
        "only one certificate": own.certificate + own.key,
        "damaged": "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n" * 2 + own.key,
    }
    for name, text in contents.items():
        path = tmp_path / f"{name}.pem"
        path.write_text(text)
        with pytest.raises(InvalidInput, match="bundle") as caught:
            connect("https://127.0.0.1:1", bundle=path)
        assert "PRIVATE" not in str(caught.value)
        if name in ("empty", "damaged"):
            with pytest.raises(InvalidInput, match="ca is"):
                connect("https://127.0.0.1:1", ca=path)
    with pytest.raises(InvalidInput, match="can be read"):
        connect("https://127.0.0.1:1", bundle=tmp_path / "missing")
