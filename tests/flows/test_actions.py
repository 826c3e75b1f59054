from __future__ import annotations

from typing import Any

import msgspec
import pytest

from towpath import App
from towpath.errors import InvalidInput
from towpath.flows.actions import Action, Answer, Http, Shell, Sql, TaskCall, action_of, action_text

ANY: Any = (Sql, Shell)
AnySql, AnyShell = ANY
"""The classes without their types, for wrong values."""

ACTIONS: list[Action] = [
    TaskCall("shop.copy", msgspec.Raw(b'{"rows":3}')),
    TaskCall("shop.noop"),
    Sql("DROP TABLE a"),
    Sql("INSERT INTO a VALUES (%s, %s)", (1, None, "x", 1.5, True), autocommit=True),
    Shell(("ls", "-l", "a b"), cwd="/tmp", env={"B": "2", "A": "1"}, input="yes"),
    Http("post", "/tables", {"X-A": "1"}, "{}", (409, 200)),
    Http("GET", "https://example.org/a?b=c"),
]


@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_an_action_is_the_same_after_json_and_has_a_hash(action: Action) -> None:
    content = msgspec.json.encode(action)
    again = msgspec.json.decode(content, type=Action)
    assert again == action
    assert hash(again) == hash(action)
    assert msgspec.json.encode(again) == content
    assert len({action, again}) == 1
    assert msgspec.json.decode(content)["run"] in ("task", "sql", "shell", "http")


def test_names_with_texts_are_sorted_and_a_mapping_again() -> None:
    shell = Shell(("env",), env={"B": "2", "A": "1"})
    assert shell == Shell(("env",), env=(("A", "1"), ("B", "2")))
    assert dict(shell.env) == {"A": "1", "B": "2"}
    assert Http("get", "/", expect=(409, 200, 200)) == Http("GET", "/", expect=(200, 409))


def test_arguments_are_compared_without_their_spaces() -> None:
    assert TaskCall("f", msgspec.Raw(b'{ "a" : [1, 2] }')) == TaskCall("f", msgspec.Raw(b'{"a":[1,2]}'))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TaskCall(""), "task"),
        (lambda: TaskCall("f", msgspec.Raw(b"[1]")), "args"),
        (lambda: TaskCall("f", msgspec.Raw(b"{,}")), "args"),
        (lambda: Sql(""), "statement"),
        (lambda: Sql("a\0b"), "statement"),
        (lambda: Sql("a", (float("nan"),)), "params"),
        (lambda: AnySql("a", ([],)), "params"),
        (lambda: Sql("a", ("\ud800",)), "params"),
        (lambda: AnySql("a", "bc"), "params"),
        (lambda: Shell(()), "argv"),
        (lambda: AnyShell("ls -l"), "argv"),
        (lambda: Shell(("",)), "argv"),
        (lambda: Shell(("ls",), cwd=""), "cwd"),
        (lambda: Shell(("ls",), env={"A=B": "c"}), "env"),
        (lambda: AnyShell(("ls",), env=("ab", "cd", "e")), "env"),
        (lambda: Http("GO ON", "/"), "method"),
        (lambda: Http("GET", "example.org"), "url"),
        (lambda: Http("GET", "/a b"), "url"),
        (lambda: Http("GET", "/a\nb"), "url"),
        (lambda: Http("GET", "/", expect=(20,)), "expect"),
    ],
)
def test_a_wrong_value_names_its_field(make: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make()
    assert caught.value.field == field


def test_a_field_that_does_not_exist_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="statment"):
        msgspec.json.decode(b'{"run": "sql", "statement": "a", "statment": "b"}', type=Action)


def test_a_call_of_a_task_is_an_action() -> None:
    app = App("memory:")

    @app.task(name="shop.copy")
    def copy(rows: int, to: str = "b") -> None: ...

    try:
        found = action_of(copy.of(3))
        assert found == TaskCall("shop.copy", msgspec.Raw(copy.of(3).payload))
        assert action_of(found) is found
        with pytest.raises(InvalidInput, match="dependencies of its own"):
            action_of(copy.options(after="another-job").of(3))
    finally:
        app.close()


@pytest.mark.parametrize("value", [None, "DROP TABLE a", 3, print])
def test_another_value_is_not_an_action(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"task\.of"):
        action_of(value, "undo")


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (ACTIONS[0], 'shop.copy {"rows":3}'),
        (Sql("CREATE  TABLE\n  a (b int)"), "CREATE TABLE a (b int)"),
        (ACTIONS[3], "INSERT INTO a VALUES (%s, %s) [1, None, 'x', 1.5, True]"),
        (ACTIONS[4], "$ ls -l 'a b'"),
        (ACTIONS[5], "POST /tables"),
        (Sql("x" * 200), "x" * 117 + "..."),
    ],
)
def test_an_action_in_one_line(action: Action, text: str) -> None:
    assert action_text(action) == text


def test_the_answers_of_a_check() -> None:
    assert [*Answer] == ["applied", "not_applied", "running", "unknown"]
