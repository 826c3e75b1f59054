"""Writers on all nodes while shards move, and while nodes are removed and added."""

from __future__ import annotations

from pathlib import Path

from tests.support.shard_rig import Rig, rigged
from tests.support.shards import Fleet
from towpath.apps.shards.moves import change_plans
from towpath.apps.shards.placement import balanced
from towpath.flows.plan import Plan
from towpath.testing.postgres import Server


def test_every_confirmed_row_is_there_once_after_all_changes(
    disk_fleet: Fleet, shard_servers: dict[str, Server], tmp_path: Path
) -> None:
    with rigged(disk_fleet, shard_servers, disk_fleet.url) as rig:
        for node in disk_fleet.urls:
            rig.start_writer(node, pause=0.005)
        pauses = [_rotate(rig)]
        rig.writers["n3"].close()
        assert rig.writers.pop("n3").errors == []
        before = rig.record()
        wanted = balanced(before.placement(), ("n1", "n2"), 1, draining=("n3",)).placement
        pauses.append(_change(rig, change_plans(before, wanted, "out", "remove-node", (), ["n3"]), "out"))
        assert rig.record().nodes == ("n1", "n2")
        record = rig.record()
        wanted = balanced(record.placement(), ("n1", "n2", "n3"), 1).placement
        pauses.append(_change(rig, change_plans(record, wanted, "in", "add-node", ["n3"]), "in"))
        rig.start_writer("n3", pause=0.005)
        pauses.append(_rotate(rig, "again"))
        for writer in rig.writers.values():
            writer.close()
            assert writer.errors == []
            assert len(writer.acked) > 50
            assert writer.longest < 2
        for node in disk_fleet.urls:
            assert rig.missing(node) == []
        assert rig.fleet.audit() == []
        assert max(pauses) < 2
        assert rig.monitor is not None
        assert rig.monitor.without == 0
        assert rig.monitor.samples > 10


def _rotate(rig: Rig, id: str = "rotate") -> float:
    """Move the first two shards to the next node."""
    record = rig.record()
    nodes = [*record.nodes]
    wanted = [*record.placement()]
    for shard in range(2):
        wanted[shard] = (nodes[(nodes.index(wanted[shard][0]) + 1) % len(nodes)],)
    return _change(rig, change_plans(record, wanted, id, "rebalance"), id)


def _change(rig: Rig, plans: tuple[Plan, ...], id: str) -> float:
    """Run the plans; return the longest pause of writers that a pivot has measured."""
    steps = rig.run(plans, id)
    pauses: list[float] = [step.result["pause"] for step in steps if step.name == "pivot"]
    return max(pauses)
