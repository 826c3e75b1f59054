"""Resolve a URL to a ledger, `module:app` to an App, and ids to jobs and groups. Every failure is a `Failure`
with a next step."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import urlsplit

import click

import towpath
from towpath import Ledger
from towpath.cli.base import Failure, bad_input, join_names, not_found, print_stderr, unavailable
from towpath.commands import GroupQuery, GroupView, Job
from towpath.errors import UnknownGroup, UnknownJob
from towpath.escapes import without_password
from towpath.operations.places import advice_above, file_of, is_missing, is_server, warning_above

if TYPE_CHECKING:
    from towpath import Task
    from towpath.app import App

include_option = click.option(
    "--include",
    multiple=True,
    metavar="MODULE",
    help="A module that defines tasks of the app, such as shop.tasks; shop.*.tasks for all of a package. "
    "Repeatable.",
)


def resolve_url(url: str | None, file: Path | None = None) -> tuple[str, str]:
    """The URL and its origin: `--url`, a variable, a file or the default."""
    from towpath.settings import resolve

    found = resolve(url, file=file)
    return found.url, "--url" if url is not None else found.origin


def open_target(given: str | None, make: bool) -> Ledger:
    if not make:
        return towpath.open_ledger(existing_url(given))
    url = usable_url(given)
    print_stderr([*filter(None, [warning_above(url)])])
    return towpath.open_ledger(url)


def usable_url(given: str | None) -> str:
    """The URL. Raises if it has too few slashes or names a ledger in memory, which only one process can
    use."""
    url, origin = resolve_url(given)
    check_slashes(url, origin)
    if urlsplit(url).scheme == "memory":
        step = "Use a file: --url sqlite:///work.db"
        where = f"{without_password(url)} (from {origin})"
        raise bad_input(f"{where} is in the memory of one process; the command line cannot open it.", step)
    return url


def check_slashes(url: str, origin: str) -> None:
    if url.startswith("sqlite:") and not url.startswith("sqlite:///"):
        step = "sqlite:///file.db is relative, sqlite:////absolute/file.db is absolute."
        raise bad_input(f"{without_password(url)} (from {origin}) has too few slashes.", step)


def existing_url(given: str | None) -> str:
    """The URL of an existing ledger. A mistyped URL must not create an empty ledger."""
    url = usable_url(given)
    path = file_of(url)
    if path is not None and is_missing(path):
        step = "Check the URL. The first `towpath put`, `towpath enqueue` or worker creates a ledger."
        raise unavailable(
            f"There is no ledger at {path.absolute()} ({url}, from {resolve_url(given)[1]}).",
            advice_above(url) or step,
        )
    if is_server(url) and not server_has_ledger(url):
        step = (
            "Check the URL and its ?schema=. `towpath ledger migrate`, the first `towpath put` or a worker "
            "creates a ledger."
        )
        raise unavailable(
            f"There is no ledger in {without_password(url)} (from {resolve_url(given)[1]}).", step
        )
    return url


def server_has_ledger(url: str) -> bool:
    from towpath.operations import maintenance

    return maintenance.is_there(url)


def load_object(target: str) -> Any:
    """Import the object `module:attribute`. The working directory is first on the path, as for `python
    -m`."""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise bad_input(f"{target!r} does not name an app.", "Write it as module:app, such as shop.work:app")
    found: Any = load_module(module)
    for name in attribute.split("."):
        if not hasattr(found, name):
            apps = [key for key, value in vars(load_module(module)).items() if _is_app(value)]
            step = (
                f"Apps in it: {', '.join(apps)}." if apps else f"It has no App: add `{name} = towpath.App()`."
            )
            raise bad_input(f"Module {module} has no {attribute}.", step)
        found = getattr(found, name)
    return found


def load_app(target: str, url: str | None = None, include: Sequence[str] = ()) -> App:
    """Import the App `module:attribute` and the modules of its tasks, from its settings and `include`.
    `url` is used by an App without a URL; an App with another URL is an error."""
    from towpath.operations.startup import import_included
    from towpath.settings import included

    more = included(include, "--include")
    if url is not None:
        os.environ["TOWPATH_URL"] = url
    found = load_object(target)
    if _is_app(getattr(found, "towpath", None)):  # a bridge, such as a Celery app
        found = found.towpath
    if not _is_app(found):
        step = "Name the object that `towpath.App(...)` returned."
        raise bad_input(f"{target} is a {type(found).__name__}, not an App.", step)
    if url is not None and found.engine.url != url:
        raise bad_input(
            f"{target} sets its own URL {without_password(found.engine.url)}, not {without_password(url)}.",
            "Remove --url, or remove the URL from the program.",
        )
    import_included([*found.settings.include, *more], load_module)
    return found


def find_task(app: App, target: str, kind: str) -> Task[..., Any]:
    """The task of this name. `target` names the app in the error."""
    task = app.tasks.get(kind)
    if task is None:
        known = sorted(app.tasks)
        # The default name of a task is module.function; users often type the function alone.
        close = [name for name in known if name.rpartition(".")[2] == kind]
        guess = f"Did you mean {close[0]}? " if len(close) == 1 else ""
        raise bad_input(f"{target} has no task {kind}.", f"{guess}Tasks: {join_names(known)}")
    return task


def _is_app(value: object) -> TypeGuard[App]:
    from towpath.app import App

    return isinstance(value, App)


def load_module(name: str) -> Any:
    """Import a module. The working directory is first on the path."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            step = f"Check the spelling, and that it is importable from {os.getcwd()}."
            raise bad_input(f"There is no module {name}.", step) from error
        raise import_failure(name, error) from error
    except (Exception, SystemExit) as error:
        raise import_failure(name, error) from error


