"""Several worker processes on one ledger: the runs that they record, and the comparison with the ledger."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from tests.support import postgres_member
from tests.support.postgres_member import CAPS, KEYS, Acknowledged, Line, LineFile, Tasks
from tests.support.waiting import WAIT, until
from towpath import App, State, new_id
from towpath.commands import Job, Query
from towpath.errors import LedgerError

FINISHED = (State.DONE, State.FAILED, State.CANCELED)
T = TypeVar("T", Line, Acknowledged)


class Fleet:
    """Worker processes, one for each clock: `skews` are the seconds by which each clock is wrong."""

    def __init__(
        self, url: str, folder: Path, skews: Sequence[float], *, feed: float = 0, lease: float = 30
    ) -> None:
        self.folder = folder
        self.members: dict[str, subprocess.Popen[bytes]] = {}
        for number, skew in enumerate(skews):
            name = f"w{number}"
            self.start(
                name, [postgres_member.__file__, url, str(folder), name, str(feed), str(skew), str(lease)]
            )

    def start(self, name: str, arguments: Sequence[str], cwd: Path | None = None) -> None:
        """Start one more Python process of the fleet."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.members[name] = subprocess.Popen(
                [sys.executable, *arguments], stderr=log, cwd=cwd or self.folder
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End all processes: none has ended before, and each ends with exit code 0."""
        before = {name: process.poll() for name, process in self.members.items()}
        for process in self.members.values():
            process.terminate()
        try:
            after = {name: process.wait(WAIT) for name, process in self.members.items()}
        except subprocess.TimeoutExpired:
            for process in self.members.values():
                process.kill()
                process.wait()
            raise
        if kind is None:
            killed = {name for name, code in before.items() if code == -signal.SIGKILL}
            assert all(before[name] is None for name in before.keys() - killed), f"{before}\n{self.output()}"
            assert all(after[name] == 0 for name in after.keys() - killed), f"{after}\n{self.output()}"

    def output(self) -> str:
        return "\n".join(
            path.read_text("utf-8", "replace")[-4000:] for path in sorted(self.folder.glob("*.log"))
        )

    def until(self, true: Callable[[], bool], what: str, seconds: float = WAIT) -> None:
        """Wait for something that its processes do. None of them may end meanwhile."""

        def holds() -> bool:
            codes = {name: process.poll() for name, process in self.members.items()}
            assert all(code in (None, -signal.SIGKILL) for code in codes.values()), (
                f"{codes}\n{self.output()}"
            )
            return true()

        until(holds, seconds, lambda: f"{what}\n{self.output()}")

    def wait_for_all(self, app: App) -> None:
        self.until(lambda: len(app.workers.list()) == len(self.members), "all processes are listed")

    def release(self) -> None:
        """Let the held jobs end."""
        (self.folder / "go").touch()

    def runs(self, name: str = "*") -> list[Line]:
        return list(_lines(self.folder.glob(f"{name}.runs"), Line))

    def asked(self) -> list[Acknowledged]:
        return list(_lines(self.folder.glob("*.asked"), Acknowledged))

    def wait_for_runs(self, what: str, label: str, count: int) -> list[Line]:
        """So many runs of jobs with this label have begun or ended."""

        def found() -> list[Line]:
            return [line for line in self.runs() if line.what == what and line.label == label]

        self.until(lambda: len(found()) >= count, f"{count} times {what}: {label}")
        return found()

    def kill(self, name: str) -> None:
        os.kill(self.members[name].pid, signal.SIGKILL)
        self.members[name].wait(WAIT)


class Producer:
    """Enqueues one job after the other, each until it is acknowledged: its id makes a repetition harmless."""

    def __init__(self, app: App, folder: Path) -> None:
        self._tasks = Tasks(app, folder, "producer")
        self._asked = LineFile(folder / "producer.asked")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.acknowledged = 0
        self.failed: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "an enqueue never came back"
        assert self.failed is None, f"an enqueue failed for good: {self.failed!r}"

    def _work(self) -> None:
        try:
            while not self._over.is_set():
                id = new_id()
                while not self._put(id):
                    self._over.wait(0.05)
                self._asked.write(Acknowledged(id))
                self.acknowledged += 1
                self._over.wait(0.01)
        except BaseException as error:
            self.failed = error

    def _put(self, id: str) -> bool:
        try:
            self._tasks.step.options(id=id).enqueue("producer")
        except LedgerError as error:
            if error.fatal:
                raise
            return False
        return True


def _lines(paths: Iterable[Path], kind: type[T]) -> Iterator[T]:
    for path in sorted(paths):
        *whole, _ = path.read_bytes().split(b"\n")
        for line in whole:
            yield msgspec.json.decode(line, type=kind)


def all_jobs(app: App) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    query = Query(limit=1000, oldest_first=True, bodies=False)
    while True:
        page = app.ledger.find(query)
        jobs |= {job.id: job for job in page.jobs}
        if page.next is None:
            return jobs
        query = Query(limit=1000, oldest_first=True, bodies=False, page=page.next)


def at_rest(app: App) -> bool:
    return all(view.counts.waiting + view.counts.running == 0 for view in app.ledger.queues().values())


def judge(app: App, fleet: Fleet) -> dict[str, Job]:
    """The records of all processes together must match the ledger."""
    jobs, runs = all_jobs(app), fleet.runs()
    assert all(job.state in FINISHED for job in jobs.values())
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for job in jobs.values():
        counted[job.queue][job.state] += 1
    counts_by_queue = {
        name: msgspec.structs.asdict(view.counts) for name, view in app.ledger.queues().items()
    }
    assert {
        name: +Counter(counts) for name, counts in counts_by_queue.items() if any(counts.values())
    } == counted
    assert app.ledger.check() == []
    began = Counter((line.id, line.fence) for line in runs if line.what == "began")
    assert max(began.values()) == 1, "one claim was run twice"
    assert {id for id, _ in began} <= jobs.keys(), "a job that ran is lost"
    returned = sorted((line.id, line.fence) for line in runs if line.what == "returned")
    done = sorted((job.id, job.settled_fence) for job in jobs.values() if job.state is State.DONE)
    # A superseded run may return and be canceled nevertheless; every other job that returned must be done.
    superseded = {job.id for job in jobs.values() if job.state is State.CANCELED}
    assert [run for run in returned if run[0] not in superseded] == done, "done is what returned, once"
    missing = {asked.id for asked in fleet.asked()} - jobs.keys()
    assert not missing, "an acknowledged job is lost"
    return jobs


def judge_order(fleet: Fleet, jobs: Mapping[str, Job]) -> None:
    """No job ran before its dependencies, and no key or part exceeded its cap."""
    spans = {line.id: line.at for line in fleet.runs() if line.what == "returned"}
    first: dict[str, int] = {}
    for line in fleet.runs():
        if line.what == "began":
            first[line.id] = min(line.at, first.get(line.id, line.at))
    for asked in fleet.asked():
        assert all(spans[needed] <= first[asked.id] for needed in asked.after), f"{asked} came too early"
    labels = {line.label for line in fleet.runs()}
    for label in labels:
        if label.startswith(KEYS):
            assert most_at_once(fleet.runs(), label) == 1, label
    for part, cap in CAPS.items():
        assert most_at_once(fleet.runs(), f"part {part}") <= cap, part
    for asked in fleet.asked():
        state = {"dead": State.FAILED, "orphan": State.FAILED, "doomed": State.CANCELED}.get(
            asked.label, State.DONE
        )
        if not asked.label.startswith("replace"):
            assert jobs[asked.id].state is state, asked


def most_at_once(runs: Iterable[Line], label: str) -> int:
    steps = sorted((line.at, 1 if line.what == "began" else -1) for line in runs if line.label == label)
    return max(itertools.accumulate(step for _, step in steps))
