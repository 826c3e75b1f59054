"""A receipt settles or extends a delivery from any process, by id and fence alone."""

from __future__ import annotations

import pytest

from towpath import App
from towpath.commands import micros
from towpath.errors import InvalidInput, LostClaim
from towpath.queues import receipts
from towpath.queues.receipts import Receipt


def test_a_receipt_as_text() -> None:
    receipt = Receipt("a:b", 3)
    assert Receipt.parse(str(receipt)) == receipt
    with pytest.raises(InvalidInput, match=r"it must be the receipt .* ID:FENCE"):
        Receipt.parse("a:b")


def test_a_used_or_old_receipt_is_refused(app: App) -> None:
    queue = app.queue("orders")
    queue.put("x")
    first = queue.get(wait=None)
    nack = receipts.nack(first.receipt, reason="busy")
    assert receipts.settled(nack, app.engine.call(nack)).state == "ready"
    ack = receipts.ack(first.receipt)
    with pytest.raises(LostClaim):
        receipts.settled(ack, app.engine.call(ack))
    with pytest.raises(LostClaim):
        receipts.extended(first.receipt, app.engine.call(receipts.extend(first.receipt, micros(60))))


def test_an_ack_deletes_the_state(app: App) -> None:
    queue = app.queue("orders")
    queue.put("x")
    message = queue.get(wait=None)
    app.engine.call(receipts.save_state(message.receipt, b'{"step": 2}'))
    assert message.state.value == {"step": 2}
    extend = receipts.extend(message.receipt, micros(600))
    assert not receipts.extended(message.receipt, app.engine.call(extend)).lost
    ack = receipts.ack(message.receipt, b'"shipped"')
    assert receipts.settled(ack, app.engine.call(ack)).state == "done"
    assert app.ledger.note(f"state/{message.id}") is None
