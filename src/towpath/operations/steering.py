"""The words with which an App steers and watches work that is under way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING

from towpath.core.commands import Cancel, Canceled, Result, Selector
from towpath.operations.workers import Lanes, Workers
from towpath.runtime.engine import Engine
from towpath.runtime.worker.worker import Worker
from towpath.settings import Settings

if TYPE_CHECKING:
    from towpath.operations.progress import KindHistory, Live, Snapshot


class Steering(Engine):
    """What an App is besides its tasks."""

    settings: Settings
    local_workers: list[Worker]
    _live: Live | None = None

    def cancel(self, key: str) -> int:
        """Cancel the jobs with this key: those that wait end now, the one that runs is told to stop at once.
        How many they were; jobs that have finished, or were asked already, do not count."""
        count = 0
        while True:
            touched, more = _touched(self.call(_by_key(key)))
            count += touched
            if not more:
                return count

    async def acancel(self, key: str) -> int:
        count = 0
        while True:
            touched, more = _touched(await self.acall(_by_key(key)))
            count += touched
            if not more:
                return count

    def progress(self, group: str | None = None) -> Snapshot:
        """What runs in this process, how far it is and what waits, without a query. The first call begins to
        watch."""
        from towpath.operations.progress import Live

        if self._live is None or self._live.bus is not self.bus:
            self._live = Live(self)
        return self._live.snapshot(group)

    def show_progress(
        self,
        transfers: Mapping[str, str] | None = None,
        *,
        group: str | None = None,
        file: IO[str] | None = None,
    ) -> AbstractContextManager[None]:
        """`with app.show_progress({"fetch": "downloading"}):` shows it live on a terminal (`file`, else
        stderr). `transfers` are the kinds whose progress counts bytes, and what they are called."""
        from towpath.operations.display import shown

        return shown(lambda: self.progress(group), transfers or {}, file)

    def history(self, group: str | None = None) -> tuple[KindHistory, ...]:
        """What became of the jobs in the ledger, kind by kind: also of those that other processes ran. Reads
        all of them."""
        from towpath.operations.progress import history

        return history(self.ledger, group)

    @property
    def workers(self) -> Workers:
        """Who works on this ledger, in any process: to list, pause, resume and drain."""
        return Workers(self)

    @property
    def lanes(self) -> Lanes:
        """The lanes of these workers: to list, pause and resume."""
        return Lanes(self, self.settings.lanes)


def _by_key(key: str) -> Cancel:
    return Cancel(where=Selector(key=key))


def _touched(answer: Result) -> tuple[int, bool]:
    assert isinstance(answer, Canceled)
    return answer.canceled + answer.requested, answer.more
