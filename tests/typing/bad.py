"""Code that a type checker must refuse: each line has its error code, and an unneeded `ignore` is an
error."""

from __future__ import annotations

from tests.typing.good import add, app, hooks, opened, send, writes
from towpath import App

add.enqueue("x")  # type: ignore[arg-type]
add.enqueue()  # type: ignore[call-arg]
add.enqueue(1, 2, 3)  # type: ignore[call-arg]
add.enqueue(1, c=3)  # type: ignore[call-arg]
add.of(None)  # type: ignore[arg-type]
send.enqueue("x", "subject")  # type: ignore[call-arg]
send.enqueue("x", subject=5)  # type: ignore[arg-type]
add.options(colour="red")  # type: ignore[call-arg]
add.options(delay="soon")  # type: ignore[arg-type]
add.options(on_conflict="fight")  # type: ignore[arg-type]
add.enqueue_many([send.of("x")])  # type: ignore[list-item]
number: int = send.enqueue("x").result()  # type: ignore[assignment]
text: str = add(1)  # type: ignore[assignment]
app.task(queue=5)  # type: ignore[call-overload]
app.group([add], on_failure="abort")  # type: ignore[arg-type]
app.cron("* * * * *", missed="never")  # type: ignore[arg-type]
app.queue("q").configure(colour=5)  # type: ignore[call-arg]
app.queue("q").configure(cap="8")  # type: ignore[arg-type]
app.queue("q").part("p").configure(keep=5)  # type: ignore[call-arg]
app.schedules.set("x", missed="never")  # type: ignore[arg-type]
app.queue("q").get(wait=5).ack()  # type: ignore[union-attr]
numbers: list[int] = app.group([add.of(1), send.of("x")]).result()  # type: ignore[assignment]


hooks.lifespan(lambda: 5)  # type: ignore[type-var]
hooks.middleware(opened)  # type: ignore[type-var]
hooks.on_failure(opened)  # type: ignore[type-var]
app.task(on_dead=5)  # type: ignore[call-overload]
writes.enqueue("x", path="here")  # type: ignore[arg-type]
App("memory://", hooks=[hooks])  # type: ignore[arg-type]


async def main() -> None:
    await add.aenqueue(b=1)  # type: ignore[call-arg]
    await send.aenqueue(5)  # type: ignore[arg-type]
