"""Which jobs: the conditions of a list of jobs (`Query`) and of a bulk command (`Selector`)."""

from __future__ import annotations

import base64
import binascii

import msgspec
from msgspec.structs import force_setattr

from towpath.core import checks
from towpath.core.job import Job, State, words_of
from towpath.errors import Described, InvalidInput

MAX_BULK = 10_000
MAX_PAGE = 1000


class JobConditions(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The conditions that lists and bulk commands share. A job matches if it meets every given one."""

    queue: str | None = None
    """A name, or a pattern with `*`."""
    part: str | None = None
    group: str | None = None
    parent: str | None = None
    """The id of the job that appended them."""
    generation: int | None = None
    key: str | None = None
    kind: str | None = None
    states: tuple[State, ...] = ()
    created_before: int | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "states", words_of("states", self.states, State))
        if self.queue is not None:
            checks.pattern("queue", self.queue)
        for field in ("part", "group", "parent"):
            checks.optional_text(field, getattr(self, field))
        checks.optional_whole("generation", self.generation, most=2**31)
        checks.optional_text("key", self.key, checks.MAX_KEY)
        if self.kind is not None:
            checks.text("kind", self.kind)
        checks.optional_whole("created_before", self.created_before)

    def matches(self, job: Job) -> bool:
        return (
            (not self.states or job.state in self.states)
            and (self.queue is None or checks.matches(self.queue, job.queue))
            and self.part in (None, job.part)
            and self.group in (None, job.group)
            and self.parent in (None, job.parent)
            and self.generation in (None, job.generation)
            and self.key in (None, job.key)
            and self.kind in (None, job.kind)
            and (self.created_before is None or job.created_at < self.created_before)
        )


class Selector(JobConditions, frozen=True, kw_only=True, gc=False):
    """The jobs of a bulk command: all jobs that match every given field."""

    ids: tuple[str, ...] = ()
    finished_before: int | None = None

    def __post_init__(self) -> None:
        JobConditions.__post_init__(self)
        force_setattr(self, "ids", checks.all_of("ids", self.ids, str))
        if len(self.ids) > MAX_BULK:
            raise InvalidInput(
                field="ids",
                value=Described(f"a list of {len(self.ids)}"),
                expected=f"at most {MAX_BULK} long",
            )
        for each in self.ids:
            checks.text("ids", each, least=1)
        checks.optional_whole("finished_before", self.finished_before)
        if all(getattr(self, field) in (None, ()) for field in self.__struct_fields__):
            raise InvalidInput(
                field="selector", value=Described("empty"), expected="a selector with at least one condition"
            )

    def matches(self, job: Job) -> bool:
        """True if the job meets every given condition, apart from the ids."""
        return JobConditions.matches(self, job) and (
            self.finished_before is None
            or (job.finished_at is not None and job.finished_at < self.finished_before)
        )


class Query(JobConditions, frozen=True, kw_only=True, gc=False):
    """Which jobs to list, in the order of `seq` (newest first unless `oldest_first`). `page` is the `next` of
    the last answer."""

    owner: str | None = None
    correlation_id: str | None = None
    created_from: int | None = None
    header: tuple[str, str] | None = None
    oldest_first: bool = False
    bodies: bool = True
    limit: int = 100
    page: str | None = None

    def __post_init__(self) -> None:
        JobConditions.__post_init__(self)
        checks.optional_text("owner", self.owner)
        checks.optional_text("correlation_id", self.correlation_id)
        checks.optional_whole("created_from", self.created_from)
        if self.header is not None:
            if not (isinstance(self.header, tuple) and len(self.header) == 2):
                raise InvalidInput(field="header", value=self.header, expected="a pair of name and value")
            checks.headers(dict([self.header]))
        checks.whole("limit", self.limit, 1, MAX_PAGE)
        if self.page is not None:
            page_seq(self.page)

    def matches(self, job: Job) -> bool:
        """True if the job meets every given condition, apart from the page."""
        return (
            JobConditions.matches(self, job)
            and self.owner in (None, job.owner)
            and self.correlation_id in (None, job.correlation_id)
            and (self.created_from is None or job.created_at >= self.created_from)
            and (self.header is None or job.headers.get(self.header[0]) == self.header[1])
        )


def page_token(seq: int) -> str:
    return base64.urlsafe_b64encode(f"s{seq}".encode()).decode().rstrip("=")


def page_seq(page: object) -> int:
    """The seq after which a page continues."""
    try:
        if isinstance(page, str) and len(page) <= 64:
            raw = base64.b64decode(page + "=" * (-len(page) % 4), altchars=b"-_", validate=True).decode(
                "ascii"
            )
            if (
                raw.startswith("s")
                and raw[1:].isdigit()
                and page_token(int(raw[1:])) == page
                and int(raw[1:]) < 2**63
            ):
                return int(raw[1:])
    except (binascii.Error, ValueError):
        pass
    raise InvalidInput(field="page", value=page, expected="the `next` of an earlier page")
