"""A JSON document in a note, with the version that it had when it was read: whoever saves it last must have
seen it."""

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

_AT_HAND: Final[Any] = object()


class Document:
    """`value` (None if there is none) at `version` (0). `save` writes it unless somebody else did in the
    meantime (`NoteConflict`). The first look reads the ledger; `aload` does that without blocking an event
    loop."""

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
        """Read it (again); the value."""
        return self._loaded(self._ledger.note(self._key))

    async def aload(self) -> Any:
        return self._loaded(await asyncio.to_thread(self._ledger.note, self._key))

    def save(self, value: Any = _AT_HAND) -> int:
        """Write this value, or the one at hand after you changed it in place; the new version."""
        return self._saved(self._committer.call(self._note(value)), value)

    async def asave(self, value: Any = _AT_HAND) -> int:
        if self._version is None:
            await self.aload()
        return self._saved(await self._committer.acall(self._note(value)), value)

    def _loaded(self, view: NoteView | None) -> Any:
        self._value = None if view is None else msgspec.json.decode(view.value)
        self._version = 0 if view is None else view.version
        return self._value

    def _note(self, value: Any) -> Note:
        value = self.value if value is _AT_HAND else value
        try:
            content = msgspec.json.encode(value)
        except Exception as error:
            raise InvalidInput(
                field="state", value=value, expected=f"something with a JSON form: {error}"
            ) from None
        checks.finite("state", value, content)
        return Note(key=self._key, value=content, expect=self.version, ttl=self._ttl)

    def _saved(self, answer: Result, value: Any) -> int:
        assert isinstance(answer, Noted)
        self._version = answer.version
        if value is not _AT_HAND:
            self._value = value
        return answer.version
