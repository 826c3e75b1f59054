"""Chains, groups with a following job, and batches. Each is one append: all or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Token
from types import TracebackType
from typing import Any, Literal, Self

from msgspec.structs import replace

from towpath.core.commands import Append, Command, OnFailure, Open, Result, Seal
from towpath.core.ids import derived
from towpath.core.job import After, Spec
from towpath.errors import InvalidInput, shortened
from towpath.runtime.engine import Engine
from towpath.tasks.codec import AFTER
from towpath.tasks.handles import (
    BranchHandle,
    Collector,
    GroupHandle,
    JobHandle,
    id_of,
    ids_of,
    open_collector,
)
from towpath.tasks.mistakes import no_call
from towpath.tasks.new_jobs import aappend_on, append_on, begin_on, new_id
from towpath.tasks.task import Call, R, Registry, calls_of

Then = Call[Any] | Mapping[Literal["done", "failed", "canceled"], Call[Any]]
"""The calls after a group: one call however the group ends, or one for each possible end."""


def after(call: Call[Any], *needed: After, id: str = "") -> Spec:
    """The spec of a call with additional dependencies."""
    return call.spec(id=id, after=(*call.after, *needed))


class Chain:
    """Calls in sequence: each waits for the one before it."""

    def __init__(self, engine: Engine, calls: Sequence[Call[Any]]) -> None:
        if not calls:
            message = "a chain needs at least one call: app.chain(first.of(...), second.of(...))"
            raise InvalidInput(field="chain", value=(), expected="at least one call", message=message)
        calls = list(calls_of(calls, "app.chain"))
        self._engine = engine
        self._last = calls[-1]
        specs = [calls[0].spec()]
        for call in calls[1:]:
            specs.append(after(call, After(specs[-1].id)))
        self.command = Append(tuple(specs))

    def handle(self, answer: Result) -> JobHandle[Any]:
        return JobHandle(self._engine, ids_of(answer)[-1], self._last.task)


class Group:
    """The members of a group and the following call. The ids are derived from the group's id, so that
    repeating the commands creates no duplicates."""

    def __init__(self, registry: Registry, id: str | None, on_failure: str) -> None:
        self._engine = registry.engine
        self._registry = registry
        self.id = id or new_id()
        self._on_failure = OnFailure(on_failure) if on_failure in list(OnFailure) else None
        if self._on_failure is None:
            raise InvalidInput(field="on_failure", value=on_failure, expected="continue, abort or stop")
        self._calls: list[Call[Any]] = []
        self._then: Call[Any] | None = None
        self._branches: Mapping[str, Call[Any]] = {}

    def commands(self, calls: Iterable[Call[Any]], then: Then | None) -> list[list[Command]]:
        """The commands, one list per commit. A refused append must not let the group end and start the
        following call; so a `then` that depends on the end of the group is sealed in a second commit. A plain
        `then` is a job that waits for the group: it is refused together with the members, and one commit is
        enough."""
        self._calls = list(calls_of(calls, "app.group"))
        if not self._calls:
            message = "a group needs at least one call: app.group([task.of(1), task.of(2)])"
            raise InvalidInput(field="group", value=(), expected="at least one call", message=message)
        if isinstance(then, Mapping) and (wrong := then.keys() - {"done", "failed", "canceled"}):
            message = (
                f"then= of app.group has no outcome {shortened(min(wrong))}: use done, failed and canceled"
            )
            raise InvalidInput(
                field="then", value=min(wrong), expected="done, failed or canceled", message=message
            )
        following = then.values() if isinstance(then, Mapping) else [] if then is None else [then]
        for _ in calls_of(following, "then= of app.group"):
            """Each is a call."""
        specs = [self._member(call, n) for n, call in enumerate(self._calls)]
        assert self._on_failure is not None
        if isinstance(then, Mapping):
            self._branches = {str(ending): call for ending, call in then.items()}
            callbacks = {ending: (self._callback(call),) for ending, call in self._branches.items()}
            return [[Open(self.id, self._on_failure, callbacks), Append(tuple(specs))], [Seal(self.id)]]
        if then is not None:
            self._then = then
            specs.append(
                after(then, After(self.id, run_anyway=True, group=True), id=derived(self.id, "then"))
            )
        return [[Open(self.id, self._on_failure), Append(tuple(specs)), Seal(self.id)]]

    def handle(self, answers: Sequence[Result]) -> GroupHandle[Any]:
        ids = ids_of(answers[1])
        jobs = [
            JobHandle[Any](self._engine, id, call.task) for id, call in zip(ids, self._calls, strict=False)
        ]
        follower = None if self._then is None else JobHandle[Any](self._engine, ids[-1], self._then.task)
        group = GroupHandle(self._engine, self.id, jobs, follower, values=self._registry)
        group.branches = {
            ending: BranchHandle(group, ending, call.task) for ending, call in self._branches.items()
        }
        return group

    def _member(self, call: Call[Any], n: int) -> Spec:
        return call.spec(id=derived(self.id, "member", n), group=self.id)

    def _callback(self, call: Call[Any]) -> Spec:
        spec = call.spec()
        return replace(spec, headers={**spec.headers, AFTER: f"@{self.id}"})


def existing_group(registry: Registry, id: str | None, then: object) -> GroupHandle[Any]:
    """A handle on a group that was made before."""
    if id is None or then is not None:
        raise InvalidInput(
            field="calls",
            value=None,
            expected="calls",
            message="app.group(calls, then=...) makes a group; app.group(id=...) alone is a handle on one",
        )
    return GroupHandle(registry.engine, id_of(id), values=registry)


class Batch(Collector):
    """Collects enqueues and appends them all at the end of its `with`; nothing if the block raises. Inside,
    `task.enqueue` of the same thread or coroutine goes here too. The handles can be waited for after the
    block. With `on` the append is part of the transaction on that connection. On SQLite the block is that
    transaction, if none is open: it begins with the write lock, is committed at the end, and rolled back if
    the block raises."""

    def __init__(self, engine: Engine, on: Any = None) -> None:
        super().__init__(engine)
        self._on = on
        self._begun = False
        self._token: Token[Collector | None] | None = None

    def add(self, call: Call[R]) -> JobHandle[R]:
        """Add a call."""
        if type(call) is not Call:
            raise no_call(call, "batch.add")
        return self.collect(call.spec(), call.task)

    def __enter__(self) -> Self:
        self._begun = self._on is not None and begin_on(self.engine.ledger, self._on)
        self._token = open_collector.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        with self._ending(error):
            if error is None and self.specs:
                specs = tuple(self.specs)
                self.placed(
                    self.engine.call(Append(specs))
                    if self._on is None
                    else append_on(self.engine.ledger, self._on, specs)
                )

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        with self._ending(error):
            if error is None and self.specs:
                specs = tuple(self.specs)
                on = self._on
                self.placed(
                    await (
                        self.engine.acall(Append(specs))
                        if on is None
                        else aappend_on(self.engine.ledger, on, specs)
                    )
                )

    @contextmanager
    def _ending(self, error: BaseException | None) -> Iterator[None]:
        """Commit the transaction that the block began, or roll it back."""
        try:
            yield
        except BaseException:
            self._end("ROLLBACK")
            raise
        self._end("COMMIT" if error is None else "ROLLBACK")

    def _end(self, statement: str) -> None:
        if self._begun and self._on.in_transaction:
            self._on.execute(statement)

    def _leave(self) -> None:
        assert self._token is not None
        open_collector.reset(self._token)
