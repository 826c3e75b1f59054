"""Rights of a client: which calls it may make, in which namespaces and queues.

The router sets `Exchange.principal` before it calls a handler; a handler calls `check` with the names of its
request before it reads or changes anything."""

from __future__ import annotations

import enum

import msgspec

from towpath.http.problems import Problem


class Right(enum.Enum):
    """PRODUCE: enqueue jobs and messages, write documents. CONSUME: receive and settle messages, read queues
    and jobs, hold locks. ADMIN: everything else."""

    PRODUCE = "produce"
    CONSUME = "consume"
    ADMIN = "admin"


class Grant(msgspec.Struct, frozen=True):
    """Rights in a namespace (`*`: every namespace), for the queues that begin with `prefix`."""

    rights: frozenset[Right]
    namespace: str = "*"
    prefix: str = ""

    def allows(self, right: Right, namespace: str, queue: str) -> bool:
        return (
            (right in self.rights or Right.ADMIN in self.rights)
            and self.namespace in ("*", namespace)
            and queue.startswith(self.prefix)
        )


class Principal(msgspec.Struct, frozen=True):
    """An authenticated client. `name` is for logs."""

    name: str
    grants: tuple[Grant, ...]

    def allows(self, right: Right, namespace: str = "*", queue: str = "") -> bool:
        """Without a namespace: in every namespace and queue."""
        return any(grant.allows(right, namespace, queue) for grant in self.grants)

    def check(self, right: Right, namespace: str = "*", queue: str = "") -> None:
        """Raise a `Problem` unless the client has the right."""
        if not self.allows(right, namespace, queue):
            where = "all namespaces" if namespace == "*" else f"namespace {namespace}"
            subject = f"queue {queue} of {where}" if queue else where
            detail = f"{self.name} has no right to {right.value} in {subject}"
            raise Problem(403, "namespace_forbidden" if namespace != "*" else "forbidden", detail)


UNRESTRICTED = Principal("local", (Grant(frozenset(Right)),))
"""The client of a server without authentication, which listens on loopback or a unix socket only."""
