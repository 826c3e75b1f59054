"""plan: real processes that submit and run plans, agents that are killed, Ctrl-C, gates, parked plans."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.processes import WatchedProcess, command
from tests.support.reference import leaves
from tests.support.shell import Shell
from tests.support.waiting import until
from towpath.testing.postgres import Server

PLANS = """
from towpath import Plan, Shell, Step, StepKind
from towpath.core.retry import Fixed
from towpath.flows.plan import StepRetry

ONCE = StepRetry(attempts=1)
QUICK = StepRetry(attempts=5, backoff=Fixed(0.05))


def sh(text):
    return Shell(("sh", "-c", text))


def log(name):
    return sh(f"echo {name} >> log")


def wait(name):
    "Writes its name, then waits for the file go-<name>."
    return sh(f"echo {name} >> log; until test -e go-{name}; do sleep 0.02; done")


def reversible(name, *after, action=None, **more):
    return Step(name, "here", action or log(name), undo=log("undo-" + name), after=after, **more)


three = Plan("three", (
    reversible("one"),
    reversible("two", "one"),
    Step("switch", "there", log("switch"), after=("two",), kind="pivot"),
    Step("tidy", "here", log("tidy"), kind="cleanup"),
))
broken = Plan("broken", (
    reversible("one"),
    reversible("two", "one", action=sh("echo bad disk >&2; exit 3"), retry=ONCE),
))
slow = Plan("slow", (
    reversible("one"),
    reversible("two", "one", action=wait("two")),
    Step("switch", "here", log("switch"), after=("two",), kind="pivot"),
    Step("after", "here", wait("after"), after=("switch",), kind="forward"),
    Step("last", "here", log("last"), after=("after",), kind="forward"),
))
gated = Plan("gated", (
    reversible("one"),
    Step("ok", kind="gate", after=("one",)),
    reversible("two", "ok"),
))
stuck = Plan("stuck", (
    Step("switch", "here", log("switch"), kind="pivot"),
    Step("fix", "here", sh("test -e fixed && echo fix >> log"), after=("switch",), kind="forward",
         retry=ONCE),
    Step("last", "here", log("last"), after=("fix",), kind="forward"),
))
wrong = Plan("wrong", (
    Step("a", "here", log("a"), after=("b",)),
    Step("b", "here", log("b"), after=("a",)),
))
checked = Plan("checked", (
    Step("count", "here", sh("echo count >> log; until test -e go-count; do sleep 0.02; done"),
         undo=log("undo"), check=sh("test -e log"), retry=QUICK),
    reversible("next", "count"),
))


def made(count, name="made"):
    return Plan(name, tuple(reversible(f"s{n}") for n in range(count)))
