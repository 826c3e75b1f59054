"""`doctor`: settings, versions, facts of the ledger, and findings with advice."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from towpath import Ledger, State, open_ledger
from towpath.cli import version as towpath_version
from towpath.cli.base import OK, REFUSED, Session, as_failure, command, join_names, pass_session
from towpath.cli.maintenance import find_problems
from towpath.cli.output import format_pairs, format_span, print_result
from towpath.cli.targets import check_slashes, server_has_ledger
from towpath.cli.values import now
from towpath.commands import Query, QueueView
from towpath.errors import TowpathError
from towpath.escapes import without_password
from towpath.operations.places import advice_above, file_of, is_missing, is_server
from towpath.settings import NAMES, SPANS, Settings, resolve


class Finding(msgspec.Struct, frozen=True):
    """A problem and what to do about it. A `grave` finding makes the exit code 1."""

    what: str
    advice: str
    grave: bool = False


MAX_CLOCK_SKEW = 1.0
"""Seconds between the clocks of this machine and of the server above which a finding is reported."""
LONG_LOCK = 2.0
"""Seconds of holding the lock on keys, groups and notes above which a finding is reported. A batch holds it
for milliseconds."""
MANY_TALLIES = 20_000
"""Rows of counts above which a finding is reported. Every read of a queue adds them up; upkeep keeps
fewer."""


def server_facts(url: str) -> dict[str, Any]:
    from towpath.operations import maintenance

    found = maintenance.health(url)
    why = found.pop("wakes")
    return {**found, "wake_ups": f"by polling: {why}" if why else "by LISTEN and NOTIFY"}


def server_findings(health: dict[str, Any]) -> Iterator[Finding]:
    """Findings of a PostgreSQL server; none for other ledgers."""
    if "server" not in health:
        return
    yield from _lock_findings(health)
    yield from _durability_findings(health)
    yield from _vacuum_findings(health)
    if health["missing_rights"]:
        advice = (
            "Make the role the owner of the schema and everything in it, or grant these rights; "
            "docs/deploy-postgres.md has the statements."
        )
        yield Finding(
            f"The role {health['user']} lacks {', '.join(health['missing_rights'][:8])}.", advice, grave=True
        )
    if "NOTIFY did not arrive" in health["wake_ups"]:
        advice = (
            "If a pooler between this machine and the server drops notifications, add ?pooled=true to the "
            "URL. For fast wake-ups connect directly."
        )
        yield Finding(
            "Notifications do not arrive, so workers find new jobs only by polling, every five seconds.",
            advice,
        )
    elif "does not say so" in health["wake_ups"]:
        advice = (
            "Add ?pooled=true to the URL to skip the test at every start, or connect directly for fast "
            "wake-ups."
        )
        yield Finding(
            f"Wake-ups are {health['wake_ups']}. A job may wait up to one second before it starts.", advice
        )
    elif health["wake_ups"].startswith("by polling"):
        advice = (
            "A job may wait up to one second before it starts. With a direct connection, or a pooler in "
            "session mode, it starts within milliseconds."
        )
        yield Finding(f"Wake-ups are {health['wake_ups']}.", advice)
    if abs(health["ahead"]) > MAX_CLOCK_SKEW:
        ahead = "ahead of" if health["ahead"] > 0 else "behind"
        advice = (
            "Leases and delays use the server's clock, so no job is affected. Synchronize the clocks, or "
            "times in logs will not match."
        )
        span = format_span(abs(round(health["ahead"] * 1_000_000)))
        yield Finding(f"The server's clock is {span} {ahead} this machine's.", advice)


def _lock_findings(health: dict[str, Any]) -> Iterator[Finding]:
    for each in health["lock_holders"]:
        if each["seconds"] < LONG_LOCK:
            continue
        session = (
            f"{each['application'] or 'A session'} (process {each['pid']} of the server, from "
            f"{each['host']}, {each['state']})"
        )
        held = (
            "has held the lock on keys, groups and notes for "
            f"{format_span(round(each['seconds'] * 1_000_000))}"
        )
        advice = (
            "Its process is frozen, or a commit function is slow. The server ends the session after "
            f"`idle_timeout`; to end it now: SELECT pg_terminate_backend({each['pid']})."
        )
        yield Finding(
            f"{session} {held}; {each['waiting']} sessions wait for it.", advice, grave=each["waiting"] > 0
        )


def _durability_findings(health: dict[str, Any]) -> Iterator[Finding]:
    for name in ("fsync", "full_page_writes"):
        if health[name] == "off":
            advice = f"Set {name} = on in postgresql.conf, unless the whole database may be lost."
            yield Finding(f"{name} is off: a crash of the machine can destroy the whole database.", advice)
    if health["synchronous_commit"] == "off":
        advice = (
            "Set synchronous_commit = on for this role or database, so that acknowledged commits are on disk."
        )
        yield Finding("synchronous_commit is off: a crash can lose the last acknowledged jobs.", advice)


def _vacuum_findings(health: dict[str, Any]) -> Iterator[Finding]:
    if "off" in (health["autovacuum"], health["track_counts"]):
        advice = (
            "Set autovacuum = on and track_counts = on, or run `towpath ledger vacuum` every few minutes."
        )
        yield Finding(
            "autovacuum is off: the tables grow with every job, and claims become slower.", advice, grave=True
        )
    for each in health["long_transactions"]:
        session = (
            f"{each['application'] or 'a session'} ({each['user']}, process {each['pid']}, {each['state']})"
        )
        advice = (
            f"End it: SELECT pg_terminate_backend({each['pid']}). Until then vacuum cannot remove rows "
            "deleted since its start."
        )
        yield Finding(
            f"A transaction of {session} has been open for {format_span(each['seconds'] * 1_000_000)}.",
            advice,
        )
    if health["tallies"] > MANY_TALLIES:
        advice = "A running worker merges them; without a worker run `towpath ledger vacuum`."
        yield Finding(f"{health['tallies']:,} rows of counts are not merged yet.", advice)


STALE_READY = 60_000_000
"""Microseconds after which a ready job in a queue without running jobs is reported as having no worker."""
OLD_READY = 3_600_000_000
LARGE_WAL = 64 * 1024 * 1024
"""Bytes of write-ahead log above which a finding is reported. Checkpoints keep it shorter, unless a long read
transaction prevents them."""
MAX_CLOCK_LAG = 5_000_000
"""Microseconds that the ledger's time may be ahead of the clock before a finding is reported."""
CARETAKER = "towpath/caretaker"
MAX_CHECKED_JOBS = 200_000
"""Number of jobs up to which the whole ledger is verified; above it only `towpath check` does so."""


