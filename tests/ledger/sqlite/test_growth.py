"""Four times the work takes about four times the steps: no batch is quadratic, no queue pattern is worse than
its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from towpath.core.checks import MAX_NAME, matches
from towpath.core.commands import Append, Cancel, Claim, Claimed, Command, Note, Open, Selector, Settle, Want
from towpath.core.job import After, Done, FailOutcome, Key, KeyPolicy, Release, RetryOutcome, Spec, State
from towpath.core.job import ClaimedJob as Held
from towpath.core.views import Query
from towpath.errors import Refused
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.ledger.sqlite.statements import _queries, find

N = 100
GROWTH = 7.0
"""Linear is 4, quadratic 16."""


class Meter:
    """Counts the instructions of SQLite's virtual machine for a batch (in hundreds), and the statements."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self.ledger = ledger
        self.steps = self.statements = 0
        ledger._db.set_progress_handler(self._step, 100)
        ledger._db.exec_trace = self._statement

    def _step(self) -> bool:
        self.steps += 1
        return False

    def _statement(self, *_: object) -> bool:
        self.statements += 1
        return True

    def cost(self, commands: Sequence[Command]) -> tuple[int, int]:
        self.steps = self.statements = 0
        answers = self.ledger.apply(commands)
        assert not any(isinstance(answer, Refused) for answer in answers), answers
        return self.steps, self.statements


def held(ledger: SqliteLedger, specs: Sequence[Spec]) -> list[Held]:
    answers = ledger.apply(
        [Append(tuple(specs)), Claim(owner="me", wants=(Want("q", len(specs)),), lease=10**9)]
    )
    assert isinstance(answers[1], Claimed)
    assert len(answers[1].claims) == len(specs)
    return list(answers[1].claims)


def plain(ledger: SqliteLedger, n: int) -> list[Command]:
    return [
        Settle(claim.id, claim.fence, Done(b"r"))
        for claim in held(ledger, [Spec(id=f"{i}", queue="q") for i in range(n)])
    ]


def retried(ledger: SqliteLedger, n: int) -> list[Command]:
    specs = [Spec(id=f"{i}", queue="q") for i in range(n)]
    outcomes = (RetryOutcome(5, "no"), Release(), FailOutcome(error="no"))
    return [Settle(claim.id, claim.fence, outcomes[i % 3]) for i, claim in enumerate(held(ledger, specs))]


def failed_with_dependents(ledger: SqliteLedger, n: int) -> list[Command]:
    """Each has a consequence, which ends the group of settles that are written together."""
    claims = held(ledger, [Spec(id=f"{i}", queue="q") for i in range(n)])
    ledger.apply([Append(tuple([Spec(id=f"{i}-b", queue="b", after=(After(f"{i}"),)) for i in range(n)]))])
    return [Settle(claim.id, claim.fence, FailOutcome(error="no")) for claim in claims]


def with_children(ledger: SqliteLedger, n: int) -> list[Command]:
    claims = held(ledger, [Spec(id=f"{i}", queue="q") for i in range(n)])
    return [
        Settle(c.id, c.fence, Done(), spawn=(Spec(id=f"{c.id}-b", queue="b"),))
        if i % 2
        else Settle(c.id, c.fence, Done())
        for i, c in enumerate(claims)
    ]


def keyed(policy: KeyPolicy, keys: int) -> Callable[[SqliteLedger, int], list[Command]]:
    def make(ledger: SqliteLedger, n: int) -> list[Command]:
        return [Append((Spec(id=f"{i}", queue="q", key=Key(f"k{i % keys}", policy)),)) for i in range(n)]

    return make


def keyed_at_once(policy: KeyPolicy) -> Callable[[SqliteLedger, int], list[Command]]:
    def make(ledger: SqliteLedger, n: int) -> list[Command]:
        return [Append(tuple([Spec(id=f"{i}", queue="q", key=Key(f"k{i}", policy)) for i in range(n)]))]

    return make


def into_one_group(ledger: SqliteLedger, n: int) -> list[Command]:
    ledger.apply([Open(group="g")])
    return [Append((Spec(id=f"{i}", queue="q", group="g"),)) for i in range(n)]


def noted(ledger: SqliteLedger, n: int) -> list[Command]:
    return [Note(key=f"{i}", value=b"v") for i in range(n)]


