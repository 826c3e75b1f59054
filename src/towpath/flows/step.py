"""One delivery of a step, as a state machine without I/O: when the check is asked, when the action runs, and
what the delivery ends with.

    begin -> CHECK or RUN; after_check and after_run -> CHECK, RUN or a verdict

The first delivery runs the action. Every later one asks the check first, where there is one: an earlier
delivery may have taken effect without a reply. After a failed action the check decides too. An undo asks the
check before each run: a step that did not take effect needs no undo.

The verdict of a failed delivery is stored as the first words of the error of the job, with the number of the
delivery. So the coordinator knows whether a step took effect, even if the process died after it."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from towpath.core.job import CANCELED, DONE, FAILED, Job, Reason
from towpath.flows.actions import Answer
from towpath.flows.plan import StepRetry

WAIT = 5.0
"""Seconds until the check is asked again while the action still runs on the node."""


class Move(StrEnum):
    """What the handler does next."""

    CHECK = "check"
    RUN = "run"


class Facts(msgspec.Struct, frozen=True):
    """The delivery: `deliveries` counts this one, `failures` the earlier ones that failed, `unknowns` those
    among them that ended with an unknown answer. `final`: the action asked for no further run."""

    retry: StepRetry
    has_check: bool
    undo: bool = False
    deliveries: int = 1
    failures: int = 0
    unknowns: int = 0

    @property
    def runs(self) -> int:
        """How many runs of the action have failed."""
        return self.failures - self.unknowns


class Finished(msgspec.Struct, frozen=True):
    """The job is done. `found`: the check answered that there is nothing to do."""

    found: bool = False


class Again(msgspec.Struct, frozen=True):
    """The delivery failed, and the job is retried after the delay of its policy for this failure."""

    answer: Answer | None
    failure: int
    unknowns: int


class Waits(msgspec.Struct, frozen=True):
    """The action still runs on the node: ask again later."""


class GaveUp(msgspec.Struct, frozen=True):
    """The job has failed. `answer` is that of the last check, None without one."""

    answer: Answer | None
    unknowns: int


Verdict = Finished | Again | Waits | GaveUp


def facts_of(job: Job, retry: StepRetry, has_check: bool, undo: bool = False) -> Facts:
    """The facts of the delivery of a claimed job."""
    told = told_by(job.error)
    unknowns = 0 if told is None else min(told[2], job.failures)
    return Facts(retry, has_check, undo, job.attempts, job.failures, unknowns)


def begin(facts: Facts) -> Move | Verdict:
    if facts.has_check and (facts.undo or facts.deliveries > 1):
        return Move.CHECK
    return _run(facts, None)


def after_check(facts: Facts, answer: Answer, failed: bool = False, final: bool = False) -> Move | Verdict:
    """`failed`: the action has run in this delivery and failed; `final`: it asked for no further run."""
    match answer:
        case Answer.RUNNING:
            return Waits()
        case Answer.UNKNOWN:
            unknowns = facts.unknowns + 1
            if unknowns >= facts.retry.check_attempts:
                return GaveUp(answer, unknowns)
            return Again(answer, unknowns, unknowns)
        case Answer.APPLIED if not facts.undo:
            return Finished(found=True)
        case Answer.NOT_APPLIED if facts.undo:
            return Finished(found=True)
    return _failed(facts, answer, final) if failed else _run(facts, answer)


def after_run(facts: Facts, ok: bool, final: bool = False) -> Move | Verdict:
    if ok:
        return Finished()
    return Move.CHECK if facts.has_check else _failed(facts, None, final)


def _run(facts: Facts, answer: Answer | None) -> Move | Verdict:
    """A timeout may have used up the runs without a verdict."""
    return Move.RUN if facts.runs < facts.retry.attempts else GaveUp(answer, facts.unknowns)


def _failed(facts: Facts, answer: Answer | None, final: bool) -> Verdict:
    runs = facts.runs + 1
    if final or runs >= facts.retry.attempts:
        return GaveUp(answer, facts.unknowns)
    return Again(answer, runs, facts.unknowns)


def max_attempts(retry: StepRetry) -> int:
    """The budget of the job: the machine gives up before it is spent."""
    return min(1_000_000, retry.attempts + retry.check_attempts + 1)


# The stored verdict

_WORDS = {Answer.NOT_APPLIED: "not applied", Answer.UNKNOWN: "unknown", Answer.APPLIED: "applied"}
_ANSWERS = {words: answer for answer, words in _WORDS.items()}
_PERHAPS = "perhaps applied"
_TOLD = re.compile(
    rf"(?:[\w.]+: )?({'|'.join(_ANSWERS)}|{_PERHAPS}) \(delivery (\d{{1,18}}), (\d{{1,9}}) unknown\)"
)


def verdict_text(verdict: Again | GaveUp, fence: int, text: str) -> str:
    """The error of the job: the verdict of this delivery, then the text of the failure."""
    words = _PERHAPS if verdict.answer is None else _WORDS[verdict.answer]
    return f"{words} (delivery {fence}, {verdict.unknowns} unknown): {text}"


def told_by(error: str | None) -> tuple[Answer | None, int, int] | None:
    """The answer, the fence and the number of unknown answers in the error of a job; None if the error has no
    verdict."""
    found = _TOLD.match(error or "")
    return None if found is None else (_ANSWERS.get(found[1]), int(found[2]), int(found[3]))


class Effect(StrEnum):
    """Whether the action of a step took effect."""

    NONE = "none"
    APPLIED = "applied"
    PERHAPS = "perhaps"
    UNKNOWN = "unknown"


def effect_of(job: Job) -> Effect:
    """The effect of a step that has ended. A verdict counts only for the last delivery: a later one may have
    died without a verdict."""
    if job.state is DONE:
        return Effect.NONE if job.reason is Reason.SKIPPED else Effect.APPLIED
    if job.attempts == 0:
        return Effect.NONE
    told = told_by(job.error)
    if told is None or told[1] != job.fence or job.state not in (FAILED, CANCELED):
        return Effect.PERHAPS
    if told[0] is Answer.NOT_APPLIED:
        return Effect.NONE
    return Effect.UNKNOWN if told[0] is Answer.UNKNOWN else Effect.PERHAPS
