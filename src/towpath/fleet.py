"""Reads the reports that the workers of a ledger store in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from towpath.core.explain import Explanation, GateName
from towpath.core.fleet import REPORTS, Fleet, LaneView, among_workers, lanes_together
from towpath.core.fleet import WorkerView as WorkerView
from towpath.core.fleet import spell_lanes as spell_lanes
from towpath.core.job import State
from towpath.core.views import MAX_PAGE, NoteView, Query
from towpath.ledger import Ledger
from towpath.ledger import queues_matching as queues_matching

KEY: Final = "towpath/workers"


def decoded(view: NoteView | None) -> Fleet:
    return Fleet() if view is None else msgspec.json.decode(view.value, type=Fleet)


def workers_of(ledger: Ledger) -> Sequence[WorkerView]:
    """The present workers, by name."""
    return sorted(REPORTS.all(ledger).values(), key=lambda each: (each.name, each.started_at))


def lanes_of(ledger: Ledger) -> list[LaneView]:
    """The lanes of all present workers together, and the paused lanes."""
    return lanes_together(workers_of(ledger), decoded(ledger.note(KEY)).lanes)


def explained(ledger: Ledger, id: str, now: int) -> Explanation:
    """Explain why a job does not run: the ledger's explanation, and if the ledger allows it to run, which
    workers consume its queue. Raises UnknownJob."""
    found = ledger.explain(id)
    job = ledger.get_many([id], bodies=False).get(id) if found.gate is GateName.NEXT else None
    # Messages are consumed by hand: no consumer is registered in advance.
    if job is None or not job.kind:
        return found
    fleet = decoded(ledger.note(KEY))
    # Reports are up to ten seconds old; what is on lease is known exactly, of the newest jobs if there are
    # very many.
    running = ledger.find(Query(states=(State.RUNNING,), bodies=False, limit=MAX_PAGE)).jobs
    return among_workers(found, job.queue, workers_of(ledger), fleet.lanes, now, running)
