"""A JSON document in a note. Saving compares the version that was read, so no write of another process is
overwritten unseen."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from towpath.core import checks
from towpath.core.commands import Note, Noted, Result
from towpath.core.views import NoteView
from towpath.errors import InvalidInput
from towpath.ledger import Ledger
from towpath.runtime.commit.committer import Committer

_LOADED: Final[Any] = object()


class Document:
    """`value` at `version`; None and 0 if the note does not exist. `save` raises `NoteConflict` if the note
    was changed since it was read. The first access reads the ledger; `aload` does so without blocking an
    event loop."""

    def __init__(self, ledger: Ledger, committer: Committer, key: str, ttl: int | None = None) -> None:
        self._ledger = ledger
        self._committer = committer
        self._key = key
        self._ttl = ttl
        self._value: Any = None
        self._version: int | None = None

    @property
    def value(self) -> Any:
        if self._version is None:
            self.load()
        return self._value

    @property
    def version(self) -> int:
        if self._version is None:
            self.load()
        assert self._version is not None
        return self._version

    def load(self) -> Any:
        """Read the note; return the value."""
        return self._loaded(self._ledger.note(self._key))

    async def aload(self) -> Any:
        return self._loaded(await asyncio.to_thread(self._ledger.note, self._key))

    def save(self, value: Any = _LOADED) -> int:
        """Write `value`, or the loaded value that was changed in place; return the new version."""
        return self._saved(self._committer.call(self._note(value)), value)

    async def asave(self, value: Any = _LOADED) -> int:
        if self._version is None:
            await self.aload()
        return self._saved(await self._committer.acall(self._note(value)), value)

    def _loaded(self, view: NoteView | None) -> Any:
        self._value = None if view is None else msgspec.json.decode(view.value)
        self._version = 0 if view is None else view.version
        return self._value

    def _note(self, value: Any) -> Note:
        value = self.value if value is _LOADED else value
        try:
            content = msgspec.json.encode(value)
        except Exception as error:
            raise InvalidInput(
                field="state", value=value, expected=f"something with a JSON form: {error}"
            ) from None
        checks.finite("state", value, content)
        return Note(key=self._key, value=content, expect=self.version, ttl=self._ttl)

    def _saved(self, reply: Result, value: Any) -> int:
        assert isinstance(reply, Noted)
        self._version = reply.version
        if value is not _LOADED:
            self._value = value
        return reply.version
