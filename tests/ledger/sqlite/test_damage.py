"""A file that was overwritten: the ledger raises `Damaged`, whatever SQLite or a decoder does with the
bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from towpath.core.commands import (
    Append,
    Cancel,
    Claim,
    Note,
    Purge,
    Renew,
    Revive,
    Selector,
    Settle,
    Upkeep,
    Want,
)
from towpath.core.job import Done
from towpath.core.views import Query
from towpath.errors import Damaged, NotALedger, UnknownJob
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing import START, ManualClock
from towpath.testing.suite.harness import LEASE, Harness, spec, unique


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a ledger with something in every table."""
    path = tmp_path_factory.mktemp("sound") / "a.db"
    with closing(SqliteLedger(path, SqliteOptions(), ManualClock())) as ledger:
        harness = Harness(ledger)
        harness.open("g", then={"done": (spec("then"),)})
        harness.append(
            *(
                spec(f"job-{n}", payload=bytes(300), headers={"h": "v"}, part="p", group="g")
                for n in range(100)
            )
        )
        harness.seal("g")
        harness.append(
            *(spec(f"after-{n}", "other", after=(f"job-{n}",), key=unique(f"{n}")) for n in range(50))
        )
        for claim in harness.claim(n=30, token="t"):
            harness.done(claim, notes=[Note(key=claim.id, value=b"v")])
        harness.claim(n=30)
        harness.cancel("after-40", "after-41")
        harness.purge("after-41")
    return path.read_bytes()


def damage(data: bytes, seed: int) -> bytes:
    dice, hurt = random.Random(seed), bytearray(data)
    for _ in range(dice.choice((1, 5, 40))):
        start = dice.randrange(100 if seed % 3 else 0, len(data))
        bad = dice.randbytes(dice.choice((1, 8, 200)))
        hurt[start : start + len(bad)] = bad
    return bytes(hurt[: len(data)])


def calls(ledger: SqliteLedger) -> list[Callable[[], object]]:
    held = [(f"job-{n}", 1) for n in range(60)]
    batches = (
        [Append((spec("more", after=("job-5", "after-7"), key=unique("3")),))],
        [
            Claim(owner="me", wants=(Want("*", 200),), lease=LEASE),
            Claim(owner="me", wants=(Want("q"),), lease=LEASE, token="t"),
        ],
        [
            Renew(tuple(held), LEASE),
            *(Settle(id, fence, Done(), spawn=(spec(f"{id}-child"),)) for id, fence in held),
        ],
        [
            Cancel(where=Selector(queue="other")),
            Revive(where=Selector(queue="*")),
            Purge(where=Selector(queue="*")),
        ],
        [Note(key="k", value=b"v"), Upkeep()],
    )
    return [
        ledger.queues,
        ledger.integrity,
        ledger.dump,
        lambda: ledger.find(Query(limit=1000)),
        lambda: ledger.find(Query(header=("h", "v"))),
        lambda: ledger.explain("job-99"),
        lambda: ledger.note("job-1"),
        lambda: ledger.group("g"),
        lambda: ledger.parts("q"),
        *(lambda batch=batch: ledger.apply(batch, START) for batch in batches),
    ]


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_file_is_called_so(tmp_path: Path, sound: bytes, seed: int) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(damage(sound, seed))
    with suppress(Damaged, NotALedger), closing(SqliteLedger(path, SqliteOptions(), ManualClock())) as ledger:
        for call in calls(ledger):
            with suppress(Damaged, NotALedger, UnknownJob):
                call()


def test_most_of_the_damage_above_is_noticed(tmp_path: Path, sound: bytes) -> None:
    """The intact ledger passes, so that the test above proves something."""
    noticed = 0
    for seed in range(0, 60, 3):
        path = tmp_path / f"{seed}.db"
        path.write_bytes(damage(sound, seed))
        try:
            with closing(SqliteLedger(path, SqliteOptions(), ManualClock())) as ledger:
                noticed += ledger.integrity() != []
        except (Damaged, NotALedger):
            noticed += 1
    assert noticed > 10


def test_a_sound_file_is_not(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(sound)
    with closing(SqliteLedger(path, SqliteOptions(), ManualClock())) as ledger:
        for call in calls(ledger):
            call()
        assert ledger.integrity() == []
