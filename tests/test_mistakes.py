"""Mistakes of new users, each with its exact message: the error and the right form.

The table is `mistakes.txt`: a program, after `=>` the class and the message of its error, and a line `----`.
In a message ID stands for the id of a job, DIR for the working directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.shell import Shell

START = """
import asyncio, os
from datetime import UTC, datetime
from pathlib import Path
from towpath import App, Lane, Policy, Snooze, current, provided

app = App("memory://")

@app.task
def add(a: int, b: int = 0) -> int:
    return a + b

@app.task
async def fetch(url: str) -> str:
    return url

class User:
    def __repr__(self):
        return "<User 7>"
"""
"""Every program begins with these lines."""


class Mistake(NamedTuple):
    program: str
    error: str
    message: str


def _table() -> list[Mistake]:
    text = Path(__file__).with_name("mistakes.txt").read_text("utf-8")
    found = re.findall(r"(.*?)\n=> (\w+): (.*?)\n----\n", re.sub(r"(?m)^####.*\n", "", text), re.DOTALL)
    assert len(found) == text.count("\n----\n"), "a block that cannot be read"
    return [Mistake(*each) for each in found]


MISTAKES = _table()


class CommandFailed(Exception):
    """The text that a command prints on stderr."""


def outcome(program: str, folder: Path) -> tuple[str, str]:
    """The class and the message of the error that ends the program."""

    def towpath(*arguments: str, code: int = 0) -> None:
        ran = Shell(folder)(*arguments, code=code)
        if code:
            raise CommandFailed(ran.err.strip())

    names: dict[str, Any] = {"__name__": "shop", "towpath": towpath}
    exec(START, names)
    try:
        exec(program, names)
    except Exception as error:
        text = str(error).partition("\n\n")[0]  # without the traceback of a handler
        text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
        return type(error).__name__, text.replace(str(folder), "DIR")
    finally:
        names["app"].close()
    return "no error", ""


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, id=each.program.splitlines()[-1][:60]) for each in MISTAKES]
)
def test_a_mistake_is_explained(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOWPATH_CONCURRENCY", "")
    assert outcome(mistake.program, tmp_path) == (mistake.error, mistake.message)
    assert [str(each.message) for each in recwarn] == []


def test_there_are_fifty_of_them_and_their_messages_are_short() -> None:
    assert len({each.program for each in MISTAKES}) >= 50
    assert [each.program for each in MISTAKES if len(each.message) > 450] == []
