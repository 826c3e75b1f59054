"""Argument, environment, file, default; and the origin of every value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.shell import Shell
from towpath import App
from towpath.core.lanes import Lane
from towpath.errors import InvalidInput
from towpath.settings import DEFAULT_URL, Settings, resolve


def here(folder: Path, url: str | None = None, **environment: str) -> Settings:
    return resolve(url, environment=environment, folder=folder)


def test_defaults(tmp_path: Path) -> None:
    settings = here(tmp_path)
    assert (settings.url, settings.origin) == (DEFAULT_URL, "the default")
    assert (settings.queues, settings.concurrency, settings.lease, settings.grace) == ((), 32, 30.0, 30.0)
    assert set(settings.origins.values()) == {"the default"}


def test_the_order(tmp_path: Path) -> None:
    (tmp_path / "towpath.toml").write_text('url = "sqlite:////file.db"\nconcurrency = 7\n')
    file = here(tmp_path)
    assert (file.url, file.origin, file.concurrency) == (
        "sqlite:////file.db",
        str(tmp_path / "towpath.toml"),
        7,
    )
    environment = here(tmp_path, TOWPATH_URL="memory://", TOWPATH_QUEUES="a, b*", TOWPATH_LEASE="2.5")
    assert (environment.url, environment.origin) == ("memory://", "the environment variable TOWPATH_URL")
    assert (environment.queues, environment.lease, environment.concurrency) == (("a", "b*"), 2.5, 7)
    argument = here(tmp_path, "sqlite:///x.db", TOWPATH_URL="memory://")
    assert (argument.url, argument.origin) == ("sqlite:///x.db", "the argument url")


def test_the_nearest_file_upwards(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "towpath.toml").write_text("concurrency = 1\n")
    assert here(deep).concurrency == 1
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.towpath]\nconcurrency = 2\n")
    assert here(deep).concurrency == 2
    (deep / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert here(deep).concurrency == 2


def test_a_relative_path_in_a_file_is_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "towpath.toml").write_text('url = "sqlite:///work.db"\n')
    (tmp_path / "sub").mkdir()
    assert here(tmp_path / "sub").url == f"sqlite:///{tmp_path.resolve() / 'work.db'}"
    assert here(tmp_path, TOWPATH_URL="sqlite:///work.db").url == "sqlite:///work.db"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("colour = 1", "colour"),
        ("concurrency = 'many'", "concurrency in"),
        ("concurrency = 0", "concurrency in"),
        ("queues = 'mail'", "queues in"),
        ("queues = ['a b']", "queues in"),
        ("grace = -1", "grace in"),
        ("url = 5", "url in"),
        ("x = = 1", "TOML"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "towpath.toml").write_text(content + "\n")
    with pytest.raises(InvalidInput) as caught:
        here(tmp_path)
    assert message in str(caught.value)
    assert "towpath.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("CONCURRENCY", "many"), ("LEASE", "nan"), ("QUEUES", "a b"), ("PROCESSES", "1.5"), ("NAME", "x" * 300)],
)
def test_a_bad_variable_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"the environment variable TOWPATH_{name}"):
        here(tmp_path, **{f"TOWPATH_{name}": value})


def test_an_empty_variable_is_none(tmp_path: Path) -> None:
    assert here(tmp_path, TOWPATH_URL="").origin == "the default"


def test_an_unknown_argument(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="colour"):
        resolve(None, {"colour": 1}, {}, tmp_path)


def test_a_folder_with_braces(tmp_path: Path) -> None:
    folder = tmp_path / "{name}"
    folder.mkdir()
    (folder / "towpath.toml").write_text("concurrency = 3\n")
    assert here(folder).origins["concurrency"] == str(folder / "towpath.toml")


def test_the_app_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOWPATH_NAME", "ada")
    monkeypatch.delenv("TOWPATH_URL", raising=False)
    (tmp_path / "towpath.toml").write_text('url = "memory://"\n')
    app = App()
    assert (app.engine.url, app.engine.name, app.settings.origins["name"]) == (
        "memory://",
        "ada",
        "the environment variable TOWPATH_NAME",
    )
    with app:
        assert app.engine.owner.startswith("ada#")


LANES = """
[lanes.interactive]
queues = ["web", "mail"]
reserved = 4

