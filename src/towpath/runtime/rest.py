"""When a burst is over: nothing runs in its queues, and nothing that is ready there will be given to anybody."""

from __future__ import annotations

from towpath.core.checks import matches
from towpath.core.views import PartView, QueueView
from towpath.ledger import Ledger


def at_rest(ledger: Ledger, queues: str, now: int, held: str = "") -> bool:
    """After a claim that came back empty: is there nothing to wait for in these queues? What runs, here or elsewhere, may
    spawn more or be taken back from the dead, and what only waits for a rate comes soon; jobs for later, blocked ones and
    those that somebody holds back (also those in the queues `held`) do not count."""
    views = [view for view in ledger.queues().values() if matches(queues, view.name)]
    return not any(view.counts.running or (view.counts.ready and _comes(ledger, view, now, held)) for view in views)


def _comes(ledger: Ledger, view: QueueView, now: int, held: str) -> bool:
    if _held(view, now) or (held and matches(held, view.name)):
        return False
    waiting = sum(part.ready for part in ledger.parts(view.name).values() if _held(part, now))
    return view.counts.ready > waiting


def _held(view: QueueView | PartView, now: int) -> bool:
    """By hand: a time that is further ahead than any start can put it was set by somebody (see `core.limits.spend`)."""
    soon = now if view.rate is None else now + view.rate.interval
    return view.paused or view.cap == 0 or view.next_at > soon
