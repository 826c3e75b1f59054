"""The command line: parses arguments, calls the library, prints text or JSON.

`main` returns a documented exit code. Errors go to stderr with a next step. A traceback is printed only with
`TOWPATH_DEBUG=1`. A closed pipe on stdout is not an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Entry point of `towpath` and `python -m towpath`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the terminal's encoding lacks instead of raising UnicodeEncodeError.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _version() if arguments == ["--version"] else _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe (`towpath jobs list | head -1`). Without the redirect Python would report
        # the error again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _version() -> int:
    """Print the version without importing click, because scripts call this often."""
    from importlib.metadata import version

    print(f"towpath {version('towpath')}")
    return 0


def _run(arguments: list[str]) -> int:
    from towpath.cli.base import as_failure, report, root

    try:
        # `root.main` would exit by itself, with other exit codes.
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
