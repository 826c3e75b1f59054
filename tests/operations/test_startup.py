"""The start of a worker: modules of tasks, an app without tasks, jobs of unknown kinds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import enqueue
from tests.support.running import working
from tests.support.waiting import until
from towpath import App
from towpath.core.job import Reason
from towpath.errors import InvalidInput
from towpath.operations.places import shown_url
from towpath.operations.startup import import_included

TASK = "from canal.app import app\n\n@app.task\ndef {0}() -> str:\n    return '{0}'\n"
REFUSED = {(Reason.REFUSED, 0)}
FILES = {
    "app.py": "from towpath import App\napp = App('memory://', include=['canal.*.tasks'])\n",
    "locks/tasks.py": TASK.format("lift"),
    "boats/tasks.py": TASK.format("float"),
    "boats/_private.py": "raise SystemError",
    "quay/__init__.py": "",
    "plain.py": "",
    "broken/bad.py": "1 / 0",
}


@pytest.fixture
def canal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `canal` with tasks in several modules."""
    for name, text in {"__init__.py": "", **FILES}.items():
        path = tmp_path / "canal" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "canal"]:
        del sys.modules[name]


def test_a_worker_imports_the_modules_of_its_tasks(canal: Path) -> None:
    from canal.app import app  # type: ignore[import-not-found]

    assert dict(app.tasks) == {}
    with app, working(app):
        assert sorted(app.tasks) == ["canal.boats.tasks.float", "canal.locks.tasks.lift"]
        assert app.tasks["canal.locks.tasks.lift"].enqueue().result(10) == "lift"


def test_a_test_bench_imports_them_too(canal: Path) -> None:
    from canal.app import app

    with app.testing() as bench:
        job = app.tasks["canal.boats.tasks.float"].enqueue()
        bench.drain()
        assert job.result() == "float"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("canal.nowhere", "there is no module canal.nowhere"),
        ("canal.broken.bad", "canal.broken.bad raised ZeroDivisionError: division by zero"),
        ("canal.*.nowhere", "none matches"),
        ("canal.plain.*", "canal.plain is a module, not a package"),
        ("nowhere.*", "there is no module nowhere"),
    ],
)
def test_modules_that_cannot_be_imported(canal: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=r"include") as error:
        import_included([name])
    assert message in str(error.value)


@pytest.mark.parametrize("value", ["shop.tasks", ["*"], ["shop/tasks.py"], ["shop..tasks"], [7]])
def test_what_is_no_list_of_modules(value: object) -> None:
    with pytest.raises(InvalidInput, match="include"):
        App("memory://", include=value)  # type: ignore[arg-type]


def test_each_unknown_kind_is_logged_once(canal: Path, caplog: pytest.LogCaptureFixture) -> None:
    import_included(["canal"])
    with App("memory://") as app, caplog.at_level(logging.INFO, "towpath"):

        @app.task(name="greeting")
        def greeting() -> None: ...

        kinds = ("canal.locks.tasks.lift", "greetings", "other", "other")
        with working(app, queues=("*",)):
            jobs = [enqueue(app, kind) for kind in kinds]
            ids = [job.id for job in jobs]
            until(
                lambda: {(job.reason, job.attempts) for job in app.ledger.get_many(ids).values()} == REFUSED
            )
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert 'add --include canal.locks.tasks, or App(include=["canal.locks.tasks"])' in warnings[0]
    assert (
        "A task here is called greeting. A renamed task keeps its jobs with name='greetings'" in warnings[1]
    )
    assert "Import the module that defines it" in warnings[2]
    assert "canal.locks" not in sys.modules


def test_an_app_without_tasks(caplog: pytest.LogCaptureFixture) -> None:
    with App("memory://") as app:
        app.run(burst=True)
    assert "the app has no tasks" in caplog.text


def test_urls_as_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_url("sqlite:///a b%23.db?mode=0660") == f"sqlite:///{tmp_path}/a b%23.db?mode=0660"
    assert shown_url("postgresql://ada:secret@host/db") == "postgresql://ada:***@host/db"
    assert shown_url("memory://") == "memory://"
