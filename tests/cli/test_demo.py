"""The demonstration runs for real, and its checks can fail."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.shell import Ran, Shell
from towpath.cli import demo
from towpath.cli.demo import DemoJobs, DemoOutput, KilledWorker, verify
from towpath.cli.demo_tasks import app


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Shell, Ran, float]:
    """The output and the duration of the plain command."""
    shell = Shell(tmp_path_factory.mktemp("demo"))
    (shell.folder / "temporary").mkdir()
    start = time.perf_counter()
    ran = shell.run("demo", env={"TMPDIR": str(shell.folder / "temporary")})
    return shell, ran, time.perf_counter() - start


@pytest.mark.parametrize(
    "words",
    [
        "10,000 of 10,000",
        "explain a reminder: job ",
        "scheduled (delay) until",
        "waits for 1 group",
        "held 100 jobs and was killed with SIGKILL",
        "leased by doomed#",
        "10,127 of 10,127",
        "ok    all jobs   10,127 enqueued: 10,126 done, 1 dead, 0 missing, 0 unfinished",
        "ok    mail       3,333, then 3,333, then 3,334: in order of priority",
        "ok    reminders  20 started at least ",
        'ok    call       done on attempt 3, after 2 failures: "hello"',
        "ok    fax        dead letter after 2 attempts: OSError: no line to 555-0199",
        "ok    graph      read, then 3 counts in parallel, then a total of 9 words",
        "ok    ferries    100 of 100 jobs of the killed worker were completed by another worker within ",
        "a late result is refused",
        "ok    ledger     verified, no problems",
        "A mail job took ",
    ],
)
def test_it_prints_every_check(shown: tuple[Shell, Ran, float], words: str) -> None:
    assert words in shown[1].out


def test_it_ends_by_itself_and_is_not_noisy(shown: tuple[Shell, Ran, float]) -> None:
    _, ran, seconds = shown
    assert seconds < 30
    assert ran.err == ""
    assert "WRONG" not in ran.out


def test_it_names_three_commands_that_work_as_they_are_typed(shown: tuple[Shell, Ran, float]) -> None:
    shell, ran, _ = shown
    [folder] = (shell.folder / "temporary").iterdir()
    assert f"New ledger {folder / 'work.db'};" in ran.out
    tries = [line.strip() for line in ran.out.partition("The ledger is kept. Next,")[2].splitlines()[1:]]
    assert len(tries) == 3
    report = []
    for line in tries:
        ended = subprocess.run(
            ["sh", "-c", line],
            cwd=shell.folder,
            env={
                **shell.environment,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, (line, ended)
        report.append(ended.stdout)
    assert "OSError: no line to 555-0199" in report[0]
    assert report[1] == "1 retried\n"
    url = f"sqlite:///{folder / 'work.db'}"
    assert shell.run("stats", "--json", "--url", url).json["total"] == {
        **dict.fromkeys(("blocked", "scheduled", "ready", "running", "failed", "canceled"), 0),
        "done": 10_127,
    }


def test_for_machines_in_a_file_with_a_strange_name(shell: Shell) -> None:
    report = shell.run(
        "demo", "--jobs", "300", "--json", "--keep", "a b%41.db", env={"TOWPATH_PROCESSES": "3"}
    ).json
    assert report["ok"]
    assert report["jobs"] == 427
    assert [check["name"] for check in report["checks"]] == [
        "all jobs",
        "mail",
        "reminders",
        "call",
        "fax",
        "graph",
        "ferries",
        "ledger",
    ]
    assert min(report["cost"].values()) > 0
    assert (shell.folder / "a b%41.db").exists()
    words = shlex.split(report["next"][0])
    assert "OSError" in shell(*words[words.index("--url") :]).out


def test_a_file_that_is_there_is_not_touched(shell: Shell) -> None:
    (shell.folder / "mine.db").write_text("mine")
    assert (
        "mine.db exists already.\nUse the name of a new file."
        in shell("demo", "--keep", "mine.db", code=2).err
    )
    assert (shell.folder / "mine.db").read_text() == "mine"


def test_every_check_can_fail(tmp_path: Path) -> None:
    """All jobs are enqueued, and no worker runs."""
    app.engine.url = f"sqlite:///{tmp_path / 'work.db'}"
    with app:
        written, _ = demo.enqueue_jobs(DemoOutput(as_json=True), 300)
        checks = verify(app, written, KilledWorker(dict.fromkeys(written.ferries, 1), 0))
        gone = verify(app, _without_mail(written), KilledWorker(dict.fromkeys(written.ferries, 1), 0))
    assert {check.name for check in checks if check.ok} <= {"ledger"}
    assert "0 missing, 427 unfinished" in checks[0].what
    assert "1 missing" in gone[0].what


def _without_mail(written: DemoJobs) -> DemoJobs:
    return DemoJobs(
        **{name: getattr(written, name) for name in written.__struct_fields__} | {"mail": ["nowhere"]}
    )


def test_a_check_that_fails_is_the_exit_code(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lazy(output: DemoOutput, enqueued: DemoJobs) -> None:
        """A worker that does nothing."""

    monkeypatch.setattr(demo, "run_worker", lazy)
    report = shell("demo", "--jobs", "300", "--keep", "demo.db", code=1)
    assert "WRONG all jobs   427 enqueued: 0 done" in report.out
    # Whether the late result is refused depends on whether the caretaker has released the job already.
    assert "WRONG ferries" in report.out
