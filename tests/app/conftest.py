"""An App on each kind of ledger, and somebody who works through what is ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from towpath import App
from towpath.commands import Claim, Claimed, Want
from towpath.tasks.attempt import Attempt


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'work.db'}"


@pytest.fixture
def app(url: str) -> Iterator[App]:
    with App(url) as app:
        yield app
        assert app.ledger.check() == []


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[App]:
    """An App on each ledger with a database."""
    url = f"sqlite:///{tmp_path}/work.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with App(url) as app:
        yield app
        assert app.ledger.check() == []


def work(app: App, most: int = 1000) -> int:
    """Run what is ready, one after the other, in this thread."""
    ran = 0
    while ran < most:
        answer = app.call(Claim(owner=app.owner, wants=(Want("*"),), lease=60_000_000))
        assert isinstance(answer, Claimed)
        if not answer.claims:
            break
        for claim in answer.claims:
            app.call(Attempt(app, claim, app.tasks[claim.job.kind]).run())
            ran += 1
    return ran
