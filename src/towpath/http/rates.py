"""Limits for clients: requests of each client in a span of time, and connections of each peer address."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from functools import lru_cache

from towpath.core.limits import Rate
from towpath.http.problems import Problem

MAX_CLIENTS = 10_000
"""Clients that a limiter remembers. A forgotten client starts with a full burst."""
LOCAL = "local"
"""The peer address of a unix socket."""


class RequestRates:
    """A token bucket for each client. A client may send `rate.count` requests at once, or the burst of the
    rate if that is larger; then one request in each interval."""

    def __init__(self, rate: Rate) -> None:
        assert isinstance(rate.period, float)
        self._interval = rate.period / rate.count
        self._slack = self._interval * (max(rate.burst, rate.count) - 1)
        self._next: dict[str, float] = {}
        """For each client the time at which its bucket is full again, oldest request first."""

    def spend(self, client: str, now: float) -> None:
        """Count a request at `now` (monotonic seconds). Raises a `Problem` if the bucket is empty."""
        full_at = max(self._next.pop(client, now), now)
        wait = full_at - now - self._slack
        if wait > 1e-9:
            self._next[client] = full_at
            seconds = max(1, math.ceil(wait))
            raise Problem(
                429, "throttled", f"too many requests; the next in {seconds} s", retry_after=seconds
            )
        self._next[client] = full_at + self._interval
        if len(self._next) > MAX_CLIENTS:
            del self._next[next(iter(self._next))]


class PeerConnections:
    """The open connections of each peer address, at most `limit` of each (None: no limit)."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._open: Counter[str] = Counter()

    def opened(self, peer: str) -> bool:
        """Count a connection. False if the peer has too many."""
        self._open[peer] += 1
        return self._limit is None or self._open[peer] <= self._limit

    def closed(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


def peer_of(address: tuple[str, int] | None) -> str:
    """The peer for limits: an IPv4 address, the /64 network of an IPv6 address (one customer has all of it),
    or LOCAL."""
    return LOCAL if address is None else _peer(address[0])


@lru_cache(maxsize=4096)
def _peer(host: str) -> str:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))
