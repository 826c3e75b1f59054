"""`bench`: measure the speed of a ledger on this disk, next to the fsync rate of the disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from towpath import Ledger, commands, new_id, open_ledger
from towpath.cli.base import OK, Session, command, pass_session
from towpath.cli.output import print_result, table
from towpath.commands import Spec, micros

PAYLOAD = b'{"to": "ada", "text": "' + b"x" * 75 + b'"}'
BULK, BATCH = 1000, 100
SHARE = 0.2
"""Share of the time for each of the five measurements."""


@command("bench")
@click.option(
    "--seconds",
    "span",
    type=click.FloatRange(0.1, 60),
    default=5.0,
    show_default=True,
    help="Approximate total time.",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Directory on the disk to measure. Default: the temporary directory.",
)
@pass_session
def bench(session: Session, /, span: float, folder: Path | None) -> int:
    """Measure the speed of a ledger on this disk.

    Appends, claims and settles per second on a temporary ledger, next to the fsync rate of the disk.
    """
    with tempfile.TemporaryDirectory(prefix="towpath-bench-", dir=folder) as name:
        data = measure(Path(name), span * SHARE)
    print_result(session.json, data, lambda: _table(data))
    return OK


def measure(folder: Path, span: float) -> dict[str, Any]:
    raw = _raw_syncs(folder / "raw", span)
    ledger = open_ledger(f"sqlite:///{folder / 'bench.db'}")
    try:
        single = _rate(span, lambda: _append(ledger, 1))
        bulk = _rate(span, lambda: _append(ledger, BULK))
        worked = _rate(span, lambda: _work(ledger, 1))
        batched = _rate(span, lambda: _work(ledger, BATCH))
    finally:
        ledger.close()
    rates = {"append": single, "append_bulk": bulk, "claim_settle": worked, "claim_settle_batch": batched}
    ratios = {name: round(rate / raw, 3) for name, rate in rates.items()}
    return {
        "fsyncs_per_second": round(raw),
        "jobs_per_second": {name: round(rate) for name, rate in rates.items()},
        "per_fsync": ratios,
    }


def _rate(span: float, step: Callable[[], int]) -> float:
    start, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < span:
        done += step()
    return done / passed


def _raw_syncs(path: Path, span: float) -> float:
    """Pages written and synced per second: no ledger on this disk can commit more often."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    page = b"x" * 4096

    def step() -> int:
        os.pwrite(file, page, 0)
        os.fsync(file)
        return 1

    try:
        return _rate(span, step)
    finally:
        os.close(file)


def _append(ledger: Ledger, count: int) -> int:
    ledger.apply(
        [commands.Append(tuple(Spec(id=new_id(), queue="bench", payload=PAYLOAD) for _ in range(count)))]
    )
    return count


def _work(ledger: Ledger, count: int) -> int:
    """Claim, then settle: two commits. The engine combines both in one."""
    claim = commands.Claim(owner="bench", wants=(commands.Want("bench", count),), lease=micros(60))
    [answer] = ledger.apply([claim])
    assert isinstance(answer, commands.Claimed)
    if not answer.claims:
        _append(ledger, BULK)
        return 0
    ledger.apply([commands.Settle(each.id, each.fence, commands.Done()) for each in answer.claims])
    return len(answer.claims)


def _table(data: dict[str, Any]) -> object:
    names = {
        "append": "append, one per commit",
        "append_bulk": f"append, {BULK} per commit",
        "claim_settle": "claim and settle, one at a time",
        "claim_settle_batch": f"claim and settle, {BATCH} at a time",
    }
    raw = data["fsyncs_per_second"]
    rows: list[tuple[object, ...]] = [
        ("raw: write and fsync 4 KiB", f"{raw:,}", f"{1e6 / max(raw, 1):.0f}", "1")
    ]
    for key, name in names.items():
        rate = data["jobs_per_second"][key]
        rows.append((name, f"{rate:,}", f"{1e6 / max(rate, 1):.1f}", f"{data['per_fsync'][key]:g}"))
    return table(
        ("operation", "per second", "µs each", "per raw fsync"),
        rows,
        numbers=("per second", "µs each", "per raw fsync"),
    )
