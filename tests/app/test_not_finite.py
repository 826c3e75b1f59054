"""JSON has no NaN and no infinity: such numbers are refused with their path wherever a value is stored, and
an empty key is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.running import work
from towpath import App, State, current
from towpath.commands import Key, Spec
from towpath.core.schedule import Schedule
from towpath.errors import InvalidInput, JobFailed
from towpath.operations.schedules import register


@dataclass
class Item:
    price: float | None
    name: str = "null"


class Model(BaseModel):
    size: float


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((1.0, {"a": [1, "NUMBER"]}), "args[1].a[1]"),
        ((None, Item(None), Item("NUMBER")), "args[2].price"),  # type: ignore[arg-type]
        (("NUMBER",), "args[0]"),
        ((("x", {"NUMBER"}),), "args[0][1][0]"),
    ],
)
def test_arguments(app: App, args: tuple[Any, ...], path: str, number: float) -> None:
    @app.task(name="sum")
    def total(*args: Any) -> None: ...

    with pytest.raises(InvalidInput) as refused:
        total.enqueue(*_with(args, number))
    expected = "it must be a finite number, since JSON has no NaN and no infinity"
    assert str(refused.value) == f"sum: argument {path} is {number}; {expected}"
    with pytest.raises(InvalidInput):
        total.of(*_with(args, number))
    assert app.ledger.queues() == {}


def _with(value: Any, number: float) -> Any:
    if isinstance(value, tuple | set | list):
        return type(value)(_with(each, number) for each in value)
    if isinstance(value, dict):
        return {name: _with(each, number) for name, each in value.items()}
    if isinstance(value, Item):
        return Item(_with(value.price, number))
    return number if value == "NUMBER" else value


def test_typed_arguments(app: App) -> None:
    @app.task(name="sum")
    def total(a: float, b: float | None = None, model: Model | None = None) -> None: ...

    for kwargs, path in [
        ({"a": math.nan}, "a"),
        ({"a": 1, "b": math.inf}, "b"),
        ({"a": 1, "model": Model(size=math.nan)}, "model.size"),
    ]:
        with pytest.raises(
            InvalidInput, match=rf"^sum: argument {path} is (nan|inf); it must be a finite number"
        ):
            total.enqueue(**kwargs)  # type: ignore[arg-type]
    assert total.enqueue(1.5, None).record().payload == b'{"a":1.5,"b":null}'


def test_a_result_fails_its_job(app: App) -> None:
    @app.task(name="mean")
    def mean() -> Any:
        return {"of": [0.5, None, math.nan]}

    handle = mean.enqueue()
    work(app)
    job = handle.status()
    assert (job.state, job.result) == (State.FAILED, None)
    with pytest.raises(JobFailed, match=r"mean\(\)\.of\[2\] is nan; it must be a finite number"):
        handle.result(0)


def test_what_a_handler_keeps(app: App) -> None:
    @app.task
    def keep() -> list[str]:
        found = []
        for store in (current().checkpoint, current().state.save):
            with pytest.raises(InvalidInput) as refused:
                store({"at": [math.inf]})
            found.append(refused.value.details["field"])
        return found

    handle = keep.enqueue()
    work(app)
    assert handle.result(0) == ["cursor.at[0]", "state.at[0]"]


def test_messages_and_schedules(app: App) -> None:
    queue = app.queue("orders")
    for refused in (
        lambda: queue.put([{"price": math.nan}]),
        lambda: queue.put_many([None, [{"price": math.nan}]]),
    ):
        with pytest.raises(InvalidInput, match=r"^payload\[0\]\.price is nan"):
            refused()
    queue.put([None, "null"])
    with queue.get(wait=None) as message:
        with pytest.raises(InvalidInput, match=r"^result\[0\] is inf"):
            message.ack([math.inf])
        message.ack([0.5])
    register(
        app.engine,
        Schedule(name="often", spec=Spec(id="often", queue="orders", kind="tick"), every=60_000_000),
    )
    with pytest.raises(InvalidInput, match=r"^args\.n\[0\] is nan"):
        app.schedules.set("often", args={"n": [math.nan]})


def test_an_empty_key_is_refused(app: App) -> None:
    def act(n: int = 0) -> None: ...

    task = app.task(act)
    for options in ({"key": ""}, {"part": ""}):
        with pytest.raises(InvalidInput, match=r"(key|part).* is ''"):
            task.options(**options).enqueue()  # type: ignore[arg-type]
    namings: list[dict[str, Any]] = [{"unique": ""}, {"part": ""}, {"route": ""}, {"unique": lambda n: ""}]
    for n, naming in enumerate(namings):
        with pytest.raises(InvalidInput, match=" is ''"):
            app.task(name=f"act{n}", **naming)(act).enqueue(1)
    with pytest.raises(InvalidInput, match=r"key.* is ''"):
        app.queue("orders").put(1, key="")
    with pytest.raises(InvalidInput, match=r"key.* is ''"):
        Spec(id="a", queue="orders", key=Key(""))
    assert app.ledger.queues() == {}
