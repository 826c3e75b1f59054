"""The log of `worker`: banner, a line for each job, failures with their tracebacks, JSON, levels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.shell import Ran, Shell, python
from towpath.cli import _commit, version

TASKS = """
import logging, towpath

app = towpath.App()

@app.task(name="greet", queue="hall", max_attempts=3)
def greet(name: str) -> str:
    logging.getLogger("bakery").warning("said: %s", "good\\nmorning \x1b[31m")
    return f"hello {name}"

@app.task(name="stumble", queue="hall", max_attempts=2, backoff=0)
def stumble() -> None:
    raise ValueError("a \\x1b[31mred\\x1b[0m stone\\nin two lines")

@app.task(name="apart", queue="hall", max_attempts=2, backoff=0, process=True)
def apart() -> None:
    logging.getLogger("bakery").info("in a process")
    raise KeyError("100 %d")

@app.cron("0 3 * * *", name="nightly")
@app.task(name="sweep", queue="night")
def sweep() -> None: ...
"""


@pytest.fixture
def bakery(shell: Shell) -> Shell:
    (shell.folder / "bakery.py").write_text(TASKS)
    return shell


def burst(shell: Shell, *options: str) -> Ran:
    """A worker that ends by itself; tracebacks in its log are allowed."""
    process = shell.start("worker", "bakery:app", "--burst", *options)
    out, err = process.communicate(timeout=60)
    return Ran(process.returncode, out, err)


def enqueue(shell: Shell, kind: str, arguments: str = "{}") -> str:
    return shell("enqueue", kind, "--queue", "hall", "--args", arguments, "--max-attempts", "2").out.strip()


def test_banner_jobs_and_failures(bakery: Shell) -> None:
    enqueue(bakery, "greet", '{"name": "ada"}')
    for kind in ("stumble", "apart"):
        enqueue(bakery, kind)
    log = burst(bakery).err
    lines = log.splitlines()
    assert re.fullmatch(
        rf"Worker \d+ of bakery:app, Towpath {re.escape(version())}\. Ctrl-C: finish running jobs and stop\.",
        lines[0],
    )
    assert lines[1:6] == [
        f"Ledger: {bakery.url}",
        "Tasks: apart, greet, stumble, sweep",
        "Queues: hall, night",
        "Schedules: nightly",
        "Concurrency: 32",
    ]
    for pattern in (
        r"INFO towpath\.jobs: greet \S+ started, attempt 1/2$",
        r"INFO towpath\.jobs: greet \S+ done in 0\.\d\d\d s, attempt 1/2$",
        r"INFO towpath\.jobs: stumble \S+ failed in \S+ s, attempt 1/2, next attempt at \S+Z: ValueError",
        r"ERROR towpath\.jobs: stumble \S+ failed for good in \S+ s, attempt 2/2: ValueError",
        r"ERROR towpath\.jobs: apart \S+ failed for good in \S+ s, attempt 2/2: KeyError: '100 %d'$",
        r"worker stopped: 1 done, 2 failed, 2 retried in \d+\.\d s \(\d+/s\), 0 running$",
    ):
        assert len(re.findall(pattern, log, re.MULTILINE)) == 1, (pattern, log)
    assert log.count('bakery.py", line 13, in stumble') == 2
    assert log.count('bakery.py", line 18, in apart') == 2
    assert len(re.findall(r" INFO bakery: \[apart \d+-[0-9a-f]{4}\] in a process$", log, re.MULTILINE)) == 2
    assert "\x1b" not in log
    assert not re.search("^in two lines", log, re.MULTILINE)
    assert re.search(r" WARNING bakery: \[greet \d+-[0-9a-f]{4}\] said: good\n  morning \\x1b\[31m\n", log)
    assert log.index("attempt 2/2: ValueError") < log.index("the burst is over")


def test_json_lines(bakery: Shell) -> None:
    id, bad = enqueue(bakery, "greet", '{"name": "ada"}'), enqueue(bakery, "stumble")
    found = [json.loads(line) for line in burst(bakery, "--log-format", "json").err.splitlines()]
    assert all({"time", "level", "logger", "message"} <= each.keys() for each in found)
    by_event = {(each.get("event"), each.get("job_id")): each for each in found}
    started = by_event["worker_started", None]
    assert (started["ledger"], started["target"]) == (bakery.url, "bakery:app")
    assert (started["tasks"], started["schedules"]) == (["apart", "greet", "stumble", "sweep"], ["nightly"])
    done = by_event["job_done", id]
    assert (done["kind"], done["queue"], done["attempt"], done["max_attempts"]) == ("greet", "hall", 1, 2)
    assert 0 < done["seconds"] < 60
    [own] = [each for each in found if each["logger"] == "bakery"]
    assert own["message"] == "said: good"
    fields = ("job_id", "kind", "queue", "attempt", "max_attempts")
    assert [own[name] for name in fields] == [done[name] for name in fields]
    assert "event" not in own
    assert not any("job_label" in each for each in found)
    retried, failed = by_event["job_retried", bad], by_event["job_failed", bad]
    assert (retried["level"], failed["level"]) == ("info", "error")
    assert "in stumble" in retried["exception"]
    assert retried["next_at"].endswith("Z")
    assert failed["error"].startswith("ValueError: a \\x1b[31mred")
    assert "in stumble" in failed["exception"]


def test_quiet(bakery: Shell) -> None:
    enqueue(bakery, "greet", '{"name": "ada"}')
    enqueue(bakery, "stumble")
    log = burst(bakery, "-q").err
    assert "failed for good" in log
    assert not re.search("Worker|INFO|greet .* (started|done)", log)
    log = bakery("worker", "bakery:app", "-v", "--log-level", "info", code=2).err
    assert "--log-level and --verbose exclude each other" in log


def test_a_program_with_its_own_logging_keeps_it(bakery: Shell) -> None:
    own = "import logging; logging.basicConfig(format='MINE %(message)s')"
    (bakery.folder / "bakery.py").write_text(f"{own}\n{TASKS}")
    enqueue(bakery, "greet", '{"name": "ada"}')
    log = burst(bakery, "--log-level", "info", "--log-format", "json").err
    assert re.search(r"^MINE greet \S+ done in", log, re.MULTILINE)
    assert "--log-format has no effect" in log


def test_a_high_rate_is_summarized(bakery: Shell) -> None:
    calls = "greet.enqueue_many([greet.of(str(n)) for n in range(3000)]); stumble.enqueue()"
    python(bakery.folder, f"from bakery import *; {calls}")
    log = burst(bakery).err
    assert "more than 200 jobs a second" in log
    assert log.count(" INFO ") < 1000
    assert "stumble" in log
    assert "worker stopped: 3000 done, 1 failed, 1 retried" in log


def test_a_ledger_above_is_named(bakery: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    bakery("put", "orders", "{}")
    below, above = Shell(bakery.folder / "below"), bakery.folder / "towpath.db"
    below.folder.mkdir()
    monkeypatch.chdir(below.folder)
    words = f"A directory above has one, {above}: to use it, start in {bakery.folder} or set TOWPATH_URL="
    assert f"{words}{bakery.url}." in below("stats", code=4).err
    assert words in below("doctor").out
    (below.folder / "bakery.py").write_text(TASKS)
    made = f"There is no ledger at {below.folder / 'towpath.db'}; a new one is created. {words}"
    assert made in burst(below).err
    assert "above" not in below("put", "orders", "{}").err
    assert below("stats").code == 0


def test_the_version_in_a_checkout(tmp_path: Path) -> None:
    commit = "1a2b3c4d5e6f7a8b9c0d1a2b3c4d5e6f7a8b9c0d"
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert _commit(str(tmp_path)) == ""
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert _commit(str(tmp_path)) == commit
    (git / "refs/heads/main").write_text(commit[::-1])
    assert _commit(str(tmp_path)) == commit[::-1]
    (git / "HEAD").write_text(commit)
    assert _commit(str(tmp_path)) == commit
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {git}\n")
    assert _commit(str(tree)) == commit
    assert _commit(str(tmp_path / "nowhere")) == ""
