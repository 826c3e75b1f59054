"""The flows of the seed in its own vocabulary, run on a real ledger by real workers. The order of the
diagrams is proved from the history of the jobs, and the pitfalls of the original are tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command_nodes import ONCE, Nodes, prove_order, states, undo_jobs
from towpath import App
from towpath.errors import InvalidPlan, PlanRefused
from towpath.flows.command_queue import CommandQueue
from towpath.flows.plan import StepKind


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with contextlib.closing(App(f"sqlite:///{tmp_path / 'commands.db'}")) as app:
        yield app


@pytest.fixture
def nodes(app: App) -> Nodes:
    return Nodes(app)


# The flows


def move(queue: CommandQueue, join_waits_for_the_data: bool = True) -> dict[str, str]:
    """The RF=1 move of the seed, through a temporary cluster. In the original the JOIN waits only for the
    table on the target, so that it may come before the shard is in the cluster."""
    commands = {
        "create": ("target", "CREATE TABLE s1", "DROP TABLE IF EXISTS s1", []),
        "cluster": ("source", "CREATE CLUSTER t 't' as path", "DELETE CLUSTER t", []),
        "add": ("source", "ALTER CLUSTER t ADD s1", "ALTER CLUSTER t DROP s1", ["cluster"]),
        "join": (
            "target",
            "JOIN CLUSTER t AT 'source' 't' as path",
            "DELETE CLUSTER t",
            ["create", "add"] if join_waits_for_the_data else ["create"],
        ),
        "detach": ("source", "ALTER CLUSTER t DROP s1", "ALTER CLUSTER t ADD s1", ["join"]),
        "drop": ("source", "DROP TABLE s1", "", ["detach"]),
        "clean": ("source", "DELETE CLUSTER t", "", ["drop"]),
    }
    ids: dict[str, str] = {}
    for name, (node, command, rollback, waits) in commands.items():
        queue.set_wait_for({ids[other] for other in waits})
        ids[name] = queue.add(node, command, rollback, "move", retry=ONCE)
    return ids


@pytest.fixture
def shard(nodes: Nodes) -> Nodes:
    """A shard with rows on the source, of which one copy must exist at every moment."""
    nodes.tables["source", "s1"] = {1, 2, 3}
    nodes.least_copies["s1"] = 1
    return nodes


@pytest.mark.parametrize("order", [("source", "target"), ("target", "source")])
def test_rf1_move_with_an_intermediate_cluster(shard: Nodes, order: tuple[str, str]) -> None:
    queue = shard.queue()
    ids = move(queue)
    assert shard.finish(queue, "move", *order) == "done"
    commands = queue.group("move")
    assert states(commands) == ["done"] * 7
    assert prove_order(commands) == 6
    # The diagram: cluster, add, join, detach, drop, clean one after the other; create before the join.
    texts = [text for _, text in shard.log]
    chain = [queue.get(ids[name]).command.partition('"text":"')[2][:-2] for name in list(ids)[1:]]
    assert [text for text in texts if text in chain] == chain
    assert texts.index("CREATE TABLE s1") < texts.index("JOIN CLUSTER t AT 'source' 't' as path")
    assert shard.tables == {("target", "s1"): {1, 2, 3}}
    assert shard.clusters == {"t": ({"target"}, set())}
    assert shard.least_copies == {"s1": 1}
    kinds = {name: queue.get(id).kind for name, id in ids.items()}
    assert kinds["drop"] is StepKind.PIVOT
    assert kinds["clean"] is StepKind.FORWARD


def test_the_dependency_of_the_original_join_is_a_race(shard: Nodes) -> None:
    """The agent of the target is first: the JOIN finds no cluster. The move with the set of dependencies
    waits, as the test above shows."""
    queue = shard.queue()
    ids = move(queue, join_waits_for_the_data=False)
    assert shard.finish(queue, "move", "target", "source") == "rolled_back"
    assert queue.get(ids["join"]).state == "failed"
    assert shard.tables == {("source", "s1"): {1, 2, 3}}


def test_rf2_replication(nodes: Nodes) -> None:
    """New nodes receive shards in parallel; the replication of a shard waits for its table on the new
    node."""
    for shard in ("s1", "s2"):
        nodes.tables["old", shard] = {1, 2}
        nodes.clusters[f"c_{shard}"] = ({"old"}, {shard})
        nodes.least_copies[shard] = 1
    queue = nodes.queue()
    for new in ("new1", "new2"):
        for shard in ("s1", "s2"):
            queue.reset_wait_for()
            created = queue.add(new, f"CREATE TABLE {shard}", f"DROP TABLE IF EXISTS {shard}", "grow")
            queue.set_wait_for(created)
            queue.add(new, f"JOIN CLUSTER c_{shard} AT 'old'", f"DELETE CLUSTER c_{shard}", "grow")
    queue.submit("grow")
    nodes.work_everywhere()
    commands = queue.group("grow")
    assert states(commands) == ["done"] * 8
    assert prove_order(commands) == 4
    assert {name for name, rows in nodes.tables.items() if rows == {1, 2}} == {
        (node, shard) for node in ("old", "new1", "new2") for shard in ("s1", "s2")
    }


@pytest.mark.parametrize("order", [("n1", "n2", "n3"), ("n3", "n2", "n1")])
def test_distributed_tables_are_dropped_everywhere_before_one_is_created(
    nodes: Nodes, order: tuple[str, ...]
) -> None:
    queue = nodes.queue()
    drops = {
        queue.add(node, "DROP TABLE IF EXISTS d OPTION force=1", "", "wrap") for node in ("n1", "n2", "n3")
    }
    queue.set_wait_for(drops)
    creates = [
        queue.add(node, "CREATE TABLE d", "DROP TABLE IF EXISTS d", "wrap") for node in ("n1", "n2", "n3")
    ]
    queue.reset_wait_for()
    assert nodes.finish(queue, "wrap", *order) == "done"
    commands = {command.id: command for command in queue.group("wrap")}
    prove_order([*commands.values()])
    ended = [commands[id].finished_at for id in drops]
    began = [commands[id].started_at for id in creates]
    assert max(filter(None, ended)) <= min(filter(None, began))
    # The first DROP is the point of no return: the other commands wait for it.
    assert [str(command.kind) for command in commands.values()] == ["pivot", *["forward"] * 5]


def test_a_synchronisation_point_waits_for_all_parallel_commands(nodes: Nodes) -> None:
    """The command with the highest id is done first. In the original the join waits for it alone."""
    queue = nodes.queue()
    parallel = [queue.add(f"n{n}", f"PARALLEL {n}", f"ROLLBACK {n}", "sync") for n in (1, 2, 3)]
    final = queue.set_wait_for(parallel).add("n4", "FINAL", "FINAL ROLLBACK", "sync")
    for node in ("n3", "n2", "n4"):
        queue.process(node)
    assert states(queue.group("sync")) == ["ready", "done", "done", "blocked"]
    assert nodes.finish(queue, "sync", "n4", "n1", "n4") == "done"
    assert nodes.log[-2:] == [("n1", "PARALLEL 1"), ("n4", "FINAL")]
    assert prove_order(queue.group("sync")) == 3
    assert [command.id for command in queue.dependency_chain(final)] == [*parallel, final]


def test_cross_node_prepare_join_finalise(nodes: Nodes) -> None:
    queue = nodes.queue()
    prepare = queue.add("a", "PREPARE", "PREPARE ROLLBACK", "cross")
    join = queue.set_wait_for(prepare).add("b", "JOIN", "JOIN ROLLBACK", "cross")
    queue.set_wait_for(join).add("a", "FINALISE", "FINALISE ROLLBACK", "cross")
    assert nodes.finish(queue, "cross", "b", "a") == "done"
    assert nodes.log == [("a", "PREPARE"), ("b", "JOIN"), ("a", "FINALISE")]
    assert prove_order(queue.group("cross")) == 2


def test_sequential_commands_of_one_node(nodes: Nodes) -> None:
    queue = nodes.queue()
    for n in (1, 2, 3):
        queue.set_wait_for(queue.add("n", f"STEP {n}", f"ROLLBACK {n}", "row"))
    queue.submit("row")
    nodes.work_everywhere()
    assert nodes.log == [("n", "STEP 1"), ("n", "STEP 2"), ("n", "STEP 3")]
    assert prove_order(queue.group("row")) == 2


# The pitfalls of the original


def test_a_rollback_runs_on_the_node_of_its_command_in_reverse_order(shard: Nodes) -> None:
    """The original sends every rollback to the local node."""
    shard.refused = {"JOIN CLUSTER t AT 'source' 't' as path"}
    queue = shard.queue()
    move(queue)
    assert shard.finish(queue, "move", "source", "target") == "rolled_back"
    forward, back = shard.log[:3], shard.log[3:]
    assert [text for _, text in forward] == [
        "CREATE CLUSTER t 't' as path",
        "ALTER CLUSTER t ADD s1",
        "CREATE TABLE s1",
    ]
    # The JOIN failed and may have taken effect: it is undone, too, and first.
    assert back[0] == ("target", "DELETE CLUSTER t")
    assert sorted(back[1:]) == [
        ("source", "ALTER CLUSTER t DROP s1"),
        ("source", "DELETE CLUSTER t"),
        ("target", "DROP TABLE IF EXISTS s1"),
    ]
    undos = {job.id.split("/")[2]: job for job in undo_jobs(shard.app, "move")}
    assert {name: job.queue for name, job in undos.items()} == {
        "c1": "node/target",
        "c2": "node/source",
        "c3": "node/source",
        "c4": "node/target",
    }
    for before, behind in (("c4", "c3"), ("c4", "c1"), ("c3", "c2")):
        assert undos[before].finished_at <= undos[behind].started_at
    assert shard.tables == {("source", "s1"): {1, 2, 3}}
    assert shard.clusters == {}
    assert shard.least_copies == {"s1": 1}


def test_a_command_that_lost_its_reply_is_undone(shard: Nodes) -> None:
    """The original undoes only commands that were processed."""
    shard.lost = {"JOIN CLUSTER t AT 'source' 't' as path"}
    queue = shard.queue()
    ids = move(queue)
    assert shard.finish(queue, "move", "source", "target") == "rolled_back"
    assert queue.get(ids["join"]).state == "failed"
    assert queue.get(ids["join"]).rollback_state == "done"
    assert shard.tables == {("source", "s1"): {1, 2, 3}}
    assert shard.clusters == {}


def test_a_command_that_lost_its_reply_is_done_if_its_check_finds_the_effect(nodes: Nodes) -> None:
    nodes.lost = {"SLOW"}
    queue = nodes.queue()
    slow = queue.add("n", "SLOW", "ROLLBACK SLOW", "g", check=nodes.applied.of("SLOW"), retry=ONCE)
    queue.set_wait_for(slow).add("n", "NEXT", "ROLLBACK NEXT", "g")
    assert nodes.finish(queue, "g", "n") == "done"
    assert nodes.log == [("n", "SLOW"), ("n", "NEXT")]


def test_a_command_without_further_tries_ends_its_group(nodes: Nodes) -> None:
    """In the original it is never selected again: its group hangs without a word."""
    nodes.lost = {"B"}
    queue = nodes.queue()
    a = queue.add("n1", "A", "ROLLBACK A", "g", retry=ONCE)
    b = queue.set_wait_for(a).add("n2", "B", "ROLLBACK B", "g", retry=ONCE)
    c = queue.set_wait_for(b).add("n1", "C", "ROLLBACK C", "g", retry=ONCE)
    assert nodes.finish(queue, "g", "n1", "n2") == "rolled_back"
    assert "no reply: B" in (queue.get(b).error or "")
    assert queue.get(c).state == "canceled" or queue.get(c).state == "failed"
    assert queue.get(c).tries == 0
    assert queue.pending() == []
    assert nodes.app.plans.get("g").status().why == "c2 failed"


def test_after_the_drop_of_the_source_nothing_is_undone(shard: Nodes) -> None:
    """The original would reach the rollback of the first command: DROP TABLE of the only copy."""
    shard.refused = {"DELETE CLUSTER t"}
    queue = shard.queue()
    ids = move(queue)
    assert shard.finish(queue, "move", "source", "target") == "parked"
    assert shard.tables == {("target", "s1"): {1, 2, 3}}
    assert shard.least_copies == {"s1": 1}
    assert undo_jobs(shard.app, "move") == []
    assert shard.app.plans.get("move").status().left == ("c7",)
    with pytest.raises(PlanRefused):
        queue.rollback_group("move")
    shard.refused = set()
    shard.app.plans.get("move").retry(by="ada", why="the node is back")
    assert shard.finish(queue, "move", "source") == "done"
    assert queue.get(ids["clean"]).state == "done"


def test_a_drop_that_is_called_reversible_is_refused_at_submit(app: App, nodes: Nodes) -> None:
    """The plan of the original: an irreversible step with an empty rollback, between steps with one."""
    do, undo = nodes.task.of("DROP TABLE s1"), nodes.task.of("DROP TABLE IF EXISTS s1")
    plan = app.plans.new("move")
    create = plan.step("create", "target", nodes.task.of("CREATE TABLE s1"), undo=undo)
    plan.step("drop", "source", do, after=[create])
    with pytest.raises(InvalidPlan, match="step drop is reversible and has no undo"):
        plan.submit(id="move")
    assert app.plans.list() == []


def test_an_undo_that_would_drop_the_last_copy_is_refused_at_submit(nodes: Nodes) -> None:
    queue = nodes.queue()
    queue.add(
        "target", "CREATE TABLE s1", "DROP TABLE IF EXISTS s1", "g", undo_destroys=["the copy on target"]
    )
    queue.add("source", "HIDE TABLE s1", "SHOW TABLE s1", "g", needs=["the copy on target"])
    with pytest.raises(InvalidPlan, match="destroys the copy on target and step c2 needs it"):
        queue.submit("g")
    assert nodes.app.plans.list() == []


# The other words


def test_rollback_group(nodes: Nodes) -> None:
    queue = nodes.queue()
    a = queue.add("n1", "A", "ROLLBACK A", "g")
    queue.set_wait_for(a).add("n2", "B", "ROLLBACK B", "g")
    queue.process("n1")
    assert queue.rollback_group("g", by="ada", why="not today") is True
    assert nodes.finish(queue, "g", "n2", "n1") == "rolled_back"
    assert nodes.log == [("n1", "A"), ("n1", "ROLLBACK A")]
    assert queue.get(a).rollback_state == "done"
    entry = nodes.app.plans.get("g").audit()[-1]
    assert (entry.by, entry.why, entry.operation) == ("ada", "not today", "abort")


def test_rollback_group_after_the_pivot_completes_the_group(nodes: Nodes) -> None:
    queue = nodes.queue()
    queue.set_wait_for(queue.add("n1", "DROP TABLE a", "", "g")).add("n2", "B", "", "g")
    queue.process("n1")
    assert queue.rollback_group("g") is False
    assert nodes.finish(queue, "g", "n2") == "done"
    assert nodes.log == [("n1", "DROP TABLE a"), ("n2", "B")]


def test_the_monitoring_of_the_seed(nodes: Nodes) -> None:
    nodes.lost = {"D"}
    queue = nodes.queue()
    for node, text in (("n1", "A"), ("n1", "B"), ("n2", "C")):
        queue.add(node, text, f"ROLLBACK {text}", "one")
    queue.add("n2", "D", "ROLLBACK D", "two", retry=ONCE)
    assert queue.pending_count() == 4
    assert queue.pending_count("n1") == 2
    assert queue.average_execution_time() is None
    assert queue.failure_rate() is None
    queue.process("n1")
    assert [command.command for command in queue.pending()] == [
        'execute {"text":"C"}',
        'execute {"text":"D"}',
    ]
    queue.process("n2")
    assert queue.pending() == []
    assert queue.failure_rate() == 0.25
    assert queue.failure_rate("n1") == 0.0
    assert queue.failure_rate("n2") == 0.5
    average = queue.average_execution_time()
    assert average is not None
    assert 0 <= average < 60
    assert [command.id for command in queue.commands_for_node("n2")] == ["one/c3", "two/c1"]
    assert queue.get("two/c1").tries == 1


def test_another_process_sees_the_same_commands(nodes: Nodes, tmp_path: Path) -> None:
    first = nodes.queue()
    id = first.set_wait_for(first.add("n1", "A", "ROLLBACK A", "g")).add("n2", "B", "ROLLBACK B", "g")
    first.submit("g")
    with contextlib.closing(App(f"sqlite:///{tmp_path / 'commands.db'}")) as other:
        second = CommandQueue(other.plans)
        assert second.get(id) == first.get(id)
        assert [command.id for command in second.dependency_chain(id)] == ["g/c1", "g/c2"]


def test_the_same_submit_twice_is_one_submit(nodes: Nodes) -> None:
    for _ in range(2):
        queue = nodes.queue()
        queue.add("n1", "A", "ROLLBACK A", "g")
        queue.process("n1")
    assert nodes.log == [("n1", "A")]
    other = nodes.queue()
    other.add("n1", "ANOTHER", "ROLLBACK", "g")
    with pytest.raises(PlanRefused, match="another plan has this id"):
        other.submit("g")
