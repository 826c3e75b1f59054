"""`towpath ledger copy`: the same ledger in another place, or a target that no process opens."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from towpath import open_ledger
from towpath.core.commands import Append, Claim, Command, Note, SetPart, Upkeep, Want
from towpath.core.job import Key, KeyPolicy, Spec
from towpath.errors import InvalidInput, NotALedger, StoreFailed
from towpath.ledger import Ledger
from towpath.ledger.postgres.ledger import PostgresLedger, options_of
from towpath.ledger.tables import transfer
from towpath.operations import maintenance
from towpath.testing.clock import START
from towpath.testing.moves import Moves
from towpath.testing.pair import Pair, differences
from towpath.testing.postgres import Server

Places = Callable[[str], str]


@pytest.fixture
def place(postgres: Server, tmp_path: Path) -> Iterator[Places]:
    """A function that returns URLs of new ledgers: `sqlite` or `postgres`."""
    count = iter(range(100))
    with ExitStack() as stack:

        def make(kind: str) -> str:
            if kind == "sqlite":
                return f"sqlite:///{tmp_path}/{next(count)}.db"
            url = postgres.create_database()
            stack.callback(postgres.drop_database, url)
            return f"{url}?schema=My%20%22towpath.%22"

        yield make


def silent(what: str, done: int, total: int) -> None:
    pass


def play(ledgers: list[Ledger], moves: Moves, now: int, steps: int) -> int:
    """Apply the same random commands to all of them; return the time at the end."""
    for _ in range(steps):
        now += moves.step()
        batch = tuple(moves.batch())
        answers = [ledger.apply(batch, now) for ledger in ledgers]
        for each in answers:
            assert differences(answers[0], each) == []
        moves.observe(answers[0])
    return now


def written(url: str, seed: int, steps: int = 60) -> None:
    ledger = open_ledger(url)
    play([ledger], Moves(random.Random(seed)), START, steps)
    ledger.close()


def dump(url: str) -> dict[str, object]:
    ledger = open_ledger(url)
    try:
        assert ledger.check() == []
        return ledger.dump()
    finally:
        ledger.close()


ROUTES = [("sqlite", "postgres"), ("postgres", "sqlite"), ("sqlite", "sqlite"), ("postgres", "postgres")]


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize(("kind", "other"), ROUTES)
def test_the_copy_is_the_same_ledger_and_continues_alike(
    kind: str, other: str, seed: int, place: Places
) -> None:
    source, target = place(kind), place(other)
    ledger, moves = open_ledger(source), Moves(random.Random(seed))
    now = play([ledger], moves, START, 80)
    before = ledger.dump()
    ledger.close()
    copied = maintenance.copy(source, target, silent)
    assert copied.rows["job"] == len(before["jobs"])
    assert copied.rows["attempt"] == len(before["attempts"]) > 0
    # Both are opened again: clock jumps that a process has recorded are not stored in a ledger.
    pair = Pair(open_ledger(source), open_ledger(target))
    assert differences(before, pair.right.dump()) == []
    pair.compare(now)
    now = play([pair.left, pair.right], moves, now, 40)
    pair.compare(now)
    pair.close()


def test_a_batch_sees_what_it_counted_itself(place: Places) -> None:
    """A defect that a history after a copy found: the reaped lease made a part ready, and the next claim of
    the batch read the old counts of the part."""
    moves = Moves(random.Random(4))
    ledgers = [open_ledger("memory://"), open_ledger(place("postgres"))]
    play(ledgers, moves, START, 130)
    for ledger in ledgers:
        ledger.close()


def test_leases_parts_notes_and_large_bodies(place: Places) -> None:
    source = place("sqlite")
    ledger = open_ledger(source)
    jobs = [
        Spec(id=f"j{n}", queue="q", payload=bytes([n]) * (n * 700_000), headers={"n": str(n)})
        for n in range(6)
    ]
    serial = Spec(id="s", queue="only/parts", key=Key("k", KeyPolicy.SERIAL))
    commands: list[Command] = [
        Append((*jobs, serial)),
        SetPart(queue="no/jobs", part="p", cap=3),
        Note(key="towpath.note", value=b"\0"),
    ]
    ledger.apply([*commands, Claim(owner="me", wants=(Want("q", 2),), lease=60_000_000)], START)
    before = ledger.dump()
    ledger.close()
    far, back = place("postgres"), place("sqlite")
    maintenance.copy(source, far, silent)
    assert differences(before, dump(far)) == []
    maintenance.copy(far, back, silent)
    assert differences(before, dump(back)) == []
    again = open_ledger(far)
    job = again.get("j0")
    assert job is not None
    assert (job.owner, job.fence, job.lease_until) == ("me", 1, START + 60_000_000)
    again.apply([Upkeep(limit=1000)], START + 120_000_000)
    assert again.check() == []
    again.close()


class Broken(Exception):
    pass


@pytest.mark.parametrize(("kind", "other"), ROUTES[:2])
def test_it_goes_on_wherever_it_was_interrupted(
    kind: str, other: str, place: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "ROWS", 7)
    source, target = place(kind), place(other)
    written(source, 3, 100)
    before = dump(source)
    steps: list[str] = []

    def break_off(what: str, done: int, total: int) -> None:
        steps.append(what)
        if what.startswith("copying") or steps.count(what) == 1:
            raise Broken

    interruptions = 0
    while True:
        try:
            copied = maintenance.copy(source, target, break_off)
        except Broken:
            interruptions += 1
            with pytest.raises(NotALedger, match="a copy into it is not finished"):
                open_ledger(target)
        else:
            break
    assert interruptions > 20
    assert copied.resumed
    assert len([what for what in steps if what == "copying job"]) == -(-len(before["jobs"]) // 7)  # type: ignore[arg-type]
    assert differences(before, dump(target)) == []


KILLED = """
import os, signal, sys
from towpath.ledger.tables import transfer
from towpath.operations import maintenance
transfer.ROWS = 7
left = int(sys.argv[3])
def progress(what, done, total):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
maintenance.copy(sys.argv[1], sys.argv[2], progress)
"""


@pytest.mark.parametrize("other", ["sqlite", "postgres"])
def test_it_goes_on_after_a_kill(other: str, place: Places) -> None:
    source, target = place("sqlite"), place(other)
    written(source, 5, 100)
    for chunks in (1, 4, 6):
        ended = subprocess.run([sys.executable, "-c", KILLED, source, target, str(chunks)], check=False)
        assert ended.returncode == -signal.SIGKILL
    assert maintenance.copy(source, target, silent).resumed
    assert differences(dump(source), dump(target)) == []


def test_a_source_that_went_on_is_copied_from_the_beginning(place: Places) -> None:
    source, target = place("sqlite"), place("postgres")
    written(source, 3, 100)
    with pytest.raises(Broken):
        maintenance.copy(source, target, _fail_at("copying edge"))
    ledger = open_ledger(source)
    ledger.apply([Append((Spec(id="later", queue="q"),))])
    ledger.close()
    assert not maintenance.copy(source, target, silent).resumed
    assert differences(dump(source), dump(target)) == []


def _fail_at(stage: str) -> maintenance.Progress:
    def fail(what: str, done: int, total: int) -> None:
        if what.startswith(stage):
            raise Broken

    return fail


@pytest.mark.parametrize(("kind", "other"), ROUTES[:2])
def test_a_source_that_is_written_to_meanwhile_is_noticed(kind: str, other: str, place: Places) -> None:
    source, target = place(kind), place(other)
    written(source, 5)
    ledger = open_ledger(source)

    def write(what: str, done: int, total: int) -> None:
        if what == "copying queue":
            ledger.apply([Append((Spec(id="meanwhile", queue="q"),))])

    with pytest.raises(StoreFailed, match="written to while it was copied"):
        maintenance.copy(source, target, write)
    with pytest.raises(NotALedger, match="not finished"):
        open_ledger(target)
    ledger.close()
    maintenance.copy(source, target, silent)
    assert differences(dump(source), dump(target)) == []


def append_in_a_transaction(url: str, id: str) -> None:
    """With a key, so that the next batch would apply it. There is no next batch."""
    ledger = PostgresLedger(*options_of(url))
    with psycopg.connect(options_of(url)[0]) as connection:
        ledger.append_on(connection, [Spec(id=id, queue="q", key=Key(id, KeyPolicy.UNIQUE))])
    ledger.close()


def on_the_server(url: str, statement: str) -> None:
    where, options = options_of(url)
    with psycopg.connect(where) as connection:
        schema = sql.Identifier(options.schema).as_string()
        connection.execute(statement.replace("towpath.", f"{schema}.").encode())


@pytest.mark.parametrize("other", ["sqlite", "postgres"])
def test_appends_of_the_inbox_are_applied_and_copied(other: str, place: Places) -> None:
    source, target = place("postgres"), place(other)
    written(source, 5)
    append_in_a_transaction(source, "mine")
    append_in_a_transaction(source, "mine too")
    copied = maintenance.copy(source, target, silent)
    ledger = open_ledger(target)
    assert ledger.get("mine") is not None
    assert ledger.get("mine too") is not None
    ledger.close()
    assert differences(dump(source), dump(target)) == []
    assert copied.rows["job"] == len(dump(source)["jobs"])  # type: ignore[arg-type]


def test_an_append_of_a_user_meanwhile_is_noticed(place: Places) -> None:
    source, target = place("postgres"), place("sqlite")
    written(source, 5)

    def write(what: str, done: int, total: int) -> None:
        if what == "copying queue":
            append_in_a_transaction(source, "meanwhile")

    with pytest.raises(StoreFailed, match="written to while it was copied"):
        maintenance.copy(source, target, write)
    maintenance.copy(source, target, silent)
    assert differences(dump(source), dump(target)) == []


def test_an_append_that_cannot_be_applied_must_be_removed_first(place: Places) -> None:
    source, target = place("postgres"), place("sqlite")
    append_in_a_transaction(source, "mine")
    on_the_server(source, "UPDATE towpath.inbox SET specs = '[7]'")
    with pytest.raises(
        InvalidInput,
        match=r"number 1 in the table inbox is one \(ValidationError: .*\): delete its row, or correct",
    ):
        maintenance.copy(source, target, silent)
    assert not maintenance.is_there(target)
    on_the_server(source, "DELETE FROM towpath.inbox")
    maintenance.copy(source, target, silent)
    assert differences(dump(source), dump(target)) == []


def test_a_target_with_appends_that_wait_is_refused(place: Places) -> None:
    source, target = place("sqlite"), place("postgres")
    written(source, 5)
    append_in_a_transaction(target, "theirs")
    with pytest.raises(InvalidInput, match="this one has appends in its inbox"):
        maintenance.copy(source, target, silent)


@pytest.mark.parametrize("other", ["sqlite", "postgres"])
def test_two_copies_into_one_target_at_once_are_refused(other: str, place: Places) -> None:
    source, second, target = place("sqlite"), place("sqlite"), place(other)
    written(source, 5)
    written(second, 6)
    refused = []

    def meanwhile(what: str, done: int, total: int) -> None:
        with pytest.raises(InvalidInput, match="a ledger into which no other copy is being made") as caught:
            maintenance.copy(second, target, silent)
        refused.append(caught.value)

    maintenance.copy(source, target, meanwhile)
    assert refused
    assert differences(dump(source), dump(target)) == []
    assert [
        path
        for path in Path(source.removeprefix("sqlite:///")).parent.iterdir()
        if path.name.endswith("-copy")
    ] == []


@pytest.mark.parametrize("other", ["sqlite", "postgres"])
def test_a_target_with_content_is_refused_and_left_alone(other: str, place: Places) -> None:
    source, target = place("sqlite"), place(other)
    written(source, 5)
    ledger = open_ledger(target)
    ledger.apply([Append((Spec(id="mine", queue="q"),)), Note(key="n", value=b"1")])
    ledger.close()
    before = dump(target)
    with pytest.raises(InvalidInput, match="1 rows in job, 1 rows in queue, 1 rows in note"):
        maintenance.copy(source, target, silent)
    assert differences(before, dump(target)) == []
    with pytest.raises(InvalidInput, match="another ledger than the source"):
        maintenance.copy(target, target, silent)


@pytest.mark.parametrize("other", ["sqlite", "postgres"])
def test_an_open_target_cannot_be_written_during_the_copy(other: str, place: Places) -> None:
    source, target = place("sqlite"), place(other)
    written(source, 5)
    early = open_ledger(target)
    with pytest.raises(Broken):
        maintenance.copy(source, target, _fail_at("copying queue"))
    with pytest.raises(NotALedger, match="not finished"):
        early.apply([Append((Spec(id="early", queue="q"),))])
    maintenance.copy(source, target, silent)
    early.apply([Append((Spec(id="early", queue="q"),))])
    assert early.check() == []
    early.close()


def test_a_ledger_in_memory_cannot_be_copied(place: Places) -> None:
    with pytest.raises(InvalidInput, match=r"sqlite:///file\.db or postgresql://"):
        maintenance.copy("memory://", place("sqlite"), silent)


MEASURED = """
import sys
from towpath.operations import maintenance
maintenance.copy(sys.argv[1], sys.argv[2], lambda what, done, total: None)
# Not getrusage: its peak is also that of the process that started us.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_content_is_never_in_memory_as_a_whole(place: Places) -> None:
    """192 MB of payloads in 24 jobs, and as many rows as make several chunks; the interpreter with its
    modules has about 60 MB."""
    source, far, back = place("sqlite"), place("postgres"), place("sqlite")
    ledger = open_ledger(source)
    for n in range(24):
        large = Spec(id=f"large {n}", queue="q", payload=os.urandom(8 << 20))
        ledger.apply([Append((large, *(Spec(id=f"{n}-{m}", queue="q", payload=b"{}") for m in range(1000))))])
    ledger.close()
    for one, other in ((source, far), (far, back)):
        ended = subprocess.run(
            [sys.executable, "-c", MEASURED, one, other], capture_output=True, text=True, check=True
        )
        assert int(ended.stdout) < 190_000
