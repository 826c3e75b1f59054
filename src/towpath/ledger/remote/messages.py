"""The requests and responses of `/v1/ledger/*`, which are msgpack.

Each request is an array that begins with the number of the format. An unknown field of a command is ignored
by the decoder, so the number must change with every change of a command, of a result or of a view: a server
must not apply a part of a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypedDict, TypeVar

import msgspec

from towpath import errors
from towpath.core import checks
from towpath.core.commands import Command
from towpath.core.edges import EdgePage, EdgeQuery
from towpath.core.explain import Explanation
from towpath.core.history import AttemptRecord
from towpath.core.job import Job, Spec
from towpath.core.results import Result
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
from towpath.errors import CommandFailed, Described, InvalidInput, Refused, TowpathError

FORMAT: Final = 1
CONTENT_TYPE: Final = "application/msgpack"
APPLY, READ, WAIT = "/v1/ledger/apply", "/v1/ledger/read", "/v1/ledger/wait"
MAX_BODY: Final = 64 * 1024 * 1024
"""Bytes of a request."""
MAX_COMMANDS: Final = 10_000
"""Commands of a request."""
MAX_WAIT: Final = 25.0
"""Seconds that a server holds a request to wait. Proxies often end a request after 30 s or 60 s."""

T = TypeVar("T", bound=msgspec.Struct)


class ErrorMessage(msgspec.Struct, frozen=True, gc=False, tag="error"):
    """A refusal or an error of the server's ledger: the name of its class, and its details."""

    kind: str
    details: dict[str, Any]


class ServerVersion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The version of the ledger as one server process counts it. Numbers of different processes are not
    comparable."""

    server: str
    number: int


class ApplyRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`now` is for tests: a server accepts it only with the option `for_tests`."""

    format: int
    commands: list[Command]
    now: int | None = None


class ApplyResponse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`repeated`: the server's ledger may have applied the commands twice. `version` is None if it could not
    be read."""

    answers: list[Result | ErrorMessage]
    version: ServerVersion | None
    repeated: bool


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    format: int
    name: str
    arguments: msgspec.Raw


class WaitRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Wait until the version of the server differs from the one in `seen`, by the names of servers."""

    format: int
    seen: dict[str, int]
    seconds: float


class WaitResponse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    version: ServerVersion
    durable: bool


class _FormatNumber(msgspec.Struct, array_like=True):
    """The beginning of any request, of this format or a later one."""

    format: int


class LedgerDump(TypedDict):
    """The value of `Ledger.dump`."""

    jobs: list[Job]
    attempts: list[tuple[Any, ...]]
    edges: list[tuple[Any, ...]]
    gates: list[tuple[Any, ...]]
    proxies: list[tuple[Any, ...]]
    names: list[tuple[Any, ...]]
    groups: list[tuple[GroupView, dict[str, list[Spec]]]]
    keys: list[tuple[Any, ...]]
    notes: list[NoteView]
    queues: list[tuple[QueueView, int, int]]
    parts: list[tuple[PartView, bool]]
    tombstones: list[tuple[Any, ...]]
    replies: list[tuple[Any, ...]]
    blobs: list[tuple[Any, ...]]
    chunks: list[tuple[str, int, bytes]]
    next_seq: int
    next_version: int
    last: int


class LedgerRead:
    """A read of the protocol `Ledger`: the types of its arguments and of its result."""

    def __init__(self, result: Any, **arguments: Any) -> None:
        fields = list(arguments.items())
        self._kind = msgspec.defstruct("ReadArguments", fields, array_like=True, forbid_unknown_fields=True)
        self._arguments = msgspec.msgpack.Decoder(self._kind)
        self._result = msgspec.msgpack.Decoder(result)

    def pack(self, name: str, arguments: Mapping[str, Any]) -> bytes:
        try:
            raw = msgspec.Raw(_encoder.encode(self._kind(**arguments)))
        except UnicodeEncodeError:
            # Text with lone surrogates is never stored, and neither is NUL.
            storable = {name: _storable(value) for name, value in arguments.items()}
            raw = msgspec.Raw(_encoder.encode(self._kind(**storable)))
        return _encoder.encode(ReadRequest(FORMAT, name, raw))

    def arguments(self, raw: msgspec.Raw) -> dict[str, Any]:
        return msgspec.structs.asdict(_checked(self._arguments, raw))

    def result(self, body: bytes) -> Any:
        return self._result.decode(body)


def _storable(value: Any) -> Any:
    if isinstance(value, list):
        return [_storable(each) for each in value]
    return value if not isinstance(value, str) or checks.storable(value) else "\0"


