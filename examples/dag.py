"""A small graph: a group of jobs runs in parallel, and a final job receives all results."""

import asyncio

import towpath
from towpath import App

app = App("sqlite:///dag.db")


@app.task
async def count(text: str) -> int:
    return len(text.split())


@app.task
async def total() -> int:
    counts: list[int] = towpath.current().results()
    return sum(counts)


@app.task
async def report(title: str) -> str:
    [words] = towpath.current().results()
    return f"{title}: {words} words"


async def main() -> None:
    async with app:
        pages = ["to the lock and back", "along the canal", "home"]
        group = await app.agroup([count.of(page) for page in pages], then=total.of())
        assert group.then is not None
        last = await report.options(after=group.then).aenqueue("The towpath")
        print(last.explain())

        worker = asyncio.create_task(app.arun(concurrency=4))
        print("counts:", await group.aresult(timeout=10))
        print(await last.aresult(timeout=10))

        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


asyncio.run(main())
