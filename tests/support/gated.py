"""A real ledger behind a gate: tests see every batch, hold one back, or make one fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tests.support.waiting import until
from towpath.core.commands import Append, Command
from towpath.core.job import After, Spec
from towpath.errors import TowpathError
from towpath.ledger import Answer, Ledger
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.runtime.commit.committer import Committer


class Gated:
    """While `hold` is set, a batch waits inside `apply` until `let_go`. `fail` is raised by the next batches,
    one each."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or MemoryLedger()
        self.batches: list[list[Command]] = []
        self.inside = threading.Event()
        self._gate = threading.Condition()
        self._holding = False
        self.fail: list[BaseException] = []
        self.fail_after_commit: list[BaseException] = []

    def hold(self) -> None:
        with self._gate:
            self._holding = True
            self.inside.clear()

    def let_go(self) -> None:
        with self._gate:
            self._holding = False
            self._gate.notify_all()

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        with self._gate:
            self.batches.append(list(commands))
            self.inside.set()
            assert self._gate.wait_for(lambda: not self._holding, 20)
        if self.fail:
            raise self.fail.pop(0)
        answers = self._ledger.apply(commands, now)
        if self.fail_after_commit:
            raise self.fail_after_commit.pop(0)
        return answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


def append(*ids: str, after: str | None = None) -> Append:
    return Append(tuple(Spec(id=id, queue="q", after=() if after is None else (After(after),)) for id in ids))


def call_in_thread(committer: Committer, command: Command) -> tuple[threading.Thread, list[object]]:
    answers: list[object] = []

    def work() -> None:
        try:
            answers.append(committer.call(command))
        except TowpathError as error:
            answers.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, answers


def until_waiting(committer: Committer, count: int) -> None:
    until(lambda: len(committer._queue.early) + len(committer._queue.later) >= count)
