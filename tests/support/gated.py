"""A real ledger behind a gate: tests see every batch, hold one back, or make one fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from towpath.core.commands import Command
from towpath.ledger import Answer, Ledger
from towpath.ledger.memory.ledger import MemoryLedger


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
