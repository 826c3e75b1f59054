"""The start of a worker: import the modules of its tasks, report what it will do, and what it cannot do."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

import msgspec

from towpath.core.commands import Settle
from towpath.core.job import ClaimedJob
from towpath.core.nodes import QUEUE as NODE
from towpath.core.retry import unknown_kind
from towpath.errors import InvalidInput
from towpath.escapes import get_logger
from towpath.operations.places import shown_url, warning_above
from towpath.runtime.worker.options import WorkerOptions
from towpath.tasks.task import Registry

log = get_logger("towpath.worker")

HOW = 'App(include=["package.tasks"]), `include` in the settings, or --include package.tasks'
MAX_KINDS = 1000
"""Unknown kinds that are logged; each is remembered, so that it is logged once."""
LEFT, MAX_LEFT_KINDS = 60.0, 100
"""Seconds for which a worker leaves an unknown kind to others, and the number of such kinds."""


def import_included(names: Iterable[str], load: Callable[[str], object] = import_module) -> None:
    """Import the modules with these names. In a name, `*` stands for every module of a package:
    `shop.*.tasks`. Raises InvalidInput with the module that cannot be imported."""
    for name in names:
        for module in _expanded(name, load) if "*" in name else [name]:
            _import(name, module, load)


def _import(name: str, module: str, load: Callable[[str], object]) -> Any:
    try:
        return load(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _not_imported(name, module, error) from error
        expected = f"a module that can be imported: there is no module {error.name}"
        raise InvalidInput(field="include", value=name, expected=expected) from error
    except Exception as error:
        if load is not import_module:
            raise
        raise _not_imported(name, module, error) from error


def _not_imported(name: str, module: str, error: Exception) -> InvalidInput:
    expected = f"a module that can be imported: {module} raised {type(error).__name__}: {error}"
    return InvalidInput(field="include", value=name, expected=expected)


def _expanded(pattern: str, load: Callable[[str], object]) -> list[str]:
    """The modules that match. A module is imported only if its name matches; a package on the way to one is
    imported too, as Python requires."""
    first, *parts = pattern.split(".")
    found = [first]
    for number, part in enumerate(parts, 1):
        last = number == len(parts)
        if part == "*":
            found = [name for base in found for name in _modules_of(pattern, base, load, not last)]
        else:
            found = [f"{base}.{part}" for base in found]
    modules = [name for name in found if pattern.endswith("*") or _exists(name)]
    if not modules:
        expected = "a pattern of modules that exist: none matches"
        raise InvalidInput(field="include", value=pattern, expected=expected)
    return modules


def _modules_of(pattern: str, base: str, load: Callable[[str], object], packages: bool) -> Iterator[str]:
    """The modules of a package; with `packages` only its subpackages."""
    package = _import(pattern, base, load)
    if not hasattr(package, "__path__"):
        expected = f"a pattern of modules: {base} is a module, not a package"
        raise InvalidInput(field="include", value=pattern, expected=expected)
    for each in sorted(iter_modules(package.__path__), key=lambda each: each.name):
        if not each.name.startswith("_") and (each.ispkg or not packages):
            yield f"{base}.{each.name}"


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker consists of when it starts. `ledger` is a URL with the absolute path of a file and
    without a password."""

    version: str
    ledger: str
    tasks: tuple[str, ...]
    queues: tuple[str, ...]
    schedules: tuple[str, ...]
    concurrency: int

    @classmethod
    def of(cls, registry: Registry, options: WorkerOptions, schedules: Iterable[str]) -> Startup:
        from importlib.metadata import version

        return cls(
            version=version("towpath"),
            ledger=shown_url(registry.engine.url),
            tasks=tuple(sorted(registry.tasks)),
            queues=options.queues,
            schedules=tuple(sorted({*registry.schedules, *schedules})),
            concurrency=options.concurrency,
        )


def log_startup(found: Startup, more: Mapping[str, object] = {}) -> None:
    """The default of `announce`: one line at INFO. `more` are further attributes of the record."""
    log.info(
        "worker started: towpath %s, ledger %s, %d tasks, queues %s, %d schedules, concurrency %d",
        found.version,
        found.ledger,
        len(found.tasks),
        ",".join(found.queues),
        len(found.schedules),
        found.concurrency,
        extra={"event": "worker_started", **msgspec.to_builtins(found), **more},
    )


def warn_at_start(registry: Registry, queues: Sequence[str] = ()) -> None:
    """Log what is probably a mistake, before the ledger is opened. A worker for queues of nodes needs no
    tasks."""
    if not registry.tasks and not all(queue.startswith(NODE) for queue in queues or [""]):
        log.warning(
            "the app has no tasks, so that no job can run here. Import the modules that define its tasks: %s",
            HOW,
            extra={"event": "no_tasks"},
        )
    if (warning := warning_above(registry.engine.url)) is not None:
        log.warning("%s", warning, extra={"event": "ledger_above"})


class UnknownKinds:
    """Returns jobs of unknown kinds to the ledger, for a worker with other tasks, and logs each kind once.
    For a while the worker leaves jobs of such a kind to others, so that a worker with the task claims them
    at once."""

    def __init__(self, registry: Registry) -> None:
        self._tasks = registry.tasks
        self._engine = registry.engine
        self._seen: set[str] = set()
        self._left: dict[str, float] = {}

    def kinds(self) -> tuple[str, ...]:
        """The kinds that were refused within the last `LEFT` seconds. In the committing thread."""
        if not self._left:
            return ()
        oldest = time.monotonic() - LEFT
        return tuple(
            [kind for kind, at in self._left.copy().items() if at > oldest and kind not in self._tasks]
        )

    def refuse(self, claim: ClaimedJob) -> Settle:
        kind = claim.job.kind
        self._left.pop(kind, None)
        if len(self._left) >= MAX_LEFT_KINDS:
            del self._left[next(iter(self._left))]
        self._left[kind] = time.monotonic()
        if kind not in self._seen and len(self._seen) < MAX_KINDS:
            self._seen.add(kind)
            log.warning(
                "no task here is called %s; job %s and others of this kind wait for another worker. %s",
                kind,
                claim.job.short_id,
                self._advice(kind),
                extra={"event": "unknown_kind", "job_id": claim.id},
            )
        return Settle(claim.id, claim.fence, unknown_kind(kind, claim.job.error, self._engine.clock.now()))

    def _advice(self, kind: str) -> str:
        module = _module_of(kind)
        if module is not None and module not in sys.modules:
            return f'Its module is not imported: add --include {module}, or App(include=["{module}"])'
        if close := difflib.get_close_matches(kind, self._tasks, 1):
            return f"A task here is called {close[0]}. A renamed task keeps its jobs with name={kind!r}"
        return f"Import the module that defines it: {HOW}"


def _module_of(kind: str) -> str | None:
    """The module of a task with a default name (`module.function`), if it exists. Imports nothing: a kind is
    a text from the ledger."""
    found, path = None, None
    parts = kind.split(".")
    for end in range(1, len(parts)):
        spec = PathFinder.find_spec(".".join(parts[:end]), path)
        if spec is None:
            break
        found, path = spec.name, spec.submodule_search_locations
        if path is None:
            break
    return found
