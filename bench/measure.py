"""Alternating runs, their ratios, and the interface of the peers that are compared."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Protocol

WARM_UP = 50
"""Jobs that each peer runs before the first measurement."""


def rate(count: int, run: Callable[[], object]) -> float:
    """Operations per second of `run`."""
    gc.collect()
    started = time.perf_counter()
    run()
    return count / (time.perf_counter() - started)


class Report:
    """Prints each ratio next to its target."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = targets
        self.ratios: dict[str, float] = {}
        self.latency: dict[str, float] = {}
        print(f"{'':20} {'ratio':>7} {'target':>7} {'ours/s':>9} {'other/s':>9}")

    def ratio(self, name: str, ours: list[float], other: list[float]) -> None:
        """Print and store the median ratio of two rates that were measured alternately."""
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
    """Runs named functions alternately, so that noise affects all of them. The first round is a warm-up and
    is not counted. After `budget` seconds no further round starts, but at least three are counted."""

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


class Peer(Protocol):
    """A queue to compare with. Only `drain` and `enqueue` are measured."""

    def fill(self, count: int) -> None: ...

    def drain(self, count: int) -> float:
        """Run `count` jobs and return the seconds it took."""
        ...

    def enqueue(self, count: int) -> float:
        """Enqueue jobs one at a time, each durable before the next, and return the seconds it took."""
        ...

    def close(self) -> None: ...


class PeerSet:
    """Several peers, each with its own store, after a warm-up."""

    def __init__(self, peers: Mapping[str, Peer]) -> None:
        self.peers = peers
        for name in peers:
            self.rate(name, WARM_UP)

    def rate(self, name: str, jobs: int) -> float:
        """Jobs completed per second."""
        peer = self.peers[name]
        peer.fill(jobs)
        return jobs / peer.drain(jobs)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
