"""The code in the documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The bodies of the fenced blocks of a language."""
    return [body for kind, body in _BLOCK.findall(text) if kind == language]
