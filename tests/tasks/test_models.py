"""Real pydantic models as arguments and results: alone, nested, in lists, with aliases, strict, and wrong
ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, computed_field

from towpath import App, State, current
from towpath.errors import InvalidInput, JobFailed
from towpath.testing.app import Bench

T = TypeVar("T")


class Item(BaseModel):
    name: str
    price: Annotated[float, Field(gt=0)]


class Order(BaseModel):
    id: UUID
    items: list[Item]
    note: str | None = None


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    id: UUID
    when: datetime
    tags: frozenset[str] = frozenset()


class Aliased(BaseModel):
    user_id: int = Field(alias="userId")
    colour: str = Field(validation_alias="color")
    shade: str = Field(default="", serialization_alias="SHADE")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.user_id


class Names(RootModel[list[str]]): ...


class Page(BaseModel, Generic[T]):
    found: list[T]


@dataclass
class Wrapped:
    """A model inside another type."""

    orders: dict[str, list[Order]]


ID = UUID("12345678-1234-5678-1234-567812345678")
ORDER = Order(id=ID, items=[Item(name="rope", price=2.5), Item(name="knot", price=1)])
STRICT = Strict(id=ID, when=datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC), tags=frozenset({"a"}))
ALIASED = Aliased.model_validate({"userId": 7, "color": "red"})

app = App("memory://")


@app.task
def one(order: Order) -> Order:
    assert type(order) is Order
    return order


@app.task
async def many(orders: list[Order], rest: Wrapped | None = None) -> dict[str, list[Order]]:
    return {"orders": orders, **(rest.orders if rest else {})}


@app.task
def strict(it: Strict, others: list[Strict]) -> tuple[Strict, list[Strict]]:
    return it, others


@app.task
def aliased(it: Aliased) -> Aliased:
    assert it.double == 14
    return it


@app.task
def odd(names: Names, page: Page[Item], maybe: Order | None = None) -> Page[Item]:
    return Page(found=[Item(name=name, price=1) for name in names.root] + page.found)


@app.task(max_attempts=2)
def lies(how: Literal["wrong", "price", "none", "unstorable"]) -> Order:
    if how == "price":
        return Order.model_construct(id=ID, items=[Item.model_construct(name="free", price=0.0)])
    if how == "unstorable":
        return Order.model_construct(id=ID, items=[], note=object())
    value: Any = {"id": "x"} if how == "wrong" else None
    return value  # type: ignore[no-any-return]


@app.task(max_attempts=1)
def reads() -> list[Any]:
    return current().results()


@app.task
def forgives() -> list[str]:
    return [type(each).__name__ for each in current().results(errors=True)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with app.testing() as bench:
        yield bench


def test_there_and_back(bench: Bench) -> None:
    other = Order(id=ID, items=[], note="ü")
    first, second = one.enqueue(ORDER), one.enqueue(order=other)
    listed = many.enqueue([ORDER, other], rest=Wrapped({"more": [ORDER]}))
    hard, named = strict.enqueue(STRICT, [STRICT]), aliased.enqueue(ALIASED)
    page = odd.enqueue(Names(["a"]), Page[Item](found=ORDER.items), maybe=other)
    bench.drain()
    assert (first.result(), second.result()) == (ORDER, other)
    assert listed.result() == {"orders": [ORDER, other], "more": [ORDER]}
    assert hard.result() == (STRICT, [STRICT])
    assert named.result() == ALIASED
    assert page.result() == Page[Item](found=[Item(name="a", price=1), *ORDER.items])
    assert type(page.result().found[0]) is Item


def test_what_is_stored_is_plain_json_by_field_name(bench: Bench) -> None:
    handle = aliased.enqueue(ALIASED)
    assert handle.record().payload == b'{"it":{"user_id":7,"colour":"red","shade":""}}'
    bench.drain()
    assert app.job(handle.id).result() == {"user_id": 7, "colour": "red", "shade": ""}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"id": str(ID), "items": [{"name": "x", "price": 0}]},
            r"one: argument order is .*: items\.0\.price: .*greater than 0$",
        ),
        ({"id": "no", "items": []}, r"one: argument order is .*: id: Input should be a valid UUID.*"),
        ({"items": 5}, r"id: Field required; items: Input should be a valid (list|array)$"),
        (7, r"one: argument order is 7: input should be an object"),
        (
            Order.model_construct(id=ID, items=[Item.model_construct(name="x", price=-1.0)]),
            r"items\.0\.price: ",
        ),
    ],
)
def test_an_invalid_argument_is_refused_at_enqueue(bench: Bench, value: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        one.enqueue(value)
    assert "\n" not in str(caught.value)
    assert bench.jobs() == []


def test_the_place_in_a_list_is_named(bench: Bench) -> None:
    bad = Order.model_construct(id=ID, items=[Item.model_construct(name="x", price=0.0)])
    with pytest.raises(
        InvalidInput, match=r"many: argument orders.*items\.0\.price: .*greater than 0 at orders\[1\]$"
    ):
        many.enqueue([ORDER, bad])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "wrong",
            (
                r"the result of .*lies is .*fits its return annotation: id: Input should be a valid UUID.*;"
                r" items: Field required"
            ),
        ),
        ("price", r"items\.0\.price: Input should be greater than 0"),
        (
            "none",
            r"the result of .*lies is None; it must be a value that fits its return annotation:"
            r" Input should be an object",
        ),
    ],
)
def test_a_result_that_does_not_fit_raises_for_its_reader(
    bench: Bench, how: Literal["wrong", "price", "none"], message: str
) -> None:
    handle = lies.enqueue(how)
    reader, group = reads.options(after=handle).enqueue(), app.group([lies.of(how)], then=forgives.of())
    bench.drain()
    assert (handle.status().state, handle.status().attempts) == (State.DONE, 1)
    with pytest.raises(InvalidInput, match=message):
        handle.result()
    with pytest.raises(InvalidInput, match=message):
        group.result()
    with pytest.raises(JobFailed, match=message):
        reader.result()
    assert group.then is not None
    assert group.then.result() == ["InvalidInput"]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_result_that_cannot_be_stored_is_a_dead_letter_at_once(bench: Bench) -> None:
    handle = lies.enqueue("unstorable")
    bench.advance(3600)
    job = handle.status()
    assert (job.state, job.reason, job.attempts) == (State.FAILED, "fatal", 1)
    with pytest.raises(
        JobFailed, match=r"what .*lies returned is Order\(.*stored as JSON: .*serialize unknown type"
    ):
        handle.result()
