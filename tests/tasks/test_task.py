"""Tasks: from a call to a spec, and from the end of an attempt to an outcome."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import towpath
from tests.support.running import work
from towpath import App, Call, Cancel, Exponential, Fail, Policy, Retry, Snooze, State, Task, commands
from towpath.commands import Spec
from towpath.core.checks import MAX_PAYLOAD, SECOND
from towpath.core.job import After, ClaimedJob, KeyPolicy
from towpath.core.retry import Fixed
from towpath.errors import InvalidInput, UnknownDependency
from towpath.tasks import outcomes
from towpath.tasks.codec import AFTER
from towpath.tasks.task import MAX_TRACE, failure_text, outcome_of


def add(a: int, b: int = 2) -> int:
    return a + b


async def later(a: int) -> int:
    return a


def spec(task: Task[..., Any], *args: Any, **kwargs: Any) -> Spec:
    return task.spec_for(args, kwargs)


@pytest.fixture
def still() -> App:
    """Nothing is opened for these."""
    return App("memory://")


def test_a_plain_decorator(still: App) -> None:
    task = still.task(add)
    assert (task.kind, task.queue, task.is_async, task.process) == (
        "tests.tasks.test_task.add",
        "default",
        False,
        False,
    )
    assert (task.__name__, task.__doc__, task(1)) == ("add", None, 3)
    assert still.tasks == {task.kind: task}
    assert asyncio.run(still.task(later)(5)) == 5


def test_the_spec(still: App) -> None:
    options: dict[str, Any] = {
        "name": "sum",
        "queue": "math",
        "max_attempts": 3,
        "timeout": 1.5,
        "priority": "high",
        "retention": timedelta(days=1),
    }
    task = still.task(**options)(add)
    made = spec(task, 1, b=5)
    assert (made.kind, made.queue, made.payload) == ("sum", "math", b'{"a":1,"b":5}')
    assert (made.max_attempts, made.timeout, made.priority, made.retention) == (
        3,
        1_500_000,
        0,
        86_400 * SECOND,
    )
    assert made.id != spec(task, 1, b=5).id
    assert task.timeout == 1.5


def test_a_second_call_differs_in_id_and_payload_alone(still: App) -> None:
    task = still.task(queue="math", priority="high")(add)
    first, second = spec(task, 1), spec(task, 2)
    assert second == msgspec.structs.replace(first, id=second.id, payload=b'{"a":2}')
    assert first.payload == b'{"a":1}'
    assert spec(task.options(queue="other"), 3).queue == "other"
    assert spec(task, 4).queue == "math"


def test_a_second_call_is_checked_like_the_first(still: App) -> None:
    def say(text: str) -> None: ...

    task = still.task(say)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="payload"):
            spec(task, "x" * MAX_PAYLOAD)
        spec(task, "x")


def test_options(still: App) -> None:
    task = still.task(add)
    changed = task.options(
        delay=2,
        ttl=3,
        priority=7,
        queue="other",
        headers={"h": "x"},
        correlation_id="c",
        id="me",
        max_attempts=1,
    )
    made = spec(changed, 1)
    assert (made.delay, made.ttl, made.priority, made.queue, dict(made.headers)) == (
        2 * SECOND,
        3 * SECOND,
        7,
        "other",
        {"h": "x"},
    )
    assert (made.correlation_id, made.id, made.max_attempts) == ("c", "me", 1)
    more = spec(changed.options(headers={"i": "y"}, timeout=None, retention=0), 1)
    assert (dict(more.headers), more.delay, more.timeout, more.retention) == (
        {"h": "x", "i": "y"},
        2 * SECOND,
        None,
        0,
    )
    assert spec(task, 1).delay == 0


def test_a_time_of_day(still: App) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    task = still.task(add)
    assert spec(task.options(at=at), 1).ready_at == int(at.timestamp()) * SECOND
    with pytest.raises(InvalidInput, match="time zone"):
        task.options(at=datetime(2030, 1, 1))


def test_dependencies(still: App) -> None:
    task = still.task(add)
    made = spec(task.options(after=[still.job("x"), "y", After("z", run_anyway=True)]), 1)
    assert made.after == (After("x"), After("y"), After("z", run_anyway=True))
    assert made.headers[AFTER] == "x,y,z"
    assert spec(task.options(after=still.job("x")), 1).after == (After("x"),)
    anyway = [After(still.job("x"), run_anyway=True), After(still.group(id="g"))]
    assert spec(task.options(after=anyway), 1).after == (After("x", run_anyway=True), After("g", group=True))
    assert AFTER not in spec(task.options(after=[]), 1).headers


def user_key(a: int, b: int = 2) -> str:
    return f"{a}/{b}"


def test_keys(still: App) -> None:
    def key(**options: Any) -> Any:
        task = still.task(
            name=f"t{len(still.tasks)}",
            **{name: options.pop(name) for name in ("unique", "part") if name in options},
        )(add)
        made = spec(task.options(**options) if options else task, 1)
        return made.key and (made.key.name, made.key.policy, made.key.window), made.part

    assert key() == (None, None)
    assert key(unique="{a}-{b}") == (("t1:1-2", KeyPolicy.UNIQUE, 0), None)
    assert key(unique=user_key) == (("t2:1/2", KeyPolicy.UNIQUE, 0), None)
    assert key(key="mine", on_conflict="replace") == (("mine", KeyPolicy.REPLACE, 0), None)
    assert key(unique="{a}", on_conflict="serial") == (("t4:1", KeyPolicy.SERIAL, 0), None)
    assert key(key="k", window=5) == (("k", KeyPolicy.UNIQUE, 5 * SECOND), None)
    assert key(part="tenant-{a}") == (None, "tenant-1")
    assert key(part=user_key) == (None, "1/2")


def test_unique_by_all_arguments(still: App) -> None:
    task = still.task(unique=True)(add)
    keys = [spec(task, 1).key, spec(task, a=1, b=2).key, spec(task, 1, 3).key]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique": "{nobody}"}, "nobody"),
        ({"part": "{a.b}"}, "template"),
        ({"part": lambda a, b=2: 5}, "part of"),
        ({"colour": 1}, "colour"),
        ({"queue": "a b"}, "queue"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"priority": "urgent"}, "priority"),
        ({"timeout": -1}, "timeout"),
        ({"backoff": "soon"}, "backoff"),
        ({"backoff": []}, "backoff"),
    ],
)
def test_bad_options_of_a_task(still: App, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        spec(still.task(**options)(add), 1)


@pytest.mark.parametrize(
    "options",
    [
        {"delay": -1},
        {"ttl": float("nan")},
        {"colour": 1},
        {"on_conflict": "fight"},
        {"after": [5]},
        {"max_attempts": 0},
    ],
)
def test_bad_options_of_a_call(still: App, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(options))):
        still.task(add).options(**options)


def test_a_name_is_taken_once(still: App) -> None:
    still.task(add)
    with pytest.raises(InvalidInput, match=r"tests\.tasks\.test_task\.add"):
        still.task(add)


def test_not_everything_is_a_task(still: App) -> None:
    def numbers():  # type: ignore[no-untyped-def]  # noqa: ANN202
        yield 1

    with pytest.raises(InvalidInput, match="is a generator"):
        still.task(numbers)
    with pytest.raises(InvalidInput, match="a function"):
        still.task(5)  # type: ignore[call-overload]


FURTHER_DOWN = """
from __future__ import annotations
from dataclasses import dataclass
@app.task
def takes(thing: Thing) -> None: ...
@dataclass
class Thing:
    x: int