[lanes.bulk]
queues = ["bulk/*"]
lends = false
ageing = 300
"""


def test_lanes_in_a_file_and_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "towpath.toml").write_text(LANES)
    found = resolve(environment={}, folder=tmp_path).lanes
    assert list(found.items()) == [
        ("interactive", Lane(queues=("web", "mail"), reserved=4)),
        ("bulk", Lane(queues=("bulk/*",), lends=False, ageing=300.0)),
    ]
    found = resolve(environment={"TOWPATH_LANES": "fast:3=a,b; slow=c"}, folder=tmp_path).lanes
    assert found == {"fast": Lane(queues=("a", "b"), reserved=3), "slow": Lane(queues=("c",))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lanes = 3", "a table of lanes"),
        ("[lanes.a]\nqueues = 'q'", "lanes.a"),
        ("[lanes.a]\nqueue = ['q']", "lanes.a"),
        ("[lanes.a]\nqueues = ['q']\nreserved = -1", "lanes.a.reserved"),
        ("[lanes.a]\nqueues = ['q']\nageing = 0.1", "lanes.a.ageing"),
        ("[lanes.a]\nqueues = ['q']\n[lanes.b]\nqueues = ['q']", "lanes.b.queues"),
    ],
)
def test_bad_lanes_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "towpath.toml").write_text(content)
    with pytest.raises(InvalidInput, match=message):
        resolve(environment={}, folder=tmp_path)


@pytest.mark.parametrize("text", ["fast", "=a", "fast=", "fast:x=a", "fast:=a", "a=x;a=y"])
def test_a_bad_lane_in_words(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match="lane"):
        resolve(environment={"TOWPATH_LANES": text}, folder=tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "a=" + "[" * 100_000 + "]" * 100_000,
        "a=" + "{b=" * 5000 + "1" + "}" * 5000,
        "bandwidth." + "up." * 5000 + "x = 1",
    ],
    ids=["lists", "tables", "dotted keys"],
)
def test_deep_nesting_is_an_error_and_no_defect(tmp_path: Path, content: str) -> None:
    (tmp_path / "towpath.toml").write_text(content)
    with pytest.raises(InvalidInput, match="nested too deeply"):
        here(tmp_path)
    ran = Shell(tmp_path).run("stats", code=2)
    assert "nested too deeply" in ran.err
    assert "defect" not in ran.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
@pytest.mark.parametrize("name", ["towpath.toml", "pyproject.toml"])
@pytest.mark.parametrize("way", ["file", "link"])
def test_a_strangers_file_where_everybody_can_write_is_refused(tmp_path: Path, name: str, way: str) -> None:
    project, path = tmp_path / "project", tmp_path / name
    project.mkdir()
    mine = tmp_path / "mine.toml"
    mine.write_text("[tool.towpath]\nconcurrency = 1\n" if name == "pyproject.toml" else "concurrency = 1\n")
    if way == "link":
        path.symlink_to(mine)
    else:
        mine.rename(path)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    assert here(project).concurrency == 1
    tmp_path.chmod(0o1777)
    with pytest.raises(InvalidInput, match="a file of user 65534"):
        here(project)
    os.chown(path, 0, 0, follow_symlinks=False)
    assert here(project).concurrency == 1


def test_a_pyproject_without_our_table_is_nobodys_concern(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('tool = "a text"\n')
    tmp_path.chmod(0o1777)
    assert here(tmp_path).concurrency == 32


def test_priorities_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "towpath.toml").write_text('url = "memory://"\n[priorities]\nurgent = -10\nnormal = 50\n')
    monkeypatch.chdir(tmp_path)
    with App() as app:

        @app.task(priority="urgent")
        def first() -> None: ...

        @app.task
        def second() -> None: ...

        mail = app.queue("mail")
        handles = [first.enqueue(), second.enqueue(), second.options(priority="low").enqueue()]
        ids = [mail.put(b"", priority="urgent"), mail.put(b""), mail.put(b"", priority=7)]
        found = app.ledger.get_many([*[handle.id for handle in handles], *ids])
        assert [found[handle.id].priority for handle in handles] == [-10, 50, 10]
        assert [found[id].priority for id in ids] == [-10, 50, 7]
        with pytest.raises(InvalidInput, match="one of high, normal, low, urgent"):
            mail.put(b"", priority="soon")


def test_the_names_of_an_app_replace_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "towpath.toml").write_text("[priorities]\nurgent = -10\n")
    monkeypatch.chdir(tmp_path)
    with App("memory://", priorities={"bulk": 100}) as app:
        assert app.engine.priorities == {"high": 0, "normal": 5, "low": 10, "bulk": 100}


@pytest.mark.parametrize(
    "table", ["priorities = 3", '[priorities]\nurgent = "soon"', "[priorities]\nurgent = 40000"]
)
def test_priorities_that_are_none(tmp_path: Path, table: str) -> None:
    (tmp_path / "towpath.toml").write_text(table)
    with pytest.raises(InvalidInput, match="priorities"):
        here(tmp_path)
