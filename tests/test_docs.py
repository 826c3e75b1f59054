"""The documents match the program: code runs, tables are complete, diagrams match, links are valid."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks
from tests.support.forks import Forks
from towpath import errors
from towpath.core import lifecycle
from towpath.core.job import Reason, State

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

PROSE_WIDTH = 100

_LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
_ARROW = re.compile(r"^\s*(\S+) --> (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with contextlib.closing(Forks()) as forks:
        yield forks


def arrows(text: str) -> list[tuple[str, str]]:
    return [arrow for body in blocks(text, "mermaid") for arrow in _ARROW.findall(body)]


README = ROOT / "README.md"
PROGRAMS = [
    (page, number) for page in PAGES for number in range(len(blocks(page.read_text("utf-8"), "python")))
]


@pytest.mark.parametrize(
    ("page", "number"), PROGRAMS, ids=[f"{page.name}-{number}" for page, number in PROGRAMS]
)
def test_code_runs_as_it_stands(page: Path, number: int, tmp_path: Path, forks: Forks) -> None:
    ended = forks.run(tmp_path, blocks(page.read_text("utf-8"), "python")[number])
    assert ended.code == 0, ended.err
    assert ended.err == ""


@pytest.mark.parametrize(
    ("program", "code", "error"),
    [
        ("import warnings\nwarnings.warn('old')", 1, "UserWarning: old"),
        ("raise SystemExit(3)", 3, ""),
        ("import towpath\ntowpath.testing", 1, "AttributeError: module 'towpath' has no attribute 'testing'"),
        ("import os\nassert os.listdir() == []\nopen('here', 'x')\nassert __name__ == '__main__'", 0, ""),
    ],
    ids=["a warning", "an exit code", "a missing import", "an empty directory"],
)
def test_code_runs_as_in_a_process_of_its_own(
    program: str, code: int, error: str, tmp_path: Path, forks: Forks
) -> None:
    ended = forks.run(tmp_path, program)
    assert ended.code == code
    assert error in ended.err


def test_the_quick_start_of_the_readme_is_the_example() -> None:
    assert blocks(README.read_text("utf-8"), "python")[0] == (ROOT / "examples" / "quickstart.py").read_text(
        "utf-8"
    )


def masked(text: str) -> str:
    """A text without what differs from run to run: ids, process numbers, ages, commit, directory,
    and the width of columns."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
    text = re.sub(r"\bWorker \d+", "Worker PID", text)
    text = re.sub(r"(Towpath [\d.]+\d)\+g[0-9a-f]{7}", r"\1", text)
    text = re.sub(r"(?<=Ledger: sqlite:///)/.*/", "/FOLDER/", text)
    text = re.sub(r"\b\d+(\.\d+)?m?s\b", "AGE", text)
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def sessions(text: str) -> list[tuple[str, str]]:
    """(command, output below it) for every command of the console blocks."""
    return [
        (command, output)
        for body in blocks(text, "console")
        for command, _, output in (part.partition("\n") for part in body.split("$ ")[1:])
    ]


