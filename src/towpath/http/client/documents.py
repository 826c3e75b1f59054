"""Locks and their documents, as coroutines: acquire, keepalive, release, and the JSON document of a key. The
state of a message is such a document."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from towpath.core.checks import seconds
from towpath.errors import BadResponse, InvalidInput, LostLease, TowpathError
from towpath.http.client import requests
from towpath.http.client.calls import Calls
from towpath.http.client.requests import LONG_POLL, NO_WAIT, Span, default_owner, whole_seconds
from towpath.http.client.transport import Incoming, Outgoing
from towpath.http.wire import (
    AcquireRequest,
    AcquireResponse,
    DescribeResponse,
    KeepaliveRequest,
    KeepaliveResponse,
    MessageView,
    ReleaseRequest,
    ReleaseResponse,
    RemoveResponse,
    UpdateResponse,
)

RENEWALS = 3
"""Keepalives within one lease of a lock: two may fail."""


class DocumentLease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to change the document of a key. Another process may use it."""

    key: str
    lease_id: str
    fencing_token: int
    txn_id: str = ""
    namespace: str = ""

    @classmethod
    def of_state(cls, view: MessageView) -> DocumentLease:
        """Of the state of a message. Raises `InvalidInput` if it was received without."""
        if not view.state_lease_id:
            message = "the message has no state: receive it with stateful=True"
            raise InvalidInput(field="stateful", value=False, expected="True", message=message)
        return cls(
            key=f"q/{view.queue}/state/{view.message_id}",
            lease_id=view.state_lease_id,
            fencing_token=view.state_fencing_token,
            txn_id=view.state_txn_id or view.txn_id,
            namespace=view.namespace,
        )

    def headers(self) -> dict[str, str]:
        token = str(self.fencing_token)
        return {"X-Lease-ID": self.lease_id, "X-Txn-ID": self.txn_id, "X-Fencing-Token": token}


class StoredDocument(NamedTuple):
    """A JSON document; `value` is None and `version` may be 0 if there is none."""

    value: Any
    version: int
    etag: str


class DocumentCalls:
    """get, update and remove of the document of one lease."""

    def __init__(self, calls: Calls, lease: DocumentLease) -> None:
        self._calls = calls
        self.lease = lease

    async def get(self) -> StoredDocument:
        return await read_document(self._calls, self.lease.key, self.lease.namespace, self.lease.headers())

    async def update(self, value: Any, expect: int | None = None) -> StoredDocument:
        try:
            body = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(field="value", value=value, expected=f"a JSON value ({error})") from None
        answer = await self._calls.json(self._write("update", expect, body), UpdateResponse)
        return StoredDocument(value, answer.new_version, answer.new_state_etag)

    async def remove(self, expect: int | None = None) -> bool:
        return (await self._calls.json(self._write("remove", expect), RemoveResponse)).removed

    def _write(self, call: str, expect: int | None, body: bytes = b"") -> Outgoing:
        headers = self.lease.headers() | ({} if expect is None else {"X-If-Version": str(expect)})
        return requests.document(call, self.lease.key, self.lease.namespace, headers, body)


async def read_document(calls: Calls, key: str, namespace: str, headers: dict[str, str]) -> StoredDocument:
    """The document of a key; without headers as it was published."""
    request = requests.document("get", key, namespace, headers)
    if not headers:
        request = msgspec.structs.replace(request, path=f"{request.path}&public=1")
    response = await calls.open(request)
    body = await calls.body(response, request)
    version = _version(calls, response)
    if response.status == 204:
        return StoredDocument(None, version, "")
    value = requests.decoded("get", calls.server, body, Any)
    return StoredDocument(value, version, response.headers.get("etag", ""))


