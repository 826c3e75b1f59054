"""The fast paths of the SQLite ledger: same rows and answers as the model, and the counters show that they
are taken."""

from __future__ import annotations

import random
from collections import Counter
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
    Progress,
    SetQueue,
    Settle,
    Settled,
    Upkeep,
    Want,
)
from towpath.core.job import DONE, Done, Key, Outcome, Release, RetryOutcome, Spec
from towpath.core.limits import Rate
from towpath.errors import LostClaim, QueueFull
from towpath.ledger import Answer
from towpath.ledger.model_ledger import ModelLedger
from towpath.ledger.sqlite.ledger import SqliteLedger
from towpath.ledger.sqlite.rows import PIECE
from towpath.testing.pair import Pair

NOW = 1_000_000_000
LEASE = 10_000_000


class ComparedLedgers:
    """The model and SQLite side by side. Each batch is followed by a comparison of every column."""

    def __init__(self, path: Path) -> None:
        sqlite = SqliteLedger(path)
        self.fast_paths = sqlite.fast_paths
        self.pair = Pair(ModelLedger(), sqlite)
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
def both(tmp_path: Path) -> Iterator[ComparedLedgers]:
    both = ComparedLedgers(tmp_path / "a.db")
    with closing(both.pair):
        both.apply(Append((Spec(id="first", queue="q", payload=b"1"),)))
        yield both


@pytest.fixture
def refused(both: ComparedLedgers) -> Counter[tuple[str, str]]:
    """The fast paths that a rule refused since the start of the test, with the reason."""
    both.fast_paths.refused.clear()
    return both.fast_paths.refused


def one_each(ids: Sequence[str], **fields: Any) -> list[Append]:
    return [Append((Spec(id=id, queue="q", payload=id.encode(), **fields),)) for id in ids]


def seqs(answers: Sequence[Answer]) -> list[list[int]]:
    return [[placed.seq for placed in answer.jobs] for answer in answers if isinstance(answer, Appended)]


def test_many_callers_in_one_batch(both: ComparedLedgers, refused: Counter[tuple[str, str]]) -> None:
    answers = both.apply(*one_each([f"a{n:02}" for n in range(70)]))
    assert seqs(answers) == [[n] for n in range(2, 72)]
    assert not refused


@pytest.mark.parametrize("count", [2, 3, 32, 33, 70])
def test_specs_that_differ_in_id_and_payload_only(
    both: ComparedLedgers, refused: Counter[tuple[str, str]], count: int
) -> None:
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
    assert not refused


def test_specs_that_differ_in_more(both: ComparedLedgers, refused: Counter[tuple[str, str]]) -> None:
    both.apply(*one_each("ab"), *one_each("cd", priority=2), *one_each("e"))
    assert not refused


def test_an_id_between_theirs_is_none_of_them(
    both: ComparedLedgers, refused: Counter[tuple[str, str]]
) -> None:
    """Two processes that append at the same time have such ids."""
    both.apply(*one_each(["a", "z"]))
    assert not refused
    held = both.hold(3)
    both.apply(SetQueue(queue="q", retention=0), *[Settle(id, fence, Done()) for id, fence in held.items()])
    both.apply(Upkeep())
    assert both.pair.right.get("first") is None
    both.apply(*one_each(["b", "y"]))
    assert not refused
    # Deleted ids are known too.
    both.apply(*one_each(["c", "first"]))
    assert refused == {("append", "known_id"): 1}


def test_commands_of_several_specs_waiting_or_not_with_headers_and_long_or_no_payloads(
    both: ComparedLedgers, refused: Counter[tuple[str, str]]
) -> None:
    some = tuple(
        Spec(id=f"b{n}", queue="q", payload=bytes(n), delay=n % 2 * 1000, headers={"n": str(n)})
        for n in range(5)
    )
    large = Spec(id="large", queue="q", payload=bytes(3 * 1024 * 1024))
    answers = both.apply(Append(some), Append((large,)), *one_each(["c"], ttl=5))
    assert seqs(answers) == [[2, 3, 4, 5, 6], [7], [8]]
    assert not refused


