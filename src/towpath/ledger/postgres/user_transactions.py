"""Append on a connection of the user, in the same transaction as the user's data.

The append only inserts rows, so that a user transaction that stays open blocks no other process. Plain specs
are inserted as jobs. Specs with keys, dependencies or groups are inserted into the inbox, because their
admission can be decided only after the commit: the next batch of any process applies them.

The steps are written once, as a generator that yields a statement for the user's connection or a read for the
ledger's own connection, and is sent the result. `run` and `arun` execute the steps synchronously and
asynchronously."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import msgspec
import psycopg
from msgspec.structs import replace
from psycopg import errors
from psycopg.adapt import AdaptersMap
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types.array import ListBinaryDumper
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import BytesBinaryDumper

from towpath.core.admission import admit
from towpath.core.commands import Append, Placed
from towpath.core.facts import (
    AppendFacts,
    GroupFact,
    KeyHolder,
    Known,
    Place,
    Quota,
    Room,
    blobs_of,
    is_unrelated,
    key_of,
    places_of,
)
from towpath.core.job import Spec, State
from towpath.errors import NestedCall, WrongConnection
from towpath.ledger.postgres.connection import check_schema
from towpath.ledger.postgres.rows import PostgresDb, insert_args
from towpath.ledger.postgres.statements import Statements
from towpath.ledger.tables.blobs import blob_facts
from towpath.ledger.tables.database import array
from towpath.ledger.tables.transaction import GroupRow, PartRow

Rows = list[tuple[int, ...]]
Read = Callable[[PostgresDb], Any]
Step = bytes | tuple[bytes, Sequence[Any]] | Read
"""A statement without result, a statement with arguments and rows, or a read on the ledger's own
connection."""
Steps = Generator[Step, Any, tuple[Placed, ...]]
AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

_BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_SAVE, _KEEP = b"SAVEPOINT towpath_append", b"RELEASE SAVEPOINT towpath_append"
_UNDO = b"ROLLBACK TO SAVEPOINT towpath_append"


class AppendContext(NamedTuple):
    """The parts of the ledger that an append needs."""

    place: str
    statements: Statements
    channel: str
    now: Callable[[int], int]
    """Ledger time from the time of the server."""
    read: Callable[[Read], Any]
    own: PostgresDb | None
    """The ledger's connection for writes. The user must not append on it."""


class _Begun(NamedTuple):
    started: int
    ledger: int
    database: int
    schema: int
    min_schema: int
    last: int
    present: int
    forgotten: int
    """Nonzero if one of the ids has a tombstone."""
    bounded: int
    """Nonzero if one of the queues has a capacity."""


def append_on(context: AppendContext, connection: object, specs: Sequence[Spec]) -> tuple[Placed, ...]:
    driver = driver_of(connection)
    if context.own is not None and driver is context.own.connection:
        raise NestedCall(path=context.place)
    return run(_steps(context, Append(tuple(specs)).specs, driver), driver, context.read)


async def aappend_on(context: AppendContext, connection: object, specs: Sequence[Spec]) -> tuple[Placed, ...]:
    driver = await adriver_of(connection)
    return await arun(_steps(context, Append(tuple(specs)).specs, driver), driver, context.read)


def _steps(context: AppendContext, specs: Sequence[Spec], connection: AnyConnection) -> Steps:
    """Append in the open transaction, or in the one that the driver begins now. With autocommit, append in a
    transaction of its own."""
    status = connection.info.transaction_status
    if status is TransactionStatus.INERROR:
        raise WrongConnection(why="the transaction on this connection has failed; roll it back first")
    own = connection.autocommit and status is TransactionStatus.IDLE
    yield _BEGIN if own else _SAVE
    try:
        answers = yield from _append(context, specs)
    except BaseException:
        if not connection.closed:
            yield b"ROLLBACK" if own else _UNDO
            if not own:
                yield _KEEP
        raise
    yield b"COMMIT" if own else _KEEP
    return answers


