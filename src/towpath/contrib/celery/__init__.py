"""Celery's vocabulary on Towpath: a module written for Celery runs with its import line changed.

    from towpath.contrib.celery import Celery, shared_task, chain, group, chord

A program that must not change at all calls `install()` before the first import of `celery`: the names
`celery`, `celery.schedules`, `celery.result`, `celery.exceptions` and `celery.utils.log` are then this
module. Options are mapped where Towpath has the same, accepted where Towpath always does it (`acks_late`),
and refused with the Towpath way otherwise (`CeleryOption`). `Celery.towpath` is the App; the worker is
`towpath worker project.celery:app`.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

from towpath.contrib.celery.app import Celery, crontab, shared_task, signature
from towpath.contrib.celery.app import CeleryTask as Task
from towpath.contrib.celery.canvas import Signature, chain, chord, group
from towpath.contrib.celery.options import CeleryOption, MaxRetriesExceededError
from towpath.contrib.celery.options import CeleryRetry as Retry
from towpath.contrib.celery.results import AsyncResult, GroupResult, current_app
from towpath.escapes import get_logger

__all__ = [
    "AsyncResult",
    "Celery",
    "CeleryOption",
    "GroupResult",
    "MaxRetriesExceededError",
    "Retry",
    "Signature",
    "Task",
    "chain",
    "chord",
    "crontab",
    "current_app",
    "get_task_logger",
    "group",
    "install",
    "shared_task",
    "signature",
]


def get_task_logger(name: str) -> logging.Logger:
    return get_logger(name)


def install() -> None:
    """Let `import celery` and its usual submodules mean this module, in this process."""
    here = sys.modules[__name__]
    log_module = ModuleType("celery.utils.log")
    log_module.__dict__["get_task_logger"] = get_task_logger
    for name in (
        "celery",
        "celery.schedules",
        "celery.result",
        "celery.exceptions",
        "celery.canvas",
        "celery.app",
    ):
        sys.modules[name] = here
    sys.modules["celery.utils"] = ModuleType("celery.utils")
    sys.modules["celery.utils.log"] = log_module
