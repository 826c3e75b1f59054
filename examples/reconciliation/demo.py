"""The demonstration: four platforms with different faults, the HTTP API, two workers of which one is killed.

At the end it checks that every report took effect exactly once, and that the breaker stopped requests during
the outage."""

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
from towpath.commands import Query, Revive, Selector

from . import rules, store, work
from .api import Api
from .platforms import Platform, Simulator
from .rules import Numbers

REPORTS = 120
LONGEST = 60.0
"""Seconds after which the demonstration ends with a failure."""
CHEATS = ("mallory", "eve")
HONEST = ("ada", "bob", "cleo")
DOWN, BUSY, SLOW_TO_KNOW, LOCKED = work.PLATFORMS
"""The platforms, named by their faults."""
SHOWN = ("waiting", "running", "done", "failed")


def run() -> int:
    platforms = {
        DOWN: Platform(latency=0.02, down=True),  # an outage at first
        BUSY: Platform(latency=0.02, per_second=10),  # 429 for more requests
        SLOW_TO_KNOW: Platform(latency=0.02),  # some posts are unknown at first
        LOCKED: Platform(latency=0.02, status=403),  # rejects the key at first
    }
    with Simulator(platforms) as simulator, work.app, Api() as api:
        work.prepare()
        # Make this process the caretaker, so that the jobs of a killed worker become ready at once.
        work.app.engine.start_caretaker()
        for n in range(REPORTS):
            submit(api.url, platforms, n, random.Random(n))
        workers = [start_worker(n, simulator.url) for n in (1, 2)]
        story = Story(workers, platforms)
        try:
            story.watch()
        finally:
            for each in workers:
                each.terminate()
                each.wait()
        return sum_up(story)


