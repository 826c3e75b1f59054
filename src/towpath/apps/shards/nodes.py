"""Nodes: the PostgreSQL servers, by name. A node has an address (a connection string without a password); the
password is read when a connection is opened, so that it is neither stored in the ledger nor shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from towpath.apps.shards import names
from towpath.errors import InvalidInput, NotInstalled
from towpath.errors import NodeAway as NodeAway

if TYPE_CHECKING:
    from psycopg import Connection

_OF_THE_USER = ("user", "password", "sslpassword", "passfile", "sslcert", "sslkey")
_OF_THE_CLIENT = ("application_name", "fallback_application_name", "options", "client_encoding")
DEFAULTS = {"connect_timeout": "5", "tcp_user_timeout": "15000", "keepalives_idle": "10"}
"""A connection that hangs ends after these times; an address may set others."""


def is_database(address: str) -> bool:
    """Is this the address of a PostgreSQL server? Nodes of other plans have URLs or directories."""
    return address.startswith(("postgresql://", "postgres://")) or (
        "=" in address and not address.startswith(("http://", "https://", "/", "."))
    )


class Nodes:
    """The nodes by name. `addresses` are connection strings; `password` returns the password of a node, None
    if its address needs none."""

    def __init__(
        self, addresses: Mapping[str, str], password: Callable[[str], str | None] = lambda node: None
    ) -> None:
        self._addresses = {names.check_node(name): address for name, address in addresses.items()}
        self._password = password

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._addresses))

    def __contains__(self, node: object) -> bool:
        return node in self._addresses

    def __len__(self) -> int:
        return len(self._addresses)

    def parameters(self, node: str) -> dict[str, str]:
        """The connection parameters of a node, with its password."""
        if node not in self._addresses:
            known = ", ".join(self) or "none"
            raise InvalidInput(field="node", value=node, expected=f"a node of the settings: {known}")
        found = {**DEFAULTS, **_parsed(node, self._addresses[node])}
        password = self._password(node)
        return found if password is None else {**found, "password": password}

    def conninfo(self, node: str) -> str:
        """The connection string of a node with its password, for a subscription."""
        from psycopg.conninfo import make_conninfo

        return make_conninfo("", **_without(self.parameters(node), _OF_THE_CLIENT))

    @contextmanager
    def connect(self, node: str, *, autocommit: bool = True, **options: str) -> Iterator[Connection[Any]]:
        """Open a connection; `options` are settings of the session, such as `lock_timeout="2s"`. Raises
        `NodeAway`."""
        import psycopg

        settings = " ".join(f"-c {name}={value}" for name, value in {"search_path": "", **options}.items())
        given: dict[str, Any] = {
            "application_name": "towpath shards",
            **self.parameters(node),
            "options": settings,
        }
        try:
            connection = psycopg.connect(**given, autocommit=autocommit)
        except psycopg.OperationalError as error:
            raise NodeAway(node=node, why=f"cannot be reached: {_hidden(error, given)}", sent=False) from None
        with connection:
            yield connection

    def server_options(self, node: str) -> dict[str, str]:
        """The options of a foreign server for this node: its address without user and password."""
        return _without(self.parameters(node), _OF_THE_USER + _OF_THE_CLIENT)

    def mapping_options(self, node: str) -> dict[str, str]:
        """The options of a user mapping for this node: user and password."""
        given = self.parameters(node)
        return {name: given[name] for name in _OF_THE_USER if name in given and name != "passfile"}


def _parsed(node: str, address: str) -> dict[str, str]:
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise NotInstalled(package="psycopg", why=str(error), extra="postgres") from None
    try:
        return {name: str(value) for name, value in conninfo_to_dict(address).items() if value is not None}
    except ProgrammingError:
        raise InvalidInput(
            field=f"nodes.{node}.address", value="...", expected="a connection string of PostgreSQL"
        ) from None


def _hidden(error: Exception, given: Mapping[str, str]) -> str:
    """The text of an error without the password."""
    text, password = str(error).strip(), given.get("password")
    return text.replace(password, "***") if password else text


def _without(parameters: Mapping[str, str], left_out: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if name not in left_out}
