"""The demonstration: four platforms, each with a trouble of its own, the HTTP API, two workers of which one is killed, a live table.

It ends by itself, and says whether every report has had its effect exactly once.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import apsw

from towpath import State
from towpath.commands import Revive, Selector

from . import rules, store, work
from .api import Api
from .platforms import Platform, Simulator
from .rules import Numbers

REPORTS = 120
LONGEST = 60.0
"""Seconds after which it gives up."""
CHEATS = ("mallory", "eve")
HONEST = ("ada", "bob", "cleo")


def run() -> int:
    platforms = {
        "clicktube": Platform(latency=0.02, down=True),  # out of order at first
        "instapix": Platform(latency=0.02, per_second=10),  # 429 for whoever asks more often
        "snapreel": Platform(latency=0.02),  # does not know some posts yet
        "tiktalk": Platform(latency=0.02, status=403),  # our key is wrong at first
    }
    with Simulator(platforms) as simulator, work.app, Api(list(platforms)) as api:
        work.prepare()
        for name in platforms:
            work.limit(name)
        # This process looks after the ledger, so that what a killed worker held is back when its lease is over.
        work.app.attend()
        for n in range(REPORTS):
            submit(api.url, platforms, n, random.Random(n))
        workers = [start_worker(n, simulator.url) for n in (1, 2)]
        try:
            events = watch(workers, platforms)
        finally:
            for each in workers:
                each.terminate()
                each.wait()
        return sum_up(events)


def submit(url: str, platforms: dict[str, Platform], n: int, chance: random.Random) -> None:
    """A report of somebody, and what the platform will say about it."""
    name, affiliate = chance.choice(list(platforms)), chance.choice(CHEATS + HONEST)
    views = chance.randrange(1_000, 40_000)
    truth = Numbers(views, views // 10, views // 100)
    platforms[name].posts[f"post-{n}"] = truth
    if name == "snapreel" and chance.random() < 0.5:
        platforms[name].unknown_for[f"post-{n}"] = chance.randint(1, 9)
    factor = chance.choice([1.3, 2.5]) if affiliate in CHEATS else chance.choice([1.0, 1.0, 1.03, 0.93, 1.15])
    claimed = {"views": int(views * factor), "clicks": int(views // 10 * factor), "conversions": int(views // 100 * factor)}
    body = {"report": f"r{n}", "affiliate": affiliate, "platform": name, "post": f"post-{n}", **claimed}
    request = urllib.request.Request(f"{url}/reports", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10):
        pass


def start_worker(n: int, platforms: str) -> subprocess.Popen[bytes]:
    command = ["worker", "reconciliation.work:app", "--concurrency", "12", "--lease", "2", "--name", f"worker-{n}"]
    return subprocess.Popen(
        [sys.executable, "-m", "towpath", *command],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "RECONCILIATION_PLATFORMS": platforms},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def watch(workers: list[subprocess.Popen[bytes]], platforms: dict[str, Platform]) -> list[str]:
    """Show how it goes and let things happen, until nothing is left to do; what happened."""
    happened: list[str] = []
    began, queue, db = time.monotonic(), work.app.queue(work.QUEUE), store.connect(work.DATABASE)
    screen = Screen(db)
    while (seconds := time.monotonic() - began) < LONGEST:
        counts = queue.stats().counts
        screen.show(seconds, {state: getattr(counts, state) for state in SHOWN}, happened)
        finished = counts.done + counts.failed
        if not happened and finished >= 10 and counts.running:
            workers[0].kill()
            workers[0].wait()
            happened.append("worker-1 was killed with what it held")
        elif len(happened) == 1 and finished >= REPORTS // 3:
            platforms["clicktube"].down, platforms["tiktalk"].status = False, 200
            happened.append(f"clicktube is back; tiktalk has our new key, {counts.failed} dead letters are brought back")
        elif len(happened) == 2 and counts.failed:
            # Also those that tiktalk had refused just before, and that ended only now.
            work.app.call(Revive(where=Selector(queue=work.QUEUE, states=(State.FAILED,))))
        elif len(happened) == 2 and not (counts.waiting or counts.running):
            break
        seen = work.app.ledger.version()
        work.app.ledger.wait(seen, 0.2)
    db.close()
    return happened


SHOWN = ("scheduled", "ready", "running", "done", "failed")


class Screen:
    """The table, again and again in the same place; in a pipe a line twice a second."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._lines = 0

    def show(self, seconds: float, counts: dict[str, int], happened: list[str]) -> None:
        jobs = f"{seconds:5.1f} s  " + "  ".join(f"{name} {count:3}" for name, count in counts.items())
        if sys.stdout.isatty():
            print("\x1b[H\x1b[J" + "\n".join([jobs, "", *self._verdicts(), "", *happened]), flush=True)
        elif seconds * 2 >= self._lines:
            self._lines += 1
            print(jobs, flush=True)

    def _verdicts(self) -> list[str]:
        found = dict(self._db.execute("SELECT status, count(*) FROM reconciliation GROUP BY status"))
        trust = self._db.execute("SELECT name, trust FROM affiliate ORDER BY name")
        lines = [f"  {status:12} {found.get(status, 0):4}" for status in rules.TRUST]
        return [*lines, "", "  trust  " + "  ".join(f"{name} {value:.2f}" for name, value in trust)]


def sum_up(happened: list[str]) -> int:
    """Was every report recorded once, and did each change trust once? Whoever replays the records must come to the same."""
    db = store.connect(work.DATABASE)
    records = list(db.execute("SELECT affiliate, status FROM reconciliation ORDER BY rowid"))
    trust = dict(db.execute("SELECT name, trust FROM affiliate"))
    alerts = dict(db.execute("SELECT kind || '/' || severity, count(*) FROM alert GROUP BY 1 ORDER BY 1"))
    db.close()
    replayed: dict[str, float] = {}
    for affiliate, status in records:
        replayed[affiliate] = rules.trust_after(replayed.get(affiliate, rules.START), status)
    for line in happened:
        print("-", line)
    for name, value in sorted(trust.items()):
        print(f"- {name}: trust {value:.2f}")
    print("- alerts:", ", ".join(f"{count} {kind}" for kind, count in alerts.items()))
    well = len(happened) == 2 and len(records) == REPORTS and replayed == trust
    promise = f"{len(records)} of {REPORTS} reports reconciled, each with its effect on trust exactly once"
    counts = work.app.queue(work.QUEUE).stats().counts
    print(promise if well else f"NOT AS PROMISED: {promise}; {counts}")
    return 0 if well else 1
