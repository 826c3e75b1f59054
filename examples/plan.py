"""A plan of three steps on files: it fails, and what was done is undone; then it succeeds."""

import logging
from pathlib import Path

from towpath import App, Fail, Plan, Step
from towpath.flows.graph import drawing, text

logging.getLogger("towpath").setLevel(logging.CRITICAL)  # the failed step is printed below
app = App("sqlite:///plan.db")


@app.task(name="write")
def write(path: str, content: str) -> int:
    if not Path(path).parent.is_dir():
        raise Fail(f"there is no folder {Path(path).parent}")
    return Path(path).write_text(content, "utf-8")


@app.task(name="remove")
def remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


@app.task(name="exists")
def exists(path: str) -> bool:
    return Path(path).exists()


def release(version: str) -> Plan:
    """The plan is data: nothing has happened yet."""
    plan = app.plans.new("release")

    def file(name: str, path: str, *after: Step) -> Step:
        do, undo, check = write.of(path, version), remove.of(path), exists.of(path)
        return plan.step(name, "laptop", do, undo=undo, check=check, after=after)

    notes, page = file("notes", "notes.txt"), file("page", "page.html")
    file("index", "site/index.html", notes, page)
    return plan.built


def run(id: str) -> None:
    handle = app.plans.submit(release("1.0"), id=id, by="ada")
    app.run(queues=("node/laptop",), burst=True)
    status = handle.status()
    print(f"{id}: {status.state}, files: {sorted(path.name for path in Path().rglob('*.[th]*'))}")
    if status.why:
        error = handle.step("index").error or ""
        print(f"  {status.why}: {error.partition('): ')[2].splitlines()[0]}")


with app:
    print(text(drawing(release("1.0").steps, title="release")))
    run("first")
    Path("site").mkdir()
    run("second")
