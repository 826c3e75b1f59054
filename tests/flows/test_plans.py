"""Plans through `app.plans`, run by a real worker on every ledger."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from towpath import App, Fail, Plan, Retry, Step, StepRetry
from towpath.core.retry import Fixed
from towpath.errors import InvalidInput, InvalidPlan, PlanRefused, UnknownPlan
from towpath.flows.kinds import PlanState
from towpath.operations.plans import PlanBuilder
from towpath.tasks.task import AsyncTask, Task

ONCE = StepRetry(attempts=1, check_attempts=1, backoff=Fixed(0))
TWICE = StepRetry(attempts=2, check_attempts=2, backoff=Fixed(0))


class World:
    """What the steps of a test have done, in order. A step whose name is in `bad` fails."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.done: list[str] = []
        self.bad: dict[str, Exception] = {}
        self.answers: dict[str, bool | None] = {}
        self._lock = threading.Lock()

        @app.task(name="do")
        async def do(what: str) -> str:
            return self.did(what)

        @app.task(name="do_sync")
        def do_sync(what: str) -> str:
            return self.did(what)

        @app.task(name="ask")
        async def ask(what: str) -> bool | None:
            return self.answers.get(what)

        self.do: AsyncTask[[str], str] = do
        self.do_sync: Task[[str], str] = do_sync
        self.ask = ask

    def did(self, what: str) -> str:
        if what in self.bad:
            raise self.bad[what]
        with self._lock:
            self.done.append(what)
        return what.upper()

    def step(self, plan: PlanBuilder, name: str, node: str = "n1", **options: object) -> Step:
        reversible = options.get("kind", "reversible") == "reversible"
        options.setdefault("retry", ONCE)
        if reversible:
            options.setdefault("undo", self.do.of(f"-{name}"))
        return plan.step(name, node, self.do.of(name), **options)  # type: ignore[arg-type]

    def run(self) -> list[str]:
        """Run a worker until nothing is left to do; return what was done since the last call."""
        self.app.run(queues=("node/*",), burst=True)
        with self._lock:
            done, self.done = self.done, []
        return done


@pytest.fixture
def world(app: App) -> World:
    return World(app)


def test_steps_run_in_the_order_of_their_dependencies(world: World) -> None:
    plan = world.app.plans.new("order")
    a = world.step(plan, "a", "n1")
    b = world.step(plan, "b", "n2", after=[a])
    c = plan.step("c", "n3", world.do_sync.of("c"), undo=world.do.of("-c"), after=[a])
    world.step(plan, "d", "n1", after=[b, c])
    handle = plan.submit(id="order-1", by="ada")
    assert world.app.plans.get("order-1").status().state is PlanState.RUNNING
    done = world.run()
    assert (done[0], sorted(done[1:3]), done[3:]) == ("a", ["b", "c"], ["d"])
    status = handle.wait(timeout=0)
    assert (status.state, status.by, status.steps.done) == (PlanState.DONE, "ada", 4)
    steps = {step.name: step for step in handle.steps()}
    assert steps["c"].result == "C"
    assert all(step.duration is not None for step in steps.values())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_result_with_null_is_kept_at_the_first_attempt(world: World, is_async: bool) -> None:
    runs: list[int] = []

    def found() -> dict[str, str | None]:
        runs.append(1)
        return {"kept": None}

    async def afound() -> dict[str, str | None]:
        return found()

    task: Task[[], Any] = world.app.task(name="found")(afound if is_async else found)
    plan = world.app.plans.new("null")
    plan.step("a", "n1", task.of(), undo=world.do.of("-a"))
    handle = plan.submit()
    world.run()
    (step,) = handle.steps()
    assert (handle.status().state, step.result, runs) == (PlanState.DONE, {"kept": None}, [1])


