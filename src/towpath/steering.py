"""The words with which an App steers work that is under way."""

from __future__ import annotations

from towpath.core.commands import Cancel, Canceled, Result, Selector
from towpath.runtime.engine import Engine
from towpath.workers import Workers


class Steering(Engine):
    """What an App is besides its tasks."""

    def cancel(self, key: str) -> int:
        """Cancel the jobs with this key: those that wait end now, the one that runs is told to stop at once. How many they were;
        jobs that have finished, or were asked already, do not count."""
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

    @property
    def workers(self) -> Workers:
        """Who works on this ledger, in any process: to list, pause, resume and drain."""
        return Workers(self)


def _by_key(key: str) -> Cancel:
    return Cancel(where=Selector(key=key))


def _touched(answer: Result) -> tuple[int, bool]:
    assert isinstance(answer, Canceled)
    return answer.canceled + answer.requested, answer.more
