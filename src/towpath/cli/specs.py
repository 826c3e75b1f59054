"""The options that describe a new job, shared by `put` and `enqueue`, and the `Spec` they make."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from towpath import After, Key, KeyPolicy, Ledger, Spec, commands, new_id
from towpath.cli.base import all_of
from towpath.cli.values import Header, Moment, Priority, Span
from towpath.errors import InvalidInput, Refused
from towpath.settings import resolve

CONFLICTS = {"keep": KeyPolicy.UNIQUE, "replace": KeyPolicy.REPLACE, "serial": KeyPolicy.SERIAL}


class SpecOptions(msgspec.Struct, frozen=True, kw_only=True):
    """As the options say it; None where nothing was said."""

    delay: int | None = None
    at: int | None = None
    ttl: int | None = None
    priority: int | str | None = None
    part: str | None = None
    key: str | None = None
    on_conflict: str | None = None
    window: int | None = None
    id: str | None = None
    header: tuple[tuple[str, str], ...] = ()
    correlation_id: str | None = None
    max_attempts: int | None = None
    timeout: int | None = None
    retention: int | None = None
    after: tuple[str, ...] = ()
    group: str | None = None

    def __post_init__(self) -> None:
        if self.key is None and (self.on_conflict is not None or self.window is not None):
            raise InvalidInput(field="--on-conflict and --window", value="without --key", expected="a --key they are about")

    def fields(self) -> dict[str, Any]:
        """The fields of a `Spec` that were given."""
        given: dict[str, Any] = {
            "delay": self.delay,
            "ready_at": self.at,
            "ttl": self.ttl,
            "priority": None if self.priority is None else resolve().rank(self.priority),
            "part": self.part,
            "correlation_id": self.correlation_id,
            "max_attempts": self.max_attempts,
            "timeout": self.timeout,
            "retention": self.retention,
            "group": self.group,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        if self.header:
            fields["headers"] = dict(self.header)
        if self.after:
            fields["after"] = tuple(After(id) for id in self.after)
        if self.key is not None:
            fields["key"] = Key(self.key, CONFLICTS[self.on_conflict or "keep"], self.window or 0)
        return {**fields, "id": self.id or new_id()}

    def call_options(self, queue: str | None) -> dict[str, Any]:
        """The same as `task.options(...)` takes it: spans in seconds, the time as a datetime."""
        spans = {name: getattr(self, name) for name in ("delay", "ttl", "window", "timeout", "retention")}
        given = {name: value / 1_000_000 for name, value in spans.items() if value is not None}
        same = ("priority", "part", "key", "on_conflict", "id", "correlation_id", "max_attempts", "group")
        given |= {name: value for name in same if (value := getattr(self, name)) is not None}
        if self.at is not None:
            given["at"] = datetime.fromtimestamp(self.at / 1_000_000, UTC)
        if self.header:
            given["headers"] = dict(self.header)
        if self.after:
            given["after"] = self.after
        return given if queue is None else {**given, "queue": queue}


spec_options = all_of(
    click.option("--delay", type=Span(), help="Not before this span has passed."),
    click.option("--at", type=Moment(past=False), help="Not before this time (ISO 8601)."),
    click.option("--ttl", type=Span(), help="Give it up if it has not started after this span."),
    click.option(
        "--priority", type=Priority(), help="high, normal, low, a name of the settings, or a number; smaller is sooner."
    ),
    click.option("--part", help="The slice of the queue with limits of its own, such as a customer."),
    click.option("--key", help="At most one unfinished job has this key."),
    click.option("--on-conflict", type=click.Choice(list(CONFLICTS)), help="What a second job with the key does: keep."),
    click.option("--window", type=Span(), help="The key stays taken so long after the append."),
    click.option("--id", help="An id of your own; the same id twice is one job."),
    click.option("--header", type=Header(), multiple=True, help="NAME=VALUE, as often as you like."),
    click.option("--correlation-id", help="A name for all that belongs together."),
    click.option("--max-attempts", type=int, help="Failures after which it is a dead letter: 20."),
    click.option("--timeout", type=Span(), help="How long one attempt may take."),
    click.option("--retention", type=Span(), help="How long it is kept after it is done."),
    click.option("--after", multiple=True, metavar="ID", help="Wait until this job is done; as often as you like."),
    click.option("--group", help="The open group it joins."),
)


def append(ledger: Ledger, spec: Spec) -> dict[str, Any]:
    """Append one job; what became of it. `new` is false where its id or key was taken: `id` is then the job that has it."""
    before = ledger.get(spec.id) is not None
    answer = tell(ledger, commands.Append((spec,)))
    assert isinstance(answer, commands.Appended)
    [placed] = answer.jobs
    return {"id": placed.id, "seq": placed.seq, "queue": spec.queue, "new": placed.id == spec.id and not before}


def tell(ledger: Ledger, command: commands.Command) -> commands.Result:
    """Apply one command and raise if it is refused."""
    [answer] = ledger.apply([command])
    if isinstance(answer, Refused):
        raise answer
    return answer
