"""The App of each backend, and the tasks of Django as tasks of it.

Django makes a backend object per thread; all of one alias share an App. A task is registered when it is
decorated: the framework then asks its backend to validate it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping
from inspect import iscoroutinefunction
from typing import Any

from django.apps import apps as installed
from django.core.signals import setting_changed
from django.utils.module_loading import autodiscover_modules

from towpath import App
from towpath.contrib.django.compat import Task
from towpath.contrib.django.configuration import options_of_task
from towpath.contrib.django.results import StoredCall, to_rank
from towpath.contrib.django.running import arun_task, run_task

_tasks: dict[str, Task] = {}
"""The tasks of the program by module path, which is the kind of their jobs."""
_apps: dict[str, DjangoApp] = {}
_lock = threading.RLock()


class DjangoApp(App):
    """The App of one alias of TASKS. Its worker consumes the QUEUES of the alias, unless it is started with
    other queues or lanes."""

    def __init__(
        self, alias: str, url: str | None, options: Mapping[str, Any], queues: Collection[str], sender: type
    ) -> None:
        super().__init__(url, name=options.get("name"), include=options.get("include"))
        self.alias = alias
        self.place = url
        """The URL of the alias; None if the settings of Towpath have it."""
        self._options = options
        self._queues = tuple(sorted(queues)) or ("*",)
        self._sender = sender

    def add(self, task: Task) -> None:
        """Register a task of Django under its module path."""
        kind = task.module_path
        if kind in self.tasks:
            return

        def handler(call: StoredCall) -> Any:
            return run_task(self, _tasks[kind], call, self._sender)

        async def ahandler(call: StoredCall) -> Any:
            return await arun_task(self, _tasks[kind], call, self._sender)

        function = ahandler if iscoroutinefunction(task.func) else handler
        function.__doc__ = task.func.__doc__
        self.task(
            name=kind,
            queue=task.queue_name,
            priority=to_rank(task.priority),
            **options_of_task(task.func, self._options),
        )(function)

    def run(self, **options: Any) -> None:
        super().run(**self._with_queues(options))

    async def arun(self, **options: Any) -> None:
        await super().arun(**self._with_queues(options))

    def _with_queues(self, options: dict[str, Any]) -> Any:
        settings = self.settings
        if options.get("queues") or options.get("lanes") or settings.queues or settings.lanes:
            return options
        return {**options, "queues": self._queues}


def shared_app(alias: str, make: Callable[[], DjangoApp], url: str | None) -> DjangoApp:
    """The App of an alias, with all known tasks. `make` is called for the first use, and again if the alias
    has another URL by then, such as that of a test database."""
    found = _apps.get(alias)
    if found is not None and found.place == url:
        return found
    with _lock:
        found = _apps.get(alias)
        if found is None or found.place != url:
            if found is not None:
                found.close()
            found = make()
            for task in _tasks.values():
                found.add(task)
            _apps[alias] = found
        return found


def register(task: Task) -> None:
    """Let the workers of every alias run a task."""
    kind = task.module_path
    known = _tasks.get(kind)
    if known is not None and known.func is task.func:
        return
    with _lock:
        _tasks[kind] = task
        for app in _apps.values():
            app.add(task)


def known_task(kind: str) -> Task | None:
    """The task of a kind. If it is not imported yet, the modules `tasks` of the installed applications
    are."""
    if kind not in _tasks:
        discover()
    return _tasks.get(kind)


def discover() -> None:
    """Import the module `tasks` of each installed application and register its tasks, also tasks
    of another backend: `task.using(backend=...)` may enqueue them here."""
    autodiscover_modules("tasks")
    for config in installed.get_app_configs():
        module = sys.modules.get(f"{config.name}.tasks")
        for value in list(vars(module).values()) if module is not None else ():
            if isinstance(value, Task):
                register(value)


def close_apps(*, setting: str = "TASKS", **_: Any) -> None:
    """Close the Apps of this process; the next use opens them again. In tests: before the test database is
    removed. Connected to `setting_changed`, so that `override_settings(TASKS=...)` works."""
    if setting == "TASKS":
        with _lock:
            closing = list(_apps.values())
            _apps.clear()
        for app in closing:
            app.close()


setting_changed.connect(close_apps, dispatch_uid="towpath.close_apps")
