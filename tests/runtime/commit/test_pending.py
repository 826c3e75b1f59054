"""The order and the size of batches."""

from __future__ import annotations

from collections.abc import Sequence

from towpath.core.commands import Append, Command, Note, Progress, Settle
from towpath.core.job import Done, Spec
from towpath.runtime.commit.pending import (
    MAX_BATCH,
    MIN_OTHERS,
    CommitQueue,
    PendingCall,
    PendingPost,
    Reply,
)


def ignore(replies: Sequence[Reply]) -> None: ...


def append(specs: int, name: str = "a") -> PendingCall:
    return PendingCall(Append(tuple([Spec(id=f"{name}-{n}", queue="q") for n in range(specs)])))


def note(n: int = 0) -> PendingPost:
    return PendingPost([Note(key=f"note {n}", value=b"{}")], ignore)


def settles(count: int = MAX_BATCH) -> PendingPost:
    return PendingPost([Settle(f"job {n}", 1, Done()) for n in range(count)], ignore)


def commands(queue: CommitQueue) -> list[Command]:
    return [command for pending in queue.take() for command in pending.commands]


def filled(*added: PendingCall | PendingPost) -> CommitQueue:
    queue = CommitQueue(max_backlog=10_000)
    for pending in added:
        assert queue.add(pending, bounded=True)
    return queue


def test_an_append_behind_a_command_of_the_caretaker_is_in_the_next_batch() -> None:
    """With a batch full of settles, a command without specs took the room of the append."""
    large = append(1000)
    queue = filled(settles(), settles(), note(), large, append(1, "b"))
    assert commands(queue)[MAX_BATCH:] == [*note().commands, *large.commands]
    assert [type(command) for command in commands(queue)[MAX_BATCH:]] == [Append]
    assert commands(queue) == []


def test_many_other_commands_do_not_make_a_batch_too_long() -> None:
    queue = filled(settles(), *[note(n) for n in range(3 * MIN_OTHERS)], append(1))
    assert len(commands(queue)) == MAX_BATCH + MIN_OTHERS
    assert len(commands(queue)) == 2 * MIN_OTHERS + 1


def test_a_batch_without_settles_is_filled() -> None:
    queue = filled(append(600, "a"), note(), append(300, "b"), append(200, "c"))
    assert [len(each.specs) for each in commands(queue) if isinstance(each, Append)] == [600, 300]
    assert [len(each.specs) for each in commands(queue) if isinstance(each, Append)] == [200]


def test_progress_has_room_and_goes_before_the_settle_of_its_job() -> None:
    queue = CommitQueue(max_backlog=10_000)
    queue.progress.add(Progress("job 0", 1, done=1), ignore)  # type: ignore[arg-type]
    queue.progress.add(Progress("other", 1, done=2), ignore)  # type: ignore[arg-type]
    assert queue.add(settles(), bounded=False)
    queue.add(settles(), bounded=False)
    batch = commands(queue)
    assert batch[0] == Progress("job 0", 1, done=1)
    assert batch[-1] == Progress("other", 1, done=2)
