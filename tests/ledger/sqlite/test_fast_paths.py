"""The short ways of plain batches: what they write and answer is what the reference model does, and they
really are taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from towpath.core.commands import (
    Append,
    Appended,
    Claim,
    Claimed,
    Command,
    SetQueue,
    Settle,
    Settled,
    Upkeep,
    Want,
)
from towpath.core.job import DONE, Done, Key, Outcome, Retry, Spec
from towpath.core.limits import Rate
from towpath.errors import LostClaim, QueueFull
from towpath.ledger import Answer
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.sqlite.ledger import SqliteLedger
from towpath.ledger.tables import append
from towpath.ledger.tables import settle as settles
from towpath.testing.pair import Pair

NOW = 1_000_000_000
LEASE = 10_000_000


class Both:
    """The reference model and SQLite side by side."""

    def __init__(self, path: Path) -> None:
        self.pair = Pair(MemoryLedger(), SqliteLedger(path))
        self.now = NOW

    def apply(self, *commands: Command) -> list[Answer]:
        self.now += 1
        answers = self.pair.apply(commands, self.now)
        self.pair.compare(self.now)
        return answers

    def hold(self, count: int, queue: str = "q") -> dict[str, int]:
        """Claim so many; their fences by id."""
        (claimed,) = self.apply(Claim(owner="w", wants=(Want(queue, count),), lease=LEASE))
        assert isinstance(claimed, Claimed)
        return {claim.id: claim.fence for claim in claimed.claims}


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    both = Both(tmp_path / "a.db")
    with closing(both.pair):
        both.apply(Append((Spec(id="first", queue="q", payload=b"1"),)))
        yield both


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the general ways were gone."""
    gone: list[str] = []

    def gather(*args: object) -> object:
        gone.append("append")
        return gathering(*args)  # type: ignore[arg-type]

    def stretch(*args: object) -> object:
        gone.append("settle")
        return stretching(*args)  # type: ignore[arg-type]

    gathering, stretching = append.gather, settles._gather_run
    monkeypatch.setattr(append, "gather", gather)
    monkeypatch.setattr(settles, "_gather_run", stretch)
    return gone


def one_each(ids: Sequence[str], **fields: object) -> list[Append]:
    return [Append((Spec(id=id, queue="q", payload=id.encode(), **fields),)) for id in ids]  # type: ignore[arg-type]


def seqs(answers: Sequence[Answer]) -> list[list[int]]:
    return [[placed.seq for placed in answer.jobs] for answer in answers if isinstance(answer, Appended)]


def test_many_callers_in_one_batch(both: Both, long_ways: list[str]) -> None:
    answers = both.apply(*one_each([f"a{n:02}" for n in range(70)]))
    assert seqs(answers) == [[n] for n in range(2, 72)]
    assert long_ways == []


@pytest.mark.parametrize("count", [2, 3, 32, 33, 70])
def test_those_that_differ_in_id_and_payload_only(both: Both, long_ways: list[str], count: int) -> None:
    # fmt: off
    terms: dict[str, object] = {
        "kind": "k", "content_type": "text/plain", "priority": 3, "ttl": 50, "max_attempts": 2,
        "max_losses": 4, "timeout": 6,
        "retention": 7, "parent": "p", "generation": 8, "correlation_id": "c",
    }
    # fmt: on
    plain = Spec(id="plain", queue="q")
    assert {name for name in terms if getattr(plain, name) == terms[name]} == set()
    answers = both.apply(*one_each([f"{'x' * n}{n}" for n in range(count)], **terms))
    assert seqs(answers) == [[n] for n in range(2, 2 + count)]
    assert long_ways == []


def test_those_that_differ_in_more(both: Both, long_ways: list[str]) -> None:
    both.apply(*one_each("ab"), *one_each("cd", priority=2), *one_each("e"))
    assert long_ways == []


def test_an_id_between_theirs_is_none_of_them(both: Both, long_ways: list[str]) -> None:
    """Two processes that append at the same time have such ids."""
    both.apply(*one_each(["a", "z"]))
    assert long_ways == []
    held = both.hold(3)
    both.apply(SetQueue(queue="q", retention=0), *[Settle(id, fence, Done()) for id, fence in held.items()])
    both.apply(Upkeep())
    assert both.pair.right.get("first") is None
    both.apply(*one_each(["b", "y"]))
    assert long_ways == []
    # And those that are gone are known.
    both.apply(*one_each(["c", "first"]))
    assert set(long_ways) == {"append"}


