"""Opening a ledger by its URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from towpath import App, open_ledger
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
    "refused",
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
def test_other_urls_are_refused(refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="url is"):
        open_ledger(refused)
    assert list(tmp_path.iterdir()) == []


THING = """
from towpath import open_ledger

opened = []

def open_thing(url, clock):
    opened.append(url)
    return open_ledger("memory://", clock)
"""


def _install(folder: Path, entry: str) -> None:
    """A distribution as pip leaves it: a module, and a dist-info directory that names its entry point."""
    (folder / "thing_ledger.py").write_text(THING)
    info = folder / "thing_ledger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing-ledger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[towpath.ledgers]\n{entry}\n")


def test_a_package_registers_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "thing = thing_ledger:open_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with App("thing://host/place?x=1") as app:
        queue = app.queue("orders")
        id = queue.put(b"7")
        assert isinstance(app.ledger, MemoryLedger)
        assert app.job(id).record().payload == b"7"
    import thing_ledger  # type: ignore[import-not-found]

    assert thing_ledger.opened == ["thing://host/place?x=1"]


def test_an_unknown_scheme_lists_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "thing = thing_ledger:open_thing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match=r"memory://, sqlite:///.*, postgresql://.*, thing://"):
        open_ledger("other://x")


def test_a_scheme_with_a_package_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "thing = thing_ledger:nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidInput, match="thing_ledger:nothing_of_this_name does not"):
        open_ledger("thing://x")


def test_memory_has_no_options() -> None:
    with pytest.raises(InvalidInput, match="memory:// without options"):
        open_ledger("memory://?synchronous=normal")