def _version(calls: Calls, response: Incoming) -> int:
    text = response.headers.get("x-key-version", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BadResponse(call="get", server=calls.server, why="X-Key-Version is not a number")
    return int(text)


class LockCalls:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def namespace(self, given: str | None) -> str:
        return self.calls.settings.namespace if given is None else given

    async def acquire(
        self, key: str, ttl: Span, wait: Span | None, owner: str | None, namespace: str | None
    ) -> LockHolder:
        """Raises `LockBusy` if the lock does not become free within the wait."""
        left = None if wait is None else float(whole_seconds("wait", wait))
        length = max(1, whole_seconds("ttl", ttl))
        while True:
            started = time.monotonic()
            block = LONG_POLL if left is None else min(LONG_POLL, int(left))
            content = AcquireRequest(
                namespace=self.namespace(namespace),
                key=key,
                ttl_seconds=length,
                owner=owner or default_owner(),
                block_seconds=block or NO_WAIT,
            )
            request = requests.post("acquire", "/v1/acquire", content, wait=float(block), repeatable=False)
            try:
                return LockHolder(self, await self.calls.json(request, AcquireResponse), length)
            except TowpathError as error:
                if getattr(error, "code", "") != requests.WAITING:
                    raise
                left = None if left is None else left - max(block, time.monotonic() - started)
                if left is not None and left < 1:
                    raise
            await self.calls.pause_after(started)

    async def keepalive(self, lease: DocumentLease, ttl: Span) -> KeepaliveResponse:
        content = KeepaliveRequest(
            namespace=lease.namespace,
            key=lease.key,
            lease_id=lease.lease_id,
            ttl_seconds=max(1, whole_seconds("ttl", ttl)),
            txn_id=lease.txn_id,
        )
        return await self.calls.json(self._fenced("keepalive", lease, content), KeepaliveResponse)

    async def release(self, lease: DocumentLease, rollback: bool = False) -> bool:
        content = ReleaseRequest(
            namespace=lease.namespace,
            key=lease.key,
            lease_id=lease.lease_id,
            txn_id=lease.txn_id,
            rollback=rollback,
        )
        return (await self.calls.json(self._fenced("release", lease, content), ReleaseResponse)).released

    async def describe(self, key: str, namespace: str | None) -> DescribeResponse:
        query = urlencode({"key": key, "namespace": self.namespace(namespace) or "default"})
        return await self.calls.json(requests.post("describe", f"/v1/describe?{query}", {}), DescribeResponse)

    @staticmethod
    def _fenced(call: str, lease: DocumentLease, content: msgspec.Struct) -> Outgoing:
        request = requests.post(call, f"/v1/{call}", content)
        token = ("X-Fencing-Token", str(lease.fencing_token))
        return msgspec.structs.replace(request, headers=(*request.headers, token))


class LockHolder:
    """A held lock. `keep` renews it until it is released; `lost` is the reason if that fails."""

    def __init__(self, locks: LockCalls, answer: AcquireResponse, ttl: int) -> None:
        self._locks = locks
        self.answer = answer
        self.ttl = ttl
        self.lost: TowpathError | None = None
        self._ends = time.monotonic() + ttl
        self.lease = DocumentLease(
            key=answer.key,
            lease_id=answer.lease_id,
            fencing_token=answer.fencing_token,
            txn_id=answer.txn_id,
            namespace=answer.namespace,
        )

    async def keepalive(self, ttl: Span | None = None) -> None:
        started = time.monotonic()
        self.ttl = self.ttl if ttl is None else max(1, int(seconds("ttl", ttl)))
        await self._locks.keepalive(self.lease, self.ttl)
        self._ends = started + self.ttl

    async def keep(self, pause: Callable[[float], Awaitable[bool]]) -> None:
        """Renew until `pause` returns True. An outage of the server is survived up to the end of the
        lease."""
        while not await pause(self.ttl / RENEWALS):
            try:
                await self.keepalive()
            except TowpathError as error:
                if not error.retryable or time.monotonic() >= self._ends:
                    self.lost = error
                    return

    async def release(self, rollback: bool = False) -> None:
        """Raises the reason if the lease was lost: others may have held the lock meanwhile."""
        if self.lost is not None:
            raise self.lost
        await self._locks.release(self.lease, rollback)

    def check(self) -> None:
        """Raise if the lease is lost."""
        if self.lost is not None:
            raise self.lost
        if time.monotonic() >= self._ends:
            detail = "it has ended before it was renewed"
            raise LostLease(call="keepalive", status=0, code="lease_expired", detail=detail)
