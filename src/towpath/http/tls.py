"""TLS of a server: its certificate, the CA of its clients, and the denylist. Changed files are read again
while the server runs."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import msgspec

from towpath.errors import Described, InvalidInput
from towpath.escapes import get_logger
from towpath.http.certificates import Bundle, is_private

log = get_logger("towpath.http")


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Either `bundle`, which has certificate, key and the CA of the clients, or `cert` with `key`.
    `client_ca` is a PEM file with the CA of the clients, instead of that of the bundle."""

    bundle: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.bundle is None) == (self.cert is None and self.key is None):
            raise _wrong("TLS needs a bundle, or a certificate and its key")
        if (self.cert is None) != (self.key is None):
            raise _wrong("TLS needs a certificate and its key: --tls-cert and --tls-key")

    @property
    def verifies_clients(self) -> bool:
        return self.bundle is not None or self.client_ca is not None


class ServerTls:
    """Raises `InvalidInput` or `OSError` for files that cannot be used. Unless `required`, a client without a
    certificate may connect."""

    def __init__(self, files: TlsFiles, required: bool) -> None:
        self._files = files
        self._paths = [path for path in (files.bundle, files.cert, files.key, files.client_ca) if path]
        self._stamps = self._read_stamps()
        self._logged = ""
        """The error that was logged last."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self.denylist: frozenset[int] = frozenset()
        """The serial numbers of revoked certificates."""
        self._load()
        if files.verifies_clients:
            source = files.client_ca or files.bundle
            assert source is not None
            authorities = Bundle(source).ca_pem
            if not authorities:
                raise _wrong(f"{source} has no CA certificate for the clients")
            self.context.load_verify_locations(cadata=authorities)
            self.context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        for path in (files.bundle, files.key):
            if path is not None and not is_private(path):
                log.warning("%s has a private key and other users can read it: chmod 600", path)

    def refresh(self) -> None:
        """Read changed files again: the certificate for new connections, and the denylist. A new CA needs a
        restart. If the files cannot be used, the old state stays in force."""
        try:
            stamps = self._read_stamps()
            if stamps == self._stamps:
                return
            self._stamps = stamps
            self._load()
        except (OSError, InvalidInput) as error:
            if str(error) != self._logged:
                log.error("the changed TLS files cannot be used; the old ones stay in force: %s", error)
            self._logged = str(error)
        else:
            log.info("the TLS files were read again")
            self._logged = ""

    def _load(self) -> None:
        files = self._files
        denied: set[int] = set()
        for path in (files.bundle, files.client_ca):
            if path is not None:
                denied |= Bundle(path).denylist
        try:
            if files.bundle is not None:
                self._load_bundle(Bundle(files.bundle))
            else:
                assert files.cert is not None
                self.context.load_cert_chain(files.cert, files.key, _no_password)
        except ssl.SSLError as error:
            raise _wrong(f"the certificate of the server cannot be used: {error}") from None
        self.denylist = frozenset(denied)

    def _load_bundle(self, bundle: Bundle) -> None:
        """OpenSSL takes the first certificate of a file for that of the server. In a bundle it is a CA."""
        with tempfile.NamedTemporaryFile() as file:  # mode 0600
            file.write(bundle.pair())
            file.flush()
            self.context.load_cert_chain(file.name)

    def _read_stamps(self) -> list[tuple[int, int, int]]:
        found = [path.stat() for path in self._paths]
        return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]


def _no_password() -> bytes:
    raise _wrong("the private key is encrypted; the server needs one without a password")


def _wrong(message: str) -> InvalidInput:
    return InvalidInput(field="tls", value=Described("unusable"), expected="usable files", message=message)
