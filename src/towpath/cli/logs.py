"""The log of `worker` and `dev`: its options, and lines as text or as JSON on stderr."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from towpath import JobLogFilter
from towpath.cli.base import combine, print_stderr
from towpath.escapes import EscapeFilter, escape_json, get_logger

LEVELS = ("debug", "info", "warning", "error", "critical")
TEXT = "%(asctime)s %(levelname)s %(name)s: %(job_label)s%(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "job_label"}
"""Attributes of every record. All others come from `extra`, or are the fields of the running job."""


class LogArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The options as given; None and False leave the defaults, INFO and text."""

    log_level: str | None = None
    log_format: str | None = None
    verbose: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        given = [
            name
            for name, value in (
                ("--log-level", self.log_level),
                ("--verbose", self.verbose),
                ("--quiet", self.quiet),
            )
            if value
        ]
        if len(given) > 1:
            raise click.UsageError(
                f"{' and '.join(given)} exclude each other.", click.get_current_context(silent=True)
            )

    @property
    def level(self) -> int:
        name = self.log_level or ("debug" if self.verbose else "warning" if self.quiet else "info")
        return logging.getLevelNamesMapping()[name.upper()]

    @property
    def json(self) -> bool:
        return self.log_format == "json"

    def arguments(self) -> list[str]:
        """The same options as arguments of a child's command line."""
        words = ["--log-level", logging.getLevelName(self.level).lower()]
        return [*words, "--log-format", self.log_format] if self.log_format else words

    def configure(self) -> None:
        """Log to stderr. If the program has configured logging itself, its handlers stay; a given level then
        applies to the loggers of Towpath."""
        if logging.root.handlers:
            if self.log_level or self.verbose or self.quiet:
                get_logger("towpath").setLevel(self.level)
            if self.log_format is not None:
                print_stderr(["--log-format has no effect: the program has configured logging itself."])
            return
        handler = logging.StreamHandler()
        handler.addFilter(JobLogFilter())
        if self.json:
            handler.setFormatter(JsonFormatter())
        else:
            handler.addFilter(_EscapeProgram())
            handler.setFormatter(logging.Formatter(TEXT))
        logging.basicConfig(level=self.level, handlers=[handler])

    def configure_process(self) -> None:
        """`configure` in a process for tasks with `process=True`, unless its modules have configured
        logging."""
        if not logging.root.handlers:
            self.configure()


log_options = combine(
    click.option(
        "--log-level",
        type=click.Choice(LEVELS, case_sensitive=False),
        help="Lowest level of log lines on stderr. Default: info.",
    ),
    click.option(
        "-v", "--verbose", is_flag=True, help="Same as --log-level debug: logs each job, at any rate."
    ),
    click.option("-q", "--quiet", is_flag=True, help="Same as --log-level warning: logs only problems."),
    click.option(
        "--log-format",
        type=click.Choice(("text", "json")),
        help="Log lines as text or as JSON, one object per line. Default: text.",
    ),
)


class _EscapeProgram(EscapeFilter):
    """Escapes the program's own log lines, which may contain text of a job. A message of several lines stays
    readable: its further lines are indented, so that none of them looks like another record. Lines of Towpath
    are escaped by its loggers."""

    lines = True

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name.startswith("towpath.") or super().filter(record)


class JsonFormatter(logging.Formatter):
    """One JSON object per record: `time`, `level`, `logger`, `message`, the values of `extra`, the fields of
    the running job, and `exception` with the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        message, _, more = record.getMessage().partition("\n")
        data: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        data |= {name: value for name, value in vars(record).items() if name not in _STANDARD | data.keys()}
        if record.exc_info and record.exc_info[1] is not None:
            more = record.exc_text or self.formatException(record.exc_info)
        if more:
            data["exception"] = more
        try:
            line = msgspec.json.encode(data, enc_hook=str)
        except (TypeError, ValueError, UnicodeEncodeError):  # keys or values of `extra` without a JSON form
            line = msgspec.json.encode({name: _text(value) for name, value in data.items()})
        return escape_json(line.decode())


def _text(value: object) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()
