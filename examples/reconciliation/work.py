"""One job for each report. `towpath worker reconciliation.work:app` runs them, with any number of workers.

Responses of a platform and their effect on the job:

| response | effect |
|---|---|
| numbers | classified, recorded, trust changed: one transaction with the end of the job |
| 404, or incomplete numbers | the job snoozes; after the last request the result is the verdict |
| 429 | failed attempt; no job of this platform starts before the given time, then fewer at once |
| 5xx, no connection, timeout | failed attempt, retried with growing delays; five a minute open the breaker |
| others (401, 403) | `failed` at once, for a person: `towpath dead list`, then `towpath dead retry` |

While the breaker of a platform is open, its reports wait and spend no attempts. Other platforms are not
affected. After the cool-down two reports run as probes; if they succeed, the breaker closes.
`towpath breakers list` shows its state.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import apsw

import towpath
from towpath import Breaker, Exponential, Fail, Policy, Retry, Snooze, Task, current

from . import rules, store
from .rules import Numbers, Status

DATABASE = os.environ.get("RECONCILIATION_DB", "reconciliation.db")
ADDRESS = os.environ.get("RECONCILIATION_PLATFORMS", "http://127.0.0.1:8100")
MINUTE = float(os.environ.get("RECONCILIATION_MINUTE", "60"))
"""Seconds per minute. The demonstration uses shorter minutes."""
COOLDOWN = float(os.environ.get("RECONCILIATION_COOLDOWN", "300"))
"""Seconds without requests after a breaker has opened."""

PLATFORMS = ("clicktube", "instapix", "snapreel", "tiktalk")
CAPACITY = 5000
"""Maximum number of waiting reports per platform; above it a submission is refused with 429."""
CAP = 4
"""Maximum number of requests to one platform at a time, over all workers, so that a slow platform does not
delay others."""
LOOKS: dict[Status, tuple[float, int]] = {"missing": (30.0, 5), "incomplete": (15.0, 1)}
"""Minutes until the next request (times the number of the request), and the maximum number of requests."""

app = towpath.App(f"sqlite:///{DATABASE}")


def reconcile(
    report: str, affiliate: str, platform: str, post: str, views: int, clicks: int, conversions: int
) -> dict[str, Any]:
    verdict = rules.classify(Numbers(views, clicks, conversions), fetch(platform, post))
    if verdict.status in LOOKS:
        look_again(verdict.status)
    row = {
        "report": report,
        "affiliate": affiliate,
        "post": post,
        "views": views,
        "clicks": clicks,
        "conversions": conversions,
    }
    now = app.engine.clock.now() // 1_000_000
    # The row, the trust and the end of the job are one transaction, so a killed worker leaves all or nothing.
    current().commit(lambda db: store.record(db, row, verdict, now))
    return {"status": verdict.status, "worst": verdict.worst}


def queue_of(platform: str) -> str:
    return f"reports/{platform}"


def task_for(platform: str) -> Task[..., dict[str, Any]]:
    """Each platform has its own queue, breaker and limit."""
    app.resource(platform, min=1, max=CAP)
    options = app.task(
        name=f"reconcile.{platform}",
        queue=queue_of(platform),
        breaker=Breaker(platform, failures=5, window=60, cooldown=COOLDOWN, probes=2),
        resource=platform,
        max_attempts=20,
        # Half a minute at first, so that one post that always fails cannot open the breaker by itself.
        backoff=Policy(default=Exponential(base=MINUTE / 2, factor=2.0, cap=10 * MINUTE)),
    )
    return options(reconcile)


TASKS = {platform: task_for(platform) for platform in PLATFORMS}


def fetch(platform: str, post: str) -> Numbers:
    url = f"{ADDRESS}/{platform}/posts/{urllib.parse.quote(post, safe='')}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return Numbers(**json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return Numbers(None, None, None)
            if error.code == 429:
                raise Retry(
                    f"{platform} limits the rate of requests", after=retry_after(error), throttled=True
                ) from None
            if error.code < 500:
                raise Fail(f"{platform} rejects the key: {error}") from None
            raise ConnectionError(f"{platform} is unavailable: {error}") from None


def retry_after(error: urllib.error.HTTPError) -> float | None:
    """The seconds of Retry-After; None for a date, which would depend on another clock."""
    seconds = error.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else None


def look_again(status: Status) -> None:
    """Snooze the job, unless this was the last request. The number of requests is stored in the job's state,
    so it survives the worker."""
    minutes, most = LOOKS[status]
    state = current().state
    looks = (state.value or {}).get(status, 0) + 1
    if looks <= most:
        state.save({**(state.value or {}), status: looks})
        raise Snooze(for_=minutes * looks * MINUTE)


def prepare() -> None:
    """Create the tables and set the limits, once before anything else."""
    store.connect(DATABASE).close()
    for platform in PLATFORMS:
        app.queue(queue_of(platform)).configure(capacity=CAPACITY, warn_depth=CAPACITY // 5, cap=CAP)


def submit(db: apsw.Connection, report: dict[str, Any], evidence: bool = False) -> dict[str, Any]:
    """Enqueue the job of a report. Its id is derived from the report, so that a repeated submission creates
    no second job. Raises `QueueFull`."""
    claimed = Numbers(report["views"], report["clicks"], report["conversions"])
    odd = rules.flags(claimed, store.previous(db, report["post"]), evidence)
    urgency = rules.priority(store.trust(db, report["affiliate"]), odd)
    task = TASKS[report["platform"]]
    call = task.options(id=f"report/{report['report']}", priority=urgency, correlation_id=report["report"])
    job = call.enqueue(**report)
    return {"report": report["report"], "job": job.id, "priority": urgency, "flags": odd}
