"""Celery's vocabulary: a small Celery project, unchanged, and refused options with their replacements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import towpath
from tests.support.running import working
from towpath.contrib.celery import (
    Celery,
    CeleryOption,
    Retry,
    chain,
    chord,
    crontab,
    group,
    results,
    shared_task,
)
from towpath.errors import InvalidInput, JobFailed

HERE = Path(__file__).parent
PROJECT = """
import json, sys, threading
from towpath.contrib import celery as bridge
bridge.install()
from shop.celery import app
from shop import tasks

worker = threading.Thread(target=lambda: app.towpath.run(concurrency=4, queues=("*",)), daemon=True)
worker.start()
shown = {
    "delay": tasks.price.delay("apple", count=2).get(timeout=20),
    "later": tasks.price.apply_async(("pear",), countdown=0.01, queue="slow", priority=9).get(timeout=20),
    "chord": tasks.summary().get(timeout=20),
    "chain": tasks.checkout().get(timeout=20),
    "mail": tasks.order({"apple": 1, "pear": 1}).get(timeout=20),
}
ended = tasks.never.delay()
try:
    ended.get(timeout=20)
except Exception as error:
    shown["never"] = [type(error).__name__, ended.state, ended.job.status().failures]
broken = tasks.broken.delay("k")
try:
    broken.get(timeout=20)
except KeyError as error:
    shown["broken"] = [str(error), broken.job.status().failures]
shown["queues"] = sorted(app.towpath.ledger.queues())
shown["schedules"] = sorted(each.name for each in app.towpath.schedules.list())
app.towpath.close()
print(json.dumps(shown))
"""


def test_a_celery_project_runs_unchanged(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE), "SHOP_BROKER": f"sqlite:///{tmp_path}/shop.db"}
    ended = subprocess.run(
        [sys.executable, "-c", PROJECT], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {
        "delay": 6,
        "later": 4,
        "chord": "11 EUR",
        "chain": "charged 3 after 2 retries",
        "mail": None,
        "never": ["JobFailed", "FAILURE", 2],
        "broken": ["\"'k'\"", 2],
        "queues": ["default", "mail", "slow"],
        "schedules": ["nightly", "often"],
    }


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("tests", url="memory://")
    yield app
    app.close()
    results._current.clear()


def test_calls_run_here_without_the_ledger(app: Celery) -> None:
    @app.task(bind=True, max_retries=3)
    def flaky(self: Any, n: int) -> tuple[int, int]:
        if self.request.retries < n:
            raise self.retry(countdown=1000)
        return n, self.request.retries

    assert flaky.apply((2,)).get() == (2, 2)
    with pytest.raises(Retry):
        flaky(1)
    app.conf.task_always_eager = True
    assert flaky.delay(1).get() == (1, 1)
    assert app.towpath.ledger.queues() == {}


def test_a_chain_with_a_group_inside(app: Celery) -> None:
    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    @app.task
    def both(values: list[int]) -> list[int]:
        return sorted(values)

    @app.task
    def fixed() -> str:
        return "fixed"

    with app.towpath.testing() as bench:
        found = chain(add.s(1, 1), group(add.s(10), add.s(20)), both.s(), fixed.si())
        last = found()
        end = (add.s(1, 1) | add.s(3)).apply_async()
        three = group(add.s(n, n) for n in range(3))()
        bench.drain()
        assert last.get(0) == "fixed"
        assert end.get(0) == 5
        assert three.get(0) == [0, 2, 4]
        assert three.successful()
        assert len(three) == three.completed_count() == 3


def test_times_and_priorities(app: Celery) -> None:
    @app.task(priority=9, expires=60)
    def job() -> None: ...

    with app.towpath.testing():
        later = job.apply_async(eta=datetime.now(UTC) + timedelta(hours=1), priority=0, task_id="mine")
        soon = job.delay().job.status()
        record = later.job.status()
        assert (later.id, later.state, record.priority, soon.priority) == ("mine", "PENDING", 9, 0)
        assert record.ready_at - soon.ready_at > timedelta(minutes=50)
        assert soon.expires_at is not None
        later.revoke()
        assert later.state == "REVOKED"


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"rate_limit": "10/m"}, "towpath queues set"),
        ({"soft_time_limit": 3}, "current"),
        ({"base": object}, "a plain function"),
        ({"serializer": "pickle"}, "never pickled"),
        ({"unheard_of": 1}, "leave it out"),
    ],
)
def test_an_option_without_a_counterpart_is_refused_with_the_way(
    app: Celery, options: dict[str, Any], instead: str
) -> None:
    with pytest.raises(CeleryOption, match=instead):
        app.task(**options)(lambda: None)


@pytest.mark.parametrize(
    "options", [{"link": None}, {"link_error": None}, {"routing_key": "a"}, {"shadow": "b"}]
)
def test_an_option_of_a_call_is_refused_too(app: Celery, options: dict[str, Any]) -> None:
    @app.task
    def job() -> None: ...

    with pytest.raises(CeleryOption, match=f"call of .*job: {next(iter(options))}"):
        job.apply_async((), **options)


def test_a_shared_task_needs_an_app() -> None:
    results._current.clear()

    @shared_task
    def lonely() -> None: ...

    with pytest.raises(InvalidInput, match="app = Celery"):
        lonely.delay()


def test_mistakes(app: Celery) -> None:
    @app.task
    def job(values: Any = None) -> None: ...

    with pytest.raises(CeleryOption, match="a task that is imported here"):
        app.send_task("somewhere.else")
    with pytest.raises(InvalidInput, match="a body"):
        chord([job.s()])()
    with pytest.raises(InvalidInput, match="at least one signature"):
        group([])
    with pytest.raises(CeleryOption, match="towpath worker"):
        app.worker_main()
    assert app.send_task(job.name).state == "PENDING"
    assert crontab(minute="*/5").expression == "*/5 * * * *"


def test_get_inside_a_task_is_refused_as_in_celery(app: Celery) -> None:
    @app.task
    def child() -> int:
        return 1

    @app.task
    def parent(allowed: bool) -> Any:
        return child.delay().get(10, disable_sync_subtasks=not allowed)

    with working(app.towpath, concurrency=2):
        with pytest.raises(JobFailed, match="must not wait for another job"):
            parent.delay(False).get(30)
        assert parent.delay(True).get(30) == 1


def test_a_failure_is_not_retried_unless_asked(app: Celery) -> None:
    @app.task
    def fails() -> None:
        raise ValueError("no")

    class Own(Exception): ...

    @app.task
    def own() -> None:
        raise Own("mine")

    with app.towpath.testing() as bench:
        first, second = fails.delay(), own.delay()
        bench.drain()
        with pytest.raises(ValueError, match=r"^no$"):
            first.get(0)
        with pytest.raises(JobFailed, match="Own: mine"):
            second.get(0)
        assert first.job.status().attempts == 1
        assert isinstance(first.result, ValueError)
        assert "Traceback" in str(first.traceback)


WORKER = """
import sys
from towpath.contrib import celery
celery.install()
from towpath.cli import main
sys.exit(main(["worker", "shop.celery:app", "--burst"]))
"""


def test_the_worker_of_the_command_line_takes_a_celery_app(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(HERE), "SHOP_BROKER": f"sqlite:///{tmp_path}/shop.db"}
    enqueue = "from towpath.contrib import celery; celery.install(); from shop import celery as c, tasks; "
    for program in (enqueue + "print(tasks.price.delay('pear').id)", WORKER):
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
    with towpath.App(env["SHOP_BROKER"]) as app:
        assert app.ledger.queues()["default"].counts.done == 1