def _append(context: AppendContext, specs: Sequence[Spec]) -> Generator[Step, Any, tuple[Placed, ...]]:
    def named(name: str, *args: Any) -> tuple[bytes, Sequence[Any]]:
        return context.statements.named[name][1], args

    queues = sorted({spec.queue for spec in specs})
    (row,) = yield named("user_begin", _json([spec.id for spec in specs]), _json(queues))
    begun = _Begun(*row)
    check_schema(context.place, begun.schema, begun.min_schema)
    found = yield lambda db: db.one("server")
    if tuple(found) != (begun.started, begun.ledger, begun.database):
        raise WrongConnection(
            why=f"this connection is to another server or database than the ledger's, {context.place}"
        )
    now = max(begun.last, context.now(begun.present))
    limits = AppendLimits({}, {})
    if begun.bounded:
        full: Rows = yield named("user_rooms", _json(queues))
        limits.rooms.update({queues[n - 1]: Room(capacity, depth) for n, capacity, depth in full})
    if places := places_of(specs):
        limits.quotas.update((yield lambda db: _seen_quotas(db, places)))
    if all(map(is_unrelated, specs)) and not begun.forgotten:
        answers = yield from _insert(named, specs, now, limits)
    else:
        answers = yield from _store_in_inbox(named, specs, now, limits)
    yield named("user_end", str(now).encode(), context.channel.encode())
    return answers


class AppendLimits(NamedTuple):
    """The limits of the append. The rate of a part is checked and not spent: its row would be locked until
    the user's transaction ends."""

    rooms: dict[str, Room]
    quotas: dict[Place, Quota]


def _seen_quotas(db: PostgresDb, places: set[Place]) -> dict[Place, Quota]:
    waiting = {
        (queue, name): n
        for queue, name, n in db.rows("waiting_parts", (array(places),), tuple[str, str, int])
    }
    rows = db.rows("parts_by_name", (array(places),), PartRow)
    return {
        (row.queue, row.name): Quota(
            row.capacity, row.ready + waiting[row.queue, row.name], row.append_rate, row.append_at
        )
        for row in rows
        if row.capacity is not None or row.append_count is not None
    }


Named = Callable[..., tuple[bytes, Sequence[Any]]]


def _insert(named: Named, specs: Sequence[Spec], now: int, limits: AppendLimits) -> Steps:
    while True:
        ((first, last),) = yield named("user_seqs", str(len(specs)).encode())
        if last - first == len(specs) - 1:
            break
    admission = admit(specs, AppendFacts(rooms=limits.rooms, quotas=limits.quotas), now, first)
    added: Rows = yield named("insert_waiting_jobs", *insert_args(admission.jobs, count=True))
    if len(added) == len(admission.jobs):
        return admission.answers
    # Some ids exist already: an append may be repeated.
    new = {seq for (seq,) in added}
    known = yield from _known(named, [placed.id for placed in admission.answers if placed.seq not in new])
    return tuple([Placed(each.id, known.get(each.id, each.seq)) for each in admission.answers])


def _known(named: Named, ids: Sequence[str]) -> Generator[Step, Any, dict[str, int]]:
    """The numbers of the committed jobs, and of the jobs of this transaction, by id; 0 for a job that has no
    number yet."""
    seen = yield lambda db: db.rows("seen_ids", (array(ids),), tuple[str, int, State, int, str | None])
    known = {id: seq for id, seq, _, _, _ in seen}
    if missing := [id for id in ids if id not in known]:
        mine: Rows = yield named("user_known", _json(missing))
        known |= {missing[n - 1]: seq for n, seq in mine}
    return known


