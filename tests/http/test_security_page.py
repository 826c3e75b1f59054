"""The commands of docs/security.md, run as they are written, with another port."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT, blocks
from tests.support.processes import command
from tests.support.shell import Shell


def bash(line: str) -> str:
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, (line, ran)
    return ran.stdout


def test_the_page(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    text = (ROOT / "docs" / "security.md").read_text("utf-8")
    groups = [
        [line.strip() for line in body.replace("\\\n", "").split("$ ")[1:]]
        for body in blocks(text, "console")
    ]
    (*prepare, serve), [enqueue], (listing, revoke), (new, stats, deny) = groups
    for line in prepare:
        bash(line)
    assert shlex.split(serve)[:2] == ["towpath", "serve"]
    arguments = [re.sub("9341", "0", word) for word in shlex.split(serve)[1:]]
    with command(shell, *arguments, "--json") as server:
        address = json.loads(server.until("address"))["address"]
        port = address.rpartition(":")[2]

        def curl(line: str) -> dict[str, object]:
            found: dict[str, object] = json.loads(bash(f"{line.replace('9341', port)} -sS"))
            return found

        assert curl(enqueue)["queue"] == "orders"
        bash(new)
        assert curl(stats)["namespace"] == "shop"
        id = bash(listing).splitlines()[1].split()[0]
        assert "revoked" in bash(revoke.replace("2tmxxb27zr9c", id))
        assert "denies" in bash(deny)
        while (found := curl(stats)).get("error") is None:
            pass  # the server reads the denylist once a second
        assert found["error"] == "unauthorized"
        while (found := curl(enqueue)).get("error") is None:
            pass
        assert found["error"] == "unauthorized"
        assert server.end(signal.SIGTERM) == 0
