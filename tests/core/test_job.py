from __future__ import annotations

from towpath.core.checks import SECOND
from towpath.core.job import Key, Release, RetryOutcome, SnoozeOutcome, Spec, runs_of
from towpath.ledger.model_ledger import ModelLedger
from towpath.testing.ledger_suite import Harness


def spec(id: str, **fields: object) -> Spec:
    return Spec(**{"id": id, "queue": "q", **fields})  # type: ignore[arg-type]


def test_runs_differ_in_nothing_but_id_and_payload() -> None:
    one = [spec("a"), spec("b", payload=b"1"), spec("c", payload=b"22")]
    two = [spec("d", priority=1), spec("e", priority=1)]
    three = [spec("f")]
    four = [spec("g", headers={"a": "b"}), spec("h", headers={"a": "b"})]
    five = [spec("i", key=Key("k"))]
    assert runs_of([*one, *two, *three, *four, *five]) == [one, two, three, four, five]
    assert runs_of([]) == []


def test_looking_for_runs_changes_no_spec() -> None:
    given = [spec("a", payload=b"1"), spec("b", payload=b"2"), spec("c", priority=1)]
    copies = [spec("a", payload=b"1"), spec("b", payload=b"2"), spec("c", priority=1)]
    runs_of(given)
    assert given == copies


def test_attempts_used_never_exceeds_max_attempts() -> None:
    harness = Harness(ModelLedger())

    def used() -> tuple[int, int]:
        return harness.job("a").attempts_used, harness.job("a").attempts

    harness.add("a", max_attempts=2)
    assert used() == (0, 0)
    for outcome in (Release(), SnoozeOutcome()):
        harness.settle(harness.take(), outcome)
    assert used() == (0, 1)
    for attempts in (2, 3):
        harness.take()
        assert used() == (1, attempts)
        harness.lose()
        assert used() == (0, attempts)
    harness.jump(SECOND)
    harness.settle(harness.take(), RetryOutcome())
    assert used() == (1, 4)
    claim = harness.take()
    assert used() == (2, 5)
    harness.settle(claim, RetryOutcome())
    assert used() == (2, 5)
    harness.revive("a")
    assert used() == (0, 5)
    harness.done(harness.take())
    assert used() == (1, 6)


def test_a_loss_that_ends_a_job_uses_an_attempt() -> None:
    harness = Harness(ModelLedger())
    harness.started("a", max_attempts=1)
    harness.lose()
    assert (harness.at("a"), harness.job("a").attempts_used) == ("failed/lost", 1)
