"""Receipts: ack, nack, extend and the state of a message by its id and fence.

Pure functions: each builds the command, and `settled` and `extended` check its result. `Message`, the command
line and the server share them. Times are microseconds."""

from __future__ import annotations

import re
from typing import Any, Self

import msgspec

from towpath.core.checks import MAX_ERROR, MAX_NAME
from towpath.core.commands import Note, Renew, Renewed, Result, Settle, Settled
from towpath.core.job import DONE, STATE_TTL, ClaimedJob, Done, RetryOutcome, SnoozeOutcome, state_key
from towpath.errors import AlreadySettled, InvalidInput, LostClaim


class Receipt(msgspec.Struct, frozen=True):
    """One delivery of a message. As text: `id:fence`."""

    id: str
    fence: int

    @classmethod
    def of(cls, claim: ClaimedJob) -> Self:
        return cls(claim.id, claim.fence)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The receipt in a text `id:fence`; an id may contain colons."""
        id, colon, fence = text.rpartition(":")
        if not (colon and 0 < len(id) <= MAX_NAME and re.fullmatch(r"[0-9]{1,18}", fence)):
            raise InvalidInput(
                field="receipt", value=text, expected="the receipt that `towpath get` printed, ID:FENCE"
            )
        return cls(id, int(fence))

    def __str__(self) -> str:
        return f"{self.id}:{self.fence}"


def ack(receipt: Receipt, result: bytes | None = None, stateful: bool = True) -> Settle:
    """The message is done. Its state is deleted in the same transaction; not `stateful`: it has none."""
    notes = (Note(key=state_key(receipt.id), value=None),) if stateful else ()
    return Settle(receipt.id, receipt.fence, Done(result), notes=notes)


def nack(receipt: Receipt, delay: int = 0, reason: str | None = None, defer: bool = False) -> Settle:
    """Deliver the message again after `delay`. Counts as a failure with that reason, unless it is a
    `defer`."""
    outcome = SnoozeOutcome(delay) if defer else RetryOutcome(delay, error=reason)
    return Settle(receipt.id, receipt.fence, outcome)


def settled(command: Settle, answer: Result) -> Settled:
    """The result of an ack or nack. Raises AlreadySettled if the receipt was used before, for the opposite: a
    repeated command returns the result of the first."""
    assert isinstance(answer, Settled)
    if (answer.state is DONE) is not isinstance(command.outcome, Done):
        raise AlreadySettled(id=command.id, fence=command.fence, outcome=outcome_of(answer))
    return answer


def outcome_of(answer: Settled) -> str:
    """The outcome of a delivery in one word, for errors."""
    return "acknowledged" if answer.state is DONE else "returned"


def extend(receipt: Receipt, lease: int) -> Renew:
    """Renew the lease for this time from now."""
    return Renew(((receipt.id, receipt.fence),), lease)


def extended(receipt: Receipt, answer: Result) -> Renewed:
    """The result of an extend. Raises LostClaim if the lease is lost."""
    assert isinstance(answer, Renewed)
    if answer.lost:
        raise LostClaim(id=receipt.id, fence=receipt.fence)
    return answer


def save_state(receipt: Receipt, value: bytes | None, expect: int | None = None) -> Note:
    """Write the state of the message, or delete it with None; `expect` as in `Note`."""
    return Note(key=state_key(receipt.id), value=value, expect=expect, ttl=STATE_TTL)


def last_words(error: BaseException | None) -> dict[str, Any]:
    """The nack of a message that was left without ack or nack. An interrupt counts as no failure."""
    if error is None:
        return {"reason": "left without ack or nack"}
    if not isinstance(error, Exception):
        return {"defer": True}
    text = (
        f"{type(error).__name__}: {error}".replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    )
    return {"reason": text[:MAX_ERROR]}
