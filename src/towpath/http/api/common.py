"""The parts that all calls beyond lockd share: names of queues and the rights in them, pages, and the view of
stored bodies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from towpath.core import checks
from towpath.core.job import Job, State
from towpath.core.views import JobStatus, Query, id_token, page_id
from towpath.errors import InvalidInput, shortened
from towpath.http.access import Principal, Right
from towpath.http.context import ServerContext
from towpath.http.exchange import Exchange
from towpath.http.problems import Problem, bad_argument
from towpath.http.wire import DEFAULT_NAMESPACE, namespace_name
from towpath.queues.payloads import decode_body
from towpath.tasks.codec import Codec, decode_plain, job_status

MAX_PAGE = 1000
MAX_SHOWN = 64 * 1024
"""Bytes of a payload that a list shows."""
MAX_BODIES = 4 * 1024 * 1024
"""Bytes of all payloads and results that a list shows."""

Moment = Annotated[datetime, Meta(tz=True)]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE, description="Entries of a page.")]
Cursor = Annotated[str, Meta(description="`next_cursor` of the page before.")]
Namespace = Annotated[str, Meta(description="Namespace of the queue, instead of a prefix in its name.")]


class PageArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    limit: Limit = 100
    cursor: Cursor = ""


class NamespaceArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    namespace: Namespace = ""


class JobArguments(PageArguments, forbid_unknown_fields=True, kw_only=True):
    """The filters of lists of jobs and messages. Each is a field of `Query`."""

    state: Annotated[tuple[State, ...], Meta(description="States.")] = ()
    kind: Annotated[str, Meta(description="Kind (task name).")] = ""
    part: Annotated[str, Meta(description="Part of the queue.")] = ""
    group: Annotated[str, Meta(description="Group id.")] = ""
    parent: Annotated[str, Meta(description="Id of the job that appended them.")] = ""
    generation: Annotated[int | None, Meta(description="Generation.")] = None
    key: Annotated[str, Meta(description="Key.")] = ""
    owner: Annotated[str, Meta(description="Worker that holds the job.")] = ""
    correlation_id: Annotated[str, Meta(description="Correlation id.")] = ""
    header: Annotated[str, Meta(description="Header or attribute, written as NAME=VALUE.")] = ""
    created_from: Annotated[Moment | None, Meta(description="Created at this time or later.")] = None
    created_before: Annotated[Moment | None, Meta(description="Created before this time.")] = None
    oldest_first: Annotated[bool, Meta(description="Oldest first.")] = False
    bodies: Annotated[bool, Meta(description="Show payloads and results, as far as they are small.")] = False

    def query(self, queue: str) -> Query:
        """The query for jobs of a queue, of a pattern, or with an empty text of all queues."""
        with named_arguments():
            texts = {name: getattr(self, name) or None for name in _TEXTS}
            return Query(
                **texts,
                generation=self.generation,
                created_from=_micros(self.created_from, "created_from"),
                created_before=_micros(self.created_before, "created_before"),
                queue=queue or None,
                states=self.state,
                header=_pair(self.header),
                oldest_first=self.oldest_first,
                bodies=False,
                limit=self.limit,
                page=self.cursor or None,
            )


_TEXTS = ("kind", "part", "group", "parent", "key", "owner", "correlation_id")


class PlainValues:
    """Arguments and results as plain JSON, whatever tasks this process has: the values are for strangers."""

    def codec_of(self, kind: str) -> Codec | None:
        return None

    def decode_result(self, data: bytes | None) -> Any:
        return decode_plain(data)


PLAIN = PlainValues()


def status_of(job: Job) -> JobStatus:
    return job_status(job, PLAIN)


class Place(NamedTuple):
    """The namespace and the rest of a queue's name in the ledger."""

    namespace: str
    queue: str


