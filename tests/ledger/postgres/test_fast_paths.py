"""Each fast path writes what the model writes, column by column, and is counted: taken, refused or failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from towpath.core.commands import Append, Appended
from towpath.core.job import Spec
from towpath.ledger import Ledger
from towpath.ledger.postgres import fast_paths
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.ledger.postgres.statements import queries
from towpath.testing.histories import factory, play
from towpath.testing.postgres import empty

PATHS = {"append", "worker", "note", "upkeep", "empty_claim"}


class Played:
    """The fast paths that all histories of a test took."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ledgers: list[PostgresLedger] = []

    def ledger(self) -> Ledger:
        empty(self._url)
        self._ledgers.append(PostgresLedger(self._url))
        return self._ledgers[-1]

    @property
    def taken(self) -> Counter[str]:
        return sum([ledger.fast_paths.taken for ledger in self._ledgers], Counter())

    @property
    def failed(self) -> Counter[str]:
        return sum([ledger.fast_paths.failed for ledger in self._ledgers], Counter())


@pytest.mark.parametrize("by_copy", [False, True], ids=["by insert", "by copy"])
def test_histories_take_every_fast_path(
    by_copy: bool, module_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `by copy` every plain append is a COPY, which otherwise needs more specs than a history has."""
    if by_copy:
        monkeypatch.setattr(fast_paths, "MOST_BY_INSERT", 0)
    played = Played(module_url)
    for seed in range(206, 212):
        play(seed, 80, factory("model", tmp_path), played.ledger)
    assert set(played.taken) == PATHS
    assert played.failed == {}


def test_the_statement_that_inserts_is_the_same_with_and_without_a_given_time(
    module_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Histories pass the time; users do not. The compared statements must be the same."""
    empty(module_url)
    ledger = PostgresLedger(module_url)
    sent: list[tuple[bytes | None, ...]] = []
    statement = ledger._db.raw_append
    assert statement is not None
    send = statement.rows

    def recorded(args: Sequence[bytes | None]) -> list[tuple[int, ...]]:
        sent.append(tuple(args))
        return send(args)

    monkeypatch.setattr(statement, "rows", recorded)
    ledger.apply([Append((Spec(id="a", queue="q"),))])
    ledger.apply([Append((Spec(id="b", queue="q"),))], now=ledger.last() + 10**9)
    assert [args[1] is None for args in sent] == [True, False]
    jobs = {job.id: job for job in ledger.dump()["jobs"]}
    assert jobs["a"].created_at == jobs["a"].ready_at > 0
    assert jobs["b"].created_at == jobs["b"].ready_at == ledger.last()
    ledger.close()


def test_a_refusal_by_rule_is_counted(module_url: str) -> None:
    empty(module_url)
    ledger = PostgresLedger(module_url)
    for _ in range(2):
        ledger.apply([Append((Spec(id="a", queue="q"),))])
    ledger.apply([Append((Spec(id="b", queue="q", part="p"),))])
    assert ledger.fast_paths.taken == {"append": 1}
    assert ledger.fast_paths.refused == {("append", "known_id_or_capacity"): 1, ("append", "not_plain"): 1}
    assert ledger.fast_paths.failed == {}
    ledger.close()


@pytest.mark.parametrize("defect", ["statement", "program"])
def test_a_defect_is_logged_once_and_counted(
    defect: str, module_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty(module_url)
    if defect == "statement":
        first, text = queries()["append_plain"]
        monkeypatch.setitem(queries(), "append_plain", (first, text.replace("FROM t, v", "FROM t, v, none")))
    else:
        monkeypatch.setattr(fast_paths, "_fields", lambda spec: ())
    ledger = PostgresLedger(module_url)
    for id in ("a", "b"):
        (answer,) = ledger.apply([Append((Spec(id=id, queue="q"),))])
        assert isinstance(answer, Appended)
    assert ledger.fast_paths.failed == {"append": 2}
    assert ledger.fast_paths.taken == {}
    assert caplog.text.count("fast path append failed") == 1
    assert ledger.queues()["q"].counts.ready == 2
    assert ledger.check() == []
    ledger.close()
