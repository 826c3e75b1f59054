"""Where the demonstration plays: a live progress display on a terminal, plain lines in a pipe, nothing but facts for JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from towpath.cli.output import console

if TYPE_CHECKING:
    from rich.console import Console

Advance = Callable[[int], None]


class Stage:
    def __init__(self, as_json: bool) -> None:
        self._quiet = as_json
        self._screen: Console | None = None
        self._start = time.perf_counter()
        self.facts: dict[str, Any] = {}
        self.jobs = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def say(self, text: str = "") -> None:
        if self._screen is not None:
            # Above the bar, which moves down.
            self._screen.print(text, soft_wrap=True)
        elif not self._quiet:
            click.echo(text)

    @contextmanager
    def act(self, title: str, total: int = 0) -> Iterator[Advance]:
        """One act, with a bar while it lasts. The function it gives moves the bar on."""
        if self._quiet or not sys.stdout.isatty():
            self.say(title)
            yield lambda steps: None
            self.say()
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        screen = console()
        screen.print(title, style="bold")
        columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("jobs"), TimeElapsedColumn())
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task("", total=total or None)
            self._screen = screen
            try:
                yield lambda steps: bar.advance(task, steps)
            finally:
                self._screen = None
        self.say()

    def cost(self, name: str, what: str, jobs: int, seconds: float) -> None:
        self.facts[name] = {"jobs": jobs, "seconds": round(seconds, 4), "us_per_job": round(seconds / jobs * 1e6, 1)}
        self.say(
            f"  {what}: {jobs:,} in {seconds:.2f} s, {seconds / jobs * 1e6:.0f} µs a job, {jobs / seconds:,.0f} jobs a second"
        )