"""


def test_a_type_defined_further_down(still: App) -> None:
    module = types.ModuleType("further_down")
    vars(module)["app"] = still
    sys.modules["further_down"] = module
    exec(FURTHER_DOWN, vars(module))
    assert spec(module.takes, module.Thing(1)).payload == b'{"thing":{"x":1}}'
    del sys.modules["further_down"]


@pytest.mark.parametrize(
    ("backoff", "delay"),
    [
        (5, 5),
        (timedelta(minutes=1), 60),
        ([1, 2], 2),
        (Fixed(7), 7),
        (Policy(Fixed(8)), 8),
        (Exponential(10, jitter=0), 20),
    ],
)
def test_backoff(still: App, backoff: Any, delay: float) -> None:
    assert still.task(backoff=backoff)(add).policy.delay(ValueError(), 2, lambda: 0.5) == delay


# Enqueue


def test_enqueue(app: App) -> None:
    task = app.task(add)
    handle = task.enqueue(1)
    assert handle.status().state is State.READY
    many = task.enqueue_many(task.of(n) for n in range(5))
    assert work(app) == 6
    assert (handle.result(1), [each.result(1) for each in many]) == (3, [2, 3, 4, 5, 6])
    assert task.enqueue_many([]) == []


def test_aenqueue(app: App) -> None:
    task = app.task(later)

    async def main() -> list[int]:
        one = await task.aenqueue(1)
        many = await task.aenqueue_many([task.of(2), task.of(3)])
        await asyncio.to_thread(work, app)
        return [await one.aresult(1), *[await each.aresult(1) for each in many]]

    assert asyncio.run(main()) == [1, 2, 3]


def test_nothing_is_written_if_the_arguments_do_not_fit(app: App) -> None:
    task: Any = app.task(add)
    wrongs: list[Callable[[], Any]] = [
        lambda: task.enqueue("x"),
        lambda: task.of(1, 2, 3),
        lambda: asyncio.run(task.aenqueue(c=1)),
    ]
    for wrong in wrongs:
        with pytest.raises(InvalidInput):
            wrong()
    assert app.ledger.queues() == {}


def test_the_second_of_a_unique_key_is_the_first(app: App) -> None:
    task = app.task(unique="{a}")(add)
    first = task.enqueue(1)
    assert task.enqueue(1, 5).id == first.id
    assert task.enqueue(2).id != first.id


def test_an_unknown_dependency_is_refused(app: App) -> None:
    with pytest.raises(UnknownDependency, match="nowhere"):
        app.task(add).options(after="nowhere").enqueue(1)


def test_a_call_used_twice_makes_two_jobs(app: App) -> None:
    task = app.task(add)
    call = task.of(1)
    assert isinstance(call, Call)
    first, second = task.enqueue_many([call, call])
    assert first.id != second.id


# How an attempt ends


def running(app: App, task: Task[..., Any], *args: Any) -> ClaimedJob:
    task.enqueue(*args)
    answer = app.engine.call(commands.Claim(owner="me", wants=(commands.Want("*"),), lease=SECOND))
    assert isinstance(answer, commands.Claimed)
    return answer.claims[0]


def half() -> float:
    return 0.5


def boom(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_outcomes() -> None:
    with App("memory://") as app:
        task = app.task(backoff=[1, 2])(add)
        job = running(app, task, 1).job
        assert task.decode(job) == ((), {"a": 1})
        assert outcome_of(task, job, 5) == commands.Done(b"5")
        assert outcome_of(task, job) == commands.Done(None)
        assert outcome_of(task, job, error=Snooze(5)) == commands.SnoozeOutcome(5 * SECOND)
        assert outcome_of(task, job, error=Snooze(for_=timedelta(seconds=5))) == commands.SnoozeOutcome(
            5 * SECOND
        )
        assert outcome_of(task, job, error=Cancel("enough")) == commands.Stop(error="enough")
        assert outcome_of(task, job, error=Fail("never")) == commands.FailOutcome(error="never")
        retry = outcome_of(task, job, error=Retry("busy", after=9))
        assert isinstance(retry, commands.RetryOutcome)
        assert retry.delay == 9 * SECOND
        assert "busy" in (retry.error or "")
        for error in (
            ValueError("x"),
            Retry("x"),
            KeyboardInterrupt("x"),
            SystemExit(1),
            asyncio.CancelledError(),
        ):
            outcome = outcome_of(task, job, error=boom(error), chance=half)
            assert isinstance(outcome, commands.RetryOutcome)
            assert outcome.delay == SECOND
        assert (Retry(after=timedelta(minutes=2)).after, Snooze(5).for_) == (120.0, 5.0)


def test_a_result_that_cannot_be_stored_fails_the_job() -> None:
    with App("memory://") as app:
        task = app.task(add)
        outcome = outcome_of(task, running(app, task, 1).job, object())
        assert isinstance(outcome, commands.FailOutcome)
        assert "what tests.tasks.test_task.add returned" in (outcome.error or "")


class TextlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def recursion(n: int) -> None:
    recursion(n + 1)


def deep() -> BaseException:
    try:
        recursion(0)
    except RecursionError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "make",
    [
        lambda: boom(ValueError("\0 and \ud800")),
        lambda: boom(ValueError("x" * 100_000)),
        lambda: boom(TextlessError()),
        deep,
        lambda: boom(ExceptionGroup("many", [ValueError(str(n)) for n in range(100)])),
        ValueError,
    ],
)
def test_every_error_has_a_text(make: Callable[[], BaseException]) -> None:
    text = failure_text(make())
    assert 0 < len(text) <= MAX_TRACE * 6
    assert commands.RetryOutcome(error=text).error == text


def test_the_text_of_a_failure_has_the_traceback() -> None:
    text = failure_text(boom(ValueError("bad luck")))
    assert text.splitlines()[0] == "ValueError: bad luck"
    assert "in boom" in text


def test_control_exceptions_check_their_times() -> None:
    for wrong in (lambda: Retry(after=-1), lambda: Snooze(float("nan")), lambda: Snooze("soon")):  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            wrong()
    assert issubclass(towpath.Cancel, outcomes.Control)


def test_the_name_of_a_script_is_its_module(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import towpath\napp = towpath.App('memory://')\n@app.task\ndef pay() -> None: ...\n"
        "if __name__ == '__main__': print(pay.kind)\n"
    )
    for command in (["shop.py"], ["-m", "shop"]):
        ended = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert ended.stdout.strip() == "shop.pay"


def test_a_trace_travels_in_the_headers(still: App) -> None:
    task = still.task(add)
    assert "traceparent" not in spec(task, 1).headers
    span = TracerProvider().get_tracer("t").start_span("s")
    with trace.use_span(span):
        assert "traceparent" in spec(task, 1).headers
    assert "traceparent" not in spec(task, 1).headers
