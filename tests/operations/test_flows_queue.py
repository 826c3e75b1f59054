"""The queue of flows beside the queues of a worker: claimed when it has ready jobs, and free when it has
none."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.running import working
from towpath import App, Lane
from towpath.core.commands import Claim, Command
from towpath.core.lanes import FLOWS
from towpath.flows.kinds import PlanState
from towpath.ledger import HasFastPaths


def submit(app: App, id: str) -> None:
    @app.task(name=f"nothing-{id}", queue="own")
    async def nothing() -> None: ...

    plan = app.plans.new("p")
    plan.step("a", "n1", nothing.of(), undo=nothing.of())
    plan.submit(id=id)


def claims_of(app: App, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The queues of all claims from now on."""
    claimed: set[str] = set()
    apply = app.ledger.apply

    def recorded(commands: Sequence[Command], now: int | None = None) -> Any:
        claimed.update(want.queue for each in commands if isinstance(each, Claim) for want in each.wants)
        return apply(commands, now)

    monkeypatch.setattr(app.ledger, "apply", recorded)
    return claimed


@pytest.mark.ledgers("sqlite", "postgres")
def test_plain_jobs_take_the_fast_paths(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task(queue="plain")
    async def plain(number: int) -> None: ...

    claimed = claims_of(app, monkeypatch)
    assert isinstance(app.ledger, HasFastPaths)
    paths = app.ledger.fast_paths
    if app.url.startswith("sqlite"):
        with working(app, concurrency=8):
            for n in range(50):
                plain.enqueue(n).result(timeout=30)
        # An append with its claim is one short transaction.
        assert paths.taken["append_claim"] > 25
    else:
        plain.enqueue_many([plain.of(n) for n in range(2000)])
        app.run(burst=True, concurrency=8)
        # Ends and the next claim are one statement, apart from batches with other commands.
        assert paths.taken["worker"] > 10
    assert claimed == {"plain"}, "a claim from one queue is the fast path"
    assert not paths.failed


@pytest.mark.ledgers("postgres")
def test_only_a_claim_of_a_coordinator_leaves_the_fast_path(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()

    @app.task(queue="own")
    async def plain(number: int) -> None:
        if number == 499:
            done.set()

    submit(app, "x")
    with working(app, queues=("node/n1",)):
        assert app.plans.get("x").wait(timeout=30).state is PlanState.DONE
    claimed = claims_of(app, monkeypatch)
    plain.enqueue_many([plain.of(n) for n in range(500)])
    with working(app, queues=("own",)):
        assert done.wait(30)
    assert claimed == {"own"}


def test_a_worker_of_other_queues_runs_the_coordinator(app: App) -> None:
    """The worker of the node has ended when the plan is decided; a worker of another queue goes on."""
    submit(app, "x")
    with working(app, queues=("node/n1",)), working(app, queues=("other",)):
        assert app.plans.get("x").wait(timeout=30).state is PlanState.DONE


def test_a_worker_with_lanes_runs_the_coordinator(app: App) -> None:
    submit(app, "x")
    lanes = {"first": Lane(queues=("node/n1",)), "second": Lane(queues=("other",))}
    with working(app, lanes=lanes):
        assert app.plans.get("x").wait(timeout=30).state is PlanState.DONE


def test_a_worker_with_resources_runs_the_coordinator(app: App) -> None:
    app.resource("service", max=4)

    @app.task(queue="called", resource="service")
    async def called() -> None: ...

    submit(app, "x")
    with working(app, queues=("called", "node/n1")):
        assert app.plans.get("x").wait(timeout=30).state is PlanState.DONE


def test_a_job_of_the_flows_is_explained_by_any_worker(app: App) -> None:
    submit(app, "x")
    with working(app, queues=("other",)):
        assert "waits for 1 group: plan/x" in str(app.ledger.explain("plan/x//next/0"))
    queue = app.ledger.queue(FLOWS)
    assert queue is not None
    assert queue.counts.blocked == 1