def submit(url: str, platforms: dict[str, Platform], n: int, chance: random.Random) -> None:
    """Submit a report of a random affiliate, and set the numbers of the platform."""
    name, affiliate = chance.choice(list(platforms)), chance.choice(CHEATS + HONEST)
    views = chance.randrange(1_000, 40_000)
    truth = Numbers(views, views // 10, views // 100)
    platforms[name].posts[f"post-{n}"] = truth
    if name == "snapreel" and chance.random() < 0.5:
        platforms[name].unknown_for[f"post-{n}"] = chance.randint(1, 9)
    factor = chance.choice([1.3, 2.5]) if affiliate in CHEATS else chance.choice([1.0, 1.0, 1.03, 0.93, 1.15])
    claimed = {
        "views": int(views * factor),
        "clicks": int(views // 10 * factor),
        "conversions": int(views // 100 * factor),
    }
    body = {"report": f"r{n}", "affiliate": affiliate, "platform": name, "post": f"post-{n}", **claimed}
    request = urllib.request.Request(f"{url}/reports", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10):
        pass


def start_worker(n: int, platforms: str) -> subprocess.Popen[bytes]:
    command = [
        "worker",
        "reconciliation.work:app",
        "--concurrency",
        "12",
        "--lease",
        "2",
        "--name",
        f"worker-{n}",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "towpath", *command],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "RECONCILIATION_PLATFORMS": platforms},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


class Story:
    """Shows the progress and triggers the events of the demonstration, until all jobs have finished."""

    def __init__(self, workers: list[subprocess.Popen[bytes]], platforms: dict[str, Platform]) -> None:
        self._workers = workers
        self._platforms = platforms
        self.happened: list[str] = []
        self.killed = self.mended = False
        self.untouched = 0
        """Reports of the platform in outage without an attempt at the end of the outage."""

    def watch(self) -> None:
        began, db = time.monotonic(), store.connect(work.DATABASE)
        screen = Screen(db)
        while (seconds := time.monotonic() - began) < LONGEST:
            seen = work.app.ledger.version()
            counts = {name: counts_of(name) for name in self._platforms}
            screen.show(seconds, counts, self.happened)
            if self._go_on(seconds, counts):
                break
            work.app.ledger.wait(seen, 0.2)
        db.close()

    def _go_on(self, seconds: float, counts: dict[str, dict[str, int]]) -> bool:
        """Trigger the next event if its condition is met. Returns True at the end."""
        finished = sum(each["done"] + each["failed"] for each in counts.values())
        at_work = {name for name, each in counts.items() if each["waiting"] or each["running"]}
        if not self.killed:
            if finished >= 10 and any(each["running"] for each in counts.values()):
                self._workers[0].kill()
                self._workers[0].wait()
                self.killed = True
                self.happened.append(
                    f"{seconds:4.1f} s: worker-1 was killed with the jobs it held; they are ready again"
                )
        elif not self.mended:
            if at_work <= {DOWN}:
                self._mend(seconds, counts)
        elif sum(each["failed"] for each in counts.values()):
            # Includes jobs that were rejected before the new key and finished only now.
            work.app.engine.call(Revive(where=Selector(queue=work.queue_of(LOCKED), states=(State.FAILED,))))
        else:
            return not at_work
        return False

    def _mend(self, seconds: float, counts: dict[str, dict[str, int]]) -> None:
        """End the outage and the rejection, once all jobs of the other platforms have finished."""
        waiting = work.app.ledger.find(Query(queue=work.queue_of(DOWN), limit=1000)).jobs
        self.untouched = sum(job.attempts == 0 for job in waiting)
        [record] = [each for each in work.app.breakers.list() if each.name == DOWN]
        asked = self._platforms[DOWN].answered[503]
        self.happened += [
            f"{seconds:4.1f} s: {BUSY} and {SLOW_TO_KNOW} are done; {BUSY} returned 429 "
            f"{self._platforms[BUSY].answered[429]} times",
            f"{seconds:4.1f} s: {DOWN} is back. Its breaker had opened {record.trips} times: "
            f"{asked} requests, {self.untouched} of {len(waiting)} reports without an attempt",
            f"{seconds:4.1f} s: {LOCKED} accepts the new key; "
            f"{counts[LOCKED]['failed']} dead letters are retried",
        ]
        self._platforms[DOWN].down, self._platforms[LOCKED].status = False, 200
        self.mended = True


def counts_of(platform: str) -> dict[str, int]:
    counts = work.app.queue(work.queue_of(platform)).stats().counts
    return {name: getattr(counts, name) for name in SHOWN}


class Screen:
    """On a terminal a table that is redrawn in place; in a pipe a line twice a second."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._lines = 0

    def show(self, seconds: float, counts: dict[str, dict[str, int]], happened: list[str]) -> None:
        breakers = breaker_states()
        if sys.stdout.isatty():
            table = [f"  {'':12}" + "".join(f"{name:>9}" for name in SHOWN) + "  breaker"]
            for name, each in counts.items():
                table.append(
                    f"  {name:12}"
                    + "".join(f"{each[column]:9}" for column in SHOWN)
                    + f"  {breakers.get(name, '')}"
                )
            lines = [f"{seconds:5.1f} s", "", *table, "", *self._verdicts(), "", *happened]
            print("\x1b[H\x1b[J" + "\n".join(lines), flush=True)
        elif seconds * 2 >= self._lines:
            self._lines += 1
            sums = "  ".join(f"{name} {sum(each[name] for each in counts.values()):3}" for name in SHOWN)
            states = ", ".join(f"{name} {state}" for name, state in breakers.items() if state != "closed")
            print(f"{seconds:5.1f} s  {sums}  {states}".rstrip(), flush=True)

    def _verdicts(self) -> list[str]:
        found = dict(self._db.execute("SELECT status, count(*) FROM reconciliation GROUP BY status"))
        trust = self._db.execute("SELECT name, trust FROM affiliate ORDER BY name")
        lines = [f"  {status:12} {found.get(status, 0):4}" for status in rules.TRUST]
        return [*lines, "", "  trust  " + "  ".join(f"{name} {value:.2f}" for name, value in trust)]


def breaker_states() -> dict[str, str]:
    """`open (5 failures in 60 s)`, by platform."""
    return {
        each.name: each.state.value + (f" ({each.why})" if each.why else "")
        for each in work.app.breakers.list()
    }


def sum_up(story: Story) -> int:
    """Check that every report was recorded once and changed trust once, by replaying the records. Returns the
    exit code."""
    db = store.connect(work.DATABASE)
    records = list(db.execute("SELECT affiliate, status FROM reconciliation ORDER BY rowid"))
    trust = dict(db.execute("SELECT name, trust FROM affiliate"))
    alerts = dict(db.execute("SELECT kind || '/' || severity, count(*) FROM alert GROUP BY 1 ORDER BY 1"))
    db.close()
    replayed: dict[str, float] = {}
    for affiliate, status in records:
        replayed[affiliate] = rules.trust_after(replayed.get(affiliate, rules.START), status)
    for line in story.happened:
        print("-", line)
    for name, value in sorted(trust.items()):
        print(f"- {name}: trust {value:.2f}")
    print("- alerts:", ", ".join(f"{count} {kind}" for kind, count in alerts.items()))
    states = breaker_states()
    print("- breakers:", ", ".join(f"{name} {state}" for name, state in states.items()))
    once = story.mended and len(records) == REPORTS and replayed == trust
    left_alone = story.untouched > 0 and all(state.startswith("closed") for state in states.values())
    promise = f"{len(records)} of {REPORTS} reports reconciled, each with its effect on trust exactly once"
    counts = {name: counts_of(name) for name in work.PLATFORMS}
    print(promise if once and left_alone else f"NOT AS PROMISED: {promise}; {counts}")
    return 0 if once and left_alone else 1
