"""A varied history with batches that may all be applied twice, and a child process that plays it until it is
killed.

    python workload.py <database> point <fault point> <nth> [big]
    python workload.py <database> io <nth> [torn] [big]     # before the nth write or sync of database or WAL
    python workload.py <database> trace [big]                  # print each write and sync, dies nowhere

The child prints a line after each acknowledged batch. Nothing in the history depends on chance or on the
clock; time goes in steps too small to be a jump, since a ledger that was reopened does not remember jumps.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import apsw

from towpath.core.checks import SECOND
from towpath.core.commands import (
    Abort,
    Append,
    Cancel,
    Claim,
    Claimed,
    Command,
    Hasten,
    Note,
    OnFailure,
    Open,
    Progress,
    Purge,
    PutChunk,
    Renew,
    Resolution,
    Resolve,
    Revive,
    Seal,
    Selector,
    SetPart,
    SetQueue,
    Settle,
    Unseal,
    Upkeep,
    Want,
)
from towpath.core.job import After, Done, FailOutcome, Key, KeyPolicy, Release, RetryOutcome, Spec, State
from towpath.core.job import ClaimedJob as Held
from towpath.core.limits import Rate
from towpath.errors import Refused
from towpath.ledger import Answer
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.testing import START, ManualClock

Batch = tuple[tuple[Command, ...], int]
STEP = SECOND // 5
LEASE = 2 * SECOND
HUGE = 9 * 1024 * 1024
"""A payload that makes the WAL long enough for a checkpoint."""


class Script:
    """Records the history while a memory ledger applies it, which provides the fences."""

    def __init__(self) -> None:
        self.model = MemoryLedger(ManualClock())
        self.now = START
        self.batches: list[Batch] = []
        self.answers: list[list[Answer]] = []
        self.dumps: list[dict[str, Any]] = [self.model.dump()]
        """The state before the first batch and after each."""

    def do(self, *commands: Command) -> list[Answer]:
        self.now += STEP
        answers = self.model.apply(commands, self.now)
        assert not any(isinstance(answer, Refused) for answer in answers), answers
        self.batches.append((commands, self.now))
        self.answers.append(answers)
        self.dumps.append(self.model.dump())
        return answers

    def claim(self, queue: str, n: int, token: str, lease: int = LEASE) -> tuple[Held, ...]:
        (answer,) = self.do(Claim(owner="worker:1", wants=(Want(queue, n),), lease=lease, token=token))
        # The answer of an empty claim is not stored, and a repetition could find a job.
        assert isinstance(answer, Claimed)
        assert answer.claims
        return answer.claims


@cache
def script(big: bool = False) -> Script:
    script = Script()
    for n in range(2):
        _appends(script, f"r{n}")
        _work(script, f"r{n}")
        _bulk(script, f"r{n}")
        if big:
            script.do(Append((Spec(id=f"r{n}-huge", queue="huge", payload=bytes([n]) * HUGE),)))
            script.do(SetQueue(queue="huge", why=f"after {n}"))
    return script


def spec(id: str, queue: str = "q", *after: str, **fields: Any) -> Spec:
    return Spec(id=id, queue=queue, payload=id.encode(), after=tuple(After(each) for each in after), **fields)


def _appends(script: Script, r: str) -> None:
    script.do(
        Append(
            (spec(f"{r}-a"), spec(f"{r}-b", "q", f"{r}-a", headers={"h": r}), spec(f"{r}-c", "q", f"{r}-b"))
        ),
        Append((spec(f"{r}-part1", "parted", part="x"), spec(f"{r}-part2", "parted", part="y"))),
        Append((spec(f"{r}-spare", priority="low"), spec(f"{r}-member-spare", "members", priority="low"))),
        SetPart(queue="parted", part="x", weight=2),
    )
    thens = {"done": (spec("then", "callbacks"),), "failed": (spec("undo", "callbacks", retention=0),)}
    script.do(
        Open(f"{r}-group", then=thens),
        Append(tuple(spec(f"{r}-member{n}", "members", group=f"{r}-group") for n in range(3))),
        Open(f"{r}-doomed", on_failure=OnFailure.ABORT, then=thens),
        Append(tuple(spec(f"{r}-doomed{n}", "doomed", group=f"{r}-doomed") for n in range(3))),
    )
    script.do(Seal(f"{r}-group"), Seal(f"{r}-doomed"))
    script.do(PutChunk(f"{r}-blob", 0, b"123"), PutChunk(f"{r}-lost", 0, b"without a job"))
    large = Spec(id=f"{r}-large", queue="large", blob=f"{r}-blob", blob_size=5, retention=0)
    script.do(PutChunk(f"{r}-blob", 1, b"45"), Append((large,)))
    script.do(Append((spec(f"{r}-waived", "waived"), spec(f"{r}-after", "waived", f"{r}-waived"))))
    script.do(Resolve(f"{r}-waived", Resolution.SKIPPED, "not needed", "ada"))
    script.do(Unseal(f"{r}-group"))
    script.do(Seal(f"{r}-group"), SetQueue(queue="members", rate=Rate(1000, burst=100)))
    script.do(
        Append((spec(f"{r}-unique1", "keys", key=Key(f"{r}-u", window=SECOND)),)),
        Append((spec(f"{r}-unique2", "keys", key=Key(f"{r}-u", window=SECOND)),)),
        Append((spec(f"{r}-replace1", "keys", key=Key(f"{r}-r", KeyPolicy.REPLACE)),)),
        Append((spec(f"{r}-replace2", "keys", key=Key(f"{r}-r", KeyPolicy.REPLACE)),)),
        Append((spec(f"{r}-serial1", "serial", key=Key("s", KeyPolicy.SERIAL)),)),
        Append(
            (
                spec(f"{r}-late", "later", delay=3 * STEP),
                spec(f"{r}-short", "later", ttl=4 * STEP, delay=SECOND),
            )
        ),
    )


def _work(script: Script, r: str) -> None:
    first, *_ = script.claim("q", 1, f"{r}-claim1")
    held = script.claim("members", 3, f"{r}-claim2")
    script.do(
        Renew(tuple((claim.id, claim.fence) for claim in (first, *held)), LEASE),
        Progress(first.id, first.fence, done=1, total=10, cursor=b"cursor"),
        Note(key="counter", value=r.encode(), token=f"{r}-note1"),
        Note(key=f"{r}-lock", value=b"mine", expect=0, ttl=4 * STEP, token=f"{r}-note2"),
    )
    script.do(
        Settle(
            first.id,
            first.fence,
            Done(b"result"),
            spawn=(spec(f"{r}-child", "children"),),
            notes=(Note(key="last", value=r.encode()),),
        ),
        *(Settle(claim.id, claim.fence, Done()) for claim in held),
    )
    again, *_ = script.claim("q", 1, f"{r}-claim3")
    script.do(Settle(again.id, again.fence, RetryOutcome(STEP, "not yet")))
    doomed, also = script.claim("doomed", 2, f"{r}-claim4")
    script.do(Settle(doomed.id, doomed.fence, FailOutcome("broken")), Settle(also.id, also.fence, Release()))
    one, two = script.claim("parted", 2, f"{r}-claim5", lease=STEP)
    script.do(Settle(one.id, one.fence, Done(), spawn=(spec(f"{r}-kid", "children", one.id),)))
    script.do(Upkeep())
    lost = script.model.get(two.id)
    assert lost is not None
    # A second loss makes it a suspect, which waits.
    assert (lost.losses, lost.state) in ((1, State.READY), (2, State.SCHEDULED))


def _bulk(script: Script, r: str) -> None:
    script.do(
        Cancel(where=Selector(ids=(f"{r}-b", f"{r}-serial1")), token=f"{r}-cancel"),
        Open(f"{r}-empty"),
        Append((spec(f"{r}-stranded", "members", group=f"{r}-empty", retention=0),)),
        Abort(f"{r}-empty"),
    )
    script.do(Revive(where=Selector(ids=(f"{r}-b",)), token=f"{r}-revive"), Upkeep())
    script.do(Purge(where=Selector(queue="members", states=(State.DONE,)), token=f"{r}-purge"))
    script.do(SetQueue(queue="keys", paused=r == "r1", why=r), Hasten("*", STEP), Upkeep())


# The child


class Counter:
    """Counts each write and sync before it happens; the process dies at number `nth`; a torn write stores the
    first half."""

    def __init__(self, nth: int, torn: bool, trace: bool) -> None:
        self.nth, self.torn, self.trace, self.seen = nth, torn, trace, 0

    def see(self, what: str, name: str, half: Callable[[], None]) -> None:
        self.seen += 1
        if self.trace:
            os.write(2, f"{what} {name.rpartition('.db')[2] or '-db'}\n".encode())
        if self.seen == self.nth:
            if self.torn:
                half()
            os.kill(os.getpid(), signal.SIGKILL)


class CountedFile(apsw.VFSFile):
    def __init__(self, name: str | apsw.URIFilename | None, flags: list[int], counter: Counter) -> None:
        super().__init__("", name, flags)
        self._name = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._counter = counter

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        real = super().xWrite
        self._counter.see("write", self._name, lambda: real(bytes(data)[: len(data) // 2], offset))
        real(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._counter.see("sync", self._name, lambda: None)
        super().xSync(flags)


class CountingVfs(apsw.VFS):
    def __init__(self, counter: Counter) -> None:
        super().__init__("counting", "")
        self._counter = counter

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return CountedFile(name, flags, self._counter)


def main(path: str, mode: str, *rest: str) -> None:
    from towpath.ledger.sqlite.ledger import SqliteLedger, SqliteOptions
    from towpath.testing.faults import die_at

    batches = script("big" in rest).batches
    if mode == "point":
        options = SqliteOptions(fault=die_at(rest[0], int(rest[1])))
    else:
        nth = int(rest[0]) if mode == "io" else 0
        vfs = CountingVfs(Counter(nth, "torn" in rest, mode == "trace"))
        options = SqliteOptions(vfs="counting")
    ledger = SqliteLedger(Path(path), options, ManualClock())
    for number, (commands, now) in enumerate(batches, 1):
        ledger.apply(commands, now)
        os.write(1, f"{number}\n".encode())
    ledger.close()
    if mode != "point":
        vfs.unregister()


if __name__ == "__main__":
    main(*sys.argv[1:])
