"""Errors: the drawn tree, values, pickling."""

from __future__ import annotations

import copy
import pickle
import string
from collections.abc import Iterator
from typing import Any

import pytest

from towpath import errors
from towpath.errors import CallFailed, Described, InvalidInput, InvalidPlan, LostClaim, Refused, TowpathError


def family(cls: type[TowpathError]) -> Iterator[type[TowpathError]]:
    yield cls
    for below in cls.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from family(below)


ALL = list(family(TowpathError))


def example(cls: type[TowpathError]) -> TowpathError:
    if cls is InvalidInput:
        return InvalidInput(field="queue", value="a 'b'", expected="better")
    if cls is InvalidPlan:
        return InvalidPlan(plan="move", reasons=["there are no steps", "two steps have the name a"])
    names = {name for _, name, _, _ in string.Formatter().parse(cls.sentence) if name}
    values: dict[str, Any] = {name: f"<{name}>" for name in names}
    if issubclass(cls, CallFailed):
        values |= {"call": "<call>", "status": 409, "code": "<code>", "retry_after": 2.0}
    return cls(**values)


def test_the_tree_in_the_docstring() -> None:
    drawn: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.lstrip(" ├└│─")
        if not line.startswith("    ") or not name:
            continue
        depth = (len(line) - len(name)) // 4 - 1
        word, _, rest = name.partition(" ")
        path[depth:] = [word]
        drawn[word] = (path[depth - 1] if depth else None, rest)
    real = {cls.__name__: cls.__bases__[0].__name__ if cls is not TowpathError else None for cls in ALL}
    assert {name: parent for name, (parent, _) in drawn.items()} == real
    for cls in ALL:
        _, rest = drawn[cls.__name__]
        assert ("(retryable)" in rest, "(fatal)" in rest) == (cls.retryable, cls.fatal), cls


@pytest.mark.parametrize("cls", ALL)
def test_errors_are_values(cls: type[TowpathError]) -> None:
    error = example(cls)
    assert error == example(cls)
    assert hash(error) == hash(example(cls))
    assert str(error)
    assert "{" not in str(error)
    assert isinstance(error, TowpathError)


@pytest.mark.parametrize("cls", ALL)
def test_errors_can_be_pickled_and_copied(cls: type[TowpathError]) -> None:
    error = example(cls)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is cls
        assert again == error
        assert str(again) == str(error)
        assert again.details == error.details


def test_errors_differ_by_kind_and_details() -> None:
    assert LostClaim(id="a", fence=1) != LostClaim(id="a", fence=2)
    assert Refused() != TowpathError()
    assert LostClaim(id="a", fence=1) != "job a: the claim with fence 1 is lost"


def test_invalid_input_is_a_value_error_and_short() -> None:
    error = InvalidInput(field="payload", value="x" * 1000, expected="less")
    assert isinstance(error, ValueError)
    assert len(str(error)) < 120
    assert str(InvalidInput(field="f", value="\ud800", expected="text")).isascii()


def test_invalid_input_is_a_sentence_and_has_attributes() -> None:
    error = InvalidInput(field="delay", value=-1, expected="from 0 to 10 seconds")
    assert str(error) == "delay is -1; it must be from 0 to 10 seconds"
    assert (error.field, error.value, error.expected) == ("delay", "-1", "from 0 to 10 seconds")
    assert str(error.renamed("delay of queue q")) == "delay of queue q is -1; it must be from 0 to 10 seconds"


def test_invalid_input_may_have_a_message_of_its_own() -> None:
    error = InvalidInput(field="key", value="k", expected="left out", message="put_many takes no {key}:\nput")
    assert str(error) == "put_many takes no {key}:\\nput"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert pickle.loads(pickle.dumps(error)).value == "'k'"
    assert str(error.renamed("key of x")) == "key of x: put_many takes no {key}:\\nput"
    plain = InvalidInput(field="key", value="k", expected="left out")
    assert plain != error


def test_a_described_value_has_no_quotes() -> None:
    error = InvalidInput(field="payload", value=Described("20 bytes"), expected="at most 10 bytes")
    assert str(error) == "payload is 20 bytes; it must be at most 10 bytes"
    assert str(copy.deepcopy(error)) == str(error)


def test_no_error_is_both_retryable_and_fatal() -> None:
    assert not [cls for cls in ALL if cls.retryable and cls.fatal]