def test_a_node_runs_one_step_at_a_time(world: World) -> None:
    running, most = 0, 0
    gate = threading.Barrier(2, timeout=30)

    @world.app.task(name="slow")
    def slow(both: bool) -> None:
        nonlocal running, most
        if both:
            gate.wait()
            return
        running += 1
        most = max(most, running)
        running -= 1

    plan = world.app.plans.new("caps")
    for n in range(6):
        plan.step(f"s{n}", "one", slow.of(False), undo=slow.of(False))
    for n in range(2):  # on two nodes, at the same time
        plan.step(f"p{n}", f"node{n}", slow.of(True), undo=slow.of(False))
    handle = plan.submit()
    world.run()
    assert handle.status().state is PlanState.DONE
    assert most == 1
    queue = world.app.ledger.queue("node/one")
    assert queue is not None
    assert queue.cap == 1


def test_a_failed_step_is_rolled_back_on_the_nodes_of_the_steps_in_reverse_order(world: World) -> None:
    plan = world.app.plans.new("back")
    a = world.step(plan, "a", "n1")
    b = world.step(plan, "b", "n2", after=[a])
    c = world.step(plan, "c", "n3", after=[a])
    d = world.step(plan, "d", "n1", after=[b, c])
    world.step(plan, "e", "n2", after=[d])
    world.step(plan, "z", "n2", kind="cleanup")
    world.bad["d"] = RuntimeError("no space")
    handle = plan.submit()
    done = world.run()
    assert sorted(done[:3]) == ["a", "b", "c"]
    assert done[3] == "-d"  # without a check it may have taken effect
    assert sorted(done[4:6]) == ["-b", "-c"]
    assert done[6:] == ["-a", "z"]
    status = handle.status()
    assert (status.state, status.why) == (PlanState.ROLLED_BACK, "d failed")
    assert status.undo.done == 4
    ledger = world.app.ledger
    nodes = {name: ledger.get(f"plan/{handle.id}/{name}/undo") for name in "abcd"}
    assert {name: job and job.queue for name, job in nodes.items()} == {
        "a": "node/n1",
        "b": "node/n2",
        "c": "node/n3",
        "d": "node/n1",
    }
    assert ledger.get(f"plan/{handle.id}/e/undo") is None


def test_a_check_that_says_not_applied_spares_the_undo(world: World) -> None:
    plan = world.app.plans.new("checked")
    a = world.step(plan, "a")
    world.step(plan, "b", check=world.ask.of("b"), after=[a], retry=TWICE)
    world.bad["b"], world.answers["b"] = RuntimeError("refused"), False
    handle = plan.submit()
    assert world.run() == ["a", "-a"]
    assert handle.status().state is PlanState.ROLLED_BACK
    assert handle.step("b").attempts == 2


def test_a_failure_after_the_effect_is_done(world: World) -> None:
    plan = world.app.plans.new("lost-reply")
    a = world.step(plan, "a", check=world.ask.of("a"))
    world.step(plan, "b", after=[a])
    world.bad["a"], world.answers["a"] = ConnectionError("lost reply"), True
    handle = plan.submit()
    assert world.run() == ["b"]
    assert handle.status().state is PlanState.DONE


def test_an_unknown_step_parks_the_plan_and_a_person_decides(world: World) -> None:
    def submitted(id: str) -> None:
        plan = world.app.plans.new("unknown")
        a = world.step(plan, "a")
        b = world.step(plan, "b", check=world.ask.of("b"), after=[a])
        world.step(plan, "c", after=[b])
        plan.submit(id=id)

    world.bad["b"] = ConnectionError("no route")
    for id in ("one", "two", "three"):
        submitted(id)
    assert world.run() == ["a", "a", "a"]
    plans = world.app.plans
    for id in ("one", "two", "three"):
        status = plans.get(id).status()
        assert (status.state, status.left) == (PlanState.PARKED, ("b", "c"))
        assert status.why == "it is unknown whether b took effect"
    plans.get("one").mark_done("b", "the row is there", by="ada")
    assert world.run() == ["c"]
    assert plans.get("one").status().state is PlanState.DONE
    assert plans.get("two").abort(by="bob", why="not today") is True
    world.answers["b"] = False
    assert world.run() == ["-a"]
    assert plans.get("two").status().state is PlanState.ROLLED_BACK
    world.bad.clear()
    plans.get("three").retry(by="ada")
    assert world.run() == ["b", "c"]
    assert plans.get("three").status().state is PlanState.DONE
    (entry,) = plans.get("one").audit()
    assert (entry.by, entry.operation, entry.step, entry.why) == ("ada", "mark_done", "b", "the row is there")