def import_failure(name: str, error: BaseException) -> Failure:
    """The module raised while it was imported. The next step names the line of the user's program."""
    where = _location_of(error)
    step = (
        f"{where}. TOWPATH_DEBUG=1 prints the traceback."
        if where
        else "TOWPATH_DEBUG=1 prints the traceback."
    )
    return bad_input(f"Module {name} cannot be imported: {type(error).__name__}: {error}", step)


def _location_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    trace, last = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<frozen") and Path(file).parent != Path(__file__).parent:
            last = f"{file}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return last


def module_files(target: str) -> list[Path]:
    """The files that the module of `module:attribute` has or could have."""
    module = target.partition(":")[0]
    try:
        spec = find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    stem = Path(os.getcwd(), *module.split("."))
    known = (
        [Path(spec.origin)] if spec is not None and spec.origin not in (None, "built-in", "frozen") else []
    )
    return [*known, stem.with_suffix(".py"), stem / "__init__.py"]


MIN_PREFIX = 6
"""Characters: a shorter beginning of an id denotes no group. (`Ledger.lookup` has the same rule for jobs.)"""
MAX_CANDIDATES = 10
"""Jobs or groups that the error about an ambiguous id lists."""


def find_job(ledger: Ledger, text: str) -> Job:
    """The job, without its bodies, that `text` denotes: its id, its short id, or the beginning of its id."""
    found = ledger.lookup(text, MAX_CANDIDATES + 1)
    if not found:
        raise UnknownJob(id=text)
    if len(found) > 1:
        lines = [f"{job.short_id}  {job.id}  {job.kind or job.queue}, {job.state}" for job in found]
        raise _ambiguous("jobs", text, [job.id for job in found], lines)
    return found[0]


def find_jobs(ledger: Ledger, texts: Sequence[str]) -> dict[str, Job]:
    """The jobs that the texts denote, by id. If one is unknown or ambiguous this raises before any change, so
    that a mistyped id causes no partial change."""
    found: dict[str, Job] = {}
    unknown = []
    for text in texts:
        try:
            job = find_job(ledger, text)
        except UnknownJob:
            unknown.append(text)
        else:
            found[job.id] = job
    if len(unknown) == 1:
        raise UnknownJob(id=unknown[0])
    if unknown:
        raise not_found(
            f"There are no jobs {join_names(unknown)}; nothing was changed.",
            "`towpath jobs list` lists the jobs.",
        )
    return found


def find_group(ledger: Ledger, text: str) -> GroupView:
    """The group that `text` denotes: its id, or the beginning of its id."""
    exact = ledger.group(text)
    if exact is not None:
        return exact
    query = GroupQuery(prefix=text, limit=MAX_CANDIDATES + 1)
    found = ledger.groups(query).groups if len(text) >= MIN_PREFIX else ()
    if not found:
        raise UnknownGroup(group=text)
    if len(found) > 1:
        ids = [group.id for group in found]
        raise _ambiguous("groups", text, ids, [f"{group.id}  {group.state}" for group in found])
    return found[0]


def known_job(ledger: Ledger, text: str) -> str:
    """The id of the job that `text` denotes, or the text if there is none: a deleted job may still be a
    dependency."""
    try:
        return find_job(ledger, text).id
    except UnknownJob:
        return text


def known_group(ledger: Ledger, text: str) -> str:
    """The id of the group that `text` denotes, or the text if there is none."""
    try:
        return find_group(ledger, text).id
    except UnknownGroup:
        return text


def _ambiguous(what: str, text: str, ids: Sequence[str], lines: Sequence[str]) -> Failure:
    more = [] if len(ids) <= MAX_CANDIDATES else ["..."]
    failure = bad_input(
        "\n".join([f"{text} denotes several {what}; nothing was changed.", *lines[:MAX_CANDIDATES], *more]),
        "Give more characters of the id"
        + (", or the short id in the first column." if what == "jobs" else "."),
    )
    failure.kind = "Ambiguous"
    failure.details = {"id": text, "candidates": list(ids[:MAX_CANDIDATES]), "more": bool(more)}
    return failure
