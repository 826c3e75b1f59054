"""Rights of a client: which calls it may make, in which namespaces and queues.

The router sets `Exchange.principal` before it calls a handler; a handler calls `check` with the names of its
request before it reads or changes anything."""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from towpath.errors import InvalidInput
from towpath.http.problems import Problem
from towpath.http.wire import namespace_name, queue_name


class Right(enum.Enum):
    """PRODUCE: enqueue jobs and messages, write documents. CONSUME: receive and settle messages, read queues,
    jobs and documents. Either of them: hold locks. MONITOR: read the metrics. ADMIN: everything."""

    PRODUCE = "produce"
    CONSUME = "consume"
    MONITOR = "monitor"
    ADMIN = "admin"


class Grant(msgspec.Struct, frozen=True):
    """Rights in a namespace (`*`: every namespace but those of `without`), for the queues that begin with
    `prefix`. A grant with a prefix has no rights on keys of locks."""

    rights: frozenset[Right]
    namespace: str = "*"
    prefix: str = ""
    without: frozenset[str] = frozenset()

    def allows(self, right: Right, namespace: str, queue: str) -> bool:
        return (
            (right in self.rights or Right.ADMIN in self.rights)
            and self._includes(namespace)
            and queue.startswith(self.prefix)
        )

    def _includes(self, namespace: str) -> bool:
        if self.namespace != "*":
            return self.namespace == namespace
        return namespace not in self.without and not (namespace == "*" and self.without)


class Principal(msgspec.Struct, frozen=True):
    """An authenticated client. `name` is for logs and rates. `suffix` is appended to the names of owners."""

    name: str
    grants: tuple[Grant, ...]
    suffix: str = ""

    def allows(self, right: Right, namespace: str = "*", queue: str = "") -> bool:
        """Without a namespace: in every namespace and queue."""
        return any(grant.allows(right, namespace, queue) for grant in self.grants)

    def check(self, right: Right, namespace: str = "*", queue: str = "") -> None:
        """Raise a `Problem` unless the client has the right."""
        if not self.allows(right, namespace, queue):
            raise self._forbidden(right.value, namespace, queue)

    def check_lock(self, namespace: str) -> None:
        """Raise a `Problem` unless the client may hold locks in the namespace."""
        if not (self.allows(Right.CONSUME, namespace) or self.allows(Right.PRODUCE, namespace)):
            raise self._forbidden("hold locks", namespace, "")

    def _forbidden(self, action: str, namespace: str, queue: str) -> Problem:
        where = "all namespaces" if namespace == "*" else f"namespace {namespace}"
        subject = f"queue {queue} of {where}" if queue else where
        detail = f"{self.name} has no right to {action} in {subject}"
        return Problem(403, "namespace_forbidden" if namespace != "*" else "forbidden", detail)


NOBODY = Principal("nobody", ())
"""The client before it is authenticated."""
UNRESTRICTED = Principal("local", (Grant(frozenset(Right)),))
"""The client of a server without authentication, which listens on loopback or a unix socket only."""


def checked_namespace(text: str, every: str = "*") -> str:
    """The namespace of a grant; `every` stands for all of them. Raises `InvalidInput`."""
    return text if text == every else _checked("namespace", text, namespace_name)


def checked_prefix(text: str) -> str:
    """The beginning of queue names in a grant. Raises `InvalidInput`."""
    return _checked("queue prefix", text, lambda name: queue_name("default", name).queue)


def _checked(field: str, text: str, check: Callable[[str], str]) -> str:
    try:
        return check(text)
    except Problem as problem:
        expected = problem.envelope.detail
        raise InvalidInput(field=field, value=text, expected="a valid name", message=expected) from None