@command("doctor")
@pass_session
def doctor(session: Session, /) -> int:
    """Check settings and ledger, and report problems with advice.

    Prints the settings with their origins, versions, facts of the ledger, and findings. Exit code 1 if a
    finding needs action, 4 if the ledger cannot be opened."""
    settings = resolve(session.url)
    check_slashes(settings.url, _origin(session, settings, "url"))
    health, findings, code = _inspect_url(settings)
    if code == OK and any(finding.grave for finding in findings):
        code = REFUSED
    values = {name: getattr(settings, name) for name in NAMES} | {"url": without_password(settings.url)}
    sourced = {name: {"value": values[name], "from": _origin(session, settings, name)} for name in NAMES}
    data = {
        "settings": sourced,
        "versions": versions(),
        "ledger": health,
        "findings": findings,
        "ok": code == OK,
    }
    print_result(session.json, data, lambda: _format_report(sourced, health, findings))
    return code


def _origin(session: Session, settings: Settings, name: str) -> str:
    return "--url" if name == "url" and session.url is not None else settings.origins[name]


_OF_TASKS = "the queues of the app's tasks"


def _format_report(sourced: dict[str, Any], health: dict[str, Any], findings: list[Finding]) -> list[str]:
    sourced = {**sourced, "queues": {**sourced["queues"], "value": sourced["queues"]["value"] or _OF_TASKS}}
    settings = {name: f"{_format_value(each['value'])}  ({each['from']})" for name, each in sourced.items()}
    for name in SPANS:
        settings[name] = f"{sourced[name]['value']:g} s  ({sourced[name]['from']})"
    facts = {name: _format_value(value) for name, value in health.items()}
    lines = [
        "Settings",
        *format_pairs(settings),
        "",
        "Versions",
        *format_pairs(versions()),
        "",
        "Ledger",
        *format_pairs(facts),
        "",
    ]
    if not findings:
        return [*lines, "No problems found."]
    lines.append("Findings")
    for finding in findings:
        lines += [f"{'!' if finding.grave else '-'} {finding.what}", f"  {finding.advice}"]
    return lines


