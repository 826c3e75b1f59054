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
        code = _answer(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe (`towpath jobs list | head -1`). Without the redirect Python would report
        # the error again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _answer(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        return _print_version()
    if (instruction := os.environ.get("_TOWPATH_COMPLETE")) is not None:
        from towpath.cli.completion import complete

        return complete(instruction)
    return _run(arguments)


def _print_version() -> int:
    """Print the version without importing click, because scripts call this often."""
    print(f"towpath {version()}")
    return 0


def version() -> str:
    """The version of Towpath; in a git checkout with the commit: `0.1.0+g1a2b3c4`."""
    from importlib.metadata import version as installed

    commit = _commit(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))))
    return installed("towpath") + (f"+g{commit[:7]}" if commit else "")


def _commit(folder: str) -> str:
    """The commit that is checked out in this folder; empty if it is no checkout. Reads the files of git,
    because the program may be missing."""
    place = os.path.join(folder, ".git")
    try:
        if os.path.isfile(place):  # a worktree: `gitdir: PATH`
            place = os.path.join(folder, _line(place).removeprefix("gitdir: "))
        head = _line(os.path.join(place, "HEAD"))
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if os.path.isfile(common := os.path.join(place, "commondir")):
            place = os.path.join(place, _line(common))
        if os.path.isfile(ref := os.path.join(place, name)):
            return _line(ref)
        with open(os.path.join(place, "packed-refs"), encoding="utf-8") as packed:
            return next((line.split()[0] for line in packed if line.rstrip().endswith(f" {name}")), "")
    except (OSError, UnicodeDecodeError):
        return ""


def _line(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.readline().strip()


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
