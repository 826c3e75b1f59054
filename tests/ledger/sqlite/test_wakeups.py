from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from towpath.ledger.sqlite.wakeups import WakeFile

SPAWN = multiprocessing.get_context("spawn")


def _listen(path: Path, times: int, pipe: Connection) -> None:
    wake = WakeFile(path)
    with wake.watch() as watch:
        for _ in range(times):
            pipe.send("listening")
            received = watch.wait(30.0)
            pipe.send((received, time.monotonic()))
    wake.close()


def receive(pipe: Connection) -> object:
    assert pipe.poll(60), "no message of the child"
    return pipe.recv()


def test_a_notification_wakes_another_process_at_once(tmp_path: Path) -> None:
    times = 15
    ours, theirs = SPAWN.Pipe()
    listener = SPAWN.Process(target=_listen, args=(tmp_path / "a.db", times, theirs), daemon=True)
    listener.start()
    wake = WakeFile(tmp_path / "a.db")
    latencies = []
    for _ in range(times):
        assert receive(ours) == "listening"
        rang = time.monotonic()
        wake.notify()
        answer = receive(ours)
        assert isinstance(answer, tuple)
        assert answer[0] is True
        latencies.append(answer[1] - rang)
    listener.join(60)
    wake.close()
    assert statistics.median(latencies) < 1, latencies


def test_every_watch_receives_one_notification(tmp_path: Path) -> None:
    wake, another = WakeFile(tmp_path / "a.db"), WakeFile(tmp_path / "a.db")
    with wake.watch() as one, wake.watch() as two, another.watch() as three:
        wake.notify()
        assert all(watch.wait(10.0) for watch in (one, two, three))
    another.close()
    wake.close()


def test_a_notification_between_entering_and_waiting_is_received(tmp_path: Path) -> None:
    wake = WakeFile(tmp_path / "a.db")
    for _ in range(3):  # from the second time on with a watch used before
        with wake.watch() as watch:
            wake.notify()
            assert watch.wait(10.0)
    wake.close()


def test_a_notification_is_received_once_and_not_by_later_watches(tmp_path: Path) -> None:
    wake = WakeFile(tmp_path / "a.db")
    with wake.watch() as watch:
        for _ in range(100):
            wake.notify()
        assert watch.wait(10.0)
        assert not watch.wait(0.0)
    wake.notify()
    with wake.watch() as watch:
        assert not watch.wait(0.0)
    wake.close()


def test_a_wait_ends_with_its_time(tmp_path: Path) -> None:
    wake = WakeFile(tmp_path / "a.db")
    with wake.watch() as watch:
        started = time.monotonic()
        assert not watch.wait(0.1)
        assert 0.09 < time.monotonic() - started < 2
        assert not watch.wait(-1.0)
    wake.close()


def test_an_idle_watch_costs_nothing(tmp_path: Path) -> None:
    wake = WakeFile(tmp_path / "a.db")
    with wake.watch() as watch:
        spent, deadline = time.process_time(), time.monotonic() + 1.0
        while (left := deadline - time.monotonic()) > 0:
            watch.wait(min(left, 0.25))
        assert time.process_time() - spent < 0.01
    wake.close()


def test_watches_are_used_again_and_all_closed(tmp_path: Path) -> None:
    before = _inotify_descriptors()
    wake = WakeFile(tmp_path / "a.db")
    for _ in range(10):
        with wake.watch(), wake.watch():
            pass
    assert _inotify_descriptors() - before == 2
    outlives = wake.watch()
    with outlives:
        wake.close()
        wake.close()
    assert _inotify_descriptors() == before


def _inotify_descriptors() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link) == "anon_inode:inotify" for link in links if os.path.lexists(link))


def test_without_the_wake_file_it_is_only_slower(tmp_path: Path) -> None:
    wake = WakeFile(tmp_path / "no such directory" / "a.db")
    wake.notify()
    with wake.watch() as watch:
        started = time.monotonic()
        assert not watch.wait(10.0)
        assert time.monotonic() - started < 2
    wake.close()


def test_notify_after_close_touches_no_other_file(tmp_path: Path) -> None:
    wake = WakeFile(tmp_path / "a.db")
    wake.close()
    other = tmp_path / "other"
    other.write_bytes(b"abc")
    with other.open("r+b"):  # may get the descriptor's old number
        wake.notify()
    assert other.read_bytes() == b"abc"


def test_a_full_inotify_table_falls_back_to_short_sleeps(tmp_path: Path) -> None:
    code = """
import resource, sys, time
from pathlib import Path
from towpath.ledger.sqlite.wakeups import WakeFile
wake = WakeFile(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
with wake.watch() as watch:
    started = time.monotonic()
    watch.wait(10.0)
    assert time.monotonic() - started < 2
    wake.notify()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.db")], check=True)


def test_a_thread_may_notify_while_another_waits(tmp_path: Path) -> None:
    wake = WakeFile(tmp_path / "a.db")
    received: list[bool] = []
    entered = threading.Event()

    def listen() -> None:
        with wake.watch() as watch:
            entered.set()
            received.append(watch.wait(30.0))

    thread = threading.Thread(target=listen)
    thread.start()
    assert entered.wait(30)
    wake.notify()
    thread.join(60)
    assert received == [True]
    wake.close()