def test_the_quick_start_of_the_readme_works_as_it_is_typed(tmp_path: Path) -> None:
    """Every command except `pip install .` prints what the README shows below it."""
    text = README.read_text("utf-8").partition("## Quick start")[2].partition("\n## ")[0]
    (tmp_path / "work.py").write_text(blocks(text, "python")[0], "utf-8")
    install, script, worker, *others = sessions(text)
    assert install == ("pip install .", "")
    assert [command.split()[0] for command, _ in (script, worker, *others)] == [
        *("python", "towpath", "python", "towpath", "towpath"),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TOWPATH_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    log = tmp_path / "worker.log"

    def check(command: str, shown: str) -> None:
        ended = subprocess.run(
            shlex.split(command),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, (command, ended.stderr)
        assert masked(ended.stdout) == masked(shown)

    check(*script)
    with log.open("wb") as file:
        working = subprocess.Popen(
            shlex.split(worker[0]), cwd=tmp_path, env=environment, stdout=file, stderr=file
        )
    try:
        for command, shown in others:
            check(command, shown)
    finally:
        working.terminate()
        working.wait(60)
    assert working.returncode == 0, log.read_text("utf-8")
    assert masked(log.read_text("utf-8")).startswith(masked(worker[1]))


def error_classes() -> Iterator[type[errors.TowpathError]]:
    for _, value in inspect.getmembers(errors, inspect.isclass):
        if issubclass(value, errors.TowpathError) and value.__module__ == errors.__name__:
            yield value


def error_rows() -> dict[str, list[str]]:
    lines = (ROOT / "docs" / "errors.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_error_has_a_row_and_no_row_is_left_over() -> None:
    assert sorted(error_rows()) == sorted(each.__name__ for each in error_classes())


def test_the_table_of_errors_has_cause_and_remedy() -> None:
    for each in error_classes():
        nature, when, remedy = error_rows()[each.__name__]
        assert nature == ("retryable" if each.retryable else "fatal" if each.fatal else ""), each
        assert when
        assert remedy


def test_the_tree_of_errors_names_every_class() -> None:
    assert [each.__name__ for each in error_classes() if each.__name__ not in (errors.__doc__ or "")] == []


DECISIONS = sorted((ROOT / "docs" / "adr").glob("*.md"))
_HEAD = re.compile(r"# (\d+)\. .+\n\nStatus: \w.*\.\n\nDate: \d{4}-\d{2}-\d{2}\.\n\n\S")


@pytest.mark.parametrize("page", DECISIONS, ids=[page.name for page in DECISIONS])
def test_every_decision_has_its_number_a_status_and_a_date(page: Path) -> None:
    head = _HEAD.match(page.read_text("utf-8"))
    assert head is not None
    assert int(head[1]) == int(page.name[:4])


def test_the_numbers_of_decisions_are_unique() -> None:
    numbers = [page.name[:4] for page in DECISIONS]
    assert sorted(set(numbers)) == numbers


EVERY_ARROW = sorted(
    ("[*]" if before is None else before.value, after.value) for before, after in lifecycle.TRANSITIONS
)


def test_the_diagram_of_states_is_the_table() -> None:
    assert sorted(arrows((ROOT / "docs" / "states.md").read_text("utf-8"))) == EVERY_ARROW


def test_the_diagram_in_the_source_is_the_table() -> None:
    assert sorted(arrows(lifecycle.__doc__ or "")) == EVERY_ARROW


def test_a_missing_arrow_would_be_noticed() -> None:
    assert arrows("```mermaid\n    ready --> running\n```\nnot --> here\n") == [("ready", "running")]


def test_the_table_of_states_has_every_reason() -> None:
    lines = (ROOT / "docs" / "states.md").read_text("utf-8").splitlines()
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|", 2)]
        for line in lines
        if line.startswith("| `")
    ]
    states = [row for row in rows if row[0] in list(State)]
    named = {State(row[0]): {Reason(name) for name in re.findall(r"\w+", row[2])} for row in states}
    assert named == {state: reasons - {Reason.NONE} for state, reasons in lifecycle.REASONS.items()}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text("utf-8"))
    missing = [
        f"{link}#{anchor}"
        for link, anchor in links
        if anchor not in anchors((page.parent / link if link else page).read_text("utf-8"))
    ]
    assert missing == []


def long_lines(text: str) -> list[str]:
    """Lines of prose that are too long. Code fences and tables cannot be wrapped and are exempt."""
    fenced, found = False, []
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.lstrip().startswith("|") and len(line) > PROSE_WIDTH:
            found.append(line)
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_prose_is_wrapped(page: Path) -> None:
    assert long_lines(page.read_text("utf-8")) == []


def test_a_long_line_of_prose_would_be_noticed() -> None:
    long = "word " * 21
    assert long_lines(f"{long}\n```\n{long}\n```\n| {long} |\n") == [long]
