"""`backup` and `check`: looking after the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from towpath import Ledger
from towpath.cli.base import Session, command, pass_session
from towpath.cli.failures import OK, REFUSED, Failure
from towpath.cli.output import show


@command("backup")
@click.argument("path", type=click.Path(path_type=Path))
@pass_session
def backup(session: Session, /, path: Path) -> int:
    """Copy the ledger to a new file while work goes on. The copy is complete as of one moment, or not there at all."""
    with session.ledger() as ledger:
        pages = _copy(ledger, path, quiet=session.json)
    size = path.stat().st_size
    show(session.json, {"path": str(path), "bytes": size, "pages": pages}, f"{path}: {size:,} bytes")
    return OK


def _copy(ledger: Ledger, path: Path, quiet: bool) -> int:
    copy = getattr(ledger, "backup", None)
    if copy is None:
        step = "`pg_dump --schema=towpath` saves it as of one moment; `towpath ledger copy` makes an SQLite file of it."
        raise Failure("A PostgreSQL ledger is backed up by the server's own tools.", REFUSED, step)
    total = 0

    def count(done: int, pages: int) -> None:
        nonlocal total
        total = pages

    if quiet or not sys.stderr.isatty():
        copy(path, count)
        return total
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("copying", total=None)

        def draw(done: int, pages: int) -> None:
            count(done, pages)
            bar.update(task, completed=done, total=pages)

        copy(path, draw)
    return total


@command("check")
@pass_session
def check(session: Session, /) -> int:
    """Recount the whole ledger.

    The store examines its file too. Exit code 1 if anything does not add up.
    """
    with session.ledger() as ledger:
        problems = examine(ledger)
    lines = [*problems, "Stop every process, keep a copy, restore a backup."] if problems else ["Everything adds up."]
    data: dict[str, Any] = {"ok": not problems, "problems": problems}
    show(session.json, data, lines)
    return REFUSED if problems else OK


def examine(ledger: Ledger) -> list[str]:
    found: list[str] = getattr(ledger, "integrity", ledger.check)()
    return found
