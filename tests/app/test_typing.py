"""Type checkers see a task's own parameters: `good.py` has no error, and every line of `bad.py` has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "typing"


def checked(*paths: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--warn-unused-ignores",
        "--no-error-summary",
        *map(str, paths),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    return "".join(line + "\n" for line in ended.stdout.splitlines() if line.startswith("tests/typing"))


def test_what_must_be_accepted_and_what_must_be_refused() -> None:
    assert checked(FOLDER / "good.py", FOLDER / "bad.py") == ""


def test_an_error_would_be_noticed(tmp_path: Path) -> None:
    lines = [line for line in (FOLDER / "bad.py").read_text("utf-8").splitlines() if "type: ignore" in line]
    assert len(lines) >= 15
    plain = FOLDER / "bad.py"
    wrong = tmp_path / "plain.py"
    wrong.write_text(plain.read_text("utf-8").replace("# type: ignore", "# "), "utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(wrong)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert ended.stdout.count("plain.py") >= len(lines)
