"""Simulated database nodes that execute the commands of the seed: tables with rows, replication clusters, and
a log of what ran where. A command may fail before its effect, or take effect and lose its reply."""

from __future__ import annotations

import re
from typing import Any

from towpath import App, Fail, current
from towpath.flows.command_queue import CommandQueue, QueuedCommand
from towpath.flows.plan import StepRetry

ONCE = StepRetry(attempts=1)


class Nodes:
    """The nodes of one test. `refused` commands fail for good without an effect, `lost` ones take effect and
    fail, each until it is removed from its set."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.log: list[tuple[str, str]] = []
        self.tables: dict[tuple[str, str], set[int]] = {}
        self.clusters: dict[str, tuple[set[str], set[str]]] = {}
        """Name -> its nodes and its tables."""
        self.refused: set[str] = set()
        self.lost: set[str] = set()
        self.least_copies: dict[str, int] = {}
        """Table -> the smallest number of nodes with its rows after any command."""

        @app.task(name="execute")
        async def execute(text: str) -> str:
            return self.execute(self.node, text)

        @app.task(name="applied")
        async def applied(text: str) -> bool:
            return (self.node, text) in self.log

        self.task, self.applied = execute, applied

    @property
    def node(self) -> str:
        return current().record.queue.removeprefix("node/")

    def queue(self, name: str = "commands") -> CommandQueue:
        return CommandQueue(self.app.plans, name, action=self.task.of, work=self.work)

    def work(self, queue: str) -> None:
        self.app.run(queues=(queue,), burst=True)

    def work_everywhere(self) -> None:
        self.app.run(queues=("node/*",), concurrency=8, burst=True)

    def finish(self, queue: CommandQueue, group: str, *names: str) -> str:
        """Let the agents of the nodes work in turn, in this order, until the group has ended; return its
        state."""
        for _ in range(20):
            for name in names:
                queue.process(name)
            status = self.app.plans.get(group).status()
            if status.is_final:
                return str(status.state)
        raise AssertionError(f"group {group} has not ended: {queue.group(group)}")

    def execute(self, node: str, text: str) -> str:
        if text in self.refused:
            raise Fail(f"refused: {text}")
        self.log.append((node, text))
        self.apply(node, text)
        for table in self.least_copies:
            self.least_copies[table] = min(self.least_copies[table], self.copies(table))
        if text in self.lost:
            raise TimeoutError(f"no reply: {text}")
        return text

    def copies(self, table: str) -> int:
        return sum(bool(rows) for (_, name), rows in self.tables.items() if name == table)

    def apply(self, node: str, text: str) -> None:
        if found := re.fullmatch(r"CREATE TABLE (\w+)", text):
            self.tables.setdefault((node, found[1]), set())
        elif found := re.fullmatch(r"DROP TABLE (?:IF EXISTS )?(\w+)(?: OPTION force=1)?", text):
            self.tables.pop((node, found[1]), None)
        elif found := re.fullmatch(r"CREATE CLUSTER (\w+).*", text):
            self.clusters[found[1]] = ({node}, set())
        elif found := re.fullmatch(r"DELETE CLUSTER (\w+)", text):
            members = self.clusters.get(found[1], (set[str](), set[str]()))[0]
            members.discard(node)
            if not members:
                self.clusters.pop(found[1], None)
        elif found := re.fullmatch(r"ALTER CLUSTER (\w+) (ADD|DROP) (\w+)", text):
            nodes, tables = self.clusters[found[1]]
            (tables.add if found[2] == "ADD" else tables.discard)(found[3])
            self.replicate(nodes, tables)
        elif found := re.fullmatch(r"JOIN CLUSTER (\w+) .*", text):
            nodes, tables = self.clusters[found[1]]
            nodes.add(node)
            self.replicate(nodes, tables)

    def replicate(self, nodes: set[str], tables: set[str]) -> None:
        for table in tables:
            rows = set[int]().union(*(self.tables.get((node, table), set()) for node in nodes))
            for node in nodes:
                if (node, table) in self.tables:
                    self.tables[node, table] = set(rows)


def states(commands: list[QueuedCommand]) -> list[str]:
    return [command.state for command in commands]


def prove_order(commands: list[QueuedCommand]) -> int:
    """Check from the history that each command began after the end of all commands that it waits for; return
    the number of pairs."""
    by_id = {command.id: command for command in commands}
    pairs = [(by_id[id], command) for command in commands for id in command.wait_for]
    for before, behind in pairs:
        if behind.started_at is not None:
            assert before.finished_at is not None
            assert before.finished_at <= behind.started_at, (before, behind)
    return len(pairs)


def undo_jobs(app: App, group: str) -> list[Any]:
    """The jobs of the rollbacks of a group: (node, started, finished) by command."""
    found = []
    for step in app.plans.get(group).steps():
        job = app.ledger.get(f"plan/{group}/{step.name}/undo")
        if job is not None:
            found.append(job)
    return found
