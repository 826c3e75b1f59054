"""`jobs debug`: the handler of a stored job runs, and nothing is stored."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import towpath
from tests.support.shell import Ran, Shell
from tests.support.terminal import terminal

SHOP = """
import asyncio
from collections.abc import Iterator

import towpath
from towpath import App, Hooks, current, provided

hooks = Hooks()


class Pool:
    size = 3


@hooks.lifespan
def pool() -> Iterator[Pool]:
    yield Pool()


app = App({url}, hooks=hooks)


@app.task(queue="mail")
def child(n: int) -> None: ...


@app.task(queue="mail", max_attempts=3)
def everything(to: str, pool: Pool = provided) -> dict[str, object]:
    job = current()
    print("the handler prints")
    job.progress(3, 10)
    job.checkpoint({{"at": 3}})
    job.spawn(child.of(1))
    child.enqueue(2)
    state = job.state
    before = state.value
    state.save({{"sent": to}})
    again = app.engine.document(f"state/{{job.id}}").value
    job.commit(lambda db: db.execute("INSERT INTO sent VALUES ('rehearsed')"))
    return {{"to": to, "attempt": job.attempt, "pool": pool.size, "before": before, "again": again}}


@app.task(queue="mail")
async def later(to: str) -> str:
    await asyncio.sleep(0)
    if to == "nobody":
        raise ValueError("no such address")
    return await_result(to)


def await_result(to: str) -> str:
    return f"sent to {{to}}"


@app.task(queue="mail")
def snoozed() -> None:
    raise towpath.Snooze(60)


@app.task(queue="mail")
def commits_badly() -> None:
    current().commit(lambda db: db.execute("INSERT INTO nowhere VALUES (1)"))


@app.task(queue="mail")
def cancels(id: str) -> None:
    app.job(id).cancel()
"""


class Workshop:
    """A shell with the app `work:app` on a ledger, and the table `sent` beside it."""

    def __init__(self, shell: Shell, url: str) -> None:
        self.shell, self.url = shell, url
        (shell.folder / "work.py").write_text(SHOP.format(url=repr(url)))

    def enqueue(self, task: str, arguments: str = "{}") -> str:
        spec = ["enqueue", f"work.{task}", "--queue", "mail", "--args", arguments]
        return self.shell(*spec, "--url", self.url).out.strip()

    def debug(self, id: str, *more: str, code: int = 0) -> Ran:
        return self.shell("jobs", "debug", id, "--app", "work:app", *more, code=code)

    def dump(self) -> dict[str, Any]:
        with closing(towpath.open_ledger(self.url)) as ledger:
            return ledger.dump()


@pytest.fixture
def importing(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell in which programs of this process import modules of its directory."""
    monkeypatch.syspath_prepend(shell.folder)
    yield shell
    sys.modules.pop("work", None)


@pytest.fixture
def shop(importing: Shell) -> Workshop:
    return Workshop(importing, importing.url)


def create_table(url: str) -> None:
    if url.startswith("sqlite"):
        import apsw

        with closing(apsw.Connection(url.removeprefix("sqlite:///"))) as db:
            db.execute("CREATE TABLE sent (x TEXT)")
    else:
        import psycopg

        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE sent (x TEXT)")


def rows(url: str) -> list[Any]:
    if url.startswith("sqlite"):
        import apsw

        with closing(apsw.Connection(url.removeprefix("sqlite:///"))) as db:
            return list(db.execute("SELECT * FROM sent"))
    import psycopg

    with psycopg.connect(url) as connection:
        return list(connection.execute("SELECT * FROM sent"))


def check_everything(shop: Workshop) -> None:
    id = shop.enqueue("everything", '{"to": "ada"}')
    create_table(shop.url)
    before = shop.dump()
    ran = shop.debug(id, "--json")
    data = ran.json
    assert data["result"] == {"to": "ada", "attempt": 1, "pool": 3, "before": None, "again": {"sent": "ada"}}
    assert (data["outcome"], data["error"], data["commit"]) == ("done", None, "rolled back")
    assert [(each["kind"], each["payload"]) for each in data["spawned"]] == [("work.child", {"n": 1})]
    assert [(each["kind"], each["payload"]) for each in data["enqueued"]] == [("work.child", {"n": 2})]
    assert data["notes"] == [{"key": f"state/{id}", "value": {"sent": "ada"}}]
    assert (data["progress"], data["cursor"]) == ({"done": 3, "total": 10}, {"at": 3})
    assert "the handler prints" in ran.err
    assert shop.dump() == before
    assert rows(shop.url) == []