def test_commands_of_several_specs_waiting_or_not_with_headers_and_long_or_no_payloads(
    both: Both, long_ways: list[str]
) -> None:
    some = tuple(
        Spec(id=f"b{n}", queue="q", payload=bytes(n), delay=n % 2 * 1000, headers={"n": str(n)})
        for n in range(5)
    )
    large = Spec(id="large", queue="q", payload=bytes(3 * 1024 * 1024))
    answers = both.apply(Append(some), Append((large,)), *one_each(["c"], ttl=5))
    assert seqs(answers) == [[2, 3, 4, 5, 6], [7], [8]]
    assert long_ways == []


def test_a_capacity_that_holds_all_of_them(both: Both, long_ways: list[str]) -> None:
    both.apply(SetQueue(queue="q", capacity=4))
    assert len(seqs(both.apply(*one_each("abc")))) == 3
    assert long_ways == []


def test_a_capacity_that_holds_only_some_refuses_the_others(both: Both, long_ways: list[str]) -> None:
    both.apply(SetQueue(queue="q", capacity=3))
    a, b, refused = both.apply(*one_each("abc"))
    assert seqs([a, b]) == [[2], [3]]
    assert isinstance(refused, QueueFull)
    assert long_ways


@pytest.mark.parametrize("ids", ["abca", ["a", "first", "b"]], ids=["twice in the batch", "there already"])
def test_an_id_that_is_known_has_its_first_answer(both: Both, ids: Sequence[str]) -> None:
    both.apply(*one_each(ids))


@pytest.mark.parametrize(
    "odd", [{"key": Key("k")}, {"part": "p"}, {"queue": "new"}], ids=lambda odd: next(iter(odd))
)
def test_one_that_is_not_plain_takes_the_others_along(
    both: Both, long_ways: list[str], odd: dict[str, object]
) -> None:
    strange = Spec(**{"id": "odd", "queue": "q", **odd})  # type: ignore[arg-type]
    both.apply(*one_each("ab"), Append((strange,)), *one_each("c"))
    assert long_ways


def test_settles_with_and_without_results(both: Both, long_ways: list[str]) -> None:
    both.apply(*one_each("abc"))
    held = both.hold(4)
    answers = both.apply(
        *[Settle(id, fence, Done(None if id == "a" else id.encode())) for id, fence in held.items()]
    )
    assert answers == [Settled(id, DONE) for id in held]
    assert long_ways == []
    assert both.apply(*[Settle(id, fence, Done()) for id, fence in held.items()]) == answers


def test_those_with_consequences_are_settled_beside_them(both: Both, long_ways: list[str]) -> None:
    keyed = Append((Spec(id="keyed", queue="q", key=Key("k")),))
    child = Spec(id="child", queue="q")
    both.apply(*one_each("abcd"), keyed)
    held = both.hold(6)
    ends: dict[str, Outcome] = {"b": Retry(5), "keyed": Done()}
    settles = [
        Settle(id, fence, ends.get(id, Done()), (child,) if id == "c" else ()) for id, fence in held.items()
    ]
    assert [type(answer) for answer in both.apply(*settles)] == [Settled] * 6
    assert "settle" in long_ways


def test_a_fence_that_is_old(both: Both) -> None:
    both.apply(*one_each("ab"))
    held = both.hold(3)
    lost, *others = both.apply(*[Settle(id, fence - (id == "first"), Done()) for id, fence in held.items()])
    assert isinstance(lost, LostClaim)
    assert others == [Settled("a", DONE), Settled("b", DONE)]


def test_of_two_settles_of_a_claim_the_first_counts(both: Both) -> None:
    held = both.hold(1)
    again = [Settle("first", held["first"], Done(b"1")), Settle("first", held["first"], Done(b"2"))]
    assert both.apply(*again) == [Settled("first", DONE)] * 2


