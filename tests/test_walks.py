"""The documents about internals name files and functions that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "towpath"
WALKS = ROOT / "docs" / "walks.md"
MOST_LINES = 15
PAGES = [
    WALKS,
    ROOT / "docs" / "engine.md",
    ROOT / "docs" / "speed.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs" / "adr").glob("*.md")),
]

_NAMED = re.compile(r"`([\w./-]+\.(?:py|md|sql))(?::([\w.]+))?`")


def named(text: str) -> list[tuple[str, str]]:
    """(path, name in it or nothing) of every file that a text names."""
    return _NAMED.findall(text)


def find(path: str) -> Path | None:
    """A path of a document is relative to the package or to the repository."""
    return next((base / path for base in (SOURCE, ROOT) if (base / path).is_file()), None)


def definitions(body: list[ast.stmt], inside: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inside + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{node.name}.")


def missing(text: str) -> list[str]:
    """The names in a text that the tree does not have."""
    found = []
    for path, name in named(text):
        file = find(path)
        if file is None:
            found.append(path)
        elif name and name not in definitions(ast.parse(file.read_text("utf-8")).body):
            found.append(f"{path}:{name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_files_and_functions_exist(page: Path) -> None:
    assert missing(page.read_text("utf-8")) == []


def test_a_name_that_does_not_exist_would_be_noticed() -> None:
    text = (
        "`app.py`, `app.py:App`, `app.py:App.task`, `app.py:App.fly`, `app.py:Fly`, `fly.py`, `docs/walks.md`"
    )
    assert missing(text) == ["app.py:App.fly", "app.py:Fly", "fly.py"]


def test_there_are_three_short_walks_with_names() -> None:
    walks = WALKS.read_text("utf-8").split("\n## ")[1:]
    assert len(walks) == 3
    for walk in walks:
        lines = [line for line in walk.splitlines()[1:] if line.strip()]
        assert len(lines) <= MOST_LINES
        assert len([name for _, name in named(walk) if name]) >= 5


def test_the_room_table_is_the_tree() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("| room |")[2].partition("\n\n")[0]
    rooms = re.findall(r"`([\w./]+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:]))
    folders = [
        f"{folder.relative_to(SOURCE)}/"
        for folder in SOURCE.rglob("*")
        if folder.is_dir() and any(folder.glob("*.py"))
    ]
    assert sorted(rooms) == sorted([*folders, *(file.name for file in SOURCE.glob("*.py")), "ledger/sql/"])


def test_the_glossary_has_each_word_once_in_order() -> None:
    table = (
        (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("| word | meaning |")[2].partition("\n\n")[0]
    )
    words = [line.split("|")[1].strip().lower() for line in table.splitlines()[2:]]
    assert words == sorted(set(words))
    assert {"ledger", "fence", "seal", "part", "lane", "note", "caretaker", "group", "model"} <= set(words)
