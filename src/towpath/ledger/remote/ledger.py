"""The ledger of a server, over HTTP. Commands are sent in batches, and the time is the server's. A request
without an answer is sent again: every command may be applied twice."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, get_args

import msgspec

from towpath.core import checks
from towpath.core.commands import Command, Settle
from towpath.core.edges import EdgePage, EdgeQuery
from towpath.core.explain import Explanation
from towpath.core.history import AttemptRecord
from towpath.core.job import Job
from towpath.core.views import (
    GroupPage,
    GroupQuery,
    GroupView,
    NotePage,
    NoteQuery,
    NoteView,
    Page,
    PartView,
    Query,
    QueueView,
    Winner,
)
from towpath.errors import Forked, InvalidInput, LedgerError, Refused, StoreFailed, TowpathError, Unsupported
from towpath.ledger import Answer, Capabilities, LeasesOnly
from towpath.ledger.remote.connection import (
    PAUSES,
    Connections,
    RemoteOptions,
    RequestFailed,
    away,
    options_of,
)
from towpath.ledger.remote.messages import (
    APPLY,
    FORMAT,
    MAX_BODY,
    MAX_COMMANDS,
    READ,
    READS,
    WAIT,
    ApplyRequest,
    ServerVersion,
    WaitRequest,
    WaitResponse,
    apply_response,
    pack,
    wait_response,
)
from towpath.ledger.remote.versions import Versions

__all__ = ["RemoteLedger", "RemoteOptions", "options_of"]

T = TypeVar("T")

_COMMANDS: Final = frozenset(get_args(Command))


class RemoteLedger:
    """`for_tests` of the server's options allows `now` and `dump`."""

    owners = LeasesOnly()

    def __init__(self, options: RemoteOptions) -> None:
        self.place = options.place
        self._options = options
        self._pid = os.getpid()
        self.repeats = 0
        self._counting = threading.Lock()
        self._connections = Connections(options)
        self._versions = Versions(self.place, self._poll)
        try:
            first = self._wait({}, 0.0)
        except BaseException:
            self._connections.close()
            raise
        self._versions.note(first.version)
        self.capabilities = Capabilities(
            durable=first.durable, shared=True, transactional=False, remote=True, attended=True
        )

    # Writing

    def apply(self, commands: Sequence[Command], now: int | None = None) -> list[Answer]:
        """In one transaction, unless the commands are too large for one request."""
        self._guard()
        checks.optional_whole("now", now)
        for command in commands:
            if type(command) not in _COMMANDS:
                raise InvalidInput(
                    field="command", value=command, expected="a command of towpath.core.commands"
                )
        sent = [command for command in commands if not _has_function(command)]
        if len(sent) == len(commands):
            return self._apply(sent, now)
        answers = iter(self._apply(sent, now))
        return [_no_function() if _has_function(command) else next(answers) for command in commands]

    def _apply(self, commands: list[Command], now: int | None) -> list[Answer]:
        body = pack(ApplyRequest(FORMAT, commands, now))
        if len(body) > MAX_BODY or len(commands) > MAX_COMMANDS:
            if len(commands) == 1:
                what = f"a command of {len(body)} bytes; over HTTP a command has at most {MAX_BODY}"
                return [Unsupported(what=what)]
            half = len(commands) // 2
            return self._apply(commands[:half], now) + self._apply(commands[half:], now)
        response, answers = self._decoded(apply_response, self._send(APPLY, body, counted=True))
        if response.repeated:
            self._repeated()
        self._versions.note(response.version)
        return answers

    # Reading

    def get(self, id: str) -> Job | None:
        found: Job | None = self._read("get", id=id)
        return found

    def get_many(self, ids: Sequence[str], bodies: bool = True) -> dict[str, Job]:
        found: dict[str, Job] = self._read("get_many", ids=list(ids), bodies=bodies)
        return found

    def lookup(self, text: str, limit: int = 10) -> list[Job]:
        found: list[Job] = self._read("lookup", text=text, limit=limit)
        return found

    def find(self, query: Query) -> Page:
        found: Page = self._read("find", query=query)
        return found

    def attempts(self, id: str) -> list[AttemptRecord]:
        found: list[AttemptRecord] = self._read("attempts", id=id)
        return found

    def queues(self) -> dict[str, QueueView]:
        found: dict[str, QueueView] = self._read("queues")
        return found

    def queue(self, name: str) -> QueueView | None:
        found: QueueView | None = self._read("queue", name=name)
        return found

    def parts(self, queue: str) -> dict[str, PartView]:
        found: dict[str, PartView] = self._read("parts", queue=queue)
        return found

    def group(self, id: str) -> GroupView | None:
        found: GroupView | None = self._read("group", id=id)
        return found

    def groups(self, query: GroupQuery) -> GroupPage:
        found: GroupPage = self._read("groups", query=query)
        return found

    def winners(self, *, job: str = "", group: str = "") -> list[Winner]:
        found: list[Winner] = self._read("winners", job=job, group=group)
        return found

    def edges(self, query: EdgeQuery) -> EdgePage:
        found: EdgePage = self._read("edges", query=query)
        return found

    def notes(self, query: NoteQuery, now: int | None = None) -> NotePage:
        checks.optional_whole("now", now)
        found: NotePage = self._read("notes", query=query, now=now)
        return found

    def note(self, key: str, now: int | None = None) -> NoteView | None:
        checks.optional_whole("now", now)
        found: NoteView | None = self._read("note", key=key, now=now)
        return found

    def chunk(self, blob: str, number: int) -> bytes | None:
        found: bytes | None = self._read("chunk", blob=blob, number=number)
        return found

    def explain(self, id: str, now: int | None = None) -> Explanation:
        checks.optional_whole("now", now)
        found: Explanation = self._read("explain", id=id, now=now)
        return found

    def check(self) -> list[str]:
        found: list[str] = self._read("check")
        return found

    def dump(self) -> dict[str, Any]:
        found: dict[str, Any] = self._read("dump")
        return found

    def _read(self, name: str, /, **arguments: Any) -> Any:
        self._guard()
        read = READS[name]
        return self._decoded(read.result, self._send(READ, read.pack(name, arguments)))

    # Waiting

    def version(self) -> int:
        self._guard()
        return self._versions.version()

    def wait(self, seen: int, timeout: float) -> int:
        self._guard()
        return self._versions.wait(seen, timeout)

    def _poll(self, seen: Mapping[str, int], seconds: float) -> ServerVersion:
        return self._wait(seen, seconds).version

    def _wait(self, seen: Mapping[str, int], seconds: float) -> WaitResponse:
        body = pack(WaitRequest(FORMAT, dict(seen), seconds))
        return self._decoded(wait_response, self._send(WAIT, body, seconds + self._options.timeout))

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._versions.close()
            self._connections.close()

    # Requests

    def _send(self, path: str, body: bytes, seconds: float | None = None, counted: bool = False) -> bytes:
        """The answer. A request whose connection fails is sent again, but not after it has used up its time:
        the caller has waited long enough. `counted`: count the requests that may have been applied twice."""
        failures = 0
        while True:
            try:
                return self._connections.send(path, body, seconds)
            except RequestFailed as error:
                if error.late or failures == len(PAUSES):
                    raise away(self._options, error) from error
                if counted and error.ambiguous:
                    self._repeated()
                self._connections.pause(PAUSES[failures])
                failures += 1
            except TowpathError as error:
                if isinstance(error, LedgerError | Refused | InvalidInput):
                    raise
                raise StoreFailed(path=self.place, error=str(error)) from error

    def _decoded(self, decode: Callable[[bytes], T], body: bytes) -> T:
        try:
            return decode(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreFailed(path=self.place, error=f"an answer cannot be read: {error}") from error

    def _repeated(self) -> None:
        with self._counting:
            self.repeats += 1

    def _guard(self) -> None:
        if os.getpid() != self._pid:  # the connections belong to the parent
            raise Forked(path=self.place, opener=self._pid)
        self._connections.check_open()


def _has_function(command: Command) -> bool:
    return type(command) is Settle and command.within is not None


def _no_function() -> Unsupported:
    return Unsupported(
        what="a function inside a settle needs a database in this process, and this ledger is a server"
    )
