"""Rollbacks of random plans, run by a worker: steps on several nodes, gates, failures with and without an
effect.

The handlers keep the set of effects that stand. A step must never run without the steps that it depends on,
and an undo must never take away a step on which another standing step depends."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from towpath import App, Fail, Plan, StepRetry
from towpath.flows.ordering import closure
from towpath.flows.plan import StepKind
from towpath.flows.rollback import undo_order


class World:
    """The effects of the steps of one plan. `fault`: the step that fails, before its effect or after it."""

    def __init__(self, app: App, chance: random.Random) -> None:
        self.app = app
        self.standing: set[str] = set()
        self.undone: list[str] = []
        self.after: dict[str, tuple[str, ...]] = {}
        self.fault = ""
        self.has_effect = chance.random() < 0.5
        self.wrong: list[str] = []

        @app.task(name="do")
        async def do(step: str) -> None:
            gone = self._needed(step) - self.standing
            if gone:
                self.wrong.append(f"{step} runs without {gone}")
            if step != self.fault or self.has_effect:
                self.standing.add(step)
            if step == self.fault:
                raise Fail("the fault")

        @app.task(name="undo")
        async def undo(step: str) -> None:
            rest = {other for other in self.standing if step in self._needed(other)}
            if rest:
                self.wrong.append(f"{step} is undone under {rest}")
            self.standing.discard(step)
            self.undone.append(step)

        self.do, self.undo = do, undo

    def _needed(self, step: str) -> set[str]:
        return closure(self.after, [step]) - self.gates

    @property
    def gates(self) -> set[str]:
        return {name for name in self.after if name.startswith("gate")}

    def plan(self, chance: random.Random, size: int) -> Plan:
        built = self.app.plans.new("random")
        names: list[str] = []
        for n in range(size):
            after = chance.sample(names, min(len(names), chance.choice((0, 1, 2, 3, 6))))
            if chance.random() < 0.1:
                names.append(built.gate(f"gate{n}", after=after).name)
            else:
                name = f"s{n}"
                node = f"n{chance.randrange(4)}"
                locks = ["l"] if chance.random() < 0.2 else []
                built.step(
                    name,
                    node,
                    self.do.of(name),
                    undo=self.undo.of(name),
                    after=after,
                    retry=StepRetry(attempts=1),
                    locks=locks,
                )
                names.append(name)
        self.fault = chance.choice([name for name in names[size // 2 :] if name.startswith("s")])
        plan = built.built
        self.after = {step.name: step.after for step in plan.resolved()}
        return plan


@pytest.fixture
def app() -> Iterator[App]:
    with contextlib.closing(App("memory://")) as app:
        yield app


@pytest.mark.parametrize("seed", range(12))
def test_a_random_plan_is_rolled_back(app: App, seed: int) -> None:
    chance = random.Random(seed)
    world = World(app, chance)
    plan = world.plan(chance, chance.choice((5, 20, 60)))
    handle = app.plans.submit(plan, id="random")
    for _ in range(len(world.gates) + 2):
        app.run(queues=("node/*",), concurrency=4, burst=True)
        waiting = [
            step.name for step in handle.steps() if step.kind is StepKind.GATE and step.state == "scheduled"
        ]
        for gate in waiting if not handle.status().is_final else []:
            handle.approve(gate)
    status = handle.status()
    assert status.state == "rolled_back", status
    assert world.wrong == []
    assert world.standing == set()
    effects = sorted(
        step.name for step in handle.steps() if step.undo is not None and step.name not in world.gates
    )
    assert sorted(world.undone) == effects
    # The history of the ledger has the order of the pure function.
    for undo in undo_order(plan.resolved(), effects):
        behind = app.ledger.get(f"plan/random/{undo.step}/undo")
        for other in undo.after:
            before = app.ledger.get(f"plan/random/{other}/undo")
            assert behind is not None
            assert before is not None
            assert before.finished_at is not None
            assert behind.started_at is not None
            assert before.finished_at <= behind.started_at
