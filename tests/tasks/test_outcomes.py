"""Errors that report throttling by a service."""

from __future__ import annotations

import email.message
import urllib.error
from types import SimpleNamespace

import pytest

from towpath.core.checks import SECOND
from towpath.errors import ProcessDied, TimedOut
from towpath.tasks.outcomes import Retry, Throttled, throttling
from towpath.tasks.task import failure_text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Retry("later"), "towpath.Retry: later"),
        (TimedOut(seconds=0.5), "towpath.errors.TimedOut: it ran longer than 0.5 s"),
        (ProcessDied(exit_code=-9), "towpath.errors.ProcessDied: the process ended with exit code -9"),
    ],
)
def test_stored_errors_have_public_paths(error: Exception, text: str) -> None:
    assert failure_text(error) == text
    assert isinstance(error, TimeoutError) is isinstance(error, TimedOut)


class HttpError(Exception):
    """An error with these attributes, as HTTP clients have them."""

    def __init__(self, **attributes: object) -> None:
        super().__init__("429")
        vars(self).update(attributes)


def urllib_error() -> urllib.error.HTTPError:
    headers = email.message.Message()
    headers["Retry-After"] = "2"
    return urllib.error.HTTPError("http://x", 429, "too many", headers, None)


def raised_from(cause: BaseException) -> BaseException:
    try:
        raise RuntimeError("cannot copy") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (Throttled(), 0),
        (Throttled("busy", after=1.5), 1_500_000),
        (Retry("busy", after=3, throttled=True), 3 * SECOND),
        (Retry("busy", after=3), None),
        (HttpError(response=SimpleNamespace(status_code=429, headers={"retry-after": "7"})), 7 * SECOND),
        (HttpError(response=SimpleNamespace(status_code=503, headers={"retry-after": "7"})), None),
        (HttpError(status=429, headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), 0),
        (HttpError(status=429, headers=None), 0),
        (HttpError(status=429, headers={"Retry-After": "-5"}), 0),
        (HttpError(status=429, headers={"Retry-After": "nan"}), 0),
        (HttpError(status=429, headers={"Retry-After": "1e9"}), 3600 * SECOND),
        (HttpError(status="429"), None),
        (urllib_error(), 2 * SECOND),
        (raised_from(Throttled(after=1)), SECOND),
        (ValueError("429"), None),
    ],
)
def test_throttling(error: BaseException, after: int | None) -> None:
    assert throttling(error) == after
