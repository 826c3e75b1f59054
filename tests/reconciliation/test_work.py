"""The application with real platforms over HTTP and a manual clock: each failure and its effect."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from email.message import Message
from pathlib import Path
from typing import Any

import apsw
import pytest
from reconciliation import store, work
from reconciliation.api import Api
from reconciliation.platforms import Platform, Simulator
from reconciliation.rules import Numbers

from towpath import JobHandle, Reason, State
from towpath.testing.app import Bench

MINUTES = 60
ONE, TWO = work.PLATFORMS[:2]


class Stage:
    """Two of the platforms, the application on a bench, and its tables."""

    def __init__(self, bench: Bench, platforms: dict[str, Platform]) -> None:
        self.bench = bench
        self.one, self.two = platforms[ONE], platforms[TWO]
        self.db = bench.database

    def submit(
        self, id: str = "r1", platform: str = ONE, affiliate: str = "ada", **numbers: int
    ) -> JobHandle[Any]:
        post = f"post-{id}"
        claimed = {"views": 1000, "clicks": 100, "conversions": 10, **numbers}
        report = {"report": id, "affiliate": affiliate, "platform": platform, "post": post, **claimed}
        for each in (self.one, self.two):
            each.posts.setdefault(post, Numbers(1000, 100, 10))
        return work.app.job(work.submit(self.db, report)["job"])

    def trust(self, affiliate: str = "ada") -> float:
        return store.trust(self.db, affiliate)

    def rows(self, table: str = "reconciliation") -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.db.execute(f"SELECT * FROM {table} ORDER BY 1")]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    platforms = {ONE: Platform(), TWO: Platform()}
    with Simulator(platforms) as simulator, work.app.testing(database=True) as bench:
        monkeypatch.setattr(work, "ADDRESS", simulator.url)
        bench.database.execute(store.TABLES)
        yield Stage(bench, platforms)


def test_a_report_is_reconciled(stage: Stage) -> None:
    honest, cheat = stage.submit("r1"), stage.submit("r2", affiliate="eve", views=1600)
    stage.bench.drain()
    assert (honest.result(), cheat.result()["status"]) == ({"status": "matched", "worst": 0.0}, "overclaimed")
    assert (stage.trust("ada"), stage.trust("eve")) == (0.51, 0.4)
    assert stage.rows("alert") == [("r2", "fraud", "critical")]


def test_the_same_report_again(stage: Stage) -> None:
    first, again = stage.submit("r1"), stage.submit("r1")
    assert first.id == again.id
    stage.bench.drain()
    # A second request under another id: the key of the row is the second guard.
    row = {
        "report": "r1",
        "affiliate": "ada",
        "platform": ONE,
        "post": "post-r1",
        "views": 1,
        "clicks": 1,
        "conversions": 1,
    }
    work.TASKS[ONE].enqueue(**row)
    stage.bench.drain()
    assert (len(stage.rows()), stage.trust()) == (1, 0.51)


def test_missing_numbers(stage: Stage) -> None:
    """They are requested again, at the times of the rules."""
    stage.one.unknown_for["post-r1"] = 2
    job = stage.submit("r1")
    stage.bench.drain()
    assert (job.status().state, job.status().reason) == (State.SCHEDULED, Reason.SNOOZED)
    for minutes, asked in ((29, 1), (2, 2), (58, 2), (2, 3)):
        stage.bench.advance(minutes * MINUTES)
        assert len(stage.one.asked) == asked
    assert job.result()["status"] == "matched"
    assert job.status().failures == 0


def test_missing_for_good(stage: Stage) -> None:
    stage.one.unknown_for["post-r1"] = 1000
    job = stage.submit("r1")
    stage.bench.advance(24 * 60 * MINUTES)
    assert job.result()["status"] == "missing"
    assert (len(stage.one.asked), stage.trust()) == (6, 0.5)
    assert stage.rows("alert") == [("r1", "health", "medium")]


def test_some_numbers(stage: Stage) -> None:
    stage.one.posts["post-r1"] = Numbers(1000, None, 10)
    job = stage.submit("r1")
    stage.bench.drain()
    assert len(stage.one.asked) == 1
    stage.one.posts["post-r1"] = Numbers(1000, 100, 10)
    stage.bench.advance(16 * MINUTES)
    assert job.result()["status"] == "matched"


def test_one_platform_down(stage: Stage) -> None:
    """Its breaker opens: waiting reports are not touched, failed ones wait with them, the other platform
    works."""
    stage.one.down = True
    held = [stage.submit(f"a{n}", ONE) for n in range(30)]
    others = [stage.submit(f"b{n}", TWO) for n in range(30)]
    stage.bench.drain()
    assert {job.status().state for job in others} == {State.DONE}
    assert len(stage.one.asked) == 5
    assert {(job.status().state, job.status().reason) for job in held[:5]} == {
        (State.SCHEDULED, Reason.RETRY)
    }
    assert "is unavailable" in (held[0].status().error or "")
    assert {(job.status().state, job.status().attempts) for job in held[5:]} == {(State.READY, 0)}
    assert str(held[9].explain()).endswith("(5 failures in 60 s)")
    # Two probes after five minutes, of which one fails; that is all that an hour costs.
    stage.bench.advance(60 * MINUTES)
    assert len(stage.one.asked) <= 5 + 2 * 12
    stage.one.down = False
    stage.bench.advance(10 * MINUTES)
    assert {job.status().state for job in held} == {State.DONE}
    assert work.app.breakers.phase(ONE) == "closed"
    assert stage.trust() == 1.0


def test_a_post_that_always_fails(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not close the platform for the others."""
    real = work.fetch

    def fetch(platform: str, post: str) -> Numbers:
        if post == "post-bad":
            raise ConnectionError("this one, always")
        return real(platform, post)

    monkeypatch.setattr(work, "fetch", fetch)
    bad = stage.submit("bad")
    for n in range(60):
        stage.bench.advance(MINUTES)
        assert stage.submit(f"r{n}").status().state is State.READY
    stage.bench.drain()
    assert bad.status().failures > 5
    assert len(stage.rows()) == 60
    assert {each.trips for each in work.app.breakers.list()} == {0}


