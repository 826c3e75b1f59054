"""Shell commands of plans: a process group of its own, without a shell, with bounded output.

On Linux the attempt of a killed worker is found again by an environment variable of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from towpath.core.nodes import Node
from towpath.errors import ActionFailed, ActionRefused
from towpath.flows.actions import Answer, Shell
from towpath.flows.step import WAIT
from towpath.operations.actions.common import BoundedOutput, Credentials, Target, time_limit
from towpath.operations.executors import ActionContext
from towpath.tasks.outcomes import Snooze

STEP_VARIABLE = "TOWPATH_STEP"
"""Environment variable of the command: the label of the step."""
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM")
"""Environment variables of the worker that a command gets, beside `LC_*` and those that the node names."""
STOP_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL."""
DRAIN_SECONDS = 1.0
"""Seconds after the exit for which the output is read: a background process may hold the pipes open."""
NOT_EXECUTABLE = (126, 127)
"""Exit codes of shells and `env` for a program that is missing or not executable."""
MAX_TAIL = 1000
"""Characters of the output in an error."""
ANSWERS = {0: Answer.APPLIED, 1: Answer.NOT_APPLIED, 75: Answer.RUNNING}
"""Exit code of a check -> answer; other codes: unknown. 75 is EX_TEMPFAIL."""


class ShellResult(msgspec.Struct, frozen=True):
    """The end of a command. `cut`: a part of the output was left out."""

    exit_code: int
    stdout: str
    stderr: str
    cut: bool = False


class _ProcessProtocol(asyncio.SubprocessProtocol):
    """`exited` is set when the process has ended, even if its pipes are still open."""

    def __init__(self, limit: int) -> None:
        self.output = {1: BoundedOutput(limit), 2: BoundedOutput(limit)}
        self.exited, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output[fd].add(data)

    def process_exited(self) -> None:
        self.exited.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


class ShellExecutor:
    """Shell commands on the machine of the worker."""

    async def run(self, action: Shell, node: str, context: ActionContext) -> ShellResult:
        """The result of a command with exit code 0. Another code is a failure. While a process of an earlier
        attempt at the step lives on this machine, the step waits."""
        target = Target.of(node, context)
        if target.repeated and await _is_active(target):
            raise Snooze(WAIT)
        result = await _executed(action, target, target.label)
        if result.exit_code != 0:
            raise _failure(action, target, result)
        return result

    async def answer(self, action: Shell, node: str, context: ActionContext) -> Answer:
        """Exit code 0: applied, 1: not applied, 75: running, others: unknown. While a process of an attempt
        at the step lives: running."""
        target = Target.of(node, context)
        if await _is_active(target):
            return Answer.RUNNING
        result = await _executed(action, target, f"{target.label}/check")
        return ANSWERS.get(result.exit_code, Answer.UNKNOWN)


async def _is_active(target: Target) -> bool:
    """Whether a process of an attempt at the step lives on this machine. False where there is no /proc."""
    wanted = {f"{STEP_VARIABLE}={label}".encode() for label in target.labels}
    return await asyncio.to_thread(_has_process, wanted)


def _has_process(wanted: set[bytes]) -> bool:
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            # The environment of a process that has ended, and is not yet reaped, is empty.
            if not wanted.isdisjoint(place.read_bytes().split(b"\0")):
                return True
        except OSError:
            continue  # of another user, or ended
    return False


def _failure(action: Shell, target: Target, result: ShellResult) -> ActionFailed | ActionRefused:
    code = result.exit_code
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was ended by signal {-code}"
        with contextlib.suppress(ValueError):
            how = f"was ended by {signal.Signals(-code).name}"
    tail = (result.stderr.strip() or result.stdout.strip())[-MAX_TAIL:]
    why = f"{os.path.basename(action.argv[0])} {how}" + (f": {tail}" if tail else "")
    failure = ActionRefused if code in NOT_EXECUTABLE else ActionFailed
    return failure(node=target.node.name, why=why, exit_code=code)


async def _executed(action: Shell, target: Target, label: str) -> ShellResult:
    credentials = Credentials.of(target.node)
    protocol = _ProcessProtocol(target.node.max_output)
    transport = await _started(action, target, label, protocol)
    try:
        if action.input is not None:
            _send(transport, action.input.encode())
        async with time_limit(target.seconds):
            await protocol.exited.wait()
    except BaseException:
        await _stop_group(transport, protocol)
        raise
    finally:
        if protocol.exited.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(protocol.closed.wait(), DRAIN_SECONDS)
        transport.close()
    code = transport.get_returncode()
    assert code is not None
    out, err = protocol.output[1], protocol.output[2]
    return ShellResult(code, out.text(credentials), err.text(credentials), out.cut or err.cut)


async def _started(
    action: Shell, target: Target, label: str, protocol: _ProcessProtocol
) -> asyncio.SubprocessTransport:
    """Start the process. A cancellation waits for the start: asyncio would leave the process running, or wait
    for its pipes for ever."""
    starting = asyncio.ensure_future(
        asyncio.get_running_loop().subprocess_exec(
            lambda: protocol,
            *action.argv,
            stdin=subprocess.DEVNULL if action.input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=_directory(action, target.node),
            env=_environment(action, target.node, label),
            start_new_session=True,
        )
    )
    try:
        transport, _ = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        if starting.exception() is None:
            transport, _ = starting.result()
            await _stop_group(transport, protocol)
            transport.close()
        raise
    except (OSError, ValueError) as error:
        raise _not_started(action, target.node, error) from None
    return transport


def _send(transport: asyncio.SubprocessTransport, data: bytes) -> None:
    pipe: Any = transport.get_pipe_transport(0)
    with contextlib.suppress(OSError):  # a command that does not read its input
        pipe.write(data)
        pipe.write_eof()


async def _stop_group(transport: asyncio.SubprocessTransport, protocol: _ProcessProtocol) -> None:
    """SIGTERM to the process group, SIGKILL after `STOP_SECONDS`. A second cancellation kills at once."""
    group = transport.get_pid()
    try:
        _signal_group(group, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(protocol.closed.wait(), STOP_SECONDS)
    finally:
        # Also after the exit of the process: its children may ignore SIGTERM.
        _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _directory(action: Shell, node: Node) -> str | None:
    """The directory of the command. An address for SQL or HTTP is no directory."""
    address = node.address or ""
    base = "" if "://" in address or "=" in address else address
    return os.path.join(base, action.cwd or "") or None


def _environment(action: Shell, node: Node, label: str) -> dict[str, str]:
    """Few variables of the worker, so that its own secrets do not reach the command."""
    own = (node.password_env, node.token_env)
    names = {*PASSED, *node.pass_env, *(name for name in own if name is not None)}
    kept = {name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")}
    return {**kept, **dict(action.env), STEP_VARIABLE: label}


def _not_started(action: Shell, node: Node, error: OSError | ValueError) -> ActionFailed | ActionRefused:
    name = node.name
    if isinstance(error, BlockingIOError | MemoryError):  # EAGAIN: too many processes
        return ActionFailed(node=name, why=str(error))
    directory = _directory(action, node)
    if directory is not None and not os.path.isdir(directory):
        return ActionRefused(node=name, why=f"there is no directory {directory}")
    return ActionRefused(node=name, why=f"{action.argv[0]} cannot be started: {error}")
