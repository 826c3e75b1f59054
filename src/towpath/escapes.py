"""Escaping of untrusted text for terminals and logs.

A job's kind, key, headers or error may contain characters that control a terminal (C0 and C1 controls, DEL),
that reorder or hide text (bidirectional controls, zero-width and tag characters), or that start a new line of
a log. `escape` writes such characters as Python does: `\\x1b`, `\\u202e`. Errors and explanations escape
their text when they are created. Every logger of Towpath comes from `get_logger`, which escapes its records.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

_CONTROLS: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u3164\uffa0"  # invisible
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # zero-width, bidirectional, separators
    "\ud800-\udfff\U000e0000-\U000e007f"  # lone surrogates, tags
)
_ANY: Final = re.compile(f"[\t\n{_CONTROLS}]")
_BUT_LINES: Final = re.compile(f"[{_CONTROLS}]")
_SHORT: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


_SECRET: Final = re.compile(r"(?<=://)([^/?@]*?:)[^?]*(?=@)|([?&](?:ssl)?password=)[^&]*")


def without_password(url: str) -> str:
    """The URL without its password, for errors, logs and terminals."""
    return _SECRET.sub(r"\1\2***", url)


def escape(text: str, lines: bool = False) -> str:
    """Escape control, invisible and bidirectional characters. With `lines`, tabs and line feeds are kept."""
    return (_BUT_LINES if lines else _ANY).sub(_python_escape, text)


def _python_escape(found: re.Match[str]) -> str:
    letter = found[0]
    code = ord(letter)
    if letter in _SHORT:
        return _SHORT[letter]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def escape_json(document: str) -> str:
    """Write such characters as JSON escapes. A JSON parser returns the original text."""
    return _BUT_LINES.sub(_json_escape, document)


def _json_escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


class EscapeFilter(logging.Filter):
    """Escapes arguments, message and traceback of each record, and indents their further lines. An argument
    that needs no escape keeps its type. `lines`: the lines of an argument are kept, too, and not escaped."""

    lines = False

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, dict):
            record.args = {name: _escaped(value, self.lines) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple([_escaped(value, self.lines) for value in record.args])
        if isinstance(record.msg, str):
            record.msg = escape(record.msg, lines=True).replace("\n", "\n  ")
        else:
            record.msg = _escaped(record.msg, self.lines)
        if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None and not record.exc_text:
            record.exc_text = _escaped_traceback(record.exc_info)
        return True


def _escaped(value: Any, lines: bool) -> Any:
    if isinstance(value, int | float | None):
        return value
    try:
        text = str(value)
    except Exception:
        return value  # `logging` reports it
    escaped = escape(text, lines)
    if lines:
        escaped = escaped.replace("\n", "\n  ")
    return value if escaped == text else escaped


def _escaped_traceback(info: Any) -> str | None:
    """The escaped traceback if a message in it could be taken for other log lines; else None, and the
    formatter renders it as usual."""
    text = logging.Formatter().formatException(info)
    messages: list[str] = []
    error: BaseException | None = info[1]
    while error is not None and len(messages) < 100:
        try:
            messages.append(str(error))
        except Exception:
            messages.append("")  # the formatter prints that `str` failed
        error = error.__cause__ or error.__context__
    if not any("\n" in message for message in messages) and escape(text, lines=True) == text:
        return None
    return "\n".join(f"  {escape(line)}" for line in text.split("\n"))


_escapes: Final = EscapeFilter()


def get_logger(name: str) -> logging.Logger:
    """Return the logger of this name with the escaping filter. All loggers of Towpath are created here."""
    found = logging.getLogger(name)
    found.addFilter(_escapes)  # `logging` adds a filter only once
    return found
