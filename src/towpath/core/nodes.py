"""Nodes of plans: the address, the limits and the places of the credentials. A node holds no secret, only the
names of environment variables and files from which a worker reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from towpath.core import checks
from towpath.errors import Described, InvalidInput
from towpath.escapes import without_password

QUEUE: Final = "node/"
"""The queue of a node is `node/<name>`."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@\-]{0,99}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_PASSWORD: Final = re.compile(r"(?:^|[\s?&])(?:ssl)?password\s*=", re.IGNORECASE)
FILES: Final = ("password_file", "token_file")
VARIABLES: Final = ("password_env", "token_env")
MAX_OUTPUT: Final = 1 << 20
"""The largest `max_output` of a node, in bytes."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A place where steps of plans run. Spans are seconds.

    `address`: for SQL a libpq URL or connection string without a password, for HTTP a base URL, for shell
    commands a working directory. `concurrency`: the number of steps that run at once, in the whole fleet.
    `timeout`: of a step without a timeout of its own. `pass_env`: environment variables of the worker that a
    shell command gets beside `PATH`, `HOME`, `LANG` and the like. `max_output`: bytes of a result that are
    stored."""

    name: str
    address: str | None = None
    concurrency: int = 1
    password_env: str | None = None
    password_file: str | None = None
    token_env: str | None = None
    token_file: str | None = None
    connect_timeout: float = 10.0
    timeout: float | None = None
    pass_env: tuple[str, ...] = ()
    max_output: int = 65_536

    def __post_init__(self) -> None:
        check_node_name("node", self.name)
        field = f"nodes.{self.name}."
        checks.whole(f"{field}concurrency", self.concurrency, 1, 10_000)
        checks.whole(f"{field}max_output", self.max_output, 0, MAX_OUTPUT)
        for name in ("connect_timeout", "timeout"):
            if (span := getattr(self, name)) is not None:
                checks.some_micros(span, field + name)
        self._check_address(field)
        for name in VARIABLES:
            _check_variable(field + name, getattr(self, name))
        for variable in self.pass_env:
            _check_variable(f"{field}pass_env", variable)
        for name in FILES:
            checks.optional_text(field + name, getattr(self, name), 4096)
        for kind in ("password", "token"):
            if getattr(self, f"{kind}_env") is not None and getattr(self, f"{kind}_file") is not None:
                expected = f"left out beside {kind}_file"
                raise InvalidInput(
                    field=f"{field}{kind}_env", value=getattr(self, f"{kind}_env"), expected=expected
                )

    def _check_address(self, field: str) -> None:
        checks.optional_text(f"{field}address", self.address, 4096)
        address = self.address or ""
        if _PASSWORD.search(address) or without_password(address) != address:
            # The value is not shown.
            expected = "an address without a password: use password_env or password_file"
            raise InvalidInput(
                field=f"{field}address", value=Described("an address with a password"), expected=expected
            )

    @property
    def queue(self) -> str:
        """The queue of the node's steps."""
        return QUEUE + self.name


def check_node_name(field: str, value: object) -> None:
    if not (isinstance(value, str) and _NAME.fullmatch(value)):
        expected = "a name of 1 to 100 letters, digits or ._-:@, the first a letter or digit"
        raise InvalidInput(field=field, value=value, expected=expected)


def _check_variable(field: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and _VARIABLE.fullmatch(value)):
        # The user may have written the secret itself, which is not shown.
        raise InvalidInput(
            field=field,
            value=Described("no name of a variable"),
            expected="the name of an environment variable: letters, digits and _",
        )


def nodes_of(tables: Any, where: str) -> Mapping[str, Node]:
    """Nodes by name, from `Node` objects or from the tables of a settings file. Raises InvalidInput, without
    the values of the table: it may contain a secret by mistake."""
    if not isinstance(tables, Mapping):
        value = Described(type(tables).__name__)
        raise InvalidInput(field=where, value=value, expected="written as tables: [nodes.a_name]")
    found: dict[str, Node] = {}
    for name, table in tables.items():
        check_node_name(f"a name of {where}", name)
        if isinstance(table, Node):
            if table.name != name:
                raise InvalidInput(field=f"nodes.{name}", value=table.name, expected="its own name")
            found[name] = table
            continue
        if not isinstance(table, Mapping) or "name" in table:
            raise _bad_table(name, where, "name is not a field of it")
        for field in table.keys() - set(Node.__struct_fields__):
            raise checks.unknown("field", field, Node.__struct_fields__[1:], f"nodes.{name} ({where})")
        try:
            found[name] = msgspec.convert({**table, "name": name}, Node)
        except msgspec.ValidationError as error:
            # An error of `__post_init__` arrives as the cause.
            if isinstance(error.__cause__, InvalidInput):
                raise error.__cause__.renamed(f"{error.__cause__.field} ({where})") from None
            raise _bad_table(name, where, str(error)) from None
    return found


def _bad_table(name: str, where: str, why: str) -> InvalidInput:
    expected = f"a table of {', '.join(Node.__struct_fields__[1:])} ({why})"
    return InvalidInput(field=f"nodes.{name} ({where})", value=Described("not valid"), expected=expected)
