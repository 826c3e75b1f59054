"""A job that ends its process does not end the other jobs of the worker. The workers are real processes,
restarted by a supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.poison import Load, supervise

QUICK = Load(innocents=100, seconds=0.05, concurrency=16, lease=0.5, patience=240.0)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_one_poison_job_is_one_dead_letter(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    found = supervise(url, QUICK)
    assert found.dead == [found.poison]
    assert found.done == QUICK.innocents
    assert found.starts >= 5
    assert found.losses < 5
