"""Dependencies as a read: edges between jobs, edges from groups to jobs, and the pages of both."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from towpath.core import checks
from towpath.core.finish import Relations
from towpath.core.job import Job
from towpath.core.views import MAX_PAGE
from towpath.errors import InvalidInput


class Edge(msgspec.Struct, frozen=True, gc=False):
    """The job `dst` waits for `src`: a job or, `of_group`, a group. `run_anyway`: any end of `src` is
    sufficient."""

    src: str
    dst: str
    of_group: bool
    run_anyway: bool


class EdgePosition(NamedTuple):
    """The place of an edge in the order of edges: by the seq of `dst`, jobs before groups, then by the seq of
    the job or the id of the group (`name`) that `dst` waits for."""

    dst: int = 0
    of_group: int = 0
    seq: int = 0
    name: str = ""

    @property
    def token(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


class EdgeQuery(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The edges of one job or of one group; exactly one of the fields:

    - `into`: the edges to this job, which are its dependencies.
    - `out_of`: the edges from this job to the jobs that wait for it.
    - `into_group`: the edges to the members of this group.
    - `out_of_group`: the edges from this group to the jobs that wait for it.

    `page` is the `next` of the last answer."""

    into: str | None = None
    out_of: str | None = None
    into_group: str | None = None
    out_of_group: str | None = None
    limit: int = 100
    page: str | None = None

    def __post_init__(self) -> None:
        fields = ("into", "out_of", "into_group", "out_of_group")
        given = [field for field in fields if getattr(self, field) is not None]
        if len(given) != 1:
            expected = "exactly one of into, out_of, into_group and out_of_group"
            raise InvalidInput(field="EdgeQuery", value=", ".join(given) or "empty", expected=expected)
        checks.text(given[0], getattr(self, given[0]), least=1)
        checks.whole("limit", self.limit, 1, MAX_PAGE)
        if self.page is not None:
            edge_position(self.page)

    @property
    def after(self) -> EdgePosition:
        return EdgePosition() if self.page is None else edge_position(self.page)


def edge_position(page: object) -> EdgePosition:
    """The position after which a page continues."""
    try:
        if isinstance(page, str) and len(page) <= 4096:
            raw = base64.b64decode(page + "=" * (-len(page) % 4), altchars=b"-_", validate=True)
            found = msgspec.json.decode(raw, type=EdgePosition)
            if found.token == page and checks.storable(found.name) and all(0 <= n < 2**63 for n in found[:3]):
                return found
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        pass
    raise InvalidInput(field="page", value=page, expected="the `next` of an earlier page")


class EdgePage(msgspec.Struct, frozen=True, gc=False):
    """Some of the edges that a query found; `next` is the `page` of the query for the next edges, None at the
    end."""

    edges: tuple[Edge, ...]
    next: str | None


def edge_page(query: EdgeQuery, found: Iterable[tuple[EdgePosition, Edge]]) -> EdgePage:
    """The page of a query from the edges in order. Edges up to the page mark are skipped."""
    after = query.after
    rows = list(islice((row for row in found if row[0] > after), query.limit + 1))
    page = rows[: query.limit]
    more = len(rows) > query.limit
    return EdgePage(tuple(edge for _, edge in page), page[-1][0].token if more else None)


def edges_in(relations: Relations, query: EdgeQuery) -> EdgePage:
    """The page of a query from relations in memory."""
    job = relations.find(query.into or query.out_of or "")
    rows: list[tuple[EdgePosition, Edge]] = []
    if query.out_of_group is not None:
        gates = relations.gates_to(query.out_of_group)
        rows = [_gate(relations.jobs[dst], query.out_of_group, gate.run_anyway) for dst, gate in gates]
    elif query.into_group is not None:
        if relations.group_view(query.into_group) is not None:
            members = relations.members(query.into_group)
            rows = [row for member in members for row in _into(relations, member)]
    elif job is not None and query.into is not None:
        rows = list(_into(relations, job))
    elif job is not None:
        rows = [_edge(job, relations.jobs[dst], anyway) for dst, anyway in relations.dependents(job.seq)]
    return edge_page(query, sorted(rows, key=lambda row: row[0]))


def _into(relations: Relations, dst: Job) -> Iterator[tuple[EdgePosition, Edge]]:
    for src, anyway in relations.dependencies(dst.seq):
        yield _edge(relations.jobs[src], dst, anyway)
    for group, gate in relations.gates_of(dst.seq):
        yield _gate(dst, group, gate.run_anyway)


def _edge(src: Job, dst: Job, run_anyway: bool) -> tuple[EdgePosition, Edge]:
    return EdgePosition(dst.seq, 0, src.seq), Edge(src.id, dst.id, False, run_anyway)


def _gate(dst: Job, group: str, run_anyway: bool) -> tuple[EdgePosition, Edge]:
    return EdgePosition(dst.seq, 1, 0, group), Edge(group, dst.id, True, run_anyway)
