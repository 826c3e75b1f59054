"""A plan of three steps on files: it fails, and what was done is undone; then it succeeds."""

from pathlib import Path

from towpath import App, Fail
from towpath.flows.graph import drawing, text
from towpath.flows.plan import Plan, Step

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
    """A pure function: the plan is data, and nothing has happened yet."""

    def file(name: str, path: str, *after: Step) -> Step:
        return Step(
            name,
            "laptop",
            write.of(path, version),  # type: ignore[arg-type]
            undo=remove.of(path),  # type: ignore[arg-type]
            check=exists.of(path),  # type: ignore[arg-type]
            after=after,  # type: ignore[arg-type]
        )

    notes, page = file("notes", "notes.txt"), file("page", "page.html")
    return Plan("release", (notes, page, file("index", "site/index.html", notes, page)))


def run(id: str) -> None:
    handle = app.plans.submit(release("1.0"), id=id, by="ada")
    app.run(queues=("node/laptop",), burst=True)
    status = handle.status()
    print(f"{id}: {status.state}, files: {sorted(str(path) for path in Path().rglob('*.[th]*'))}")
    if status.why:
        print(f"  because {status.why}: {handle.step('index').error}")


with app:
    print(text(drawing(release("1.0").steps, title="release")))
    run("first")
    Path("site").mkdir()
    run("second")
