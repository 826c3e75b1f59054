"""Actions of the steps of a plan: a call of a task, an SQL statement, a shell command, an HTTP request.

An action is a value: frozen, hashable, comparable, and the same after a way through JSON, where the field
`run` has the name of its type. It is stored in the ledger and shown as it is, so that it must not contain a
secret: addresses and credentials belong to the node on which the action runs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.errors import InvalidInput

MAX_TEXT = 1024 * 1024
"""Characters of a statement, a body or an input."""

Scalar = None | bool | int | float | str
"""A parameter of an SQL statement."""
Pairs = Mapping[str, str] | tuple[tuple[str, str], ...]
"""Names with texts. A mapping is stored as sorted pairs, so that the action is hashable; `dict(pairs)` is the
mapping again."""


class Answer(StrEnum):
    """The answer of a check: did the action take effect?"""

    APPLIED = "applied"
    NOT_APPLIED = "not_applied"
    RUNNING = "running"
    UNKNOWN = "unknown"


class _Tagged(msgspec.Struct, frozen=True, tag_field="run", omit_defaults=True, forbid_unknown_fields=True):
    """The form of every action in JSON."""


_NO_ARGS = msgspec.Raw(b"{}")


class TaskCall(_Tagged, frozen=True, tag="task"):
    """A call of a task by its name. `args` is a JSON object, the payload of the call."""

    task: str
    args: msgspec.Raw = _NO_ARGS

    def __post_init__(self) -> None:
        checks.text("task", self.task, least=1)
        try:
            compact = msgspec.json.format(bytes(self.args), indent=-1)
        except msgspec.DecodeError as error:
            raise _wrong("args", bytes(self.args), f"a JSON object: {error}") from None
        if compact[:1] != b"{":
            raise _wrong("args", compact, "a JSON object with the arguments by name")
        force_setattr(self, "args", _NO_ARGS if compact == b"{}" else msgspec.Raw(compact))

    def __hash__(self) -> int:
        return hash((self.task, bytes(self.args)))

    def __repr__(self) -> str:
        return f"TaskCall(task={self.task!r}, args={bytes(self.args).decode()!r})"


class Sql(_Tagged, frozen=True, tag="sql"):
    """A statement on the database of the node, in a transaction of its own, or without one (`autocommit`), as
    CREATE DATABASE, CREATE SUBSCRIPTION and VACUUM require. The placeholders of `params` are `%s`."""

    statement: str
    params: tuple[Scalar, ...] = ()
    autocommit: bool = False

    def __post_init__(self) -> None:
        checks.text("statement", self.statement, MAX_TEXT, least=1)
        params = checks.all_of("params", self.params, (type(None), bool, int, float, str))
        for value in params:
            if isinstance(value, float) and not math.isfinite(value):
                raise _wrong("params", value, "a finite number, since JSON has no NaN and no infinity")
            if isinstance(value, str):
                checks.text("params", value, MAX_TEXT)
        force_setattr(self, "params", params)


class Shell(_Tagged, frozen=True, tag="shell"):
    """A program with its arguments, without a shell in between: use `("sh", "-c", text)` for one. `env` is
    added to the environment, `input` is written to the standard input."""

    argv: tuple[str, ...]
    cwd: str | None = None
    env: Pairs = ()
    input: str | None = None

    def __post_init__(self) -> None:
        argv = checks.all_of("argv", self.argv, str)
        if not argv or not argv[0]:
            raise _wrong("argv", self.argv, "the name of a program and its arguments")
        for each in argv:
            checks.text("argv", each, MAX_TEXT)
        if self.cwd is not None:
            checks.text("cwd", self.cwd, 4096, least=1)
        if self.input is not None:
            checks.text("input", self.input, MAX_TEXT)
        force_setattr(self, "argv", argv)
        env = _pairs("env", self.env)
        if bad := [name for name, _ in env if "=" in name]:
            raise _wrong("env", bad[0], "names without =")
        force_setattr(self, "env", env)


class Http(_Tagged, frozen=True, tag="http"):
    """An HTTP request. `url` is a full address, or a path (`/...`) below the address of the node. `expect`
    are the status codes of success; without any, 200 to 299."""

    method: str
    url: str
    headers: Pairs = ()
    body: str | None = None
    expect: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.method, str) and self.method.isascii() and self.method.isalpha()):
            raise _wrong("method", self.method, "the name of an HTTP method, such as POST")
        checks.text("url", self.url, 8192, least=1)
        if (
            not self.url.startswith(("/", "http://", "https://"))
            or not self.url.isprintable()
            or " " in self.url
        ):
            raise _wrong("url", self.url, "a path that begins with /, or an http:// or https:// address")
        if self.body is not None:
            checks.text("body", self.body, MAX_TEXT)
        for status in checks.all_of("expect", self.expect, int):
            checks.whole("expect", status, 100, 599)
        force_setattr(self, "method", self.method.upper())
        force_setattr(self, "headers", _pairs("headers", self.headers))
        force_setattr(self, "expect", tuple(sorted(set(self.expect))))


Action = TaskCall | Sql | Shell | Http


def action_of(value: object, field: str = "action") -> Action:
    """The action of a value: an action itself, or a call of a task (`task.of(...)`)."""
    if isinstance(value, Action):
        return value
    kind, payload = getattr(getattr(value, "task", None), "kind", None), getattr(value, "payload", None)
    if isinstance(kind, str) and isinstance(payload, bytes):
        if getattr(value, "after", ()):
            raise _wrong(field, value, "a call without dependencies of its own: name them in the step")
        return TaskCall(kind, msgspec.Raw(payload))
    raise _wrong(field, value, "a TaskCall, Sql, Shell or Http, or a call of a task: task.of(...)")


def action_text(action: Action, limit: int = 120) -> str:
    """The action in one line, at most `limit` characters long."""
    match action:
        case TaskCall():
            text = f"{action.task} {bytes(action.args).decode()}"
        case Sql():
            text = action.statement
            if action.params:
                text += f" {list(action.params)}"
        case Shell():
            text = f"$ {shlex.join(action.argv)}"
        case Http():
            text = f"{action.method} {action.url}"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _pairs(field: str, value: Any) -> tuple[tuple[str, str], ...]:
    try:
        pairs = dict(value)
    except (TypeError, ValueError):
        raise _wrong(field, value, "a mapping of text to text") from None
    checks.headers(pairs)
    return tuple(sorted(pairs.items()))


def _wrong(field: str, value: object, expected: str) -> InvalidInput:
    return InvalidInput(field=field, value=value, expected=expected)