"""


@pytest.fixture
def plans(shell: Shell) -> Shell:
    """A directory with `plans.py`."""
    (shell.folder / "plans.py").write_text(PLANS)
    return shell


def logged(shell: Shell) -> list[str]:
    place = shell.folder / "log"
    return place.read_text().split() if place.exists() else []


def agent(shell: Shell, *more: str) -> Any:
    return command(shell, "plan", "agent", "--all-nodes", "--lease", "5s", *more)


def started(watched: WatchedProcess) -> None:
    watched.until("Agent ")


def go(shell: Shell, name: str) -> None:
    (shell.folder / f"go-{name}").touch()


@pytest.fixture
def stop_waiting(plans: Shell) -> Iterator[None]:
    """At the end no command of a killed agent waits for its file."""
    yield
    for name in ("two", "after", "count"):
        go(plans, name)


def test_check_prints_the_plan_or_all_reasons(plans: Shell) -> None:
    ran = plans("plan", "check", "plans.py:three")
    assert "switch on there (pivot) after two" in ran.out
    data = plans("plan", "check", "plans.py:three", "--json").json
    (plans.folder / "three.json").write_text(json.dumps(data["plan"]))
    assert plans("plan", "check", "three.json", "--json").json["hash"] == data["hash"]
    refused = plans("plan", "check", "plans.py:wrong", code=2)
    assert "the steps a -> b -> a wait for each other" in refused.err
    assert "step a is reversible and has no undo" in refused.err
    assert not (plans.folder / "towpath.db").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("plans.py",), "has 7 plans"),
        (("plans.py:nothing",), "has no nothing"),
        (("plans.py:sh", "--arg", "text=x"), "is a Shell, not a plan"),
        (("plans.py:made",), "made() failed"),
        (("plans.py:three", "--arg", "a=1"), "takes no --arg"),
        (("missing.py:three",), "cannot be read"),
        (("no_such_module:three",), "There is no module"),
        (("empty.json",), "a plan as JSON"),
    ],
)
def test_files_without_a_plan(plans: Shell, arguments: tuple[str, ...], why: str) -> None:
    (plans.folder / "empty.json").write_text("{}")
    ran = plans("plan", "check", *arguments, code=2)
    assert why in ran.err
    assert "Traceback" not in ran.err


def test_a_function_gets_its_arguments(plans: Shell) -> None:
    checked = plans("plan", "check", "plans.py:made", "--arg", "count=3", "--arg", "name=x", "--json").json
    assert (checked["name"], checked["steps"]) == ("x", 3)
    assert plans("plan", "check", "plans:made", "--arg", "count=2", "--json").json["steps"] == 2


def test_run_here_does_everything_in_one_process(plans: Shell) -> None:
    ran = plans.run("plan", "run", "plans.py:three", "--here", "--id", "p1")
    assert logged(plans) == ["one", "two", "switch", "tidy"]
    assert "state      done" in ran.out
    assert "p1: done" in ran.err
    again = plans.run("plan", "run", "plans.py:three", "--here", "--id", "p1", "--json").json
    assert (again["state"], again["code"], again["steps"]["done"]) == ("done", 0, 3)
    assert len(logged(plans)) == 4
    other = plans.run("plan", "run", "plans.py:broken", "--here", "--id", "p1", code=1)
    assert "another plan has this id" in other.err


def test_a_failed_plan_is_rolled_back_with_exit_code_1(plans: Shell) -> None:
    ran = plans.run("plan", "run", "plans.py:broken", "--here", "--id", "p1", code=1)
    assert logged(plans) == ["one", "undo-two", "undo-one"] or logged(plans) == ["one", "undo-one"]
    assert "rolled_back" in ran.out
    assert "two on here" in ran.out
    assert "bad disk" in ran.out
    assert "Traceback" not in ran.err
    assert plans("plan", "status", "p1", "--json", code=1).json["state"] == "rolled_back"


def test_an_agent_runs_submitted_plans(plans: Shell) -> None:
    ran = plans("plan", "submit", "plans.py:three", "--id", "p1", "--by", "ada")
    assert ran.out == "p1\n"
    assert "No agent is running for here, there" in ran.err
    assert plans("plan", "status", "p1", "--json").json["state"] == "running"
    with agent(plans) as running:
        started(running)
        assert plans.run("plan", "watch", "p1", "--json").json["state"] == "done"
        assert running.end() == 0
    assert logged(plans) == ["one", "two", "switch", "tidy"]
    assert plans("plan", "list", "--json").json["plans"][0]["by"] == "ada"
    assert plans("plan", "list", "--state", "parked").out == "No plan matches.\n"
    steps = plans("plan", "show", "p", "--json").json["list"]
    assert [step["name"] for step in steps] == ["one", "two", "switch", "tidy"]
    assert {step["state"] for step in steps} == {"done"}
    assert "exit_code" in plans("plan", "show", "p1", "--step", "one").out
    assert "switch on there" in plans("plan", "graph", "p1").out
    for kind, first in (("mermaid", "flowchart"), ("dot", "digraph"), ("svg", "<svg")):
        place = plans.folder / f"graph.{kind}"
        plans("plan", "graph", "p1", "--format", kind, "--output", str(place))
        assert place.read_text().startswith(first)
    assert "switch" in plans("plan", "graph", "--file", "plans.py:three").out
    chain = plans("plan", "chain", "p1", "switch", "--json").json["chain"]
    assert [step["name"] for step in chain] == ["one", "two", "switch"]
    figures = plans("plan", "metrics", "--json").json["nodes"]
    assert {(each["node"], each["kind"]): each["done"] for each in figures} == {
        ("here", "reversible"): 2,
        ("here", "cleanup"): 1,
        ("there", "pivot"): 1,
    }
    assert plans("plan", "purge", "p1", "--json").json["purged"] >= 4
    assert plans("plan", "status", "p1", code=3).err.startswith("Error: There is no plan p1")


def test_an_agent_serves_only_its_nodes(plans: Shell) -> None:
    plans("plan", "submit", "plans.py:three", "--id", "p1")
    with command(plans, "plan", "agent", "--node", "here") as here:
        started(here)
        until(lambda: logged(plans) == ["one", "two"])
        until(lambda: plans("plan", "show", "p1", "--step", "switch", "--json").json["state"] == "ready")
        with command(plans, "plan", "agent", "--node", "there") as there:
            started(there)
            assert plans.run("plan", "watch", "p1", "--json").json["state"] == "done"
    assert logged(plans) == ["one", "two", "switch", "tidy"]


@pytest.mark.parametrize("arguments", [(), ("--node", "a", "--all-nodes")])
def test_an_agent_without_a_node(plans: Shell, arguments: tuple[str, ...]) -> None:
    assert "--node NAME, or --all-nodes" in plans("plan", "agent", *arguments, code=2).err


@pytest.mark.usefixtures("stop_waiting")
def test_a_killed_agent_loses_nothing(plans: Shell) -> None:
    """The command of the killed agent still runs: the next agent waits for its end, then asks the check."""
    plans("plan", "submit", "plans.py:checked", "--id", "p1")
    with agent(plans) as first:
        started(first)
        until(lambda: logged(plans) == ["count"])
        first.process.kill()
        first.process.wait()
    with agent(plans) as second:
        started(second)
        until(lambda: plans("plan", "show", "p1", "--step", "count", "--json").json["attempts"] >= 2)
        go(plans, "count")
        assert plans.run("plan", "watch", "p1", "--json").json["state"] == "done"
    assert logged(plans) == ["count", "next"]


@pytest.mark.usefixtures("stop_waiting")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_before_the_pivot_rolls_back(plans: Shell, how: int) -> None:
    with command(plans, "plan", "run", "plans.py:slow", "--here", "--id", "p1") as running:
        until(lambda: logged(plans) == ["one", "two"])
        running.process.send_signal(how)
        running.until("before the pivot, so the plan is rolled back")
        go(plans, "two")
        assert running.process.wait(60) == 1
    assert logged(plans) == ["one", "two", "undo-two", "undo-one"]
    [entry] = plans("plan", "audit", "p1", "--json").json["audit"]
    assert (entry["operation"], entry["why"]) == ("abort", signal.Signals(how).name)


@pytest.mark.usefixtures("stop_waiting")
def test_ctrl_c_after_the_pivot_completes(plans: Shell) -> None:
    go(plans, "two")
    with command(plans, "plan", "run", "plans.py:slow", "--here", "--id", "p1") as running:
        until(lambda: logged(plans)[-1:] == ["after"])
        running.process.send_signal(signal.SIGINT)
        running.until("after the pivot, so the plan is completed")
        go(plans, "after")
        assert running.process.wait(60) == 0
    assert logged(plans) == ["one", "two", "switch", "after", "last"]


@pytest.mark.usefixtures("stop_waiting")
def test_a_second_ctrl_c_leaves_at_once(plans: Shell) -> None:
    go(plans, "two")
    with command(plans, "plan", "run", "plans.py:slow", "--here", "--id", "p1") as running:
        until(lambda: logged(plans)[-1:] == ["after"])
        running.process.send_signal(signal.SIGINT)
        running.until("after the pivot")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 4
        running.until("Left. The plan goes on")
    go(plans, "after")
    with agent(plans) as other:
        started(other)
        assert plans.run("plan", "watch", "p1", "--json").json["state"] == "done"
    assert logged(plans)[-1] == "last"


@pytest.mark.usefixtures("stop_waiting")
def test_a_timeout_before_the_pivot_rolls_back(plans: Shell) -> None:
    with command(plans, "plan", "run", "plans.py:slow", "--here", "--id", "p1", "--timeout", "1s") as running:
        running.until("The time is over: before the pivot, so the plan is rolled back")
        go(plans, "two")
        assert running.process.wait(60) == 1
    assert logged(plans)[-1] == "undo-one"


def test_watch_is_left_by_ctrl_c(plans: Shell) -> None:
    plans("plan", "submit", "plans.py:three", "--id", "p1")
    with command(plans, "plan", "watch", "p1") as watching:
        watching.until("p1: running")
        assert watching.end(signal.SIGINT) == 4
    assert plans("plan", "status", "p1", "--json").json["state"] == "running"


def test_a_gate_is_approved(plans: Shell) -> None:
    with command(plans, "plan", "run", "plans.py:gated", "--here", "--id", "p1") as running:
        running.until("p1: waiting")
        assert "towpath plan approve p1" in plans("plan", "status", "p1").out
        refused = plans("plan", "approve", "p1", "one", code=2)
        assert "a gate" in refused.err
        approved = plans("plan", "approve", "p1", "ok", "--by", "ada", "--reason", "seen", "--json").json
        assert approved["id"] == "p1"
        assert running.process.wait(60) == 0
    [entry] = plans("plan", "audit", "p1", "--json").json["audit"]
    assert (entry["by"], entry["operation"], entry["step"], entry["why"]) == ("ada", "approve", "ok", "seen")


def test_a_gate_is_rejected(plans: Shell) -> None:
    with command(plans, "plan", "run", "plans.py:gated", "--here", "--id", "p1") as running:
        running.until("p1: waiting")
        assert "Missing option '--reason'" in plans("plan", "reject", "p1", "ok", code=2).err
        plans("plan", "reject", "p1", "ok", "--reason", "too late")
        assert running.process.wait(60) == 1
    assert logged(plans) == ["one", "undo-one"]


def parked(plans: Shell) -> None:
    ran = plans.run("plan", "run", "plans.py:stuck", "--here", "--id", "p1", code=7)
    assert "state      parked" in ran.out
    assert "towpath plan mark-done p1" in ran.out
    assert plans("plan", "status", "p1", "--json", code=7).json["left"] == ["fix", "last"]
    refused = plans("plan", "abort", "p1", code=1)
    assert "pivot switch took effect" in refused.err


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (("retry", "p1", "--reason", "disk replaced"), ["switch", "fix", "last"]),
        (("skip", "p1", "fix", "--reason", "not needed"), ["switch", "last"]),
        (("mark-done", "p1", "fix", "--reason", "by hand"), ["switch", "last"]),
    ],
)
def test_a_parked_plan_waits_for_a_person(
    plans: Shell, operation: tuple[str, ...], expected: list[str]
) -> None:
    parked(plans)
    (plans.folder / "fixed").touch()
    plans("plan", *operation, "--by", "ada")
    with agent(plans) as running:
        started(running)
        assert plans.run("plan", "watch", "p1", "--json").json["state"] == "done"
    assert logged(plans) == expected
    [entry] = plans("plan", "audit", "p1", "--json").json["audit"]
    assert (entry["by"], entry["why"]) == ("ada", operation[-1])


@pytest.mark.usefixtures("stop_waiting")
def test_pause_and_resume(plans: Shell) -> None:
    with command(plans, "plan", "run", "plans.py:slow", "--here", "--id", "p1") as running:
        until(lambda: logged(plans) == ["one", "two"])
        assert plans("plan", "pause", "p1", "--reason", "lunch", "--json").json["state"] == "paused"
        go(plans, "two")
        go(plans, "after")
        until(lambda: plans("plan", "show", "p1", "--step", "two", "--json").json["state"] == "done")
        assert plans("plan", "show", "p1", "--step", "switch", "--json").json["state"] != "done"
        plans("plan", "resume", "p1")
        assert running.process.wait(60) == 0
    operations = [each["operation"] for each in plans("plan", "audit", "p1", "--json").json["audit"]]
    assert operations == ["pause", "resume"]


def test_dry_run_runs_checks_only(plans: Shell) -> None:
    (plans.folder / "log").touch()
    ran = plans.run("plan", "dry-run", "plans.py:checked", "--here", "--json").json
    assert [(each["step"], each["answer"]) for each in ran["steps"]] == [("count", "applied"), ("next", None)]
    assert logged(plans) == []
    late = plans.run("plan", "dry-run", "plans.py:checked", "--timeout", "0.2s", code=1)
    assert "plan agent" in late.err


def test_ids_may_be_shortened(plans: Shell) -> None:
    for id in ("move-1", "move-2", "other"):
        plans("plan", "submit", "plans.py:three", "--id", id)
    assert plans("plan", "status", "oth", "--json").json["id"] == "other"
    assert "denotes several plans" in plans("plan", "status", "move", code=2).err
    assert "There is no plan nothing" in plans("plan", "status", "nothing", code=3).err


EACH: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("three", ("status", "show", "graph", "chain two", "metrics", "audit", "watch", "purge")),
    ("stuck", ("retry",)),
    ("stuck", ("skip fix --reason r",)),
    ("stuck", ("mark-done fix --reason r",)),
    ("gated", ("pause", "resume", "approve ok")),
    ("gated", ("reject ok --reason r",)),
    ("gated", ("abort",)),
)
"""Plan -> the commands about it, in their order."""
FILES = ("check", "dry-run", "submit", "run")


def test_every_command_prints_json(plans: Shell) -> None:
    called = {"agent", "list", *FILES}
    with agent(plans) as running:
        started(running)
        for name in FILES:
            call = plans.run if name == "run" else plans
            assert isinstance(call("plan", name, "plans.py:three", "--json").json, dict)
        for number, (plan, lines) in enumerate(EACH):
            id = f"p{number}"
            plans("plan", "submit", f"plans.py:{plan}", "--id", id)
            until(lambda: state_of(plans) in ("done", "parked", "waiting"))
            for name, *arguments in map(str.split, lines):
                assert isinstance(plans("plan", name, id, *arguments, "--json").json, dict)
                called.add(name)
    assert called == {path.split()[2] for path, _ in leaves() if path.startswith("towpath plan ")}


def state_of(plans: Shell) -> str:
    """Of the plan whose id is the last one that begins with p."""
    state: str = plans("plan", "list", "--prefix", "p", "--json").json["plans"][-1]["state"]
    return state


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_statement_of_a_killed_agent_is_not_run_beside_the_first(
    plans: Shell, postgres: Server, empty_database: str, autocommit: bool
) -> None:
    """The statement waits for a lock of the test. After the kill it is still active on the server: the next
    agent waits. When it has ended it took effect only with autocommit; otherwise it is run again."""
    run_once = f"""
