"""How the queues of a worker with lanes or resources are divided into what is claimed together."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from towpath.core.lanes import Lane


class Line(msgspec.Struct, frozen=True):
    """Queues (with commas between them) of one lane that are claimed together, and the names of the limits for all of them."""

    lane: int
    queues: str
    limits: tuple[str, ...] = ()


def limit_of(lane: str) -> str:
    """The name of a lane's own limit; no resource can be called so."""
    return f"lane {lane}"


def shown(limit: str) -> str:
    """What a limit is called before people."""
    return limit if limit.startswith(limit_of("")) else f"resource {limit}"


def lines_of(lanes: Mapping[str, Lane], sources: Mapping[str, str]) -> list[Line]:
    """`sources`: queue -> the resource that all its jobs use."""
    found: list[Line] = []
    for number, (name, lane) in enumerate(lanes.items()):
        own = () if lane.adaptive is None else (limit_of(name),)
        by_resource: dict[str | None, list[str]] = {}
        for queue in lane.queues:
            by_resource.setdefault(sources.get(queue), []).append(queue)
        for resource, queues in by_resource.items():
            found.append(Line(number, ",".join(queues), own if resource is None else (resource, *own)))
    return found
