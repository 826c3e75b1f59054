"""Certificates and bundles in the form of lockd: one PEM file with CA certificates, a certificate with its
chain, private keys (PKCS8), and a denylist of revoked serial numbers.

The rights of a client are URI names of its certificate: `spiffe://lockd/sdk/<name>` is its identity,
`lockd://ns/<namespace or ALL>?perm=r|w|rw` a claim for a namespace, `towpath://<right>` one for all
namespaces."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from towpath.core import checks
from towpath.errors import Described, InvalidInput
from towpath.escapes import get_logger
from towpath.http.access import Grant, Principal, Right, checked_namespace
from towpath.http.problems import Problem
from towpath.http.wire import namespace_name

audit = get_logger("towpath.http.audit")

DENYLIST = "LOCKD DENYLIST"
"""The PEM block of the serial numbers that are revoked: lines of hexadecimal digits."""
MAX_FILE = 1024 * 1024
"""Bytes of a PEM file."""
MAX_COMMON_NAME = 64
MAX_DAYS = 36_500
BACKDATED = timedelta(hours=1)
"""A new certificate is valid from this time ago: the clocks of clients differ."""
SigningKey = Ed25519PrivateKey | EllipticCurvePrivateKey | RSAPrivateKey
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\s(.*?)-----END \1-----", re.DOTALL)
_KEYS = (b"PRIVATE KEY", b"RSA PRIVATE KEY", b"EC PRIVATE KEY")
_PERMISSIONS = {
    "r": frozenset({Right.CONSUME}),
    "w": frozenset({Right.PRODUCE}),
    "rw": frozenset({Right.CONSUME, Right.PRODUCE}),
}


class ClientCertificate(msgspec.Struct, frozen=True):
    """The certificate of a connected client. `not_after` is ledger time. `problem` is the code and the detail
    of the refusal if its claims are wrong."""

    serial: int
    not_after: int
    principal: Principal
    problem: tuple[str, str] | None = None


class Bundle:
    """The blocks of a PEM file. `leaf` is its first certificate that is not a CA, `chain` the others of
    these; `key` belongs to the leaf, `ca_key` to the first CA."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cas: list[x509.Certificate] = []
        self.chain: list[x509.Certificate] = []
        self.denylist: set[int] = set()
        keys: list[SigningKey] = []
        for kind, text, block in _blocks(path):
            try:
                if kind == b"CERTIFICATE":
                    found = x509.load_pem_x509_certificate(block)
                    (self.cas if _is_ca(found) else self.chain).append(found)
                elif kind in _KEYS:
                    key = serialization.load_pem_private_key(block, None)
                    if not isinstance(key, SigningKey):
                        raise ValueError("the key is not Ed25519, ECDSA or RSA")
                    keys.append(key)
                elif kind == DENYLIST.encode():
                    self.denylist |= {serial_of(line) for line in base64.b64decode(text).decode().split()}
            except (ValueError, TypeError, UnsupportedAlgorithm) as error:
                raise _unreadable(path, f"its block {kind.decode()} cannot be read: {error}") from None
        self.leaf = self.chain[0] if self.chain else None
        self.key = _key_of(self.leaf, keys)
        self.ca_key = _key_of(self.cas[0] if self.cas else None, keys)

    @property
    def ca_pem(self) -> str:
        return "".join(map(_pem, self.cas))

    def pair(self) -> bytes:
        """The leaf with its chain and its key as PEM. Raises `InvalidInput` if one is missing."""
        if self.leaf is None or self.key is None:
            raise _unreadable(self.path, "it has no certificate with its private key")
        return "".join([*map(_pem, self.chain), _key_pem(self.key)]).encode()


class CertificateView(msgspec.Struct, frozen=True):
    """A certificate for people. `kind` is ca, server, client or other."""

    kind: str
    subject: str
    serial: str
    not_before: datetime
    not_after: datetime
    names: list[str]
    has_key: bool
    revoked: bool


class CertificateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate to make, valid for `days` from `now` (ledger time)."""

    common_name: str
    days: int
    now: int

    def __post_init__(self) -> None:
        checks.text("common name", self.common_name, MAX_COMMON_NAME, least=1)
        checks.whole("days", self.days, 1, MAX_DAYS)


def new_ca(request: CertificateRequest) -> bytes:
    """A CA with its key."""
    key = Ed25519PrivateKey.generate()
    usage = _key_usage(signs_certificates=True)
    builder = (
        _builder(request, _name(request.common_name), key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return (_pem(builder.sign(key, None)) + _key_pem(key)).encode()


def new_server(ca: Bundle, request: CertificateRequest, hosts: Sequence[str]) -> bytes:
    """The bundle of a server: certificate, key, CA certificate. The CA's key is not in it."""
    identity = f"spiffe://lockd/server/{quote(request.common_name, safe='')}"
    names = [*map(_host, hosts), x509.UniformResourceIdentifier(identity)]
    return _issue(ca, request, names, (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH))


