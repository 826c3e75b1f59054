"""Schedules at run time, from code: `app.schedules`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from towpath import App
from towpath.core.checks import SECOND
from towpath.errors import InvalidInput

app = App("memory://")


class City(BaseModel):
    name: str


@app.cron("0 3 * * *", name="nightly", args={"city": {"name": "Vienna"}})
def report(city: City, since: datetime | None = None) -> str:
    return city.name


@app.every(3600, name="hourly")
def tick() -> None: ...


def test_list_and_get() -> None:
    with app.testing():
        assert [schedule.name for schedule in app.schedules.list()] == ["hourly", "nightly"]
        assert app.schedules.get("nightly").cron == "0 3 * * *"
    with app:
        assert app.schedules.list() == []
        with pytest.raises(InvalidInput, match="schedule is 'nightly'; it must be the name of a schedule"):
            app.schedules.pause("nightly")


def test_pause_and_resume() -> None:
    with app.testing() as bench:
        at = app.schedules.get("hourly").next_at
        assert at is not None
        assert at.timestamp() * SECOND - bench.clock.now() <= 3600 * SECOND
        assert app.schedules.pause("hourly").next_at is None
        assert app.schedules.get("hourly").paused is True
        bench.advance(5 * 3600)
        assert bench.jobs(tick) == []
        assert app.schedules.resume("hourly").paused is False
        bench.advance(3600)
        assert len(bench.jobs(tick)) == 1


def test_set_changes_times_and_arguments() -> None:
    with app.testing() as bench:
        since = datetime(2026, 1, 1, tzinfo=UTC)
        changed = app.schedules.set(
            "nightly", every=timedelta(hours=2), args={"city": City(name="Berlin"), "since": since}
        )
        assert (changed.cron, changed.every) == (None, 7200.0)
        bench.advance(7200)
        job = bench.assert_enqueued(report, city=City(name="Berlin"), since=since)
        assert app.job(job.id).result() == "Berlin"
        assert app.schedules.set("nightly", cron="0 4 * * *", tz="Europe/Berlin", missed="all").every is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"args": {"city": {"title": "x"}}},
            "tests.operations.test_schedules.report: argument city is {'title': 'x'}: name: Field required",
        ),
        (
            {"args": {"town": 1}},
            "tests.operations.test_schedules.report(city, since=None) cannot be called with (town=1)",
        ),
        ({"args": 5}, "args is 5; it must be arguments by name"),
        ({"every": 0}, "every is 0; it must be at least 0.1 seconds"),
        ({"cron": "never"}, "cron is 'never'; it must be five fields, minute hour"),
        (
            {"cron": "* * * * *", "every": 5},
            "schedule nightly needs either cron or every; it has {'cron': '* * * * *', 'every': 5}",
        ),
        ({"tz": "Mars"}, "tz is 'Mars'"),
        ({"missed": "never"}, "missed is 'never'; it must be skip, once or all"),
    ],
)
def test_invalid_changes_are_refused(changes: dict[str, Any], message: str) -> None:
    with app.testing():
        before = app.schedules.get("nightly")
        with pytest.raises(InvalidInput) as caught:
            app.schedules.set("nightly", **changes)
        assert str(caught.value).startswith(message)
        assert app.schedules.get("nightly") == before


def test_arguments_of_a_task_that_is_not_known_here() -> None:
    with app.testing():
        kind = app.schedules.get("nightly").kind
        task = app._registry.tasks.pop(kind)
        try:
            assert app.schedules.set("nightly", args={"town": 1}).args == {"town": 1}
            with pytest.raises(InvalidInput, match="stored as JSON"):
                app.schedules.set("nightly", args={"town": object()})
        finally:
            app._registry.tasks[kind] = task


def test_trigger_and_remove() -> None:
    with app.testing() as bench:
        id = app.schedules.trigger("nightly")
        assert app.schedules.trigger("nightly", id="mine") == "mine"
        bench.drain()
        assert [app.job(each).result() for each in (id, "mine")] == ["Vienna", "Vienna"]
        app.schedules.remove("nightly")
        with pytest.raises(InvalidInput, match="schedule is 'nightly'"):
            app.schedules.trigger("nightly")
        with pytest.raises(InvalidInput, match="schedule is 'nightly'"):
            app.schedules.remove("nightly")
        assert [schedule.name for schedule in app.schedules.list()] == ["hourly"]


def test_async_forms() -> None:
    async def main() -> None:
        with app.testing() as bench:
            schedules = app.schedules
            assert await schedules.alist() == schedules.list()
            assert (await schedules.apause("hourly")).paused
            assert (await schedules.aset("hourly", every=60)).every == 60.0
            assert not (await schedules.aresume("hourly")).paused
            id = await schedules.atrigger("hourly")
            await bench.aadvance(60)
            assert len(bench.jobs(tick)) == 2
            assert (await app.job(id).aresult()) is None
            assert (await schedules.aget("hourly")).last_at is not None
            await schedules.aremove("hourly")
            assert [schedule.name for schedule in schedules.list()] == ["nightly"]

    asyncio.run(main())
