"""The backend for Django's Tasks framework: results, failures, signals, settings."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import override_settings

from tests.contrib.django.conftest import Project
from tests.contrib.django.shop import tasks
from towpath.commands import Claim, Want
from towpath.contrib.django import TowpathBackend, towpath_app
from towpath.contrib.django.compat import (
    TaskResultDoesNotExist,
    task_enqueued,
    task_finished,
    task_started,
)
from towpath.errors import LostClaim


@pytest.fixture
def shop(project: Project, url: str) -> Any:
    project.tasks({"url": url})
    return towpath_app()


def test_a_task_runs_and_its_result_is_read(shop: Any) -> None:
    result = tasks.price.enqueue("apple", count=2)
    assert (result.status, result.is_finished, result.args) == ("READY", False, ["apple"])
    assert result.enqueued_at is not None
    shop.run(burst=True)
    result.refresh()
    assert result.status == "SUCCESSFUL"
    assert result.return_value == {"item": "apple", "price": 6}
    assert result.attempts == 1
    assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
    assert tasks.price.get_result(result.id).kwargs == {"count": 2}


def test_coroutines_enqueue_run_and_read(shop: Any) -> None:
    async def main() -> Any:
        result = await tasks.aprice.aenqueue("pear")
        await shop.arun(burst=True)
        await result.arefresh()
        return result

    result = asyncio.run(main())
    assert (result.status, result.return_value) == ("SUCCESSFUL", "PEAR")


def test_a_failure_has_its_class_and_traceback(shop: Any) -> None:
    result = tasks.refuse.enqueue("plum")
    shop.run(burst=True)
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 1)
    [error] = result.errors
    assert error.exception_class is tasks.OutOfStock
    assert error.traceback.startswith("Traceback (most recent call last):")
    assert error.traceback.rstrip().endswith("OutOfStock: plum")
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


@pytest.mark.ledgers("sqlite")
@pytest.mark.parametrize(
    ("how", "name", "text"),
    [
        ("fail", "towpath.Fail", "no such order"),
        ("cancel", "towpath.errors.JobCanceled", "canceled: handler, no such order"),
    ],
)
def test_a_task_that_ends_itself_has_failed(shop: Any, how: str, name: str, text: str) -> None:
    result = tasks.reject.enqueue(how)
    shop.run(burst=True)
    result.refresh()
    assert result.status == "FAILED"
    assert [(error.exception_class_path, error.traceback) for error in result.errors] == [(name, text)]
    assert issubclass(result.errors[0].exception_class, Exception)


@pytest.mark.ledgers("memory")
def test_a_builtin_exception_and_a_result_that_is_no_json(shop: Any) -> None:
    result = tasks.unserializable.enqueue()
    wrong = tasks.price.enqueue()
    shop.run(burst=True)
    result.refresh()
    wrong.refresh()
    assert result.errors[0].exception_class is wrong.errors[0].exception_class is TypeError
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.price.enqueue(object())


@pytest.mark.ledgers("memory", "sqlite")
def test_a_task_with_more_attempts_is_tried_again(shop: Any) -> None:
    result, never = tasks.flaky.enqueue("fig"), tasks.aflaky.enqueue()
    shop.run(burst=True)
    shop.run(burst=True)
    result.refresh()
    never.refresh()
    assert (result.status, result.return_value, result.attempts) == ("SUCCESSFUL", 3, 3)
    assert [error.exception_class for error in result.errors] == [tasks.OutOfStock] * 2
    assert "fig, attempt 2" in result.errors[1].traceback
    assert result.started_at < result.last_attempted_at
    assert (never.status, never.attempts, len(never.errors)) == ("FAILED", 2, 2)


@pytest.mark.ledgers("memory")
def test_the_options_of_the_backend_hold_for_every_task(project: Project, url: str) -> None:
    project.tasks({"url": url, "max_attempts": 2, "backoff": 3600})
    shop = towpath_app()
    result = tasks.refuse.enqueue("plum")
    shop.run(burst=True)
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == ("READY", 1, 1)
    assert shop.job(result.id).status().max_attempts == 2


@pytest.mark.ledgers("memory")
def test_a_task_gets_its_context(shop: Any) -> None:
    result = tasks.describe.enqueue("apple")
    shop.run(burst=True)
    result.refresh()
    assert result.return_value == ["apple", 1, "RUNNING", ["apple"], "default", 1]


def test_a_higher_priority_runs_sooner(shop: Any) -> None:
    for priority in (-100, 0, 100, 50):
        tasks.leave.using(priority=priority).enqueue(str(priority))
    shop.run(burst=True, concurrency=1)
    assert tasks.ran == ["100", "50", "0", "-100"]


@pytest.mark.ledgers("sqlite")
def test_a_result_has_the_options_of_its_call(shop: Any) -> None:
    later = datetime(2100, 1, 1, tzinfo=UTC)
    result = tasks.mail.using(run_after=later, priority=-9).enqueue("ada")
    tasks.mail.using(run_after=later - timedelta(days=365 * 100)).enqueue("bob")
    shop.run(burst=True)
    found = tasks.mail.get_result(result.id)
    assert (found.status, found.attempts) == ("READY", 0)
    assert (found.task.queue_name, found.task.priority, found.task.run_after) == ("mail", -9, later)
    assert shop.job(result.id).status().ready_at == later
    assert shop.queue("mail").stats().counts.done == 1


@pytest.mark.ledgers("memory")
def test_the_worker_consumes_the_queues_of_the_setting(project: Project, url: str) -> None:
    project.tasks({"url": url}, QUEUES=["default"])
    shop = towpath_app()
    tasks.price.enqueue("apple")
    shop.tasks[tasks.mail.module_path].options(queue="mail").enqueue({"args": ["ada"]})
    shop.run(burst=True)
    assert [shop.queue(name).stats().counts.done for name in ("default", "mail")] == [1, 0]
    with pytest.raises(Exception, match="Queue 'mail' is not valid for backend"):
        tasks.mail.enqueue("ada")
    project.tasks({"url": url}, QUEUES=[])
    shop = towpath_app()
    tasks.price.using(queue_name="any").enqueue("apple")
    shop.run(burst=True)
    assert shop.queue("any").stats().counts.done == 1


@pytest.mark.ledgers("memory")
def test_only_results_of_the_alias_and_the_task_are_read(project: Project, url: str) -> None:
    project.tasks({"url": url})
    shop = towpath_app()

    @shop.task(name="other")
    def other() -> None: ...

    here = tasks.price.enqueue("apple")
    there = shop.tasks[tasks.price.module_path].enqueue({"args": ["apple"], "backend": "another"})
    for id in (there.id, other.enqueue().id, "unknown", "0" * 300, ""):
        with pytest.raises(TaskResultDoesNotExist):
            tasks.price.get_result(id)
    with pytest.raises(Exception, match="Task does not match"):
        tasks.mail.get_result(here.id)


@pytest.mark.ledgers("memory")
def test_signals_of_a_call(shop: Any) -> None:
    seen: list[Any] = []

    def note(name: str, signal: Any) -> None:
        def receive(sender: type, task_result: Any, **_: Any) -> None:
            errors = [each.exception_class.__name__ for each in task_result.errors]
            seen.append((name, sender, task_result.task.name, task_result.status, errors))
            if name == "finished":
                raise RuntimeError("a receiver fails")

        signal.connect(receive, weak=False, dispatch_uid="test")

    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    for name, signal in signals.items():
        note(name, signal)
    try:
        for call in (tasks.price.enqueue, tasks.refuse.enqueue, tasks.aprice.enqueue, tasks.flaky.enqueue):
            result = call("apple")
            shop.run(burst=True)
            shop.run(burst=True)
            result.refresh()
            assert result.is_finished
    finally:
        for signal in signals.values():
            signal.disconnect(dispatch_uid="test")
    assert {sender for _, sender, *_ in seen} == {TowpathBackend}
    shown = [(name, task, str(status), errors) for name, _, task, status, errors in seen]
    one = ["OutOfStock"]
    assert shown == [
        *ended("price", "SUCCESSFUL", []),
        *ended("refuse", "FAILED", one),
        *ended("aprice", "SUCCESSFUL", []),
        *ended("flaky", "SUCCESSFUL", [])[:2],
        ("started", "flaky", "RUNNING", one),
        ("started", "flaky", "RUNNING", one * 2),
        ("finished", "flaky", "SUCCESSFUL", one * 2),
    ]


def ended(task: str, status: str, errors: list[str]) -> list[Any]:
    return [
        ("enqueued", task, "READY", []),
        ("started", task, "RUNNING", []),
        ("finished", task, status, errors),
    ]


@pytest.mark.ledgers("memory")
def test_tasks_run_inline_in_tests(shop: Any) -> None:
    with shop.testing() as bench:
        result = tasks.flaky.enqueue("fig")
        bench.drain()
        result.refresh()
        assert (result.return_value, result.attempts) == (3, 3)


@pytest.mark.ledgers("memory")
def test_a_task_of_a_lost_worker_has_failed_or_runs_again(shop: Any) -> None:
    with shop.testing() as bench:
        once, again = tasks.price.enqueue("apple"), tasks.flaky.enqueue("fig")
        shop.engine.call(Claim(owner="gone#1", wants=(Want("*", 2),), lease=1_000_000))
        once.refresh()
        assert (once.status, once.worker_ids) == ("RUNNING", ["gone#1"])
        bench.advance(3600)
        once.refresh()
        again.refresh()
    assert (once.status, once.worker_ids, again.status) == ("FAILED", ["gone#1"], "SUCCESSFUL")
    assert once.errors[0].exception_class is again.errors[0].exception_class is LostClaim


@pytest.mark.ledgers("memory")
def test_times_are_naive_without_time_zones(shop: Any) -> None:
    with override_settings(USE_TZ=False):
        result = tasks.price.using(run_after=datetime(2000, 1, 1)).enqueue("apple")
        shop.run(burst=True)
        result.refresh()
        assert result.status == "SUCCESSFUL"
        assert result.enqueued_at.tzinfo is result.finished_at.tzinfo is None
        assert tasks.price.get_result(result.id).task.run_after == datetime(2000, 1, 1)
