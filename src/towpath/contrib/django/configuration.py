"""The entry of a backend in the setting TASKS: its OPTIONS, checked, and the ledger that they name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections

from towpath.commands import SetQueue
from towpath.errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])

TASK_OPTIONS = ("max_attempts", "backoff", "timeout", "retention")
"""Options of `@app.task(...)` that OPTIONS sets for all tasks and `task_options` for one."""
OWN_OPTIONS = ("url", "database", "enqueue_on_commit", "include", "name")
MAX_ATTEMPTS = 1
"""As in the backends of Django: a task that has raised is not run again."""

_NOT_LIBPQ = ("client_encoding", "prepare_threshold")
"""Parameters of Django's connections that are no parameters of the ledger's."""


class DjangoOption(InvalidInput, ImproperlyConfigured):
    """A setting of the backend that is wrong."""


def wrong(alias: str, option: str, value: object, expected: str) -> DjangoOption:
    field = f"TASKS[{alias!r}][{option!r}]" if option.isupper() else f"TASKS[{alias!r}] option {option!r}"
    return DjangoOption(field=field, value=value, expected=expected)


def check_options(alias: str, options: Mapping[str, Any]) -> None:
    """Raise DjangoOption for an option that does not exist or that excludes another."""
    known = (*OWN_OPTIONS, *TASK_OPTIONS)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"{close[0]!r}?" if close else f"one of {', '.join(known)}"
            raise wrong(alias, str(name), options[name], f"an option that exists: {hint}")
    if options.get("enqueue_on_commit") and options.get("database"):
        expected = "left out beside 'database': the job is a part of the transaction already"
        raise wrong(alias, "enqueue_on_commit", options["enqueue_on_commit"], expected)
    if (database := commit_database(options)) is not None:
        _check_database(alias, "enqueue_on_commit", database)


def _check_database(alias: str, option: str, database: str) -> None:
    if database not in connections.settings:
        expected = f"a name in DATABASES ({', '.join(connections.settings)})"
        raise wrong(alias, option, database, expected)


def checked_url(alias: str, options: Mapping[str, Any], queues: Iterable[str]) -> str | None:
    """The URL of the ledger. Raises DjangoOption or InvalidInput if a setting of the alias is wrong."""
    check_options(alias, options)
    for queue in queues:
        try:
            SetQueue(queue=queue)
        except InvalidInput as error:
            raise wrong(alias, "QUEUES", queue, error.details["expected"]) from None
    url = ledger_url(alias, options)
    if url is not None:
        _check_file(alias, url)
    return url


def ledger_url(alias: str, options: Mapping[str, Any]) -> str | None:
    """The URL of the ledger: `url`, else that of `database`; None leaves it to the settings of Towpath."""
    url = options.get("url")
    if url is None:
        database = options.get("database")
        if database is None:
            return None
        _check_database(alias, "database", database)
        connection = connections[database]
        if connection.vendor != "postgresql":
            expected = "a database on PostgreSQL; use 'url' for a ledger beside another database"
            raise wrong(alias, "database", database, expected)
        return url_of_database(connection)
    if not isinstance(url, str) or ":" not in url:
        raise wrong(alias, "url", url, "the URL of a ledger, such as sqlite:///jobs.db")
    return url


def _check_file(alias: str, url: str) -> None:
    """Refuse a ledger in the file of a database of Django: two SQLite libraries on one file in one process
    lose commits, and Django uses that of Python."""
    if not url.startswith("sqlite:///"):
        return
    path = Path(url.removeprefix("sqlite:///").partition("?")[0]).absolute()
    for name, entry in connections.settings.items():
        if entry["ENGINE"].endswith("sqlite3") and Path(entry["NAME"]).absolute() == path:
            expected = f"a file of its own: DATABASES[{name!r}] uses this one"
            raise wrong(alias, "url", url, expected)


def url_of_database(connection: Any) -> str:
    """The URL of a PostgreSQL database of Django, with its parameters for libpq."""
    given = {
        name: str(value)
        for name, value in connection.get_connection_params().items()
        if isinstance(value, str | int) and not isinstance(value, bool) and name not in _NOT_LIBPQ
    }
    name, user, password = (given.pop(each, "") for each in ("dbname", "user", "password"))
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    query = urlencode(given, quote_via=quote)
    return f"postgresql://{login}{'@' if login else ''}/{quote(name, safe='')}{'?' if query else ''}{query}"


def commit_database(options: Mapping[str, Any]) -> str | None:
    """The database of `enqueue_on_commit`: True means the default one."""
    given = options.get("enqueue_on_commit")
    return DEFAULT_DB_ALIAS if given is True else given or None


def task_options(**options: Any) -> Callable[[F], F]:
    """Options of Towpath for one task: `@task` above `@task_options(max_attempts=5, backoff=[10, 60])`. They
    replace those of OPTIONS."""
    check_task_options("task_options", options)

    def decorate(function: F) -> F:
        if not hasattr(function, "__code__"):
            expected = "below @task, on the function itself"
            raise DjangoOption(field="task_options", value=function, expected=expected)
        function.towpath_options = options  # type: ignore[attr-defined]
        return function

    return decorate


def check_task_options(where: str, options: Iterable[str]) -> None:
    for name in options:
        if name not in TASK_OPTIONS:
            expected = f"one of {', '.join(TASK_OPTIONS)}; @task has queue_name and priority"
            raise DjangoOption(field=where, value=name, expected=expected)


def options_of_task(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `@app.task(...)` for a function."""
    common = {name: options[name] for name in TASK_OPTIONS if name in options}
    return {"max_attempts": MAX_ATTEMPTS, **common, **getattr(function, "towpath_options", {})}