def test_a_capacity_that_holds_all_of_them(both: ComparedLedgers, refused: Counter[tuple[str, str]]) -> None:
    both.apply(SetQueue(queue="q", capacity=4))
    assert len(seqs(both.apply(*one_each("abc")))) == 3
    assert not refused


def test_a_capacity_that_holds_only_some_refuses_the_others(
    both: ComparedLedgers, refused: Counter[tuple[str, str]]
) -> None:
    both.apply(SetQueue(queue="q", capacity=3))
    a, b, last = both.apply(*one_each("abc"))
    assert seqs([a, b]) == [[2], [3]]
    assert isinstance(last, QueueFull)
    assert refused


@pytest.mark.parametrize("ids", ["abca", ["a", "first", "b"]], ids=["twice in the batch", "there already"])
def test_an_id_that_is_known_has_its_first_answer(both: ComparedLedgers, ids: Sequence[str]) -> None:
    both.apply(*one_each(ids))


@pytest.mark.parametrize(
    "odd", [{"key": Key("k")}, {"part": "p"}, {"queue": "new"}], ids=lambda odd: next(iter(odd))
)
def test_one_that_is_not_plain_takes_the_others_along(
    both: ComparedLedgers, refused: Counter[tuple[str, str]], odd: dict[str, object]
) -> None:
    strange = Spec(**{"id": "odd", "queue": "q", **odd})  # type: ignore[arg-type]
    both.apply(*one_each("ab"), Append((strange,)), *one_each("c"))
    assert refused


def test_one_spec_with_every_plain_field(both: ComparedLedgers, refused: Counter[tuple[str, str]]) -> None:
    fields = {"priority": -3, "ttl": 9, "max_attempts": 2, "timeout": 5, "retention": 7, "parent": "first"}
    before = both.fast_paths.taken["append"]
    for id, more in (("a", {}), ("b", fields), ("c", {"correlation_id": "x", "content_type": "text/plain"})):
        both.apply(*one_each([id], **more))
    assert both.fast_paths.taken["append"] == before + 3
    assert not refused


def test_a_claim_has_small_and_large_payloads_headers_and_cursors(both: ComparedLedgers) -> None:
    large, most = b"l" * 100_000, PIECE + 1
    specs = [
        Spec(id="empty", queue="b"),
        Spec(id="small", queue="b", payload=b"s\0s"),
        Spec(id="headers", queue="b", payload=b"h", headers={"a": "1"}),
        Spec(id="large", queue="b", payload=large),
        Spec(id="pieces", queue="b", payload=b"p" * most),
        Spec(id="last", queue="b", payload=b"x"),
    ]
    both.apply(Append(tuple(specs)))
    (claimed,) = both.apply(Claim(owner="w", wants=(Want("b", 1),), lease=LEASE))
    assert isinstance(claimed, Claimed)
    both.apply(Progress("empty", 1, cursor=b"c"), Settle("empty", 1, Release()))
    (claimed,) = both.apply(Claim(owner="w", wants=(Want("b", 1000, once=0),), lease=LEASE))
    assert isinstance(claimed, Claimed)
    found = {claim.id: claim.job for claim in claimed.claims}
    assert {id: job.payload for id, job in found.items()} == {spec.id: spec.payload for spec in specs}
    assert (found["empty"].cursor, found["headers"].headers) == (b"c", {"a": "1"})


def test_a_claim_that_may_take_no_job_with_one_attempt(both: ComparedLedgers) -> None:
    both.apply(Append(tuple([Spec(id=f"{n}", queue="b", max_attempts=3 - n) for n in range(3)])))
    (claimed,) = both.apply(Claim(owner="w", wants=(Want("b", 9, once=0),), lease=LEASE))
    assert isinstance(claimed, Claimed)
    assert [claim.id for claim in claimed.claims] == ["0", "1"]


def test_settles_with_and_without_results(both: ComparedLedgers) -> None:
    both.apply(*one_each("abc"))
    held = both.hold(4)
    answers = both.apply(
        *[Settle(id, fence, Done(None if id == "a" else id.encode())) for id, fence in held.items()]
    )
    assert answers == [Settled(id, DONE) for id in held]
    assert both.apply(*[Settle(id, fence, Done()) for id, fence in held.items()]) == answers


