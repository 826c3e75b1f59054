"""Where a ledger is: the file of a URL, and URLs as they are shown."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from towpath.escapes import without_password


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


def shown_url(url: str) -> str:
    """The URL as it is shown: with the absolute path of a file, without a password."""
    path = file_of(url)
    if path is None:
        return without_password(url)
    query = urlsplit(url).query
    return _url_of(path) + (f"?{query}" if query else "")


def _url_of(path: Path) -> str:
    """The URL of a file, with its absolute path. Only characters that would end the path are quoted."""
    place = str(path.absolute())
    return "sqlite:///" + "".join(quote(each) if each in "%?#" else each for each in place)


def ledger_above(url: str) -> Path | None:
    """The nearest file of the same name in a directory above, if the file of a relative `sqlite:` URL does
    not exist: the program was perhaps started in the wrong directory."""
    path = file_of(url)
    if path is None or path.is_absolute() or not is_missing(path):
        return None
    folder = path.absolute().parent
    return next((found for above in folder.parents if (found := above / path.name).is_file()), None)


def advice_above(url: str) -> str | None:
    """What to do about `ledger_above`; None if there is no such file."""
    above = ledger_above(url)
    if above is None:
        return None
    return (
        f"A directory above has one, {above}: to use it, start in {above.parent} or set "
        f"TOWPATH_URL={_url_of(above)}."
    )


def warning_above(url: str) -> str | None:
    """The same for a process that will create the file."""
    path, advice = file_of(url), advice_above(url)
    return advice and f"There is no ledger at {path and path.absolute()}; a new one is created. {advice}"
