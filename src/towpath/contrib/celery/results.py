"""Results of Celery calls: jobs of Towpath in Celery's words."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from towpath import JobHandle
from towpath.errors import InvalidInput, JobCanceled, JobFailed

if TYPE_CHECKING:
    from towpath.contrib.celery.app import Celery

_STATES = {
    "blocked": "PENDING",
    "scheduled": "PENDING",
    "ready": "PENDING",
    "running": "STARTED",
    "done": "SUCCESS",
    "failed": "FAILURE",
    "canceled": "REVOKED",
}

_current: list[Celery] = []


def current_app() -> Celery:
    """The app that was made last. Raises if there is none."""
    if not _current:
        message = "there is no Celery app yet: create app = Celery(...) before a shared task is called"
        raise InvalidInput(field="app", value=None, expected="a Celery app", message=message)
    return _current[-1]


def has_current_app() -> bool:
    return bool(_current)


def set_current_app(app: Celery) -> None:
    _current[:] = [app]


class AsyncResult:
    """A job, in Celery's words. `job` is the handle of Towpath."""

    def __init__(self, id: str, app: Celery | None = None) -> None:
        self.id = self.task_id = id
        self._app = app

    def __repr__(self) -> str:
        return f"<AsyncResult: {self.id}>"

    @property
    def job(self) -> JobHandle[Any]:
        return (self._app or current_app()).towpath.job(self.id)

    @property
    def state(self) -> str:
        job = self.job.status()
        waits = _STATES[str(job.state.value)]
        return "RETRY" if waits == "PENDING" and job.failures else waits

    status = state

    def get(self, timeout: float | None = None, propagate: bool = True, **options: Any) -> Any:
        """Wait and return the result. An exception of a built-in class is raised as that class. Inside a task
        it is refused, as in Celery, unless `disable_sync_subtasks=False` is given."""
        try:
            return self.job.result(timeout, wait_inside=not options.get("disable_sync_subtasks", True))
        except JobFailed as error:
            if propagate:
                raise _original(error) from error
            return _original(error)
        except JobCanceled:
            if propagate:
                raise
            return None

    wait = get

    @property
    def result(self) -> Any:
        return self.get(0.0, propagate=False) if self.ready() else None

    @property
    def traceback(self) -> str | None:
        return self.job.status().error

    def ready(self) -> bool:
        return self.state in ("SUCCESS", "FAILURE", "REVOKED")

    def successful(self) -> bool:
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        return self.state == "FAILURE"

    def revoke(self, terminate: bool = False, **_: Any) -> None:
        """Cancel it; a running one is asked to stop."""
        self.job.cancel()

    def forget(self) -> None:
        """Nothing to do: results leave with their jobs, after the retention."""


class EagerResult(AsyncResult):
    """The result of a call that ran here."""

    def __init__(self, value: Any, error: BaseException | None) -> None:
        super().__init__("eager")
        self._value, self._error = value, error

    @property
    def state(self) -> str:
        return "SUCCESS" if self._error is None else "FAILURE"

    status = state

    def get(self, timeout: float | None = None, propagate: bool = True, **_: Any) -> Any:
        if self._error is not None and propagate:
            raise self._error
        return self._value if self._error is None else self._error


class GroupResult:
    """The results of a group, in the order of its calls."""

    def __init__(self, results: Sequence[AsyncResult]) -> None:
        self.results = list(results)
        self.children = self.results

    def __iter__(self) -> Any:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def get(self, timeout: float | None = None, propagate: bool = True, **options: Any) -> list[Any]:
        return [each.get(timeout, propagate, **options) for each in self.results]

    join = get

    def ready(self) -> bool:
        return all(each.ready() for each in self.results)

    def successful(self) -> bool:
        return all(each.successful() for each in self.results)

    def failed(self) -> bool:
        return any(each.failed() for each in self.results)

    def completed_count(self) -> int:
        return sum(each.successful() for each in self.results)

    def revoke(self, **_: Any) -> None:
        for each in self.results:
            each.revoke()


def _original(error: JobFailed) -> BaseException:
    """The exception that the task raised, if it is a built-in one; else the JobFailed."""
    line = (error.error or "").partition("\n")[0].rpartition("Fail: ")[2]
    name, _, message = line.partition(": ")
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        with suppress(TypeError):
            return found(message)
    return error
