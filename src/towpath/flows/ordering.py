"""Orders over dependencies: topological order, cycles, closures. Pure functions over names, in linear time.

`Waits` maps each name to the names that it waits for. Names that are not keys are ignored."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate

Waits = Mapping[str, Collection[str]]


def reverse(waits: Waits) -> dict[str, list[str]]:
    """Each name with the names that wait for it."""
    found: dict[str, list[str]] = {name: [] for name in waits}
    for name, sources in waits.items():
        for source in sources:
            if source in found:
                found[source].append(name)
    return found


def topological(waits: Waits) -> list[str]:
    """The names, each after the names that it waits for. Among the names that could be next, the first key is
    next. Names on a cycle, and names that wait for one, are left out."""
    place = {name: n for n, name in enumerate(waits)}
    names = list(waits)
    # One sorted list of edges: a list per name would keep the garbage collector busy.
    edges = sorted(
        (place[source], n)
        for n, sources in enumerate(waits.values())
        for source in sources
        if source in place
    )
    starts = [0] * (len(names) + 1)
    open_waits = [0] * len(names)
    for source, target in edges:
        starts[source + 1] += 1
        open_waits[target] += 1
    starts = list(accumulate(starts))
    ready = [n for n, count in enumerate(open_waits) if not count]
    order: list[str] = []
    while ready:
        n = heapq.heappop(ready)
        order.append(names[n])
        for at in range(starts[n], starts[n + 1]):
            target = edges[at][1]
            open_waits[target] -= 1
            if not open_waits[target]:
                heapq.heappush(ready, target)
    return order


def cycles(waits: Waits, most: int = 10) -> list[list[str]]:
    """Some cycles, without common members: each name waits for the next, the last for the first."""
    rest = dict(waits)
    found: list[list[str]] = []
    while len(found) < most:
        for name in topological(rest):
            del rest[name]
        if not rest:
            break
        # Each remaining name waits for a remaining name, so that the walk comes back to a name of it.
        rest = {name: [source for source in sources if source in rest] for name, sources in rest.items()}
        walk: dict[str, int] = {}
        name = next(iter(rest))
        while name not in walk:
            walk[name] = len(walk)
            name = next(iter(rest[name]))
        cycle = list(walk)[walk[name] :]
        found.append(cycle)
        for member in cycle:
            del rest[member]
    return found


def closure(waits: Waits, start: Iterable[str]) -> set[str]:
    """The names that `start` waits for, directly or through others, without `start` itself (unless on a
    cycle)."""
    found: set[str] = set()
    stack = [source for name in start for source in waits.get(name, ())]
    while stack:
        name = stack.pop()
        if name in waits and name not in found:
            found.add(name)
            stack.extend(waits[name])
    return found


BATCH = 2048
"""The names of one computation of closures: the bits of one number."""


def not_behind(
    waits: Waits,
    order: Iterable[str],
    firsts: Mapping[str, Collection[str]],
    seconds: Mapping[str, Collection[str]],
) -> Iterator[tuple[str, str, str]]:
    """(key, first, second) for each key of both mappings where `second` does not wait for `first`, neither
    directly nor through others. A name is not compared with itself. `order` is a topological order."""
    wanted = [(key, sorted(names)) for key, names in firsts.items() if key in seconds]
    sources = sorted({name for _, names in wanted for name in names})
    places = list(order)
    for at in range(0, len(sources), BATCH):
        bits = {name: 1 << n for n, name in enumerate(sources[at : at + BATCH])}
        behind: dict[str, int] = {}
        for name in places:
            mask = bits.get(name, 0)
            for source in waits[name]:
                mask |= behind.get(source, 0)
            behind[name] = mask
        for key, names in wanted:
            mask = sum(bits.get(name, 0) for name in names)
            for second in sorted(seconds[key]):
                if missing := mask & ~behind.get(second, 0):
                    yield from ((key, name, second) for name in names if missing & bits.get(name, 0))
