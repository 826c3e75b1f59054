"""Celery's options: which are mapped, which change nothing, and what to write instead of the others."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from towpath import Retry as RetryJob
from towpath.clock import SystemClock
from towpath.errors import InvalidInput

HARMLESS = frozenset(
    [
        "acks_late",
        "acks_on_failure_or_timeout",
        "reject_on_worker_lost",
        "track_started",
        "serializer",
        "throws",
        "shared",
        "store_errors_even_if_ignored",
        "send_events",
        "typing",
        "pydantic",
        "trail",
    ]
)
"""Task options without a counterpart that change nothing: Towpath always acknowledges late, for instance."""
INSTEAD = {
    "rate_limit": "a rate of the queue for the whole fleet: `towpath queues set QUEUE --rate 10/s`",
    "soft_time_limit": "time_limit=..., and `current().check()` inside the task",
    "base": "a plain function; shared set-up belongs into the module or into a worker hook",
    "link": "chain(first, second)",
    "link_error": 'app.towpath.group([...], then={"failed": task.of(...)})',
    "exchange": "queue=NAME",
    "routing_key": "queue=NAME",
    "delivery_mode": "nothing: every job is durable",
    "compression": "nothing: payloads are stored as they are",
    "shadow": "name=NAME at the task",
    "connection": "Celery(url=...), one ledger for each app",
    "producer": "Celery(url=...), one ledger for each app",
    "retry_policy": "nothing: an enqueue waits until it is durable or raises",
    "group_id": "group(...)",
    "chord": "chord(...)",
    "headers": "task.towpath.options(headers=...)",
    "replaced_task_nesting": "a chain",
}
TASK_OPTIONS = frozenset(
    [
        "name",
        "bind",
        "max_retries",
        "default_retry_delay",
        "autoretry_for",
        "dont_autoretry_for",
        "retry_kwargs",
        "retry_backoff",
        "retry_backoff_max",
        "retry_jitter",
        "time_limit",
        "queue",
        "priority",
        "ignore_result",
        "expires",
    ]
)
CALL_OPTIONS = frozenset(
    ["countdown", "eta", "expires", "queue", "priority", "task_id", "time_limit", "ignore_result"]
)
CONF_USED = frozenset(
    [
        "task_default_queue",
        "task_routes",
        "task_always_eager",
        "task_eager_propagates",
        "beat_schedule",
        "timezone",
        "task_time_limit",
        "task_default_priority",
    ]
)


class CeleryOption(InvalidInput):
    """An option of Celery that Towpath does not have; the message names the replacement."""


class MaxRetriesExceededError(Exception):
    """`self.retry()` was called more than `max_retries` times and was given no `exc`."""


class CeleryRetry(RetryJob):
    """Raised by `self.retry()`: the job runs again after the countdown."""


def check_options(where: str, options: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in options.items():
        if name in known or (name in HARMLESS and not (name == "serializer" and value == "pickle")):
            continue
        instead = INSTEAD.get(name, "leave it out; docs/coming-from.md lists what is mapped")
        if name == "serializer":
            instead = "JSON: arguments and results are never pickled"
        raise CeleryOption(field=f"{where}: {name}", value=value, expected=instead)


def priority_of(rank: int) -> int:
    """Celery with Redis or RabbitMQ: 9 is the most urgent. Towpath: 0 is."""
    return 9 - int(rank)


def aware(when: datetime) -> datetime:
    """A naive time is UTC, as in Celery by default."""
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def seconds_until(when: datetime) -> float:
    return max(0.0, aware(when).timestamp() - SystemClock().now() / 1_000_000)
