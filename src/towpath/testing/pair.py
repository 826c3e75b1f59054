"""Two ledgers that must agree on everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from towpath.core.commands import Command, GroupState
from towpath.core.edges import EdgePage, EdgeQuery
from towpath.core.job import COLUMNS, State
from towpath.core.views import GroupPage, GroupQuery, NoteQuery, Query
from towpath.errors import CommandFailed, TowpathError
from towpath.ledger import Answer, Ledger
from towpath.testing.draws import NOTES, PARENTS, PARTS, QUEUES

Factory = Callable[[], Ledger]

QUERIES = (
    Query(limit=5),
    Query(queue="a/*", states=(State.READY, State.RUNNING), oldest_first=True, bodies=False),
    Query(part=PARTS[0], limit=3),
    Query(header=("h", "1")),
    Query(kind="mail", correlation_id="c"),
    Query(parent=PARENTS[0], limit=4),
    Query(parent=PARENTS[1], generation=1, states=(State.FAILED, State.CANCELED), oldest_first=True),
    Query(generation=2, limit=3),
)
GROUP_QUERIES = (
    GroupQuery(limit=4),
    GroupQuery(limit=4, descending=True),
    GroupQuery(states=(GroupState.CLOSED, GroupState.ABORTING), limit=3),
    GroupQuery(outcomes=(State.FAILED, State.CANCELED), prefix="g", descending=True, limit=3),
    GroupQuery(prefix="g1", limit=2),
)
NOTE_QUERIES = (NoteQuery(), NoteQuery(limit=1), NoteQuery(prefix=NOTES[0][:1], limit=2))


class Mismatch(AssertionError):
    """The two ledgers differ, or `check()` of one of them reports an inconsistency."""


class Pair:
    """Applies each batch to both ledgers and compares the answers; `compare` compares the whole states."""

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
                raise Mismatch("\n".join([f"{name} is inconsistent:", *problems]))
        left, right = self.left.dump(), self.right.dump()
        _same("the dumps", left, right)
        ids = [job.id for job in left["jobs"][-12:]]
        groups = [view.id for view, _ in left["groups"]]
        _same("the reads", *[_views(ledger, now, ids, groups) for ledger in (self.left, self.right)])

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


def _views(ledger: Ledger, now: int, ids: Sequence[str], groups: Sequence[str]) -> dict[str, object]:
    views: dict[str, object] = {"queues": ledger.queues()}
    views |= {f"parts of {queue}": ledger.parts(queue) for queue in QUEUES}
    views |= {f"group {group}": ledger.group(group) for group in (*groups, "nothing")}
    views |= {f"note {key}": ledger.note(key, now) for key in NOTES}
    views |= {f"notes {n}": ledger.notes(query, now) for n, query in enumerate(NOTE_QUERIES)}
    views |= {f"queue {queue}": ledger.queue(queue) for queue in (*QUEUES, "nowhere")}
    views |= {f"edges of {id}": _edges(ledger, id) for id in (*ids, "nowhere")}
    views |= {f"edges of group {id}": _group_edges(ledger, id) for id in (*groups, "nothing")}
    views |= {f"explain {id}": ledger.explain(id, now) for id in ids}
    views |= {f"attempts of {id}": ledger.attempts(id) for id in (*ids, "nowhere")}
    views |= {f"get {id}": ledger.get(id) for id in (*ids, "nowhere")}
    views |= {f"groups {n}": _all_groups(ledger, query) for n, query in enumerate(GROUP_QUERIES)}
    return views | {f"find {n}": ledger.find(query) for n, query in enumerate(QUERIES)}


def _edges(ledger: Ledger, id: str) -> list[EdgePage]:
    return [ledger.edges(EdgeQuery(into=id)), ledger.edges(EdgeQuery(out_of=id, limit=2))]


def _group_edges(ledger: Ledger, id: str) -> list[EdgePage]:
    first = ledger.edges(EdgeQuery(into_group=id, limit=3))
    second = [] if first.next is None else [ledger.edges(EdgeQuery(into_group=id, page=first.next))]
    return [ledger.edges(EdgeQuery(out_of_group=id)), first, *second]


def _all_groups(ledger: Ledger, query: GroupQuery) -> list[GroupPage]:
    """The first pages of a query."""
    pages = [ledger.groups(query)]
    while pages[-1].next is not None and len(pages) < 4:
        pages.append(ledger.groups(msgspec.structs.replace(query, page=pages[-1].next)))
    return pages


def _same(what: str, left: Any, right: Any) -> None:
    if left != right:
        raise Mismatch("\n".join([f"{what} differ:", *differences(left, right)]))


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """The first differences of two values, one line each."""
    return list(_differences(left, right, path))[:40]


def _differences(left: Any, right: Any, path: str) -> Iterator[str]:
    if left == right and type(left) is type(right):
        return
    if isinstance(left, msgspec.Struct) and type(left) is type(right):
        name = getattr(left, "id", "") if set(COLUMNS) <= set(left.__struct_fields__) else ""
        for field in left.__struct_fields__:
            yield from _differences(
                getattr(left, field), getattr(right, field), f"{path}{f'<{name}>' if name else ''}.{field}"
            )
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
