"""Routines: the functions behind the steps of shard plans. A routine has an action, a check and an undo, all
idempotent; the modules that define routines register them with `routine`, and `install` makes tasks of them.

A step stores only the name of the routine and its `Work`: names of nodes, numbers, ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import psycopg

from towpath import App, Fail
from towpath.apps.shards.catalogue import Catalogue, TableBusy, TableRecord, UnknownTable
from towpath.apps.shards.nodes import Nodes
from towpath.errors import InvalidInput, TowpathError

PREFIX = "shards."
"""Of the names of tasks."""


class Work(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The arguments of a step. `node` runs the step, `peer` is the other node of a move or a replica. `more`
    is for what one routine needs besides, in JSON."""

    table: str
    plan: str
    node: str
    shard: int = 0
    peer: str = ""
    generation: int = 0
    more: Mapping[str, Any] = {}


class Cluster(msgspec.Struct, frozen=True):
    """The nodes and the catalogue, as routines use them. `limit`: seconds of an ordinary statement of a
    move."""

    nodes: Nodes
    catalogue: Catalogue
    limit: float = 30.0

    def record(self, work: Work) -> TableRecord:
        return self.catalogue.get(work.table)


Action = Callable[[Cluster, Work], Any]
Check = Callable[[Cluster, Work], bool | str | None]
"""True: applied; False: not applied; None: unknown; or the text of an `Answer`."""


class Routine(msgspec.Struct, frozen=True):
    """The functions of one kind of step. Without `check` the action is repeated after a lost reply; without
    `undo` the step is not reversible."""

    name: str
    action: Action
    check: Check | None = None
    undo: Action | None = None


ROUTINES: dict[str, Routine] = {}
"""All routines by name; filled when their modules are imported."""


def routine(name: str, action: Action, *, check: Check | None = None, undo: Action | None = None) -> Routine:
    """Register a routine."""
    if name in ROUTINES:
        raise InvalidInput(field="name", value=name, expected="a name that no other routine has")
    made = ROUTINES[name] = Routine(name, action, check, undo)
    return made


def install(app: App, cluster: Cluster) -> None:
    """Make the routines tasks of an app, so that its workers can run the steps of shard plans."""
    for each in ROUTINES.values():
        parts = {"": each.action, ".check": each.check, ".undo": each.undo}
        for suffix, function in parts.items():
            if function is not None:
                _add(app, f"{PREFIX}{each.name}{suffix}", cluster, function if suffix else final(function))


def _add(app: App, name: str, cluster: Cluster, function: Action) -> None:
    @app.task(name=name)
    def run(work: Work) -> Any:
        return function(cluster, work)


FINAL = {
    "0A000": "feature_not_supported",
    "2BP01": "dependent_objects_still_exist",
    "42501": "insufficient_privilege",
    "42601": "syntax_error",
    "P0001": "raise_exception",
}
"""Errors of PostgreSQL that another attempt does not cure."""


class Unchangeable(TowpathError):
    """Another attempt at the step would find the same: the plan is rolled back at once."""


def final(action: Action) -> Action:
    """The action; an error that no retry can cure ends the step at once."""

    def run(cluster: Cluster, work: Work) -> Any:
        try:
            return action(cluster, work)
        except (Unchangeable, InvalidInput, TableBusy, UnknownTable) as error:
            raise Fail(str(error)) from error
        except psycopg.Error as error:
            if error.sqlstate in FINAL:
                raise Fail(error.diag.message_primary or str(error)) from error
            raise

    return run
