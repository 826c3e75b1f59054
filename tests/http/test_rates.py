"""The rate of requests of each client."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.waiting import until
from tests.support.wire import serving
from towpath import App, Rate
from towpath.clock import SystemClock
from towpath.http import rates
from towpath.http.access import Grant, Right
from towpath.http.problems import Problem
from towpath.http.rates import RequestRates, peer_of
from towpath.http.tokens import create_token
from towpath.ledger import open_ledger


def allowed(limiter: RequestRates, client: str, times: list[float]) -> list[bool]:
    found = []
    for now in times:
        try:
            limiter.spend(client, now)
        except Problem:
            found.append(False)
        else:
            found.append(True)
    return found


def test_a_bucket() -> None:
    limiter = RequestRates(Rate(2, 1.0))
    assert allowed(limiter, "a", [0, 0, 0, 0.4, 0.5, 0.5, 5, 5, 5]) == [
        *(True, True, False, False, True, False, True, True, False)
    ]
    assert allowed(limiter, "b", [0, 0, 0]) == [True, True, False]
    larger = RequestRates(Rate(2, 1.0, burst=4))
    assert allowed(larger, "a", [0] * 5) == [True] * 4 + [False]


def test_the_wait_is_in_the_answer() -> None:
    limiter = RequestRates(Rate(1, 60.0))
    limiter.spend("a", 0)
    with pytest.raises(Problem) as caught:
        limiter.spend("a", 10.5)
    assert caught.value.envelope.retry_after_seconds == 50
    limiter.spend("a", 60)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_CLIENTS", 10)
    limiter = RequestRates(Rate(1, 60.0))
    for number in range(100):
        limiter.spend(str(number), 0)
        assert len(limiter._next) <= 10
    assert allowed(limiter, "99", [1]) == [False]


def test_peers() -> None:
    assert peer_of(None) == "local"
    assert peer_of(("10.0.0.1", 1)) == peer_of(("::ffff:10.0.0.1", 2)) == "10.0.0.1"
    assert peer_of(("2001:db8::1", 1)) == peer_of(("2001:db8::ffff:2", 1)) != peer_of(("2001:db8:0:1::1", 1))
    assert peer_of(("fe80::1%eth0", 1)) == "fe80::/64"


def test_a_server_with_a_rate() -> None:
    with App("memory://") as app, serving(app, rate=Rate(3, 60.0)) as remote:
        statuses = [remote.call("queue/stats", queue="a").status for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        answer = remote.post("/v1/queue/stats", b"{}", {"X-Forwarded-For": "10.0.0.9"})
        assert answer.error == "throttled"
        assert 1 <= int(answer.headers["retry-after"]) <= 20
        assert answer.headers["x-lockd-qrf-state"] == "engaged"
        assert remote.post("/healthz").status == 200


def test_tokens_have_rates_of_their_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    grants = [Grant(frozenset({Right.CONSUME}))]
    with closing(open_ledger(url)) as ledger:
        tokens = [create_token(ledger, name, grants, SystemClock().now())[1] for name in ("a", "b")]
    with App(url) as app, serving(app, rate=Rate(2, 60.0), require_token=True) as remote:
        for token in tokens:
            client = remote.client(token)
            assert [client.call("queue/stats", queue="a").status for _ in range(3)] == [200, 200, 429]
        # Failures count for the address.
        assert [remote.call("queue/stats", queue="a").status for _ in range(3)] == [401, 401, 429]
        assert remote.client(tokens[0]).call("queue/stats", queue="a").status == 429
        until(lambda: not remote.connections())