def test_settles_with_consequences_are_applied_beside_them(both: ComparedLedgers) -> None:
    keyed = Append((Spec(id="keyed", queue="q", key=Key("k")),))
    child = Spec(id="child", queue="q")
    both.apply(*one_each("abcd"), keyed)
    held = both.hold(6)
    ends: dict[str, Outcome] = {"b": RetryOutcome(5), "keyed": Done()}
    settles = [
        Settle(id, fence, ends.get(id, Done()), (child,) if id == "c" else ()) for id, fence in held.items()
    ]
    assert [type(answer) for answer in both.apply(*settles)] == [Settled] * 6


def test_a_fence_that_is_old(both: ComparedLedgers) -> None:
    both.apply(*one_each("ab"))
    held = both.hold(3)
    lost, *others = both.apply(*[Settle(id, fence - (id == "first"), Done()) for id, fence in held.items()])
    assert isinstance(lost, LostClaim)
    assert others == [Settled("a", DONE), Settled("b", DONE)]


def test_of_two_settles_of_a_claim_the_first_counts(both: ComparedLedgers) -> None:
    held = both.hold(1)
    again = [Settle("first", held["first"], Done(b"1")), Settle("first", held["first"], Done(b"2"))]
    assert both.apply(*again) == [Settled("first", DONE)] * 2


def test_a_retention_that_is_set_in_the_same_batch_counts(both: ComparedLedgers) -> None:
    held = both.hold(1)
    both.apply(SetQueue(queue="q", retention=7), Settle("first", held["first"], Done()))


def test_settles_of_two_queues(both: ComparedLedgers) -> None:
    both.apply(*one_each("ab"), Append((Spec(id="there", queue="other"),)))
    held = both.hold(3) | both.hold(1, "other")
    assert both.apply(*[Settle(id, fence, Done()) for id, fence in held.items()]) == [
        Settled(id, DONE) for id in held
    ]


def waiting(queues: str = "q", **more: Any) -> Claim:
    """The claim of an idle worker."""
    return Claim(**{"owner": "w", "wants": (Want(queues, 64, 8),), "lease": LEASE, **more})


@pytest.fixture
def idle(both: ComparedLedgers) -> ComparedLedgers:
    """No job is ready; one is held, and one is due later."""
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
    idle: ComparedLedgers, claim: Claim, refused: Counter[tuple[str, str]]
) -> None:
    appended, claimed = idle.apply(
        *one_each(["a"], max_attempts=1, timeout=5, correlation_id="c", parent="first"), claim
    )
    assert seqs([appended]) == [[3]]
    assert isinstance(claimed, Claimed)
    [held] = claimed.claims
    assert (held.id, held.fence, held.job.payload, held.job.attempts) == ("a", 1, b"a", 1)
    assert idle.fast_paths.taken["append_claim"] == 1
    assert not refused
    assert idle.apply(Settle("a", 1, Done(b"1"))) == [Settled("a", DONE)]


def test_an_append_and_claim_that_is_repeated(idle: ComparedLedgers) -> None:
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
def test_where_there_is_more_to_a_claim_the_fast_path_is_refused(
    idle: ComparedLedgers, before: Sequence[Command], refused: Counter[tuple[str, str]]
) -> None:
    idle.apply(*before)
    idle.now += 10
    refused.clear()
    idle.apply(*one_each("a"), waiting("q,other"))
    assert refused


@pytest.mark.parametrize(
    "odd", [{"delay": 5}, {"ttl": 5}, {"headers": {"a": "b"}}, {"payload": b""}, {"queue": "new"}]
)
def test_a_spec_that_is_not_so_plain_is_claimed_too(idle: ComparedLedgers, odd: dict[str, Any]) -> None:
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
def test_a_claim_that_does_not_want_it_or_has_another_form(idle: ComparedLedgers, claim: Claim) -> None:
    idle.apply(*one_each(["a"], max_attempts=1), claim)
    idle.apply(*one_each(["b"]), claim)


