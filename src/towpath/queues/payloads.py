"""Payloads and results of unknown programs as values that JSON can hold."""

from __future__ import annotations

import base64
from typing import Any

import msgspec


def decode_body(data: bytes | None, content_type: str = "application/json") -> tuple[Any, str]:
    """(value, encoding): JSON decoded, other UTF-8 as text, everything else as base64."""
    if data is None:
        return None, "none"
    if content_type == "application/json":
        try:
            return msgspec.json.decode(data), "json"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    try:
        return data.decode(), "text"
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"
