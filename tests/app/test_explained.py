"""Why a job does not run, with several workers, on SQLite and PostgreSQL: busy slots; and because of which
job another one failed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.running import aworking
from tests.support.shell import Shell
from tests.support.waiting import auntil
from towpath import App
from towpath.errors import JobFailed

pytestmark = pytest.mark.ledgers("sqlite", "postgres")


@pytest.fixture
def apps(url: str) -> Iterator[list[App]]:
    with ExitStack() as stack:
        apps = [stack.enter_context(App(url)) for _ in range(2)]
        yield apps
        assert apps[0].ledger.check() == []


def test_explain_counts_busy_slots_and_jobs_ahead(apps: list[App]) -> None:
    let_go = asyncio.Event()

    async def hold() -> None:
        await let_go.wait()

    # A job with one attempt is claimed only into a free slot.
    first, second = [app.task(name="hold", queue="mail", max_attempts=1)(hold) for app in apps]

    async def main() -> None:
        async with aworking(apps[0], concurrency=2), aworking(apps[1], concurrency=2):
            for _ in range(4):
                await first.aenqueue()
            await auntil(lambda: apps[0].queue("mail").stats().counts.running == 4)
            waiting = [await second.aenqueue() for _ in range(3)]
            for n, ahead in enumerate(["no job is", "1 job is", "2 jobs are"]):
                found = await asyncio.to_thread(waiting[n].explain)
                assert (found.gate, found.count) == ("busy", n)
                assert str(found).endswith(
                    f": ready; all 4 slots of 2 workers on queue mail are busy; {ahead} ahead"
                )
            let_go.set()
            await asyncio.gather(*[each.aresult(20) for each in waiting])

    asyncio.run(main())


def test_the_job_that_failed_first_is_named(apps: list[App], url: str, tmp_path: Path) -> None:
    app, _ = apps

    @app.task(name="load", max_attempts=1)
    def load() -> None:
        raise ValueError("no such disk")

    @app.task(name="show")
    def show() -> None: ...

    cause = load.enqueue()
    middle = show.options(after=cause).enqueue()
    last = show.options(after=[middle]).enqueue()
    group = app.group([show.options(after=[last]).of()])
    app.run(burst=True)
    sentence = f"job {cause.id} (load) failed (exhausted): ValueError: no such disk"
    for wait in (last.result, lambda _: asyncio.run(last.aresult()), group.result):
        with pytest.raises(JobFailed) as failed:
            wait(10)
        assert (failed.value.culprit, failed.value.error) == (cause.id, sentence)
        assert str(failed.value).endswith(f"failed (dependency): {sentence}")
    assert last.explain().by == (cause.id,)
    shell = Shell(tmp_path)
    assert f", because {sentence}" in shell("--url", url, "jobs", "explain", last.id).out
    assert sentence in " ".join(shell("--url", url, "jobs", "show", last.id).out.split())
