"""The command line: arguments in, text or JSON out. It decides nothing; what it does, the library does.

`main` keeps its promises about endings: a documented exit code, an error with its next step on stderr, never a traceback
(unless `TOWPATH_DEBUG=1`), and quiet when the reader of a pipe has gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. The entry point `towpath` and `python -m towpath`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # Whatever the terminal's encoding cannot spell is escaped instead of being an error.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _version() if arguments == ["--version"] else _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader had enough (`towpath jobs list | head -1`). Python would complain once more when it
        # flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _version() -> int:
    """Without click: this is asked by scripts and must be quick."""
    from importlib.metadata import version

    print(f"towpath {version('towpath')}")
    return 0


def _run(arguments: list[str]) -> int:
    from towpath.cli.base import as_failure, report, root

    try:
        # Not `root.main`, which has endings of its own.
        with root.make_context("towpath", arguments) as context:
            code = root.invoke(context)
    except BrokenPipeError:
        raise
    except BaseException as error:
        failure = as_failure(error)
        if os.environ.get("TOWPATH_DEBUG") == "1" and failure.message:
            import traceback

            from towpath.escapes import escape

            sys.stderr.write(escape("".join(traceback.format_exception(error)), lines=True))
        return report(failure, as_json="--json" in arguments)
    return code if isinstance(code, int) else 0
