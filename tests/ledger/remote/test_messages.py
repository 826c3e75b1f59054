"""The format of requests and responses: no field is lost, and no bytes become an unchecked command."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import string
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towpath import errors
from towpath.core import commands, edges, explain, job, limits, results, views
from towpath.core.commands import Command
from towpath.errors import Described, InvalidInput, TowpathError
from towpath.ledger.memory.ledger import MemoryLedger
from towpath.ledger.remote import messages
from towpath.ledger.remote.messages import (
    FORMAT,
    READS,
    ApplyRequest,
    ApplyResponse,
    ErrorMessage,
    ServerVersion,
    UnknownFormat,
)
from towpath.testing.clock import START
from towpath.testing.moves import Moves

FINGERPRINTS = {1: "4a2bc5a313f92aa4"}
"""Format -> fingerprint of the types in requests and responses."""
PARSERS: tuple[Callable[[bytes], object], ...] = (
    messages.apply_request,
    messages.read_request,
    messages.wait_request,
)


def test_commands_and_answers_are_the_same_after_the_transfer() -> None:
    """Every command, and every answer that random histories get."""
    sent: set[type] = set()
    received: set[type] = set()
    for seed in range(10):
        moves, ledger, now = Moves(random.Random(seed)), MemoryLedger(), START
        for _ in range(120):
            now += moves.step()
            batch = list(moves.batch())
            assert messages.apply_request(messages.pack(ApplyRequest(FORMAT, batch, now))).commands == batch
            answers = ledger.apply(batch, now)
            moves.observe(answers)
            wire = [messages.error_message(x) if isinstance(x, TowpathError) else x for x in answers]
            version = ServerVersion("s", 1)
            response, found = messages.apply_response(messages.pack(ApplyResponse(wire, version, True)))
            assert found == answers
            assert [type(each) for each in found] == [type(each) for each in answers]
            assert [str(each) for each in found] == [str(each) for each in answers]
            assert (response.version, response.repeated) == (version, True)
            sent |= {type(each) for each in batch}
            received |= {type(each) for each in answers}
    assert sent == set(get_args(Command))
    assert received >= set(get_args(results.Result))


def test_reads_are_the_same_after_the_transfer() -> None:
    moves, ledger, now = Moves(random.Random(3)), MemoryLedger(), START
    for _ in range(150):
        now += moves.step()
        moves.observe(ledger.apply(moves.batch(), now))
    dump = ledger.dump()
    id, group, queue = dump["jobs"][-1].id, dump["groups"][0][0].id, dump["jobs"][-1].queue
    arguments: dict[str, dict[str, Any]] = {
        "get": {"id": id},
        "get_many": {"ids": [id, "nothing"], "bodies": True},
        "lookup": {"text": id, "limit": 10},
        "find": {"query": views.Query(states=(job.State.READY,), header=("h", "1"))},
        "attempts": {"id": id},
        "queues": {},
        "queue": {"name": queue},
        "edges": {"query": edges.EdgeQuery(into=id)},
        "notes": {"query": views.NoteQuery(limit=2), "now": now},
        "parts": {"queue": queue},
        "group": {"id": group},
        "groups": {"query": views.GroupQuery(limit=3)},
        "winners": {"job": "", "group": group},
        "note": {"key": "n", "now": now},
        "chunk": {"blob": "b", "number": 0},
        "explain": {"id": id, "now": now},
        "check": {},
        "dump": {},
    }
    assert arguments.keys() == READS.keys()
    for name, given_arguments in arguments.items():
        request = messages.read_request(READS[name].pack(name, given_arguments))
        assert request.name == name
        assert READS[name].arguments(request.arguments) == given_arguments
        value = getattr(ledger, name)(**given_arguments)
        assert READS[name].result(messages.pack_value(value)) == value, name


def _example(kind: type[TowpathError]) -> TowpathError:
    fields = {name for _, name, _, _ in string.Formatter().parse(kind.sentence) if name}
    values: dict[str, Any] = {name: f"{name}\x1b é" for name in fields}
    if issubclass(kind, errors.InvalidPlan):
        return kind(plan="p", reasons=["one\x1b é", "two"])
    if issubclass(kind, InvalidInput):
        values["message"] = "its own"
    return kind(**{**values, **dict.fromkeys(fields & {"seconds", "retry_after"}, 1.5)})


KINDS = [
    found
    for found in vars(errors).values()
    if isinstance(found, type)
    and issubclass(found, TowpathError)
    and not issubclass(found, errors.CallFailed)  # raised by the client of queues, not by a ledger
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_its_class_its_message_and_its_details(kind: type[TowpathError]) -> None:
    error = _example(kind)
    found = messages.unpack_error(messages.pack(messages.error_message(error)))
    assert type(found) is kind
    assert str(found) == str(error)
    assert found == error


def test_details_of_errors_keep_their_types() -> None:
    error = errors.UnknownDependency(ids=("a", "b"))
    assert messages.unpack_error(messages.pack(messages.error_message(error))) == error
    wrong = InvalidInput(field="n", value=Described("5 bytes"), expected="less")
    found = messages.unpack_error(messages.pack(messages.error_message(wrong)))
    assert str(found) == "n is 5 bytes; it must be less"


@pytest.mark.parametrize(
    "message",
    [
        ErrorMessage("ErrorOfTomorrow", {"why": 1}),
        ErrorMessage("LostClaim", {}),
        ErrorMessage("InvalidInput", {"field": "x"}),
        ErrorMessage("JobFailed", {"surprise": 1}),
    ],
)
def test_an_error_that_cannot_be_rebuilt_is_still_a_refusal(message: ErrorMessage) -> None:
    found = messages.error_of(message)
    assert type(found) is errors.CommandFailed
    assert message.kind in str(found)


BAD: dict[str, dict[str, Any]] = {
    "id": {"type": "append", "specs": [{"id": "", "queue": "q"}]},
    "queue": {"type": "append", "specs": [{"id": "a", "queue": "q\n"}]},
    "priority": {"type": "append", "specs": [{"id": "a", "queue": "q", "priority": 10**6}]},
    "lease": {"type": "claim", "owner": "w", "wants": [{"queue": "q"}], "lease": 0},
    "wants": {"type": "claim", "owner": "w", "wants": [], "lease": 5},
    "fence": {"type": "settle", "id": "a", "fence": -1, "outcome": {"type": "done"}},
    "delay": {"type": "settle", "id": "a", "fence": 1, "outcome": {"type": "retry", "delay": -1}},
    "selector": {"type": "cancel", "where": {}},
    "held": {"type": "renew", "held": [["a", -1]], "lease": 5},
    "then": {"type": "open", "group": "g", "then": {"never": []}},
    "cap": {"type": "set-queue", "queue": "q", "cap": -1},
    "specs": {"type": "append", "specs": []},
}


@pytest.mark.parametrize("field", BAD)
def test_the_checks_of_a_command_run_when_it_is_decoded(field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        messages.apply_request(msgspec.msgpack.encode([FORMAT, [BAD[field]], None]))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "command",
    [
        {"type": "drop-everything"},
        {"type": "settle", "id": "a", "fence": 1, "outcome": {"type": "done"}, "within": "os.system"},
        {"type": "append", "specs": [{"id": "a", "queue": "q", "surprise": 1}]},
        {"type": "append", "specs": {"id": "a"}},
        {"id": "a"},
        None,
        [1],
    ],
)
def test_values_that_are_no_commands(command: object) -> None:
    with pytest.raises(InvalidInput, match="the body is not a valid request"):
        messages.apply_request(msgspec.msgpack.encode([FORMAT, [command], None]))


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("rest", [[], [[{"type": "tomorrow"}], None], ["find", {}, 7, 8], [{}, 1.0]])
def test_another_format_is_named(parse: Callable[[bytes], object], rest: list[object]) -> None:
    with pytest.raises(UnknownFormat, match=rf"has format {FORMAT + 1}, .* supports format {FORMAT}"):
        parse(msgspec.msgpack.encode([FORMAT + 1, *rest]))


GOOD = messages.pack(ApplyRequest(FORMAT, list(Moves(random.Random(1)).batch()), None))


@given(st.binary(max_size=200), st.integers(0, len(GOOD)), st.sampled_from(PARSERS))
def test_any_bytes_are_refused(data: bytes, at: int, parse: Callable[[bytes], object]) -> None:
    for body in (data, GOOD[:at] + data, GOOD[:at] + data + GOOD[at + len(data) :]):
        try:
            parse(body)
        except (InvalidInput, UnknownFormat):
            continue


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(InvalidInput):
        messages.apply_request(b"\x91" * 100_000)


def test_the_format_changes_with_the_types() -> None:
    """Unknown fields are ignored, so a client with a newer field needs a newer format. If this fails: raise
    FORMAT, unless no version with the old number was released, and enter the new fingerprint."""
    assert _fingerprint() == FINGERPRINTS[FORMAT]


def _fingerprint() -> str:
    kinds = [
        found
        for module in (commands, results, job, views, edges, limits, messages)
        for _, found in sorted(vars(module).items())
        if isinstance(found, type) and issubclass(found, msgspec.Struct)
    ]
    lines = [f"{kind.__name__} {kind.__struct_config__.tag} {_annotations(kind)}" for kind in kinds]
    lines.append(f"Explanation {[field.name for field in dataclasses.fields(explain.Explanation)]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _annotations(kind: type) -> dict[str, str]:
    """The annotations of a struct and its bases, as they are written."""
    ours = [each for each in reversed(kind.__mro__) if each.__module__.startswith("towpath")]
    return {name: text for each in ours for name, text in vars(each).get("__annotations__", {}).items()}