class Histories:
    """Random batches of the forms of the fast paths, and commands after which the rules refuse them."""

    def __init__(self, seed: int, both: ComparedLedgers) -> None:
        self.chance, self.both = random.Random(seed), both
        self.made = 0
        self.held: dict[str, int] = {}

    def _maybe(self, odds: float) -> bool:
        return self.chance.random() < odds

    def spec(self) -> Spec:
        chance = self.chance
        self.made += 1
        known = self._maybe(0.03) and self.made > 2
        fields: dict[str, Any] = {
            "kind": chance.choice(("k", "l")),
            "content_type": "text/plain",
            "priority": chance.randint(0, 9),
            "ttl": chance.choice((5, 500, 5_000_000)),
            "max_attempts": chance.randint(1, 4),
            "max_losses": chance.randint(1, 4),
            "timeout": chance.randint(1, 9),
            "retention": chance.randint(0, 9),
            "parent": "p",
            "generation": chance.randint(1, 9),
            "correlation_id": "c",
            "headers": {"h": "1"},
            "delay": chance.choice((1, 3, 1_000_000)),
            "payload": chance.choice((b"", b"2", bytes(1024 * 1024 + 1))),
        }
        rare = {"headers": 0.05, "delay": 0.1, "payload": 0.05, "ttl": 0.1}
        chosen = {name: value for name, value in fields.items() if self._maybe(rare.get(name, 0.2))}
        number = chance.randrange(1, self.made) if known else self.made
        queue = "other" if self._maybe(0.02) else "q"
        return Spec(**{"id": f"j{number:04}", "queue": queue, "payload": b"1", **chosen})

    def append(self, count: int) -> Append:
        """Two specs of one command must not have the same id."""
        return Append(tuple({spec.id: spec for spec in [self.spec() for _ in range(count)]}.values()))

    def claim(self) -> Claim:
        queues = self.chance.choice(("q", "q", "q", "q,other", "*"))
        once = self.chance.choice((None, None, 1))
        return Claim(owner=self.chance.choice("vw"), wants=(Want(queues, 60),), lease=LEASE, once=once)

    def batch(self) -> list[Command]:
        chance = self.chance
        draw = chance.random()
        if draw < 0.3:
            return [self.append(chance.randint(1, 3)) for _ in range(chance.randint(1, 9))]
        if draw < 0.6:
            return [Append((self.spec(),)), self.claim()]
        if draw < 0.85:
            settles = [
                Settle(id, fence, RetryOutcome(5) if self._maybe(0.1) else Done(b"r"))
                for id, fence in self.held.items()
            ]
            return [*settles, self.claim()]
        if draw < 0.95:
            capacity = chance.choice((None, None, 5, 50))
            return [
                SetQueue(
                    queue="q", paused=self._maybe(0.05), capacity=capacity, retention=chance.choice((None, 9))
                )
            ]
        return [Upkeep()]

    def step(self) -> None:
        self.both.now += self.chance.choice((0, 1, 10, 1_000_000))
        commands = self.batch()
        for command, answer in zip(commands, self.both.apply(*commands), strict=True):
            if isinstance(command, Settle):
                self.held.pop(command.id)
            if isinstance(answer, Claimed):
                self.held.update({claim.id: claim.fence for claim in answer.claims})


@pytest.mark.parametrize("seed", range(15))
def test_random_histories_that_take_the_fast_paths(seed: int, both: ComparedLedgers) -> None:
    history = Histories(seed, both)
    for _ in range(90):
        history.step()
    counts = both.fast_paths
    assert counts.taken["append"] > 0
    assert counts.taken["append_claim"] > 0
    assert counts.refused
    assert not counts.failed


def test_an_error_inside_a_fast_path_is_counted_and_logged_once(
    both: ComparedLedgers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> int:
        raise LookupError("a defect")

    monkeypatch.setattr("towpath.ledger.sqlite.rows.ready_columns", broken)
    for id in "ab":
        both.apply(*one_each(id))
    assert both.fast_paths.failed == {"append": 2}
    assert [record.message.count("LookupError: a defect") for record in caplog.records] == [1]
    assert caplog.records[0].exc_info is not None
