"""The breakers of one process, between two commits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gated import Gated
from tests.support.waiting import WAIT, until
from towpath import Breaker
from towpath.core.breaker import Phase, Record
from towpath.core.checks import SECOND
from towpath.core.commands import Note
from towpath.runtime.breakers import Breakers
from towpath.runtime.commit.committer import Committer

X = Breaker("x", failures=3, window=60, cooldown=30)
PLACE = "q", X.part
NOW = 1000 * SECOND


@pytest.fixture
def ledger() -> Gated:
    return Gated()


@pytest.fixture
def committer(ledger: Gated) -> Iterator[Committer]:
    committer = Committer(ledger)
    committer.start()
    yield committer
    ledger.let_go()
    committer.close()


def notes(ledger: Gated) -> list[list[Note]]:
    found = [
        [each for each in batch if isinstance(each, Note) and each.key.endswith("/x")]
        for batch in ledger.batches
    ]
    return [batch for batch in found if batch]


def test_a_failure_that_is_not_committed_keeps_the_next_job_from_starting(
    ledger: Gated, committer: Committer
) -> None:
    """Three handlers fail while a batch is applied. The first failure is posted as a note; the others wait
    for its reply, so the batch that settles all three jobs does not close the gate. A job that this batch
    claims in their place must not start."""
    breakers = Breakers(ledger, committer)
    breakers.declare(X, [PLACE], NOW)
    ledger.hold()
    committer.kick()
    committer.post([Note(key="other", value=b"{}")], lambda replies: None)
    assert ledger.inside.wait(WAIT)
    for n in range(3):
        assert breakers.held(X, PLACE, NOW + n, NOW + n) is None
        breakers.report(X, PLACE, False, NOW + n, NOW + n)
    assert breakers.phase(X, NOW + 3) is Phase.OPEN
    assert breakers.held(X, PLACE, NOW + 5, NOW + 5) == 0, "its gate will be closed by the note that waits"
    assert breakers.admit(X, NOW + 5) is not None
    ledger.let_go()
    until(lambda: len(notes(ledger)) == 3)
    until(lambda: (breakers.read("x")[0] or Record(X)).status.until > 0)
    assert breakers.phase(X, NOW + 3) is Phase.OPEN
