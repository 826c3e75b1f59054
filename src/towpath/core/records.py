"""Records: values of one type in notes, one note for each, with keys under a common prefix. The prefix is
their list: no other note has to name them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from towpath.core.commands import Note, SetPart, SetQueue
from towpath.core.views import MAX_PAGE, NotePage, NoteQuery, NoteView

T = TypeVar("T")


class NoteReads(Protocol):
    """The reads of notes that a ledger has."""

    def note(self, key: str) -> NoteView | None: ...

    def notes(self, query: NoteQuery) -> NotePage: ...


class NoteRecords(Generic[T]):
    """The records of one type, encoded as JSON in the notes `<prefix><name>`."""

    def __init__(self, prefix: str, kind: type[T]) -> None:
        self.prefix = prefix
        self._decoder = msgspec.json.Decoder(kind)

    def key(self, name: str) -> str:
        return self.prefix + name

    def decode(self, view: NoteView) -> T:
        """Raises `msgspec.MsgspecError` for a note that is not a valid record."""
        return self._decoder.decode(view.value)

    def views(self, ledger: NoteReads) -> Iterator[tuple[str, NoteView]]:
        """The names and notes of all records, by name. One read for each 1000 of them."""
        page: str | None = None
        while True:
            found = ledger.notes(NoteQuery(prefix=self.prefix, limit=MAX_PAGE, page=page))
            for view in found.notes:
                yield view.key.removeprefix(self.prefix), view
            page = found.next
            if page is None:
                return

    def names(self, ledger: NoteReads) -> list[str]:
        return [name for name, _ in self.views(ledger)]

    def all(self, ledger: NoteReads) -> dict[str, T]:
        """The records by name. A note that is not a valid record is left out."""
        found: dict[str, T] = {}
        for name, view in self.views(ledger):
            with contextlib.suppress(msgspec.MsgspecError):
                found[name] = self.decode(view)
        return found

    def get(self, ledger: NoteReads, name: str) -> T | None:
        view = ledger.note(self.key(name))
        return None if view is None else self.decode(view)

    def put(
        self,
        name: str,
        value: T | None,
        expect: int | None = None,
        ttl: int | None = None,
        gates: tuple[SetQueue | SetPart, ...] = (),
    ) -> Note:
        """The command that writes the record; with None it is removed. `expect`, `ttl` and `gates` as in
        `Note`."""
        content = None if value is None else msgspec.json.encode(value, order="sorted")
        return Note(key=self.key(name), value=content, expect=expect, ttl=ttl, gates=gates)
