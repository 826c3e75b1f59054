"""The example project in processes of its own, and the page whose code it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.documents import ROOT, blocks
from towpath import App

EXAMPLE = ROOT / "examples" / "django_project"
VISIT = """
import django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("migrate", verbosity=0)
answer = Client(headers={"host": "localhost"}).post("/orders", {"item": "lamp", "email": "ada@example.com"})
print(answer.json()["task"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "example"))


def run(folder: Path, *words: str, **environment: str) -> str:
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "project.settings", **environment}
    command = [sys.executable, "-W", "error", *words]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_the_tests_of_the_example_pass(folder: Path) -> None:
    assert "Ran 2 tests" in run(folder, "manage.py", "test")


def test_the_example_on_postgres(folder: Path, postgres_url: str) -> None:
    place = urlsplit(postgres_url)
    found = {"HOST": place.hostname, "PORT": place.port, "USER": place.username, "DATABASE": place.path[1:]}
    environment = {f"PG{name}": str(value) for name, value in found.items()}
    id = run(folder, "-c", VISIT, **environment).strip()
    shown = run(folder, "manage.py", "towpath_worker", "--burst", **environment)
    assert "To ada@example.com: your lamp is on its way" in shown
    assert "Tasks: orders.tasks.confirm" in shown
    with App(postgres_url) as app:
        assert app.job(id).result(timeout=0) == "confirmed lamp to ada@example.com"


def test_the_code_of_the_page_is_the_example() -> None:
    page = (ROOT / "docs" / "frameworks" / "django.md").read_text("utf-8")
    files = [path.read_text("utf-8") for path in sorted(EXAMPLE.rglob("*.py"))]
    shown = blocks(page, "py")
    assert len(shown) >= 4
    assert [block for block in shown if not any(block in text for text in files)] == []
