from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import pytest

from tests.support.gated import Gated, append, call_in_thread, until_waiting
from tests.support.waiting import until
from towpath.core.commands import (
    Appended,
    Claim,
    Claimed,
    Command,
    Note,
    Progress,
    Progressed,
    Renew,
    Settle,
    Settled,
    Want,
)
from towpath.core.job import Done
from towpath.errors import LedgerBusy, LedgerClosed, LostClaim, TowpathError, UnknownDependency
from towpath.ledger import Answer
from towpath.runtime.claims.dispatcher import Dispatcher, Waiter
from towpath.runtime.commit.committer import Committer
from towpath.runtime.commit.pending import Reply

LEASE = 60_000_000


@pytest.fixture
def ledger() -> Iterator[Gated]:
    gated = Gated()
    yield gated
    assert gated.check() == []


@pytest.fixture
def committer(ledger: Gated) -> Iterator[Committer]:
    committer = Committer(ledger, max_backlog=10)
    committer.start()
    yield committer
    ledger.let_go()
    committer.close()


class StandingDemand:
    """A demand for n jobs of the queue."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.replies: SimpleQueue[Claimed | TowpathError] = SimpleQueue()

    def wanted(self) -> Claim | None:
        return Claim(owner="me", wants=(Want("q", self.n),), lease=LEASE) if self.n else None

    def taken(self, reply: Claimed | TowpathError) -> None:
        if isinstance(reply, Claimed):
            self.n -= len(reply.claims)
        self.replies.put(reply)


def one_into(replies: SimpleQueue[Reply]) -> Callable[[Sequence[Reply]], None]:
    """A callback for one posted command."""

    def received(found: Sequence[Reply]) -> None:
        (reply,) = found
        replies.put(reply)

    return received


def test_a_lone_caller_leads(ledger: Gated) -> None:
    # The thread is not even started.
    assert isinstance(Committer(ledger).call(append("a")), Appended)


def test_commands_gather_while_a_batch_is_being_committed(ledger: Gated, committer: Committer) -> None:
    ledger.hold()
    first, _ = call_in_thread(committer, append("first"))
    assert ledger.inside.wait(20)
    others = [call_in_thread(committer, append(f"j{n}")) for n in range(8)]
    until_waiting(committer, 8)
    ledger.let_go()
    for thread, _ in [(first, None), *others]:
        thread.join(20)
    assert [len(batch) for batch in ledger.batches] == [1, 8]
    assert all(isinstance(answers[0], Appended) for _, answers in others)


def test_settles_come_first_and_the_demand_last(ledger: Gated, committer: Committer) -> None:
    committer.call(append("a"))
    claimed = committer.call(Claim(owner="me", wants=(Want("q"),), lease=LEASE))
    assert isinstance(claimed, Claimed)
    ledger.hold()
    first, _ = call_in_thread(committer, append("first"))
    assert ledger.inside.wait(20)
    call_in_thread(committer, append("b"))
    until_waiting(committer, 1)
    replies: SimpleQueue[Reply] = SimpleQueue()
    committer.post([Settle("a", claimed.claims[0].fence, Done())], one_into(replies))
    demand = StandingDemand(5)
    committer.add_demand(demand)
    ledger.let_go()
    first.join(20)
    assert replies.get(timeout=20) == Settled("a", "done")  # type: ignore[arg-type]
    taken = demand.replies.get(timeout=20)
    assert isinstance(taken, Claimed)
    assert [claim.id for claim in taken.claims] == ["first", "b"]
    assert [type(command).__name__ for command in ledger.batches[-1]] == ["Settle", "Append", "Claim"]


def test_progress_with_notes_is_never_replaced(ledger: Gated, committer: Committer) -> None:
    """Of three plain ones only the last is applied. Each with notes is, before the settle, and answered."""
    committer.call(append("a"))
    claimed = committer.call(Claim(owner="me", wants=(Want("q"),), lease=LEASE))
    assert isinstance(claimed, Claimed)
    fence = claimed.claims[0].fence
    ledger.hold()
    first, _ = call_in_thread(committer, append("first"))
    assert ledger.inside.wait(20)
    replies: SimpleQueue[Reply] = SimpleQueue()
    for n in range(3):
        committer.post_progress(Progress("a", fence, done=n), lambda reply: None)
        noted = Progress("a", fence, notes=(Note(key=f"k{n}", value=b"1"),))
        committer.post_progress(noted, replies.put)
    committer.post([Settle("a", fence, Done())], one_into(replies))
    ledger.let_go()
    first.join(20)
    assert [type(replies.get(timeout=20)) for _ in range(4)] == [Progressed] * 3 + [Settled]
    assert [ledger.note(f"k{n}") is not None for n in range(3)] == [True] * 3
    sent = [each for each in ledger.batches[-1] if isinstance(each, Progress) and not each.notes]
    assert [each.done for each in sent] == [2]


def test_a_new_demand_is_served_without_other_work(ledger: Gated, committer: Committer) -> None:
    committer.call(append("a"))
    demand = StandingDemand(1)
    committer.add_demand(demand)
    taken = demand.replies.get(timeout=20)
    assert isinstance(taken, Claimed)
    assert [claim.id for claim in taken.claims] == ["a"]
    committer.drop_demand(demand)


def test_refusals_reach_their_caller_alone(ledger: Gated, committer: Committer) -> None:
    ledger.hold()
    first, _ = call_in_thread(committer, append("first"))
    assert ledger.inside.wait(20)
    bad, wrong = call_in_thread(committer, append("bad", after="nobody"))
    good, right = call_in_thread(committer, append("good"))
    until_waiting(committer, 2)
    ledger.let_go()
    for thread in (first, bad, good):
        thread.join(20)
    assert isinstance(wrong[0], UnknownDependency)
    assert isinstance(right[0], Appended)


def test_only_appends_from_outside_wait_for_room(ledger: Gated, committer: Committer) -> None:
    ledger.hold()
    first, _ = call_in_thread(committer, append("first"))
    assert ledger.inside.wait(20)
    full, _ = call_in_thread(committer, append(*[f"j{n}" for n in range(10)]))
    until_waiting(committer, 1)
    blocked, answers = call_in_thread(committer, append("one-more"))
    # Neither a settle, nor a command without specs, nor an append of the engine waits for room.
    replies: SimpleQueue[Reply] = SimpleQueue()
    committer.post([Settle("first", 9, Done())], one_into(replies))
    committer.post([append("own")], one_into(replies))
    renewing, _ = call_in_thread(committer, Renew((), LEASE))
    until_waiting(committer, 4)
    assert answers == []
    ledger.let_go()
    for thread in (first, full, blocked, renewing):
        thread.join(20)
    assert isinstance(answers[0], Appended)
    assert isinstance(replies.get(timeout=20), LostClaim)


async def enqueue_many(committer: Committer, count: int) -> list[object]:
    return list(await asyncio.gather(*(committer.acall(append(f"t{n}")) for n in range(count))))


def test_coroutines_share_batches(ledger: Gated, committer: Committer) -> None:
    answers = asyncio.run(enqueue_many(committer, 64))
    assert all(isinstance(answer, Appended) for answer in answers)
    assert ledger.queues()["q"].counts.ready == 64
    # At most ten wait at a time, so there are at least seven batches; one commit per call would be 64.
    assert 7 <= len(ledger.batches) <= 32


def test_a_cancelled_coroutine_leaves_its_command_to_the_ledger(ledger: Gated, committer: Committer) -> None:
    async def give_up() -> None:
        ledger.hold()
        task = asyncio.create_task(committer.acall(append("a")))
        await asyncio.to_thread(ledger.inside.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ledger.let_go()
        await committer.acall(append("b"))

    asyncio.run(give_up())
    assert ledger.queues()["q"].counts.ready == 2


def test_appends_that_wait_for_room_keep_their_order(ledger: Gated, committer: Committer) -> None:
    """Threads and coroutines wait in one order, and a small append does not overtake a large one."""
    ledger.hold()
    full, _ = call_in_thread(committer, append(*[f"full{n}" for n in range(10)]))
    assert ledger.inside.wait(20)
    call_in_thread(committer, append(*[f"next{n}" for n in range(10)]))
    until_waiting(committer, 1)

    async def stand_in_line() -> None:
        large = asyncio.create_task(committer.acall(append(*[f"large{n}" for n in range(8)])))
        gone = asyncio.create_task(committer.acall(append("gone")))
        await asyncio.sleep(0)
        small, _ = call_in_thread(committer, append("small", "tiny", "mini"))
        until(lambda: len(committer._queue.blocked) == 3)
        gone.cancel()
        await asyncio.sleep(0)
        ledger.let_go()
        await large
        await asyncio.to_thread(small.join, 20)

    asyncio.run(stand_in_line())
    full.join(20)
    found = [[spec.id for command in batch for spec in command.specs] for batch in ledger.batches]  # type: ignore[union-attr]
    assert [ids[0] for ids in found] == ["full0", "next0", "large0", "small"]
    assert ledger.get("gone") is None


def test_close_commits_appends_that_wait_for_room(ledger: Gated, committer: Committer) -> None:
    ledger.hold()
    callers = [call_in_thread(committer, append(*[f"{name}{n}" for n in range(10)])) for name in "ab"]
    until_waiting(committer, 1)
    callers.append(call_in_thread(committer, append("c")))
    until(lambda: len(committer._queue.blocked) == 1)
    closing = threading.Thread(target=committer.close)
    closing.start()
    until(lambda: committer._closing)
    ledger.let_go()
    closing.join(20)
    assert not closing.is_alive()
    assert [type(answers[0]) for thread, answers in callers if not thread.join(20)] == [Appended] * 3  # type: ignore[func-returns-value]


def test_a_caller_beside_others_does_not_lead_the_next_batch(ledger: Gated, committer: Committer) -> None:
    """Its commit would delay the others. A single caller leads again."""
    leaders: list[str] = []
    apply = ledger.apply

    def seen(commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        leaders.append(threading.current_thread().name)
        return apply(commands, now)

    ledger.apply = seen  # type: ignore[method-assign]
    ledger.hold()
    first, _ = call_in_thread(committer, append("first"))
    assert ledger.inside.wait(20)
    others = [call_in_thread(committer, append(f"j{n}")) for n in range(2)]
    until_waiting(committer, 2)
    ledger.let_go()
    for thread in (first, *(thread for thread, _ in others)):
        thread.join(20)
    mine, thread_s = threading.current_thread().name, committer._thread.name
    for n in range(2):
        until(lambda: committer._idle)
        committer.call(append(f"then{n}"))
    assert leaders[-3:] == [thread_s, thread_s, mine]


def test_an_interrupted_leader_hands_its_batch_to_the_thread(ledger: Gated, committer: Committer) -> None:
    ledger.fail.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        committer.call(append("a"))
    committer.call(append("b"))
    assert {job.id for job in ledger.dump()["jobs"]} == {"a", "b"}


def test_a_leader_interrupted_after_the_commit_does_nothing_twice(
    ledger: Gated, committer: Committer
) -> None:
    ledger.fail_after_commit.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        committer.call(append("a"))
    committer.call(append("b"))
    assert [job.id for job in ledger.dump()["jobs"]] == ["a", "b"]


def test_patient_commands_outlast_a_busy_ledger(ledger: Gated, committer: Committer) -> None:
    committer.call(append("a"))
    claimed = committer.call(Claim(owner="me", wants=(Want("q"),), lease=LEASE))
    assert isinstance(claimed, Claimed)
    busy = LedgerBusy(path="x", seconds=1)
    ledger.fail += [busy, busy]
    replies: SimpleQueue[Reply] = SimpleQueue()
    committer.post([Settle("a", claimed.claims[0].fence, Done())], one_into(replies))
    assert isinstance(replies.get(timeout=20), Settled)
    ledger.fail.append(busy)
    with pytest.raises(LedgerBusy):
        committer.call(append("b"))


def test_what_a_batch_brought_while_the_engine_was_being_closed_goes_back(
    ledger: Gated, committer: Committer
) -> None:
    """Claims arrive for a waiter that has left; the other callers of the batch get their answers."""
    dispatcher = Dispatcher(committer, "me")
    waiter = Waiter(["q"], lambda claims: None, LEASE)
    waiter.want = 2
    dispatcher.add(waiter)
    replies: list[Reply] = []
    ledger.hold()
    committer.post([append("a", "b")], replies.extend)
    assert ledger.inside.wait(20)
    dispatcher.remove(waiter)
    closing = threading.Thread(target=committer.close)
    closing.start()
    until(lambda: committer._closing)
    ledger.let_go()
    closing.join(20)
    assert not closing.is_alive()
    assert [type(reply) for reply in replies] == [Appended]
    assert ledger.queues()["q"].counts.ready == 2


def test_close_commits_what_waits_and_refuses_what_comes_later(ledger: Gated, committer: Committer) -> None:
    replies: SimpleQueue[Reply] = SimpleQueue()
    ledger.hold()
    first, _ = call_in_thread(committer, append("first"))
    assert ledger.inside.wait(20)
    committer.post([append("own")], one_into(replies))
    ledger.let_go()
    committer.close()
    first.join(20)
    assert isinstance(replies.get(timeout=20), Appended)
    with pytest.raises(LedgerClosed):
        committer.call(append("late"))
