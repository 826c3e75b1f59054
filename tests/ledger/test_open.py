"""Opening a ledger by its URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from towpath import open_ledger
from towpath.errors import InvalidInput
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.sqlite.ledger import SqliteLedger


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(open_ledger("memory://"), MemoryLedger)
    for url, path in (
        ("sqlite:///a.db", tmp_path / "a.db"),
        (f"sqlite:///{tmp_path}/b%20c.db", tmp_path / "b c.db"),
        ("sqlite:///d.db?synchronous=normal", tmp_path / "d.db"),
    ):
        ledger = open_ledger(url)
        assert isinstance(ledger, SqliteLedger)
        ledger.close()
        assert path.exists()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sqlite:",
        "sqlite:///",
        "sqlite:file.db",
        "sqlite:/file.db",
        "sqlite://host/file.db",
        "sqlite:///a.db?sync=1",
        "mysql://x",
    ],
)
def test_other_urls_are_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="url is"):
        open_ledger(url)
    assert list(tmp_path.iterdir()) == []
