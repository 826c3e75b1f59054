"""Workloads that have provoked a defect once, at their full size: their short forms are tests."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from tests.chaos.audit import Findings
from tests.chaos.stores import SqliteStore, Store
from tests.support import poison as poisoned
from tests.support.killed import HELD, process, running
from tests.support.waiting import until
from tests.support.wal import BOUND, write_together
from towpath import App

SOON = {"sqlite": 1.0, "postgresql": 4.0}
"""Seconds until the jobs of a killed worker run again, on idle cores, as in bench/recovery.py; the audit
allows three times as much."""


def poison(store: Store, seed: int, seconds: float) -> Findings:
    """A job that ends its process, 500 innocents of 0.2 s beside it, 32 at once: exactly one dead letter."""
    load = poisoned.Load()
    found = poisoned.supervise(store.url, load)
    findings = Findings(events=found.starts - 1, jobs=load.innocents + 1, rerun=found.losses)
    if missing := load.innocents - found.done:
        findings.lost = missing
        findings.notes.append(f"{missing} innocents are not done, {len(found.dead)} jobs are dead letters")
    if found.dead != [found.poison]:
        findings.add_unexplained(
            f"dead letters: {len(found.dead)}, the poison is"
            f" {'' if found.poison in found.dead else 'not '}among them"
        )
    return findings


def recovery(store: Store, seed: int, seconds: float) -> Findings:
    """SIGKILL of a worker with 200 running jobs and default settings: how soon they run again elsewhere."""
    findings = Findings(events=1, jobs=HELD)
    with App(store.url) as app, process(store.url, store.folder, "one") as one:
        task = app.task(name="hold")(lambda n: None)
        task.enqueue_many([task.of(n) for n in range(HELD)])
        until(lambda: running(app, "one") == HELD)
        with process(store.url, store.folder, "two"):
            until(lambda: any(each.name == "two" for each in app.workers.list()))
            killed = time.monotonic()
            one.kill()
            with contextlib.suppress(AssertionError):
                until(lambda: running(app, "two") == HELD)
            took = time.monotonic() - killed
            findings.rerun = running(app, "two")
    findings.lost = HELD - findings.rerun
    findings.notes.append(f"{findings.rerun} of {HELD} ran again after {took:.1f} s")
    if took > 3 * SOON[store.url.partition(":")[0]]:
        findings.add_unexplained("recovery took too long")
    return findings


def log_size(store: SqliteStore, seed: int, seconds: float) -> Findings:
    """Two producers and two workers that write as fast as they can: the log stays below its bound."""
    grown = write_together(Path(store.path), max(seconds, 20.0))
    findings = Findings(events=0, jobs=grown.done)
    findings.notes.append(f"the log had at most {grown.largest / 1e6:.1f} MB of {BOUND / 1e6:.1f} MB")
    if grown.largest > BOUND:
        findings.add_unexplained("the log is longer than its bound")
    return findings
