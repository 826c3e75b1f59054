"""`backup` and `check`: looking after the file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from towpath import Ledger
from towpath.cli.base import OK, REFUSED, CliGroup, Failure, Session, command, join_names, pass_session
from towpath.cli.output import print_result
from towpath.cli.targets import existing_url, usable_url, without_password


@command("backup")
@click.argument("path", type=click.Path(path_type=Path))
@pass_session
def backup(session: Session, /, path: Path) -> int:
    """Copy the ledger to a new file while work goes on. The copy is complete as of one moment, or not there
    at all."""
    with session.ledger() as ledger:
        pages = _copy(ledger, path, quiet=session.json)
    size = path.stat().st_size
    print_result(session.json, {"path": str(path), "bytes": size, "pages": pages}, f"{path}: {size:,} bytes")
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
        problems = find_problems(ledger)
    lines = (
        [*problems, "Stop every process, keep a copy, restore a backup."]
        if problems
        else ["Everything adds up."]
    )
    data: dict[str, Any] = {"ok": not problems, "problems": problems}
    print_result(session.json, data, lines)
    return REFUSED if problems else OK


def find_problems(ledger: Ledger) -> list[str]:
    found: list[str] = getattr(ledger, "integrity", ledger.check)()
    return found


if TYPE_CHECKING:
    from towpath.operations.maintenance import Progress


@click.group("ledger", cls=CliGroup)
def ledger() -> None:
    """The ledger as a whole: its schema, its room, its copy in another place."""


ledger.add_command(check)


@ledger.command("migrate")
@pass_session
def migrate(session: Session, /) -> int:
    """Bring the schema up to this version, or make it.

    Every process does it when it opens the ledger. By itself it is for a role that may do more than your
    workers."""
    from towpath.operations import maintenance

    url = usable_url(session.url)
    before, after = maintenance.migrate(url)
    words = f"has schema {after} already" if before == after else f"went from schema {before} to {after}"
    print_result(session.json, {"from": before, "to": after}, f"{without_password(url)} {words}")
    return OK


@ledger.command("vacuum")
@pass_session
def vacuum(session: Session, /) -> int:
    """Give back room that finished work left.

    PostgreSQL: folds the counts and runs VACUUM (ANALYZE) on the ledger's tables, beside whatever runs.
    SQLite: writes the file anew, without its free pages; it needs as much room again for a while, and
    everybody who writes waits."""
    from towpath.operations import maintenance

    url = existing_url(session.url)
    told = maintenance.vacuum(url)
    print_result(
        session.json,
        told,
        f"{without_password(url)}: "
        + ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in told.items()),
    )
    return OK


@ledger.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--force", is_flag=True, help="Also while workers or leases are alive. Leases are copied as they are."
)
@pass_session
def copy(session: Session, /, source: str, target: str, force: bool) -> int:
    """Copy the ledger at the URL SRC to the empty one at DST.

    SQLite to PostgreSQL, back, or one kind to the same. Ids, order, history, leases, dependencies, all
    settings are kept; at the end counts and a hash over everything are compared. Nobody may use SRC
    meanwhile, and nobody can use DST before it is complete. If it is interrupted, the same command goes on
    where it was."""
    from towpath.operations import maintenance

    usable_url(target)
    busy = maintenance.occupants(existing_url(source))
    if busy and not force:
        step = "`towpath workers drain` ends workers; leases of who was killed run out by themselves. --force copies anyway."
        raise Failure(f"{without_password(source)} is in use: {join_names(busy)}.", REFUSED, step)
    with _progress(quiet=session.json) as progress:
        copied = maintenance.copy(source, target, progress)
    rows = sum(copied.rows.values())
    words = "the rest was copied" if copied.resumed else "copied"
    people = f"{without_password(target)}: {words}, {copied.rows['job']:,} jobs, {rows:,} rows, verified (sha256 {copied.sha256})"
    print_result(
        session.json, {"rows": copied.rows, "sha256": copied.sha256, "resumed": copied.resumed}, people
    )
    return OK


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
