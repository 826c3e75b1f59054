"""No statement depends on the plan that the server chooses for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from towpath.core.commands import Note, Upkeep, Upkept
from towpath.ledger import Ledger
from towpath.ledger.postgres.ledger import PostgresLedger
from towpath.testing.histories import factory, play
from towpath.testing.postgres import Server, empty

# Without these the server joins by nested loops and runs an inner subquery again for each outer row. A
# `DELETE ... IN (SELECT ... LIMIT n FOR UPDATE SKIP LOCKED)` then finds n further rows in each run.
AVOIDED = ("hashjoin", "mergejoin", "hashagg", "material", "memoize", "sort")


@pytest.fixture(scope="module")
def nested_loops(postgres: Server) -> Iterator[str]:
    url = postgres.create_database()
    with psycopg.connect(url, autocommit=True) as db:
        for kind in AVOIDED:
            db.execute(f'ALTER DATABASE "{url.rpartition("/")[2]}" SET enable_{kind} = off')
    PostgresLedger(url).close()
    yield url
    postgres.drop_database(url)


@pytest.mark.parametrize("seed", [204, 300, 301, 302])
def test_histories_are_the_same_with_nested_loops_only(seed: int, nested_loops: str, tmp_path: Path) -> None:
    def ledger() -> Ledger:
        empty(nested_loops)
        return PostgresLedger(nested_loops)

    play(seed, 80, factory("model", tmp_path), ledger)


def test_a_sweep_deletes_no_more_rows_than_its_limit(nested_loops: str) -> None:
    empty(nested_loops)
    ledger = PostgresLedger(nested_loops)
    now = ledger.last() + 10**9
    ledger.apply([Note(key=f"n{i}", value=b"x", ttl=1) for i in range(20)], now)
    swept = [ledger.apply([Upkeep(3)], now + 100)[0] for _ in range(7)]
    assert all(isinstance(answer, Upkept) for answer in swept)
    assert [answer.swept for answer in swept if isinstance(answer, Upkept)] == [3] * 6 + [2]
    ledger.close()
