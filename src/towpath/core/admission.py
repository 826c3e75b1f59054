"""The effects of an append, decided from facts: new jobs, repeated ids, keys, dependencies.

A ledger reads `AppendFacts` about the ids, keys, groups and queues of the specs, calls `admit`, and writes
the `Admission`. The decision depends on the facts only, so every ledger decides alike. `admit` raises
`Refused` before a row is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from towpath.core import blobs
from towpath.core.commands import GroupState, Placed
from towpath.core.facts import (
    Admission,
    AppendFacts,
    GroupFact,
    KeyHolder,
    KeyName,
    KeyTaken,
    Origin,
    Proxy,
    Room,
    is_unrelated,
    key_of,
    node,
)
from towpath.core.job import FINISHED, READY, SCHEDULED, SERIAL, After, Job, KeyPolicy, Reason, Spec, State
from towpath.core.lifecycle import awaken, counter_of, purge_time
from towpath.core.room import check_quotas, check_room
from towpath.errors import (
    DependencyCycle,
    GroupClosed,
    Refused,
    UnknownDependency,
    UnknownGroup,
    UnusableBlob,
)

_NONE = Reason.NONE


def admit(
    specs: Sequence[Spec], facts: AppendFacts, now: int, next_seq: int, origin: Origin | None = None
) -> Admission:
    if (
        not facts.known
        and all(map(is_unrelated, specs))
        and (len(specs) == 1 or len({spec.id for spec in specs}) == len(specs))
    ):
        return _admit_unrelated(specs, facts, now, next_seq, origin)
    if origin is not None and origin.closes:
        return _admit_callbacks(specs, facts, now, next_seq, origin)
    return _Admitting(specs, facts, now, next_seq, origin).run()


def _admit_callbacks(
    specs: Sequence[Spec], facts: AppendFacts, now: int, next_seq: int, origin: Origin
) -> Admission:
    opened = {spec.group: GroupFact(GroupState.SEALED) for spec in specs if spec.group is not None}
    opened = {id: fact for id, fact in opened.items() if id not in facts.groups}
    known = replace(facts, groups={**facts.groups, **opened})
    try:
        return _Admitting(specs, known, now, next_seq, origin, opened).run()
    except Refused as refusal:
        new = [spec for spec in specs if spec.id not in facts.known]
        return Admission(jobs=failed_jobs(new, next_seq, now, str(refusal), origin))


def failed_jobs(
    specs: Iterable[Spec], seq: int, now: int, error: str, origin: Origin | None = None
) -> list[Job]:
    """Jobs for specs that were refused after their caller could receive a refusal."""
    ending = State.FAILED, Reason.FATAL, None
    bare = [replace(spec, after=(), group=None, blob=None, blob_size=0) for spec in specs]
    jobs = [new_job(spec, seq + n, now, origin, 0, ending) for n, spec in enumerate(bare)]
    return [replace(job, error=error) for job in jobs]


def _admit_unrelated(
    specs: Sequence[Spec], facts: AppendFacts, now: int, seq: int, origin: Origin | None
) -> Admission:
    spent: list[tuple[str, str, int]] = []
    if origin is None:
        check_room(specs, facts.rooms)
        spent = check_quotas(specs, facts.quotas, now) if facts.quotas else spent
    jobs = [new_job(spec, seq + n, now, origin) for n, spec in enumerate(specs)]
    return Admission(answers=tuple([Placed(job.id, job.seq) for job in jobs]), jobs=jobs, spent=spent)


def new_job(
    spec: Spec,
    seq: int,
    now: int,
    origin: Origin | None = None,
    waits: int = 0,
    ending: tuple[State, Reason, int | None] | None = None,
) -> Job:
    ready_at = now + spec.delay if spec.ready_at is None else spec.ready_at
    if ending is not None:
        state, reason, purge_at = ending
    else:
        state = awaken(ready_at, waits, now) if waits or ready_at > now else READY
        reason = Reason.DELAY if state is SCHEDULED else _NONE
        purge_at = None
    key, part = spec.key, spec.part
    if key is not None and key.policy is KeyPolicy.SERIAL:
        part = SERIAL + key.name
    parent, correlation = spec.parent, spec.correlation_id
    if origin is not None:
        parent = parent or origin.parent
        correlation = correlation or origin.correlation_id
    headers, size = spec.headers, len(spec.payload)
    if spec.blob is not None:
        headers = {**headers, blobs.HEADER: blobs.header_of(spec.blob, spec.blob_size)}
        size = spec.blob_size
    # By position, in the order of the fields: a keyword call of this size costs three times as much.
    # fmt: off
    return Job(
        spec.id, seq, spec.queue, part, spec.kind,
        spec.priority,  # type: ignore[arg-type]  # a number since Spec.__post_init__
        state, reason, ready_at,
        None if spec.ttl is None else now + spec.ttl,
        0, 0, 0, spec.max_attempts, spec.max_losses,
        0, None, None, None, 0, None, None,
        spec.timeout, spec.retention, purge_at, waits, spec.group, parent, spec.generation,
        None if key is None else key.name,
        None if key is None else key.policy,
        None, None, correlation, now, None,
        None if ending is None else now,
        size, spec.content_type, spec.payload, headers,
    )
    # fmt: on


class _Admitting:
    """One append with keys, dependencies or groups. Repeats and keys in list order, then dependencies from
    the top down."""

    def __init__(
        self,
        specs: Sequence[Spec],
        facts: AppendFacts,
        now: int,
        next_seq: int,
        origin: Origin | None,
        opened: Iterable[str] = (),
    ) -> None:
        """`opened`: groups that are created with this append."""
        self.specs, self.facts, self.now, self.origin = specs, facts, now, origin
        self.opened = set(opened)
        self.seq = next_seq
        self.new: dict[str, Spec] = {}
        self.seqs: dict[str, int] = {}
        self.redirect: dict[str, str] = {}
        self.refused: dict[str, Spec] = {}
        """Members of groups that were refused for their keys."""
        self.placed: dict[str, Placed] = {}
        self.holders: dict[KeyName, KeyHolder] = dict(facts.holders)
        self.replaces: dict[str, tuple[str, int]] = {}
        """By the id of a new job: the id and seq of the older waiting job that it replaces."""
        self.inherits: dict[str, tuple[str, int]] = {}
        """By the id of a new job: the id and seq of the running job that it supersedes. The new job takes
        over its dependents."""
        self.taken: dict[KeyName, KeyTaken] = {}
        self.stops: dict[str, int] = {}
        self.endings: dict[str, tuple[State, Reason]] = {}
        self.result = Admission(
            jobs=[],
            edges=[],
            gates=[],
            proxies=[],
            names=[],
            aliases=[],
            keys=[],
            freed=[],
            superseded=[],
            handed=[],
            asked=[],
        )

    def run(self) -> Admission:
        for spec in self.specs:
            self._place(spec)
        needs = {id: self._needs(spec) for id, spec in self.new.items()}
        self._check_known(needs)
        order = self._order(needs)
        self._check_groups()
        if self.origin is None:
            check_room(self.new.values(), self.facts.rooms)
            self.result.spent = check_quotas(self.new.values(), self.facts.quotas, self.now)
        self._take_blobs()
        made = {id: self._make(self.new[id], needs[id]) for id in order}
        self.result.jobs = [made[id] for id in self.new]
        self.result.proxies = [self._proxy(spec) for spec in self.refused.values()]
        self.result.superseded = [seq for _, seq in self.replaces.values()]
        # A newer job that ended in this append takes over no dependents.
        older = {**self.replaces, **self.inherits}
        self.result.handed = [
            (seq, self.seqs[id]) for id, (_, seq) in older.items() if id not in self.endings
        ]
        ended = {
            name for name, taken in self.taken.items() if taken.id in self.endings and taken.until <= self.now
        }
        self.result.freed = sorted(ended)
        self.result.keys = [taken for name, taken in self.taken.items() if name not in ended]
        self.result.answers = tuple([self.placed[spec.id] for spec in self.specs])
        joined = {spec.group for spec in (*self.new.values(), *self.refused.values())}
        self.result.opened = sorted(self.opened.intersection(joined))
        return self.result

    def _take_blobs(self) -> None:
        taken: dict[str, int] = {}
        for spec in self.new.values():
            if spec.blob is not None:
                blobs.check_blob(spec.blob, spec.blob_size, self.facts.blobs.get(spec.blob))
                if spec.blob in taken:
                    raise UnusableBlob(blob=spec.blob, why="two jobs of this append name it")
                taken[spec.blob] = self.seqs[spec.id]
        self.result.blobs = list(taken.items())

    def _place(self, spec: Spec) -> None:
        if spec.id in self.placed:
            return
        if (known := self.facts.known.get(spec.id)) is not None:
            target = self.facts.known[known.alias] if known.alias is not None else known
            self.placed[spec.id] = Placed(target.id, target.seq)
            if known.alias is not None:
                self.redirect[spec.id] = known.alias
            return
        key = key_of(spec)
        if key is not None and spec.key is not None and not self._take_key(spec, key):
            return
        self.new[spec.id] = spec
        self.seqs[spec.id] = self.seq
        self.placed[spec.id] = Placed(spec.id, self.seq)
        self.seq += 1

    def _take_key(self, spec: Spec, key: KeyName) -> bool:
        """True if the spec gets the key (its seq will be `self.seq`), False if another job has it."""
        assert spec.key is not None
        holder = self.holders.get(key)
        live = holder is not None and holder.state is not None and holder.state not in FINISHED
        runner: int | None = None
        if holder is not None and spec.key.policy is KeyPolicy.UNIQUE and (live or holder.until > self.now):
            # A deleted job with an open window of its key is not an alias of itself.
            if holder.id != spec.id:
                self.result.aliases.append((spec.id, holder.id))
                self.redirect[spec.id] = holder.id
                if spec.group is not None:
                    self.refused[spec.id] = spec
                    self.seqs[spec.id] = self.seq
                    self.seq += 1
            self.placed[spec.id] = Placed(holder.id, holder.seq)
            return False
        if holder is not None and live:
            runner = self._supersede(spec, holder)
        until = self.now + spec.key.window if spec.key.window else 0
        state = State.BLOCKED if runner is not None else State.READY
        self.holders[key] = KeyHolder(spec.id, self.seq, state, until, runner)
        self.taken[key] = KeyTaken(key, spec.id, self.seq, until, runner)
        return True

    def _supersede(self, spec: Spec, holder: KeyHolder) -> int | None:
        if holder.state is State.RUNNING:
            self.result.asked.append(holder.seq)
            self.stops[spec.id] = holder.seq
            self.inherits[spec.id] = holder.id, holder.seq
            self.redirect[holder.id] = spec.id
            return holder.seq
        self.redirect[holder.id] = spec.id
        if holder.id in self.new:
            self.endings[holder.id] = (State.CANCELED, Reason.SUPERSEDED)
            if holder.id in self.replaces:
                # The older job that the holder itself replaced now gives its dependents to the newest.
                self.replaces[spec.id] = self.replaces.pop(holder.id)
            if holder.id in self.inherits:
                self.inherits[spec.id] = self.inherits.pop(holder.id)
        else:
            self.replaces[spec.id] = (holder.id, holder.seq)
        if holder.runner is not None:
            self.stops.pop(holder.id, None)
            self.stops[spec.id] = holder.runner
        return holder.runner

    def _target(self, id: str) -> str:
        while id in self.redirect:
            id = self.redirect[id]
        if id not in self.new and (known := self.facts.known.get(id)) is not None and known.alias is not None:
            return self._target(known.alias)
        return id

    def _needs(self, spec: Spec) -> dict[str, After]:
        """The spec's dependencies by node, each once; if both kinds are given, the success is needed."""
        found: dict[str, After] = {}
        if spec.id in self.endings:
            return found
        for after in spec.after:
            name = node(after.id) if after.group else self._target(after.id)
            if name == spec.id and after.id == self.inherits.get(name, ("",))[0]:
                # The newer job waits for the running one that it supersedes, not for itself.
                name = after.id
            if name not in found or found[name].run_anyway:
                found[name] = after
        return found

    def _check_known(self, needs: Mapping[str, Mapping[str, After]]) -> None:
        unknown = set()
        for deps in needs.values():
            for name, after in deps.items():
                if after.group:
                    if after.id not in self.facts.groups:
                        unknown.add(f"group {after.id}")
                elif name not in self.new and name not in self.facts.known:
                    unknown.add(name)
        if unknown:
            raise UnknownDependency(ids=tuple(sorted(unknown)))

    def _check_groups(self) -> None:
        for spec in (*self.new.values(), *self.refused.values()):
            if spec.group is None:
                continue
            fact = self.facts.groups.get(spec.group)
            if fact is None:
                raise UnknownGroup(group=spec.group)
            own = self.origin is not None and self.origin.group == spec.group
            own = own or spec.group in self.opened
            if fact.state is not GroupState.OPEN and not (own and fact.state is not GroupState.CLOSED):
                raise GroupClosed(group=spec.group, state=fact.state)

    def _order(self, needs: Mapping[str, Mapping[str, After]]) -> list[str]:
        """The new ids with every dependency before its dependents; raises DependencyCycle."""
        ids = list(self.new)
        place = {id: n for n, id in enumerate(ids)}
        backward = all(place[name] < n for n, id in enumerate(ids) for name in needs[id] if name in place)
        grouped = self.refused or any(spec.group is not None for spec in self.new.values())
        if backward and not self.facts.downstream and not grouped:
            return ids
        winners = [self._target(id) for id in self.refused]
        return [id for id in _sorted([*ids, *winners], self._waits_for(needs, winners)) if id in place]

    def _waits_for(
        self, needs: Mapping[str, Mapping[str, After]], winners: Sequence[str]
    ) -> dict[str, list[str]]:
        """Every node reached from the new specs, with the nodes it waits for (existing nodes only if a path
        leads back to the new specs)."""
        members: dict[str, list[str]] = {}
        for spec in self.new.values():
            if spec.group is not None:
                members.setdefault(node(spec.group), []).append(spec.id)
        for spec, winner in zip(self.refused.values(), winners, strict=True):
            members.setdefault(node(str(spec.group)), []).append(winner)
        for id, (old, _) in self.replaces.items():
            members.setdefault(old, []).append(id)
        successors = {old: id for id, (old, _) in self.inherits.items()}
        graph: dict[str, list[str]] = {id: list(deps) for id, deps in needs.items()}
        todo = [*winners, *(name for deps in graph.values() for name in deps)]
        while todo:
            name = todo.pop()
            if name in graph:
                continue
            through = [through for through, reached in self.facts.downstream.items() if name in reached]
            graph[name] = members.get(name, []) + [
                target for way in through for target in members.get(way, ())
            ]
            graph[name] += [successors[way] for way in through if way in successors]
            todo.extend(graph[name])
        return graph

    def _proxy(self, spec: Spec) -> Proxy:
        assert spec.group is not None
        target = self._target(spec.id)
        if target in self.new:
            job, (state, reason) = self.seqs[target], self.endings.get(target, (State.BLOCKED, Reason.NONE))
        else:
            known = self.facts.known[target]
            job, state, reason = known.seq, known.state, Reason.NONE
        counted = counter_of(state, reason)
        if counted == "unfinished" and self.facts.groups[spec.group].state is GroupState.ABORTING:
            counted = "canceled"
        return Proxy(spec.id, self.seqs[spec.id], spec.group, job, counted)

    def _name(self, spec: Spec) -> None:
        """Record the dependencies that the spec names by another id than that of the job it waits for."""
        if spec.id in self.endings and self.endings[spec.id][1] is Reason.SUPERSEDED:
            return
        for after in spec.after:
            target = after.id if after.group else self._target(after.id)
            if target in (after.id, spec.id):
                continue
            if target in self.new:
                self.result.names.append((self.seqs[spec.id], after.id, self.seqs[target]))
            elif not (known := self.facts.known[target]).gone:
                self.result.names.append((self.seqs[spec.id], after.id, known.seq))

    def _make(self, spec: Spec, needs: Mapping[str, After]) -> Job:
        seq, waits, ending = self.seqs[spec.id], 0, self.endings.get(spec.id)
        if spec.after:
            self._name(spec)
        sources: set[int] = set()
        for name, after in needs.items():
            state, src = self._state_of(name, after)
            if state in FINISHED:
                if state is not State.DONE and not after.run_anyway:
                    ending = self._worse(ending, state)
                    if after.group:
                        self.result.gates.append((after.id, seq, False))
                    elif src is not None:
                        self.result.edges.append((src, seq, False))
                continue
            waits += 1
            if after.group:
                self.result.gates.append((after.id, seq, after.run_anyway))
            else:
                assert src is not None
                sources.add(src)
                self.result.edges.append((src, seq, after.run_anyway))
        if spec.group is not None and ending is None:
            fact = self.facts.groups[spec.group]
            if fact.state is GroupState.ABORTING:
                ending = (State.CANCELED, Reason.ABORTED)
            waits += fact.state is GroupState.OPEN
        if ending is None and (runner := self.stops.get(spec.id)) is not None and runner not in sources:
            self.result.edges.append((runner, seq, True))
            waits += 1
        if ending is None:
            return new_job(spec, seq, self.now, self.origin, waits)
        self.endings[spec.id] = ending
        room = self.facts.rooms.get(spec.queue, Room())
        purge_at = purge_time(ending[0], self.now, spec.retention, room.retention)
        return new_job(spec, seq, self.now, self.origin, 0, (*ending, purge_at))

    @staticmethod
    def _worse(ending: tuple[State, Reason] | None, state: State) -> tuple[State, Reason]:
        """A job that loses several dependencies is failed if any of them failed."""
        if state is State.FAILED or (ending is not None and ending[0] is State.FAILED):
            return State.FAILED, Reason.DEPENDENCY
        return ending or (State.CANCELED, Reason.DEPENDENCY)

    def _state_of(self, name: str, after: After) -> tuple[State, int | None]:
        """The state of a dependency, and its seq if it has a row that an edge can point to."""
        if after.group:
            fact = self.facts.groups[after.id]
            if fact.state is GroupState.CLOSED:
                assert fact.outcome is not None
                return fact.outcome, None
            return State.BLOCKED, None
        if name in self.new:
            return self.endings.get(name, (State.BLOCKED, Reason.NONE))[0], self.seqs[name]
        known = self.facts.known[name]
        return known.state, None if known.gone else known.seq


def _sorted(ids: Sequence[str], waits_for: Mapping[str, Sequence[str]]) -> list[str]:
    """`ids` in an order in which each follows its dependencies; depth first, without recursion."""
    order: list[str] = []
    state: dict[str, int] = {}
    for root in ids:
        stack = [(root, iter(waits_for.get(root, ())))] if root not in state else []
        state.setdefault(root, 1)
        while stack:
            name, rest = stack[-1]
            for below in rest:
                if state.get(below) == 1:
                    path = [entry for entry, _ in stack]
                    raise DependencyCycle(
                        ids=tuple(x.replace("\0", "group ") for x in path[path.index(below) :])
                    )
                if below not in state:
                    state[below] = 1
                    stack.append((below, iter(waits_for.get(below, ()))))
                    break
            else:
                state[name] = 2
                order.append(name)
                stack.pop()
    wanted = set(ids)
    return [name for name in order if name in wanted]
