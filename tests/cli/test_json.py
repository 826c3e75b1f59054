"""Every command with `--json`, on a ledger with work: stdout is JSON and nothing else."""

from __future__ import annotations

import json

import pytest

from tests.support.reference import leaves
from tests.support.shell import Shell

PATHS = [path.removeprefix("towpath ") for path, _ in leaves()]
ARGUMENTS: dict[str, list[str]] = {
    "worker": ["shop:app", "--burst", "--queues", "none"],
    "enqueue": ["k", "--queue", "q"],
    "put": ["q", "x"],
    "get": ["orders"],
    "ack": ["{held}:1"],
    "nack": ["{held}:1"],
    "extend": ["{held}:1", "5"],
    "jobs show": ["{ready}"],
    "jobs explain": ["{ready}"],
    "jobs retry": ["{dead}"],
    "jobs cancel": ["{ready}"],
    "jobs mark-done": ["{dead}", "--reason", "by hand", "--result", "7"],
    "jobs skip": ["{ready}", "--reason", "not needed", "--by", "ada"],
    "jobs purge": ["{dead}", "--yes"],
    "dead retry": ["{dead}"],
    "dead purge": ["{dead}", "--yes"],
    "queues show": ["orders"],
    "queues pause": ["orders"],
    "queues resume": ["orders"],
    "queues set": ["orders", "--cap", "2"],
    "parts list": ["orders"],
    "parts pause": ["orders", "p"],
    "parts resume": ["orders", "p"],
    "parts set": ["orders", "p", "--cap", "2"],
    "backup": ["copy.db"],
    "ledger copy": ["sqlite:///towpath.db", "sqlite:///other.db", "--force"],
    "bench": ["--seconds", "0.1", "--dir", "."],
    "completion": ["bash"],
    "schedules set": ["nightly", "--cron", "30 2 * * *"],
    "auth token new": ["billing", "--right", "produce"],
    "auth new ca": ["--out", "ca.pem"],
}
"""Arguments by command; a command that is not here needs none, or is one of `NAMED`."""
NAMED = ("workers", "lanes", "groups", "breakers", "schedules")
"""Groups of commands about things that this ledger does not have: exit code 3 with an error as JSON."""
ELSEWHERE = {
    "demo",
    "dev",
    "jobs debug",
    "serve",
    *(path for path in PATHS if path.startswith(("client ", "plan "))),
} | {f"auth {name}" for name in ("token revoke", "new server", "new client", "revoke", "inspect")}
"""`demo`, `jobs debug`, `serve`, `client`, `plan` and `auth` have tests of their own for their JSON; `dev`
runs until a signal."""


@pytest.fixture
def work(shop: Shell) -> dict[str, str]:
    held = shop.put("other")
    shop("get", "other")
    return {"held": held, "dead": shop.dead("mail"), "ready": shop.put("orders", "--part", "p")}


def test_every_command_is_called_here() -> None:
    assert set(ARGUMENTS) <= set(PATHS)
    assert set(PATHS) >= ELSEWHERE


@pytest.mark.parametrize("path", [path for path in PATHS if path not in ELSEWHERE])
def test_stdout_is_json(shop: Shell, work: dict[str, str], path: str) -> None:
    group, *more = path.split()
    unknown = group in NAMED and more != ["list"] and path != "workers pause"
    arguments = [
        each.format_map(work)
        for each in ARGUMENTS.get(path, ["nothing"] if group in NAMED and more != ["list"] else [])
    ]
    call = shop.run if group == "worker" else shop
    ran = call(group, *more, *arguments, "--json", code=3 if unknown else 0)
    if unknown:
        assert ran.error["code"] == 3
    else:
        assert [json.loads(line) for line in ran.out.splitlines()] or path == "worker"
