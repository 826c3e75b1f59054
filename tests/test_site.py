"""The documentation site builds without a broken link, and its reference is complete."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import pytest

import towpath
from tests.support.documents import ROOT
from towpath.core.nodes import Node
from towpath.ledger.postgres.connection import PostgresOptions
from towpath.operations.schedules import CronOptions
from towpath.operations.service import RunOptions
from towpath.queues.message import PutOptions
from towpath.queues.queue import PartLimits, QueueLimits
from towpath.settings import NAMES
from towpath.tasks.options import CallOptions, TaskOptions

OPTIONS: dict[str, Iterable[str]] = {
    "App(...)": list(inspect.signature(towpath.App).parameters),
    "@app.task(...)": TaskOptions.__annotations__,
    "task.options(...)": CallOptions.__annotations__,
    "app.run(...)": RunOptions.__annotations__,
    "queue.put(...)": PutOptions.__annotations__,
    "@app.cron(...)`, `@app.every(...)": CronOptions.__annotations__,
    "queue.configure(...)": QueueLimits.__annotations__,
    "queue.part(name).configure(...)": PartLimits.__annotations__,
    "setting": NAMES,
    "[nodes.<name>]": Node.__struct_fields__[1:],
    "SqliteOptions(...)": towpath.SqliteOptions.__struct_fields__,
    "postgresql://...?...": PostgresOptions.__struct_fields__,
}


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").is_file()
    # The links of llms.txt lead to the sources of the pages.
    assert [
        link
        for link in entries((tmp_path / "llms.txt").read_text("utf-8"))
        if not (tmp_path / link).is_file()
    ] == []


def entries(text: str) -> dict[str, str]:
    """The sentences of llms.txt, by the pages that they describe."""
    return dict(re.findall(r"^- \[[^\]]+\]\(([^)]+)\): (.+)$", text, re.MULTILINE))


def test_every_page_has_a_sentence_in_llms_txt() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r"([\w/-]+\.md)$", nav, re.MULTILINE)
    found = entries((ROOT / "docs" / "llms.txt").read_text("utf-8"))
    assert list(found) == pages, "docs/llms.txt has one line per page, in the order of mkdocs.yml"
    assert [sentence for sentence in found.values() if not re.fullmatch(r"[A-Z].+\w\.", sentence)] == []


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference/api.md").read_text("utf-8"), re.MULTILINE)
    modules = {"commands", "errors", "events"}
    names = {name.rpartition(".")[2] for name in listed}
    assert names - modules == set(towpath.__all__) - modules
    for name in listed:
        module, _, last = name.rpartition(".")
        assert hasattr(import_module(module), last), name


@pytest.mark.parametrize("table", OPTIONS)
def test_every_option_is_in_the_table(table: str) -> None:
    text = (ROOT / "docs/reference/options.md").read_text("utf-8")
    head = re.escape(table if table == "setting" else f"`{table}`")
    (rows,) = re.findall(
        rf"^\| {head} \| default \| meaning \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == list(OPTIONS[table])


def test_the_glossary_is_sorted_and_has_no_word_twice() -> None:
    glossary = (
        (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Glossary\n")[2].partition("\n## ")[0]
    )
    words = re.findall(r"^\| ([a-z].*?) \| \S", glossary.partition("|---|---|\n")[2], re.MULTILINE)
    assert words == sorted(set(words))
    assert len(words) > 100


def test_the_comparison_has_each_system_that_is_measured() -> None:
    rivals = re.findall(
        r'^    "(\w+)[^"]*": Rival\(.+"(.+)"\),$', (ROOT / "bench/rivals.py").read_text("utf-8"), re.M
    )
    rows = [line for line in (ROOT / "docs/comparison.md").read_text("utf-8").splitlines() if " x |" in line]
    assert len(rows) == len(rivals) == 9
    for (name, durability), row in zip(rivals, rows, strict=True):
        assert row.lower().startswith(f"| {name}"), row
        assert row.endswith(f"| {durability} |"), row