def new_client(ca: Bundle, request: CertificateRequest, claims: Sequence[str]) -> bytes:
    """The bundle of a client with these claims."""
    identity = f"spiffe://lockd/sdk/{quote(request.common_name, safe='')}"
    names = [x509.UniformResourceIdentifier(each) for each in (identity, *claims)]
    return _issue(ca, request, names, (ExtendedKeyUsageOID.CLIENT_AUTH,))


def claim_of(namespace: str, permission: str) -> str:
    """The claim for a namespace (`ALL`: every namespace). Raises `InvalidInput`."""
    if permission not in _PERMISSIONS:
        raise InvalidInput(field="permission", value=permission, expected="r, w or rw")
    return f"lockd://ns/{checked_namespace(namespace, every='ALL')}?perm={permission}"


def deny(path: Path, serials: Sequence[int]) -> list[int]:
    """Add serial numbers to the denylist of a bundle; return all of its numbers."""
    bundle = Bundle(path)
    found = sorted(bundle.denylist | set(serials))
    text = base64.b64encode("\n".join(f"{each:x}" for each in found).encode())
    lines = b"\n".join(text[at : at + 64] for at in range(0, len(text), 64))
    block = b"-----BEGIN %b-----\n%b\n-----END %b-----\n" % (DENYLIST.encode(), lines, DENYLIST.encode())
    kept = b"".join(each + b"\n" for kind, _, each in _blocks(path) if kind != DENYLIST.encode())
    write_private(path, kept + block, force=True)
    for serial in serials:
        audit.info("the certificate with the serial number %x was revoked in %s", serial, path)
    return found


def serial_of(text: str) -> int:
    """A serial number of hexadecimal digits, with or without colons. Raises `InvalidInput`."""
    digits = text.strip().lower().replace(":", "")
    if re.fullmatch(r"[0-9a-f]{1,40}", digits) is None:
        raise InvalidInput(field="serial", value=text, expected="1 to 40 hexadecimal digits")
    return int(digits, 16)


def client_certificate(der: bytes) -> ClientCertificate | None:
    """The identity and the rights in a certificate that TLS has verified; None if it cannot be read."""
    try:
        found = x509.load_der_x509_certificate(der)
        subject = found.subject.rfc4514_string()
        uris = _uris(found)
    except (ValueError, UnsupportedAlgorithm):
        return None
    serial, not_after = found.serial_number, _micros(found.not_valid_after_utc)
    problem: tuple[str, str] | None = None
    grants: tuple[Grant, ...] = ()
    try:
        grants = _grants(uris)
    except Problem as error:
        problem = (error.code, error.envelope.detail)
    principal = Principal(f"certificate {serial:x} ({subject})", grants, f"/{subject}#{serial:x}")
    return ClientCertificate(serial, not_after, principal, problem)


def describe(bundle: Bundle) -> list[CertificateView]:
    """The certificates of a bundle: the CAs, then the leaf and its chain."""
    keys = {id(bundle.leaf): bundle.key, id(bundle.cas[0] if bundle.cas else None): bundle.ca_key}
    return [
        CertificateView(
            "ca" if each in bundle.cas else _kind(each),
            each.subject.rfc4514_string(),
            f"{each.serial_number:x}",
            each.not_valid_before_utc,
            each.not_valid_after_utc,
            _names(each),
            keys.get(id(each)) is not None,
            each.serial_number in bundle.denylist,
        )
        for each in (*bundle.cas, *bundle.chain)
    ]


def write_private(path: Path, content: bytes, force: bool) -> None:
    """Write a file that only its owner can read. An existing file is replaced only by `force`, as a whole;
    its owner and group keep their access."""
    if not force:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            expected = "a new file; --force replaces it"
            raise InvalidInput(field="out", value=str(path), expected=expected) from None
        with os.fdopen(file, "wb") as out:
            out.write(content)
        return
    file, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(file, "wb") as out:
            if path.exists():
                _keep_owner(path, out.fileno())
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _keep_owner(path: Path, file: int) -> None:
    """Give the new file the owner of the old one: the server, which may not be the user of this process."""
    old, new = path.stat(), os.fstat(file)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.fchown(file, old.st_uid, old.st_gid)
    os.fchmod(file, stat.S_IMODE(old.st_mode) & ~stat.S_IRWXO)


def is_private(path: Path) -> bool:
    """Whether only the owner and the group of the file can read it."""
    return not path.stat().st_mode & stat.S_IRWXO


