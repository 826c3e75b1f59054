"""Many plain specs in one COPY. Most of them are alike in all but id and payload, so what they share is put into the form of the wire
once, and their turns are told to the server as spans of numbers.

The general way writes the same; it makes a `Job` of every spec first, and asks for every id whether it is known.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, islice

import psycopg

from towpath.core.job import READY, SCHEDULED, Reason, Spec
from towpath.ledger.postgres.connect import end
from towpath.ledger.postgres.db import PostgresDb, add_plain, end_open, take_seqs
from towpath.ledger.postgres.migrations import steps
from towpath.ledger.postgres.statements import PLAIN, SMALL
from towpath.ledger.tables.database import PAYLOAD, Body, array

BLOCK = 64
"""Rows that are sent at a time: the server works on them while the next are made."""
_start = struct.Struct(">hiqiqi?i").pack
_length = struct.Struct(">i").pack
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_NULL = _length(-1)


class Run:
    """Specs that differ in nothing but id and payload, and the numbers they get."""

    __slots__ = ("first", "model", "specs")

    def __init__(self, specs: list[Spec]) -> None:
        self.model, self.specs, self.first = specs[0], specs, 0

    def due(self, now: int) -> int:
        return now + self.model.delay if self.model.ready_at is None else self.model.ready_at

    def span(self, now: int) -> tuple[int, int, str, int | str, int, int]:
        """Its turns."""
        due = self.due(now)
        return self.first, self.first + len(self.specs) - 1, self.model.queue, self.model.priority, due, int(due <= now)

    def rows(self, now: int) -> Iterator[bytes]:
        """In the binary form of COPY, by the columns of PLAIN."""
        rest = self._rest(now)
        for seq, spec in enumerate(self.specs, self.first):
            id, payload = spec.id.encode(), spec.payload
            size = len(payload)
            kept = _length(size) + payload if 0 < size <= SMALL else _NULL
            yield b"".join((_start(len(PLAIN), 8, seq, 8, size, 1, size <= SMALL, len(id)), id, kept, rest))

    def _rest(self, now: int) -> bytes:
        """What is the same for all of them."""
        model, due = self.model, self.due(now)
        waits = due > now
        # fmt: off
        return b"".join([
            _text(model.queue), _text(model.kind), _int(model.priority), _text(SCHEDULED if waits else READY),
            _text(Reason.DELAY if waits else Reason.NONE), _bigint(due), _int(model.max_attempts), _int(model.max_losses),
            _bigint(model.timeout), _bigint(model.retention), _int(0), _text(model.parent), _bigint(model.generation),
            _text(model.correlation_id), _bigint(now), _text(model.content_type),
        ])
        # fmt: on

    def bodies(self) -> Iterator[Body]:
        for seq, spec in enumerate(self.specs, self.first):
            if len(spec.payload) > SMALL:
                yield seq, PAYLOAD, spec.payload


def _text(value: str | None) -> bytes:
    if value is None:
        return _NULL
    data = value.encode()
    return _length(len(data)) + data


def _int(value: int | str) -> bytes:
    return struct.pack(">ii", 4, value)


def _bigint(value: int | None) -> bytes:
    return _NULL if value is None else struct.pack(">iq", 8, value)


def append(db: PostgresDb, runs: Sequence[Run], now: int | None) -> tuple[int, range] | None:
    """Append plain specs: the ledger's time, and their numbers. None if one of them is known or there twice, a queue has a capacity
    or the schema is too new."""
    ids = [spec.id for run in runs for spec in run.specs]
    if len(set(ids)) < len(ids):
        return None
    try:
        db.execute(b"BEGIN READ WRITE")
        present = _time(db, ids, {run.model.queue for run in runs}, now)
        if present is None:
            end(db.connection)
            return None
        numbers = take_seqs(db, len(ids))
        for run, first in zip(runs, accumulate([len(run.specs) for run in runs], initial=numbers.start), strict=False):
            run.first = first
        add_plain(db, _blocks(runs, present), [body for run in runs for body in run.bodies()])
        db.run("enter_many", (array([run.span(present) for run in runs]), present))
        end(db.connection, wrote=True)
    except BaseException:
        with suppress(psycopg.Error):
            end_open(db)
        raise
    return present, numbers


def _time(db: PostgresDb, ids: Sequence[str], queues: set[str], now: int | None) -> int | None:
    """The ledger's; None if these ids cannot be appended like this."""
    row = db.one("begin_many", (array(queues), min(ids), max(ids), len(steps()), now))
    if row is None:
        return None
    present, perhaps_known = row
    # New ids are later than all others. So it is seldom that there is one between them, and each has to be looked for.
    if perhaps_known and db.one("any_known", (array(ids),))[0]:
        return None
    return int(present)


def _blocks(runs: Sequence[Run], now: int) -> Iterator[bytes]:
    rows = (row for run in runs for row in run.rows(now))
    yield _SIGNATURE
    while block := b"".join(islice(rows, BLOCK)):
        yield block
    yield _TRAILER