from towpath import Plan, Sql, Step
plan = Plan("sql", (Step("insert", "db", Sql("INSERT INTO t SELECT 1 FROM pg_advisory_xact_lock(7)",
    autocommit={autocommit}), undo=Sql("DELETE FROM t"), check=Sql("SELECT count(*) > 0 FROM t")),))
"""
    (plans.folder / "plan.py").write_text(run_once)
    (plans.folder / "towpath.toml").write_text(f'[nodes.db]\naddress = "{empty_database}"\n')
    with psycopg.connect(empty_database, autocommit=True) as lock:
        lock.execute("CREATE TABLE t (id int)")
        lock.execute("SELECT pg_advisory_lock(7)")
        plans("plan", "submit", "plan.py", "--id", "p1")
        with agent(plans) as first:
            until(lambda: _waiting(lock))
            first.process.kill()
            first.process.wait()
        with agent(plans) as second:
            until(lambda: plans("plan", "show", "p1", "--step", "insert", "--json").json["attempts"] >= 2)
            until(lambda: plans("jobs", "show", "plan/p1/insert", "--json").json["state"] == "scheduled")
            assert _waiting(lock) == 1
            lock.execute("SELECT pg_advisory_unlock(7)")
            assert plans.run("plan", "watch", "p1", "--json").json["state"] == "done"
            assert second.end() == 0
        assert lock.execute("SELECT count(*) FROM t").fetchall() == [(1,)]


def _waiting(connection: psycopg.Connection[Any]) -> int:
    found = connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'towpath p1/insert' "
        "AND datname = current_database() AND wait_event_type = 'Lock'"
    ).fetchone()
    assert found is not None
    return int(found[0])


SECRET = "geheim-rosebud-7"
SECRETS = """
from towpath import Plan, Shell, Sql, Step
from towpath.flows.plan import StepRetry

