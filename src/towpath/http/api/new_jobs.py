"""The jobs of a request as calls of tasks: of a task of the app if it has one of this kind, else of an
unknown task, with arguments that are not checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from towpath.app import App
from towpath.core.job import After, Spec
from towpath.errors import InvalidInput
from towpath.http.access import Right
from towpath.http.api.common import Moment, check_right
from towpath.http.exchange import Exchange
from towpath.http.problems import bad_body
from towpath.tasks.task import Call, Registry, Task

MAX_JOBS = 1000
MAX_UNKNOWN = 1024
"""Unknown tasks that are kept, by kind and queue."""
_Span = Annotated[float, Meta(ge=0)]


class NewJob(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A job, with the options of `task.options(...)`: spans are seconds. `queue` is required if the server
    has no task of this kind, as `towpath serve` has none. `after` and `after_groups` are ids."""

    kind: Annotated[str, Meta(min_length=1, max_length=255)]
    args: dict[str, Any] = {}
    queue: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    delay: _Span | UnsetType = UNSET
    at: Moment | UnsetType = UNSET
    ttl: _Span | UnsetType = UNSET
    priority: int | str | UnsetType = UNSET
    part: str | UnsetType = UNSET
    after: Annotated[list[str], Meta(max_length=1000)] = []
    after_groups: Annotated[list[str], Meta(max_length=1000)] = []
    key: str | UnsetType = UNSET
    on_conflict: Literal["keep", "replace", "serial"] | UnsetType = UNSET
    window: _Span | UnsetType = UNSET
    group: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    correlation_id: str | UnsetType = UNSET
    max_attempts: int | UnsetType = UNSET
    timeout: _Span | UnsetType = UNSET
    retention: _Span | UnsetType = UNSET

    def options(self) -> dict[str, Any]:
        """The arguments of `task.options(...)`."""
        names = [name for name in self.__struct_fields__ if name not in _NO_OPTIONS]
        given = {name: value for name in names if (value := getattr(self, name)) is not UNSET}
        if "part" in given:
            # A part may be a template of the arguments; that of a stranger is a name.
            given["part"] = given["part"].replace("{", "{{").replace("}", "}}")
        if self.after or self.after_groups:
            groups = [After(id, group=True) for id in self.after_groups]
            given["after"] = [*(After(id) for id in self.after), *groups]
        return given


_NO_OPTIONS = ("kind", "args", "after", "after_groups")


def unknown_task() -> Any:
    """The function of a task that this process does not have."""


class NewJobs:
    def __init__(self, app: App) -> None:
        self._app = app
        self._registry = Registry(app.engine)
        self._unknown: Callable[[str, str], Task[..., Any]] = lru_cache(MAX_UNKNOWN)(self._make)

    def call(self, exchange: Exchange, new: NewJob, place: str) -> tuple[Call[Any], Spec]:
        """The call of a job and its spec, after the check of the right to its queue. `place` is its name in
        the request."""
        try:
            call = self._call(new)
            spec = call.spec()
        except InvalidInput as error:
            raise bad_body(f"{place}: {error}") from None
        check_right(exchange.principal, Right.PRODUCE, spec.queue)
        return call, spec

    def _call(self, new: NewJob) -> Call[Any]:
        payload = msgspec.json.encode(new.args)
        task = self._app.tasks.get(new.kind)
        if task is not None:
            chosen = task.options(**new.options())
            arguments = chosen.codec.bind(*chosen.codec.decode(payload))
            return Call(chosen, arguments, chosen.codec.encode(arguments))
        if new.queue is UNSET:
            expected = f"given, because this server has no task {new.kind}"
            raise InvalidInput(field="queue", value=None, expected=expected)
        return Call(self._unknown(new.kind, new.queue).options(**new.options()), {}, payload)

    def _make(self, kind: str, queue: str) -> Task[..., Any]:
        return Task(self._registry, unknown_task, {"name": kind, "queue": queue})