def test_a_retention_that_is_set_in_the_same_batch_counts(both: Both, long_ways: list[str]) -> None:
    held = both.hold(1)
    both.apply(SetQueue(queue="q", retention=7), Settle("first", held["first"], Done()))
    assert long_ways == []


def test_settles_of_two_queues(both: Both) -> None:
    both.apply(*one_each("ab"), Append((Spec(id="there", queue="other"),)))
    held = both.hold(3) | both.hold(1, "other")
    assert both.apply(*[Settle(id, fence, Done()) for id, fence in held.items()]) == [
        Settled(id, DONE) for id in held
    ]


def waiting(queues: str = "q", **more: Any) -> Claim:
    """What a worker asks that has nothing to do."""
    return Claim(**{"owner": "w", "wants": (Want(queues, 64, 8),), "lease": LEASE, **more})


@pytest.fixture
def idle(both: Both) -> Both:
    """Nothing is ready; one is held, and one is due only later."""
    both.hold(1)
    both.apply(*one_each(["later"], delay=1_000_000))
    return both


@pytest.mark.parametrize(
    "claim",
    [
        waiting(),
        waiting("other,q,none"),
        waiting(wants=(Want("other", 5), Want("q", 1))),
        waiting(wants=(Want("q", 9, upto=1),), once=1),
    ],
)
def test_one_that_a_worker_waits_for_begins_as_one_it_holds(
    idle: Both, claim: Claim, long_ways: list[str]
) -> None:
    appended, claimed = idle.apply(
        *one_each(["a"], max_attempts=1, timeout=5, correlation_id="c", parent="first"), claim
    )
    assert seqs([appended]) == [[3]]
    assert isinstance(claimed, Claimed)
    [held] = claimed.claims
    assert (held.id, held.fence, held.job.payload, held.job.attempts) == ("a", 1, b"a", 1)
    assert long_ways == []
    assert idle.apply(Settle("a", 1, Done(b"1"))) == [Settled("a", DONE)]


def test_a_worker_that_waits_hears_of_it_again_if_its_answer_was_lost(idle: Both) -> None:
    for _ in range(2):
        idle.apply(*one_each("a"), waiting())
    idle.apply(waiting())


NOT_ALL: dict[str, Sequence[Command]] = {
    "another is ready": one_each("z"),
    "another is due": one_each(["z"], ready_at=NOW + 6),
    "another is past its time": one_each(["z"], delay=100, ttl=1),
    "another queue has one": [Append((Spec(id="z", queue="other"),))],
    "paused": [SetQueue(queue="q", paused=True)],
    "capped": [SetQueue(queue="q", cap=1)],
    "a rate": [SetQueue(queue="q", rate=Rate(1))],
    "not yet": [SetQueue(queue="q", not_before=NOW + 1_000_000)],
    "full": [SetQueue(queue="q", capacity=1)],
    "in parts": [Append((Spec(id="z", queue="q", part="p"),))],
}


@pytest.mark.parametrize("before", NOT_ALL.values(), ids=NOT_ALL)
def test_where_there_is_more_to_a_claim_it_goes_the_general_way(
    idle: Both, before: Sequence[Command], long_ways: list[str]
) -> None:
    idle.apply(*before)
    idle.now += 10
    long_ways.clear()
    idle.apply(*one_each("a"), waiting("q,other"))
    assert long_ways


@pytest.mark.parametrize(
    "odd", [{"delay": 5}, {"ttl": 5}, {"headers": {"a": "b"}}, {"payload": b""}, {"queue": "new"}]
)
def test_a_spec_that_is_not_so_plain_is_claimed_the_general_way(idle: Both, odd: dict[str, Any]) -> None:
    idle.apply(Append((Spec(**{"id": "a", "queue": "q", "payload": b"1", **odd}),)), waiting("q,new"))


@pytest.mark.parametrize(
    "claim",
    [
        waiting("*"),
        waiting("other"),
        waiting(wants=(Want("q", 5, 0),)),
        waiting(wants=(Want("q", 5, upto=0),)),
        waiting(once=0),
        waiting(token="t"),
    ],
)
def test_a_claim_that_does_not_want_it_or_says_so_in_a_harder_way(idle: Both, claim: Claim) -> None:
    idle.apply(*one_each(["a"], max_attempts=1), claim)
    idle.apply(*one_each(["b"]), claim)
