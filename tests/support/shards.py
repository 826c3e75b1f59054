"""Three real servers with sharded tables, and a direct executor of plans: each step is run by calling its
routine, without a ledger of jobs, so that a test can stop between any two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import psycopg

from towpath import Ledger
from towpath.apps.shards.audit import audit
from towpath.apps.shards.catalogue import Catalogue, Shard, TableRecord
from towpath.apps.shards.columns import described
from towpath.apps.shards.nodes import Nodes
from towpath.apps.shards.placement import initial
from towpath.apps.shards.plans import create_plan
from towpath.apps.shards.routines import PREFIX, ROUTINES, Cluster, Work
from towpath.clock import SystemClock
from towpath.flows.actions import TaskCall
from towpath.flows.plan import Plan, Step
from towpath.flows.rollback import undo_order

SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
    "max_worker_processes": "40",
    "max_logical_replication_workers": "30",
    "shared_buffers": "16MB",
    "wal_receiver_status_interval": "1",
    "wal_retrieve_retry_interval": "100ms",
}
COLUMNS = "id bigint, name text NOT NULL DEFAULT 'x', at timestamptz"


class Fleet:
    """The nodes of one test: a database on each server. `urls`: node -> address."""

    def __init__(self, urls: dict[str, str], ledger: Ledger, url: str = "memory://") -> None:
        self.urls, self.ledger, self.url = urls, ledger, url
        self.nodes = Nodes(urls)
        self.catalogue = Catalogue(ledger, SystemClock())
        self.cluster = Cluster(self.nodes, self.catalogue)

    def record(
        self,
        table: str = "items",
        shards: int = 4,
        rf: int = 1,
        columns: str = COLUMNS,
        key: tuple[str, ...] = ("id",),
        nodes: Iterable[str] | None = None,
    ) -> TableRecord:
        """The record of a new table on these nodes."""
        on = tuple(sorted(nodes or self.urls))
        with self.nodes.connect(on[0]) as connection:
            found, constraints = described(connection, columns, key)
        return TableRecord(
            table=table,
            columns=found,
            key=key,
            constraints=constraints,
            rf=rf,
            nodes=on,
            shards=tuple(Shard(nodes=each) for each in initial(on, shards, rf)),
            plan=f"create-{table}-1",
        )

    def create(self, table: str = "items", **how: Any) -> TableRecord:
        """Create a table with one copy of each shard."""
        self.run(create_plan(self.record(table, **how)))
        return self.catalogue.get(table)

    def run(self, plan: Plan, until: Callable[[Step], bool] = lambda step: False) -> list[Step]:
        """Run the steps in order and return those that ran; stop before the first for which `until` is
        true."""
        plan.check(set(self.urls))
        done: list[Step] = []
        for step in plan.resolved():
            if until(step):
                break
            self.act(step)
            done.append(step)
        return done

    def act(self, step: Step) -> Any:
        assert isinstance(step.action, TaskCall)
        return self.call(step.action)

    def answer(self, step: Step) -> Any:
        """The answer of the step's check."""
        assert isinstance(step.check, TaskCall)
        return self.call(step.check)

    def roll_back(self, steps: Iterable[Step]) -> None:
        """Run the undos of these steps in the order of a rollback."""
        ran = list(steps)
        by_name = {step.name: step for step in ran}
        for each in undo_order(ran, set(by_name)):
            undo = by_name[each.step].undo
            if isinstance(undo, TaskCall):
                self.call(undo)

    def call(self, action: TaskCall) -> Any:
        name, _, part = action.task.removeprefix(PREFIX).partition(".")
        routine = ROUTINES[name]
        function = {"": routine.action, "check": routine.check, "undo": routine.undo}[part]
        assert function is not None
        work = msgspec.convert(msgspec.json.decode(action.args)["work"], Work)
        return function(self.cluster, work)

    def query(self, node: str, statement: str, parameters: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement on a node; return its rows."""
        with psycopg.connect(self.urls[node], autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), tuple(parameters))
            return cursor.fetchall() if cursor.description else []

    def clear(self) -> None:
        """Drop all subscriptions and slots, with which no database can be dropped."""
        for node in self.nodes:
            for (name,) in self.query(
                node,
                "SELECT subname FROM pg_subscription s JOIN pg_database d ON d.oid = s.subdbid"
                " WHERE datname = current_database()",
            ):
                for change in ("DISABLE", "SET (slot_name = NONE)"):
                    self.query(node, f'ALTER SUBSCRIPTION "{name}" {change}')
                self.query(node, f'DROP SUBSCRIPTION "{name}"')
        for node in self.nodes:
            mine = "FROM pg_replication_slots WHERE database = current_database()"
            self.query(node, f"SELECT pg_terminate_backend(active_pid, 5000) {mine} AND active")
            self.query(node, f"SELECT pg_drop_replication_slot(slot_name) {mine}")

    def audit(self) -> list[str]:
        return audit(self.nodes, self.catalogue.all())
