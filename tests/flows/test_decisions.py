"""The decision of the coordinator after the steps have ended, as a table."""

from __future__ import annotations

import pytest

from towpath.flows.coordinator import Member, Next, decide
from towpath.flows.plan import StepKind
from towpath.flows.step import Effect

NONE, APPLIED, PERHAPS, UNKNOWN = Effect


def member(text: str) -> Member:
    """`name kind end effect`, with `end` one of done, failed and canceled."""
    name, kind, end, effect = text.split()
    return Member(name, StepKind(kind), end == "done", end == "failed", Effect(effect))


@pytest.mark.parametrize(
    ("members", "aborting", "expected"),
    [
        (["a reversible done applied", "b forward done applied"], False, Next.FINISH),
        (["a reversible done none"], True, Next.FINISH),
        (["a reversible done applied", "b reversible failed perhaps"], False, Next.ROLL_BACK),
        (["a reversible done applied", "b reversible failed none"], False, Next.ROLL_BACK),
        (["a reversible canceled none"], True, Next.ROLL_BACK),
        (["a reversible done applied", "b reversible failed unknown"], False, Next.PARK),
        (["a reversible done applied", "b reversible failed unknown"], True, Next.ROLL_BACK),
        # A step that was stopped while it was unknown is not the one that failed: its undo asks the check.
        (["a reversible failed none", "b reversible canceled unknown"], False, Next.ROLL_BACK),
        (["a reversible done applied", "p pivot failed none"], False, Next.ROLL_BACK),
        (["a reversible done applied", "p pivot failed perhaps"], False, Next.PARK),
        (["a reversible done applied", "p pivot failed unknown"], False, Next.PARK),
        (["a reversible done applied", "p pivot canceled perhaps"], True, Next.PARK),
        (["a reversible failed none", "p pivot canceled none"], False, Next.ROLL_BACK),
        (["p pivot done applied", "f forward failed none"], False, Next.PARK),
        (["p pivot done applied", "f forward failed none"], True, Next.PARK),
        (["p pivot done applied", "f forward canceled none"], True, Next.COMPLETE),
        (["p pivot done applied", "f forward canceled none"], False, Next.PARK),
        (["g gate failed none", "a reversible done applied"], False, Next.ROLL_BACK),
    ],
)
def test_what_follows(members: list[str], aborting: bool, expected: Next) -> None:
    assert decide([member(each) for each in members], aborting).next is expected


def test_the_reason_names_the_steps() -> None:
    failed = [member(f"s{n} reversible failed none") for n in range(5)]
    assert decide(failed).why == "s0, s1, s2 and 2 more failed"
    assert decide([member("a reversible canceled none")], True).why == "aborted"
