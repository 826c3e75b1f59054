"""A ledger in a database of another text encoding would mix up payloads, so it is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import apsw
import pytest

from towpath.errors import NotALedger
from towpath.ledger.sqlite.ledger import SqliteLedger


@pytest.mark.parametrize("encoding", ["UTF-16le", "UTF-16be"])
def test_other_encodings_are_refused(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.db"
    with closing(apsw.Connection(str(path))) as mine:
        mine.execute(f"PRAGMA encoding = '{encoding}'; CREATE TABLE mine (x TEXT)")
    with pytest.raises(NotALedger, match=encoding):
        SqliteLedger(path)
