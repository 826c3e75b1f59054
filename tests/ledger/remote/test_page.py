"""The quick start of docs/remote.md, as it is typed."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

from tests.support.documents import ROOT, blocks
from tests.support.processes import command
from tests.support.shell import Shell

PAGE = (ROOT / "docs" / "remote.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:9341"


def typed(block: str) -> list[list[str]]:
    """The commands of `towpath` in a block, without the name of the program."""
    lines = [shlex.split(line.removeprefix("$ ")) for line in block.splitlines()]
    return [line[1:] for line in lines if line[0] == "towpath"]


def test_the_quick_start_works(tmp_path: Path) -> None:
    [serve], [work], others = (typed(block) for block in blocks(PAGE, "console"))
    there, here = (Shell(tmp_path / name) for name in ("there", "here"))
    for shell in (there, here):
        shell.folder.mkdir()
    (here.folder / "jobs.py").write_text(blocks(PAGE, "python")[0])
    assert f"export TOWPATH_URL={ADDRESS}" in PAGE
    # The port may be in use on this machine.
    with command(there, *(each.replace(":9341", ":0") for each in serve)) as server:
        url = ["--url", server.until("serves").rpartition(" ")[2]]
        with command(here, *url, *work, "--verbose") as worker:
            for arguments in others[:-1]:
                here.run(*url, *arguments)
            worker.until("greet")
            assert worker.end(signal.SIGTERM) == 0
        assert "done" in here.run(*url, *others[-1]).out
        assert server.end(signal.SIGTERM) == 0
