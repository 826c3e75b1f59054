"""Where the demonstration plays: live bars on a terminal, plain lines in a pipe, silence for JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from towpath.cli.output import console
from towpath.escapes import escape

Draw = Callable[[Mapping[str, int]], None]

BEAT = 1.0
"""Seconds between two plain lines."""


class Stage:
    def __init__(self, as_json: bool) -> None:
        self._quiet = as_json
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the curtain rose."""
        return time.perf_counter() - self._start

    def say(self, text: str = "", bold: bool = False) -> None:
        if not self._quiet:
            console().print(escape(text, lines=True), style="bold" if bold else None, soft_wrap=True)

    @contextmanager
    def bars(self, totals: Mapping[str, int]) -> Iterator[Draw]:
        """A bar for each name. The function that it gives is told how far each is, as often as you like."""
        if self._quiet or not sys.stdout.isatty():
            yield self._lines(sum(totals.values()))
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("  {task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console()) as progress:
            bars = {name: progress.add_task(name, total=total) for name, total in totals.items()}

            def draw(done: Mapping[str, int]) -> None:
                for name, bar in bars.items():
                    progress.update(bar, completed=done.get(name, 0))

            yield draw

    def _lines(self, total: int) -> Draw:
        start, said = time.perf_counter(), 0

        def draw(done: Mapping[str, int]) -> None:
            nonlocal said
            passed, ended = time.perf_counter() - start, sum(done.values())
            if ended == total or passed >= BEAT * (said + 1):
                said = int(passed / BEAT)
                self.say(f"  {passed:4.1f} s  {ended:,} of {total:,}")

        return draw
