"""The placement planner: which nodes have the copies of each shard. Pure and deterministic: the same
arguments give the same placement, and no argument is changed.

A placement is a tuple with the nodes of each shard, the primary first. In the placements returned here no
shard has two copies on one node, and the numbers of copies on the nodes differ by at most one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from towpath.apps.shards.catalogue import check_counts

Placement = tuple[tuple[str, ...], ...]


class Planned(msgspec.Struct, frozen=True):
    """A new placement. `lost` are the shards without a copy on any node: their entries are unchanged, since
    no node has their rows. `degraded` are the shards with fewer copies than asked for."""

    placement: Placement
    lost: tuple[int, ...] = ()
    degraded: tuple[int, ...] = ()


class Copy(msgspec.Struct, frozen=True, order=True):
    """A copy that a change of placement adds, or removes."""

    shard: int
    node: str


class PlacementChange(msgspec.Struct, frozen=True):
    """The difference between two placements. `primaries` are the shards with another primary."""

    added: tuple[Copy, ...]
    removed: tuple[Copy, ...]
    primaries: tuple[int, ...]


def initial(nodes: Iterable[str], shards: int, rf: int) -> Placement:
    """The placement of a new table. Primaries are balanced too, and the replicas of one node's primaries are
    spread over the others, so that the loss of a node does not double the load of one other node."""
    order = tuple(sorted(nodes))
    check_counts(shards, rf, order)
    count = len(order)
    whole = shards - shards % count
    rounds = [_round(number // count, number % count, count, rf) for number in range(whole)]
    rest = [_rest(number, count, rf) for number in range(shards - whole)]
    return tuple(tuple(order[at] for at in places) for places in rounds + rest)


def balanced(placement: Placement, nodes: Iterable[str], rf: int, draining: Iterable[str] = ()) -> Planned:
    """The placement on exactly these nodes with the fewest copies moved: nodes were added, are to be drained,
    or are lost. `draining` nodes get no copies, but can be read; all other nodes of the old placement are
    lost. A shard with fewer copies than `rf` gets new ones, several at once if needed."""
    work = _Work(placement, sorted(nodes), rf, frozenset(draining))
    work.keep()
    work.fill()
    work.level()
    return work.planned()


def changes(old: Placement, new: Placement) -> PlacementChange:
    """The copies to add and to remove."""
    pairs = list(enumerate(zip(old, new, strict=True)))
    return PlacementChange(
        tuple(Copy(number, node) for number, (was, now) in pairs for node in now if node not in was),
        tuple(Copy(number, node) for number, (was, now) in pairs for node in was if node not in now),
        tuple(number for number, (was, now) in pairs if was[:1] != now[:1]),
    )


def loads(placement: Placement, nodes: Iterable[str]) -> dict[str, int]:
    """The number of copies on each of these nodes."""
    found = dict.fromkeys(sorted(nodes), 0)
    for shard in placement:
        for node in shard:
            if node in found:
                found[node] += 1
    return found


def _round(turn: int, first: int, count: int, rf: int) -> list[int]:
    """One of `count` shards with different primaries. The distance of the replicas from the primary
    changes with each turn."""
    ways = max(count - 1, 1)
    return [first, *((first + 1 + (turn * (rf - 1) + other) % ways) % count for other in range(rf - 1))]


def _rest(number: int, count: int, rf: int) -> list[int]:
    """One of fewer than `count` shards: consecutive nodes, continued by the next shard. The primaries are
    different because a block that begins at the same node again has its primary one place later."""
    step = math.gcd(rf, count)
    block = [(number * rf + other) % count for other in range(rf)]
    at = number // (count // step)
    return block[at:] + block[:at]


class _Work:
    """The placement while it is changed. `_on` has the shards on each node, `_new` the copies that no node
    has yet, which can be placed elsewhere at no cost."""

    def __init__(self, placement: Placement, nodes: Sequence[str], rf: int, draining: frozenset[str]) -> None:
        check_counts(max(len(placement), 1), min(rf, len(nodes)), nodes)
        self._old, self._nodes, self._rf, self._draining = placement, nodes, rf, draining
        self._on: dict[str, set[int]] = {node: set() for node in nodes}
        self._primaries = dict.fromkeys(nodes, 0)
        self._places: list[list[str]] = []
        self._new: set[Copy] = set()
        self._lost: set[int] = set()

    def keep(self) -> None:
        """Take over the copies on nodes that stay, at most `rf`. If the primary of a shard goes away, the
        replica on the node with the fewest primaries becomes the primary."""
        for number, shard in enumerate(self._old):
            places = [node for node in shard if node in self._on][: self._rf]
            self._places.append(places)
            if not places and not self._draining.intersection(shard):
                self._lost.add(number)
            if places[:1] == list(shard[:1]):
                self._primaries[places[0]] += 1
            for node in places:
                self._on[node].add(number)
        for number, places in enumerate(self._places):
            if places and places[0] != self._old[number][0]:
                self._lead(number)

    def fill(self) -> None:
        """Add the missing copies, each on the node with the fewest copies that has none of this shard."""
        for number, places in enumerate(self._places):
            while number not in self._lost and len(places) < min(self._rf, len(self._nodes)):
                free = [node for node in self._nodes if node not in places]
                self._put(number, min(free, key=lambda node: (len(self._on[node]), node)))
                if len(places) == 1:
                    self._primaries[places[0]] += 1

    def level(self) -> None:
        """Move copies from the node with most to the node with fewest until they differ by at most one. The
        number of moves is the smallest possible. The node with more copies has a shard that the other does
        not have, so a move always exists."""
        while self._nodes:
            least = min(self._nodes, key=lambda node: (len(self._on[node]), node))
            most = max(self._nodes, key=lambda node: (len(self._on[node]), node))
            if len(self._on[most]) - len(self._on[least]) <= 1:
                return
            self._move(min(self._on[most] - self._on[least], key=lambda s: self._cost(s, most)), most, least)

    def planned(self) -> Planned:
        placement = tuple(
            self._old[number] if number in self._lost else tuple(places)
            for number, places in enumerate(self._places)
        )
        short = [n for n, places in enumerate(self._places) if len(places) < self._rf]
        return Planned(placement, tuple(sorted(self._lost)), tuple(n for n in short if n not in self._lost))

    def _cost(self, shard: int, node: str) -> tuple[bool, bool, int]:
        """A copy that does not exist yet costs nothing; a replica costs less than a primary."""
        return (Copy(shard, node) not in self._new, self._places[shard][0] == node, shard)

    def _move(self, shard: int, source: str, target: str) -> None:
        places = self._places[shard]
        was_primary = places[0] == source
        self._new.discard(Copy(shard, source))
        self._on[source].discard(shard)
        places.remove(source)
        self._put(shard, target)
        if was_primary:
            self._primaries[source] -= 1
            self._lead(shard)

    def _put(self, shard: int, node: str) -> None:
        self._places[shard].append(node)
        self._on[node].add(shard)
        self._new.add(Copy(shard, node))

    def _lead(self, shard: int) -> None:
        """Choose the primary: the existing copy on the node with the fewest primaries. A copy that does not
        exist yet becomes primary only if there is no other."""
        places = self._places[shard]
        ready = [node for node in places if Copy(shard, node) not in self._new] or places
        first = min(ready, key=lambda node: (self._primaries[node], node))
        places.remove(first)
        places.insert(0, first)
        self._primaries[first] += 1
