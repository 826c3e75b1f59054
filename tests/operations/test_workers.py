"""Workers from another process: listed, paused, resumed and drained from code; settings that are reloaded."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.running import aworking, working
from tests.support.waiting import WAIT, auntil, until
from towpath import App, Bandwidth, Lane, State, Throttled
from towpath.commands import Upkeep
from towpath.core.bandwidth import BandwidthLimits
from towpath.errors import InvalidInput
from towpath.operations.schedules import list_schedules
from towpath.operations.service import worker_options
from towpath.operations.workers import TTL, Registration
from towpath.testing import ManualClock


def soon(app: App) -> float:
    """Seconds within which a worker applies an order. A worker on PostgreSQL is notified of the order;
    without the notification it would read its orders after 5 s."""
    return 3.0 if app.engine.url.startswith("postgresql") else 1.0


def state_of(app: App) -> tuple[bool, bool]:
    [view] = app.workers.list()
    return view.paused, view.draining


def test_a_worker_is_paused_and_goes_on(app: App) -> None:
    task = app.task(name="t")(lambda: 1)
    app.engine.name = "box-1"

    async def main() -> None:
        async with aworking(app, concurrency=3, queues=("default",)):
            await auntil(lambda: len(app.workers.list()) == 1)
            [view] = await app.workers.alist()
            assert timedelta(0) <= view.seen_at - view.started_at < timedelta(hours=1)
            assert (view.name, view.queues, view.concurrency, view.paused) == (
                "box-1",
                ("default",),
                3,
                False,
            )
            asked = time.monotonic()
            await app.workers.apause("box-*", "a new disk")
            await auntil(lambda: state_of(app) == (True, False))
            assert time.monotonic() - asked < soon(app)
            assert app.workers.paused() == {"box-*": "a new disk"}
            handle = await task.aenqueue()
            assert await app.workers.aresume("other") == []
            # A worker that read after this commit has claimed nothing.
            await auntil(lambda: handle.status().state is State.READY)
            with pytest.raises(TimeoutError):
                await handle.afinished(0.2)
            asked = time.monotonic()
            assert await app.workers.aresume() == ["box-*"]
            assert await handle.aresult(20) == 1
            assert time.monotonic() - asked < soon(app)
            assert app.workers.list()[0].why is None or state_of(app) == (False, False)

    asyncio.run(main())


def test_what_runs_goes_on_and_what_was_only_claimed_goes_back(app: App) -> None:
    started, let_go = asyncio.Event(), asyncio.Event()

    @app.task(name="wait")
    async def wait() -> str:
        started.set()
        await let_go.wait()
        return "done"

    async def main() -> None:
        async with aworking(app, concurrency=1):
            first = await wait.aenqueue()
            await started.wait()
            second = await wait.aenqueue()
            await app.workers.apause()
            await auntil(lambda: state_of(app)[0])
            let_go.set()
            assert await first.aresult(20) == "done"
            status = second.status()
            assert (status.state, status.attempts) == (State.READY, 0)
            await app.workers.aresume()
            assert await second.aresult(20) == "done"

    asyncio.run(main())


def test_a_group_is_paused_and_goes_on(app: App) -> None:
    started, let_go = asyncio.Event(), asyncio.Event()
    ran: list[int] = []

    @app.task(name="wait")
    async def wait(n: int) -> int:
        ran.append(n)
        started.set()
        await let_go.wait()
        return n

    async def main() -> None:
        async with aworking(app, concurrency=1):
            group = await app.agroup([wait.of(n) for n in range(3)])
            await started.wait()
            await group.apause()
            let_go.set()
            await group.jobs[0].afinished(20)
            other = await wait.aenqueue(9)
            assert await other.aresult(20) == 9
            assert ran == [0, 9]
            assert {job.status().state for job in group.jobs[1:]} == {State.BLOCKED}
            await group.aresume()
            assert await group.aresult(20) == [0, 1, 2]

    asyncio.run(main())


LANES = {"front": Lane(queues=("default",)), "back": Lane(queues=("bulk",))}


def test_a_lane_is_paused_and_goes_on(app: App) -> None:
    task = app.task(name="t")(lambda: 1)
    bulk = task.options(queue="bulk")

    async def main() -> None:
        handle = await bulk.aenqueue()
        assert str(handle.explain()).endswith(
            "first in queue bulk, but no running worker consumes queue bulk"
        )
        await handle.acancel()
        async with aworking(app, concurrency=4, lanes=LANES):
            await auntil(lambda: len(app.workers.lanes.list()) == 2)
            asked = time.monotonic()
            await app.workers.lanes.apause("back", "a new disk")
            await auntil(lambda: [lane.paused for lane in app.workers.list()[0].lanes] == [False, True])
            assert time.monotonic() - asked < soon(app)
            handle = await bulk.aenqueue()
            assert await (await task.aenqueue()).aresult(20) == 1
            [back, front] = await app.workers.lanes.alist()
            assert (back.name, back.paused, back.why, back.queues, back.workers) == (
                "back",
                True,
                "a new disk",
                ("bulk",),
                1,
            )
            assert (front.name, front.paused, front.reserved) == ("front", False, 2)
            assert handle.explain().gate == "lane-paused"
            assert str(handle.explain()).endswith(
                "in queue bulk, but lane back is paused by hand: a new disk"
            )
            assert handle.status().attempts == 0
            asked = time.monotonic()
            assert await app.workers.lanes.aresume("back")
            assert await handle.aresult(20) == 1
            assert time.monotonic() - asked < soon(app)
            assert not app.workers.lanes.resume("back")

    asyncio.run(main())


def test_a_lane_is_paused_for_later_workers_until_it_is_resumed(app: App) -> None:
    task = app.task(name="t", queue="bulk")(lambda: 1)
    app._configuration.settings = replace(app.settings, lanes=LANES)
    app.workers.lanes.pause("back")
    lanes = app.workers.lanes.list()
    assert [(lane.name, lane.paused, lane.workers) for lane in lanes] == [("back", True, 0)]
    handle = task.enqueue()

    async def main() -> None:
        async with aworking(app):
            assert await task.options(queue="default").enqueue().aresult(20) == 1
            assert handle.status().attempts == 0
            app.workers.lanes.resume("back")
            assert await handle.aresult(20) == 1

    asyncio.run(main())


def test_an_unknown_lane_is_refused_with_the_existing_lanes(app: App) -> None:
    with pytest.raises(InvalidInput, match=r"lane is 'bakc'; it must be .* none"):
        app.workers.lanes.pause("bakc")
    app._configuration.settings = replace(app.settings, lanes=LANES)
    for verb in (app.workers.lanes.pause, app.workers.lanes.resume):
        with pytest.raises(InvalidInput, match="back, front"):
            verb("bakc")
    with pytest.raises(InvalidInput, match="why"):
        app.workers.lanes.pause("back", "")
    assert app.workers.lanes.list() == []


def test_explain_has_the_wait_of_a_resource(app: App) -> None:
    app.resource("api", max=1)
    started, let_go = asyncio.Event(), asyncio.Event()

    @app.task(name="call", queue="calls", resource="api", backoff=0)
    async def call() -> None:
        started.set()
        await let_go.wait()
        raise Throttled(after=60)

    async def main() -> None:
        async with aworking(app, concurrency=4, grace=0) as (service, _):
            await call.aenqueue()
            await started.wait()
            waiting = await call.aenqueue()
            service._report()
            await auntil(lambda: waiting.explain().gate == "limit")
            assert str(waiting.explain()).endswith(
                "in queue calls, but resource api is at its limit: 1 of 1 run"
            )
            let_go.set()
            await auntil(lambda: waiting.explain().until is not None)
            assert "but resource api is held until 20" in str(waiting.explain())

    asyncio.run(main())


def test_explain_names_a_paused_group(app: App) -> None:
    task = app.task(name="t")(lambda: 1)
    group = app.group([task.of()], id="g")
    group.pause("a new disk")
    [job] = group.jobs
    assert str(job.explain()).endswith(
        ": group g is paused: a new disk; resume it with `towpath groups resume g`"
    )
    assert (group.status().paused, group.status().why) == (True, "a new disk")
    group.resume()
    assert job.status().state is State.READY


def test_the_end_of_a_burst_is_not_asked_of_a_closed_app(caplog: pytest.LogCaptureFixture) -> None:
    """A batch may be under way while the worker stops and its app is closed."""
    app = App("memory://")
    app.task(name="t")(lambda: 1)
    service = app._service({"burst": True})
    app.close()
    service._check_burst()
    assert caplog.records == []


def test_a_reload_counts_what_runs_in_the_new_lanes(app: App) -> None:
    let_go, started = asyncio.Event(), asyncio.Semaphore(0)

    @app.task(name="hold")
    async def hold() -> None:
        started.release()
        await let_go.wait()

    async def main() -> None:
        async with aworking(app, concurrency=3, lanes={"old": Lane(queues=("bulk", "gone"))}) as (service, _):
            held = [await hold.options(queue=queue).aenqueue() for queue in ("bulk", "bulk", "gone")]
            for _ in held:
                await asyncio.wait_for(started.acquire(), 20)
            service._change(worker_options(app._registry, app.settings, {"lanes": LANES, "concurrency": 4}))
            with app.batch():
                more = [hold.options(queue=queue).enqueue() for queue in ("bulk", "default")]
            await asyncio.wait_for(started.acquire(), 20)
            assert more[1].status().state is State.RUNNING, (
                "the one free slot belongs to the lane that is short of its own"
            )
            assert more[0].status().state is State.READY
            assert {lane.name: lane.running for lane in service._worker.buffer.lanes} == {
                "front": 1,
                "back": 2,
            }
            let_go.set()
            for each in (*held, *more):
                await each.aresult(20)
            await auntil(lambda: all(lane.running == 0 for lane in service._worker.buffer.lanes))

    asyncio.run(main())


def test_a_worker_that_starts_while_it_is_paused_takes_nothing(app: App) -> None:
    task = app.task(name="t")(lambda: 1)
    app.workers.pause(why="later")
    handle = task.enqueue()

    async def main() -> None:
        async with aworking(app):
            await auntil(lambda: bool(app.workers.list()))
            assert state_of(app)[0]
            with pytest.raises(TimeoutError):
                await handle.afinished(0.2)
            assert handle.status().attempts == 0
            app.workers.resume()
            await handle.afinished(20)

    asyncio.run(main())


def test_drain_ends_the_present_workers_and_not_their_successors(app: App) -> None:
    task = app.task(name="t")(lambda: 1)
    app.engine.name = "box"

    async def main() -> None:
        async with aworking(app) as (_, running):
            await auntil(lambda: bool(app.workers.list()))
            assert await app.workers.adrain("nobody") == []
            [drained] = await app.workers.adrain("box")
            assert drained.name == "box"
            await asyncio.wait_for(running, 20)
        await auntil(lambda: not app.workers.list())

        handle = await task.aenqueue()
        async with aworking(app):
            await handle.afinished(20)

    asyncio.run(main())


def test_a_killed_worker_is_gone_when_its_report_expires() -> None:
    clock = ManualClock()
    with App("memory://", clock=clock) as app:
        for owner in ("a#1", "b#1"):
            registration = Registration(app.engine, owner)
            registration.register()
            registration.report(queues=("*",), concurrency=1, running=0)
        app.engine.call(Upkeep())  # all earlier commands are committed
        assert [each.name for each in app.workers.list()] == ["a", "b"]
        clock.advance((TTL + 1) / 1_000_000)
        registration.report(queues=("*",), concurrency=1, running=0)
        app.engine.call(Upkeep())
        assert [each.name for each in app.workers.list()] == ["b"]
        app.workers.drain("b")
        assert (Registration(app.engine, "a#1").instructions().drain, registration.instructions().drain) == (
            False,
            True,
        )
        clock.advance(1000)
        Registration(app.engine, "c#1").register()
        assert not registration.instructions().drain, "an expired registration is removed"


def test_a_worker_that_was_taken_for_gone_comes_back() -> None:
    """A second worker with a clock an hour ahead, or a shorter outage, starts before the first one has
    reported."""
    clock = ManualClock()
    with App("memory://", clock=clock) as app:
        first, second = Registration(app.engine, "first#1"), Registration(app.engine, "second#1")
        first.register()
        first.instructions()
        clock.advance(3600)
        second.register()
        first.instructions()
        for registration in (first, second):
            registration.report(queues=(), concurrency=1, running=0, draining=False)
        app.engine.call(Upkeep())
        assert [view.name for view in app.workers.list()] == ["first", "second"]


@pytest.mark.parametrize("name", ["", "x" * 201, 5])
def test_names_that_are_none(app: App, name: Any) -> None:
    for verb in (app.workers.pause, app.workers.resume, app.workers.drain):
        with pytest.raises(InvalidInput):
            verb(name)


GOOD = """
queues = ["default", "extra"]
concurrency = 2
[limits.extra]
cap = 3
rate = "100/s:100"
warn_depth = 40
[schedules.nightly]
task = "t"
cron = "0 3 * * *"
[bandwidth]
down = "5MB/s"
schedule = [["22:00-23:00", { down = "none", up = "1MB/s" }]]
"""


def test_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """New queues, concurrency, limits, schedules and speeds, while a job runs; a wrong file changes nothing
    and is named in the log."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.WARNING, "towpath.worker")
    file = tmp_path / "towpath.toml"
    file.write_text(
        "concurrency = 1\n[limits.default]\ncapacity = 50\nwarn_depth = 30\n[bandwidth]\nup = '2MB/s'\n"
    )
    with App(f"sqlite:///{tmp_path / 'work.db'}") as app:
        night = Bandwidth(clock=ManualClock())  # at 22:13
        app._configuration.bandwidth, before = night, app.bandwidth
        assert before.limits == BandwidthLimits(up=2_000_000)
        started, let_go = asyncio.Event(), asyncio.Event()

        @app.task(name="wait")
        async def wait() -> str:
            started.set()
            await let_go.wait()
            return "done"

        quick = app.task(name="t")(lambda: 1)

        async def main() -> None:
            async with aworking(app) as (service, _):
                first = await wait.aenqueue()
                await started.wait()
                assert (app.queue("default").stats().capacity, app.queue("default").warn_depth()) == (50, 30)
                extra = await quick.options(queue="extra").aenqueue()
                file.write_text(GOOD)
                service.reload()
                assert await extra.aresult(20) == 1
                assert first.status().state is State.RUNNING
                view = app.queue("extra").stats()
                assert (view.cap, view.rate and view.rate.count) == (3, 100)
                assert (app.queue("default").stats().capacity, app.queue("default").warn_depth()) == (
                    None,
                    None,
                )
                assert app.queue("extra").warn_depth() == 40
                assert [each.name for each in list_schedules(app.engine)] == ["nightly"]
                assert app.settings.concurrency == 2
                assert night.limits == BandwidthLimits(up=1_000_000)
                for wrong, field in [
                    ("concurrency = 0", "concurrency in"),
                    ("queues = [", "towpath.toml"),
                    ("[limits.extra]\ncap = -1", "cap of queue extra"),
                    ("[limits.extra]\nspeed = 1", "limits.extra"),
                    ("[limits.extra]\nwarn_depth = 0", "warn_depth of queue extra"),
                    ("[limits.extra]\nwarn_depth = 9\ncapacity = 8", "at most the capacity of 8"),
                    ("[schedules.x]\ntask = 'nobody'\nevery = 5", "the task of schedule x"),
                    ("[schedules.x]\ntask = 't'", "either cron or every"),
                    ("[bandwidth]\ndown = '5Mb/s'", "down of bandwidth in"),
                    ("[bandwidth]\nfast = 1", "bandwidth in"),
                    ("[bandwidth]\nschedule = [['noon', 1]]", "schedule[0] of bandwidth in"),
                    ("[bandwidth]\ntz = 'Vienna'", "tz"),
                ]:
                    caplog.clear()
                    file.write_text(wrong)
                    service.reload()
                    [record] = caplog.records
                    assert field in record.getMessage()
                    assert "last valid" in record.getMessage()
                    assert (app.settings.concurrency, app.queue("extra").stats().cap) == (2, 3)
                    assert night.limits == BandwidthLimits(up=1_000_000)
                assert await (await quick.options(queue="extra").aenqueue()).aresult(20) == 1
                file.write_text("")
                service.reload()
                assert list_schedules(app.engine) == []
                assert night.limits == BandwidthLimits()
                let_go.set()
                assert await first.aresult(20) == "done"

        asyncio.run(main())


@pytest.mark.ledgers("sqlite", "postgres")
def test_a_pause_reaches_another_process_at_once(app: App, url: str) -> None:
    """By a notification: the poll of an idle ledger on PostgreSQL comes after 5 s. The best of three."""
    nothing = app.task(name="nothing")(lambda: None)
    spans: list[float] = []
    with App(url) as operator, working(app):
        nothing.enqueue().result(WAIT)
        for _ in range(3):
            began = time.monotonic()
            operator.workers.pause(why="a new disk")
            until(lambda: [each.paused for each in operator.workers.list()] == [True])
            operator.workers.resume()
            until(lambda: [each.paused for each in operator.workers.list()] == [False])
            spans.append(time.monotonic() - began)
    assert min(spans) < 2, spans
