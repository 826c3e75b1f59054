"""breakers, and the gates that explain names."""

from __future__ import annotations

from tests.support.shell import Shell
from towpath import App, Breaker
from towpath.operations.breakers import declare

X = Breaker("platform-x", failures=3, window=60, cooldown=30, probes=2)


def _job(shell: Shell) -> str:
    """A waiting job of a task with a breaker, declared as a worker would."""
    with App(shell.url) as app:

        @app.task(name="fetch", queue="orders", breaker=X)
        def fetch() -> None: ...

        declare(app._registry)
        return fetch.enqueue().id


def test_open_close_and_reset(shell: Shell) -> None:
    id = _job(shell)
    [listed] = shell.run("breakers", "list", "--json").json["breakers"]
    assert (listed["name"], listed["state"], listed["failed"], listed["failures"]) == (
        "platform-x",
        "closed",
        0,
        3,
    )
    assert (listed["window"], listed["cooldown"], listed["probes"], listed["trips"]) == (60.0, 30.0, 2, 0)
    assert listed["gates"] == [{"queue": "orders", "part": "breaker:platform-x"}]
    opened = shell("breakers", "open", "platform-x", "--why", "a migration", "--json").json
    assert (opened["state"], opened["until"], opened["why"], opened["trips"]) == (
        "open",
        None,
        "by hand: a migration",
        1,
    )
    shell("get", "orders", code=3)
    why = shell("jobs", "explain", id).out
    assert "breaker platform-x is open until it is closed by hand (by hand: a migration)" in why
    held = shell("breakers", "open", "platform-x", "--for", "10m", "--json").json
    assert held["until"] is not None
    row = shell("breakers", "list").out.splitlines()[1].split()
    assert row[:3] == ["platform-x", "open", "in"]
    assert "orders breaker:platform-x" in shell("breakers", "list").out
    assert "platform-x is closed" in shell("breakers", "close", "platform-x").out
    assert shell("parts", "list", "orders", "--json").json["parts"][0]["not_before"] is None
    shell("get", "orders")
    assert "platform-x is deleted" in shell("breakers", "reset", "platform-x").out
    assert "no breakers" in shell("breakers", "list").out


def test_a_breaker_with_a_ratio_is_listed_with_its_calls(shell: Shell) -> None:
    with App(shell.url) as app:
        app.task(name="fetch", breaker=Breaker("x", ratio=0.5, volume=10))(print)
        declare(app._registry)
    [listed] = shell("breakers", "list", "--json").json["breakers"]
    assert (listed["ratio"], listed["volume"], listed["calls"], listed["failed"]) == (0.5, 10, 0, 0)
    assert "0 of 0 calls in 60 s, opens at 50%" in shell("breakers", "list").out


def test_an_unknown_breaker(shell: Shell) -> None:
    _job(shell)
    for verb in ("open", "close", "reset"):
        error = shell("breakers", verb, "platform-y", "--json", code=3).error
        assert "platform-x" in error["next"]
    assert "--for" in shell("breakers", "open", "platform-x", "--for", "soon", code=2).err


def test_a_part_is_slowed_with_a_reason_and_let_go(shell: Shell) -> None:
    shell.put()
    with App(shell.url) as app:
        id = app.queue("mail").put("x", part="tenant:acme")
    options = ["--cap", "4", "--rate", "1/m", "--weight", "2", "--not-before", "10m", "--why", "too loud"]
    set_ = shell("parts", "set", "mail", "tenant:acme", *options, "--json").json
    assert (set_["cap"], set_["rate"], set_["weight"], set_["why"]) == (4, "1/m", 2, "too loud")
    assert set_["not_before"] is not None
    assert "too loud" in shell("parts", "list", "mail").out
    why = shell("jobs", "explain", id).out
    assert "part tenant:acme of queue mail is held until" in why
    assert ": too loud" in why
    lifted = shell("parts", "set", "mail", "tenant:acme", "--not-before", "0", "--cap", "0", "--json").json
    assert lifted["not_before"] is None
    assert (
        "cap 0 of part tenant:acme of queue mail (too loud) allows no job to run"
        in shell("jobs", "explain", id).out
    )
    shell("parts", "set", "mail", "tenant:acme", "--cap", "none", "--rate", "none", "--why", "none")
    shell("parts", "pause", "mail", "tenant:acme", "--why", "unpaid")
    assert "part tenant:acme of queue mail is paused by hand: unpaid" in shell("jobs", "explain", id).out
    resumed = shell("parts", "resume", "mail", "tenant:acme", "--json").json
    assert (resumed["paused"], resumed["why"], resumed["cap"], resumed["rate"]) == (False, None, None, None)
    shell("get", "mail")


def test_a_rate_that_is_used_up_is_explained(shell: Shell) -> None:
    with App(shell.url) as app:
        ids = [app.queue("mail").put("x", part="tenant:acme") for _ in range(2)]
    shell("parts", "set", "mail", "tenant:acme", "--rate", "2/h")
    shell("get", "mail")
    why = shell("jobs", "explain", ids[1]).out
    assert "rate limit of part tenant:acme of queue mail (2/h): next permit in 1800 s" in why
