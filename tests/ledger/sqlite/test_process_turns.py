from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from tests.support.waiting import until
from towpath.errors import LedgerBusy
from towpath.ledger.sqlite.process_turns import ProcessTurns

SPAWN = multiprocessing.get_context("spawn")


def _take_turns(path: Path, count: int, barrier: Barrier, log: Path) -> None:
    turns = ProcessTurns(path, 60.0)
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    me = os.getpid()
    barrier.wait(60)
    for _ in range(count):
        asked = time.monotonic()
        with turns:
            got = time.monotonic()
            os.write(fd, f"in {me} {got - asked}\n".encode())
            while time.monotonic() - got < 0.001:
                pass
            os.write(fd, f"out {me} 0\n".encode())
    os.close(fd)
    turns.close()


def _hold(path: Path, pipe: Connection) -> None:
    with ProcessTurns(path, 60.0):
        pipe.send("holding")
        pipe.recv()
    pipe.send("let go")
    pipe.recv()


def _want(path: Path, pipe: Connection) -> None:
    turns = ProcessTurns(path, 60.0)
    pipe.send("wanting")
    with turns:
        pipe.send("holding")
        pipe.recv()


@contextmanager
def child(target: Callable[[Path, Connection], None], path: Path) -> Iterator[tuple[BaseProcess, Connection]]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(path, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(60)
        ours.close()


def receive(pipe: Connection) -> str:
    assert pipe.poll(60), "no message of the child"
    return str(pipe.recv())


def test_turns_exclude_each_other_and_are_fair(tmp_path: Path) -> None:
    processes, turns = 3, 200
    log = tmp_path / "log"
    barrier = SPAWN.Barrier(processes)
    children = [
        SPAWN.Process(target=_take_turns, args=(tmp_path / "a.db", turns, barrier, log), daemon=True)
        for _ in range(processes)
    ]
    for process in children:
        process.start()
    for process in children:
        process.join(120)
    assert [process.exitcode for process in children] == [0] * processes
    lines = [line.split() for line in log.read_text().splitlines()]
    entries, exits = lines[::2], lines[1::2]
    assert len(entries) == processes * turns
    assert all(
        entry[0] == "in" and exit[:2] == ["out", entry[1]] for entry, exit in zip(entries, exits, strict=True)
    )
    # While all three wait for turns, each gets about every third.
    owners = [entry[1] for entry in entries][: turns * 2]
    assert all(owners.count(str(process.pid)) > turns * 2 / processes * 0.6 for process in children)
    waits = sorted(float(entry[2]) for entry in entries)
    assert waits[-1] < 1


def test_the_first_process_in_the_queue_is_served_first(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    held = ProcessTurns(path, 60.0)
    with ExitStack() as turn, child(_want, path) as (_, first):
        turn.enter_context(held)
        assert receive(first) == "wanting"
        until(lambda: _is_queued(path))
        order: list[str] = []
        late = ProcessTurns(path, 60.0)
        turn.close()
        # The child is not notified that the turn is free; it still goes before a later process.
        thread = threading.Thread(target=_enter_and_note, args=(late, order))
        thread.start()
        assert receive(first) == "holding"
        assert order == []
        first.send("go")
        thread.join(60)
        assert order == ["late"]
        late.close()
    held.close()


def _enter_and_note(turns: ProcessTurns, order: list[str]) -> None:
    with turns:
        order.append("late")


def _is_queued(path: Path) -> bool:
    """Whether another process has a place in the queue. /proc shows the locks without touching them."""
    inode = os.stat(f"{path}-next").st_ino
    return any(
        f":{inode} " in line and "POSIX" in line for line in Path("/proc/locks").read_text().splitlines()
    )


def test_a_stopped_holder_makes_busy_after_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with child(_hold, path) as (holder, pipe):
        assert receive(pipe) == "holding"
        assert holder.pid
        os.kill(holder.pid, signal.SIGSTOP)
        turns = ProcessTurns(path, 0.2)
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(LedgerBusy) as caught, turns:
                pass
            assert 0.2 <= time.monotonic() - started < 2
        assert caught.value == LedgerBusy(path=str(path), seconds=0.2)
        os.kill(holder.pid, signal.SIGCONT)
        pipe.send("go")
        assert receive(pipe) == "let go"
        with turns:
            pass
        turns.close()


def _work(path: Path, pipe: Connection) -> None:
    """Take turns until told to stop; report how many, and the longest wait."""
    turns, count, longest = ProcessTurns(path, 10.0), 0, 0.0
    pipe.send("working")
    while not pipe.poll():
        asked = time.monotonic()
        with turns:
            longest = max(longest, time.monotonic() - asked)
            count += 1
            os.sched_yield()
            time.sleep(0.001)  # longer than the gap before the next turn, so that the processes queue
    turns.close()
    pipe.send(f"{count} {longest}")


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux for the waiters")
def test_a_stopped_waiter_slows_the_others_once(tmp_path: Path) -> None:
    """Each turn behind it took half of the timeout, which is 5 s, and their leases ended."""
    path = tmp_path / "a.db"
    turns = ProcessTurns(path, 10.0)
    with child(_want, path) as (waiter, pipe), child(_work, path) as (_, one), child(_work, path) as (_, two):
        with turns:
            assert receive(pipe) == "wanting"
            until(lambda: _is_queued(path))
            assert waiter.pid
            os.kill(waiter.pid, signal.SIGSTOP)
            assert [receive(each) for each in (one, two)] == ["working", "working"]
        until(lambda: turns_taken(turns, 20))
        for each in (one, two):
            each.send("enough")
        answers = [receive(each).split() for each in (one, two)]
        assert min(int(count) for count, _ in answers) > 10
        assert max(float(longest) for _, longest in answers) < 4
        os.kill(waiter.pid, signal.SIGCONT)
        assert receive(pipe) == "holding"
        pipe.send("go")
    turns.close()


def turns_taken(turns: ProcessTurns, count: int) -> bool:
    for _ in range(count):
        with turns:
            pass
    return True


def test_a_killed_holder_frees_the_turn(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    turns = ProcessTurns(path, 60.0)
    with child(_hold, path) as (holder, pipe):
        assert receive(pipe) == "holding"
        holder.kill()
        started = time.monotonic()
        with turns:
            assert time.monotonic() - started < 5
    turns.close()


def test_a_killed_waiter_frees_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    turns = ProcessTurns(path, 60.0)
    with child(_want, path) as (waiter, pipe):
        with turns:
            assert receive(pipe) == "wanting"
            until(lambda: _is_queued(path))
            waiter.kill()
        started = time.monotonic()
        with turns:
            assert time.monotonic() - started < 5
    turns.close()


def test_two_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    one, two = ProcessTurns(tmp_path / "a.db", 1.0), ProcessTurns(tmp_path / "a.db", 0.05)
    with one, pytest.raises(LedgerBusy), two:
        pass
    with two:
        pass
    one.close()
    two.close()


def test_an_error_inside_lets_the_turn_go(tmp_path: Path) -> None:
    one, two = ProcessTurns(tmp_path / "a.db", 1.0), ProcessTurns(tmp_path / "a.db", 1.0)
    with pytest.raises(KeyError), one:
        raise KeyError
    with two:
        pass
    one.close()
    two.close()


def test_descriptors_are_closed_once_and_not_inherited(tmp_path: Path) -> None:
    turns = ProcessTurns(tmp_path / "a.db", 1.0)
    opened = _descriptors(tmp_path)
    assert len(opened) == 2
    assert not any(os.get_inheritable(fd) for fd in opened)
    turns.close()
    turns.close()
    assert not _descriptors(tmp_path)


def _descriptors(directory: Path) -> list[int]:
    links = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    return [
        fd
        for fd, link in links.items()
        if os.path.lexists(link) and os.readlink(link).startswith(str(directory))
    ]


def test_an_uncontended_turn_is_cheap(tmp_path: Path) -> None:
    turns = ProcessTurns(tmp_path / "a.db", 1.0)
    best = min(_seconds_per_turn(turns, 1000) for _ in range(10))
    turns.close()
    assert best < 50e-6, f"{best * 1e6:.1f} µs"


def _seconds_per_turn(turns: ProcessTurns, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        with turns:
            pass
    return (time.perf_counter() - started) / count


TRUNCATED = """
import os, sys
from pathlib import Path
from towpath.commands import Append, Spec
from towpath.ledger.sqlite import SqliteLedger

path = Path(sys.argv[1])
ledger, other = SqliteLedger(path), SqliteLedger(path)
for number, size in enumerate((0, 3, 0)):
    os.truncate(f"{path}-next", size)
    ledger.apply([Append((Spec(id=f"a{number}", queue="q"),))])
    other.apply([Append((Spec(id=f"b{number}", queue="q"),))])
print(ledger.queues()["q"].counts.ready)
"""


def test_a_truncated_file_does_not_end_the_process(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(tmp_path / "a.db")],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "6\n")


def test_a_waiter_writes_the_stamp_anew_after_a_truncation(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with ProcessTurns(path, 60.0), child(_want, path) as (_, pipe):
        assert receive(pipe) == "wanting"
        os.truncate(f"{path}-next", 0)
        until(lambda: os.stat(f"{path}-next").st_size == 8)


FULL = """
import os, sys
from pathlib import Path
from towpath.commands import Append, Spec
from towpath.errors import DiskFull
from towpath.ledger.sqlite import SqliteLedger
from towpath.ledger.sqlite.process_turns import ProcessTurns

path, filler = Path(sys.argv[1], "a.db"), Path(sys.argv[1], "filler")
ledger = SqliteLedger(path)

def fill():
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

def append(id):
    try:
        ledger.apply([Append((Spec(id=id, queue="q", payload=bytes(100_000)),))])
        return "appended"
    except DiskFull:
        return "full"

fill()
print(append("a"))
os.unlink(f"{path}-next")
fill()
try:
    ProcessTurns(path, 1.0)
except DiskFull:
    print("full")
filler.unlink()
print(append("a"), ledger.integrity())
"""


def test_a_full_disk_does_not_end_the_process(tmp_path: Path) -> None:
    """On a file system of 1 MB, mounted in a namespace of its own."""
    mount = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m none "$0" && exec "$@"',
        str(tmp_path),
    ]
    if (
        not shutil.which("unshare")
        or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no file system may be mounted here")
    ran = subprocess.run(
        [*mount, sys.executable, "-c", FULL, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "full\nfull\nappended []\n")
