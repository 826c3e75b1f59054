"""worker and dev: loading an app, running it in one or several processes, restarting on change. Everything is
real."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import towpath
from tests.support.processes import SHOP, command, greet
from tests.support.shell import Shell
from towpath.cli import worker
from towpath.cli.base import Session
from towpath.cli.processes import ChildProcess, project_files


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_works_until_a_signal(shop: Shell, how: int) -> None:
    id = greet(shop, "ada")
    with command(
        shop, "worker", "shop:app", "--concurrency", "2", "--lease", "5s", "--grace", "10", "--name", "box"
    ) as worker:
        worker.until("hello ada")
        greet(shop, "bob")
        worker.until("hello bob")
        assert worker.end(how) == 0
    job = shop("jobs", "show", id, "--json").json
    assert job["state"] == "done"
    assert job["result"].startswith("hello ada")


def test_a_worker_takes_only_its_queues(shop: Shell) -> None:
    greet(shop, "ada")
    other = shop("enqueue", "greet", "--queue", "attic", "--args", '{"name": "eve"}').out.strip()
    with command(shop, "worker", "shop:app", "--queues", "hall, cellar") as worker:
        worker.until("hello ada")
        assert worker.end() == 0
    assert shop("jobs", "show", other, "--json").json["state"] == "ready"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_with_lanes(shop: Shell, processes: str) -> None:
    greet(shop, "ada")
    shop("enqueue", "greet", "--queue", "bulk", "--args", '{"name": "bob"}')
    lanes = ("--lane", "front:2=hall", "--lane", "back=bulk")
    output = shop.run(
        "worker", "shop:app", *lanes, "--concurrency", "4", "--processes", processes, "--burst"
    ).out
    assert sorted(output.splitlines()) == ["hello ada", "hello bob"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lane", "front"), "name=queue"),
        (("--lane", "a=x", "--lane", "b=x"), "lanes.b.queues"),
        (("--lane", "a:9=x", "--concurrency", "4"), "lanes.a.reserved"),
        (("--lane", "a=x", "--queues", "x"), "the lanes name the queues"),
    ],
)
def test_bad_lanes_are_refused(shop: Shell, options: tuple[str, ...], message: str) -> None:
    ran = shop.run("worker", "shop:app", *options, code=2)
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_several_processes(shop: Shell) -> None:
    with command(shop, "worker", "shop:app", "--processes", "2", "--name", "box", "--json") as worker:
        first, second = (worker.until("Worker ").split()[1] for _ in range(2))
        assert len({first, second, str(worker.process.pid)}) == 3
        ids = [greet(shop, name) for name in ("ada", "bob")]
        for _ in ids:
            worker.until("hello")
        assert worker.end() == 0
        worker.until('{"processes":2,"codes":[0,0],"restarts":0}')


def test_the_worker_prints_its_queues(shop: Shell) -> None:
    given = {"TOWPATH_QUEUES": "cellar, hall*"}
    assert "\nQueues: cellar, hall*\n" in shop.run("worker", "shop:app", "--burst", env=given).err
    ran = shop.run("worker", "shop:app", "--burst", "--queues", "attic", env=given).err
    assert "\nQueues: attic\n" in ran


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_burst_ends_by_itself(shop: Shell, processes: str) -> None:
    names = [f"guest{n}" for n in range(20)]
    for name in names:
        greet(shop, name)
    shop("enqueue", "greet", "--queue", "hall", "--args", '{"name": "late"}', "--delay", "1h")
    ran = shop.run("worker", "shop:app", "--burst", "--concurrency", "2", "--processes", processes, "--json")
    assert sorted(line for line in ran.out.splitlines() if line.startswith("hello")) == sorted(
        f"hello {name}" for name in names
    )
    if processes == "2":
        assert '{"processes":2,"codes":[0,0],"restarts":0}' in ran.out
    assert "the burst is over" in ran.err
    total = shop("stats", "--json").json["total"]
    assert (total["done"], total["scheduled"], total["ready"], total["running"]) == (20, 1, 0, 0)
    assert shop("doctor", "--json").json["ledger"]["caretaker"] == "no worker is running"


def test_a_burst_with_a_process_that_dies_goes_on(shop: Shell) -> None:
    id = shop("enqueue", "leave", "--app", "shop:app", "--max-attempts", "1", "--json").json["id"]
    ran = shop.run("worker", "shop:app", "--burst", "--processes", "2", "--lease", "1s", "--json")
    assert ran.err.count("ended with code 9") == 1
    assert '{"processes":2,"codes":[0,0],"restarts":1}' in ran.out
    job = shop("jobs", "show", id, "--json").json
    assert (job["state"], job["reason"]) == ("failed", "lost")


def test_a_process_that_dies_is_started_again(shop: Shell) -> None:
    with command(shop, "worker", "shop:app", "--processes", "2") as worker:
        victim = int(worker.until("Worker ").split()[1])
        worker.until("Worker ")
        os.kill(victim, signal.SIGKILL)
        assert "code -9" in worker.until("it restarts in")
        assert int(worker.until("Worker ").split()[1]) != victim
        greet(shop, "ada")
        worker.until("hello ada")
        assert worker.end() == 0


def test_children_end_when_their_parent_is_killed(shop: Shell) -> None:
    with command(shop, "worker", "shop:app", "--processes", "2") as worker:
        worker.until("Worker ")
        worker.until("Worker ")
        assert worker.end(signal.SIGKILL) == -9
        assert worker.silent()


def test_a_worker_with_a_removed_ledger(shop: Shell) -> None:
    greet(shop, "ada")
    with command(shop, "worker", "shop:app") as worker:
        worker.until("hello ada")
        for file in shop.folder.glob("towpath.db*"):
            file.unlink()
        worker.until("towpath.db was removed or replaced while it was open")
        worker.until("put the right file back")
        assert worker.process.wait(60) == 4
    assert not (shop.folder / "towpath.db").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("shop", "Write it as module:app"),
        (":app", "Write it as module:app"),
        ("nosuch:app", "There is no module nosuch"),
        ("shop.inner:app", "There is no module shop.inner"),
        ("shop:ap", "Apps in it: app."),
        ("shop:number", "is a int, not an App"),
        ("broken:app", "broken.py, line 1"),
        ("raises:app", "raises.py, line 2"),
        ("needs:app", "No module named 'nosuchpackage'"),
        ("bare:app", "It has no App: add `app = towpath.App()`"),
        ("exits:app", "cannot be imported: SystemExit: 5"),
    ],
)
def test_apps_that_cannot_be_loaded(shop: Shell, target: str, message: str) -> None:
    programs = {
        "broken": "def",
        "raises": "x = 0\n1 / x\n",
        "needs": "import nosuchpackage",
        "bare": "",
        "exits": "raise SystemExit(5)",
    }
    for name, text in programs.items():
        (shop.folder / f"{name}.py").write_text(text)
    ran = shop.run("worker", target, code=2)
    assert message in ran.err


def test_bad_options_are_found_before_anything_is_loaded(shop: Shell) -> None:
    for options in (
        ["--queues", "bad name"],
        ["--concurrency", "0"],
        ["--lease", "soon"],
        ["--processes", "0"],
    ):
        shop.run("worker", "nosuch:app", *options, code=2)


def test_the_url_of_an_app_that_leaves_it_open(shell: Shell) -> None:
    (shell.folder / "shop.py").write_text(SHOP.replace('"sqlite:///towpath.db"', ""))
    shell("enqueue", "greet", "--queue", "hall", "--args", '{"name": "ada"}', "--url", "sqlite:///mine.db")
    with command(shell, "worker", "shop:app", "--url", "sqlite:///mine.db") as worker:
        worker.until("hello ada")
        assert worker.end() == 0


def test_dev_starts_again_when_the_code_changes(shop: Shell) -> None:
    (shop.folder / "words.py").write_text("GREETING = 'hello'\n")
    text = SHOP.replace("import os\n", "import os\nimport words\n").replace(
        'f"hello {name}', 'f"{words.GREETING} {name}'
    )
    (shop.folder / "shop.py").write_text(text)
    greet(shop, "ada")
    with command(shop, "dev", "shop:app", "--grace", "5") as worker:
        worker.until("hello ada")
        _edit(shop.folder / "words.py", "GREETING = 'good morning'\n", 1)
        assert "words.py" in worker.until("Changed")
        greet(shop, "bob")
        worker.until("good morning bob")
        _edit(shop.folder / "words.py", "GREETING = \n", 2)
        worker.until("words.py, line 1")
        worker.until("Waiting for a change")
        _edit(shop.folder / "words.py", "GREETING = 'good night'\n", 3)
        greet(shop, "eve")
        worker.until("good night eve")
        assert worker.end(signal.SIGINT) == 0


def _edit(path: Path, text: str, number: int) -> None:
    """A change that even a coarse clock of the file system shows."""
    path.write_text(text)
    when = path.stat().st_mtime + 10 * number
    os.utime(path, (when, when))


def test_dev_waits_for_a_module_that_is_not_there_yet(shell: Shell) -> None:
    shell("enqueue", "greet", "--queue", "hall", "--args", '{"name": "ada"}')
    with command(shell, "dev", "shop:app") as worker:
        worker.until("Waiting for a change")
        (shell.folder / "shop.py").write_text(SHOP)
        worker.until("hello ada")
        assert worker.end() == 0


def test_only_the_files_of_the_program_are_watched() -> None:
    assert project_files([os, pytest, signal, towpath]) == []
    [own] = project_files([__import__(__name__, fromlist=["x"])])
    assert own == __file__


class StartingChild(ChildProcess):
    """The parent receives a stop signal while this child is being started."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.stop_requested, self.looks = False, 0
        os.kill(os.getpid(), signal.SIGTERM)

    @property
    def code(self) -> int | None:
        self.looks += 1
        assert self.looks < 20, "no stop signal was forwarded"
        return 0 if self.stop_requested else None

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.stop_requested = True

    def close(self, grace: float = 0.0) -> int:
        return 0


def test_a_child_that_is_started_during_a_signal_receives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "ChildProcess", StartingChild)
    assert worker._run_processes(Session(), [["first"]]) == 0
