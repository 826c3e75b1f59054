"""The wheel and the source distribution: built, and installed in an environment of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 5 * 60


def run(command: Sequence[str | Path], cwd: Path) -> str:
    ended = subprocess.run(
        list(command), cwd=cwd, capture_output=True, text=True, check=False, timeout=MINUTES
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "hatchling", "build", "-d", folder], ROOT)
    return folder


def test_the_wheel_carries_code_sql_types_and_licence(dist: Path) -> None:
    [wheel] = dist.glob("towpath-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    source = [
        path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    missing = {path.relative_to(ROOT / "src").as_posix() for path in source} - set(names)
    assert missing == set()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "bench")) for name in names)


def test_the_source_distribution_builds_the_same_package(dist: Path) -> None:
    [archive] = dist.glob("towpath-*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/towpath/py.typed"} <= names


def test_the_wheel_runs_in_a_fresh_environment(dist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    bin = tmp_path / "venv" / "bin"
    [wheel] = dist.glob("towpath-*.whl")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", bin / "python"]
    run([*pip, "install", "-q", "--disable-pip-version-check", wheel], tmp_path)
    shown = json.loads(run([bin / "towpath", "demo", "--json"], tmp_path))
    assert shown
    assert run([bin / "towpath", "--version"], tmp_path).startswith("towpath 0.")