def test_after_the_pivot_there_is_only_forward_recovery(world: World) -> None:
    plan = world.app.plans.new("pivot")
    a = world.step(plan, "a")
    p = world.step(plan, "p", after=[a], kind="pivot")
    f = world.step(plan, "f", after=[p], kind="forward")
    world.step(plan, "g", after=[f], kind="forward")
    world.step(plan, "z", kind="cleanup")
    world.bad["f"] = Fail("no")
    handle = plan.submit()
    assert world.run() == ["a", "p"]
    status = handle.status()
    assert (status.state, status.left) == (PlanState.PARKED, ("f", "g"))
    with pytest.raises(PlanRefused, match="the pivot p took effect"):
        handle.abort()
    handle.skip("f", "not needed here", by="ada")
    assert world.run() == ["g", "z"]
    assert handle.status().state is PlanState.DONE
    assert handle.step("f").reason == "skipped"


def test_a_pivot_that_did_not_take_effect_is_rolled_back_and_one_that_may_have_is_parked(
    world: World,
) -> None:
    for name, check in (("known", True), ("blind", False)):
        plan = world.app.plans.new(name)
        a = world.step(plan, "a")
        plan.step(
            "p",
            "n1",
            world.do.of("p"),
            after=[a],
            kind="pivot",
            retry=ONCE,
            check=world.ask.of("p") if check else None,
        )
        plan.submit(id=name)
    world.bad["p"], world.answers["p"] = RuntimeError("no"), False
    assert world.run() == ["a", "a", "-a"]
    assert world.app.plans.get("known").status().state is PlanState.ROLLED_BACK
    assert world.app.plans.get("blind").status().state is PlanState.PARKED


def test_a_failing_undo_does_not_stop_the_others(world: World) -> None:
    plan = world.app.plans.new("undo")
    a = world.step(plan, "a", "n1")
    b = world.step(plan, "b", "n2", after=[a])
    world.step(plan, "c", "n3", after=[b])
    world.bad |= {"c": RuntimeError("c"), "-b": RuntimeError("stuck")}
    handle = plan.submit()
    assert world.run() == ["a", "b", "-c", "-a"]
    status = handle.status()
    assert (status.state, status.left) == (PlanState.ROLLBACK_FAILED, ("b",))
    world.bad.clear()
    handle.retry()
    assert world.run() == ["-b"]
    assert handle.wait(timeout=0).state is PlanState.ROLLED_BACK
    assert handle.status().left == ()


def test_an_undo_is_marked_as_done_by_hand(world: World) -> None:
    plan = world.app.plans.new("by-hand")
    a = world.step(plan, "a")
    world.step(plan, "b", after=[a])
    world.bad |= {"b": RuntimeError("b"), "-a": RuntimeError("stuck"), "-b": RuntimeError("stuck")}
    handle = plan.submit()
    world.run()
    assert handle.status().left == ("b", "a")
    handle.mark_done("b", "dropped by hand")
    world.run()
    assert (handle.status().state, handle.status().left) == (PlanState.ROLLBACK_FAILED, ("a",))
    handle.mark_done("a", "dropped by hand")
    world.run()
    assert handle.status().state is PlanState.ROLLED_BACK


def test_a_gate_waits_for_approval(world: World) -> None:
    def gated(id: str) -> None:
        plan = world.app.plans.new("gate")
        a = world.step(plan, "a")
        gate = plan.gate("ok", after=[a])
        world.step(plan, "b", after=[gate])
        plan.submit(id=id)

    gated("yes")
    gated("no")
    yes, no = world.app.plans.get("yes"), world.app.plans.get("no")
    assert world.run() == ["a", "a"]
    assert yes.status().state is PlanState.WAITING
    with pytest.raises(InvalidInput, match="a gate"):
        yes.approve("a")
    with pytest.raises(InvalidInput, match="not a gate"):
        yes.skip("ok", "why")
    yes.approve("ok", by="ada")
    no.reject("ok", "too late", by="bob")
    assert sorted(world.run()) == ["-a", "b"]
    assert yes.status().state is PlanState.DONE
    assert no.status().state is PlanState.ROLLED_BACK
    with pytest.raises(PlanRefused, match="approve is possible while it is running, paused"):
        yes.approve("ok")


