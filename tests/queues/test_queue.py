"""Queues and parts from code: limits, pause and resume, counts; the sync and the async form of each."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.running import work
from towpath import App, Rate, State
from towpath.errors import InvalidInput, PartFull, QueueFull, TooManyAppends


def nothing() -> None: ...


def test_an_unused_queue_is_empty(app: App) -> None:
    queue = app.queue("new")
    view = queue.stats()
    assert (view.name, view.counts.waiting, view.paused, view.cap, view.rate, view.retention) == (
        "new",
        0,
        False,
        None,
        None,
        None,
    )
    part = queue.part("p")
    assert (part.stats().name, part.stats().ready, part.stats().weight) == ("p", 0, 1)
    assert queue.parts() == []
    assert app.ledger.queues() == {}
    assert repr(part) == "<part p of new>"


def test_limits_are_set_kept_and_lifted(app: App) -> None:
    queue = app.queue("q")
    then = datetime(2100, 1, 1, tzinfo=UTC)
    queue.configure(cap=8, rate="100/m:20", capacity=5, retention=timedelta(hours=1), keep=7, not_before=then)
    view = queue.stats()
    assert (view.cap, view.capacity, view.keep, view.retention) == (8, 5, 7, 3600.0)
    assert view.rate == Rate(100, 60, 20)
    assert view.next_at == then
    queue.configure(cap=None, rate=Rate(3), retention=None)
    view = queue.stats()
    assert (view.cap, view.capacity, view.rate, view.retention) == (None, 5, Rate(3), None)


def test_workers_obey_the_limits(app: App) -> None:
    task, queue = app.task(queue="q")(nothing), app.queue("q")
    queue.configure(capacity=2)
    task.enqueue_many([task.of(), task.of()])
    with pytest.raises(QueueFull):
        task.enqueue()
    queue.pause("stocktaking")
    assert work(app) == 0
    assert (queue.stats().paused, queue.stats().why, queue.stats().counts.ready) == (True, "stocktaking", 2)
    queue.resume()
    assert (queue.stats().paused, queue.stats().why) == (False, None)
    assert work(app) == 2
    assert queue.stats().counts.done == 2


def test_parts(app: App) -> None:
    task, queue = app.task(queue="q", part="{name}")(lambda name: None), app.queue("q")
    handles = {name: task.enqueue(name) for name in ("a", "b")}
    queue.part("b").configure(cap=3, rate="5/s", weight=4)
    queue.part("b").pause("unpaid")
    assert [(part.name, part.ready, part.cap, part.weight, part.why) for part in queue.parts()] == [
        ("a", 1, None, 1, None),
        ("b", 1, 3, 4, "unpaid"),
    ]
    assert work(app) == 1
    assert handles["b"].status().state is State.READY
    assert "unpaid" in str(handles["b"].explain())
    queue.part("b").resume()
    assert work(app) == 1


def test_async_forms(app: App) -> None:
    async def main() -> None:
        queue = app.queue("q")
        part = queue.part("p")
        await queue.aconfigure(cap=2)
        await queue.apause("why")
        await part.aconfigure(weight=2)
        await part.apause()
        view = await queue.astats()
        assert (view.cap, view.paused, view.why) == (2, True, "why")
        assert await queue.aparts() == [await part.astats()]
        assert ((await part.astats()).weight, (await part.astats()).paused) == (2, True)
        await queue.aresume()
        await part.aresume()
        assert (queue.stats().paused, part.stats().paused) == (False, False)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"cap": -1}, "cap is -1"),
        ({"cap": "8"}, "cap is '8'"),
        (
            {"rate": "fast"},
            "rate is 'fast'; it must be a rate such as 10/s, 100/m, 5/10s, or 10/s:20 with a burst of 20",
        ),
        ({"rate": 10}, "rate is 10"),
        ({"rate": "0/s"}, "rate.count is 0"),
        ({"retention": "1h"}, "retention is '1h'; it must be a finite number of seconds"),
        (
            {"not_before": datetime(2100, 1, 1)},
            "not_before is datetime.datetime(2100, 1, 1, 0, 0); it must be a datetime with a time zone",
        ),
        ({"not_before": None}, "not_before is None; it must be a datetime with a time zone"),
    ],
)
def test_invalid_limits_are_refused_with_what_is_expected(limits: dict[str, Any], message: str) -> None:
    app = App("memory://")
    with pytest.raises(InvalidInput) as caught:
        app.queue("q").configure(**limits)
    assert str(caught.value).startswith(message)
    with app:
        assert app.ledger.queues() == {}


def test_names_and_words_that_are_none() -> None:
    app = App("memory://")
    with pytest.raises(TypeError, match="configure has no limit 'colour'; there are cap, rate"):
        app.queue("q").configure(colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="configure has no limit 'keep'"):
        app.queue("q").part("p").configure(keep=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="part is ''"):
        app.queue("q").part("")
    with pytest.raises(InvalidInput, match="queue is 'a b'"):
        app.queue("a b")


def test_one_tenant_does_not_fill_the_queue_for_all(app: App) -> None:
    """The capacity and the append rate of a part, through tasks and messages."""

    @app.task(queue="work", part="{tenant}")
    def work(tenant: str) -> None: ...

    app.queue("work").part("loud").configure(capacity=2)
    for _ in range(2):
        work.enqueue("loud")
    with pytest.raises(
        PartFull, match="part loud of queue work is full: 2 of 2 waiting, 1 more asked"
    ) as full:
        work.enqueue("loud")
    assert full.value.retry_after > 0
    work.enqueue("quiet")
    with pytest.raises(QueueFull):
        app.queue("work").put(b"", part="loud")
    app.queue("work").part("fast").configure(append_rate="1/h")
    app.queue("work").put(b"", part="fast")
    with pytest.raises(
        TooManyAppends, match=r"part fast of queue work takes appends at 1/h: 2 asked; try again in 3[56]\d\d"
    ) as late:
        app.queue("work").put_many([b"", b""], part="fast")
    assert late.value.retry_after > 3500
    assert [(view.name, view.capacity, str(view.append_rate)) for view in app.queue("work").parts()] == [
        ("fast", None, "1/h"),
        ("loud", 2, "None"),
        ("quiet", None, "None"),
    ]
