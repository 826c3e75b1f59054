"""Business rules as pure functions: suspicious claims, comparison of claims with the truth, effect on
trust."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Status = Literal["matched", "low", "medium", "high", "overclaimed", "missing", "incomplete"]
Priority = Literal["high", "normal", "low"]

OVERCLAIM, CRITICAL = 0.20, 0.50
"""Shares by which a claim exceeds the truth: an overclaim, and a critical overclaim."""
STEPS: tuple[tuple[float, Status], ...] = ((0.05, "matched"), (0.10, "low"), (0.20, "medium"))
"""Maximum difference in either direction for each status. A larger difference is `high`."""
START = 0.5
"""Trust in a new affiliate."""
TRUST: dict[Status, float] = {
    "matched": 0.01,
    "low": -0.01,
    "medium": -0.03,
    "high": -0.05,
    "overclaimed": -0.10,
    "missing": 0.0,
    "incomplete": 0.0,
}


@dataclass(frozen=True)
class Numbers:
    """Numbers of a claim or of a platform. None is unknown."""

    views: int | None
    clicks: int | None
    conversions: int | None


@dataclass(frozen=True)
class Verdict:
    status: Status
    worst: float = 0.0
    """The largest difference, as a share of the truth."""

    @property
    def critical(self) -> bool:
        return self.status == "overclaimed" and self.worst >= CRITICAL


def classify(claimed: Numbers, true: Numbers) -> Verdict:
    pairs = [(getattr(claimed, each.name) or 0, getattr(true, each.name)) for each in fields(Numbers)]
    known = [(claimed, truth) for claimed, truth in pairs if truth is not None]
    if not known:
        return Verdict("missing")
    if len(known) < len(pairs):
        return Verdict("incomplete")
    # A claim above a truth of 0 differs by 100 %.
    off = [(claimed - truth) / truth if truth else float(claimed > 0) for claimed, truth in known]
    worst = max(off, key=abs)
    if max(off) >= OVERCLAIM:
        return Verdict("overclaimed", max(off))
    return Verdict(next((status for limit, status in STEPS if abs(worst) <= limit), "high"), worst)


def trust_after(trust: float, status: Status) -> float:
    """The new trust, between 0 and 1. A trust of 0 stays distinct from a new affiliate."""
    return round(min(1.0, max(0.0, trust + TRUST[status])), 4)


def flags(claimed: Numbers, before: Numbers | None = None, evidence: bool = False) -> list[str]:
    """Reasons why a claim is suspicious, before the platform is asked."""
    views, clicks, conversions = claimed.views or 0, claimed.clicks or 0, claimed.conversions or 0
    past = (before.views or 0) if before is not None else 0
    found = {
        "more clicks than views": clicks > views or conversions > clicks,
        "click rate over 35 %": views >= 100 and clicks > 0.35 * views,
        "conversion rate over 60 %": clicks >= 20 and conversions > 0.60 * clicks,
        "many views without evidence": views >= 50_000 and not evidence,
        "fewer views than before": views < 0.99 * past,
        "six times the views": past > 0 and views > 6 * past,
    }
    return [name for name, true in found.items() if true]


def priority(trust: float, odd: list[str]) -> Priority:
    """Suspicious reports run first, reports of trusted affiliates last."""
    if odd or trust < 0.5:
        return "high"
    return "low" if trust >= 0.75 else "normal"