def test_pause_and_resume(world: World) -> None:
    plan = world.app.plans.new("pause")
    a = world.step(plan, "a")
    world.step(plan, "b", after=[a])
    handle = plan.submit()
    handle.pause(by="ada", why="night")
    assert world.run() == []
    assert handle.status().state is PlanState.PAUSED
    with pytest.raises(PlanRefused):
        handle.pause()
    handle.resume()
    assert world.run() == ["a", "b"]
    assert [entry.operation for entry in handle.audit()] == ["pause", "resume"]


@pytest.mark.parametrize("back", [False, True])
def test_a_failed_cleanup_parks_the_plan_until_it_is_repaired(world: World, back: bool) -> None:
    plan = world.app.plans.new("tidy")
    a = world.step(plan, "a")
    world.step(plan, "b", after=[a])
    world.step(plan, "y", kind="cleanup")
    world.step(plan, "z", kind="cleanup")
    world.bad["z"] = Fail("busy")
    if back:
        world.bad["b"] = Fail("no")
    handle = plan.submit()
    world.run()
    status = handle.status()
    assert (status.state, status.left) == (PlanState.PARKED, ("z",))
    assert status.why == "z of the cleanup failed"
    with pytest.raises(PlanRefused, match="nothing to abort"):
        handle.abort()
    world.bad.pop("z")
    handle.retry()
    assert world.run() == ["z"]
    status = handle.status()
    assert (status.state, status.left) == (PlanState.ROLLED_BACK if back else PlanState.DONE, ())


@pytest.mark.parametrize("paused", [False, True])
def test_abort_before_anything_ran(world: World, paused: bool) -> None:
    plan = world.app.plans.new("abort")
    world.step(plan, "a")
    world.step(plan, "z", kind="cleanup")
    handle = plan.submit()
    if paused:
        handle.pause()
    assert handle.abort() is True
    assert world.run() == ["z"]
    status = handle.status()
    assert (status.state, status.why, status.undo.total) == (PlanState.ROLLED_BACK, "aborted", 0)


def test_an_abort_while_a_step_runs_lets_it_finish_and_undoes_it(world: World) -> None:
    @world.app.task(name="abort_inside")
    def abort_inside(plan: str) -> None:
        assert world.app.plans.get(plan).abort(by="the step") is True
        world.did("inside")

    plan = world.app.plans.new("abort")
    a = plan.step("a", "n1", abort_inside.of("self"), undo=world.do.of("-a"))
    world.step(plan, "b", after=[a])
    handle = plan.submit(id="self")
    assert world.run() == ["inside", "-a"]
    assert handle.status().state is PlanState.ROLLED_BACK


def test_an_abort_while_the_pivot_runs_completes_the_plan_if_it_takes_effect(world: World) -> None:
    outcome: list[bool | None] = []

    @world.app.task(name="abort_in_pivot")
    def abort_in_pivot(plan: str) -> None:
        outcome.append(world.app.plans.get(plan).abort(by="the pivot"))

    plan = world.app.plans.new("abort")
    a = world.step(plan, "a")
    p = plan.step("p", "n1", abort_in_pivot.of("pivot"), after=[a], kind="pivot")
    world.step(plan, "f", after=[p], kind="forward")
    handle = plan.submit(id="pivot")
    assert world.run() == ["a", "f"]
    assert outcome == [None]
    assert handle.status().state is PlanState.DONE


