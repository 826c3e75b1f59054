"""Random commands over few ids, keys, queues and groups, so that they often conflict."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import (
    Abort,
    Append,
    Appended,
    Cancel,
    Claim,
    Claimed,
    Command,
    Hasten,
    Note,
    OnFailure,
    Open,
    Progress,
    Purge,
    PutChunk,
    Renew,
    Resolution,
    Resolve,
    Revive,
    Seal,
    Selector,
    SetPart,
    SetQueue,
    Settle,
    Unseal,
    Upkeep,
    Want,
)
from towpath.core.job import (
    SERIAL,
    After,
    Done,
    FailOutcome,
    Key,
    KeyPolicy,
    Outcome,
    Spec,
    Stop,
)
from towpath.core.limits import Rate
from towpath.ledger import Answer
from towpath.testing.draws import (
    BRIEF,
    KEYS,
    LEAPS,
    LEASES,
    NOTES,
    OWNERS,
    PARTS,
    QUEUES,
    SPANS,
    STEPS,
    SUSPECTS,
    TERMS,
    WANTED,
    Draws,
)


class Moves(Draws):
    """Draws commands, and records ids and claims from the answers for later commands."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self._kinds: list[tuple[int, Callable[[], Command]]] = [
            (26, self.append),
            (22, self.claim),
            (24, self.settle),
            (5, self.renew),
            (4, self.progress),
            (5, self.cancel),
            (6, self.revive),
            (5, self._resolve),
            (4, self.purge),
            (3, self._hasten),
            (6, self.open),
            (9, self.seal),
            (2, self.abort),
            (4, self.set_queue),
            (4, self.set_part),
            (5, self.note),
            (10, self.upkeep),
            (3, self._put_chunk),
        ]

    def batch(self) -> list[Command]:
        if self._maybe(0.2):
            return self._plain()
        if self._maybe(0.1):
            return self._family()
        if self._maybe(0.1):
            return self._revival()
        if self._maybe(0.07):
            return self._upload()
        if self._maybe(0.06):
            return self._brief()
        size = self.chance.choice((1, 1, 1, 2, 3, 5, 9))
        weights = [weight for weight, _ in self._kinds]
        return [make() for _, make in self.chance.choices(self._kinds, weights, k=size)]

    def _plain(self) -> list[Command]:
        """The most frequent batches: plain jobs, or ends of jobs and the claim of the next ones. Ledgers have
        fast paths for these."""
        queue = self.chance.choice(QUEUES)
        if self._maybe(0.4):
            once = self.chance.choice((1, 3, 3, 3))
            return [
                Append(
                    tuple(
                        Spec(id=self._new_id(), queue=queue, max_attempts=once)
                        for _ in range(self.chance.randint(1, 12))
                    )
                )
            ]
        pairs = dict(self._pair() for _ in range(self.chance.choice((0, 1, 1, 3, 8))))
        ends = [
            Settle(id, fence, Done(self.chance.choice((None, None, b"result"))))
            for id, fence in pairs.items()
        ]
        want = Want(
            queue,
            self.chance.choice((1, 5, 20)),
            self.chance.choice((None, None, 0, 1)),
            suspects=self.chance.choice(SUSPECTS),
        )
        return [
            *ends,
            Claim(owner=self.chance.choice(OWNERS), wants=(want,), lease=self.chance.choice(LEASES)),
        ]

    def _family(self) -> list[Command]:
        """A group with callbacks, members that others may represent, and jobs that wait for it, in one
        batch."""
        self.opened += 1
        group, queue = f"g{self.opened}", self.chance.choice(QUEUES)
        opening = self.open()
        ids = [self._new_id() for _ in range(self.chance.randint(2, 6))]
        unique = (None, None, Key(self.chance.choice(KEYS), KeyPolicy.UNIQUE, self.chance.choice((0, HOUR))))
        specs = [
            Spec(id=id, queue=queue, key=self.chance.choice(unique), group=group, max_attempts=1)
            for id in ids
        ]
        for _ in range(self.chance.randint(0, 3)):
            after = [
                After(group, self._maybe(0.4), group=True),
                *([self._after(ids)] if self._maybe(0.3) else []),
            ]
            member = f"g{self.opened - 1}" if self._maybe(0.3) else None
            specs.append(Spec(id=self._new_id(), queue=queue, after=tuple(after), group=member))
        sealed = [Seal(group)] if self._maybe(0.8) else []
        claim = Claim(
            owner=self.chance.choice(OWNERS), wants=(Want(queue, 5),), lease=self.chance.choice(LEASES)
        )
        return [Open(group, opening.on_failure, opening.then), Append(tuple(specs)), *sealed, claim]

    def _revival(self) -> list[Command]:
        """Some ends, many of them failures; then jobs of one group, or some ids, are revived."""
        bad: tuple[Outcome, ...] = (FailOutcome("boom"), FailOutcome(), Stop(), Done())
        pairs = dict(self._pair() for _ in range(self.chance.randint(0, 8)))
        ends: list[Command] = [Settle(id, fence, self.chance.choice(bad)) for id, fence in pairs.items()]
        ids = tuple({self._id() for _ in range(3)})
        where = Selector(group=self._group()) if self._maybe(0.6) else Selector(ids=ids)
        decided = [self._resolve()] if self._maybe(0.4) else []
        return [*ends, *decided, Revive(where=where, limit=self.chance.choice((1, 2, 100)))]

    def _upload(self) -> list[Command]:
        """The chunks of a blob and the append that names it; sometimes a chunk or the append is missing."""
        self.uploaded += 1
        blob = f"b{self.uploaded}"
        chunks = [
            PutChunk(blob, n, self.chance.choice((b"1", b"22"))) for n in range(self.chance.randint(1, 3))
        ]
        size = sum(len(chunk.data) for chunk in chunks) + self._maybe(0.1)
        kept = [chunk for chunk in chunks if self._maybe(0.9)]
        spec = replace(self.spec(self._new_id()), payload=b"", blob=blob, blob_size=size)
        return [*kept, Append((spec,))] if self._maybe(0.7) or not kept else [*kept]

    def _brief(self) -> list[Command]:
        """A queue has a job that is deleted, or a setting that is removed; sometimes one of them stays, and
        the job is revived."""
        queue, stays = self.chance.choice(BRIEF), self._maybe(0.2)
        if self._maybe(0.3):
            gate: Command = (
                SetPart(queue=queue, part="p", cap=2)
                if self._maybe(0.1)
                else SetQueue(queue=queue, cap=2 if stays else None)
            )
            return [gate, Upkeep()]
        part, delay = self.chance.choice((None, None, "p")), self.chance.choice((0, HOUR))
        spec = Spec(id=self._new_id(), queue=queue, part=part, delay=delay)
        where = Selector(ids=(spec.id,))
        last = Revive(where=where) if stays else Purge(where=where)
        return [Append((spec,)), Cancel(where=where), last, *([Upkeep()] if self._maybe(0.7) else [])]

    def _put_chunk(self) -> PutChunk:
        """A chunk of a recent blob, which may have a job."""
        blob = f"b{max(0, self.uploaded - self.chance.choice((-1, 0, 0, 1, 2)))}"
        self.uploaded += self._maybe(0.3)
        return PutChunk(blob, self.chance.choice((0, 1, 2)), self.chance.choice((b"1", b"22")))

    def step(self) -> int:
        """The advance of the time before the next batch."""
        return self.chance.choice(LEAPS if self._maybe(0.04) else STEPS)

    def observe(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, Claimed):
                self.held.extend((claim.id, claim.fence) for claim in answer.claims)
            elif isinstance(answer, Appended):
                self.known.extend(placed.id for placed in answer.jobs)
            version = getattr(answer, "version", None)
            if version is not None:
                self.versions = [*self.versions[-5:], version]
        del self.held[:-40]
        del self.known[:-16]

    def append(self) -> Append:
        return Append(self.specs(self.chance.choice((1, 2, 6))), inside=self.chance.random() < 0.1)

    def claim(self) -> Claim:
        wants = tuple(
            Want(
                self.chance.choice(WANTED),
                self.chance.choice((1, 2, 5, 20)),
                self.chance.choice((None, None, 0, 1)),
                self.chance.choice((None, None, None, 1, 3, 6)),
                self.chance.choice(SUSPECTS),
                *self.chance.choice(TERMS),
            )
            for _ in range(self.chance.choice((1, 1, 1, 2, 3)))
        )
        owner, lease, once = (
            self.chance.choice(OWNERS),
            self.chance.choice(LEASES),
            self.chance.choice((None, None, 0, 2)),
        )
        token, suspects = self._token("claim"), self.chance.choice(SUSPECTS)
        return Claim(owner=owner, wants=wants, lease=lease, once=once, suspects=suspects, token=token)

    def settle(self) -> Settle:
        id, fence = self._pair()
        spawn = self.specs(2) if self._maybe(0.15) else ()
        notes = (
            tuple(self.note(token=False) for _ in range(self.chance.randint(1, 2)))
            if self._maybe(0.1)
            else ()
        )
        return Settle(id, fence, self.outcome(), spawn, notes)

    def renew(self) -> Renew:
        pairs = dict(self.chance.sample(self.held, min(len(self.held), self.chance.randint(0, 4))))
        if self._maybe(0.3):
            pairs[self._id()] = self.chance.randint(0, 3)
        return Renew(tuple(pairs.items()), self.chance.choice(LEASES))

    def progress(self) -> Progress:
        id, fence = self.chance.choice(self.held) if self.held else (self._id(), 1)
        values = [self.chance.choice((None, 1, 7)) for _ in range(2)]
        notes = tuple(self.note(token=False) for _ in range(self.chance.randint(1, 2) * self._maybe(0.2)))
        return Progress(id, fence, values[0], values[1], self.chance.choice((None, b"cursor")), notes)

    def _bulk(self, kind: str) -> dict[str, Any]:
        limit = self.chance.choice((1, 2, 5, 100, 10_000))
        return {"where": self.selector(), "limit": limit, "token": self._token(kind)}

    def cancel(self) -> Cancel:
        return Cancel(**self._bulk("cancel"))

    def revive(self) -> Revive:
        return Revive(**self._bulk("revive"))

    def purge(self) -> Purge:
        return Purge(**self._bulk("purge"))

    def _resolve(self) -> Resolve:
        outcome, result = self.chance.choice(tuple(Resolution)), self.chance.choice((None, b"result"))
        return Resolve(self._id(), outcome, "a reason", self.chance.choice(OWNERS), result)

    def _hasten(self) -> Hasten:
        waited, priority = self.chance.choice((0, SECOND, 5 * SECOND)), self.chance.choice((0, 0, 5, -3))
        return Hasten(self.chance.choice(WANTED), waited, priority, self.chance.choice((1, 3, 1000)))

    def open(self) -> Open:
        endings = [ending for ending in ("done", "failed", "canceled") if self._maybe(0.3)]
        self.opened += self._maybe(0.6)
        group = self._group()
        then = {
            ending: tuple([self._callback(n, group) for n in range(self.chance.randint(1, 3))])
            for ending in endings
        }
        return Open(group, self.chance.choice(tuple(OnFailure)), then)

    def _callback(self, n: int, of: str) -> Spec:
        """The n-th spec of a list; it may wait for earlier ones. Its group may be new, open or closed."""
        key = self._key(True) if self._maybe(0.3) else None
        after = tuple([After(f"then{k}", self._maybe(0.4)) for k in range(n) if self._maybe(0.5)])
        group = self.chance.choice((None, None, None, f"h{self.opened}", f"h{self.opened - 1}"))
        group = None if group == of else group
        return Spec(id=f"then{n}", queue=self.chance.choice(QUEUES), key=key, after=after, group=group)

    def seal(self) -> Seal | Unseal:
        return (
            Unseal(self._group(), "a pause" if self._maybe(0.5) else None)
            if self._maybe(0.3)
            else Seal(self._group())
        )

    def abort(self) -> Abort:
        return Abort(self._group(), stop=self._maybe(0.5))

    def _gate(self, now_and_then: float = 0.3) -> dict[str, Any]:
        chance = self.chance
        fields: dict[str, Any] = {
            "paused": chance.random() < 0.2,
            "why": chance.choice((None, "because")),
            "cap": chance.choice((None, None, 0, 1, 3)),
            "rate": chance.choice((None, None, Rate(1), Rate(5, 1, 3))),
        }
        return {field: value for field, value in fields.items() if self._maybe(now_and_then)}

    def set_queue(self) -> SetQueue:
        fields = self._gate()
        if self._maybe(0.3):
            fields["capacity"] = self.chance.choice((None, None, 3, 10))
        if self._maybe(0.2):
            fields["retention"] = self.chance.choice((None, 0, SECOND, DAY))
        if self._maybe(0.2):
            fields["keep"] = self.chance.choice((None, 0, 2, 5))
        return SetQueue(queue=self.chance.choice(QUEUES), **fields)

    def set_part(self) -> SetPart:
        fields = self._gate()
        if self._maybe(0.3):
            fields["weight"] = self.chance.choice((1, 2, 5))
        if self._maybe(0.3):
            fields["capacity"] = self.chance.choice((None, None, 2, 5))
        if self._maybe(0.3):
            fields["append_rate"] = self.chance.choice((None, None, Rate(1), Rate(2, 1, 3)))
        part = self.chance.choice((*PARTS, SERIAL + KEYS[0]))
        if part not in PARTS and "cap" in fields:
            fields["cap"] = self.chance.choice((0, 1))
        return SetPart(queue=self.chance.choice(QUEUES), part=part, **fields)

    def note(self, token: bool = True) -> Note:
        value = None if self._maybe(0.25) else self.chance.choice((b"", b"1", b"2"))
        expect = self.chance.choice((None, None, 0, *self.versions))
        ttl = self.chance.choice((None, None, *SPANS))
        gates = (self.set_part(), self.set_queue()) if token and self._maybe(0.2) else ()
        name = self._token("note") if token else ""
        return Note(
            key=self.chance.choice(NOTES), value=value, expect=expect, ttl=ttl, token=name, gates=gates
        )

    def upkeep(self) -> Upkeep:
        dead = tuple(owner for owner in OWNERS if self._maybe(0.1))
        return Upkeep(self.chance.choice((1, 2, 3, 10, 1000, 1000, 1000)), dead)
