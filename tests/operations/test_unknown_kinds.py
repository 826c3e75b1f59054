"""Rolling deployments: a worker leaves the kinds that it has refused to workers that have the task."""

from __future__ import annotations

import pytest

from tests.support.processes import enqueue
from tests.support.running import claimed, working
from tests.support.waiting import WAIT, until
from towpath import App, Lane
from towpath.core.checks import SECOND
from towpath.core.job import Job, Refuse
from towpath.core.retry import is_misfit, misfit, unknown_kind
from towpath.operations.startup import UnknownKinds
from towpath.tasks.attempt import Attempt
from towpath.testing.clock import ManualClock


def nothing() -> int:
    return 0


def stored(app: App, id: str) -> Job:
    return app.ledger.get_many([id])[id]


@pytest.mark.ledgers("sqlite", "postgres")
@pytest.mark.parametrize("lanes", [False, True])
def test_a_refused_kind_is_left_to_others(app: App, url: str, lanes: bool) -> None:
    known = app.task(name="known")(nothing)
    chosen = {"lanes": {"all": Lane(queues=("default",))}} if lanes else {}
    with working(app, **chosen):
        first = enqueue(app, "new", b"{}").id
        until(lambda: stored(app, first).reason == "refused")
        left = [enqueue(app, "new", b"{}").id for _ in range(3)]
        assert known.enqueue().result(WAIT) == 0
        assert [(stored(app, id).state, stored(app, id).fence) for id in left] == [("ready", 0)] * 3
        until(lambda: stored(app, first).state == "ready")
        why = str(app.job(first).explain())
        assert "the last worker that claimed it refused it: no task here is called 'new', since 2" in why
        with App(url) as newer:
            newer.task(name="new")(nothing)
            with working(newer):
                assert [newer.job(id).result(WAIT) for id in (first, *left)] == [0] * 4
    assert [stored(app, id).fence for id in (first, *left)] == [2, 1, 1, 1]


@pytest.mark.ledgers("memory")
def test_a_task_that_is_added_later_is_claimed(app: App) -> None:
    with working(app):
        first = enqueue(app, "new", b"{}").id
        until(lambda: stored(app, first).reason == "refused")
        app.task(name="new")(nothing)
        assert app.job(first).result(WAIT) == 0


def test_a_burst_ends_beside_a_job_of_an_unknown_kind(app: App) -> None:
    ids = [enqueue(app, "new", b"{}").id for _ in range(3)]
    app.run(burst=True)
    assert [stored(app, id).reason for id in ids] == ["refused"] * 3


def test_the_deploy_window_counts_from_the_first_refusal() -> None:
    """Also if a worker without the task refuses the job in between."""
    clock = ManualClock()
    with App("memory://", clock=clock) as app, App("memory://", clock=clock) as older:
        task = app.task(name="t")(lambda y: y)
        id = enqueue(app, "t", b'{"x": 1}').id
        app.engine.call(Attempt(app._registry, claimed(app), task).run())
        first = stored(app, id).error or ""
        assert is_misfit(first)
        clock.set(clock.now() + 60 * SECOND)
        app.engine.call(UnknownKinds(older._registry).refuse(claimed(app)))
        assert (stored(app, id).error or "").startswith("no task here is called 't', since ")
        clock.set(clock.now() + 60 * SECOND)
        app.engine.call(Attempt(app._registry, claimed(app), task).run())
        assert (stored(app, id).error or "").split(": ")[0] == first.split(": ")[0]


def test_the_delay_of_an_unknown_kind_grows() -> None:
    at, error, delays = 0, None, []
    for _ in range(20):
        outcome = unknown_kind("k", error, at)
        delays.append(outcome.delay / SECOND)
        at, error = at + outcome.delay, outcome.error
    assert (delays[0], delays[-1]) == (1, 10)
    assert delays == sorted(delays)
    assert not is_misfit(error)
    later = misfit("why", error, 3600 * SECOND, at)
    assert isinstance(later, Refuse)
    assert "since 1970-01-01T00:00:00.000Z: why" in (later.error or "")
