"""The operations of `towpath shards`: each looks at the servers first, then returns the plans that do it. A
plan is submitted and run by `running.run`, or submitted for agents.

    shards = Shards(app, Nodes({"n1": "host=db1 dbname=shop", "n2": "host=db2 dbname=shop"}))
    work = shards.create(NewTable("orders", "id bigint, total numeric", ("id",), shards=8))
    run(app, work)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from towpath import App, new_id
from towpath.apps.shards import fencing, moves, names, replicas
from towpath.apps.shards.audit import audit
from towpath.apps.shards.catalogue import (
    Catalogue,
    Shard,
    TableBusy,
    TableRecord,
    UnknownTable,
    check_counts,
)
from towpath.apps.shards.columns import described
from towpath.apps.shards.inventory import NodeFacts, facts_of
from towpath.apps.shards.nodes import Nodes
from towpath.apps.shards.placement import Placement, Planned, balanced, initial
from towpath.apps.shards.plans import create_plan, drop_plan, routes_done
from towpath.apps.shards.preflight import NotReady, preflight, preflight_create, unreachable
from towpath.apps.shards.routines import Cluster, install
from towpath.apps.shards.status import CopyStatus, NodeStatus, node_status, status
from towpath.clock import Clock, SystemClock
from towpath.errors import InvalidInput
from towpath.flows.plan import Plan


class Submission(msgspec.Struct, frozen=True):
    """A plan and the id under which it must be submitted: the names of its objects contain the id."""

    id: str
    plan: Plan


class NewTable(msgspec.Struct, frozen=True):
    """A table to create. `columns` is the text between the parentheses of CREATE TABLE. Without `nodes`, all
    nodes have the table."""

    table: str
    columns: str
    key: tuple[str, ...]
    shards: int = 8
    rf: int = 1
    nodes: tuple[str, ...] = ()
    schema: str = "public"


class Shards:
    """The sharded tables of an app on some nodes. Its tasks are installed in the app, so that a worker of the
    app runs the steps."""

    def __init__(self, app: App, nodes: Nodes, clock: Clock | None = None) -> None:
        self.app, self.nodes = app, nodes
        self.catalogue = Catalogue(app.ledger, clock or SystemClock())
        self.cluster = Cluster(nodes, self.catalogue)
        install(app, self.cluster)

    # What is there

    def status(self, table: str | None = None) -> list[CopyStatus]:
        """Every copy of every shard, of one table or of all."""
        return status(self.nodes, self._records(table))

    def node_status(self) -> list[NodeStatus]:
        """Every node, with the reasons why it cannot hold shards."""
        return node_status(self.nodes)

    def check(self) -> list[str]:
        """The differences between the nodes and the catalogue."""
        return audit(self.nodes, self.catalogue.all())

    # Plans

    def create(self, new: NewTable) -> list[Submission]:
        """Create a table. Raises `InvalidInput`, `TableBusy` or `NotReady`, before anything is changed."""
        names.check_table(new.table)
        on = tuple(sorted(new.nodes or self.nodes))
        check_counts(new.shards, new.rf, on)
        self._check_nodes(on)
        if self.catalogue.find(new.table) is not None:
            raise TableBusy(table=new.table, why="a table of this name exists already")
        _ready(preflight(self.nodes, on))
        with self.nodes.connect(on[0]) as connection:
            columns, constraints = described(connection, new.columns, new.key)
        id = _id("create", new.table)
        record = TableRecord(
            table=new.table,
            schema=new.schema,
            columns=columns,
            key=new.key,
            constraints=constraints,
            rf=new.rf,
            nodes=on,
            shards=tuple(Shard(nodes=each) for each in initial(on, new.shards, new.rf)),
            plan=id,
        )
        _ready(preflight_create(self.nodes, record))
        extra = replicas.initial_steps(record, id, routes_done(record))
        return [Submission(id, create_plan(record, extra))]

    def drop(self, table: str) -> list[Submission]:
        """Drop a table on all of its nodes, which must all be reachable."""
        record = self._idle(table)
        _ready(unreachable(self.nodes, record.nodes))
        id = _id("drop", table)
        return [Submission(id, drop_plan(record, id))]

    def move(self, table: str, shard: int, target: str, source: str | None = None) -> list[Submission]:
        """Move one copy of a shard, the primary unless `source` names the node of another."""
        record = self._idle(table)
        if not 0 <= shard < len(record.shards):
            raise InvalidInput(field="shard", value=shard, expected=f"0 to {len(record.shards) - 1}")
        placed = record.shards[shard]
        self._check_nodes([target])
        if target not in record.nodes:
            raise InvalidInput(
                field="target", value=target, expected=f"a node of the table: {', '.join(record.nodes)}"
            )
        _ready(preflight(self.nodes, {*placed.nodes, target}))
        id = _id("move", table)
        return [Submission(id, moves.move_plan(record, shard, source or placed.primary, target, id))]

    def add_node(self, node: str, tables: Sequence[str] = ()) -> list[Submission]:
        """Give a node its part of the shards, of these tables or of all."""
        self._check_nodes([node])
        found = []
        for record in self._some(tables):
            if node in record.nodes:
                continue
            nodes = [*record.nodes, node]
            _ready(preflight(self.nodes, nodes))
            wanted = balanced(record.placement(), nodes, record.rf).placement
            found += _changes(record, wanted, "add-node", add=(node,))
        return found

    def remove_node(self, node: str, tables: Sequence[str] = ()) -> list[Submission]:
        """Move all copies away from a node that can be reached, and drop the tables there."""
        found = []
        for record in self._some(tables):
            if node not in record.nodes:
                continue
            left = [each for each in record.nodes if each != node]
            if len(left) < record.rf:
                expected = (
                    f"at least {record.rf} other nodes for table {record.table}: each copy is on another"
                )
                raise InvalidInput(field="node", value=node, expected=expected)
            _ready(preflight(self.nodes, record.nodes))
            wanted = balanced(record.placement(), left, record.rf, [node]).placement
            found += _changes(record, wanted, "remove-node", remove=(node,))
        return found

    def rebalance(self, tables: Sequence[str] = ()) -> list[Submission]:
        """Make the numbers of copies on the nodes differ by at most one, and add missing copies."""
        found = []
        for record in self._some(tables):
            wanted = balanced(record.placement(), record.nodes, record.rf)
            changed = _changes(record, wanted.placement, "rebalance")
            if changed:
                _ready(preflight(self.nodes, record.nodes))
            found += changed
        return found

    def promote(self, lost: str, tables: Sequence[str] = ()) -> list[Submission]:
        """Replace a lost node: its replicas become primaries. Raises `NotReady` if a shard has no other
        copy. `rebalance` adds the missing copies afterwards."""
        found, reasons = [], []
        if lost in self.nodes and isinstance(facts_of(self.nodes, [lost])[lost], NodeFacts):
            reasons.append(f"node {lost} answers: use remove-node, or stop its server first")
        for record in self._some(tables):
            if lost not in record.nodes:
                continue
            left = [node for node in record.nodes if node != lost]
            planned: Planned = balanced(record.placement(), left, record.rf)
            reasons += [f"table {record.table}: shard {number} has no other copy" for number in planned.lost]
            if not reasons:
                _ready(preflight(self.nodes, left))
                chosen = replicas.furthest(replicas.positions(self.cluster, record, lost))
                id = _id("promote", record.table)
                found.append(Submission(id, replicas.promote_plan(record, lost, chosen, id)))
        _ready(reasons)
        return found

    def fence(self, node: str, tables: Sequence[str] = ()) -> dict[str, list[int]]:
        """Make the tables of a node that was replaced unusable, and keep their rows. Returns the shards of
        each table that are there."""
        self._check_nodes([node])
        return {each: fencing.fence(self.cluster, each, node) for each in self._without(node, tables)}

    def discard(self, node: str, tables: Sequence[str] = ()) -> list[str]:
        """Drop the tables of a node that was replaced; `add_node` can then add it again."""
        self._check_nodes([node])
        found = self._without(node, tables)
        for each in found:
            fencing.discard(self.cluster, each, node)
        return found

    def _without(self, node: str, tables: Sequence[str]) -> list[str]:
        """The tables, of these or of all, that a node is not part of."""
        found = [self.catalogue.get(each) for each in tables] or list(self.catalogue.all())
        return [record.table for record in found if tables or node not in record.nodes]

    def _records(self, table: str | None) -> list[TableRecord]:
        return list(self.catalogue.all()) if table is None else [self.catalogue.get(table)]

    def _some(self, tables: Sequence[str]) -> list[TableRecord]:
        """These tables or all, none of which a plan changes now."""
        chosen = tables or [record.table for record in self.catalogue.all()]
        return [self._idle(table) for table in chosen]

    def _idle(self, table: str) -> TableRecord:
        found = self.catalogue.find(table)
        if found is None:
            raise UnknownTable(table=table)
        record = found[0]
        if record.pending is not None:
            why = f"plan {record.pending.plan} ({record.pending.operation}) has not ended"
            raise TableBusy(table=table, why=why)
        if record.state != "ready":
            raise TableBusy(table=table, why=f"its state is {record.state}")
        return record

    def _check_nodes(self, wanted: Iterable[str]) -> None:
        for node in wanted:
            if node not in self.nodes:
                known = ", ".join(self.nodes) or "none"
                raise InvalidInput(field="node", value=node, expected=f"a node of the settings: {known}")


def _changes(
    record: TableRecord,
    wanted: Placement,
    operation: str,
    add: tuple[str, ...] = (),
    remove: tuple[str, ...] = (),
) -> list[Submission]:
    id = _id(operation, record.table)
    made = moves.change_plans(record, wanted, id, operation, add, remove)
    return [Submission(each, plan) for each, plan in zip(moves.plan_ids(id, made), made, strict=True)]


def _ready(reasons: Sequence[str]) -> None:
    if reasons:
        raise NotReady(reasons=reasons)


def _id(operation: str, table: str) -> str:
    return f"{operation}-{table}-{new_id()[-8:]}"
