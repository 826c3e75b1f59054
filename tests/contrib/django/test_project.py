"""The settings of the backend, the worker of a project, and its commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings
from psycopg.conninfo import conninfo_to_dict

from tests.contrib.django.conftest import Project
from tests.contrib.django.shop import tasks
from tests.support.documents import ROOT
from towpath.contrib.django import DjangoOption, TowpathBackend, task_options, towpath_app
from towpath.contrib.django.compat import BaseTaskBackend
from towpath.contrib.django.configuration import OWN_OPTIONS, TASK_OPTIONS, url_of_database

DUMMY = BaseTaskBackend.__module__.replace("base", "dummy")


def problem(options: dict[str, Any], queues: list[str]) -> str:
    """The error of the system check. The first use raises too."""
    backend = TowpathBackend("default", {"OPTIONS": options, "QUEUES": queues})
    [error] = backend.check()
    with pytest.raises(DjangoOption):
        _ = backend.app
    return str(error.msg)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"urls": "memory://"}, "'url'?"),
        ({"priority": 3}, "one of url, database, enqueue_on_commit, include, name, max_attempts"),
        ({"url": 3}, "the URL of a ledger, such as sqlite:///jobs.db"),
        ({"url": "jobs.db"}, "the URL of a ledger, such as sqlite:///jobs.db"),
        ({"database": "nowhere"}, "a name in DATABASES (default)"),
        ({"enqueue_on_commit": "nowhere"}, "a name in DATABASES (default)"),
        ({"database": "default"}, "a database on PostgreSQL; use 'url' for a ledger beside"),
        ({"database": "default", "enqueue_on_commit": True}, "left out beside 'database'"),
    ],
)
def test_a_wrong_option_is_found_by_the_system_check(options: dict[str, Any], expected: str) -> None:
    [name] = [name for name in options if name != "database"] or ["database"]
    text = problem(options, ["default"])
    assert f"TASKS['default'] option {name!r}" in text
    assert expected in text


def test_a_wrong_queue_and_a_file_of_django_are_found() -> None:
    assert "letters, digits" in problem({"url": "memory://"}, ["a queue"])
    settings = {**connections.settings["default"], "NAME": Path("shop.db").absolute()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(connections.settings, "default", settings)
        text = problem({"url": "sqlite:///shop.db?synchronous=normal"}, [])
    assert "a file of its own: DATABASES['default'] uses this one" in text


def test_the_options_are_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "options.md").read_text("utf-8")
    table = text.partition("| `OPTIONS` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*OWN_OPTIONS, *TASK_OPTIONS]


def test_task_options_are_checked() -> None:
    with pytest.raises(DjangoOption, match="one of max_attempts, backoff, timeout, retention"):
        task_options(queue="mail")
    with pytest.raises(DjangoOption, match="below @task, on the function itself"):
        task_options(max_attempts=2)(tasks.price)


def test_another_backend_has_no_app(project: Project) -> None:
    with override_settings(TASKS={"default": {"BACKEND": f"{DUMMY}.DummyBackend"}}):
        with pytest.raises(DjangoOption, match="TowpathBackend"):
            towpath_app()


class Wrapper:
    """A connection of Django with these parameters."""

    def __init__(self, **params: Any) -> None:
        self._params = params

    def get_connection_params(self) -> dict[str, Any]:
        return {"client_encoding": "UTF8", "cursor_factory": object, "prepare_threshold": 5, **self._params}


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        ({"dbname": "shop"}, "postgresql:///shop"),
        ({"service": "shop"}, "postgresql:///?service=shop"),
        (
            {"dbname": "a b", "user": "ann", "password": "p@:/", "host": "db", "port": "5433"},
            "postgresql://ann:p%40%3A%2F@/a%20b?host=db&port=5433",
        ),
        (
            {"dbname": "shop", "host": "/run/pg", "sslmode": "require", "connect_timeout": 5},
            "postgresql:///shop?host=%2Frun%2Fpg&sslmode=require&connect_timeout=5",
        ),
    ],
)
def test_the_url_of_a_database(params: dict[str, str], shown: str) -> None:
    url = url_of_database(Wrapper(**params))
    assert url == shown
    assert conninfo_to_dict(url) == {name: str(value) for name, value in params.items()}


def test_the_command_runs_a_worker(project: Project, sqlite_url: str, capfd: Any) -> None:
    project.tasks({"url": sqlite_url})
    result, letter = tasks.price.enqueue("apple"), tasks.mail.enqueue("ada")
    call_command("towpath_worker", "--burst", "--queues", "default", verbosity=0)
    result.refresh()
    letter.refresh()
    assert (result.status, letter.status) == ("SUCCESSFUL", "READY")
    call_command("towpath_worker", burst=True, name="w", concurrency=1)
    letter.refresh()
    assert letter.status == "SUCCESSFUL"
    assert "Worker" in capfd.readouterr().err


def test_errors_of_the_command(project: Project, sqlite_url: str, capfd: Any) -> None:
    project.tasks({"url": sqlite_url})
    with pytest.raises(CommandError, match="backend is 'nowhere'; it must be an alias in TASKS"):
        call_command("towpath_worker", backend="nowhere")
    with pytest.raises(SystemExit, match="2"):
        call_command("towpath_worker", "--concurrency", "none")
    assert "'none' is not a valid" in capfd.readouterr().err
