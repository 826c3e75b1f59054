"""Where the client connects to, and with which credentials: addresses, token, certificates."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from towpath.errors import InvalidInput
from towpath.escapes import get_logger, without_password

log = get_logger("towpath.client")

DEFAULT_PORT = 9341
DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"
DEFAULT_TIMEOUT = 15.0
SERVER_VARIABLES = ("TOWPATH_SERVER", "LOCKD_CLIENT_SERVER")
TOKEN_VARIABLES = ("TOWPATH_TOKEN",)
BUNDLE_VARIABLES = ("TOWPATH_BUNDLE", "LOCKD_CLIENT_BUNDLE")
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)
MAX_BUNDLE = 1024 * 1024


class Endpoint(NamedTuple):
    """`url` without a slash at its end; `socket` is the path of a unix socket."""

    url: str
    socket: str | None = None

    @property
    def is_open(self) -> bool:
        """Others on the network can read what is sent."""
        host = urlsplit(self.url).hostname or ""
        if self.socket is not None or self.url.startswith("https:") or host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return True

    @property
    def name(self) -> str:
        return self.url if self.socket is None else f"unix://{self.socket}"


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    endpoints: tuple[Endpoint, ...]
    token: str | None
    tls: ssl.SSLContext | None
    timeout: float
    namespace: str

    def __repr__(self) -> str:
        """Without the token."""
        return ", ".join(endpoint.name for endpoint in self.endpoints)


def variable(names: Sequence[str], environment: Mapping[str, str] | None = None) -> str | None:
    """The first of these environment variables that is set and not empty."""
    found = os.environ if environment is None else environment
    return next((found[name] for name in names if found.get(name)), None)


def settings(
    server: str | Sequence[str] | None = None,
    *,
    token: str | None = None,
    bundle: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    namespace: str = "",
) -> ClientSettings:
    """Settings from arguments; what is not given is read from the environment."""
    if server is None:
        server = variable(SERVER_VARIABLES) or DEFAULT_SERVER
    if bundle is None and ca is None:
        bundle = variable(BUNDLE_VARIABLES)
    bundle = bundle or None
    token = variable(TOKEN_VARIABLES) if token is None else token
    if token is not None and _TOKEN.fullmatch(token) is None:
        # The value is a secret: the error does not repeat it.
        message = "token is not valid; it must be 1 to 4096 visible ASCII characters"
        raise InvalidInput(field="token", value="***", expected="visible ASCII characters", message=message)
    if not 0 < timeout <= 86_400:
        raise InvalidInput(field="timeout", value=timeout, expected="seconds, more than 0 and at most a day")
    endpoints = endpoints_of(server, secure=bool(bundle or ca))
    if token is not None and (open := [each.name for each in endpoints if each.is_open]):
        log.warning("the token is sent without encryption to %s: use https", ", ".join(open))
    if not any(endpoint.url.startswith("https:") for endpoint in endpoints):
        tls = None
    elif bundle is not None:
        tls = bundle_context(bundle)
    else:
        tls = ca_context(ca)
    return ClientSettings(endpoints=endpoints, token=token, tls=tls, timeout=timeout, namespace=namespace)


def endpoints_of(server: str | Sequence[str], secure: bool) -> tuple[Endpoint, ...]:
    """One address, several with commas, or a sequence of them."""
    given = server.split(",") if isinstance(server, str) else list(server)
    found = tuple(_endpoint(text.strip(), secure) for text in given if text.strip())
    if not found:
        raise _bad_server(str(server))
    return found


def _endpoint(text: str, secure: bool) -> Endpoint:
    if text.startswith("unix://"):
        path = text.removeprefix("unix://")
        if not path.startswith("/") or "?" in path or "\0" in path:
            raise _bad_server(text)
        return Endpoint("http://localhost", path)
    url = text if "://" in text else f"{'https' if secure else 'http'}://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _bad_server(text) from None
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise _bad_server(text)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Endpoint(f"{parts.scheme}://{host}:{port or DEFAULT_PORT}{parts.path.rstrip('/')}")


def _bad_server(text: str) -> InvalidInput:
    expected = "http://host:port, https://host:port or unix:///path, without a user, or several with commas"
    return InvalidInput(field="server", value=without_password(text), expected=expected)


def ca_context(ca: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Verifies the server and its host name with this CA, or with those of the system."""
    try:
        return ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
    except (OSError, ValueError) as error:
        raise _bad_file("ca", ca, f"a PEM file with certificates ({error})") from None


def bundle_context(bundle: str | os.PathLike[str]) -> ssl.SSLContext:
    """The client's certificate and the private CA of its servers, from one PEM file. As in lockd the host
    name is not verified: every certificate of that CA for servers is a server of the fleet."""
    try:
        with open(bundle, "rb") as file:
            text = file.read(MAX_BUNDLE).decode("ascii", "replace")
    except OSError as error:
        raise _bad_file("bundle", bundle, f"a file that can be read ({error.strerror})") from None
    blocks = [(found[1], found[0]) for found in _PEM.finditer(text)]
    certificates = [block for kind, block in blocks if kind == "CERTIFICATE"]
    keys = [block for kind, block in blocks if kind.endswith("PRIVATE KEY")]
    if len(keys) != 1 or len(certificates) < 2:
        raise _bad_file("bundle", bundle, "a PEM file with CA certificate, client certificate and one key")
    try:
        context = ssl.create_default_context(cadata="\n".join(certificates))
    except (OSError, ValueError) as error:
        raise _bad_file("bundle", bundle, f"a PEM file with valid certificates ({error})") from None
    context.check_hostname = False
    for own in certificates:
        others = [each for each in certificates if each != own]
        if _load(context, "\n".join([own, *others, keys[0], ""])):
            return context
    raise _bad_file("bundle", bundle, "a PEM file whose key belongs to one of its certificates")


def _load(context: ssl.SSLContext, chain: str) -> bool:
    """Load a certificate and its key; False if they do not belong together. OpenSSL reads them from a file
    only."""
    with tempfile.TemporaryDirectory(prefix="towpath-") as folder:
        path = Path(folder) / "chain.pem"
        path.touch(0o600)
        path.write_text(chain, "ascii")
        try:
            context.load_cert_chain(path, password="")
        except ssl.SSLError:
            return False
    return True


def _bad_file(field: str, path: str | os.PathLike[str] | None, expected: str) -> InvalidInput:
    return InvalidInput(field=field, value=str(path), expected=expected)
