"""The reply to COMMIT was lost. The caller repeats the batch: the same answers, and the state as if applied
once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import get_args

import apsw
import pytest
from msgspec.structs import replace

from towpath.core.checks import SECOND
from towpath.core.commands import (
    Abort,
    Append,
    Appended,
    Cancel,
    Canceled,
    Claim,
    Command,
    Hasten,
    Note,
    Noted,
    Open,
    Placed,
    Progress,
    Purge,
    Purged,
    PutChunk,
    Renew,
    Renewed,
    Resolution,
    Resolve,
    Revive,
    Revived,
    Seal,
    Selector,
    SetPart,
    SetQueue,
    Settle,
    Settled,
    Unseal,
    Upkeep,
    Upkept,
    Want,
)
from towpath.core.job import (
    Done,
    FailOutcome,
    Outcome,
    Reason,
    Refuse,
    Release,
    RetryOutcome,
    SnoozeOutcome,
    Spec,
    State,
    Stop,
)
from towpath.core.limits import Rate
from towpath.core.views import Query
from towpath.errors import Damaged
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
from towpath.testing import ManualClock
from towpath.testing.suite.harness import LEASE, Harness, spec, unique
from towpath.testing.suite.harness import replace as newest

Case = Callable[[Harness], list[Command]]
"""Prepares a ledger, and returns the batch that will lose its reply."""

OUTCOMES: tuple[Outcome, ...] = (
    Done(b"result"),
    RetryOutcome(SECOND, "again"),
    SnoozeOutcome(SECOND),
    Release(),
    Refuse(SECOND, "not here"),
    FailOutcome("never"),
    Stop("asked"),
)


class ReplyLost(Exception):
    pass


class Line:
    """The fault that loses the reply once, after COMMIT."""

    def __init__(self) -> None:
        self.cut = False

    def __call__(self, point: str) -> None:
        if self.cut and point == "committed":
            self.cut = False
            raise ReplyLost


def appends(harness: Harness) -> list[Command]:
    harness.add("old", key=unique("u"))
    harness.add("older", key=newest("r"))
    harness.add("needed")
    return [
        Append((spec("a"), spec("b", after=("a", "needed")))),
        Append((spec("refused", key=unique("u")), spec("c", after=("refused",)))),
        Append(
            (
                spec("newer", key=newest("r"), part="p"),
                spec("late", delay=SECOND, headers={"h": "v"}, payload=b"{}"),
            )
        ),
    ]


def refused_append(harness: Harness) -> list[Command]:
    harness.set_queue("small", capacity=1)
    return [
        Append((spec("a", after=("nobody",)),)),
        Append((spec("b", "small"), spec("c", "small"))),
        Append((spec("d"),)),
    ]


def claim(harness: Harness) -> list[Command]:
    harness.append(
        *(spec(f"{n}", payload=b"p", part="ab"[n % 2]) for n in range(4)),
        spec("solo", "other", max_attempts=1),
    )
    harness.set_queue("other", rate=Rate(1))
    return [Claim(owner="me", wants=(Want("q", 3), Want("*", 2)), lease=LEASE, token="t")]


def renew(harness: Harness) -> list[Command]:
    one, two = harness.started("a"), harness.started("b")
    harness.cancel("b")
    harness.jump(SECOND)
    return [Renew(((one.id, one.fence), (two.id, two.fence), ("gone", 1)), 2 * LEASE)]


def progress(harness: Harness) -> list[Command]:
    held = harness.started("a")
    return [
        Progress(held.id, held.fence, 3, 7, b"cursor"),
        Progress(held.id, held.fence, 4),
        Progress("a", 9),
    ]


def settle_with(outcome: Outcome) -> Case:
    def settle(harness: Harness) -> list[Command]:
        harness.set_queue(rate=Rate(10, burst=5))
        harness.open("g", then={"done": (spec("then"),), "failed": (spec("undo"),)})
        held = harness.started("a", part="p")
        harness.append(spec("b", after=("a",)), spec("member", "members", group="g"))
        harness.seal("g")
        member = harness.take("members")
        return [
            Settle(held.id, held.fence, outcome),
            Settle(member.id, member.fence, outcome),
            Settle("a", 7, outcome),
        ]

    return settle


def settle_with_children(harness: Harness) -> list[Command]:
    held, other = harness.started("a"), harness.started("b")
    harness.write("n", b"before")
    notes = (Note(key="n", value=b"after"), Note(key="lock", value=b"1", expect=0, ttl=SECOND))
    conflict = (Note(key="lock", value=b"2", expect=0),)
    return [
        Settle(
            "a", held.fence, Done(b"r"), spawn=(spec("child"), spec("next", after=("child",))), notes=notes
        ),
        Settle("b", other.fence, Done(), spawn=(spec("unborn"),), notes=conflict),
    ]


def cancel(harness: Harness) -> list[Command]:
    harness.started("running")
    harness.append(spec("a"), spec("b", after=("a",)), spec("c", delay=SECOND))
    return [Cancel(where=Selector(queue="q"), limit=3, token="t")]


def revive(harness: Harness) -> list[Command]:
    harness.append(
        spec("a"), spec("b", after=("a",)), spec("older", key=newest("k")), spec("newer", key=newest("k"))
    )
    harness.cancel("a")
    return [Revive(where=Selector(ids=("a", "b", "older")), token="t")]


def resolve(harness: Harness) -> list[Command]:
    harness.append(spec("a"), spec("b", after=("a",)), spec("c"), spec("d", after=("c",)))
    harness.cancel("a")
    return [
        Resolve("a", Resolution.MARKED, "repaired", "ada", b"1"),
        Resolve("c", Resolution.SKIPPED, "not needed", "ada"),
        Resolve("unknown", Resolution.SKIPPED, "no such job", "ada"),
    ]


def purge(harness: Harness) -> list[Command]:
    harness.append(spec("a"), spec("b"))
    harness.cancel("a", "b")
    return [Purge(where=Selector(queue="q"), limit=1, token="t")]


def open_groups(harness: Harness) -> list[Command]:
    return [Open("g", then={"done": (spec("then"),)}), Append((spec("a", group="g"),)), Open("g")]


def seal(harness: Harness) -> list[Command]:
    harness.open("g")
    harness.open("empty", then={"done": (spec("then"),)})
    harness.add("a", group="g")
    return [Seal("g"), Seal("empty"), Seal("unknown")]


def unseal(harness: Harness) -> list[Command]:
    harness.open("g")
    harness.append(
        spec("a", group="g"), spec("b", group="g", after=("a",)), spec("c", group="g", delay=SECOND)
    )
    harness.seal("g")
    return [Unseal("g"), Unseal("unknown")]


def abort(harness: Harness) -> list[Command]:
    harness.open("g", then={"canceled": (spec("undo"),)})
    harness.append(spec("a", group="g"), spec("b", group="g"))
    harness.seal("g")
    harness.take()
    return [Abort("g"), Abort("unknown")]


def set_queue(harness: Harness) -> list[Command]:
    harness.add("a")
    rate = Rate(5, burst=2)
    return [
        SetQueue(
            queue="q", paused=True, why="w", capacity=9, cap=1, rate=rate, not_before=7, retention=0, keep=1
        )
    ]


def set_part(harness: Harness) -> list[Command]:
    harness.add("a", part="p")
    return [
        SetPart(
            queue="q",
            part="p",
            paused=True,
            why="w",
            cap=2,
            rate=Rate(5),
            not_before=harness.now + 9,
            weight=3,
        )
    ]


def note(harness: Harness) -> list[Command]:
    harness.write("a", b"1")
    harness.write("gone", b"1")
    return [
        Note(key="a", value=b"2", token="t1"),
        Note(key="b", value=b"new", expect=0, ttl=SECOND, token="t2"),
        Note(key="gone", value=None, token="t3"),
        Note(key="a", value=b"3", expect=999, token="t4"),
    ]


def put_chunks(harness: Harness) -> list[Command]:
    """The append takes the blob; a repeated chunk of a blob with a job changes nothing."""
    large = Append((Spec(id="large", queue="q", blob="b", blob_size=5),))
    return [PutChunk("b", 0, b"123"), PutChunk("b", 1, b"45"), large, PutChunk("b", 2, b"refused")]


CASES: dict[str, Case] = {
    "append": appends,
    "refused_append": refused_append,
    "claim": claim,
    "renew": renew,
    "progress": progress,
    "settle_with_children": settle_with_children,
    "cancel": cancel,
    "revive": revive,
    "resolve": resolve,
    "purge": purge,
    "open": open_groups,
    "seal": seal,
    "unseal": unseal,
    "abort": abort,
    "set_queue": set_queue,
    "set_part": set_part,
    "note": note,
    "put_chunk": put_chunks,
}
CASES |= {f"settle_{type(outcome).__name__.lower()}": settle_with(outcome) for outcome in OUTCOMES}


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def harness(tmp_path: Path, line: Line) -> Iterator[Harness]:
    with closing(SqliteLedger(tmp_path / "cut.db", SqliteOptions(fault=line), ManualClock())) as ledger:
        yield Harness(ledger)
        assert ledger.integrity() == []


@pytest.fixture
def calm(tmp_path: Path) -> Iterator[Harness]:
    """The same without a fault."""
    with closing(SqliteLedger(tmp_path / "calm.db", SqliteOptions(), ManualClock())) as ledger:
        yield Harness(ledger)


def lose_reply(harness: Harness, line: Line, commands: list[Command]) -> None:
    line.cut = True
    with pytest.raises(ReplyLost):
        harness.ask(*commands)
    assert not line.cut


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_repeated_after_a_lost_reply(harness: Harness, calm: Harness, line: Line, case: Case) -> None:
    commands = case(harness)
    assert case(calm) == commands
    first = calm.ask(*commands)
    lose_reply(harness, line, commands)
    assert harness.ledger.dump() == calm.ledger.dump()
    assert harness.ask(*commands) == first
    assert harness.ledger.dump() == calm.ledger.dump()
    assert harness.ask(*commands) == first


def test_every_command_is_among_the_cases() -> None:
    used = {
        type(command) for case in CASES.values() for command in case(Harness(MemoryLedger(ManualClock())))
    }
    # These two return how much they did, which is nothing the second time.
    assert set(get_args(Command)) - used == {Upkeep, Hasten}


def test_hasten_repeated_after_a_lost_reply(harness: Harness, calm: Harness, line: Line) -> None:
    for each in (harness, calm):
        each.append(spec("a", priority="low"), spec("b", part="p"))
        each.jump(SECOND)
    calm.ask(Hasten("q", SECOND))
    lose_reply(harness, line, [Hasten("q", SECOND)])
    harness.ask(Hasten("q", SECOND))
    assert harness.ledger.dump() == calm.ledger.dump()


def test_what_the_first_answers_say(harness: Harness, line: Line) -> None:
    """The compared answers are not empty."""
    held = harness.started("a")
    commands: list[Command] = [
        Settle("a", held.fence, Done(), spawn=(spec("b"), spec("c"))),
        Cancel(where=Selector(ids=("b",)), token="1"),
        Revive(where=Selector(ids=("b",)), token="2"),
        Purge(where=Selector(ids=("a",)), token="3"),
        Note(key="k", value=b"v", token="4"),
        Append((spec("a"),)),
        Renew((("a", 1),), 5),
    ]
    lose_reply(harness, line, commands)
    assert harness.ask(*commands) == [
        Settled("a", State.DONE),
        Canceled(1, 0),
        Revived(1),
        Purged(1),
        Noted("k", 1, 1),
        Appended((Placed("a", 1),)),
        Renewed(harness.now + 5, lost=("a",)),
    ]


def test_upkeep_repeated_has_nothing_left_to_do(harness: Harness, calm: Harness, line: Line) -> None:
    """It has no token: the second answer counts no rows and has the same next time."""
    for each in (harness, calm):
        each.append(spec("a"), spec("b", ttl=SECOND), spec("c", delay=SECOND), spec("d", retention=0))
        each.take(lease=SECOND // 4)
        each.cancel("d")
        each.advance(SECOND, step=SECOND // 4)
    (first,) = calm.ask(Upkeep())
    assert isinstance(first, Upkept)
    assert (first.reaped, first.expired, first.woken, first.purged) == (1, 1, 1, 1)
    lose_reply(harness, line, [Upkeep()])
    assert harness.ask(Upkeep()) == [replace(first, reaped=0, expired=0, woken=0, purged=0, swept=0)]
    assert harness.ledger.dump() == calm.ledger.dump()


def test_a_claim_without_a_token_is_found_and_given_back(harness: Harness, line: Line) -> None:
    harness.append(*(spec(f"{n}") for n in range(4)))
    (known,) = harness.claim(owner="me:7f3a")
    lose_reply(harness, line, [Claim(owner="me:7f3a", wants=(Want("q", 2),), lease=LEASE)])
    harness.claim(owner="other:1")
    mine = harness.ledger.find(Query(states=(State.RUNNING,), owner="me:7f3a", oldest_first=True)).jobs
    unknown = [job for job in mine if job.id != known.id]
    assert [job.id for job in unknown] == ["1", "2"]
    for job in unknown:
        assert harness.ask(Settle(job.id, job.fence, Release())) == [Settled(job.id, State.READY)]
        back = harness.job(job.id)
        assert (back.state, back.reason, back.attempts, back.failures, back.losses) == (
            State.READY,
            Reason.RELEASED,
            0,
            0,
            0,
        )
    assert [claim.id for claim in harness.claim(n=9)] == ["1", "2"]


class LossySync(apsw.VFSFile):
    """Syncs, and then reports an error, so that the connection loses the reply."""

    def __init__(self, name: str | apsw.URIFilename | None, flags: list[int], line: Line) -> None:
        super().__init__("", name, flags)
        self._line = line

    def xSync(self, flags: int) -> None:  # noqa: N802
        super().xSync(flags)
        if self._line.cut:
            self._line.cut = False
            raise apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)

    def excepthook(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        """It is expected."""
        return True


class LossyVfs(apsw.VFS):
    def __init__(self, line: Line) -> None:
        super().__init__("lossy", "")
        self._line = line

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return LossySync(name, flags, self._line)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_repeated_after_a_sync_that_failed(tmp_path: Path, calm: Harness, line: Line, case: Case) -> None:
    """COMMIT raises, with the commit already in the log. For this process it did not happen; after a power
    cut the files contain it. Both repeat the batch."""
    vfs = LossyVfs(line)
    with closing(SqliteLedger(tmp_path / "a.db", SqliteOptions(vfs="lossy"), ManualClock())) as ledger:
        harness = Harness(ledger)
        commands = case(harness)
        case(calm)
        before = calm.ledger.dump()
        first = calm.ask(*commands)
        line.cut = True
        with pytest.raises(Damaged):
            harness.ask(*commands)
        assert ledger.dump() == before
        for suffix in (
            "",
            "-wal",
        ):  # by another process: closing the file of a database drops the locks of this process on it
            subprocess.run(["cp", tmp_path / f"a.db{suffix}", tmp_path / f"after.db{suffix}"], check=True)
        assert harness.ask(*commands) == first
        assert ledger.dump() == calm.ledger.dump()
        assert ledger.integrity() == []
    vfs.unregister()
    with closing(SqliteLedger(tmp_path / "after.db", SqliteOptions(), ManualClock())) as survivor:
        assert survivor.dump() == calm.ledger.dump()
        assert Harness(survivor, harness.now).ask(*commands) == first
        assert survivor.dump() == calm.ledger.dump()
        assert survivor.integrity() == []