def place_of(stored: str) -> Place:
    """Where the rights to a queue, or to the queues of a pattern, are looked up. A pattern that may match
    several namespaces needs rights in all of them."""
    literal = stored.partition("*")[0]
    space, slash, queue = stored.partition("/")
    if "*" in stored and "/" not in literal:
        return Place("*", literal)
    return Place(space, queue) if slash else Place(DEFAULT_NAMESPACE, stored)


def check_right(principal: Principal, right: Right, stored: str) -> None:
    """Raise a `Problem` unless the client has the right to the queue or to the queues of the pattern; with an
    empty text to all queues."""
    if stored:
        principal.check(right, *place_of(stored))
    else:
        principal.check(right)


def may_see(principal: Principal, stored: str) -> bool:
    return principal.allows(Right.CONSUME, *place_of(stored))


def stored_name(queue: str, namespace: str) -> str:
    """The name of a queue in the ledger."""
    if not namespace:
        return queue
    space = namespace_name(namespace)
    return queue if space == DEFAULT_NAMESPACE else f"{space}/{queue}"


def pattern_of(queue: str, namespace: str) -> str:
    """The queue, or the pattern of queues, by its name in the ledger. Without a queue: all queues of the
    namespace. Raises a `Problem`."""
    if not namespace:
        return queue
    space = namespace_name(namespace)
    if space != DEFAULT_NAMESPACE:
        return f"{space}/{queue or '*'}"
    if not queue or "*" in queue:
        raise bad_argument(f"a pattern cannot be limited to namespace {space}: name a queue of it")
    return queue


def queue_of(exchange: Exchange, right: Right, arguments: NamespaceArguments) -> str:
    """The queue in the path of a request, by its name in the ledger. Raises a `Problem`."""
    stored = stored_name(exchange.path["queue"], arguments.namespace)
    with named_arguments():
        checks.name("queue", stored)
    check_right(exchange.principal, right, stored)
    return stored


@contextmanager
def named_arguments() -> Iterator[None]:
    """Answer a wrong value of an argument or of the path as such."""
    try:
        yield
    except InvalidInput as error:
        found = error.renamed("cursor") if error.field == "page" else error
        raise bad_argument(str(found)) from None


@contextmanager
def known_name(field: str, name: str) -> Iterator[None]:
    """Answer 404 if the name does not exist: `InvalidInput` with this field and the name as the value."""
    try:
        yield
    except InvalidInput as error:
        if error.field == field and error.value == shortened(name):
            raise Problem(404, "unknown_name", str(error)) from None
        raise


def page_of_names(names: Sequence[str], arguments: PageArguments) -> tuple[list[str], str | None]:
    """The names of a page, and the cursor of the next one."""
    with named_arguments():
        after = page_id(arguments.cursor) if arguments.cursor else ""
    left = sorted(name for name in names if name > after)
    page = left[: arguments.limit]
    return page, id_token(page[-1]) if len(left) > len(page) else None


def _micros(moment: datetime | None, field: str) -> int | None:
    return None if moment is None else checks.moment(moment, field)


def _pair(text: str) -> tuple[str, str] | None:
    if not text:
        return None
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidInput(field="header", value=text, expected="written as NAME=VALUE")
    return name, value


def with_bodies(context: ServerContext, jobs: Sequence[Job]) -> dict[str, Job]:
    """The records with bodies of the jobs with a small payload, by id, until the answer is large. One read
    for each job: the size of a result is not stored."""
    found: dict[str, Job] = {}
    size = 0
    for job in jobs:
        if size > MAX_BODIES:
            break
        if job.size <= MAX_SHOWN and (whole := context.engine.ledger.get(job.id)) is not None:
            found[job.id] = whole
            size += len(whole.payload) + len(whole.result or b"") + len(whole.cursor or b"")
    return found


def shown_body(job: Job) -> dict[str, Any]:
    """The payload of a message as fields of a view."""
    value, encoding = decode_body(job.payload, job.content_type)
    return {"payload": value, "payload_encoding": encoding}
