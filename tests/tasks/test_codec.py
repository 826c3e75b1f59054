"""Arguments to JSON and back, by the types of a signature; a value that does not fit is refused with its
place."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.support.processes import enqueue
from towpath import App
from towpath.errors import InvalidInput
from towpath.tasks.codec import Codec, decode, encode


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0
    tags: set[str] = field(default_factory=set)


class Order(msgspec.Struct):
    id: UUID
    price: Decimal


class Pair(NamedTuple):
    left: int
    right: str


class Model(BaseModel):
    size: int


def everything(
    i: int,
    f: float,
    s: str,
    b: bytes,
    when: datetime,
    day: date,
    span: timedelta,
    id: UUID,
    price: Decimal,
    colour: Colour,
    points: list[Point],
    order: Order | None,
    pair: Pair,
    many: set[int],
    two: tuple[int, str],
    model: Model,
    kind: Literal["a", "b"],
    table: dict[str, list[int]],
    size: Annotated[int, msgspec.Meta(ge=0)] = 3,
    anything: Any = None,
) -> None: ...


def codec(function: Callable[..., Any]) -> Codec:
    return Codec(function, "t")


def again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    one = codec(function)
    return one.decode(one.encode(one.bind(args, kwargs)))


WHOLE = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WHEN = st.datetimes(timezones=st.just(UTC))
ARGUMENTS = st.fixed_dictionaries(
    {
        "i": WHOLE,
        "f": st.floats(allow_nan=False, allow_infinity=False),
        "s": TEXT,
        "b": st.binary(),
        "when": WHEN,
        "day": st.dates(),
        "span": st.timedeltas(timedelta(days=-1000), timedelta(days=1000)),
        "id": st.uuids(),
        "price": st.decimals(allow_nan=False, allow_infinity=False),
        "colour": st.sampled_from(Colour),
        "points": st.lists(st.builds(Point, WHOLE, WHOLE, st.sets(TEXT)), max_size=3),
        "order": st.none() | st.builds(Order, st.uuids(), st.decimals(allow_nan=False, allow_infinity=False)),
        "pair": st.builds(Pair, WHOLE, TEXT),
        "many": st.sets(WHOLE),
        "two": st.tuples(WHOLE, TEXT),
        "model": st.builds(Model, size=WHOLE),
        "kind": st.sampled_from(["a", "b"]),
        "table": st.dictionaries(TEXT, st.lists(WHOLE)),
    },
    optional={"size": st.integers(0, 10), "anything": st.none() | st.booleans() | WHOLE | TEXT},
)


@given(ARGUMENTS)
def test_everything_comes_back(arguments: dict[str, Any]) -> None:
    args, kwargs = again(everything, **arguments)
    assert args == ()
    assert kwargs == arguments
    assert {name: type(value) for name, value in kwargs.items()} == {
        name: type(value) for name, value in arguments.items()
    }


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=10,
)


@given(JSON)
def test_plain_values_come_back(value: Any) -> None:
    assert decode(encode(value)) == value


def mixed(a: int, /, b: int, c: int = 3, *rest: int, d: str, e: str = "e", **more: float) -> None: ...


@given(
    st.lists(WHOLE, min_size=2, max_size=6),
    st.text("xyz"),
    st.dictionaries(st.sampled_from(["p", "q", "e"]), st.integers(0, 9)),
)
def test_every_kind_of_parameter(args: list[int], d: str, more: dict[str, Any]) -> None:
    more = {name: str(value) if name == "e" else value for name, value in more.items()}
    got_args, got_kwargs = again(mixed, *args, d=d, **more)
    assert got_args == tuple(args)
    assert got_kwargs == {"d": d, **more}


def test_a_name_may_be_both_given_and_kept_apart() -> None:
    assert again(mixed, 1, b=2, d="x") == ((1, 2), {"d": "x"})
    assert again(mixed, 1, 2, d="x", a=5.0) == ((1, 2), {"d": "x", "a": 5.0})


def plain(a: int, b: str = "b", *, c: float = 1.0) -> int:
    return a


def test_defaults_are_not_stored() -> None:
    one = codec(plain)
    assert one.encode(one.bind((1,), {})) == b'{"a":1}'
    assert one.full({"a": 1}) == {"a": 1, "b": "b", "c": 1.0}


def test_a_whole_number_is_a_float() -> None:
    assert again(plain, 1, c=2) == ((), {"a": 1, "c": 2.0})


def bare(a, b=None): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201


def test_without_annotations_any_json_goes() -> None:
    assert again(bare, {"x": [1, None]}, b=(1, 2)) == ((), {"a": {"x": [1, None]}, "b": [1, 2]})


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'a'"),
        ((1, "b", 3), {}, "too many positional"),
        ((1,), {"a": 2}, "multiple values for argument 'a'"),
        ((1,), {"z": 2}, "unexpected keyword argument 'z'"),
        (("x",), {}, r"t: argument a is 'x'; it must be int, not str"),
        ((True,), {}, r"t: argument a is True; it must be int, not bool"),
        ((1.5,), {}, r"t: argument a is 1.5"),
        ((1, 2), {}, r"t: argument b is 2; it must be str, not int"),
        ((1,), {"c": "x"}, r"t: argument c is 'x'"),
        ((1,), {"c": float("nan")}, r"t: argument c is nan"),
        ((object(),), {}, r"t: argument a is <object .*can be stored as JSON: a object has no JSON form"),
        ((1, "\ud800"), {}, r"t: argument b"),
    ],
)
def test_what_does_not_fit_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        again(plain, *args, **kwargs)


def deep(points: list[Point], data: bytes = b"", model: Model | None = None) -> None: ...


def test_the_place_inside_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"t: argument points.* at points\[1\]\.x"):
        again(deep, [Point(1), {"x": "no"}])
    with pytest.raises(
        InvalidInput,
        match=(
            r"t: argument model is \{'size': 'no'\}: size: Input should be a valid integer, .*string as an "
            r"integer$"
        ),
    ):
        again(deep, [], model={"size": "no"})


def test_text_is_not_taken_for_bytes() -> None:
    with pytest.raises(InvalidInput, match=r"t: argument data is 'aGVsbG8='"):
        again(deep, [], "aGVsbG8=")


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b'{"a":"x"}', b"{}", b'{"a":1,"gone":2}', b"\xff"])
def test_a_payload_that_does_not_fit(payload: bytes) -> None:
    with pytest.raises(InvalidInput):
        codec(plain).decode(payload)


def test_equal_arguments_have_equal_bytes() -> None:
    one = codec(everything)
    assert one.canonical({"many": {3, 1, 2}, "table": {"b": 1, "a": 2}}) == one.canonical(
        {"table": {"a": 2, "b": 1}, "many": {2, 3, 1}}
    )


def test_results() -> None:
    def pointed() -> Point: ...  # type: ignore[empty-body]

    one = codec(pointed)
    assert one.encode_result(None) is None
    with pytest.raises(
        InvalidInput,
        match=r"the result of t is None; it must be a value that fits its return annotation: Expected `obj",
    ):
        one.decode_result(None)
    assert codec(unknown_result).decode_result(None) is None
    assert codec(nothing).decode_result(None) is None
    assert one.decode_result(one.encode_result(Point(1, 2, {"x"}))) == Point(1, 2, {"x"})
    with pytest.raises(InvalidInput, match="what t returned"):
        one.encode_result(object())
    with pytest.raises(InvalidInput, match="the result of t"):
        one.decode_result(b'"text"')


def unknown_result(): ...  # type: ignore[no-untyped-def]  # noqa: ANN201


def nothing() -> None: ...


def unknown_type(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def two_texts(a: datetime | str) -> None: ...


def test_a_signature_that_cannot_work() -> None:
    with pytest.raises(InvalidInput, match="name 'Nowhere' is not defined"):
        codec(unknown_type)
    with pytest.raises(
        InvalidInput, match=r"parameter a of task t has the type .*more than one str-like type"
    ):
        codec(two_texts)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b'{"m":1}', "add(n, tags=()) cannot be called with {\"m\":1}: argument 'm' is unexpected"),
        (b"{}", "add(n, tags=()) cannot be called with {}: argument 'n' is missing"),
        (b"[1]", "add: the JSON of the arguments is [1]; it must be object, not array"),
        (b"", "add: the JSON of the arguments is empty: input data was truncated"),
        (b"\xff", "add: the JSON of the arguments is \\xff: JSON is malformed: invalid character (byte 0)"),
        (b'{"n":"x"}', "add: argument n is 'x'; it must be int, not str"),
        (b'{"n":1,"tags":[2]}', "add: argument tags is [2]: expected `str`, got `int` at tags[0]"),
    ],
)
def test_a_stored_payload_that_does_not_fit_is_described(payload: bytes, message: str) -> None:
    def add(n: int, tags: tuple[str, ...] = ()) -> None: ...

    task = App("memory://").task(name="add")(add)
    with pytest.raises(InvalidInput) as caught:
        task.codec.decode(payload)
    assert str(caught.value) == message


def test_a_long_payload_is_shortened() -> None:
    task = App("memory://").task(name="t")(lambda: None)
    with pytest.raises(InvalidInput) as caught:
        task.codec.decode(b'{"m":"' + b"z" * 10_000 + b'"}')
    assert len(str(caught.value)) < 200


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.ledgers("memory")
def test_values_that_are_nested_too_deep(app: App) -> None:
    """A stranger can send them; no reader gets a RecursionError."""

    def t(x: list[Any]) -> Any: ...

    task = app.task(name="t", max_attempts=1)(t)
    sent = enqueue(app, "t", b'{"x":' + DEEP + b"}")
    assert isinstance(app.job(sent.id).status().arguments, bytes | None)
    app.run(burst=True, deploy_window=0)
    ended = app.job(sent.id).status()
    assert (ended.state, ended.reason) == ("failed", "fatal")
    assert 't: the JSON of the arguments is {"x":[[[' in (ended.error or "")
    assert "nested too deep" in (ended.error or "")
    with pytest.raises(InvalidInput, match="nested too deep"):
        task.codec.decode_result(DEEP)
    app.queue("mail").put(DEEP, content_type="application/json")
    with app.queue("mail").get(wait=None) as message:
        with pytest.raises(InvalidInput, match="payload is b"):
            message.json()
        message.ack()
