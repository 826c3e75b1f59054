"""Heartbeats: one `Renew` for all that this process holds, sent from a thread that no handler can block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from towpath.core.checks import SECOND
from towpath.core.commands import Renew, Renewed
from towpath.core.job import Claim, Reason
from towpath.errors import TowpathError
from towpath.runtime.committer import Committer
from towpath.runtime.tickets import Reply

BEATS = 3
"""Renewals per lease."""


@dataclass(slots=True)
class Held:
    """`until` is the monotonic time after which nobody vouches for the holder any more, and the lease may run out."""

    fence: int
    lease: int
    on_lost: Callable[[str], None]
    on_cancel: Callable[[str, Reason], None]
    until: float | None = None
    asked: bool = False


class Leases:
    """The functions given to `hold` are called in the committing thread; they must be quick and must not raise."""

    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._held: dict[str, Held] = {}
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._closed = False

    def hold(
        self,
        claims: Iterable[Claim],
        lease: int,
        on_lost: Callable[[str], None],
        on_cancel: Callable[[str, Reason], None],
        until: float | None = None,
    ) -> None:
        with self._changed:
            shortest = self._shortest()
            for claim in claims:
                self._held[claim.id] = Held(claim.fence, lease, on_lost, on_cancel, until)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="towpath-leases", daemon=True)
                self._thread.start()
            elif shortest is None or lease < shortest:
                self._changed.notify_all()

    def drop(self, id: str, fence: int | None = None) -> None:
        """With a fence: only this claim, not one that the process has got of the same job since."""
        with self._changed:
            if (held := self._held.get(id)) is not None and fence in (None, held.fence):
                del self._held[id]

    def drop_all(self, held: Iterable[tuple[str, int]]) -> None:
        """(id, fence) pairs; a newer claim of the same job stays."""
        with self._changed:
            for id, fence in held:
                if (found := self._held.get(id)) is not None and found.fence == fence:
                    del self._held[id]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def beat(self, now: float) -> None:
        """Renew everything that somebody still vouches for. `now` is monotonic."""
        by_lease: dict[int, list[tuple[str, int]]] = {}
        with self._changed:
            for id in [id for id, held in self._held.items() if held.until is not None and held.until <= now]:
                del self._held[id]
            for id, held in self._held.items():
                by_lease.setdefault(held.lease, []).append((id, held.fence))
        renewals = [(Renew(tuple(pairs), lease), partial(self._heard, dict(pairs))) for lease, pairs in by_lease.items()]
        self._committer.post(renewals)

    def _heard(self, sent: dict[str, int], reply: Reply) -> None:
        if isinstance(reply, TowpathError) and reply.fatal:
            # No renewal will ever succeed again.
            reply = Renewed(0, lost=tuple(sent))
        if not isinstance(reply, Renewed):
            return
        with self._changed:
            # The same job may have been claimed anew since; only the claim that was renewed can be lost.
            lost = [(id, held) for id in reply.lost if (held := self._held.get(id)) and held.fence == sent[id]]
            for id, _ in lost:
                del self._held[id]
            asked = [(id, reason, held) for id, reason in reply.cancel if (held := self._held.get(id)) and not held.asked]
            for _, _, held in asked:
                held.asked = True
        for id, held in lost:
            held.on_lost(id)
        for id, reason, held in asked:
            held.on_cancel(id, reason)

    def _shortest(self) -> int | None:
        return min((held.lease for held in self._held.values()), default=None)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            with self._changed:
                if self._closed:
                    return
                shortest = self._shortest()
                due = None if shortest is None else last + shortest / SECOND / BEATS
                if due is None or due > time.monotonic():
                    self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
                    if due is None:
                        # Nothing was held; the first beat comes a beat after the first claim.
                        last = time.monotonic()
                    continue
            last = time.monotonic()
            self.beat(last)
