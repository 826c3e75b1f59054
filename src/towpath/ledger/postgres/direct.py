"""One statement by its name, past the driver, which takes as long for a statement as the server does: for the append for which
somebody waits."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import errors, generators
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

_FORGOTTEN, _KNOWN = "26000", "42P05"
"""The driver forgets all statements now and then, ours too. And we may not have heard that it is there."""

QUICK = 0.0008
"""Seconds: an answer that usually takes longer is waited for asleep. Where machines are short of CPU it does, and to be awake would
only take more from the server."""


class Direct:
    def __init__(self, connection: psycopg.Connection[Any], name: str, query: bytes, arguments: int) -> None:
        """All its arguments are text but the last, which is bytes; its answer is a row of integers, or none."""
        self._connection = connection
        self._name, self._query = name.encode(), query
        self._formats = [Format.TEXT] * (arguments - 1) + [Format.BINARY]
        self._is_there = False
        self._usual = QUICK
        """Seconds until there is an answer."""
        poll = select.poll()
        poll.register(connection.pgconn.socket, select.POLLIN)
        self._readable = poll.poll

    def row(self, args: Sequence[bytes | None]) -> tuple[int, ...] | None:
        found = self._ask(args)
        if found.status != ExecStatus.TUPLES_OK:
            found = self._once_more(found, args)
        if not found.ntuples:
            return None
        return tuple([int.from_bytes(found.get_value(0, n) or b"", "big", signed=True) for n in range(found.nfields)])

    def _once_more(self, found: PGresult, args: Sequence[bytes | None]) -> PGresult:
        if errors.error_from_result(found).sqlstate == _FORGOTTEN:
            self._is_there = False
            found = self._ask(args)
        if found.status != ExecStatus.TUPLES_OK:
            raise errors.error_from_result(found)
        return found

    def _ask(self, args: Sequence[bytes | None]) -> PGresult:
        pgconn = self._connection.pgconn
        if not self._is_there:
            pgconn.send_prepare(self._name, self._query)
            prepared = self._answer()
            if prepared.status == ExecStatus.FATAL_ERROR and errors.error_from_result(prepared).sqlstate != _KNOWN:
                return prepared
            self._is_there = True
        pgconn.send_query_prepared(self._name, args, self._formats, Format.BINARY)
        return self._answer()

    def _answer(self) -> PGresult:
        """Waits so that it can be interrupted, as the driver does, which takes twice as long for it. (Who is interrupted leaves an open
        statement behind: see `end_open`.)"""
        pgconn = self._connection.pgconn
        if pgconn.flush():
            found: list[PGresult] = self._connection.wait(generators.execute(pgconn))
            return found[-1]
        began = time.monotonic()
        if self._usual < QUICK:
            self._watch(began)
        while pgconn.is_busy():
            self._readable()
            pgconn.consume_input()
        self._usual += (min(time.monotonic() - began, 2 * QUICK) - self._usual) / 8
        last = pgconn.get_result()
        while (more := pgconn.get_result()) is not None:
            last = more
        assert last is not None
        return last

    def _watch(self, began: float) -> None:
        """Half of the usual time asleep, then awake for as long again: somebody waits, and to be woken takes a tenth of all the time."""
        time.sleep(self._usual / 2)
        pgconn = self._connection.pgconn
        while pgconn.is_busy() and time.monotonic() - began < self._usual:
            if self._readable(0):
                pgconn.consume_input()