READS: Final[Mapping[str, LedgerRead]] = {
    "get": LedgerRead(Job | None, id=str),
    "get_many": LedgerRead(dict[str, Job], ids=list[str], bodies=bool),
    "lookup": LedgerRead(list[Job], text=str, limit=int),
    "find": LedgerRead(Page, query=Query),
    "attempts": LedgerRead(list[AttemptRecord], id=str),
    "queues": LedgerRead(dict[str, QueueView]),
    "queue": LedgerRead(QueueView | None, name=str),
    "parts": LedgerRead(dict[str, PartView], queue=str),
    "group": LedgerRead(GroupView | None, id=str),
    "groups": LedgerRead(GroupPage, query=GroupQuery),
    "winners": LedgerRead(list[Winner], job=str, group=str),
    "edges": LedgerRead(EdgePage, query=EdgeQuery),
    "note": LedgerRead(NoteView | None, key=str, now=int | None),
    "notes": LedgerRead(NotePage, query=NoteQuery, now=int | None),
    "chunk": LedgerRead(bytes | None, blob=str, number=int),
    "explain": LedgerRead(Explanation, id=str, now=int | None),
    "check": LedgerRead(list[str]),
    "dump": LedgerRead(LedgerDump),
}
TEST_READS: Final = frozenset({"dump"})
"""Reads that a server refuses without the option `for_tests`: a dump has no limit of size."""

_encoder = msgspec.msgpack.Encoder()
_apply_requests = msgspec.msgpack.Decoder(ApplyRequest)
_apply_responses = msgspec.msgpack.Decoder(ApplyResponse)
_read_requests = msgspec.msgpack.Decoder(ReadRequest)
_wait_requests = msgspec.msgpack.Decoder(WaitRequest)
_wait_responses = msgspec.msgpack.Decoder(WaitResponse)
_errors = msgspec.msgpack.Decoder(ErrorMessage)
_numbers = msgspec.msgpack.Decoder(_FormatNumber)


class UnknownFormat(Exception):
    """The request has another format than this server."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the request has format {number}, this server supports format {FORMAT}")


def pack(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def pack_value(value: object) -> bytes:
    return _encoder.encode(value)


def apply_request(body: bytes) -> ApplyRequest:
    """Raises `UnknownFormat` and `InvalidInput`, as the next two functions do."""
    return _request(_apply_requests, body)


def read_request(body: bytes) -> ReadRequest:
    return _request(_read_requests, body)


def wait_request(body: bytes) -> WaitRequest:
    return _request(_wait_requests, body)


def wait_response(body: bytes) -> WaitResponse:
    return _wait_responses.decode(body)


def apply_response(body: bytes) -> tuple[ApplyResponse, list[Result | Refused]]:
    response = _apply_responses.decode(body)
    return response, list(_answers(response.answers))


def _answers(answers: Sequence[Result | ErrorMessage]) -> Iterator[Result | Refused]:
    for answer in answers:
        if type(answer) is not ErrorMessage:
            yield answer  # type: ignore[misc]
            continue
        error = error_of(answer)
        yield error if isinstance(error, Refused) else CommandFailed(command=answer.kind, error=str(error))


def _request(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        found = _checked(decoder, body)
    except InvalidInput:
        try:
            number = _numbers.decode(body).format
        except msgspec.DecodeError:
            number = FORMAT
        if number != FORMAT:
            raise UnknownFormat(number) from None
        raise
    number = found.format  # type: ignore[attr-defined]
    if number != FORMAT:
        raise UnknownFormat(number)
    return found


def _checked(decoder: msgspec.msgpack.Decoder[T], body: bytes | msgspec.Raw) -> T:
    """The decoded value. The decoder calls `__post_init__` of every struct, so the value is checked as one of
    this process would be."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidInput):
            raise error.__cause__ from None
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(str(error)) from None


def _invalid(why: str) -> InvalidInput:
    message = f"the body is not a valid request: {why}"
    return InvalidInput(field="body", value=Described("invalid"), expected="a request", message=message)


_CLASSES: Final[Mapping[str, type[TowpathError]]] = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, TowpathError)
}


def error_message(error: TowpathError) -> ErrorMessage:
    return ErrorMessage(type(error).__name__, {name: _plain(value) for name, value in error.details.items()})


def _plain(value: object) -> object:
    """A detail as a value of msgpack."""
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value if isinstance(value, int | float | bytes | None) else str(value)


def unpack_error(body: bytes) -> TowpathError:
    return error_of(_errors.decode(body))


def error_of(message: ErrorMessage) -> TowpathError:
    """The error with its class and its details. A class that this version does not have is a
    `CommandFailed`."""
    details = {
        name: tuple(value) if isinstance(value, list) else value for name, value in message.details.items()
    }
    kind = _CLASSES.get(message.kind, CommandFailed)
    if issubclass(kind, InvalidInput) and "value" in details:
        details["value"] = Described(details["value"])
    try:
        return kind(**details)
    except (TypeError, KeyError, ValueError, AttributeError):
        return CommandFailed(command=message.kind, error=str(details))
