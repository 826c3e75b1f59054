"""Locks, gates that expire, retries and operations, with a clock that the test moves; operations of several
people at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.running import working
from towpath import App, Plan, Shell, Snooze, Step, StepRetry
from towpath.commands import Command, Note
from towpath.core.retry import Fixed
from towpath.errors import InvalidInput, PlanRefused
from towpath.flows import operate
from towpath.flows.coordinator import advance
from towpath.flows.kinds import Intent, Operation, PlanState, find_record, record_note
from towpath.operations.flows import EngineDoor

RETRY = StepRetry(attempts=2, check_attempts=2, backoff=Fixed(10))


class Tasks:
    def __init__(self, app: App) -> None:
        self.done: list[str] = []
        self.bad: set[str] = set()
        self.answers: dict[str, Any] = {}

        @app.task(name="do")
        async def do(what: str) -> None:
            if what in self.bad:
                raise RuntimeError(f"no {what}")
            self.done.append(what)

        @app.task(name="ask")
        def ask(what: str) -> str | None:
            found: str | None = self.answers.get(what, "not_applied")
            return found

        self.do, self.ask = do, ask

    def step(self, name: str, **options: Any) -> Step:
        kind = options.setdefault("kind", "reversible")
        undo = self.do.of(f"-{name}") if kind == "reversible" else None
        return Step(name, "n1", self.do.of(name), undo=undo, **{"retry": RETRY, **options})  # type: ignore[arg-type]


@pytest.fixture
def memory() -> App:
    return App("memory://")


def test_two_plans_with_one_lock_run_one_after_the_other(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        plans = memory.plans
        gate = Step("ok", kind="gate", after=("a",))  # type: ignore[arg-type]
        first = Plan("first", (tasks.step("a", locks=["table t", "disk"]), gate))
        second = Plan("second", (tasks.step("b", locks=["table t"]),))
        one, two = plans.submit(first, id="one"), plans.submit(second, id="two")
        bench.drain()
        assert (tasks.done, one.status().steps.done) == (["a"], 1)
        bench.advance(5)
        assert tasks.done == ["a"]
        assert two.status().state is PlanState.RUNNING
        one.approve("ok")
        bench.drain()
        bench.advance(5)
        assert tasks.done == ["a", "b"]
        assert two.wait(timeout=0).state is PlanState.DONE
        assert bench.ledger.note("plan-lock/table t") is None
        assert bench.ledger.note("plan-lock/disk") is None


def test_a_parked_plan_keeps_its_locks_until_it_is_purged(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.bad.add("f")
        steps = (tasks.step("p", kind="pivot", locks=["t"]), tasks.step("f", kind="forward", after=["p"]))
        handle = memory.plans.submit(Plan("p", steps), id="x")
        bench.advance(60)
        assert handle.status().state is PlanState.PARKED
        assert bench.ledger.note("plan-lock/t") is not None
        handle.purge()
        assert bench.ledger.note("plan-lock/t") is None
        assert memory.plans.list() == []


def test_a_gate_expires(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        gate = Step("ok", kind="gate", after=("a",), expires=3600)  # type: ignore[arg-type]
        steps = (tasks.step("a"), gate, tasks.step("b", after=["ok"]))
        handle = memory.plans.submit(Plan("g", steps))
        bench.advance(3599)
        assert handle.status().state is PlanState.WAITING
        bench.advance(10)
        assert handle.status().state is PlanState.ROLLED_BACK
        assert tasks.done == ["a", "-a"]
        assert handle.step("ok").reason == "expired"


def test_a_step_that_still_runs_is_waited_for(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.bad.add("a")
        tasks.answers["a"] = "running"
        handle = memory.plans.submit(Plan("r", (tasks.step("a", check=tasks.ask.of("a")),)))
        bench.advance(60)
        assert handle.status().state is PlanState.RUNNING
        tasks.answers["a"] = "applied"
        bench.advance(10)
        assert handle.status().state is PlanState.DONE
        assert tasks.done == []


def test_unknown_answers_have_a_budget_of_their_own(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.bad.add("a")
        tasks.answers["a"] = None
        step = tasks.step(
            "a", check=tasks.ask.of("a"), retry=StepRetry(attempts=1, check_attempts=3, backoff=Fixed(10))
        )
        handle = memory.plans.submit(Plan("u", (step,)))
        bench.advance(15)
        assert handle.status().state is PlanState.RUNNING
        bench.advance(60)
        assert handle.status().state is PlanState.PARKED
        assert handle.step("a").attempts == 3


def test_an_undo_asks_the_check_before_it_runs(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.bad.add("b")
        tasks.answers |= {"a": "running", "c": "not_applied"}
        steps = (
            tasks.step("a", check=tasks.ask.of("a")),
            tasks.step("c", check=tasks.ask.of("c")),
            tasks.step("b", after=["a", "c"], retry=StepRetry(attempts=1)),
        )
        handle = memory.plans.submit(Plan("c", steps))
        bench.advance(30)
        assert tasks.done == ["a", "c", "-b"]
        tasks.answers["a"] = "applied"
        bench.advance(30)
        assert tasks.done == ["a", "c", "-b", "-a"]
        assert handle.status().state is PlanState.ROLLED_BACK


def test_a_step_of_a_task_that_no_worker_here_has_waits_for_another_worker(memory: App) -> None:
    from towpath.flows.actions import TaskCall

    tasks = Tasks(memory)
    with memory.testing() as bench:
        steps = (Step("a", "n1", TaskCall("elsewhere"), undo=tasks.do.of("-a")), tasks.step("b"))  # type: ignore[arg-type]
        handle = memory.plans.submit(Plan("e", steps))
        bench.drain()
        assert tasks.done == ["b"]
        assert handle.step("a").state == "scheduled"
        assert "elsewhere" in (handle.step("a").error or "")


def test_a_handler_may_snooze(memory: App) -> None:
    calls: list[int] = []

    @memory.task(name="later")
    async def later() -> str:
        calls.append(1)
        if len(calls) == 1:
            raise Snooze(30)
        return "now"

    tasks = Tasks(memory)
    with memory.testing() as bench:
        handle = memory.plans.submit(Plan("s", (Step("a", "n1", later.of(), undo=tasks.do.of("-a")),)))  # type: ignore[arg-type]
        bench.advance(40)
        assert (handle.step("a").result, len(calls)) == ("now", 2)


def test_a_timeout_is_a_failure_that_the_check_decides(memory: App) -> None:
    @memory.task(name="hang")
    async def hang() -> None:
        await asyncio.Event().wait()

    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.answers["a"] = "applied"
        step = Step("a", "n1", hang.of(), undo=tasks.do.of("-a"), check=tasks.ask.of("a"), timeout=0.01)  # type: ignore[arg-type]
        handle = memory.plans.submit(Plan("t", (step,)))
        bench.drain()
        assert handle.status().state is PlanState.DONE


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("retry", ()),
        ("resume", ()),
        ("approve", ("a",)),
        ("skip", ("a", "why")),
        ("mark_done", ("a", "why")),
        ("abort", ()),
    ],
)
def test_operations_that_a_finished_plan_refuses(
    memory: App, operation: str, arguments: tuple[str, ...]
) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        handle = memory.plans.submit(Plan("d", (tasks.step("a"),)))
        bench.drain()
        with pytest.raises(PlanRefused, match="is done"):
            getattr(handle, operation)(*arguments)
        assert handle.audit() == []


@pytest.mark.parametrize("why", ["", None, "x" * 1001])
def test_a_skip_needs_a_reason(memory: App, why: Any) -> None:
    tasks = Tasks(memory)
    with memory.testing():
        handle = memory.plans.submit(Plan("d", (tasks.step("a"),)))
        with pytest.raises(InvalidInput, match="why"):
            handle.skip("a", why)
        with pytest.raises(InvalidInput, match="step"):
            handle.skip("nothing", "because")


def test_a_skipped_step_is_not_undone(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.bad.add("c")
        steps = (
            tasks.step("a"),
            tasks.step("b", after=["a"]),
            tasks.step("c", after=["b"], retry=StepRetry(attempts=1)),
        )
        handle = memory.plans.submit(Plan("k", steps))
        handle.skip("b", "exists already", by="ada")
        bench.advance(60)
        assert tasks.done == ["a", "-c", "-a"]
        assert handle.status().state is PlanState.ROLLED_BACK


def test_an_operation_whose_process_died_is_completed_by_a_job(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.bad.add("a")
        step = tasks.step("a", check=tasks.ask.of("a"), retry=StepRetry(attempts=1, check_attempts=1))
        tasks.answers["a"] = None
        handle = memory.plans.submit(Plan("o", (step,)), id="o")
        bench.drain()
        assert handle.status().state is PlanState.PARKED
        tasks.bad.clear()
        tasks.answers.clear()
        door = Dying(EngineDoor(memory.engine))
        with pytest.raises(SystemExit):
            operate.operate(door, "o", Operation.RETRY, "ada")
        assert find_record(door, "o")[0].intent is not None
        bench.advance(60)
        assert handle.status().state is PlanState.DONE
        assert [entry.by for entry in handle.audit()] == ["ada"]


class Dying:
    """A door whose process ends after its first batch."""

    def __init__(self, door: EngineDoor) -> None:
        self._door = door
        self._left = 1

    @property
    def reads(self) -> Any:
        return self._door.reads

    def now(self) -> int:
        return self._door.now()

    def apply(self, commands: Sequence[Command]) -> Any:
        if not self._left:
            raise SystemExit
        self._left -= 1
        return self._door.apply(commands)


def test_an_operator_that_lost_the_comparison_changes_nothing(memory: App) -> None:
    """The coordinator decides between the read and the write of the operator: the step must not be marked as
    done in a plan that is being rolled back."""
    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.bad.add("b")
        steps = (tasks.step("a"), tasks.step("b", after=["a"], retry=StepRetry(attempts=1)))
        handle = memory.plans.submit(Plan("l", steps), id="l")
        door = EngineDoor(memory.engine)

        class Slow(Dying):
            def apply(self, commands: Sequence[Command]) -> Any:
                if isinstance(commands[0], Note):
                    bench.drain()
                return self._door.apply(commands)

        with pytest.raises(PlanRefused, match="rolled_back"):
            operate.operate(Slow(door), "l", Operation.MARK_DONE, "ada", "b", "I did it")
        assert handle.status().state is PlanState.ROLLED_BACK
        assert (handle.step("b").state, handle.audit()) == ("failed", [])


def test_two_coordinators_of_one_plan_make_one_rollback(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        tasks.bad.add("b")
        steps = (tasks.step("a"), tasks.step("b", after=["a"], retry=StepRetry(attempts=1)))
        handle = memory.plans.submit(Plan("t", steps), id="t")
        door = EngineDoor(memory.engine)
        memory.queue("towpath/flows").pause()
        bench.drain()
        # The delivery of a coordinator whose lease was lost, up to its settle.
        lost = advance(door, "t", 0)
        again = advance(door, "t", 0)
        assert (len(lost.notes), len(again.notes)) == (1, 1)
        memory.queue("towpath/flows").resume()
        bench.drain()
        assert handle.status().state is PlanState.ROLLED_BACK
        assert tasks.done == ["a", "-b", "-a"]
        assert advance(door, "t", 0).notes == ()


@pytest.mark.ledgers("sqlite", "postgres")
def test_of_many_operators_at_once_one_wins(app: App) -> None:
    tasks = Tasks(app)
    handle = app.plans.submit(Plan("m", (tasks.step("a"),)), id="m")
    outcomes: list[str] = []
    ready = threading.Barrier(8)

    def pause(n: int) -> None:
        ready.wait()
        try:
            handle.pause(by=f"p{n}")
            outcomes.append("paused")
        except PlanRefused:
            outcomes.append("refused")

    threads = [threading.Thread(target=pause, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["paused"] + ["refused"] * 7
    assert len(handle.audit()) == 1
    handle.resume()
    app.run(queues=("node/*",), burst=True)
    assert handle.status().state is PlanState.DONE


def test_a_stale_intent_is_completed_before_the_next_operation(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        handle = memory.plans.submit(Plan("i", (tasks.step("a"),)), id="i")
        door = EngineDoor(memory.engine)
        record, version = find_record(door, "i")
        intent = Intent(1, Operation.PAUSE, "ada", door.now())
        door.apply([record_note(replace(record, intent=intent, operations=1), version)])
        handle.resume(by="bob")
        bench.drain()
        assert [entry.operation for entry in handle.audit()] == ["pause", "resume"]
        assert handle.status().state is PlanState.DONE


def test_an_action_without_an_executor_is_an_error_of_the_step(memory: App) -> None:
    tasks = Tasks(memory)
    with memory.testing() as bench:
        step = Step("a", "n1", Shell(("true",)), undo=tasks.do.of("-a"), retry=StepRetry(attempts=1))  # type: ignore[arg-type]
        handle = memory.plans.submit(Plan("x", (step,)))
        bench.advance(60)
        assert handle.status().is_final


@pytest.mark.ledgers("sqlite")
def test_a_retry_that_looks_for_drift_is_refused_if_a_done_step_is_gone(app: App) -> None:
    tasks = Tasks(app)
    tasks.bad.add("f")
    once = StepRetry(attempts=1)
    steps = (
        tasks.step("a", check=tasks.ask.of("a")),
        tasks.step("p", kind="pivot", after=["a"]),
        tasks.step("f", kind="forward", after=["p"], retry=once),
    )
    handle = app.plans.submit(Plan("d", steps))
    app.run(queues=("node/*",), burst=True)
    assert handle.status().state is PlanState.PARKED
    tasks.bad.clear()
    with working(app, queues=("node/*",)):
        with pytest.raises(PlanRefused, match="not applied any more: a"):
            handle.retry(drift=True, timeout=30)
        tasks.answers["a"] = "applied"
        handle.retry(drift=True, timeout=30)
        assert handle.wait(timeout=30).state is PlanState.DONE
