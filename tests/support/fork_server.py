"""The process of `Forks` (tests/support/forks.py): imports Towpath, then forks for each request on stdin.

A file of its own with few imports: a program that has forgotten an import must fail in it."""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

import towpath.ledger.memory.ledger
import towpath.ledger.sqlite.ledger
import towpath.operations.service  # noqa: F401


def request_of_child() -> dict[str, Any] | None:
    """Return the request in the child that is to run it, and None at the end of stdin. Exit codes are
    printed."""
    for line in sys.stdin.buffer:
        child = os.fork()
        if not child:
            request: dict[str, Any] = json.loads(line)
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(request: dict[str, Any]) -> dict[str, Any]:
    """Take over directory, files and arguments of the program. Returns the names of its `__main__`."""
    os.chdir(request["folder"])
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT),
        (2, request["err"], os.O_WRONLY | os.O_CREAT),
    ):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["-c"]
    sys.path[0] = ""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    return main.__dict__


if __name__ == "__main__":
    request = request_of_child()
    if request is not None:
        exec(compile(request["program"], "<string>", "exec", dont_inherit=True), become(request))
