"""Shell commands of plans: real processes, killed groups, bounded output, the environment, secrets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.actions import STEP, action_context
from tests.support.waiting import auntil, until
from towpath import Snooze
from towpath.errors import ActionFailed, ActionRefused, SecretUnavailable, TimedOut
from towpath.flows.actions import Answer, Shell
from towpath.operations.actions import shell
from towpath.operations.actions.shell import ShellExecutor, ShellResult

executor = ShellExecutor()


def run(action: Shell, **more: Any) -> ShellResult:
    return asyncio.run(executor.run(action, "here", action_context("here", **more)))


def answer(action: Shell, **more: Any) -> Answer:
    return asyncio.run(executor.answer(action, "here", action_context("here", **more)))


def sh(text: str, **more: Any) -> Shell:
    return Shell(("sh", "-c", text), **more)


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_gets_its_arguments_as_they_are() -> None:
    result = run(Shell(("printf", "%s|", "a b", "$HOME", "*", "")))
    assert (result.exit_code, result.stdout, result.stderr, result.cut) == (0, "a b|$HOME|*||", "", False)


def test_input_directory_and_variables(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    action = sh('cat; pwd; echo "$A"', cwd="below", env={"A": "x"}, input="given\n")
    assert run(action, address=str(tmp_path)).stdout == f"given\n{tmp_path}/below\nx\n"
    assert run(Shell(("pwd",)), address=str(tmp_path)).stdout == f"{tmp_path}\n"


def test_a_large_input_that_the_command_does_not_read() -> None:
    assert run(Shell(("true",), input="x" * 1_000_000)).exit_code == 0


def test_an_exit_code_is_a_failure_with_the_end_of_the_output() -> None:
    with pytest.raises(ActionFailed, match="node here: sh ended with exit code 3: bad disk") as caught:
        run(sh("echo fine; echo bad disk >&2; exit 3"))
    assert caught.value.retryable
    assert caught.value.details["exit_code"] == 3


def test_a_command_that_is_killed_names_the_signal() -> None:
    with pytest.raises(ActionFailed, match="ended by SIGKILL"):
        run(sh("kill -9 $$"))


@pytest.mark.parametrize("argv", [("/no/such/program",), ("sh", "-c", "no-such-program-here")])
def test_a_missing_program_is_final(argv: tuple[str, ...]) -> None:
    with pytest.raises(ActionRefused, match="node here"):
        run(Shell(argv))


def test_a_missing_directory_is_final() -> None:
    with pytest.raises(ActionRefused, match="there is no directory /no/such"):
        run(Shell(("true",)), address="/no/such")


def test_long_output_keeps_the_beginning_and_the_end() -> None:
    code = "import sys; sys.stdout.write('first' + 'x' * 5_000_000 + 'last'); sys.stderr.write('e' * 300)"
    result = run(Shell((sys.executable, "-c", code)), max_output=200)
    assert result.cut
    assert result.stdout.startswith("firstxxx")
    assert result.stdout.endswith("xxxlast")
    assert "4999809 bytes left out" in result.stdout
    assert len(result.stdout) < 260
    assert len(result.stderr) < 260


def test_a_background_process_does_not_hold_the_step(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    try:
        assert run(sh(f"sleep 1000 & echo $! > {place}; echo ok")).stdout == "ok\n"
        pid = int(place.read_text())
        assert not ended(pid)
    finally:
        os.kill(int(place.read_text()), signal.SIGKILL)


def test_a_timeout_kills_the_whole_group(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    # The grandchild ignores SIGTERM.
    script = f"(trap '' TERM; echo begun > {place}.begun; sleep 1000) & echo $! > {place}; wait"
    with pytest.raises(TimedOut):
        run(sh(script), step_timeout=0.5)
    assert until(lambda: ended(int(place.read_text())))


def test_a_cancellation_kills_the_whole_group(tmp_path: Path) -> None:
    place = tmp_path / "pid"

    async def canceled() -> None:
        action = sh(f"sleep 1000 & echo $! > {place}.new; mv {place}.new {place}; wait")
        task = asyncio.create_task(executor.run(action, "here", action_context("here")))
        await auntil(place.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(canceled())
    assert until(lambda: ended(int(place.read_text())))


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, Answer.APPLIED), (1, Answer.NOT_APPLIED), (75, Answer.RUNNING), (2, Answer.UNKNOWN)],
)
def test_the_answer_is_the_exit_code(code: int, expected: Answer) -> None:
    assert answer(sh(f"exit {code}")) is expected


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize("undo", [False, True])
def test_a_command_that_outlived_its_worker_is_found(undo: bool) -> None:
    orphan = subprocess.Popen(["sleep", "1000"], env={**os.environ, shell.STEP_VARIABLE: STEP})
    try:
        assert answer(Shell(("true",)), undo=undo) is Answer.RUNNING
        with pytest.raises(Snooze):
            run(Shell(("true",)), undo=undo, attempt=2)
    finally:
        orphan.kill()
        orphan.wait()
    assert answer(Shell(("true",)), undo=undo) is Answer.APPLIED
    assert run(Shell(("true",)), undo=undo, attempt=2).exit_code == 0


def test_the_environment_has_no_secrets_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim-1")
    monkeypatch.setenv("TOWPATH_URL", "postgresql://u:geheim-2@h/db")
    monkeypatch.setenv("REGION", "north")
    monkeypatch.setenv("DEPLOY_TOKEN", "geheim-3")
    result = run(Shell(("env",)), pass_env=("REGION",), token_env="DEPLOY_TOKEN")
    names = {line.partition("=")[0] for line in result.stdout.splitlines()}
    assert "geheim" not in result.stdout
    assert {"PATH", "REGION", "DEPLOY_TOKEN", "TOWPATH_STEP"} <= names
    assert not {"AWS_SECRET_ACCESS_KEY", "TOWPATH_URL"} & names
    # The command itself has the secret that the node names; it is removed from what is stored.
    assert run(sh("test $DEPLOY_TOKEN = geheim-3"), token_env="DEPLOY_TOKEN").exit_code == 0
    with pytest.raises(ActionFailed) as caught:
        run(sh("echo $DEPLOY_TOKEN >&2; exit 9"), token_env="DEPLOY_TOKEN")
    assert "geheim" not in str(caught.value)
    assert "***" in str(caught.value)


def test_secrets_from_files(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("geheim-4\n")
    secret.chmod(0o640)
    assert run(sh(f"cat {secret}"), password_file=str(secret)).stdout == "***\n"
    secret.chmod(0o644)
    with pytest.raises(SecretUnavailable, match="every user can access") as caught:
        run(Shell(("true",)), password_file=str(secret))
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"", "is empty"), (b"\xff\xfe", "not UTF-8"), (b"x" * 70_000, "more than")],
)
def test_secret_files_that_cannot_be_used(tmp_path: Path, content: bytes | None, why: str) -> None:
    secret = tmp_path / "secret"
    if content is not None:
        secret.touch(0o600)
        secret.write_bytes(content)
    with pytest.raises(SecretUnavailable, match=why):
        run(Shell(("true",)), token_file=str(secret))


def test_a_secret_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecretUnavailable, match="not a regular file"):
        run(Shell(("true",)), token_file=str(tmp_path / "pipe"))


def test_a_variable_that_is_not_set() -> None:
    with pytest.raises(SecretUnavailable, match="NOT_SET_HERE of the worker is not set"):
        run(Shell(("true",)), token_env="NOT_SET_HERE")
