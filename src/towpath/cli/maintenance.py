"""`backup`, `check` and `ledger`: copy, verify, migrate and vacuum a ledger."""

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
from towpath.cli.targets import existing_url, usable_url
from towpath.escapes import without_password


@command("backup")
@click.argument("path", type=click.Path(path_type=Path))
@pass_session
def backup(session: Session, /, path: Path) -> int:
    """Copy the ledger to a new file while workers run. The copy is a consistent snapshot; a failed copy
    leaves no file."""
    with session.ledger() as ledger:
        pages = _copy(ledger, path, quiet=session.json)
    size = path.stat().st_size
    print_result(session.json, {"path": str(path), "bytes": size, "pages": pages}, f"{path}: {size:,} bytes")
    return OK


def _copy(ledger: Ledger, path: Path, quiet: bool) -> int:
    copy = getattr(ledger, "backup", None)
    if copy is None and ledger.capabilities.attended:
        step = "Run it on the machine of the server, with the URL that `towpath serve` opens."
        raise Failure("`towpath backup` cannot copy the ledger of a server.", REFUSED, step)
    if copy is None:
        step = (
            "`pg_dump --schema=towpath` saves a consistent snapshot; `towpath ledger copy` copies it to an "
            "SQLite file."
        )
        raise Failure(
            "`towpath backup` does not support PostgreSQL; use the tools of the server.", REFUSED, step
        )
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
    """Verify the whole ledger.

    Compares counts and references with the jobs; SQLite also checks its file. Exit code 1 if there are
    problems."""
    with session.ledger() as ledger:
        problems = find_problems(ledger)
    lines = (
        [*problems, "Stop every process, keep a copy, restore a backup."]
        if problems
        else ["No problems found."]
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
    """Migrate, check, vacuum and copy the ledger."""


ledger.add_command(check)


@ledger.command("migrate")
@pass_session
def migrate(session: Session, /) -> int:
    """Create the schema, or migrate it to this version.

    Every process does this when it opens the ledger. Use this command when the role of your workers may not
    change the schema."""
    from towpath.operations import maintenance

    url = usable_url(session.url)
    before, after = maintenance.migrate(url)
    change = f"already has schema {after}" if before == after else f"migrated from schema {before} to {after}"
    print_result(session.json, {"from": before, "to": after}, f"{without_password(url)} {change}")
    return OK


@ledger.command("vacuum")
@pass_session
def vacuum(session: Session, /) -> int:
    """Free the space of deleted jobs.

    PostgreSQL: merges the counts and runs VACUUM (ANALYZE) on the ledger's tables while workers run. SQLite:
    rewrites the file without its free pages; this needs the same space once more for a time, and writers
    wait."""
    from towpath.operations import maintenance

    url = existing_url(session.url)
    freed = maintenance.vacuum(url)
    if "bytes_before" in freed:
        done = f"{freed['bytes']:,} bytes, before {freed['bytes_before']:,}"
    else:
        done = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in freed.items())
    print_result(session.json, freed, f"{without_password(url)}: {done}")
    return OK


@ledger.command("copy")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--force", is_flag=True, help="Copy even if workers or leases are active. Leases are copied unchanged."
)
@pass_session
def copy(session: Session, /, source: str, target: str, force: bool) -> int:
    """Copy the ledger at the URL SRC to the empty one at DST.

    Both may be SQLite or PostgreSQL. Ids, order, history, leases, dependencies and settings are kept; at the
    end counts and a hash over all rows are compared. No process may use SRC during the copy, and DST cannot
    be opened before the copy is complete. After an interruption the same command continues the copy."""
    from towpath.operations import maintenance

    usable_url(target)
    busy = maintenance.active_users(existing_url(source))
    if busy and not force:
        step = (
            "End the workers with `towpath workers drain`; leases of killed workers expire by themselves. "
            "--force copies anyway."
        )
        raise Failure(f"{without_password(source)} is in use: {join_names(busy)}.", REFUSED, step)
    with _progress(quiet=session.json) as progress:
        copied = maintenance.copy(source, target, progress)
    rows = sum(copied.rows.values())
    how = "copy continued and completed" if copied.resumed else "copied"
    text = (
        f"{without_password(target)}: {how}, {copied.rows['job']:,} jobs, {rows:,} rows, verified (sha256 "
        f"{copied.sha256})"
    )
    print_result(
        session.json, {"rows": copied.rows, "sha256": copied.sha256, "resumed": copied.resumed}, text
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
