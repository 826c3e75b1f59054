"""An open transaction of the user blocks no other process; a commit function blocks only batches that need
its job.

It stays open until the others have finished: a process that waited for it would wait for ever, on any
machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest

from towpath.core.commands import Append, Cancel, Selector, SetQueue, Settle, Settled, Upkeep
from towpath.core.job import Done, State
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.testing.suite.harness import Harness, replace, spec, unique, whole_group

HOLD = float(os.environ.get("TOWPATH_HOLD_SECONDS", "2"))
"""How long the transaction is held open at least. (`make soak-postgres` holds it for ten.)"""
PATIENCE = 30
"""Seconds after which a wait counts as endless."""


@pytest.fixture
def others(postgres_url: str, ledger: PostgresLedger) -> Iterator[list[Harness]]:
    """Two more ledgers, which are separate processes for the server. They use the time of the server."""
    ledgers = [PostgresLedger(postgres_url) for _ in range(2)]
    yield [Now(each) for each in ledgers]
    for each in ledgers:
        each.close()


class Now(Harness):
    """A harness with the time of the server."""

    def ask(self, *commands: Any) -> Any:
        return self.ledger.apply(commands)


def everything(harness: Harness, turn: str) -> None:
    """Commands of every kind, in one queue."""
    harness.append(spec(f"plain{turn}"), spec(f"part{turn}", part="p"))
    harness.append(spec(f"key{turn}", key=unique(f"u{turn}")))
    harness.append(spec(f"new{turn}", key=replace("r")))
    harness.open(f"g{turn}")
    harness.append(
        spec(f"member{turn}", group=f"g{turn}"), spec(f"then{turn}", after=(whole_group(f"g{turn}"),))
    )
    harness.append(spec(f"after{turn}", after=(f"plain{turn}",)))
    harness.seal(f"g{turn}")
    harness.write(f"note{turn}")
    for claim in harness.claim(n=50):
        harness.done(claim)
    harness.upkeep()
    harness.cancel(f"then{turn}")
    harness.purge(f"plain{turn}")


def turns(began: float) -> Iterator[int]:
    """At least two, and more until the transaction was held open long enough."""
    turn = 0
    while turn < 2 or time.monotonic() - began < HOLD:
        turn += 1
        yield turn


def at_once(*work: Callable[[], object]) -> None:
    """Run the functions concurrently; raise the first error."""
    errors: list[BaseException] = []

    def guarded(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread still waits"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel)[1:])
@pytest.mark.parametrize("kept", [True, False])
def test_an_open_transaction_blocks_no_other_process(
    ledger: PostgresLedger,
    others: list[Harness],
    postgres_url: str,
    level: psycopg.IsolationLevel,
    kept: bool,
) -> None:
    everything(others[0], "-before")
    began = time.monotonic()
    with closing(psycopg.connect(postgres_url)) as mine:
        mine.isolation_level = level
        mine.execute("CREATE TABLE mine AS SELECT 1 AS a")
        others[0].open("open")
        ledger.append_on(mine, [spec("m1"), spec("m2", part="p")])
        ledger.append_on(
            mine, [spec("m3", key=unique("mine")), spec("m4", after=("m1",)), spec("m5", group="open")]
        )
        ledger.append_on(mine, [spec("m6", key=replace("r"))])
        for turn in turns(began):
            # The same keys and group as well.
            same = Append((spec(f"same{turn}", key=unique("mine"), group="open"),))
            at_once(
                partial(everything, others[0], f"-a{turn}"),
                partial(everything, others[1], f"-b{turn}"),
                partial(others[0].ask, same),
                partial(ledger.append_on, mine, [spec(f"more{turn}")]),
            )
            assert ledger.check() == []
        (mine.commit if kept else mine.rollback)()
    ledger.apply([Upkeep()])
    assert ledger.check() == []
    assert [ledger.get(f"m{n}") is not None for n in (1, 2, 4, 5, 6)] == [kept] * 5
    assert ledger.get("more1") is not None if kept else ledger.get("more1") is None
    assert ledger.get("m3") is None, "another job held the key by then"


@pytest.fixture
def function() -> Iterator[Any]:
    """A commit function that blocks until it is released."""

    class Function:
        def __init__(self) -> None:
            self.began, self.go, self.calls = threading.Event(), threading.Event(), 0

        def __call__(self, connection: psycopg.Connection[Any]) -> None:
            self.calls += 1
            connection.execute("SELECT 1")
            self.began.set()
            assert self.go.wait(60)

    made = Function()
    yield made
    made.go.set()


def held_open(
    ledger: PostgresLedger, function: Any, id: str, **fields: Any
) -> tuple[threading.Thread, list[Any]]:
    """A settle with a commit function that blocks."""
    held = Now(ledger).started(id, **fields)
    answers: list[Any] = []
    command = Settle(held.id, held.fence, Done(), within=function)
    thread = threading.Thread(target=lambda: answers.extend(ledger.apply([command])))
    thread.start()
    assert function.began.wait(60)
    return thread, answers


def test_an_append_that_waits_for_a_job_being_settled_keeps_others_from_nothing(
    ledger: PostgresLedger, others: list[Harness], function: Any
) -> None:
    settling, answers = held_open(ledger, function, "slow")
    waiting = threading.Thread(target=lambda: others[0].append(spec("dependent", after=("slow",))))
    waiting.start()
    began = time.monotonic()
    for turn in turns(began):
        at_once(partial(everything, others[1], f"-{turn}"))
    assert waiting.is_alive()
    assert ledger.get("dependent") is None
    function.go.set()
    settling.join(60)
    waiting.join(60)
    assert answers == [Settled("slow", State.DONE)]
    assert function.calls == 1
    assert others[1].at("slow", "dependent") == "done ready"


@pytest.mark.parametrize(
    "command",
    [
        Cancel(where=Selector(ids=("slow",))),
        Append((spec("newer", key=replace("k")),)),
    ],
)
def test_a_command_that_waits_for_the_job_blocks_no_other_process(
    ledger: PostgresLedger, others: list[Harness], function: Any, command: Any
) -> None:
    settling, answers = held_open(ledger, function, "slow", key=replace("k"))
    waiting = threading.Thread(target=lambda: others[0].ask(command))
    waiting.start()
    for turn in "12":
        at_once(partial(everything, others[1], f"-{turn}"))
    function.go.set()
    settling.join(60)
    waiting.join(60)
    assert not waiting.is_alive()
    assert answers == [Settled("slow", State.DONE)]
    assert function.calls == 1


def test_a_function_is_not_called_again_because_others_have_the_relations(
    ledger: PostgresLedger, others: list[Harness], function: Any, postgres_url: str
) -> None:
    """The relations are locked after the function, with a wait."""
    harness = Now(ledger)
    harness.add("slow")
    (held,) = harness.claim()
    harness.append(spec("dependent", after=("slow",)))
    command = Settle(held.id, held.fence, Done(), (spec("child", key=unique("k")),), within=function)
    answers: list[Any] = []
    settling = threading.Thread(target=lambda: answers.extend(ledger.apply([command])))
    settling.start()
    assert function.began.wait(60)
    with closing(psycopg.connect(postgres_url)) as holder:
        holder.execute("SELECT pg_advisory_xact_lock('towpath.meta'::regclass::oid::bigint)")
        function.go.set()
        settling.join(0.5)
        assert settling.is_alive()
        holder.rollback()
    settling.join(60)
    assert answers == [Settled("slow", State.DONE)]
    assert function.calls == 1
    assert harness.at("slow", "dependent", "child") == "done ready ready"


def test_a_setting_survives_the_deletion_of_its_unused_queue(
    postgres_url: str, ledger: PostgresLedger
) -> None:
    """Another process deletes the row between the two statements that make and lock it."""
    ledger.apply([SetQueue(queue="brief")])
    with psycopg.connect(postgres_url) as other:
        other.execute("DELETE FROM towpath.queue WHERE name = 'brief'")
        setting = threading.Thread(target=ledger.apply, args=([SetQueue(queue="brief", cap=3)],))
        setting.start()
        setting.join(0.5)
        assert setting.is_alive()
        other.commit()
    setting.join(PATIENCE)
    assert not setting.is_alive()
    queue = ledger.queue("brief")
    assert queue is not None
    assert queue.cap == 3