def test_the_same_submit_twice_is_one_plan_and_another_plan_is_refused(world: World) -> None:
    def built(name: str) -> Plan:
        plan = world.app.plans.new("same")
        world.step(plan, name)
        return plan.built

    first = world.app.plans.submit(built("a"), id="x", by="ada")
    again = world.app.plans.submit(built("a"), id="x", by="bob")
    assert first.status() == again.status()
    with pytest.raises(PlanRefused, match="another plan has this id"):
        world.app.plans.submit(built("b"), id="x")
    assert world.run() == ["a"]
    world.app.plans.submit(built("a"), id="x")
    assert world.run() == []


def test_an_invalid_plan_is_refused_before_anything_is_stored(world: World) -> None:
    plan = world.app.plans.new("bad")
    plan.step("a", "n1", world.do.of("a"))
    with pytest.raises(InvalidPlan, match="undo"):
        plan.submit(id="bad")
    with pytest.raises(UnknownPlan):
        world.app.plans.get("bad").status()
    for id in ("a/b", "", "a b"):
        with pytest.raises(InvalidInput):
            world.app.plans.get(id).status()


def test_a_task_in_a_process_of_its_own_is_refused(world: World) -> None:
    task = world.app.task(name="apart", process=True)(_top_level)
    plan = world.app.plans.new("apart")
    plan.step("a", "n1", task.of(), undo=world.do.of("-a"))
    with pytest.raises(InvalidInput, match="process=True"):
        plan.submit()


def _top_level() -> None: ...


def test_a_retry_is_not_a_failure(world: World) -> None:
    tries: list[int] = []

    @world.app.task(name="flaky")
    async def flaky() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise Retry("not yet", after=0)
        return "at last"

    plan = world.app.plans.new("flaky")
    plan.step("a", "n1", flaky.of(), undo=world.do.of("-a"), retry=StepRetry(attempts=3, backoff=Fixed(60)))
    handle = plan.submit()
    world.run()
    assert handle.status().state is PlanState.DONE
    assert (handle.step("a").result, len(tries)) == ("at last", 3)


def test_a_dry_run_runs_the_checks_and_no_action(world: World) -> None:
    plan = world.app.plans.new("dry")
    a = world.step(plan, "a", "n1", check=world.ask.of("a"))
    b = world.step(plan, "b", "n2", check=world.ask.of("b"), after=[a])
    world.step(plan, "c", "n2", after=[b])
    world.answers |= {"a": True, "b": False}
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.extend(plan.dry_run(timeout=30)))
    waiting.start()
    _until(lambda: world.app.ledger.queue("node/n2") is not None)
    worker = threading.Thread(target=world.run)
    worker.start()
    waiting.join()
    worker.join()
    assert [(each.step, each.answer) for each in found] == [  # type: ignore[attr-defined]
        ("a", "applied"),
        ("b", "not_applied"),
        ("c", None),
    ]
    assert world.done == []
    assert world.app.plans.list() == []


def _until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(3000):
        if condition():
            return
        event.wait(0.01)
    raise AssertionError("it did not happen")


def test_lists_metrics_chain_and_purge(world: World) -> None:
    for id in ("one", "two"):
        plan = world.app.plans.new("many")
        a = world.step(plan, "a", "n1")
        b = world.step(plan, "b", "n2", after=[a])
        world.step(plan, "c", "n2", after=[a])
        world.step(plan, "d", "n2", after=[b])
        plan.submit(id=id)
    world.bad["c"] = RuntimeError("c")
    world.app.plans.get("two").pause(why="wait")
    world.run()
    plans = world.app.plans
    assert [(each.id, each.state) for each in plans.list()] == [("one", "rolled_back"), ("two", "paused")]
    assert [each.id for each in plans.list(state="paused")] == ["two"]
    assert [each.name for each in plans.get("one").chain("d")] == ["a", "b", "d"]
    figures = {(each.node, each.kind): each for each in plans.metrics("one")}
    assert figures["n1", "reversible"].done == 1
    assert figures["n2", "reversible"].failed == 1
    with pytest.raises(PlanRefused, match="only a plan that has ended"):
        plans.get("two").purge()
    assert plans.get("one").purge() >= 4
    assert [each.id for each in plans.list()] == ["two"]
    assert plans.get("one").audit() == []
