"""Progress on a terminal: one line for each running transfer, totals, and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from towpath.escapes import escape
from towpath.operations.progress import RunningJob, Snapshot, size_of

LINES = 12
"""The number of running jobs that are shown one by one."""
PER_SECOND = 4


@contextmanager
def shown(
    snapshot: Callable[[], Snapshot], transfers: Mapping[str, str], file: IO[str] | None = None
) -> Iterator[None]:
    """Show the snapshots of `snapshot` during the block; without a terminal, only the last one at the end."""
    console = Console(file=file, stderr=file is None)

    def rendered() -> RenderableType:
        return drawn(snapshot(), transfers)

    with Live(get_renderable=rendered, console=console, refresh_per_second=PER_SECOND):
        yield


def drawn(snapshot: Snapshot, transfers: Mapping[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    known = sorted((job for job in snapshot.running if job.done is not None), key=lambda job: -job.seconds)
    for job in known[:LINES]:
        table.add_row(*_line(job, transfers))
    rows: list[RenderableType] = [table] if known else []
    if len(known) > LINES:
        rows.append(Text(f"and {len(known) - LINES} more"))
    if snapshot.lanes:
        rows.append(Text(escape(snapshot.by_lane(transfers))))
    return Group(*rows, Text(escape(sentence(snapshot, transfers))))


def sentence(snapshot: Snapshot, transfers: Mapping[str, str]) -> str:
    texts = [snapshot.summary(transfers)]
    moving = sum(each.rate for kind, each in snapshot.kinds.items() if kind in transfers)
    if moving > 0:
        texts.append(f"{size_of(moving)}/s")
    if snapshot.jobs_rate > 0:
        texts.append(f"{snapshot.jobs_rate:.1f} jobs/s")
    if snapshot.eta:
        texts.append(f"{_span(snapshot.eta)} left")
    return " · ".join(texts)


def _line(job: RunningJob, transfers: Mapping[str, str]) -> list[RenderableType]:
    is_bytes = job.kind in transfers
    spell: Callable[[float], str] = size_of if is_bytes else lambda count: f"{count:,.0f}"
    done, total = job.done or 0, job.total
    bar: RenderableType = (
        ProgressBar(total=total, completed=min(done, total), width=20) if total else Text("")
    )
    amount = f"{spell(done)} of {spell(total)}" if total else spell(done)
    speed = f"{spell(job.rate)}/s" if job.rate > 0 else ""
    left = f"{_span(job.eta)} left" if job.eta is not None else ""
    kind, id = escape(transfers.get(job.kind, job.kind)), escape(job.short_id)
    return [Text(kind), Text(id, style="dim"), bar, Text(amount), Text(speed), Text(left)]


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