def _store_in_inbox(named: Named, specs: Sequence[Spec], now: int, limits: AppendLimits) -> Steps:
    """Check the append with the committed facts, so that an obvious error is refused here. Then insert it
    into the inbox."""
    facts: AppendFacts = yield lambda db: _seen(db, specs, limits)
    needed = {after.id for spec in specs for after in spec.after if not after.group} - {
        spec.id for spec in specs
    }
    if missing := sorted(needed - facts.known.keys()):
        mine = yield from _known(named, missing)
        facts = replace(
            facts, known={**facts.known, **{id: Known(id, seq, State.BLOCKED) for id, seq in mine.items()}}
        )
    admission = admit(specs, facts, now, 0)
    stored = [replace(spec, ready_at=now + spec.delay, delay=0) if spec.delay else spec for spec in specs]
    yield named("user_inbox", _json([spec.id for spec in specs]), _json(stored))
    return tuple(
        [
            placed if spec.id in facts.known else Placed(spec.id, 0)
            for spec, placed in zip(specs, admission.answers, strict=True)
        ]
    )


def _seen(db: PostgresDb, specs: Sequence[Spec], limits: AppendLimits) -> AppendFacts:
    ids = {spec.id for spec in specs} | {
        after.id for spec in specs for after in spec.after if not after.group
    }
    groups = {spec.group for spec in specs if spec.group is not None}
    groups |= {after.id for spec in specs for after in spec.after if after.group}
    keys = {key for spec in specs if (key := key_of(spec)) is not None}
    known = db.rows("seen_ids", (array(ids),), tuple[str, int, State, int, str | None])
    found = {id: Known(id, seq, state, gone == 1, alias) for id, seq, state, gone, alias in known}
    holders = db.rows(
        "seen_holders", (array(keys),), tuple[str, str, str, int, State | None, int, int | None]
    )
    for _, _, id, seq, holding, _, _ in holders:
        found.setdefault(id, Known(id, seq, holding or State.DONE, gone=holding is None))
    for alias in [each.alias for each in found.values() if each.alias is not None]:
        found.setdefault(alias, Known(alias, 0, State.DONE, gone=True))
    return AppendFacts(
        known=found,
        holders={
            (space, key): KeyHolder(id, seq, state, until, runner)
            for space, key, id, seq, state, until, runner in holders
        },
        groups={
            row.id: GroupFact(row.state, row.outcome)
            for row in db.rows("groups_by_id", (array(groups),), GroupRow)
        },
        rooms=limits.rooms,
        quotas=limits.quotas,
        blobs=blob_facts(db, blobs_of(specs), "seen_blobs"),
    )


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


# Synchronous and asynchronous execution of the steps. Its own cursor has known row, number and byte
# formats, whatever the adapters of the connection are.


def run(steps: Steps, connection: psycopg.Connection[Any], read: Callable[[Read], Any]) -> tuple[Placed, ...]:
    cursor: psycopg.RawCursor[tuple[Any, ...]] = psycopg.RawCursor(connection, row_factory=tuple_row)
    with cursor:
        _prepare(cursor.adapters)
        answer = _Driver(steps)
        while answer.wants is not None:
            try:
                if callable(step := answer.wants):
                    answer.send(read(step))
                else:
                    cursor.execute(*_query(step), prepare=False, binary=True)
                    answer.send(None if isinstance(step, bytes) else cursor.fetchall())
            except BaseException as error:
                answer.throw(error)
    return answer.placed


async def arun(
    steps: Steps, connection: psycopg.AsyncConnection[Any], read: Callable[[Read], Any]
) -> tuple[Placed, ...]:
    cursor: psycopg.AsyncRawCursor[tuple[Any, ...]] = psycopg.AsyncRawCursor(
        connection, row_factory=tuple_row
    )
    async with cursor:
        _prepare(cursor.adapters)
        answer = _Driver(steps)
        while answer.wants is not None:
            try:
                if callable(step := answer.wants):
                    answer.send(await asyncio.to_thread(read, step))
                else:
                    await cursor.execute(*_query(step), prepare=False, binary=True)
                    answer.send(None if isinstance(step, bytes) else await cursor.fetchall())
            except BaseException as error:
                answer.throw(error)
    return answer.placed


