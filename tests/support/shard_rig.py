"""Moves of a shard under faults: three servers behind proxies, a worker process, writers on all nodes, and a
monitor that counts the copies of the shard all the time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.support import shard_worker
from tests.support.pg_proxy import Fault, PgProxy, Rule
from tests.support.shards import Fleet
from tests.support.waiting import WAIT
from towpath import App
from towpath.apps.shards import moves
from towpath.apps.shards.catalogue import TableRecord
from towpath.flows.kinds import PlanState
from towpath.flows.plan import Plan
from towpath.flows.status import StepStatus
from towpath.operations.plans import PlanHandle
from towpath.testing.postgres import Server

ROLES = ("source", "target", "other")
_ONCE = (
    "srsubstate",
    "pg_wal_lsn_diff",
    "pg_stat_progress_copy",
    "confirmed_flush_lsn >=",
    "SELECT set_config(",
)
"""Statements of loops that wait, and settings of a session: only the first of each is a case."""


@dataclass(frozen=True)
class Case:
    """The occurrence `nth` of a statement on the node with this role."""

    role: str
    text: str
    nth: int


@dataclass
class Outcome:
    """How a case ended: the states that the plan went through to its end, and what is wrong."""

    states: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    applied: bool = True


class Writer:
    """Inserts rows through one node all the time. `acked` are the rows that the server confirmed, `errors`
    all other answers; `longest` is the longest time that one insert took."""

    def __init__(self, url: str, first: int, step: int, pause: float = 0.02) -> None:
        self._url, self._next, self._step, self._pause = url, first, step, pause
        self.acked: list[int] = []
        self.longest = 0.0
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._url, autocommit=True) as connection:
                    self._insert(connection)
            except psycopg.Error as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            self._stop.wait(0.1)

    def _insert(self, connection: psycopg.Connection[Any]) -> None:
        while not self._stop.wait(self._pause):
            number, self._next = self._next, self._next + self._step
            begun = time.monotonic()
            connection.execute("INSERT INTO public.items (id, name) VALUES (%s, 'w')", [number])
            self.acked.append(number)
            self.longest = max(self.longest, time.monotonic() - begun)


class Monitor:
    """Reads all nodes again and again: when all answer, one of them must have the first rows of the shard in
    a real table. `without` counts the times when none had."""

    def __init__(self, fleet: Fleet, shard: int, rows: int) -> None:
        self._fleet, self._table, self._rows = fleet, f"items_s{shard}", rows
        primary = fleet.catalogue.get("items").shards[shard].primary
        self._count = self._counted(primary, self._table)
        self.samples, self.without = 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT)

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            with contextlib.suppress(psycopg.OperationalError):
                # The shard may move from a node that is read later to one that was read already.
                found = any(map(self._complete, [*self._fleet.urls, *reversed(self._fleet.urls)]))
                self.samples += 1
                self.without += not found

    def _complete(self, node: str) -> bool:
        found = self._fleet.query(
            node,
            "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace('towpath_shards')"
            " AND relkind = 'r' AND relname ~ %s",
            [f"^{self._table}(_g[0-9]+_old)?$"],
        )
        return any(self._counted(node, name) == self._count for (name,) in found)

    def _counted(self, node: str, name: str) -> int | None:
        try:
            counted: int = self._fleet.query(
                node, f"SELECT count(*) FROM ONLY towpath_shards.{name} WHERE id <= %s", [self._rows]
            )[0][0]
        except (psycopg.errors.UndefinedTable, psycopg.errors.WrongObjectType):
            return None
        return counted


class Rig:
    """One fleet with proxies, a worker and an app. `move` runs one move with a fault."""

    def __init__(self, fleet: Fleet, servers: dict[str, Server], url: str) -> None:
        self.fleet, self.servers, self.url = fleet, servers, url
        self.proxies = {node: PgProxy(server.port) for node, server in servers.items()}
        self.app: App = shard_worker.make_app(url, fleet.nodes)
        self.worker: subprocess.Popen[bytes] | None = None
        self.writers: dict[str, Writer] = {}
        self.monitor: Monitor | None = None
        self._first = 1_000_000
        self._moves = 0

    def start_worker(self) -> None:
        proxied = {
            node: address.replace(f":{self.servers[node].port}/", f":{self.proxies[node].port}/")
            for node, address in self.fleet.urls.items()
        }
        given = {"url": self.url, "direct": self.fleet.urls, "proxied": proxied}
        self.worker = subprocess.Popen(
            [sys.executable, "-m", "tests.support.shard_worker", json.dumps(given)]
        )

    def start_writer(self, node: str, pause: float = 0.02) -> None:
        """Rows of all writers of a rig have different ids."""
        self._first += 1
        self.writers[node] = Writer(self.fleet.urls[node], self._first, 1000, pause)

    def missing(self, node: str = "n1") -> list[str]:
        """Confirmed rows that are not there exactly once, as this node sees the table."""
        acked = {number for writer in self.writers.values() for number in [*writer.acked]}
        rows = [row[0] for row in self.fleet.query(node, "SELECT id FROM public.items")]
        lost, double = acked.difference(rows), len(rows) - len({*rows})
        return (
            [f"{len(lost)} confirmed rows are lost, {double} rows are there twice"] if lost or double else []
        )

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
        if self.monitor is not None:
            self.monitor.close()
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()
        for proxy in self.proxies.values():
            proxy.close()
        self.app.close()

    def record(self) -> TableRecord:
        return self.fleet.catalogue.get("items")

    def roles(self, shard: int = 0) -> dict[str, str]:
        """Role -> node of the next move of the shard."""
        source = self.record().shards[shard].primary
        others = [node for node in self.fleet.urls if node != source]
        return dict(zip(ROLES, [source, *others], strict=True))

    def move(self, case: Case | None, fault: Fault, *, seconds: float = 90.0) -> Outcome:
        """Move shard 0 to the next node; apply the fault to the statement of the case."""
        roles = self.roles()
        self._moves += 1
        id = f"move-{self._moves}"
        for proxy in self.proxies.values():
            proxy.statements.clear()
            proxy.rule = None
        outcome, begun = Outcome(), time.monotonic()
        plan = moves.move_plan(self.record(), 0, roles["source"], roles["target"], id)
        rule = None
        if case is not None:
            normal = normaliser(roles)
            node = roles[case.role]
            hook = self._hook(fault, node, id)
            rule = Rule(fault, case.nth, hook, lambda text: normal(text) == case.text)
            self.proxies[node].rule = rule
        handle = self.app.plans.submit(plan, id=id)
        outcome.states = self.ended(handle, seconds)
        outcome.seconds = time.monotonic() - begun
        outcome.applied = rule is None or rule.applied.is_set()
        for proxy in self.proxies.values():
            proxy.rule = None
        if outcome.states[-1:] not in (["done"], ["rolled_back"]):
            outcome.wrong.append(f"{handle.status()} {[s for s in handle.steps() if s.error]}")
        outcome.wrong += [*self.fleet.audit(), *self.missing()]
        if self.monitor is not None and self.monitor.without:
            outcome.wrong.append(f"no copy of the shard in {self.monitor.without} samples")
            self.monitor.without = 0
        return outcome

    def ended(self, handle: PlanHandle, seconds: float = 90.0) -> list[str]:
        """The states in which the plan came to rest; a parked plan is retried."""
        states: list[str] = []
        for _ in range(3):
            try:
                status = handle.wait(timeout=seconds)
            except TimeoutError:
                return [*states, f"not ended within {seconds:g} s"]
            states.append(str(status.state))
            if status.state not in (PlanState.PARKED, PlanState.ROLLBACK_FAILED):
                break
            handle.retry(by="test", why="the fault is over")
        return states

    def run(self, plans: Iterable[Plan], id: str) -> list[StepStatus]:
        """Run plans one after the other; return the steps of all."""
        steps: list[StepStatus] = []
        for number, plan in enumerate(plans):
            handle = self.app.plans.submit(plan, id=f"{id}-{number}")
            assert self.ended(handle) == ["done"], handle.status()
            steps += handle.steps()
        return steps

    def _hook(self, fault: Fault, node: str, id: str) -> Callable[[], None]:
        def kill_worker() -> None:
            assert self.worker is not None
            os.kill(self.worker.pid, signal.SIGKILL)
            self.worker.wait()
            self.start_worker()

        def kill_server() -> None:
            self.servers[node].kill()
            self.servers[node].up()

        def abort() -> None:
            self.app.plans.get(id).abort(by="test", why="fault")

        hooks = {Fault.WORKER: kill_worker, Fault.SERVER: kill_server, Fault.ABORT: abort}
        return hooks.get(fault, lambda: None)

    def statements(self) -> list[Case]:
        """The statements of the last move, which had no fault: each once, in the order of each node."""
        roles = {node: role for role, node in self._last_roles.items()}
        normal = normaliser(self._last_roles)
        found: list[Case] = []
        for node, proxy in self.proxies.items():
            seen: dict[str, int] = {}
            for text in proxy.statements:
                known = normal(text)
                nth = seen.get(known, 0)
                seen[known] = nth + 1
                if nth == 0 or not any(part in known for part in _ONCE):
                    found.append(Case(roles[node], known, nth))
        return found

    def recorded(self) -> list[Case]:
        """Run a move without a fault, and return its statements."""
        self._last_roles = self.roles()
        outcome = self.move(None, Fault.NONE)
        assert outcome.states == ["done"], outcome
        assert outcome.wrong == [], outcome
        return self.statements()


def normaliser(roles: dict[str, str]) -> Callable[[str], str]:
    """The text of a statement without names of nodes, generations, object ids and plan ids."""
    nodes = {node: role for role, node in roles.items()}

    def normal(text: str) -> str:
        text = " ".join(text.split())
        for node, role in nodes.items():
            text = re.sub(rf"(?<![a-z0-9]){node}(?![a-z0-9])", f"<{role}>", text)
            text = re.sub(rf"_{node}(?![a-z0-9])", f"_<{role}>", text)
        text = re.sub(r"_g\d+_", "_g#_", text)
        text = re.sub(r"move-\d+", "move-#", text)
        text = re.sub(r"df -Pk [^']*", "df -Pk ...", text)
        text = re.sub(r"CONNECTION '[^']*'", "CONNECTION '...'", text)
        return re.sub(r"'\d+'::oid", "'#'::oid", text)

    return normal


@contextlib.contextmanager
def rigged(fleet: Fleet, servers: dict[str, Server], url: str, rows: int = 200) -> Iterator[Rig]:
    """A rig with a table of four shards and these rows."""
    rig = Rig(fleet, servers, url)
    try:
        fleet.create()
        fleet.query(
            "n1",
            "INSERT INTO public.items (id, name) SELECT g, 'first' FROM generate_series(1, %s) g",
            [rows],
        )
        rig.monitor = Monitor(fleet, 0, rows)
        rig.start_worker()
        yield rig
    finally:
        rig.close()