def _format_value(value: object) -> object:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    return "none" if value is None else value


def versions() -> dict[str, str]:
    found = {
        "towpath": towpath_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in ("apsw", "psycopg", "msgspec", "click", "rich"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    # A wheel of apsw contains the SQLite of the same version.
    found["sqlite"] = ".".join(found["apsw"].split(".")[:3])
    return found


def _inspect_url(settings: Settings) -> tuple[dict[str, Any], list[Finding], int]:
    """(facts, findings, exit code) of the ledger at this URL. A missing ledger is not created."""
    path = file_of(settings.url)
    if settings.url.startswith("memory:"):
        advice = (
            "Only its own process can use it, and it is lost when that process ends. Use sqlite:///work.db."
        )
        return {"state": "in memory"}, [Finding("The ledger is in memory.", advice)], OK
    if path is not None and is_missing(path):
        advice = (
            "The first `towpath put`, `towpath enqueue` or worker creates it. If it should exist, check the "
            "URL above."
        )
        facts = {"state": "not there yet", "file": str(path.absolute())}
        above = advice_above(settings.url)
        return facts, [Finding(f"There is no ledger at {path.absolute()}.", above or advice)], OK
    try:
        if is_server(settings.url) and not server_has_ledger(settings.url):
            advice = (
                "`towpath ledger migrate`, the first `towpath put`, `towpath enqueue` or worker creates it. "
                "If it should exist, check the URL above."
            )
            return (
                {"state": "not there yet"},
                [Finding(f"There is no ledger in {without_password(settings.url)}.", advice)],
                OK,
            )
        ledger = open_ledger(settings.url)
        try:
            return _inspect_ledger(ledger, settings)
        finally:
            ledger.close()
    except TowpathError as error:
        failure = as_failure(error)
        return {"state": "unavailable"}, [Finding(failure.message, failure.step, grave=True)], failure.code


def _inspect_ledger(ledger: Ledger, settings: Settings) -> tuple[dict[str, Any], list[Finding], int]:
    queues, at = ledger.queues(), now()
    total = {state.value: sum(getattr(view.counts, state) for view in queues.values()) for state in State}
    jobs, caretaker = sum(total.values()), ledger.note(CARETAKER)
    health: dict[str, Any] = {"state": "open", "queues": len(queues), "jobs": jobs, **total}
    health["caretaker"] = "a running worker" if caretaker is not None else "no worker is running"
    health |= server_facts(settings.url) if is_server(settings.url) else _file_facts(settings)
    at = health.get("time", at)
    findings = [
        *_queue_findings(list(queues.values()), at, alive=caretaker is not None),
        *_lease_findings(ledger, at),
    ]
    findings += [
        *_clock_findings(_last_written(ledger) - at),
        *_file_findings(health),
        *server_findings(health),
    ]
    if jobs <= MAX_CHECKED_JOBS:
        problems = find_problems(ledger)
        health["recounted"] = "no problems" if not problems else f"{len(problems)} problems"
        advice = "Stop every process, keep a copy, restore a backup."
        findings += [Finding(problem, advice, grave=True) for problem in problems[:20]]
    else:
        health["recounted"] = "skipped, the ledger is large; run `towpath check`"
    return health, findings, OK


def _file_facts(settings: Settings) -> dict[str, Any]:
    path = file_of(settings.url)
    if path is None:
        return {}
    from importlib.resources import files

    known = [
        entry.name
        for entry in (files("towpath.ledger") / "sql" / "sqlite").iterdir()
        if entry.name[:4].isdigit()
    ]
    from towpath.operations import maintenance

    return {
        "file": str(path.resolve()),
        "bytes": path.stat().st_size,
        **maintenance.health(settings.url),
        "schema": f"{len(known)} (current for this version)",
    }


def _file_findings(health: dict[str, Any]) -> Iterator[Finding]:
    if health.get("wal_bytes", 0) <= LARGE_WAL:
        return
    advice = "No process reads from it now. The next commits of a Towpath process will shorten it."
    if readers := health["log_readers"]:
        advice = (
            "A long read transaction prevents its restart. End the transaction; it is in "
            f"{' or '.join(readers)}."
        )
    elif readers is None:
        advice = "A long read transaction prevents its restart. Find the transaction and end it."
    yield Finding(f"The write-ahead log has {health['wal_bytes']:,} bytes.", advice)


def _queue_findings(queues: list[QueueView], at: int, alive: bool) -> Iterator[Finding]:
    for view in sorted(queues, key=lambda view: view.name):
        age = 0 if view.oldest_ready is None else at - view.oldest_ready
        if view.paused:
            why = f" ({view.why})" if view.why else ""
            advice = f"To resume it: `towpath queues resume {view.name}`."
            if not sum(getattr(view.counts, state) for state in State):
                advice = f"It never had a job; check the name. {advice}"
            yield Finding(f"Queue {view.name} is paused{why}; {view.counts.waiting} jobs wait.", advice)
        elif view.next_at > at + STALE_READY:
            yield Finding(
                f"Queue {view.name} starts no job for another {format_span(view.next_at - at)} "
                "(--not-before).",
                f"To start now: `towpath queues set {view.name} --not-before 0`.",
            )
        elif view.counts.ready and age > STALE_READY and not view.counts.running:
            advice = (
                "A worker is running, but does not consume this queue: check its --queues."
                if alive
                else "Start a worker: towpath worker module:app"
            )
            yield Finding(
                f"Queue {view.name}: {view.counts.ready} ready, the oldest for {format_span(age)}, and no "
                "worker claims them.",
                advice,
                grave=True,
            )
        elif age > OLD_READY:
            advice = f"Start more workers, raise --concurrency, or raise --cap of {view.name}."
            yield Finding(
                f"Queue {view.name}: the oldest ready job has waited for {format_span(age)}.", advice
            )
        if view.capacity is not None and view.counts.waiting >= view.capacity:
            advice = (
                f"New jobs are refused. Start more workers, or `towpath queues set {view.name} --capacity N`."
            )
            yield Finding(
                f"Queue {view.name} is full: {view.counts.waiting} of {view.capacity}.", advice, grave=True
            )
    dead = {view.name: view.counts.failed for view in queues if view.counts.failed}
    if dead:
        advice = (
            "`towpath dead list` shows the errors; `towpath dead retry --queue NAME` retries them, `towpath "
            "dead purge` deletes them."
        )
        count = sum(dead.values())
        letters = "dead letter" if count == 1 else "dead letters"
        yield Finding(f"{count} {letters} in {join_names(sorted(dead))}.", advice)


def _lease_findings(ledger: Ledger, at: int) -> Iterator[Finding]:
    running = ledger.find(Query(states=(State.RUNNING,), oldest_first=True, bodies=False, limit=1000)).jobs
    lost = [job for job in running if job.lease_until is not None and job.lease_until < at - STALE_READY]
    if lost:
        advice = (
            "Their workers ended and no caretaker runs. Start a worker, or run `towpath get`: either "
            "returns these jobs to their queues."
        )
        yield Finding(f"{len(lost)} leases expired more than a minute ago.", advice, grave=True)


def _last_written(ledger: Ledger) -> int:
    """The time of the last commit by the ledger's clock; 0 if this kind of ledger does not store it."""
    last: int = getattr(ledger, "last", int)()
    return last


def _clock_findings(ahead: int) -> Iterator[Finding]:
    if ahead > MAX_CLOCK_LAG:
        advice = (
            "The clock of this machine was set back. Until it catches up, delays do not pass and leases do "
            "not expire."
        )
        yield Finding(f"The ledger's time is {format_span(ahead)} ahead of the clock.", advice)
