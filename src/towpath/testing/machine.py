"""A Hypothesis state machine that applies the same history to two ledgers, such as the model and another. Its
failures shrink to a few commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from towpath.core.checks import DAY, HOUR, SECOND
from towpath.core.commands import (
    Abort,
    Append,
    Cancel,
    Claim,
    Claimed,
    Command,
    Note,
    OnFailure,
    Open,
    Progress,
    Purge,
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
    After,
    Done,
    FailOutcome,
    Key,
    KeyPolicy,
    Refuse,
    Release,
    RetryOutcome,
    SnoozeOutcome,
    Spec,
    State,
    Stop,
)
from towpath.core.limits import Rate
from towpath.testing.clock import START
from towpath.testing.draws import KEYS, LEASES, NOTES, OWNERS, PARTS, PATTERNS, QUEUES, WANTED
from towpath.testing.pair import Factory, Pair

GROUPS = ("g", "h", "i")
IDS = [f"j{n}" for n in range(12)]
_ids, _queues, _groups = st.sampled_from(IDS), st.sampled_from(QUEUES), st.sampled_from(GROUPS)
_spans = st.sampled_from((0, 1, SECOND, 30 * SECOND))


def _optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A few of the fields: with all of them at once, no job would ever run."""
    single = st.one_of([st.fixed_dictionaries({name: values}) for name, values in fields.items()])
    return st.lists(single, max_size=2).map(
        lambda chosen: {name: value for each in chosen for name, value in each.items()}
    )


_afters = st.builds(After, _ids, st.booleans()) | st.builds(After, _groups, st.booleans(), st.just(True))
_keys = st.builds(Key, st.sampled_from(KEYS), st.sampled_from(KeyPolicy), st.sampled_from((0, SECOND)))
_specs = st.builds(
    lambda name, queue, fields, extra: Spec(id=name, queue=queue, **fields, **extra),
    _ids,
    _queues,
    _optional(
        priority=st.integers(-1, 1),
        delay=_spans,
        ttl=st.sampled_from((SECOND, HOUR)),
        max_attempts=st.sampled_from((1, 2)),
        max_losses=st.sampled_from((1, 2)),
        retention=st.sampled_from((0, HOUR)),
        after=st.lists(_afters, max_size=3).map(tuple),
        group=_groups,
        payload=st.binary(max_size=3),
    ),
    st.just({}) | st.builds(dict, part=st.sampled_from(PARTS)) | st.builds(dict, key=_keys),
)
_several = st.lists(_specs, min_size=1, max_size=4, unique_by=lambda spec: spec.id).map(tuple)
_outcomes = st.one_of(
    st.builds(Done, st.none() | st.just(b"r")),
    st.builds(RetryOutcome, _spans, st.none() | st.just("boom")),
    st.builds(SnoozeOutcome, _spans),
    st.builds(Release, _spans),
    st.builds(Refuse, _spans),
    st.builds(FailOutcome, st.none() | st.just("bad")),
    st.builds(Stop),
)
_notes = st.builds(
    lambda key, fields: Note(key=key, **fields),
    st.sampled_from(NOTES),
    st.fixed_dictionaries(
        {"value": st.none() | st.binary(max_size=2)},
        optional={"expect": st.integers(0, 4), "ttl": st.just(SECOND)},
    ),
)
_wants = st.builds(Want, st.sampled_from(WANTED), st.integers(1, 5), st.none() | st.integers(0, 2))
_tokens = st.sampled_from(("", "", "t"))
_selectors = st.builds(
    lambda ids, fields: Selector(ids=tuple(ids), **fields),
    st.lists(_ids, min_size=1, max_size=4, unique=True),
    _optional(
        queue=st.sampled_from(PATTERNS),
        states=st.lists(st.sampled_from(State), min_size=1, max_size=3).map(tuple),
    ),
) | st.builds(
    lambda fields: Selector(queue="*", **fields), _optional(group=_groups, key=st.sampled_from(KEYS))
)
_gates: dict[str, st.SearchStrategy[Any]] = {
    "paused": st.booleans(),
    "cap": st.none() | st.integers(0, 2),
    "rate": st.none() | st.just(Rate(1)) | st.just(Rate(4, 1, 2)),
    "not_before": st.sampled_from((0, START + SECOND, START + HOUR)),
}


