"""The registry of a program: the tasks, schedules and resources that its code declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from towpath.core import checks
from towpath.core.limits import Bounds
from towpath.core.schedule import Schedule
from towpath.errors import InvalidInput
from towpath.runtime.engine import Engine

if TYPE_CHECKING:
    from towpath.tasks.task import Task

V = TypeVar("V")


class Registry:
    """Everything by name; a name is used once. `engine` stores the jobs of the tasks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tasks: dict[str, Task[..., Any]] = {}
        """The tasks by their names, which are the kinds of their jobs."""
        self.schedules: dict[str, Schedule] = {}
        """The declared schedules. A worker stores them in the ledger when it starts."""
        self.resources: dict[str, Bounds] = {}
        """The services whose load the workers of this program limit, with the bounds of the limit."""

    def add_task(self, task: Task[..., Any]) -> None:
        _check_new("name", task.kind, self.tasks, "task")
        self.tasks[task.kind] = task

    def add_schedule(self, schedule: Schedule) -> None:
        _check_new("name", schedule.name, self.schedules, "schedule")
        self.schedules[schedule.name] = schedule

    def add_resource(self, name: str, bounds: Bounds) -> None:
        checks.name("resource", name)
        _check_new("resource", name, self.resources, "resource")
        self.resources[name] = bounds


def _check_new(field: str, name: str, known: Mapping[str, V], what: str) -> None:
    if name in known:
        raise InvalidInput(field=field, value=name, expected=f"a name that no other {what} of this app has")
