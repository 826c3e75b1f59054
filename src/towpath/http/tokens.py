"""Bearer tokens `tp_<id>_<secret>`: their records in the ledger, which all servers on it share.

A record has a salted SHA-256 digest of the secret. A slow password hash would add nothing: a secret is 256
random bits, so that it cannot be guessed from its digest. All records are one note: a server reads it at most
once a second, and an unknown id costs no read."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

import msgspec

from towpath.core import checks
from towpath.core.commands import Note
from towpath.errors import InvalidInput, NoteConflict, Refused
from towpath.escapes import get_logger
from towpath.http.access import Grant, Principal
from towpath.ledger import Ledger

audit = get_logger("towpath.http.audit")

KEY = "towpath/tokens"
"""The note of all records."""
MAX_TOKENS = 1_000
MAX_GRANTS = 16
MAX_LABEL = 100
"""Characters of the name of a token."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TOKEN = re.compile(r"tp_([0-9a-z]{12})_([0-9a-f]{64})")
_TRIES = 100


class TokenRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """`created_at` and `expires_at` are ledger time; None: the token does not expire."""

    id: str
    name: str
    salt: bytes
    digest: bytes
    grants: tuple[Grant, ...]
    created_at: int
    expires_at: int | None = None

    def is_valid(self, now: int) -> bool:
        return self.expires_at is None or now < self.expires_at

    @property
    def principal(self) -> Principal:
        return Principal(f"token {self.id} ({self.name})", self.grants)


TokenRecords = Mapping[str, TokenRecord]
"""By id."""
_NOBODY = TokenRecord("", "", bytes(16), bytes(32), (), 0)


def find_token(records: TokenRecords, text: str) -> TokenRecord | None:
    """The record of a token, which may have expired; None for any other text. The digest is computed and
    compared in constant time for an unknown id as well."""
    parts = _TOKEN.fullmatch(text)
    if parts is None:
        return None
    record = records.get(parts[1], _NOBODY)
    matches = hmac.compare_digest(_digest(record.salt, parts[2]), record.digest)
    return record if matches and record is not _NOBODY else None


def load_tokens(ledger: Ledger) -> TokenRecords:
    return _load(ledger)[0]


def create_token(
    ledger: Ledger, name: str, grants: Sequence[Grant], now: int, expires_at: int | None = None
) -> tuple[TokenRecord, str]:
    """Store a new token; return its record and its text, which is stored nowhere."""
    checks.text("name", name, MAX_LABEL, least=1)
    if expires_at is not None and expires_at <= now:
        raise InvalidInput(field="expires", value=expires_at, expected="in the future")
    if not 1 <= len(grants) <= MAX_GRANTS:
        raise InvalidInput(field="grants", value=len(grants), expected=f"1 to {MAX_GRANTS} grants")
    id = "".join(secrets.choice(_ALPHABET) for _ in range(12))
    secret, salt = secrets.token_hex(32), secrets.token_bytes(16)
    record = TokenRecord(id, name, salt, _digest(salt, secret), tuple(grants), now, expires_at)

    def change(records: dict[str, TokenRecord]) -> None:
        if len(records) >= MAX_TOKENS:
            raise _too_many()
        records[id] = record

    _change(ledger, change)
    audit.info("token %s (%s) was created", id, name)
    return record, f"tp_{id}_{secret}"


def revoke_token(ledger: Ledger, id: str) -> TokenRecord | None:
    """Delete a token; None if there is no token with this id."""
    found: list[TokenRecord] = []

    def change(records: dict[str, TokenRecord]) -> None:
        found[:] = [records.pop(id)] if id in records else []

    _change(ledger, change)
    if not found:
        return None
    audit.info("token %s (%s) was revoked", id, found[0].name)
    return found[0]


def _digest(salt: bytes, secret: str) -> bytes:
    return sha256(salt + secret.encode()).digest()


def _load(ledger: Ledger) -> tuple[dict[str, TokenRecord], int]:
    note = ledger.note(KEY)
    if note is None:
        return {}, 0
    records = msgspec.msgpack.decode(note.value, type=tuple[TokenRecord, ...])
    return {record.id: record for record in records}, note.version


def _change(ledger: Ledger, function: Callable[[dict[str, TokenRecord]], None]) -> None:
    """Write the records after the function has changed them; again if another process has changed them in
    between."""
    for attempt in range(_TRIES):
        records, version = _load(ledger)
        before = dict(records)
        function(records)
        if records == before:
            return
        content = msgspec.msgpack.encode(tuple(records.values()))
        if len(content) > checks.MAX_NOTE:
            raise _too_many()
        [answer] = ledger.apply([Note(key=KEY, value=content, expect=version)])
        if not isinstance(answer, Refused):
            return
        if not isinstance(answer, NoteConflict) or attempt == _TRIES - 1:
            raise answer


def _too_many() -> InvalidInput:
    message = f"there are too many tokens (at most {MAX_TOKENS}, {checks.MAX_NOTE} bytes): revoke some first"
    return InvalidInput(field="tokens", value=MAX_TOKENS, expected="fewer", message=message)