def _issue(
    ca: Bundle,
    request: CertificateRequest,
    names: Sequence[x509.GeneralName],
    uses: Sequence[x509.ObjectIdentifier],
) -> bytes:
    if not ca.cas or ca.ca_key is None:
        raise _unreadable(ca.path, "it has no CA with its private key: towpath auth new ca")
    issuer = ca.cas[0]
    if request.now >= _micros(issuer.not_valid_after_utc):
        raise _unreadable(ca.path, "its CA has expired")
    key = Ed25519PrivateKey.generate()
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.ca_key.public_key())
    builder = (
        _builder(request, issuer.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(authority, critical=False)
    )
    algorithm = None if isinstance(ca.ca_key, Ed25519PrivateKey) else SHA256()
    made = builder.sign(ca.ca_key, algorithm)
    audit.info("%s was issued, serial number %x", made.subject.rfc4514_string(), made.serial_number)
    # lockd reads the blocks in any order. Other programs take the first certificate for that of the key.
    return (_pem(made) + _key_pem(key) + ca.ca_pem).encode()


def _builder(
    request: CertificateRequest, issuer: x509.Name, key: Ed25519PrivateKey
) -> x509.CertificateBuilder:
    now = datetime.fromtimestamp(request.now // checks.SECOND, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(request.common_name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=request.days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text) is None or len(text) > 253:
        raise InvalidInput(field="host", value=text, expected="a host name or an IP address")
    return x509.DNSName(text)


def _blocks(path: Path) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(kind, content, whole block) for each PEM block of the file."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise _unreadable(path, f"it has more than {MAX_FILE} bytes")
    found = [(each[1], each[2], each[0]) for each in _BLOCK.finditer(data)]
    if not found:
        raise _unreadable(path, "it has no PEM blocks")
    yield from found


def _unreadable(path: Path, why: str) -> InvalidInput:
    message = f"{path} is not usable: {why}"
    return InvalidInput(field=str(path), value=Described(why), expected="a PEM bundle", message=message)


def _is_ca(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _key_of(certificate: x509.Certificate | None, keys: Sequence[SigningKey]) -> SigningKey | None:
    if certificate is None:
        return None
    public = certificate.public_key()
    return next((key for key in keys if key.public_key() == public), None)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: SigningKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _micros(moment: datetime) -> int:
    return int(moment.timestamp()) * checks.SECOND


def _uris(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _kind(certificate: x509.Certificate) -> str:
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return "other"
    if ExtendedKeyUsageOID.SERVER_AUTH in uses:
        return "server"
    return "client" if ExtendedKeyUsageOID.CLIENT_AUTH in uses else "other"


def _grants(uris: Sequence[str]) -> tuple[Grant, ...]:
    """The grants of the claims. A claim for a namespace replaces, for it, the claim for all. Raises a
    `Problem`."""
    identified = False
    everywhere: set[Right] = set()
    wild: set[Right] = set()
    exact: dict[str, set[Right]] = {}
    for uri in uris:
        try:
            parts = urlsplit(uri)
        except ValueError:
            raise _bad_claim(uri, "it is not a URI") from None
        if parts.scheme == "spiffe":
            identified = True
        elif parts.scheme == "towpath":
            everywhere.add(_right(uri, parts.netloc))
        elif parts.scheme == "lockd" and parts.netloc.lower() == "ns":
            name, rights = _claim(uri, parts.path, parts.query)
            (wild if name == "ALL" else exact.setdefault(name, set())).update(rights)
    if not identified:
        raise Problem(403, "namespace_forbidden", "the certificate has no SPIFFE identity")
    if not (everywhere or wild or exact):
        raise Problem(403, "namespace_forbidden", "the certificate has no claims")
    grants = [Grant(frozenset(rights), name) for name, rights in exact.items()]
    if wild:
        grants.append(Grant(frozenset(wild), without=frozenset(exact)))
    if everywhere:
        grants.append(Grant(frozenset(everywhere)))
    return tuple(grants)


def _claim(uri: str, path: str, query: str) -> tuple[str, frozenset[Right]]:
    name = unquote(path).strip("/").strip()
    if not name or "/" in name:
        raise _bad_claim(uri, "it must name one namespace")
    permissions = parse_qs(query, keep_blank_values=True).get("perm", ["rw"])
    rights = _PERMISSIONS.get(permissions[0].strip().lower())
    if len(permissions) > 1 or rights is None:
        raise _bad_claim(uri, "perm must be r, w or rw, once")
    if name == "ALL":
        return name, rights
    try:
        return namespace_name(name), rights
    except Problem as problem:
        raise _bad_claim(uri, problem.envelope.detail) from None


def _right(uri: str, name: str) -> Right:
    try:
        return Right(name)
    except ValueError:
        raise _bad_claim(uri, f"it must name one of {', '.join(each.value for each in Right)}") from None


def _bad_claim(uri: str, why: str) -> Problem:
    return Problem(403, "invalid_namespace_claims", f"the claim {uri} of the certificate is wrong: {why}")
