"""Whether the queues and parts have room for an append."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from towpath.core.checks import SECOND
from towpath.core.facts import Place, Quota, Room, part_of
from towpath.core.job import Spec
from towpath.core.limits import interval_of, permits
from towpath.errors import PartFull, QueueFull, TooManyAppends


def check_room(specs: Iterable[Spec], rooms: Mapping[str, Room]) -> None:
    if not rooms:
        return
    limited = {queue: room for queue, room in rooms.items() if room.capacity is not None}
    if not limited:
        return
    asked: dict[str, int] = {}
    for spec in specs:
        if spec.queue in limited:
            asked[spec.queue] = asked.get(spec.queue, 0) + 1
    for queue, count in sorted(asked.items()):
        room = limited[queue]
        if room.capacity is not None and room.depth + count > room.capacity:
            raise QueueFull(queue=queue, depth=room.depth, capacity=room.capacity, asked=count)


def check_quotas(
    specs: Iterable[Spec], quotas: Mapping[Place, Quota], now: int
) -> list[tuple[str, str, int]]:
    """The number of appends to each part with an append rate; raises the refusal if a limit of a part is
    exceeded. An append of more specs than the burst of the rate needs the whole burst and delays the next
    append accordingly."""
    asked = Counter([(spec.queue, part) for spec in specs if (part := part_of(spec)) is not None])
    limited = {place: count for place, count in sorted(asked.items()) if place in quotas}
    for (queue, part), count in limited.items():
        quota = quotas[queue, part]
        if quota.capacity is not None and quota.depth + count > quota.capacity:
            raise PartFull(queue=queue, part=part, depth=quota.depth, capacity=quota.capacity, asked=count)
        rate = quota.rate
        if rate is None:
            continue
        needed = min(count, rate.burst)
        if permits(quota.next_at, rate, now, needed) < needed:
            wait = quota.next_at + (needed - 1) * interval_of(rate) - now
            raise TooManyAppends(
                queue=queue, part=part, rate=str(rate), asked=count, retry_after=max(0.001, wait / SECOND)
            )
    return [(*place, count) for place, count in limited.items() if quotas[place].rate is not None]
