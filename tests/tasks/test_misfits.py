"""Arguments that do not fit the signature: the job waits for a worker with other code, then it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

import towpath
from tests.support import handlers
from tests.support.processes import enqueue
from tests.support.running import working
from tests.support.waiting import WAIT, until
from towpath import App
from towpath.core.checks import SECOND
from towpath.core.job import FailOutcome, Job, Refuse
from towpath.core.retry import is_misfit, misfit, refused_again
from towpath.errors import JobFailed

HOUR = 3600 * SECOND


def stored(app: App, id: str) -> Job:
    return app.ledger.get_many([id])[id]


def replace_task(app: App, function: Callable[..., Any]) -> None:
    """Another version of the code: the task `t` with another signature."""
    app._registry.tasks.pop("t", None)
    app.task(name="t", max_attempts=2)(function)


def old(x: int) -> int:
    return x


def renamed(y: int) -> int:
    return y


def grown(x: int, more: str) -> int:
    return x


def retyped(x: list[str]) -> list[str]:
    return x


@pytest.mark.parametrize("other", [renamed, grown, retyped])
def test_a_job_waits_for_the_code_that_fits(other: Callable[..., Any]) -> None:
    app = App("memory://")
    replace_task(app, other)
    with app.testing() as bench:
        id = enqueue(app, "t", b'{"x": 1}').id
        bench.drain()
        first = stored(app, id)
        assert (first.state, first.reason, first.attempts, first.failures) == ("scheduled", "refused", 0, 0)
        assert is_misfit(first.error)
        bench.advance(1800)
        again = stored(app, id)
        assert again.state == "scheduled"
        assert (again.error or "").split(": ")[0] == (first.error or "").split(": ")[0]
        replace_task(app, old)
        bench.advance(60)
        assert (stored(app, id).state, stored(app, id).attempts) == ("done", 1)


def test_after_the_window_it_is_a_dead_letter() -> None:
    app = App("memory://")
    replace_task(app, renamed)
    with app.testing() as bench:
        id = enqueue(app, "t", b'{"x": 1}').id
        bench.drain()
        bench.advance(3590)
        assert stored(app, id).state == "scheduled"
        bench.advance(10)
        job = stored(app, id)
        assert (job.state, job.reason) == ("failed", "fatal")
        assert (job.error or "").startswith("the arguments do not fit: ")
        assert "No worker could run the job since" in (job.error or "")


def test_what_is_no_json_fails_at_once() -> None:
    app = App("memory://")
    replace_task(app, old)
    with app.testing() as bench:
        id = enqueue(app, "t", b"\xff").id
        bench.drain()
        assert (stored(app, id).state, stored(app, id).reason) == ("failed", "fatal")


@pytest.mark.ledgers("sqlite", "postgres")
def test_the_first_refusal_is_stored_with_the_job(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """A second worker reads it, and each kind is one warning."""
    replace_task(app, renamed)
    with caplog.at_level(logging.INFO, "towpath"):
        with working(app):
            ids = [enqueue(app, "t", b'{"x": 1}').id for _ in range(2)]
            until(lambda: all(stored(app, id).reason == "refused" for id in ids))
        first = stored(app, ids[0])
        warned = [each for each in caplog.records if each.levelno == logging.WARNING]
        with working(app, deploy_window=1), pytest.raises(JobFailed, match="do not fit"):
            app.job(ids[0]).result(WAIT)
    since = (first.error or "").partition(" since ")[2].partition("Z")[0]
    assert f"since {since}Z;" in (stored(app, ids[0]).error or "")
    assert len(warned) == 1
    assert "waiting for a worker with the code that fits, until " in warned[0].getMessage()


def test_in_a_process() -> None:
    with handlers.app as app, working(app):
        id = enqueue(app, handlers.pid.kind, b'{"m": 1}').id
        until(lambda: stored(app, id).reason == "refused")
        assert is_misfit(stored(app, id).error)


def test_the_delay_grows_and_ends_with_the_window() -> None:
    at, error, delays = 0, None, []
    while isinstance(outcome := misfit("why", error, HOUR, at), Refuse):
        delays.append(outcome.delay // SECOND)
        at, error = at + outcome.delay, outcome.error
    assert isinstance(outcome, FailOutcome)
    assert at == HOUR
    assert delays[:3] == [2, 2, 2]
    assert max(delays) == 60
    assert len(delays) < 90
    assert isinstance(misfit("why", None, 0, 0), FailOutcome)
    assert isinstance(misfit("why", "the arguments do not fit, since yesterdayZ: x", HOUR, 0), Refuse)


@pytest.mark.parametrize("ratio", [None, 1.0])
def test_the_window_counts_from_the_first_refusal_across_a_breaker(ratio: float | None) -> None:
    """A worker with code that fits is stopped by an open breaker; that does not restart the window."""
    app = App("memory://")
    geo = towpath.Breaker("geo", failures=1, ratio=ratio, volume=1, cooldown=30)

    def guarded(x: int) -> int:
        with towpath.breaker(geo):
            raise ConnectionError("down")

    replace_task(app, renamed)
    with app.testing() as bench:
        id = enqueue(app, "t", b'{"x": 1}').id
        bench.drain()
        first = (stored(app, id).error or "").split(": ")[0]
        since = first.removeprefix("the arguments do not fit, since ")
        app.task(name="trip", max_attempts=1)(guarded).enqueue(1)
        bench.drain()
        replace_task(app, guarded)
        bench.advance(10)
        between = stored(app, id).error or ""
        assert between.startswith("breaker geo lets nothing through")
        assert between.endswith(f"; first refused at {since}")
        replace_task(app, renamed)
        bench.advance(3580)
        assert (stored(app, id).error or "").split(": ")[0] == first
        bench.advance(60)
        job = stored(app, id)
        assert (job.state, job.reason) == ("failed", "fatal")


def test_a_refusal_keeps_the_time_of_the_first_one() -> None:
    first = misfit("why", None, HOUR, 0).error
    busy = refused_again("resource x has no room now", first)
    assert busy == "resource x has no room now; first refused at 1970-01-01T00:00:00.000Z"
    assert refused_again("again", busy) == "again; first refused at 1970-01-01T00:00:00.000Z"
    assert refused_again("again", "ValueError: x") == "again"
    later = misfit("why", busy, HOUR, HOUR - SECOND)
    assert isinstance(later, Refuse)
    assert later.delay == SECOND
    for text in (f"{busy} or so", f"two lines\n{busy}"):
        restarted = misfit("why", text, HOUR, HOUR)
        assert isinstance(restarted, Refuse)