def test_too_many_requests(stage: Stage) -> None:
    """The request is repeated after the given time. The platform is not down: its breaker stays closed."""
    stage.one.per_second = 0
    jobs = [stage.submit(f"r{n}") for n in range(10)]
    stage.bench.drain()
    assert {(job.status().reason, job.status().failures) for job in jobs} == {(Reason.RETRY, 1)}
    assert "clicktube limits the rate of requests" in (jobs[0].status().error or "")
    assert stage.one.answered[429] == 10
    stage.one.per_second = None
    stage.bench.advance(1.1)
    assert {job.result()["status"] for job in jobs} == {"matched"}
    assert {each.trips for each in work.app.breakers.list()} == {0}


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), ("0", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-1", None)]
)
def test_retry_after(header: str, seconds: float | None) -> None:
    headers = Message()
    headers["Retry-After"] = header
    assert work.retry_after(urllib.error.HTTPError("http://x", 429, "too many", headers, None)) == seconds


def test_a_refusal_is_a_dead_letter(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The dead letter is listed with its error, and retried when the key is right."""
    stage.one.status = 403
    job = stage.submit("r1")
    stage.bench.drain()
    status = job.status()
    assert (status.state, status.reason) == (State.FAILED, Reason.FATAL)
    assert "clicktube rejects the key" in (status.error or "")
    assert stage.rows() == []
    stage.one.status = 200
    job.retry()
    stage.bench.drain()
    assert (job.result()["status"], stage.trust()) == ("matched", 0.51)


def test_a_later_job_of_high_priority(stage: Stage) -> None:
    """It is scheduled and not ready: it holds no slot."""
    stage.one.unknown_for["post-odd"] = 1
    odd = stage.submit("odd", views=10)  # more clicks than views
    assert odd.status().priority == 0
    stage.bench.drain()
    assert odd.status().state is State.SCHEDULED
    plain = stage.submit("plain")
    stage.bench.drain()
    assert plain.status().state is State.DONE
    stage.bench.advance(31 * MINUTES)
    assert odd.status().state is State.DONE


def test_suspicious_reports_come_first(stage: Stage) -> None:
    stage.db.execute("INSERT INTO affiliate VALUES ('old friend', 0.9), ('crook', 0.1), ('nobody', 0.0)")
    order: list[tuple[str, str, dict[str, Any]]] = [
        ("f", "old friend", {}),
        ("n", "ada", {}),
        ("c", "crook", {}),
        ("z", "nobody", {}),
        ("o", "ada", {"views": 60_000}),
    ]
    for id, affiliate, numbers in order:
        stage.submit(id, affiliate=affiliate, **numbers)
    stage.bench.drain()
    assert [post.removeprefix("post-") for post in stage.one.asked] == ["c", "z", "o", "n", "f"]


def call(url: str, body: object = None) -> tuple[int, Any, str | None]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as answer:
            return answer.status, json.load(answer), None
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), error.headers.get("Retry-After")


@pytest.fixture
def api(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = Path(stage.db.filename)
    monkeypatch.setattr(work, "DATABASE", str(path))
    with Api() as api:
        yield api.url


REPORT = {
    "report": "r1",
    "affiliate": "ada",
    "platform": ONE,
    "post": "p",
    "views": 10,
    "clicks": 1,
    "conversions": 0,
}


def test_the_api(stage: Stage, api: str) -> None:
    stage.one.posts["p"] = Numbers(10, 1, 0)
    status, answer, _ = call(f"{api}/reports", REPORT)
    assert (status, answer["priority"], answer["flags"]) == (202, "normal", [])
    assert "ready" in call(f"{api}/reports/r1")[1]["why"]
    queues = call(f"{api}/queues")[1]
    assert (list(queues), queues[ONE]) == (
        list(work.PLATFORMS),
        {"depth": 1, "ready": 1, "scheduled": 0, "running": 0},
    )
    stage.bench.drain()
    assert call(f"{api}/reports/r1")[1]["state"] == "done"
    assert call(f"{api}/affiliates/ada")[1]["trust"] == 0.51
    assert call(f"{api}/reports/r2")[0] == call(f"{api}/else")[0] == call(f"{api}/else", {})[0] == 404


@pytest.mark.parametrize(
    "wrong",
    [
        {"views": -1},
        {"views": "10"},
        {"views": True},
        {"affiliate": ""},
        {"platform": "three"},
        {"post": None},
    ],
)
def test_wrong_reports(stage: Stage, api: str, wrong: dict[str, Any]) -> None:
    status, answer, _ = call(f"{api}/reports", {**REPORT, **wrong})
    assert (status, answer["field"]) == (400, next(iter(wrong)))
    assert call(f"{api}/reports", [1])[0] == 400
    assert {each["depth"] for each in call(f"{api}/queues")[1].values()} == {0}


def test_too_much_is_refused(stage: Stage, api: str) -> None:
    """The queue has a capacity: a refused caller gets a time, and its repeated request succeeds."""
    stage.one.posts["p"] = Numbers(10, 1, 0)
    work.app.queue(work.queue_of(ONE)).configure(capacity=2)
    answers = [call(f"{api}/reports", {**REPORT, "report": f"r{n}"}) for n in range(3)]
    assert [status for status, _, _ in answers] == [202, 202, 429]
    assert answers[2][2] == "1"
    assert call(f"{api}/reports/r2")[0] == 404
    stage.bench.drain()
    assert call(f"{api}/reports", {**REPORT, "report": "r2"})[0] == 202


def test_the_tables_are_made_once(tmp_path: Path) -> None:
    for _ in range(2):
        with closing(store.connect(str(tmp_path / "work.db"))) as db:
            assert isinstance(db, apsw.Connection)
            assert store.trust(db, "ada") == 0.5
