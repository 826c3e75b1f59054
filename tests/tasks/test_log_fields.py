"""Log records of a handler name its job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.support import handlers
from tests.support.running import working
from tests.support.waiting import WAIT
from towpath import App, JobLogFilter
from towpath.errors import JobFailed

log = logging.getLogger("shop")


class Kept(logging.Handler):
    """Keeps the records, filtered as by a program's own configuration."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        self.addFilter(JobLogFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)


@pytest.mark.ledgers("memory")
def test_concurrent_handlers_on_the_loop_and_in_threads(app: App, kept: Kept) -> None:
    @app.task(name="on_loop")
    async def on_loop(n: int) -> None:
        await asyncio.sleep(0)
        log.info("%d", n)
        await asyncio.gather(asyncio.create_task(inner(n)))

    async def inner(n: int) -> None:
        log.info("%d", n)

    @app.task(name="in\nthread")
    def in_thread(n: int) -> None:
        log.info("%d", n)

    with working(app):
        jobs = [task.enqueue(n) for n in range(20) for task in (on_loop, in_thread)]
        for job in jobs:
            job.result(WAIT)
    log.info("outside")
    *inside, outside = kept.records
    assert (outside.job_label, hasattr(outside, "job_id")) == ("", False)  # type: ignore[attr-defined]
    expected = {job.id: str(number // 2) for number, job in enumerate(jobs)}
    assert [expected[vars(each)["job_id"]] for each in inside] == [each.getMessage() for each in inside]
    assert len(inside) == 60
    for each in inside:
        seen = vars(each)
        record = app.job(seen["job_id"]).record()
        assert seen["kind"] in ("on_loop", "in\\nthread")
        assert seen["job_label"] == f"[{seen['kind']} {record.short_id}] "
        assert (seen["queue"], seen["attempt"], seen["max_attempts"]) == ("default", 1, record.max_attempts)


@pytest.mark.ledgers("memory")
def test_values_of_extra_stay(app: App, kept: Kept) -> None:
    @app.task(name="own")
    def own() -> None:
        log.info("x", extra={"kind": "mine"})
        log.info("x", extra={"job_id": "another"})

    own.enqueue()
    app.run(burst=True)
    mine, of_another = map(vars, kept.records)
    assert mine["kind"] == "mine"
    assert mine["job_label"].startswith("[own ")
    assert (of_another["job_label"], "kind" in of_another) == ("", False)


def _broken_setup() -> None:
    raise RuntimeError("no log server")


@pytest.mark.ledgers("memory")
def test_the_setup_of_a_process_is_named_if_it_fails() -> None:
    with handlers.app as app, working(app, process_setup=_broken_setup):
        for _ in range(2):
            with pytest.raises(JobFailed, match="cannot begin: RuntimeError: no log server"):
                handlers.pid.enqueue(1).result(WAIT)