def test_everything_that_a_handler_does_is_printed_and_not_stored(shop: Workshop) -> None:
    check_everything(shop)


def test_on_postgres(importing: Shell, postgres_url: str) -> None:
    check_everything(Workshop(importing, postgres_url))


def test_for_people(shop: Workshop) -> None:
    id = shop.enqueue("everything", '{"to": "ada"}')
    create_table(shop.url)
    out = shop.debug(id).out
    assert "the handler prints\n" in out
    for line in (
        r'result +{"to":"ada",.*}',
        r'would spawn +work.child in mail: {"n":1}',
        r'would enqueue +work.child in mail: {"n":2}',
        r"would write +note state/.*",
        r"progress +3 of 10",
        r"commit +the functions were called, and rolled back",
    ):
        assert re.search(f"(?m)^{line}$", out), out
    assert out.endswith("Nothing was stored; the job is unchanged.\n")


def test_an_async_handler_and_its_traceback(shop: Workshop) -> None:
    good, bad = shop.enqueue("later", '{"to": "ada"}'), shop.enqueue("later", '{"to": "nobody"}')
    assert shop.debug(good, "--json").json["result"] == "sent to ada"
    data = shop.debug(bad, "--json", code=1).json
    assert (data["outcome"], data["error"]) == ("retry", "ValueError: no such address")
    assert data["traceback"].count("File ") == 1
    assert "work.py" in data["traceback"]
    assert "\nValueError: no such address\n" in shop.debug(bad, code=1).out


def test_other_ends(shop: Workshop) -> None:
    data = shop.debug(shop.enqueue("snoozed"), "--json").json
    assert (data["outcome"], data["delay"], data["error"]) == ("snooze", 60.0, None)
    data = shop.debug(shop.enqueue("commits_badly"), "--json", code=1).json
    assert (data["outcome"], data["commit"]) == ("retry", "rolled back")
    assert "nowhere" in data["error"]
    other = shop.enqueue("snoozed")
    data = shop.debug(shop.enqueue("cancels", f'{{"id": "{other}"}}'), "--json", code=1).json
    assert "Cancel is not applied while a job is debugged" in data["error"]
    assert shop.shell("jobs", "show", other, "--json").json["state"] == "ready"


def test_under_the_debugger(shop: Workshop) -> None:
    """It stops at the first line of the handler and where the handler fails."""
    id = shop.enqueue("later", '{"to": "nobody"}')
    with terminal(shop.shell, "jobs", "debug", id, "--app", "work:app", "--pdb") as screen:
        screen.until("(Pdb)")
        assert "-> await asyncio.sleep(0)" in screen.text
        screen.type("p 'to is ' + to\nc\n")
        screen.until("the job is unchanged.")
        screen.until("-> raise ValueError")
        screen.type("q\n")
        assert screen.rest() == 1
    assert "to is nobody" in screen.text


def test_leaving_the_debugger_is_130(shop: Workshop) -> None:
    id = shop.enqueue("snoozed")
    with terminal(shop.shell, "jobs", "debug", id, "--app", "work:app", "--pdb") as screen:
        screen.until("(Pdb)")
        screen.type("q\n")
        assert screen.rest() == 130
    assert "The debugger was left; nothing was stored." in screen.text


def test_jobs_that_cannot_be_debugged(shop: Workshop) -> None:
    message = shop.shell("put", "mail", "{}", "--url", shop.url).out.strip()
    assert "is a message; it has no handler" in shop.debug(message, code=2).err
    unknown = shop.enqueue("nothing")
    assert "work:app has no task work.nothing" in shop.debug(unknown, code=2).err
    assert shop.debug("0199aa00", "--json", code=3).error["type"] == "UnknownJob"
    assert "either --pdb or --json" in shop.debug(unknown, "--pdb", "--json", code=2).err


def test_no_ledger_is_created(shop: Workshop) -> None:
    assert "There is no ledger" in shop.debug("0199aa00", code=4).err
    assert not (shop.shell.folder / "towpath.db").exists()
