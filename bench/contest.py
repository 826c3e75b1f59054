"""What a peer must be able to do to be measured, and several of them asked in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

WARM_UP = 50


class Peer(Protocol):
    """`fill` is the stage and is not measured; `drain` runs the jobs and tells how long that took."""

    def fill(self, count: int) -> None: ...

    def drain(self, count: int) -> float: ...

    def enqueue(self, count: int) -> float:
        """One at a time, each durable before the next: the seconds it took."""
        ...

    def close(self) -> None: ...


class Contest:
    """Several peers, each with a store of its own."""

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
