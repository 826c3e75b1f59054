"""Locks with a document: the record of a key, and what each call does to it.

A record is a note `lock/<namespace>/<key>`, written by compare-and-set. An update is staged: other clients
see it after the release, and it is dropped by a rollback or when the lease ends. The fence of a key grows
with every acquire; the record is kept, so that it never starts again."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from towpath.core.checks import SECOND
from towpath.core.commands import Note
from towpath.errors import NoteConflict
from towpath.http.context import ServerContext
from towpath.http.problems import Problem

MAX_DOCUMENT = 100_000
"""Bytes of a document: a record has the published and the staged one, and a note has at most 256 KiB."""
_TRIES = 100
"""Times that a change is repeated because another client was first."""


class LockName(NamedTuple):
    namespace: str
    key: str

    @property
    def note(self) -> str:
        return f"lock/{self.namespace}/{self.key}"


class LeaseClaim(NamedTuple):
    """The ids by which a client shows that it holds a lease. `txn` None: not compared."""

    lease: str
    fence: int
    txn: str | None


class LockRecord(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """`expires_at` is microseconds, `updated_at` seconds. No lease: `lease` is empty. `staged_version` is 0
    if nothing is staged; a staged document of None removes the document."""

    fence: int = 0
    version: int = 0
    document: bytes | None = None
    updated_at: int = 0
    lease: str = ""
    owner: str = ""
    txn: str = ""
    expires_at: int = 0
    staged_version: int = 0
    staged: bytes | None = None

    def is_held(self, now: int) -> bool:
        return bool(self.lease) and self.expires_at > now

    @property
    def etag(self) -> str:
        return etag_of(self.document)

    def visible(self) -> tuple[int, bytes | None]:
        """(version, document) as the holder of the lease sees them."""
        return (self.staged_version, self.staged) if self.staged_version else (self.version, self.document)


class Contended(Exception):
    """Another client holds the lease."""

    def __init__(self, record: LockRecord) -> None:
        self.record = record


class Preconditions(msgspec.Struct, frozen=True):
    """The version and the etag that a writer expects; None: any."""

    version: int | None = None
    etag: str | None = None

    def check(self, version: int, document: bytes | None) -> None:
        etag = etag_of(document)
        if self.version is not None and self.version != version:
            raise Problem(409, "version_conflict", f"the version is {version}").versioned(version, etag)
        if self.etag is not None and self.etag != etag:
            raise Problem(409, "etag_mismatch", "the document was changed").versioned(version, etag)


def etag_of(document: bytes | None) -> str:
    return "" if document is None else sha256(document).hexdigest()


def new_xid() -> str:
    """A random id in the form of an xid: 20 characters of `[0-9a-v]`."""
    return base64.b32hexencode(secrets.token_bytes(12)).decode().rstrip("=").lower()


class Applicant(NamedTuple):
    """A request for a lease of `ttl` microseconds."""

    owner: str
    ttl: int
    txn: str
    only_new: bool


def acquire(record: LockRecord, applicant: Applicant, now: int) -> LockRecord:
    """The record with a new lease. The staged document of an expired lease is dropped."""
    if record.is_held(now):
        raise Contended(record)
    if applicant.only_new and record.document is not None:
        raise Problem(409, "already_exists", "the key has a document").versioned(record.version, record.etag)
    return replace(
        record,
        fence=record.fence + 1,
        updated_at=now // SECOND,
        lease=new_xid(),
        owner=applicant.owner,
        txn=applicant.txn,
        expires_at=now + applicant.ttl,
        staged_version=0,
        staged=None,
    )


def check_lease(record: LockRecord, claim: LeaseClaim, now: int) -> None:
    """Raise a `Problem` unless the client holds the lease."""
    if not record.lease or record.lease != claim.lease:
        raise Problem(403, "lease_required", "the lease is not held by this client")
    if not record.is_held(now):
        raise Problem(403, "lease_expired", "the lease has ended")
    if record.fence != claim.fence:
        raise Problem(403, "fencing_mismatch", f"the fencing token is {record.fence}")
    if claim.txn is not None and record.txn != claim.txn:
        if not claim.txn:
            raise Problem(400, "missing_txn", "txn_id must be given")
        raise Problem(409, "txn_mismatch", "the lease has another txn_id")


def renew(record: LockRecord, claim: LeaseClaim, ttl: int, now: int) -> LockRecord:
    check_lease(record, claim, now)
    return replace(record, expires_at=now + ttl, updated_at=now // SECOND)


def release(record: LockRecord, claim: LeaseClaim, rollback: bool, now: int) -> LockRecord:
    """The record without its lease; the staged document is published, unless it is rolled back. A lease that
    is not held is released already."""
    try:
        check_lease(record, claim, now)
    except Problem as problem:
        if problem.status == 403:
            return record
        raise
    version, document = (record.version, record.document) if rollback else record.visible()
    return replace(
        record,
        version=version,
        document=document,
        updated_at=now // SECOND,
        lease="",
        owner="",
        txn="",
        expires_at=0,
        staged_version=0,
        staged=None,
    )


def stage(
    record: LockRecord, claim: LeaseClaim, document: bytes | None, conditions: Preconditions, now: int
) -> LockRecord:
    """The record with a new document that the release will publish."""
    check_lease(record, claim, now)
    version, current = record.visible()
    conditions.check(version, current)
    return replace(record, staged_version=version + 1, staged=document, updated_at=now // SECOND)


class LockRecords:
    """The records in the ledger."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def load(self, name: LockName) -> LockRecord:
        return (await self._load(name))[0]

    async def change(self, name: LockName, function: Callable[[LockRecord, int], LockRecord]) -> LockRecord:
        """Write the result of the function for the record and the time; nothing if it returns the record
        itself. It is called again if another client has written the record in between."""
        for _ in range(_TRIES):
            old, version = await self._load(name)
            new = function(old, self._context.engine.clock.now())
            if new is old:
                return old
            try:
                await self._context.engine.acall(
                    Note(key=name.note, value=msgspec.msgpack.encode(new), expect=version)
                )
            except NoteConflict:
                continue
            return new
        raise Problem(409, "lease_conflict", "other clients change the key all the time", retry_after=1)

    async def _load(self, name: LockName) -> tuple[LockRecord, int]:
        note = await self._context.read(self._context.engine.ledger.note, name.note)
        if note is None:
            return LockRecord(), 0
        return msgspec.msgpack.decode(note.value, type=LockRecord), note.version
