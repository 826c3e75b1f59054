"""Orders over dependencies: topological order, cycles, closures. Pure functions over names, in linear time.

`Waits` maps each name to the names that it waits for. Names that are not keys are ignored."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping

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
    """The names, each after the names that it waits for; among those that could be next, the first key is
    next. Names on a cycle, and names that wait for one, are left out."""
    dependents = reverse(waits)
    place = {name: n for n, name in enumerate(waits)}
    names = list(waits)
    open_waits = {name: sum(source in place for source in sources) for name, sources in waits.items()}
    ready = [place[name] for name, count in open_waits.items() if not count]
    order: list[str] = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for dependent in dependents[name]:
            open_waits[dependent] -= 1
            if not open_waits[dependent]:
                heapq.heappush(ready, place[dependent])
    return order


def cycles(waits: Waits, most: int = 10) -> list[list[str]]:
    """Some cycles, without common members: each name waits for the next, the last for the first."""
    rest = {name: [source for source in sources if source in waits] for name, sources in waits.items()}
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
            name = rest[name][0]
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
"""Names whose closure is computed at once: the bits of one number."""


def not_behind(
    waits: Waits,
    order: Iterable[str],
    firsts: Mapping[str, Collection[str]],
    seconds: Mapping[str, Collection[str]],
) -> list[tuple[str, str, str]]:
    """(key, first, second) for each key of both mappings where `second` does not wait for `first`, neither
    directly nor through others. A name is not compared with itself. `order` is a topological order."""
    wanted = [(key, sorted(names)) for key, names in firsts.items() if key in seconds]
    sources = sorted({name for _, names in wanted for name in names})
    found = []
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
                    found += [(key, name, second) for name in names if missing & bits.get(name, 0)]
    return found
