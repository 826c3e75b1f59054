"""The code in the documents."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The bodies of the fenced blocks of a language."""
    return [body for kind, body in _BLOCK.findall(text) if kind == language]


def towpath_commands(text: str) -> list[list[str]]:
    """The arguments of every `towpath` in the console blocks, also behind another command."""
    lines = [shlex.split(line) for body in blocks(text, "console") for line in body.splitlines()]
    return [words[words.index("towpath") + 1 :] for words in lines if "towpath" in words]
