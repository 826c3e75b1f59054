"""Runs that take turns, and the ratios they give: for the benches."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping


def rate(count: int, run: Callable[[], object]) -> float:
    """How many a second."""
    gc.collect()
    started = time.perf_counter()
    run()
    return count / (time.perf_counter() - started)


class Report:
    """Prints each ratio beside what it must reach."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = targets
        self.ratios: dict[str, float] = {}
        self.latency: dict[str, float] = {}
        print(f"{'':20} {'ratio':>7} {'target':>7} {'ours/s':>9} {'other/s':>9}")

    def ratio(self, name: str, ours: list[float], other: list[float]) -> None:
        """Two rates, measured in turns."""
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, other, strict=True))
        self.ratios[name] = round(ratio, 3)
        rates = f"{statistics.median(ours):9,.0f} {statistics.median(other):9,.0f}"
        target = self._targets[name]
        print(
            f"{name:20} {ratio:7.2f} {target:7.2f} {rates}{'' if ratio >= target else '  below target'}",
            flush=True,
        )

    @staticmethod
    def limit(name: str, value: float, most: float, unit: str) -> None:
        print(
            f"{name:20} {value:7.2f} {most:7.2f} {unit}{'' if value <= most else '  above target'}",
            flush=True,
        )


class Alternating:
    """Named runs that take turns; the first turn of each is a warm-up and does not count. On a slow machine
    there are fewer rounds, but at least three: none begins after `budget` seconds."""

    def __init__(self, rounds: int, runs: Mapping[str, Callable[[], float]], budget: float) -> None:
        self.rates: dict[str, list[float]] = {name: [] for name in runs}
        until = time.monotonic() + budget
        for turn in range(rounds + 1):
            if turn > 3 and time.monotonic() > until:
                return
            for name, run in runs.items():
                gc.collect()
                measured = run()
                if turn:
                    self.rates[name].append(measured)

    def __getitem__(self, name: str) -> list[float]:
        return self.rates[name]
