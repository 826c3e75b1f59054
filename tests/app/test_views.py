"""The views for users: status of jobs, groups and queues, as values and as JSON; and the async form of every
method that waits for the ledger."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from datetime import UTC, date, datetime, timedelta

import msgspec
import pytest

from tests.support.running import work
from towpath import App, GroupHandle, JobHandle, Message, Queue, Reason, State, Task
from towpath.errors import JobCanceled, UnknownGroup, UnknownJob

NOTHING = None


def test_the_status_of_a_job(app: App) -> None:
    @app.task(name="bill", timeout=timedelta(minutes=1), max_attempts=3)
    def bill(day: date, cents: int = 5) -> dict[str, date]:
        return {"next": day + timedelta(days=1)}

    first = bill.enqueue(date(2026, 1, 31))
    later = bill.options(after=first, delay=60, key="k").enqueue(date(2026, 2, 1), cents=7)
    before = later.status()
    assert (before.state, before.kind, before.arguments) == (
        State.BLOCKED,
        "bill",
        {"day": date(2026, 2, 1), "cents": 7},
    )
    assert (before.after, before.after_groups, before.key) == ((first.id,), (), "k")
    assert (before.timeout, before.attempts, before.max_attempts, before.result) == (60.0, 0, 3, NOTHING)
    assert before.ready_at - before.created_at == timedelta(seconds=60)
    assert before.created_at.tzinfo is UTC
    assert abs(datetime.now(UTC) - before.created_at) < timedelta(hours=1)
    work(app)
    done = first.status()
    assert (done.state, done.reason, done.result, done.error) == (
        State.DONE,
        Reason.NONE,
        {"next": date(2026, 2, 1)},
        None,
    )
    assert done.finished_at is not None
    assert done.started_at is not None
    assert done.created_at <= done.started_at <= done.finished_at
    assert first.finished(0) == done
    assert first.record().finished_at == round(done.finished_at.timestamp() * 1_000_000)
    with pytest.raises(FrozenInstanceError):
        done.state = State.READY  # type: ignore[misc]
    with pytest.raises(UnknownJob):
        app.job("nowhere").status()


def test_values_of_a_task_that_is_not_known_or_has_changed_are_plain(app: App) -> None:
    @app.task(name="ship")
    def ship(day: date) -> date:
        return day

    job = ship.enqueue(date(2026, 1, 1))
    work(app)
    assert app.job(job.id).status().result == date(2026, 1, 1)
    del app._registry.tasks["ship"]
    plain = app.job(job.id).status()
    assert (plain.arguments, plain.result) == ({"day": "2026-01-01"}, "2026-01-01")

    @app.task(name="ship")
    def changed(weight: int) -> int:
        return weight

    changed_now = app.job(job.id).status()
    assert (changed_now.arguments, changed_now.result) == ({"day": "2026-01-01"}, "2026-01-01")
    message = app.job(app.queue("q").put(b"\xff")).status()
    assert (message.kind, message.arguments) == ("", None)


def test_views_are_json(app: App) -> None:

    @app.task(name="t")
    def task(day: date) -> int:
        return 1

    group = app.group([task.of(date(2026, 1, 1))])
    job, queue = group.jobs[0], app.queue("default")
    queue.configure(rate="5/m", retention=60)
    job.cancel()
    for view in (job.status(), job.explain(), group.status(), queue.stats()):
        plain = json.loads(json.dumps(view.as_dict()))
        assert plain == msgspec.json.decode(msgspec.json.encode(view)), view
    status = job.status().as_dict()
    assert status["arguments"] == {"day": "2026-01-01"}
    assert datetime.fromisoformat(status["created_at"]) == job.status().created_at
    assert job.explain().as_dict()["sentence"] == str(job.explain())
    assert queue.stats().as_dict()["retention"] == 60.0


def test_a_handle_on_a_group_by_its_id(app: App) -> None:
    @app.task(name="double")
    def double(n: int) -> int:
        return 2 * n

    app.group([double.of(1), double.of(2)], id="g")
    again: GroupHandle[int] = app.group(id="g")
    assert (again.jobs, again.status().total) == ((), 2)
    work(app)
    assert (again.result(1), again.closed(0).outcome) == ([2, 4], State.DONE)
    assert app.history(again) == app.history("g") == app.history()
    assert app.progress(again).group == again.status()
    assert app.job(app.job("x")).id == "x"
    with pytest.raises(UnknownGroup):
        app.group(id="nothing").status()
    with pytest.raises(ValueError, match=r"app.group\(id=...\) alone"):
        app.group()


def test_branches_of_a_group(app: App) -> None:
    broken = [True]

    @app.task(name="step", max_attempts=1)
    def step(n: int) -> int:
        if broken[0] and n == 2:
            raise ValueError(n)
        return n

    @app.task(name="report")
    def report(word: str) -> str:
        return word

    group = app.group([step.of(1), step.of(2)], then={"done": report.of("fine"), "failed": report.of("bad")})
    assert group.then is None
    assert sorted(group.branches) == ["done", "failed"]
    with pytest.raises(UnknownJob):
        group.branches["failed"].status()
    with pytest.raises(TimeoutError):
        group.branches["done"].result(0.01)
    work(app)
    assert group.branches["failed"].result(1) == "bad"
    with pytest.raises(JobCanceled, match="its group ended failed"):
        asyncio.run(group.branches["done"].aresult(1))
    broken[0] = False
    assert group.retry() == 1
    assert group.status().state == "sealed"
    work(app)
    assert (group.result(1), group.branches["done"].result(1)) == ([1, 2], "fine")
    assert asyncio.run(group.aretry()) == 0


# The async forms

PURE = {
    # No call of these waits for the ledger: they build values, read memory or register declarations.
    App: {
        *("url", "ledger", "bus", "settings", "bandwidth", "tasks", "task", "queue", "resource", "cron"),
        *("every", "schedules", "breakers", "job", "batch", "progress", "show_progress", "workers"),
        *("testing", "engine", "hooks"),
    },
    Task: {
        *("codec", "queue", "shuts_queue", "routed", "uses_hooks", "timeout", "options", "of", "spec_for"),
        *("decode", "codec_of", "decode_result", "call"),
    },
    JobHandle: set[str](),
    GroupHandle: set[str](),
    Queue: {"part", "subscribe"},
    Message: {
        *("job", "id", "payload", "headers", "content_type", "correlation_id", "attempt", "fence", "state"),
        # `chunks()` is for `for` and for `async for`.
        *("text", "json", "record", "size", "chunks"),
    },
}


def _verbs(kind: type) -> Iterator[str]:
    for name in dir(kind):
        if name.startswith("_") or name in PURE[kind] or not callable(getattr(kind, name)):
            continue
        yield name


@pytest.mark.parametrize("kind", PURE, ids=lambda kind: kind.__name__)
def test_every_verb_has_an_async_form_that_is_documented_alike(kind: type) -> None:
    verbs = set(_verbs(kind))
    forms = {name for name in verbs if inspect.iscoroutinefunction(getattr(kind, name))}
    assert {f"a{name}" for name in verbs - forms} == forms
    for name in sorted(verbs - forms):
        verb, form = getattr(kind, name), getattr(kind, f"a{name}")
        assert verb.__doc__, name
        if name != "run":
            assert form.__doc__ == verb.__doc__, name
        assert inspect.signature(form).parameters == inspect.signature(verb).parameters, name


def test_async_forms(app: App) -> None:
    @app.task(name="t")
    def task() -> int:
        return 1

    async def main() -> None:
        job = await task.aenqueue()
        assert await job.astatus() == job.status()
        assert await job.arecord() == job.record()
        assert await job.aexplain() == job.explain()
        group = await app.agroup([task.of()])
        assert await group.astatus() == group.status()
        assert await app.queue("default").astats() == app.queue("default").stats()
        assert await app.ahistory() == app.history()

    asyncio.run(main())
