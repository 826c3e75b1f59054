"""Certificates of a CA for tests, and contexts of TLS clients."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from towpath.clock import SystemClock
from towpath.core.checks import DAY
from towpath.http.certificates import Bundle, CertificateRequest, new_ca, new_client, new_server


class Authority:
    """A CA in a directory. The certificates of `expired` clients have ended a day ago."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.path = self._write("ca", new_ca(_request("test-ca")))
        self.server = self._write("server", new_server(Bundle(self.path), _request("server"), ["localhost"]))

    def client(self, name: str, *claims: str, expired: bool = False) -> Path:
        """The bundle of a client with these claims."""
        request = _request(name, ago=2 if expired else 0)
        return self._write(name, new_client(Bundle(self.path), request, claims))

    def _write(self, name: str, content: bytes) -> Path:
        path = self.folder / f"{name}.pem"
        path.write_bytes(content)
        path.chmod(0o600)
        return path


def tls_client(authority: Path, bundle: Path | None = None, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """A client that trusts the CA in a file and presents the certificate of its bundle."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=Bundle(authority).ca_pem)
    if bundle is not None:
        context.load_cert_chain(bundle)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def _request(name: str, ago: int = 0) -> CertificateRequest:
    return CertificateRequest(common_name=name, days=1, now=SystemClock().now() - ago * DAY)
