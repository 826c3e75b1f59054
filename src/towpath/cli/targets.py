"""Resolve a URL to a ledger and `module:app` to an App. Every failure is a `Failure` with a next step."""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import unquote, urlsplit

import towpath
from towpath import Ledger
from towpath.cli.base import Failure, bad_input, unavailable

if TYPE_CHECKING:
    from towpath.app import App

_SECRET = re.compile(r"(?<=://)([^/?@]*?:)[^?]*(?=@)|([?&](?:ssl)?password=)[^&]*")


def file_of(url: str) -> Path | None:
    """The file of a `sqlite:` URL."""
    parts = urlsplit(url)
    return Path(unquote(parts.path[1:])) if parts.scheme == "sqlite" and len(parts.path) > 1 else None


def is_missing(path: Path) -> bool:
    """True if a new ledger could be created there. If only a write-ahead log is left, opening the ledger
    raises `OrphanedLog`, so False is returned."""
    return path.parent.is_dir() and not path.exists() and not path.with_name(f"{path.name}-wal").exists()


def is_server(url: str) -> bool:
    return urlsplit(url).scheme in ("postgresql", "postgres")


def without_password(url: str) -> str:
    """The URL without its password."""
    return _SECRET.sub(r"\1\2***", url) if is_server(url) else url


def resolve_url(url: str | None) -> tuple[str, str]:
    """The URL and its origin: `--url`, a variable, a file or the default."""
    from towpath.settings import resolve

    found = resolve(url)
    return found.url, "--url" if url is not None else found.origin


def open_target(given: str | None, make: bool) -> Ledger:
    return towpath.open_ledger(usable_url(given) if make else existing_url(given))


def usable_url(given: str | None) -> str:
    """The URL. Raises if it has too few slashes or names a ledger in memory, which only one process can
    use."""
    url, origin = resolve_url(given)
    check_slashes(url, origin)
    if urlsplit(url).scheme == "memory":
        step = "Use a file: --url sqlite:///work.db"
        raise bad_input(
            f"{url} (from {origin}) is in the memory of one process; the command line cannot open it.", step
        )
    return url


def check_slashes(url: str, origin: str) -> None:
    if url.startswith("sqlite:") and not url.startswith("sqlite:///"):
        step = "sqlite:///file.db is relative, sqlite:////absolute/file.db is absolute."
        raise bad_input(f"{url} (from {origin}) has too few slashes.", step)


def existing_url(given: str | None) -> str:
    """The URL of an existing ledger. A mistyped URL must not create an empty ledger."""
    url = usable_url(given)
    path = file_of(url)
    if path is not None and is_missing(path):
        step = "Check the URL. The first `towpath put`, `towpath enqueue` or worker creates a ledger."
        raise unavailable(f"There is no ledger at {path} ({url}, from {resolve_url(given)[1]}).", step)
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
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = _module(module)
    for name in attribute.split("."):
        if not hasattr(found, name):
            apps = [key for key, value in vars(_module(module)).items() if _is_app(value)]
            step = (
                f"Apps in it: {', '.join(apps)}." if apps else f"It has no App: add `{name} = towpath.App()`."
            )
            raise bad_input(f"Module {module} has no {attribute}.", step)
        found = getattr(found, name)
    return found


def load_app(target: str, url: str | None = None) -> App:
    """Import the App `module:attribute`. `url` is used by an App without a URL; an App with another URL is an
    error."""
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
    return found


def _is_app(value: object) -> TypeGuard[App]:
    from towpath.app import App

    return isinstance(value, App)


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            step = f"Check the spelling, and that it is importable from {os.getcwd()}."
            raise bad_input(f"There is no module {name}.", step) from error
        raise _import_failure(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(name, error) from error


def _import_failure(name: str, error: BaseException) -> Failure:
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
