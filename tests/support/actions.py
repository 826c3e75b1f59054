"""Contexts for executors of actions."""

from __future__ import annotations

import os
from typing import Any

from towpath.core.nodes import Node
from towpath.operations.executors import ActionContext
from towpath.settings import Settings

PLAN = f"move-{os.getpid()}"
"""Of this process: tests run in several at once, and executors look for attempts of other processes."""
STEP = f"{PLAN}/copy"
"""The label of the attempts at the step of `action_context`."""


def action_context(
    name: str, *, step_timeout: float | None = None, undo: bool = False, attempt: int = 1, **node: Any
) -> ActionContext:
    """A delivery of the step `copy` of the plan, with this node in the settings."""
    settings = Settings(nodes={name: Node(name=name, **node)}, origins={})
    job = f"plan/{STEP}/undo" if undo else f"plan/{STEP}"
    return ActionContext(
        settings=settings,
        plan=PLAN,
        step="copy",
        job=job,
        attempt=attempt,
        fence=1,
        undo=undo,
        timeout=step_timeout,
    )
