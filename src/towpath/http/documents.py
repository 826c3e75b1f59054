"""get, update and remove: the document of a lock, and the state of a message.

The key `q/<queue>/state/<message id>` is the state of a message. Its lease is that of the message, and it is
the state that `Message.state` has in Python: it is written at once, and survives a crash of the consumer."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import NamedTuple, Protocol

import msgspec

from towpath.core import checks
from towpath.core.commands import Noted
from towpath.core.job import RUNNING, Job, state_key
from towpath.errors import NoteConflict
from towpath.http import locks
from towpath.http.access import Right
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.locks import MAX_DOCUMENT, LeaseClaim, LockName, LockRecords, Preconditions, etag_of
from towpath.http.problems import Headers, Problem, bad_body
from towpath.http.wire import RemoveResponse, UpdateResponse, lease_ids, namespace_name, queue_name
from towpath.queues import receipts
from towpath.queues.receipts import Receipt

MAX_KEY = 128
_KEY = re.compile(r"[^\x00-\x20\x7f]+")
_STATE = re.compile(r"q/([^/]+)/state/([^/]+)")


class Found(NamedTuple):
    """A document (None: there is none) at a version."""

    version: int
    content: bytes | None
    fence: int


class DocumentStore(Protocol):
    async def read(self, claim: LeaseClaim | None) -> Found:
        """The document for the holder of a lease; None: for everyone, as it was published."""
        ...

    async def write(self, claim: LeaseClaim, content: bytes | None, conditions: Preconditions) -> Found: ...


class LockDocument:
    def __init__(self, context: ServerContext, name: LockName) -> None:
        self._now = context.engine.clock.now
        self._records = LockRecords(context)
        self._name = name

    async def read(self, claim: LeaseClaim | None) -> Found:
        record = await self._records.load(self._name)
        if claim is None:
            return Found(record.version, record.document, record.fence)
        locks.check_lease(record, claim, self._now())
        return Found(*record.visible(), record.fence)

    async def write(self, claim: LeaseClaim, content: bytes | None, conditions: Preconditions) -> Found:
        def change(record: locks.LockRecord, now: int) -> locks.LockRecord:
            return locks.stage(record, claim, content, conditions, now)

        record = await self._records.change(self._name, change)
        return Found(*record.visible(), record.fence)


class StateDocument:
    """The state of the message `id` of a queue."""

    def __init__(self, context: ServerContext, namespace: str, queue: str, id: str) -> None:
        self._context = context
        self._queue = context.queue(namespace, queue)
        self._id = id

    async def read(self, claim: LeaseClaim | None) -> Found:
        if claim is not None:
            await self._check(claim)
        elif await self._job() is None:
            return Found(0, None, 0)
        note = await self._context.read(self._context.engine.ledger.note, state_key(self._id))
        fence = 0 if claim is None else claim.fence
        return Found(0, None, fence) if note is None else Found(note.version, note.value, fence)

    async def write(self, claim: LeaseClaim, content: bytes | None, conditions: Preconditions) -> Found:
        found = await self.read(claim)
        # A state that was removed has no version to compare. The lease excludes other writers.
        if found.content is not None:
            conditions.check(found.version, found.content)
        receipt = Receipt(self._id, claim.fence)
        try:
            answer = await self._context.engine.acall(receipts.save_state(receipt, content, found.version))
        except NoteConflict:
            raise Problem(409, "version_conflict", "the state was changed by another client") from None
        assert isinstance(answer, Noted)
        # lockd's client uses a version only if it is positive.
        return Found(found.version + 1 if content is None else answer.version, content, claim.fence)

    async def _check(self, claim: LeaseClaim) -> None:
        """Raise a `Problem` unless the claim is that of the current delivery."""
        job = await self._job()
        if job is None:
            raise Problem(404, "not_found", "message not found")
        ids = lease_ids(job.id, job.fence)
        held = job.state is RUNNING and claim.lease == ids.state_lease and claim.fence == job.fence
        if not held or claim.txn not in (None, ids.txn):
            raise Problem(409, "queue_message_lease_mismatch", "the lease of the message is lost")

    async def _job(self) -> Job | None:
        """The message, if it is one of this queue."""
        known = len(self._id) <= checks.MAX_NAME and checks.storable(self._id)
        read = self._context.engine.ledger.get_many
        job = (await self._context.read(read, [self._id], bodies=False)).get(self._id) if known else None
        return job if job is not None and job.queue == self._queue.stored else None


def is_state_key(key: str) -> bool:
    return _STATE.fullmatch(key) is not None


def key_name(context: ServerContext, namespace: str, key: str) -> LockName:
    """The name of a lock. Raises a `Problem`."""
    space = namespace_name(namespace or context.options.default_namespace)
    name = key.strip().removeprefix("/")
    if len(name) > (300 if is_state_key(name) else MAX_KEY):
        raise Problem(400, "invalid_key", f"key too long (max {MAX_KEY} characters)")
    if _KEY.fullmatch(name) is None or not checks.storable(name):
        raise Problem(400, "invalid_key", "key must not be empty or have spaces or control characters")
    return LockName(space, name)


def check_key(exchange: Exchange, name: LockName, right: Right | None = None) -> None:
    """Check the right on a key; None: to hold its lease. The state of a message needs the right to consume
    its queue. Raises a `Problem`."""
    if (state := _STATE.fullmatch(name.key)) is not None:
        queue = queue_name(name.namespace, state[1])
        exchange.principal.check(Right.CONSUME, queue.namespace, queue.queue)
    elif right is None:
        exchange.principal.check_lock(name.namespace)
    else:
        exchange.principal.check(right, name.namespace)


class DocumentRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def get(self, exchange: Exchange) -> None:
        document = self._document(exchange, Right.CONSUME)
        is_public = exchange.argument("public") in ("1", "true") and not exchange.header(b"x-lease-id")
        found = await document.read(None if is_public else claim_of(exchange, with_txn=False))
        headers: Headers = [
            (b"x-key-version", str(found.version).encode()),
            (b"x-correlation-id", exchange.own_correlation().encode()),
        ]
        if found.fence:
            headers.append((b"x-fencing-token", str(found.fence).encode()))
        if found.content is None:
            await exchange.start(204, headers)
            await exchange.write(b"", more=False)
        else:
            headers += [(b"content-type", b"application/json"), (b"etag", etag_of(found.content).encode())]
            await exchange.send(200, headers, found.content)

    async def update(self, exchange: Exchange) -> None:
        document, claim, conditions = self._writer(exchange)
        self._check_size(exchange)
        body = await exchange.body(MAX_DOCUMENT, _too_large)
        _check_expected(exchange, body)
        found = await document.write(claim, _compacted(body), conditions)
        assert found.content is not None
        etag = etag_of(found.content)
        answer = UpdateResponse(new_version=found.version, new_state_etag=etag, bytes=len(found.content))
        headers = [(b"etag", etag.encode()), (b"x-key-version", str(found.version).encode())]
        await exchange.reply(answer, exchange.own_correlation(), headers)

    async def remove(self, exchange: Exchange) -> None:
        document, claim, conditions = self._writer(exchange)
        before = await document.read(claim)
        found = before if before.content is None else await document.write(claim, None, conditions)
        answer = RemoveResponse(removed=before.content is not None, new_version=found.version)
        version = str(found.version).encode()
        await exchange.reply(answer, exchange.own_correlation(), [(b"x-key-version", version)])

    def _document(self, exchange: Exchange, right: Right) -> DocumentStore:
        key = exchange.argument("key")
        if not key.strip():
            raise Problem(400, "missing_params", "key must be given in the query string")
        name = key_name(self._context, exchange.argument("namespace"), key)
        check_key(exchange, name, right)
        if (state := _STATE.fullmatch(name.key)) is not None:
            return StateDocument(self._context, name.namespace, state[1], state[2])
        return LockDocument(self._context, name)

    def _writer(self, exchange: Exchange) -> tuple[DocumentStore, LeaseClaim, Preconditions]:
        version, etag = exchange.header(b"x-if-version"), exchange.header(b"x-if-state-etag")
        conditions = Preconditions(None if not version else _whole(version, "X-If-Version"), etag or None)
        return self._document(exchange, Right.PRODUCE), claim_of(exchange, with_txn=True), conditions

    @staticmethod
    def _check_size(exchange: Exchange) -> None:
        """Refuse a document by its length, before it is read."""
        length = exchange.header(b"content-length")
        if length is not None and int(length) > MAX_DOCUMENT:
            raise _too_large()


def claim_of(exchange: Exchange, with_txn: bool) -> LeaseClaim:
    """The lease in the headers. Raises a `Problem`."""
    lease = (exchange.header(b"x-lease-id") or "").strip()
    if not lease:
        raise Problem(400, "missing_params", "X-Lease-ID must be given")
    txn = (exchange.header(b"x-txn-id") or "").strip()
    return LeaseClaim(lease, fencing_token(exchange), txn if with_txn else None)


def fencing_token(exchange: Exchange) -> int:
    text = exchange.header(b"x-fencing-token")
    if text is None:
        raise Problem(400, "missing_fencing_token", "X-Fencing-Token must be given")
    if re.fullmatch(r"[0-9]{1,18}", text.strip()) is None:
        raise Problem(400, "invalid_fencing_token", "X-Fencing-Token must be a whole number")
    return int(text)


def _whole(text: str, field: str) -> int:
    if re.fullmatch(r"[0-9]{1,18}", text.strip()) is None:
        raise bad_body(f"{field} must be a whole number")
    return int(text)


def _compacted(body: bytes) -> bytes:
    """The JSON document without white space."""
    try:
        msgspec.json.decode(body)
        return msgspec.json.format(body, indent=-1)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_body(f"the document is not JSON: {error}") from None


def _check_expected(exchange: Exchange, body: bytes) -> None:
    size, digest = exchange.header(b"x-expected-bytes"), exchange.header(b"x-expected-sha256")
    if size and _whole(size, "X-Expected-Bytes") != len(body):
        raise Problem(409, "expected_bytes_mismatch", f"the body has {len(body)} bytes")
    if digest and digest.strip().lower() != (found := sha256(body).hexdigest()):
        raise Problem(409, "expected_sha256_mismatch", f"the body has the digest {found}")


def _too_large() -> Problem:
    return Problem(413, "document_too_large", f"the document has more than {MAX_DOCUMENT} bytes")
