"""Two ledgers that must agree on everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from towpath.core.commands import Command
from towpath.core.job import COLUMNS, State
from towpath.core.views import Query
from towpath.errors import CommandFailed, TowpathError
from towpath.ledger import Answer, Ledger
from towpath.testing.moves import GROUPS, NOTES, PARTS, QUEUES

Factory = Callable[[], Ledger]


class Mismatch(AssertionError):
    """The two ledgers differ, or one of them is at odds with itself."""


class Pair:
    """Applies each batch to both and compares what they say; `compare` looks at the whole state."""

    def __init__(self, left: Ledger, right: Ledger) -> None:
        self.left, self.right = left, right

    def apply(self, commands: Sequence[Command], now: int) -> list[Answer]:
        left, right = (_apply(ledger, commands, now) for ledger in (self.left, self.right))
        _same("the answers", left, right)
        for answer in left:
            if isinstance(answer, CommandFailed):
                raise Mismatch(f"both failed: {answer}")
        return left

    def compare(self, now: int) -> None:
        """Dumps, checks and reads."""
        for name, ledger in (("left", self.left), ("right", self.right)):
            if problems := ledger.check():
                raise Mismatch("\n".join([f"{name} does not add up:", *problems]))
        left, right = self.left.dump(), self.right.dump()
        _same("the dumps", left, right)
        for what, look in _looks(now, [job.id for job in left["jobs"]]):
            _same(what, look(self.left), look(self.right))

    def close(self) -> None:
        self.left.close()
        self.right.close()


def _apply(ledger: Ledger, commands: Sequence[Command], now: int) -> list[Answer]:
    try:
        return ledger.apply(commands, now)
    except TowpathError:
        raise
    except Exception as error:
        raise Mismatch(f"{type(ledger).__name__} raised {error!r}") from error


def _looks(now: int, ids: Sequence[str]) -> Iterator[tuple[str, Callable[[Ledger], object]]]:
    yield "queues()", lambda ledger: ledger.queues()
    for queue in QUEUES:
        yield f"parts({queue})", lambda ledger, queue=queue: ledger.parts(queue)
    for group in GROUPS:
        yield f"group({group})", lambda ledger, group=group: ledger.group(group)
    for key in NOTES:
        yield f"note({key})", lambda ledger, key=key: ledger.note(key, now)
    for id in ids[-12:]:
        yield f"explain({id})", lambda ledger, id=id: ledger.explain(id, now)
        yield f"get({id})", lambda ledger, id=id: ledger.get(id)
    for query in _queries():
        yield str(query), lambda ledger, query=query: ledger.find(query)


def _queries() -> Iterator[Query]:
    yield Query(limit=5)
    yield Query(queue="a/*", states=(State.READY, State.RUNNING), oldest_first=True, bodies=False)
    yield Query(part=PARTS[0], limit=3)
    yield Query(header=("h", "1"))
    yield Query(kind="mail", correlation_id="c")


def _same(what: str, left: Any, right: Any) -> None:
    if left != right:
        raise Mismatch("\n".join([f"{what} differ:", *differences(left, right)]))


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two values differ, one line each, the first few."""
    return list(_differences(left, right, path))[:40]


def _differences(left: Any, right: Any, path: str) -> Iterator[str]:
    if left == right and type(left) is type(right):
        return
    if isinstance(left, msgspec.Struct) and type(left) is type(right):
        name = getattr(left, "id", "") if set(COLUMNS) <= set(left.__struct_fields__) else ""
        for field in left.__struct_fields__:
            yield from _differences(getattr(left, field), getattr(right, field), f"{path}{f'<{name}>' if name else ''}.{field}")
    elif isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys(), key=str):
            yield from _differences(left.get(key), right.get(key), f"{path}[{key!r}]")
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for n, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from _differences(one, other, f"{path}[{n}]")
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        yield f"{path}: {len(left)} and {len(right)} entries"
        yield from (f"{path}: only left:  {_short(each)}" for each in left if each not in right)
        yield from (f"{path}: only right: {_short(each)}" for each in right if each not in left)
    elif left != right:
        yield f"{path}: left {_short(left)}, right {_short(right)}"


def _short(value: object) -> str:
    text = f"{type(value).__name__}: {value}" if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 400 else text[:397] + "..."