CASES: dict[str, Callable[[SqliteLedger, int], list[Command]]] = {
    "settles": plain,
    "settles that go back": retried,
    "failures with dependents": failed_with_dependents,
    "settles with children": with_children,
    "notes": noted,
    "members of a group": into_one_group,
    **{f"{policy} keys": keyed(policy, 10**6) for policy in KeyPolicy},
    **{f"one {policy} key": keyed(policy, 1) for policy in KeyPolicy},
    **{f"{policy} keys in one append": keyed_at_once(policy) for policy in KeyPolicy},
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_a_batch_is_linear(tmp_path: Path, make: Callable[[SqliteLedger, int], list[Command]]) -> None:
    costs = []
    for n in (N, 4 * N):
        with closing(SqliteLedger(tmp_path / f"{n}.db", SqliteOptions(synchronous="normal"))) as ledger:
            commands = make(ledger, n)
            costs.append(Meter(ledger).cost(commands))
            assert ledger.check() == []
    (steps, statements), (more_steps, more_statements) = costs
    assert more_steps <= GROWTH * steps, costs
    assert more_statements <= GROWTH * statements, costs


def test_a_batch_of_settles_and_a_claim_has_few_statements(tmp_path: Path) -> None:
    """Beside a busy Python thread each of them can cost a switch interval."""
    with closing(SqliteLedger(tmp_path / "a.db", SqliteOptions(synchronous="normal"))) as ledger:
        commands = plain(ledger, N)
        ledger.apply([Append(tuple([Spec(id=f"next-{n}", queue="q", payload=b"p") for n in range(N)]))])
        claim = Claim(owner="me", wants=(Want("q", N),), lease=10**9)
        _, statements = Meter(ledger).cost([*commands, claim])
    # BEGIN, facts, settled jobs and their results in rows of 32, the claim in two, queue, meta, COMMIT
    assert statements <= 8 + N // 32 + 1


def test_statements_stay_prepared_whatever_the_size_of_a_batch(tmp_path: Path) -> None:
    with closing(SqliteLedger(tmp_path / "a.db", SqliteOptions(synchronous="normal"))) as ledger:

        def prepared(turn: int) -> int:
            before = ledger._db.cache_stats()["misses"]
            for size in range(2, N):
                ledger.apply(
                    [Append((Spec(id=f"{turn}-{size}-{i}", queue="q", payload=b"p"),)) for i in range(size)]
                )
            return int(ledger._db.cache_stats()["misses"]) - before

        assert prepared(1) <= 40
        assert prepared(2) == 0


def test_a_lookup_reads_a_range_of_an_index(tmp_path: Path) -> None:
    with closing(SqliteLedger(tmp_path / "a.db")) as ledger:
        plans = {
            name: [row[3] for row in ledger._db.execute(f"EXPLAIN QUERY PLAN {_queries()[name]}", arguments)]
            for name, arguments in (("read_by_prefix", ("0199aa", "0199ab", 10)), ("read_by_seq", (7,)))
        }
    assert "SEARCH towpath_job USING INDEX sqlite_autoindex_towpath_job_1 (id>? AND id<?)" in str(plans)
    assert "SEARCH j USING INTEGER PRIMARY KEY (rowid=?)" in str(plans)
    assert "SCAN towpath_job" not in str(plans)


def test_the_jobs_of_a_parent_are_a_range_of_an_index(tmp_path: Path) -> None:
    queries = [
        Query(parent="p", generation=1, states=states, oldest_first=oldest_first)
        for states in ((), (State.FAILED,), (State.READY, State.RUNNING))
        for oldest_first in (True, False)
    ]
    with closing(SqliteLedger(tmp_path / "a.db")) as ledger:
        statements: list[str] = []
        ledger._db.exec_trace = lambda _, sql, __: statements.append(sql) or True  # type: ignore[func-returns-value]
        for query in queries:
            find(ledger._db, query, 10)
        ledger._db.exec_trace = None
        assert len(statements) == len(queries)
        for sql in statements:
            plan = str([row[3] for row in ledger._db.execute(f"EXPLAIN QUERY PLAN {sql}", ("p", 1, 10))])
            assert "SEARCH j USING INDEX towpath_job_parent (parent=?)" in plan
            assert "ORDER BY" not in plan


STARS = "*a" * (MAX_NAME // 2 - 1) + "*b"
"""The longest pattern of stars: a matcher with backtracking would take exponential time."""
NAME = "a" * MAX_NAME


def test_many_stars_are_matched_in_no_time(tmp_path: Path) -> None:
    """An exponential matcher would never end; the limit of the test suite ends it."""
    assert not matches(STARS, NAME)
    assert matches(STARS, NAME[:-1] + "b")
    with closing(SqliteLedger(tmp_path / "a.db")) as ledger:
        ledger.apply([Append((Spec(id="a", queue=NAME), Spec(id="b", queue=NAME[:-1] + "b")))])
        assert [job.id for job in ledger.find(Query(queue=STARS)).jobs] == ["b"]
        claimed = ledger.apply([Claim(owner="me", wants=(Want(STARS, 5),), lease=10**9)])[0]
        assert isinstance(claimed, Claimed)
        assert [claim.id for claim in claimed.claims] == ["b"]
        ledger.apply([Cancel(where=Selector(queue=STARS))])
        job = ledger.get("a")
        assert job is not None
        assert job.finished_at is None
