"""The rules of the example."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reconciliation.rules import START, Numbers, classify, flags, priority, trust_after

TRUE = Numbers(1000, 100, 10)


@pytest.mark.parametrize(
    ("claimed", "true", "status"),
    [
        (Numbers(1000, 100, 10), TRUE, "matched"),
        (Numbers(1050, 100, 10), TRUE, "matched"),
        (Numbers(1051, 100, 10), TRUE, "low"),
        (Numbers(900, 100, 10), TRUE, "low"),
        (Numbers(1000, 111, 10), TRUE, "medium"),
        (Numbers(1000, 120, 10), TRUE, "overclaimed"),
        (Numbers(1000, 100, 7), TRUE, "high"),
        (Numbers(1000, 100, 10), Numbers(None, None, None), "missing"),
        (Numbers(1000, 100, 10), Numbers(1000, None, 10), "incomplete"),
        (Numbers(0, 0, 0), Numbers(0, 0, 0), "matched"),
        (Numbers(1, 0, 0), Numbers(0, 0, 0), "overclaimed"),
    ],
)
def test_classify(claimed: Numbers, true: Numbers, status: str) -> None:
    assert classify(claimed, true).status == status


def test_critical() -> None:
    assert [classify(Numbers(n, 100, 10), TRUE).critical for n in (1000, 1200, 1499, 1500)] == [
        False,
        False,
        False,
        True,
    ]


@given(st.integers(1, 10**6), st.integers(0, 10**7), st.integers(0, 10**7))
def test_a_larger_claim_is_never_better(truth: int, one: int, other: int) -> None:
    """A larger claim above the truth gets at least as severe a verdict."""
    order = ["matched", "low", "medium", "high", "overclaimed"]
    low, high = sorted((truth + one, truth + other))
    verdicts = [classify(Numbers(n, 0, 0), Numbers(truth, 0, 0)).status for n in (low, high)]
    assert order.index(verdicts[0]) <= order.index(verdicts[1])


def test_trust_stays_between_0_and_1_and_0_is_not_forgiven() -> None:
    trust = START
    for _ in range(10):
        trust = trust_after(trust, "overclaimed")
    assert trust == 0.0
    assert trust_after(trust, "overclaimed") == 0.0
    assert trust_after(trust, "matched") == 0.01
    assert trust_after(1.0, "matched") == 1.0
    assert trust_after(0.5, "missing") == trust_after(0.5, "incomplete") == 0.5


@pytest.mark.parametrize(
    ("claimed", "before", "evidence", "found"),
    [
        (Numbers(1000, 100, 10), None, False, []),
        (Numbers(100, 200, 10), None, False, ["more clicks than views", "click rate over 35 %"]),
        (Numbers(100, 36, 1), None, False, ["click rate over 35 %"]),
        (Numbers(99, 36, 1), None, False, []),
        (Numbers(1000, 20, 13), None, False, ["conversion rate over 60 %"]),
        (Numbers(50_000, 1, 1), None, False, ["many views without evidence"]),
        (Numbers(50_000, 1, 1), None, True, []),
        (Numbers(900, 1, 1), Numbers(1000, 1, 1), False, ["fewer views than before"]),
        (Numbers(6001, 1, 1), Numbers(1000, 1, 1), False, ["six times the views"]),
    ],
)
def test_flags(claimed: Numbers, before: Numbers | None, evidence: bool, found: list[str]) -> None:
    assert flags(claimed, before, evidence) == found


def test_priority() -> None:
    assert [priority(trust, []) for trust in (0.0, 0.49, 0.5, 0.74, 0.75)] == [
        "high",
        "high",
        "normal",
        "normal",
        "low",
    ]
    assert priority(0.9, ["odd"]) == "high"
