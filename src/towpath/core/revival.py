"""Why a job is not revived, in words. The reason names what to revive first."""

from __future__ import annotations

from towpath.core.job import State


def dead_dependency(id: str, state: State) -> str:
    return f"its dependency {id} is {state}; revive {id} first"


def dead_group(group: str, outcome: State, member: str) -> str:
    return f"group {group}, which it needs, is {outcome}; revive {member} first"


def other_outcome(group: str, outcome: State, wanted: State) -> str:
    """For a callback of a group."""
    return f"it follows the outcome {wanted} of group {group}, which is {outcome}"


def waits_in_a_circle(node: str, group: str) -> str:
    named = "group " + node[1:] if node.startswith("\0") else node
    return f"it waits for {named}, which waits for its group {group}"
