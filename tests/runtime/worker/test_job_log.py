"""Log lines of jobs in a program: a filter that raises, exceptions without a text, many failures."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.support.running import working
from tests.support.waiting import WAIT
from towpath import App
from towpath.errors import JobFailed
from towpath.runtime.worker.job_log import MAX_FAILURES


class TextlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.fixture
def memory_app() -> Iterator[App]:
    with App("memory://") as app:
        yield app


def test_a_filter_that_raises_stops_no_job(memory_app: App, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise RuntimeError("a broken filter")

    @memory_app.task
    def double(n: int) -> int:
        return 2 * n

    logger = logging.getLogger("towpath.jobs")
    logger.addFilter(refuse)
    try:
        with caplog.at_level(logging.INFO, "towpath"), working(memory_app):
            assert double.enqueue(4).result(WAIT) == 8
    finally:
        logger.removeFilter(refuse)


def test_an_exception_without_a_text(memory_app: App, caplog: pytest.LogCaptureFixture) -> None:
    @memory_app.task(max_attempts=1)
    def mute() -> None:
        raise TextlessError

    with working(memory_app), pytest.raises(JobFailed, match="TextlessError"):
        mute.enqueue().result(WAIT)
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], TextlessError)
    assert record.__dict__["event"] == "job_failed"


def test_failures_are_logged_up_to_a_rate(memory_app: App, caplog: pytest.LogCaptureFixture) -> None:
    many = 4 * MAX_FAILURES

    @memory_app.task(max_attempts=1)
    def fail(n: int) -> None:
        raise ValueError(n)

    with working(memory_app):
        for job in fail.enqueue_many([fail.of(n) for n in range(many)]):
            with pytest.raises(JobFailed):
                job.result(WAIT)
    shown = [each for each in caplog.records if each.levelno == logging.ERROR]
    counts = [each.__dict__ for each in caplog.records]
    hidden = [each["count"] for each in counts if each.get("event") == "failures_hidden"]
    assert len(shown) + sum(hidden) == many
    assert MAX_FAILURES <= len(shown) < many
