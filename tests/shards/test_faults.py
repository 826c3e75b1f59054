"""A sample of the fault matrix: the same cases in every run. `make shards-matrix` runs all."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.shards.matrix import cell, is_read
from tests.support.pg_proxy import Fault
from tests.support.shard_rig import Case, Rig, rigged
from tests.support.shards import Fleet
from towpath.testing.postgres import Server

SAMPLED = (Fault.WORKER, Fault.SERVER, Fault.HANG, Fault.CANCEL, Fault.LOST)
ALWAYS = (
    (Fault.LOST, "source", "ATTACH PARTITION", "COMMIT"),
    (Fault.LOST, "target", "", "CREATE SUBSCRIPTION"),
    (Fault.SERVER, "source", "", "RENAME TO"),
    (Fault.ABORT, "target", "", "CREATE SUBSCRIPTION"),
    (Fault.ABORT, "target", "CREATE SUBSCRIPTION", "ATTACH PARTITION"),
)
"""Fault, role, a text before the statement, a text of the statement: the commit of the pivot, a subscription
whose reply is lost, a crash of the source inside the pivot, and an abort before and after the pivot."""


@pytest.fixture
def rig(disk_fleet: Fleet, shard_servers: dict[str, Server]) -> Iterator[Rig]:
    with rigged(disk_fleet, shard_servers, disk_fleet.url) as rig:
        for node in disk_fleet.urls:
            rig.start_writer(node, pause=0.05)
        yield rig


def test_a_fault_at_any_statement_ends_done_or_rolled_back(rig: Rig) -> None:
    cases = rig.recorded()
    assert len(cases) > 80
    chosen = [(find(cases, role, before, text), fault) for fault, role, before, text in ALWAYS]
    changing = [case for case in cases if not is_read(case)]
    picked = random.Random(17).sample(changing, len(SAMPLED))
    ends = []
    for case, fault in [*chosen, *zip(picked, SAMPLED, strict=True)]:
        before = rig.record()
        outcome = rig.move(case, fault)
        assert outcome.wrong == [], (case, fault, outcome)
        assert outcome.applied, (case, fault)
        ends.append(cell(outcome))
        assert (rig.record() == before) == (ends[-1] == "back"), (case, fault, outcome)
    assert ends[: len(ALWAYS)] == ["done", "done", "done", "back", "done"]
    assert {*ends} == {"done", "back"}


def find(cases: list[Case], role: str, before: str, text: str) -> Case:
    """The first statement with this text on a node after one with the text `before`."""
    of_role = [case for case in cases if case.role == role]
    first = next(number for number, case in enumerate(of_role) if before in case.text)
    return next(case for case in of_role[first:] if text in case.text)
