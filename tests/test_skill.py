"""The skill for coding agents: its front matter, its program and its commands."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.support.documents import ROOT, blocks, towpath_commands
from tests.support.shell import parsed, python

SKILL = ROOT / "skills" / "towpath" / "SKILL.md"
TEXT = SKILL.read_text("utf-8")


def test_the_front_matter_has_name_and_description() -> None:
    empty, front, _ = TEXT.split("---\n", 2)
    found = yaml.safe_load(front)
    assert empty == ""
    assert sorted(found) == ["description", "name"]
    assert found["name"] == SKILL.parent.name
    assert "Use when" in found["description"]
    assert len(found["description"]) <= 1024


def test_the_idioms_are_a_program(tmp_path: Path) -> None:
    ran = python(
        tmp_path, "\n".join(["import warnings; warnings.simplefilter('error')", *blocks(TEXT, "python")])
    )
    assert (ran.code, ran.err) == (0, "")
    assert "ready, first in queue mail" in ran.out


def test_the_commands_are_accepted() -> None:
    assert len([parsed(arguments) for arguments in towpath_commands(TEXT)]) == 9