class _Played(RuleBasedStateMachine):
    """Two ledgers, a time, and the batch that was played last."""

    left: Factory
    right: Factory

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(type(self).left(), type(self).right())
        self.now = START
        self.held: list[tuple[str, int]] = []
        self.last: Sequence[Command] = ()

    def play(self, *commands: Command) -> None:
        self.last = commands
        for answer in self.pair.apply(commands, self.now):
            if isinstance(answer, Claimed):
                self.held.extend((claim.id, claim.fence) for claim in answer.claims)

    @invariant()
    def nothing_differs(self) -> None:
        self.pair.compare(self.now)

    def teardown(self) -> None:
        self.pair.close()

    @initialize()
    def begin(self) -> None:
        self.play(Open(GROUPS[0]), Append(tuple(Spec(id=id, queue=QUEUES[0]) for id in IDS[:3])))

    @rule(step=st.sampled_from((1, SECOND // 2, SECOND, 4 * SECOND, 20 * SECOND, HOUR, 8 * DAY, -SECOND)))
    def pass_time(self, step: int) -> None:
        self.now += step

    @rule()
    def repeat(self) -> None:
        self.play(*self.last)


class LedgerMachine(_Played):
    """One rule per command, in batches of one."""

    @rule(specs=_several)
    def append(self, specs: tuple[Spec, ...]) -> None:
        self.play(Append(specs))

    @rule(
        ids=st.lists(_ids, min_size=1, max_size=3, unique=True),
        afters=st.lists(_afters, min_size=1, max_size=2),
    )
    def append_linked(self, ids: list[str], afters: list[After]) -> None:
        self.play(
            Append(tuple(Spec(id=id, queue=QUEUES[n], after=tuple(afters)) for n, id in enumerate(ids)))
        )

    @rule(
        wants=st.lists(_wants, min_size=1, max_size=2),
        owner=st.sampled_from(OWNERS),
        lease=st.sampled_from(LEASES),
        token=_tokens,
    )
    def claim(self, wants: list[Want], owner: str, lease: int, token: str) -> None:
        self.play(Claim(owner=owner, wants=tuple(wants), lease=lease, token=token and f"claim-{token}"))

    @rule(n=st.integers(1, 3), once=st.none() | st.integers(0, 1))
    def claim_any(self, n: int, once: int | None) -> None:
        self.play(Claim(owner=OWNERS[0], wants=(Want("*", n, once),), lease=LEASES[-1]))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), outcome=_outcomes, spawn=st.just(()) | _several, notes=st.lists(_notes, max_size=2))
    def settle(self, data: st.DataObject, outcome: Any, spawn: tuple[Spec, ...], notes: list[Note]) -> None:
        id, fence = data.draw(st.sampled_from(self.held))
        self.play(Settle(id, fence, outcome, spawn, tuple(notes)))

    @rule(id=_ids, fence=st.integers(0, 3), outcome=_outcomes)
    def settle_anything(self, id: str, fence: int, outcome: Any) -> None:
        self.play(Settle(id, fence, outcome))

    @rule(lease=st.sampled_from(LEASES), extra=_ids)
    def renew(self, lease: int, extra: str) -> None:
        self.play(Renew(tuple({extra: 1, **dict(self.held)}.items()), lease))

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        fields=_optional(done=st.integers(0, 9), total=st.integers(0, 9), cursor=st.binary(max_size=2)),
        notes=st.lists(_notes, max_size=2),
    )
    def progress(self, data: st.DataObject, fields: dict[str, Any], notes: list[Note]) -> None:
        id, fence = data.draw(st.sampled_from(self.held))
        self.play(Progress(id, fence, notes=tuple(notes), **fields))

    @rule(
        where=_selectors,
        kind=st.sampled_from((Cancel, Revive, Purge)),
        limit=st.sampled_from((1, 2, 1000)),
        token=_tokens,
    )
    def bulk(self, where: Selector, kind: type[Cancel | Revive | Purge], limit: int, token: str) -> None:
        self.play(kind(where=where, limit=limit, token=token and f"{kind.__name__}-{token}"))

    @rule(
        group=_groups,
        on_failure=st.sampled_from(OnFailure),
        endings=st.sets(st.sampled_from(("done", "failed", "canceled"))),
    )
    def open(self, group: str, on_failure: OnFailure, endings: set[str]) -> None:
        self.play(
            Open(
                group, on_failure, {ending: (Spec(id="then", queue=QUEUES[0]),) for ending in sorted(endings)}
            )
        )

    @rule(group=_groups, kind=st.sampled_from((Seal, Seal, Unseal, Abort)))
    def seal_or_abort(self, group: str, kind: type[Seal | Unseal | Abort]) -> None:
        self.play(kind(group))

    @rule(group=_groups)
    def stop(self, group: str) -> None:
        self.play(Abort(group, stop=True))

    @rule(id=_ids, outcome=st.sampled_from(Resolution))
    def resolve(self, id: str, outcome: Resolution) -> None:
        self.play(Resolve(id, outcome, "a reason", OWNERS[0]))

    @rule(
        queue=_queues,
        fields=_optional(
            **_gates, capacity=st.none() | st.integers(0, 5), keep=st.none() | st.integers(0, 2)
        ),
    )
    def set_queue(self, queue: str, fields: dict[str, Any]) -> None:
        self.play(SetQueue(queue=queue, **fields))

    @rule(queue=_queues, part=st.sampled_from(PARTS), fields=_optional(**_gates, weight=st.integers(1, 3)))
    def set_part(self, queue: str, part: str, fields: dict[str, Any]) -> None:
        self.play(SetPart(queue=queue, part=part, **fields))

    @rule(note=_notes)
    def note(self, note: Note) -> None:
        self.play(note)

    @rule(
        limit=st.sampled_from((1, 3, 1000)),
        dead=st.sampled_from(((), (), (), *((owner,) for owner in OWNERS))),
    )
    def upkeep(self, limit: int, dead: tuple[str, ...]) -> None:
        self.play(Upkeep(limit, dead))


def machine(left: Factory, right: Factory) -> type[LedgerMachine]:
    """A state machine over these two ledgers; pytest runs its `TestCase`."""
    return type("Machine", (LedgerMachine,), {"left": staticmethod(left), "right": staticmethod(right)})
