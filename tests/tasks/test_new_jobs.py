"""The fields that enqueued jobs inherit from the running job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running import work
from tests.support.shell import python
from towpath import App, current
from towpath.commands import Job, Query
from towpath.errors import InvalidInput

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def leaf(n: int) -> int:
    return n


def children(app: App, handler: Callable[[], object], **options: str) -> list[Job]:
    """The jobs that `handler` enqueues when it runs as a job with these options."""
    handle = app.task(handler).options(**options).enqueue()  # type: ignore[arg-type]
    work(app, 1)
    handle.result(1)
    return [job for job in app.ledger.find(Query(oldest_first=True)).jobs if job.id != handle.id]


def ids(jobs: list[Job]) -> list[str | None]:
    return [job.correlation_id for job in jobs]


def test_the_correlation_id_goes_on_by_every_way_to_enqueue(app: App) -> None:
    task = app.task(leaf)

    def handler() -> None:
        task.enqueue(1)
        task.enqueue_many([task.of(2), task.of(3)])
        with app.batch() as batch:
            task.enqueue(4)
            batch.add(task.of(5))
        app.chain(task.of(6), task.of(7))
        app.group([task.of(8)], then=task.of(9))
        app.queue("mail").put("ten")
        app.queue("mail").put_many(["eleven"])
        current().spawn(task.of(12))

    assert ids(children(app, handler, correlation_id="order-7")) == ["order-7"] * 12


def test_on_the_loop_too(app: App) -> None:
    task = app.task(leaf)

    async def handler() -> None:
        await task.aenqueue(1)
        await app.queue("mail").aput("two")

    assert ids(children(app, handler, correlation_id="order-7")) == ["order-7"] * 2


def test_options_say_otherwise(app: App) -> None:
    task = app.task(leaf)

    def handler() -> None:
        task.options(correlation_id="other").enqueue(1)
        task.options(correlation_id=None).enqueue(2)
        app.queue("mail").put("three", correlation_id="other")
        app.queue("mail").put("four", correlation_id=None)

    assert ids(children(app, handler, correlation_id="order-7")) == ["other", None, "other", None]


def test_without_one_there_is_nothing_to_inherit_and_nothing_stays_behind(app: App) -> None:
    task = app.task(leaf)
    assert ids(children(app, lambda: task.enqueue(1).id)) == [None]
    outside = task.enqueue(2)
    assert (outside.status().correlation_id, dict(outside.status().headers)) == (None, {})


def test_own_headers_and_ids_stay(app: App) -> None:
    task = app.task(leaf)

    def handler() -> None:
        task.options(id="mine", headers={"tenant": "7"}).enqueue(1)

    [job] = children(app, handler, correlation_id="c")
    # Another test of this process may have set up tracing, which adds its own header.
    assert (job.id, job.headers["tenant"], job.correlation_id) == ("mine", "7", "c")


def test_bad_headers_are_refused_in_a_handler_as_anywhere(app: App) -> None:
    def handler() -> str:
        with pytest.raises(InvalidInput, match="headers"):
            app.queue("mail").put("x", headers=7)  # type: ignore[arg-type]
        return "refused"

    assert children(app, handler) == []


PROGRAM = f"""
import sys
sys.modules["opentelemetry"] = None
from towpath import App

app = App("memory://")

@app.task
def leaf(n: int) -> None: ...

@app.task
def handler() -> None:
    leaf.enqueue(1)
    leaf.options(headers={{"traceparent": "mine"}}).enqueue(2)
    app.queue("mail").put("three")

with app.testing() as bench:
    handler.options(headers={{"traceparent": "{TRACE}", "tracestate": "a=b", "private": "x"}}).enqueue()
    bench.drain()
    for job in bench.jobs()[1:]:
        print(dict(job.headers))
"""


def test_a_trace_continues_without_a_tracer(tmp_path: Path) -> None:
    ran = python(tmp_path, PROGRAM)
    assert ran.err == ""
    carried = str({"traceparent": TRACE, "tracestate": "a=b"})
    assert ran.out.splitlines() == [carried, str({"traceparent": "mine"}), carried]
