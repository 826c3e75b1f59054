"""What the doctor sees of a PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from towpath.cli.findings import Finding
from towpath.cli.output import spell

SKEW = 1.0
"""How many seconds the clocks of this machine and of the server may be apart without a word."""
LONG_LOCK = 2.0
"""Seconds that a session may hold the lock on relations without a finding. A batch takes milliseconds."""
MANY_TALLIES = 20_000
"""More rows of counts than upkeep leaves: every look at a queue adds them up."""


def server_facts(url: str) -> dict[str, Any]:
    from towpath.operations import maintenance

    found = maintenance.health(url)
    why = found.pop("wakes")
    return {**found, "wake_ups": f"by polling: {why}" if why else "by LISTEN and NOTIFY"}


def of_server(health: dict[str, Any]) -> Iterator[Finding]:
    """Nothing for a ledger that has no server."""
    if "server" not in health:
        return
    yield from _of_locks(health)
    yield from _of_durability(health)
    yield from _of_sweeping(health)
    if health["missing_rights"]:
        advice = "Let the role own the schema and all in it, or grant these; docs/deploy-postgres.md has the statements."
        yield Finding(f"The role {health['user']} lacks {', '.join(health['missing_rights'][:8])}.", advice, grave=True)
    if "NOTIFY did not arrive" in health["wake_ups"]:
        advice = (
            "If something between here and the server swallows them, say ?pooled=true; for quick wake-ups connect directly."
        )
        yield Finding("Wake-ups do not arrive, so workers find new jobs only when they look, once in five seconds.", advice)
    elif "does not say so" in health["wake_ups"]:
        advice = (
            "Say so with ?pooled=true, and nothing need be tried out at every start; or connect directly for quick pick-up."
        )
        yield Finding(f"Wake-ups are {health['wake_ups']}. Pick-up takes up to a second.", advice)
    elif health["wake_ups"].startswith("by polling"):
        advice = "Pick-up takes up to a second. A direct connection, or a pooler in session mode, makes it a few milliseconds."
        yield Finding(f"Wake-ups are {health['wake_ups']}.", advice)
    if abs(health["ahead"]) > SKEW:
        ahead = "ahead of" if health["ahead"] > 0 else "behind"
        advice = "Leases and delays go by the server's clock, so nothing is lost; set the clocks right, or logs and dates will puzzle you."
        span = spell(abs(round(health["ahead"] * 1_000_000)))
        yield Finding(f"The server's clock is {span} {ahead} this machine's.", advice)


def _of_locks(health: dict[str, Any]) -> Iterator[Finding]:
    for each in health["lock_holders"]:
        if each["seconds"] < LONG_LOCK:
            continue
        who = (
            f"{each['application'] or 'A session'} (process {each['pid']} of the server, from {each['host']}, {each['state']})"
        )
        held = f"has held the lock on keys, groups and notes for {spell(round(each['seconds'] * 1_000_000))}"
        advice = f"Its process is frozen, or a commit function is slow. The server ends it after `idle_timeout`; or SELECT pg_terminate_backend({each['pid']})."
        yield Finding(f"{who} {held}; {each['waiting']} sessions wait for it.", advice, grave=each["waiting"] > 0)


def _of_durability(health: dict[str, Any]) -> Iterator[Finding]:
    for name in ("fsync", "full_page_writes"):
        if health[name] == "off":
            advice = f"Set {name} = on in postgresql.conf, unless all that is in it may be lost."
            yield Finding(f"{name} is off: a crash of the machine can destroy the whole database.", advice)
    if health["synchronous_commit"] == "off":
        advice = "Set synchronous_commit = on for this role or database: what is acknowledged shall be on disk."
        yield Finding("synchronous_commit is off: a crash can lose the last acknowledged jobs.", advice)


def _of_sweeping(health: dict[str, Any]) -> Iterator[Finding]:
    if "off" in (health["autovacuum"], health["track_counts"]):
        advice = "Set autovacuum = on and track_counts = on, or run `towpath ledger vacuum` every few minutes."
        yield Finding("autovacuum is off: the tables grow with every job, and claims slow down.", advice, grave=True)
    for each in health["long_transactions"]:
        who = f"{each['application'] or 'somebody'} ({each['user']}, process {each['pid']}, {each['state']})"
        advice = f"End it, or SELECT pg_terminate_backend({each['pid']}). Until then nothing that died since can be swept."
        yield Finding(f"A transaction of {who} has been open for {spell(each['seconds'] * 1_000_000)}.", advice)
    if health["tallies"] > MANY_TALLIES:
        advice = "A worker folds them as it goes; without one, `towpath ledger vacuum` does."
        yield Finding(f"{health['tallies']:,} rows of counts wait to be folded.", advice)
