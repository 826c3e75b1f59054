"""The App: opened once, on first use; closed for good; a forked child opens its own."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from towpath import App, State, commands, open_ledger
from towpath.errors import Forked, GroupClosed, InvalidInput, LedgerClosed, UnknownGroup
from towpath.runtime import engine


def nothing() -> None: ...


def test_nothing_is_opened_before_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "work.db"
    app = App(f"sqlite:///{path}")
    app.task(nothing)
    assert not path.exists()
    with app:
        assert not path.exists()
        assert app.ledger.queues() == {}
        assert path.exists()


def test_it_is_opened_once(url: str) -> None:
    with App(url) as app:
        start, seen = threading.Barrier(16), []

        def look() -> None:
            start.wait()
            seen.append(app.engine.components)

        threads = [threading.Thread(target=look) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(seen)) == 1
        assert len(seen) == 16


def test_a_bad_url_raises_when_it_is_opened() -> None:
    app = App("ftp://x")
    with pytest.raises(InvalidInput, match="ftp"):
        _ = app.ledger


def test_closed_is_closed(url: str) -> None:
    app = App(url)
    task = app.task(nothing)
    with app:
        task.enqueue()
    app.close()
    asyncio.run(app.aclose())
    with pytest.raises(LedgerClosed):
        task.enqueue()
    with app:
        task.enqueue()


def test_never_opened_and_closed() -> None:
    app = App("memory://")
    app.close()
    with pytest.raises(LedgerClosed):
        _ = app.ledger


def test_what_waits_is_committed_before_it_closes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    replies: list[object] = []
    with App(url) as app:
        spec = app.task(name="t")(nothing).spec_for((), {})
        app.engine.committer.post([commands.Append((spec,))], replies.extend)
    assert len(replies) == 1
    with App(url) as app:
        assert app.job(spec.id).status().state is State.READY


def test_the_async_door(url: str) -> None:
    async def main() -> None:
        async with App(url) as app:
            task = app.task(nothing)
            assert (await task.aenqueue()).status().state is State.READY
        with pytest.raises(LedgerClosed):
            await task.aenqueue()

    asyncio.run(main())


def test_several_commands_at_once(app: App) -> None:
    spec = app.task(nothing).spec_for((), {})
    opened: list[commands.Command] = [commands.Open("g"), commands.Append((spec,)), commands.Seal("g")]
    assert [type(each) for each in app.engine.call_all(opened)] == [
        commands.GroupSet,
        commands.Appended,
        commands.GroupSet,
    ]
    with pytest.raises(UnknownGroup):
        asyncio.run(app.engine.acall_all([commands.Seal("g"), commands.Seal("nothing")]))
    with pytest.raises(GroupClosed):
        app.engine.call_all([commands.Append((app.tasks[spec.kind].options(group="g").spec_for((), {}),))])


def test_owners_differ(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    with App(url, name="ada") as one, App(url, name="ada") as two:
        assert one.engine.owner != two.engine.owner
        assert one.engine.owner.startswith("ada#")
    with App(url) as app:
        assert f":{os.getpid()}#" in app.engine.owner
    with pytest.raises(InvalidInput, match="name"):
        App(url, name="x" * 300)


def test_a_duplicate_schedule(app: App) -> None:
    task = app.task(nothing)
    app.every(60)(task)
    with pytest.raises(InvalidInput, match=r"has a schedule .* already"):
        app.cron("* * * * *")(task)
    app.cron("* * * * *", name="other")(task)
    assert sorted(app._registry.schedules) == ["other", "tests.app.test_app.nothing"]
    with pytest.raises(InvalidInput, match="colour"):
        app.cron("* * * * *", colour=1)(task)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="cron"):
        app.cron("every day", name="bad")(task)
    with pytest.raises(InvalidInput, match="nothing"):
        app.every(60, name="args", args={"x": 1})(task)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missed": "never"}, "missed is 'never'; it must be skip, once or all"),
        ({"missed": None}, "missed is None; it must be skip, once or all"),
        ({"tz": "Mars/Base"}, "tz is 'Mars/Base'; it must be the name of a time zone, such as Europe/Berlin"),
        ({"tz": ["UTC"]}, "tz is ['UTC']; it must be the name of a time zone, such as Europe/Berlin"),
        ({"args": [1]}, "args is [1]; it must be arguments by name, such as {'n': 1}"),
        ({"args": {1: 1}}, "args is {1: 1}; it must be arguments by name, such as {'n': 1}"),
        ({"name": "a b"}, "name is 'a b'; it must be a name of 1 to 255 letters, digits or ._-/:@"),
        (
            {"cron": "61 * * * *"},
            "cron is '61 * * * *'; it must be five fields, minute hour day month weekday",
        ),
        ({"cron": ["* * * * *"]}, "cron is ['* * * * *']; it must be text such as '*/5 * * * *'"),
        ({"every": 0}, "every is 0; it must be at least 0.1 seconds"),
        ({"every": -5}, "every is -5; it must be 0 or more seconds"),
        ({"every": "5"}, "every is '5'; it must be a finite number of seconds"),
    ],
)
def test_an_invalid_schedule_is_refused_with_what_is_expected(options: dict[str, Any], message: str) -> None:
    app = App("memory://")

    def declare(every: Any = None, cron: Any = "* * * * *", **options: Any) -> None:
        (app.cron(cron, **options) if every is None else app.every(every, **options))(nothing)

    with pytest.raises(InvalidInput) as caught:
        declare(**options)
    assert str(caught.value).startswith(message)
    assert app._registry.schedules == {}


def in_a_child(work: str) -> bytes:
    """The result of `_child_<work>` in a forked child."""
    near, far = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(near)
            os.write(far, CHILDREN[work]().encode())
        except BaseException as error:
            os.write(far, repr(error).encode())
        finally:
            os._exit(0)
    os.close(far)
    with os.fdopen(near, "rb") as pipe:
        answer = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return answer


_app: list[App] = []


def _child_enqueue() -> str:
    [app] = _app
    left = len(engine._left_to_the_parent)
    handle = app.tasks["t"].enqueue()
    asyncio.run(app.tasks["t"].aenqueue())
    owner = app.engine.owner
    app.close()
    return f"{handle.id} {left} {owner}"


CHILDREN = {"enqueue": _child_enqueue}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own(tmp_path: Path) -> None:
    with App(f"sqlite:///{tmp_path / 'work.db'}") as app:
        task = app.task(name="t")(nothing)
        task.enqueue()
        _app[:] = [app]
        # As if another thread were just opening or committing.
        with app.engine._opening, app.engine.committer._lock:
            answer = in_a_child("enqueue").decode().split()
        assert len(answer) == 3, answer
        id, left, owner = answer
        assert left == "1"
        assert owner != app.engine.owner
        assert app.job(id).status().state is State.READY
        assert task.enqueue().status().state is State.READY
        assert app.ledger.queues()["default"].counts.ready == 4
        assert app.ledger.check() == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_an_app_in_memory_is_empty() -> None:
    with App("memory://") as app:
        app.task(name="t")(nothing).enqueue()
        _app[:] = [app]
        id = in_a_child("enqueue").decode().split()[0]
        assert app.ledger.get(id) is None
        assert app.ledger.queues()["default"].counts.ready == 1


def test_an_opened_ledger_is_left_open(tmp_path: Path) -> None:
    ledger = open_ledger(f"sqlite:///{tmp_path / 'work.db'}")
    for n in (1, 2):
        with App(ledger=ledger) as app:
            assert app.ledger is ledger
            double = app.task(name="double")(lambda x=2: 2 * x)
            handle = double.enqueue()
            app.run(burst=True)
            assert handle.result(20) == 4
        with pytest.raises(LedgerClosed):
            app.queue("q").put(b"")
        assert ledger.queues()["default"].counts.done == n
    ledger.close()


def test_either_a_url_or_an_opened_ledger() -> None:
    with pytest.raises(InvalidInput, match="takes a URL or an opened ledger, not both"):
        App("memory://", ledger=open_ledger("memory://"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_an_opened_ledger() -> None:
    with App(ledger=open_ledger("memory://")) as app:
        app.queue("q").put(b"")
        child = os.fork()
        if child == 0:
            try:
                app.queue("q").put(b"")
            except Forked:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