once = StepRetry(attempts=1)
plan = Plan("secrets", (
    Step("prints", "api", Shell(("sh", "-c", "echo $API_TOKEN; echo $API_TOKEN >&2")), undo=Shell(("true",))),
    Step("fails", "db", Sql("SELECT 1"), undo=Shell(("true",)), retry=once, after=("prints",)),
))
other = Plan("other", (
    Step("raises", "api", Shell(("sh", "-c", "echo $API_TOKEN >&2; exit 3")), undo=Shell(("true",)),
         retry=once),
))
"""


def test_secrets_are_in_neither_ledger_nor_output(plans: Shell) -> None:
    (plans.folder / "plan.py").write_text(SECRETS)
    (plans.folder / "towpath.toml").write_text(
        '[nodes.api]\ntoken_env = "API_TOKEN"\nconcurrency = 2\n'
        '[nodes.db]\naddress = "postgresql://ada@127.0.0.1:1/db"\npassword_file = "secret"\n'
        "connect_timeout = 1\n"
    )
    place = plans.folder / "secret"
    place.touch(0o600)
    place.write_text(SECRET + "\n")
    environment = {"API_TOKEN": SECRET, "TOWPATH_DEBUG": "1"}
    outputs = [
        plans.run("plan", "run", f"plan.py:{name}", "--here", "--id", name, env=environment, code=1)
        for name in ("plan", "other")
    ]
    running = WatchedProcess(plans.start("plan", "agent", "--all-nodes", "-v", env=environment))
    try:
        started(running)
        plans("plan", "submit", "plan.py:other", "--id", "third")
        outputs.append(plans.run("plan", "watch", "third", code=1))
        assert running.end() == 0
    finally:
        assert running.close()
    shown = (("doctor",), ("doctor", "--json"), ("plan", "show", "plan", "--json"))
    outputs += [plans(*each) for each in shown]
    outputs += [plans("plan", "show", "plan", "--step", step) for step in ("prints", "fails")]
    texts = [*(each.out + each.err for each in outputs), *running.lines]
    assert not [text for text in texts if SECRET in text]
    assert [text for text in texts if "***" in text]
    assert SECRET not in dumped(plans.folder / "towpath.db")
    assert plans("queues", "show", "node/api", "--json").json["cap"] == 2


def dumped(path: Path) -> str:
    """All values of the ledger as text, and the bytes of its files."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        text = "\n".join(connection.iterdump())
    connection.close()
    files = [place.read_bytes() for place in path.parent.glob("towpath.db*")]
    return text + b"".join(files).decode("latin-1")
