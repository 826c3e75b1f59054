"""The rule of revival: may a failed or canceled job start again, and if not, why?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from towpath.core.facts import node
from towpath.core.job import CANCELED, DONE, FAILED, Job, Reason, State
from towpath.core.results import GroupState

DEAD = frozenset({FAILED, CANCELED})


class GroupGate(msgspec.Struct, frozen=True):
    """A dependency of a job on a group: on its success, on any end, or (a callback) on the outcome
    `wanted`."""

    run_anyway: bool
    wanted: State | None = None

    def met(self, outcome: State) -> bool:
        return self.run_anyway or outcome is (self.wanted or DONE)


class RevivalReads(Protocol):
    """The reads of a ledger that the rule needs."""

    def other_holder(self, job: Job) -> str | None:
        """The id of the unfinished job that holds the job's key, if it is another job."""
        ...

    def group_state(self, group: str) -> tuple[GroupState, State | None]:
        """The state of a group, and its outcome once it is closed."""
        ...

    def dead_dependency(self, job: Job) -> tuple[str, State] | None:
        """The first dependency, by seq, that must succeed and is failed or canceled: its id and state."""
        ...

    def gates(self, job: Job) -> Iterable[tuple[str, GroupGate]]:
        """The groups that the job depends on, by name."""
        ...

    def dead_member(self, group: str) -> str | None:
        """The id of the member to revive before the group can succeed: the first failed one, else the first
        canceled one. Superseded members do not count."""
        ...

    def open_dependencies(self, job: Job) -> set[str]:
        """The ids of the unfinished jobs that the job depends on."""
        ...

    def counted_in(self, job: Job) -> set[str]:
        """The groups that count the job once it is revived: its own, and those (unless aborting) in which it
        represents a member."""
        ...

    def downstream(self, name: str) -> Iterable[str]:
        """All nodes that wait for the node `name`."""
        ...


def revive_obstacle(job: Job, reads: RevivalReads) -> str | None:
    """Why the job cannot be revived; None if it can."""
    if job.state not in DEAD:
        return f"it is {job.state}"
    if job.reason is Reason.SUPERSEDED:
        return "superseded"
    if (holder := reads.other_holder(job)) is not None:
        return f"its key is held by {holder}"
    if job.group is not None and reads.group_state(job.group)[0] is GroupState.ABORTING:
        return f"group {job.group} is aborting"
    if (dead := reads.dead_dependency(job)) is not None:
        id, state = dead
        return f"its dependency {id} is {state}; revive {id} first"
    for group, gate, outcome in shut_gates(job, reads):
        if gate.wanted is not None:
            return f"it follows the outcome {gate.wanted} of group {group}, which is {outcome}"
        if (member := reads.dead_member(group)) is not None:
            return f"group {group}, which it needs, is {outcome}; revive {member} first"
    return _cycle(job, reads)


def shut_gates(job: Job, reads: RevivalReads) -> list[tuple[str, GroupGate, State]]:
    """The groups that ended otherwise than the job needs, with their outcomes."""
    found = [(group, gate, reads.group_state(group)[1]) for group, gate in reads.gates(job)]
    return [
        (group, gate, outcome)
        for group, gate, outcome in found
        if outcome is not None and not gate.met(outcome)
    ]


def _cycle(job: Job, reads: RevivalReads) -> str | None:
    """The obstacle of a job that would wait for a node that waits for one of the job's groups."""
    gates = [group for group, _ in reads.gates(job)]
    waited = reads.open_dependencies(job)
    if not (gates or waited):
        return None
    groups = reads.counted_in(job)
    waited |= {node(group) for group in gates if group in groups or reads.group_state(group)[1] is None}
    for group in sorted(groups if waited else ()):
        if both := waited & {*reads.downstream(node(group)), node(group)}:
            first = min(both)
            named = "group " + first[1:] if first.startswith("\0") else first
            return f"it waits for {named}, which waits for its group {group}"
    return None
