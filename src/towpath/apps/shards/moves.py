"""Builders of the plans that change the placement of shards. They are pure: the same record and the same
wanted placement give the same plans.

A plan has one pivot, so that each shard has a plan of its own. `change_plans` returns them in order: the next
one is to be submitted when the one before it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from towpath import Exponential
from towpath.apps.shards import copying, cutover, membership, replicas, tables
from towpath.apps.shards.catalogue import PendingChange, Shard, TableRecord
from towpath.apps.shards.plans import step
from towpath.apps.shards.routines import Routine, Work
from towpath.errors import InvalidInput
from towpath.flows.plan import Plan, Step, StepKind, StepRetry

RETRY = StepRetry(attempts=30, backoff=Exponential(base=0.5, cap=15.0), check_attempts=30)
"""About five minutes: a server that restarts is no reason to give a move up."""
PATIENT = StepRetry(attempts=200, backoff=Exponential(base=0.5, cap=60.0), check_attempts=200)
"""About three hours, for steps after the pivot and for undos: there is no other way."""


def move_plan(
    record: TableRecord, shard: int, source: str, target: str, plan: str, *, keep_old: bool = False
) -> Plan:
    """Move one copy of a shard from a node to a node that has none."""
    placed = _shard(record, shard)
    if source not in placed.nodes:
        raise InvalidInput(field="source", value=source, expected=f"a node of the shard: {placed.nodes}")
    if target not in record.nodes or target in placed.nodes:
        others = [node for node in record.nodes if node not in placed.nodes]
        raise InvalidInput(field="target", value=target, expected=f"one of {others}")
    wanted = tuple(target if node == source else node for node in placed.nodes)
    return shard_plan(record, shard, wanted, plan, keep_old=keep_old)


def change_plans(
    record: TableRecord,
    wanted: Sequence[tuple[str, ...]],
    plan: str,
    operation: str,
    add_nodes: Sequence[str] = (),
    remove_nodes: Sequence[str] = (),
) -> tuple[Plan, ...]:
    """The plans from the placement of a record to the wanted placement: new nodes join, shards move, removed
    nodes leave. The id of plan n is `<plan>-<n>`; `plan_ids` returns them."""
    made: list[Plan] = []
    if add_nodes:
        made.append(membership.join_plan(record, add_nodes, f"{plan}-{len(made)}", operation))
        record = msgspec.structs.replace(record, nodes=tuple(sorted({*record.nodes, *add_nodes})))
    for number, nodes in enumerate(wanted):
        if nodes != record.shards[number].nodes:
            made.append(shard_plan(record, number, nodes, f"{plan}-{len(made)}", operation=operation))
            record = _with_shard(record, number, nodes)
    if remove_nodes:
        made.append(membership.leave_plan(record, remove_nodes, f"{plan}-{len(made)}", operation))
    return tuple(made)


def plan_ids(plan: str, plans: Sequence[Plan]) -> tuple[str, ...]:
    """The ids with which the plans of `change_plans` must be submitted."""
    return tuple(f"{plan}-{number}" for number in range(len(plans)))


def next_shard(shard: Shard, nodes: tuple[str, ...]) -> Shard:
    """The shard on other nodes. Its generation grows when the primary is another node."""
    return Shard(nodes, shard.generation + (nodes[0] != shard.primary))


def shard_plan(
    record: TableRecord,
    shard: int,
    wanted: tuple[str, ...],
    plan: str,
    *,
    operation: str = "move",
    keep_old: bool = False,
) -> Plan:
    """Change the copies of one shard to the wanted nodes, the primary first. Copies are added before the
    pivot and removed after it."""
    placed = _shard(record, shard)
    if not wanted or len(set(wanted)) != len(wanted) or not {*wanted} <= {*record.nodes}:
        raise InvalidInput(field="wanted", value=wanted, expected="different nodes of the table")
    change = _Change(record, shard, placed, next_shard(placed, wanted), plan, keep_old)
    pending = PendingChange(plan, operation, shards={shard: change.new})
    begin = membership.begin_step(record, pending, wanted[0], retry=RETRY)
    same = change.new.primary == placed.primary
    steps = (begin, *change.copies(), *(change.swap() if same else change.hand_over()))
    about = f"{operation} shard {shard} of {record.table}: {', '.join(placed.nodes)} -> {', '.join(wanted)}"
    return Plan(name=f"{operation}-{record.table}-s{shard}", steps=steps, description=about)


class _Change:
    """The steps of one change: `old` and `new` are the copies of the shard before and after it."""

    def __init__(
        self, record: TableRecord, shard: int, old: Shard, new: Shard, plan: str, keep_old: bool
    ) -> None:
        self.record, self.shard, self.old, self.new = record, shard, old, new
        self.plan, self.keep_old = plan, keep_old
        self.added = [node for node in new.nodes if node not in old.nodes]
        self.last = ["begin"]
        """The steps before the pivot that no other step waits for."""

    def work(self, node: str, peer: str = "", more: Mapping[str, Any] | None = None) -> Work:
        return Work(
            table=self.record.table,
            plan=self.plan,
            node=node,
            shard=self.shard,
            peer=peer,
            generation=self.new.generation,
            more=more or {},
        )

    def before(self, routine: Routine, name: str, work: Work, after: Sequence[str], **more: Any) -> Step:
        return step(routine, name, work, after=after, retry=RETRY, undo_retry=PATIENT, **more)

    def forward(self, routine: Routine, name: str, work: Work, after: Sequence[str]) -> Step:
        return step(routine, name, work, after=after, kind=StepKind.FORWARD, retry=PATIENT)

    def copies(self) -> list[Step]:
        """Copy the shard from its primary to every added node, node by node in parallel."""
        made: list[Step] = []
        source = self.old.primary
        for node in self.added:
            here, there = self.work(node, source), self.work(source, node)
            thing = f"copy of {self.record.table}/{self.shard} on {node}"
            parts: list[tuple[Routine, str, Work, dict[str, Any]]] = [
                (copying.PREFLIGHT, "preflight", here, {}),
                (copying.CREATE, "create", here, {"undo_destroys": (thing,)}),
                (copying.PUBLISH, "publish", there, {}),
                (copying.RESERVE, "reserve", there, {}),
                (copying.SUBSCRIBE, "subscribe", here, {"needs": (thing,)}),
                (copying.COPY, "copy", here, {"needs": (thing,)}),
                (copying.FINISH, "finish", here, {"needs": (thing,)}),
                (copying.VERIFY, "verify", here, {"needs": (thing,)}),
            ]
            after = ["begin"]
            for routine, name, work, more in parts:
                made.append(self.before(routine, f"{name}-{node}", work, after, **more))
                after = [made[-1].name]
            self.last = [*[name for name in self.last if name != "begin"], *after]
        return made

    def swap(self) -> list[Step]:
        """The primary stays: commit the record, then remove the copies that are no longer wanted."""
        primary = self.old.primary
        commit = step(
            tables.COMMIT, "commit", self.work(primary), after=self.last, kind=StepKind.PIVOT, retry=PATIENT
        )
        made = [commit]
        for node in self.old.replicas:
            if node not in self.new.nodes:
                made += self._remove(node, ["commit"])
        return made

    def hand_over(self) -> list[Step]:
        """Another node becomes the primary."""
        made: list[Step] = []
        source, target = self.old.primary, self.new.primary
        for node in self.new.replicas:
            made.append(self.before(copying.PUBLISH, f"republish-{node}", self.work(target, node), self.last))
            made.append(
                self.before(copying.RESERVE, f"re-reserve-{node}", self.work(target, node), [made[-1].name])
            )
        ready = [each.name for each in made if each.name.startswith("re-reserve-")] or self.last
        made.append(self.before(cutover.UNGUARD, "unguard", self.work(target, source), ready))
        kept = [node for node in self.new.replicas if node != source]
        switch = self.work(source, target, more={"replicas": kept})
        made.append(
            step(cutover.PIVOT, "pivot", switch, after=["unguard"], kind=StepKind.PIVOT, retry=PATIENT)
        )
        made.append(self.forward(tables.COMMIT, "commit", self.work(target), ["pivot"]))
        made.append(self.forward(cutover.ATTACH, "attach", self.work(target, source), ["commit"]))
        routed = ["attach"]
        for node in self.record.nodes:
            if node not in (source, target):
                work = self.work(node, target)
                made.append(self.forward(cutover.REROUTE, f"reroute-{node}", work, ["commit"]))
                routed.append(f"reroute-{node}")
        for node in kept:
            made.append(self.forward(replicas.SWITCH, f"switch-{node}", self.work(node, target), ["attach"]))
        retire = self.work(source, target, more={"keep_old": True} if self.keep_old else {})
        if source in self.new.nodes:
            made.append(self.forward(replicas.DEMOTE, "demote", retire, routed))
        else:
            made.append(self.forward(cutover.RETIRE, "retire", retire, routed))
        return [*made, *self._leftovers(kept)]

    def _leftovers(self, kept: list[str]) -> list[Step]:
        """Remove the replication from the former primary: to the new primary, which needs none, to replicas
        that follow the new primary, and to replicas that are no longer wanted."""
        source, target = self.old.primary, self.new.primary
        made: list[Step] = []
        if target in self.added:
            how: dict[str, Any] = {"kind": StepKind.CLEANUP, "retry": PATIENT}
            made += [
                step(copying.UNSUBSCRIBE, "unsubscribe", self.work(target, source), **how),
                step(copying.RELEASE, "release", self.work(source, target), after=["unsubscribe"], **how),
                step(copying.UNPUBLISH, "unpublish", self.work(source, target), after=["release"], **how),
            ]
        else:
            work = self.work(target, source)
            made.append(self.forward(copying.UNSUBSCRIBE, "unsubscribe", work, ["attach"]))
            made += self._silence(target, source, ["unsubscribe"])
        for node in kept:
            made += self._silence(node, source, [f"switch-{node}"])
        for node in self.old.replicas:
            if node not in self.new.nodes:
                made += self._remove(node, ["attach"])
        return made

    def _remove(self, node: str, after: list[str]) -> list[Step]:
        """Remove a replica of the former primary."""
        dropped = self.forward(replicas.DROP, f"drop-{node}", self.work(node, self.new.primary), after)
        return [dropped, *self._silence(node, self.old.primary, [dropped.name])]

    def _silence(self, node: str, source: str, after: list[str]) -> list[Step]:
        """Drop slot and publication for a subscriber that has no subscription there any more."""
        work = self.work(source, node)
        return [
            self.forward(copying.RELEASE, f"release-{node}", work, after),
            self.forward(copying.UNPUBLISH, f"unpublish-{node}", work, [f"release-{node}"]),
        ]


def _shard(record: TableRecord, shard: int) -> Shard:
    if not 0 <= shard < len(record.shards):
        raise InvalidInput(field="shard", value=shard, expected=f"0 to {len(record.shards) - 1}")
    return record.shards[shard]


def _with_shard(record: TableRecord, shard: int, nodes: tuple[str, ...]) -> TableRecord:
    changed = [*record.shards]
    changed[shard] = next_shard(changed[shard], nodes)
    return msgspec.structs.replace(record, shards=tuple(changed))