class _Driver:
    """Runs the generator of steps. `wants` is the next step, None at the end."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.placed: tuple[Placed, ...] = ()
        self.wants: Step | None = None
        self._go(lambda: next(steps))

    def send(self, answer: Any) -> None:
        self._go(lambda: self._steps.send(answer))

    def throw(self, error: BaseException) -> None:
        self._go(lambda: self._steps.throw(_explained(error)))

    def _go(self, on: Callable[[], Step]) -> None:
        try:
            self.wants = on()
        except StopIteration as end:
            self.wants, self.placed = None, end.value


def _query(step: bytes | tuple[bytes, Sequence[Any]]) -> tuple[bytes, Sequence[Any]]:
    return (step, ()) if isinstance(step, bytes) else step


def _prepare(adapters: AdaptersMap) -> None:
    adapters.register_dumper(bytes, BytesBinaryDumper)
    adapters.register_dumper(list, ListBinaryDumper)
    adapters.register_loader("int8", Int8BinaryLoader)


_MISSING = (errors.UndefinedTable, errors.InvalidSchemaName, errors.UndefinedFunction, errors.UndefinedColumn)


def _explained(error: BaseException) -> BaseException:
    """`WrongConnection` for an error that the user's connection causes; otherwise the error itself."""
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, _MISSING):
        why = f"this connection is to a database without the ledger: {text}"
    elif isinstance(error, errors.InsufficientPrivilege):
        why = f"the role of this connection lacks rights that it needs in the ledger's schema: {text}"
    elif isinstance(error, errors.ReadOnlySqlTransaction):
        why = f"the transaction on this connection is read only: {text}"
    else:
        return error
    wrong = WrongConnection(why=why)
    wrong.__cause__ = error
    return wrong


# The psycopg connection of the user. SQLAlchemy and Django are not imported; their objects are recognised by
# their attributes.


def driver_of(connection: object) -> psycopg.Connection[Any]:
    """The psycopg connection itself, or the one under a session or connection of SQLAlchemy or Django."""
    found: Any = connection
    for _ in range(_DEEPEST):
        if isinstance(found, psycopg.Connection):
            return found
        if isinstance(found, psycopg.AsyncConnection):
            raise WrongConnection(why="this is an AsyncConnection: use aenqueue, or aappend_on of the ledger")
        if _autobegins(found):
            found.begin()
        found = _under(found)
    raise _foreign(connection)


async def adriver_of(connection: object) -> psycopg.AsyncConnection[Any]:
    found: Any = connection
    for _ in range(_DEEPEST):
        if isinstance(found, psycopg.AsyncConnection):
            return found
        if isinstance(found, psycopg.Connection):
            raise WrongConnection(
                why="this connection would block the event loop: use a psycopg.AsyncConnection, or enqueue"
            )
        if _autobegins(found):
            await found.begin()
        raw = getattr(found, "get_raw_connection", None)
        found = raw() if raw is not None else _under(found)
        if inspect.isawaitable(found):
            found = await found
    raise _foreign(connection)


_DEEPEST = 5


def _under(found: Any) -> Any:
    driver = getattr(found, "driver_connection", None)
    if driver is not None:
        return driver
    inner = getattr(found, "connection", None)
    return inner() if callable(inner) else inner


def _autobegins(found: Any) -> bool:
    """A connection of SQLAlchemy on which nothing was executed yet: its commit would do nothing, and the
    append be lost."""
    inside = getattr(found, "in_transaction", None)
    return callable(inside) and hasattr(found, "begin") and hasattr(found, "dialect") and not inside()


def _foreign(connection: object) -> WrongConnection:
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    expected = (
        "a psycopg.Connection, a psycopg.AsyncConnection, "
        "or a session or connection of SQLAlchemy on one of them"
    )
    return WrongConnection(why=f"expected {expected}, not {kind}; other drivers of PostgreSQL cannot be used")
