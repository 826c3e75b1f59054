"""The application's own tables. They are in the ledger's file, so that the end of a job and its effect on an
affiliate are one commit.

`apsw` and not `sqlite3`: two SQLite libraries on one file in one process can lose commits.
"""

from __future__ import annotations

from typing import Any

import apsw

from .rules import START, Numbers, Verdict, trust_after

TABLES = """
CREATE TABLE IF NOT EXISTS affiliate (name TEXT PRIMARY KEY, trust REAL NOT NULL);
CREATE TABLE IF NOT EXISTS reconciliation (
    report TEXT PRIMARY KEY, affiliate TEXT NOT NULL, post TEXT NOT NULL, status TEXT NOT NULL,
    worst REAL NOT NULL,
    views INTEGER, clicks INTEGER, conversions INTEGER, trust REAL NOT NULL, at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS alert (report TEXT PRIMARY KEY, kind TEXT NOT NULL, severity TEXT NOT NULL);
"""
REPEATED = 6 * 3600
"""Seconds within which a second high discrepancy of the same affiliate is critical."""


def connect(path: str) -> apsw.Connection:
    db = apsw.Connection(path)
    db.set_busy_timeout(10_000)
    db.execute(TABLES)
    return db


def trust(db: apsw.Connection, affiliate: str) -> float:
    found = db.execute("SELECT trust FROM affiliate WHERE name = ?", (affiliate,)).get
    # Not `found or START`, because 0 is a valid trust.
    return START if found is None else float(found)


def previous(db: apsw.Connection, post: str) -> Numbers | None:
    """The claim of the last report on this post."""
    sql = "SELECT views, clicks, conversions FROM reconciliation WHERE post = ? ORDER BY at DESC LIMIT 1"
    row = db.execute(sql, (post,)).fetchone()
    return None if row is None else Numbers(*row)


def record(db: apsw.Connection, report: dict[str, Any], verdict: Verdict, now: int) -> None:
    """Record the verdict on a report and its effect on trust, in the transaction that ends the job. A second
    job for the same report finds the row and changes nothing."""
    after = trust_after(trust(db, report["affiliate"]), verdict.status)
    db.execute(
        "INSERT INTO reconciliation VALUES (:report, :affiliate, :post, :status, :worst, :views, "
        ":clicks, :conversions, :trust, :at)"
        " ON CONFLICT DO NOTHING",
        {**report, "status": verdict.status, "worst": verdict.worst, "trust": after, "at": now},
    )
    if db.changes() == 0:
        return
    sql = "INSERT INTO affiliate VALUES (?, ?) ON CONFLICT DO UPDATE SET trust = excluded.trust"
    db.execute(sql, (report["affiliate"], after))
    alert = _alert(db, report, verdict, now)
    if alert is not None:
        db.execute("INSERT INTO alert VALUES (?, ?, ?)", (report["report"], *alert))


def _alert(db: apsw.Connection, report: dict[str, Any], verdict: Verdict, now: int) -> tuple[str, str] | None:
    if verdict.status == "overclaimed":
        return "fraud", "critical" if verdict.critical else "high"
    if verdict.status == "high":
        sql = (
            "SELECT count(*) FROM reconciliation WHERE affiliate = ? AND status = 'high' AND at > ? "
            "AND report <> ?"
        )
        repeated = db.execute(sql, (report["affiliate"], now - REPEATED, report["report"])).get
        return "discrepancy", "critical" if repeated else "high"
    return ("health", "medium") if verdict.status == "missing" else None
