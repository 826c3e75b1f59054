"""What the executors share: the target of an action, credentials, bounded output, timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Mapping

import msgspec

from towpath.core.nodes import Node
from towpath.errors import ActionFailed, SecretUnavailable, TimedOut
from towpath.operations.executors import ActionContext

MAX_SECRET = 65_536
"""Bytes of a secret file."""
MAX_ERROR = 4_000
"""Characters of the text of an error."""
HIDDEN = "***"


class Target(msgspec.Struct, frozen=True):
    """The node of an action, the label of the attempt and its timeout in seconds. `labels`: those of the
    attempts that must not be active while a check runs: the action of the step and its undo. `repeated`: an
    earlier attempt may be active."""

    node: Node
    label: str
    labels: tuple[str, ...]
    seconds: float | None
    repeated: bool

    @classmethod
    def of(cls, name: str, context: ActionContext) -> Target:
        """A node that is not in the settings has neither address nor credentials."""
        node = context.settings.nodes.get(name) or Node(name=name)
        step = f"{context.plan}/{context.step}"
        labels = (step, f"{step}/undo")
        seconds = node.timeout if context.timeout is None else context.timeout
        return cls(node, labels[context.undo], labels, seconds, context.undo or context.attempt > 1)

    def address(self) -> str:
        """The address. Without one this raises ActionFailed: the settings of another worker may have it."""
        if self.node.address is None:
            why = f"the settings of this worker have no address of it: [nodes.{self.node.name}] address = ..."
            raise ActionFailed(node=self.node.name, why=why)
        return self.node.address


class Credentials:
    """The password and the token of a node. The values have no printed form, so that neither a traceback nor
    a log line shows them."""

    __slots__ = ("_password", "_token")

    def __init__(self, password: str | None, token: str | None) -> None:
        self._password, self._token = password, token

    def __repr__(self) -> str:
        return "<Credentials>"

    @classmethod
    def of(cls, node: Node, environment: Mapping[str, str] | None = None) -> Credentials:
        """Read the credentials now. Raises SecretUnavailable."""
        found = os.environ if environment is None else environment
        return cls(
            _secret(node, "password", node.password_env, node.password_file, found),
            _secret(node, "token", node.token_env, node.token_file, found),
        )

    @property
    def password(self) -> str | None:
        return self._password

    @property
    def token(self) -> str | None:
        return self._token

    def hide(self, text: str) -> str:
        """The text without the password and the token."""
        for secret in (self._password, self._token):
            if secret:
                text = text.replace(secret, HIDDEN)
        return text

    def why(self, error: BaseException) -> str:
        """The text of an error without the credentials, on bounded length."""
        text = self.hide(str(error).strip()) or type(error).__name__
        return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."


def _secret(
    node: Node, kind: str, variable: str | None, file: str | None, environment: Mapping[str, str]
) -> str | None:
    if variable is not None:
        value = environment.get(variable)
        if not value:
            raise SecretUnavailable(
                node=node.name,
                why=f"{kind}_env: the environment variable {variable} of the worker is not set",
            )
        return value
    return None if file is None else _secret_file(node, f"{kind}_file", file)


def _secret_file(node: Node, field: str, path: str) -> str:
    try:
        # Without blocking, so that a named pipe is refused and not waited for.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as file:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise SecretUnavailable(node=node.name, why=f"{field}: {path} is not a regular file")
            if found.st_mode & stat.S_IRWXO:
                why = f"{field}: every user can access {path}; run chmod o= on it"
                raise SecretUnavailable(node=node.name, why=why)
            content = file.read(MAX_SECRET + 1)
        if len(content) > MAX_SECRET:
            raise SecretUnavailable(node=node.name, why=f"{field}: {path} has more than {MAX_SECRET} bytes")
        value = content.decode().rstrip("\r\n")
    except OSError as error:
        raise SecretUnavailable(node=node.name, why=f"{field}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SecretUnavailable(node=node.name, why=f"{field}: {path} is not UTF-8") from None
    if not value:
        raise SecretUnavailable(node=node.name, why=f"{field}: {path} is empty")
    return value


class BoundedOutput:
    """The beginning and the end of a stream, together at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._first_size = limit // 2
        self._last_size = limit - self._first_size
        self._first, self._last = bytearray(), bytearray()
        self.size = 0
        """Bytes of the whole stream."""

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = self._first_size - len(self._first)
        self._first += data[:room]
        self._last += data[room:]
        if len(self._last) > 2 * self._last_size + 4096:
            self._trim()

    def _trim(self) -> None:
        del self._last[: max(0, len(self._last) - self._last_size)]

    @property
    def cut(self) -> bool:
        return self.size > self._first_size + self._last_size

    def text(self, credentials: Credentials) -> str:
        self._trim()
        missing = self.size - len(self._first) - len(self._last)
        gap = f"\n... {missing} bytes left out ...\n".encode() if missing else b""
        return credentials.hide((bytes(self._first) + gap + bytes(self._last)).decode(errors="replace"))


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None) -> AsyncIterator[None]:
    """Cancel the block after this time, and raise TimedOut."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        # An error of the block itself is a subclass with a text of its own.
        if seconds is None or type(error) is not TimeoutError:
            raise
        raise TimedOut(seconds=seconds) from None
