"""Fixtures of the command line's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.processes import SHOP
from tests.support.shell import Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """In an empty directory, without settings."""
    for name in [name for name in os.environ if name.startswith("TOWPATH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path)


@pytest.fixture
def shop(shell: Shell) -> Shell:
    """A directory with an app, `shop:app`."""
    (shell.folder / "shop.py").write_text(SHOP)
    return shell
