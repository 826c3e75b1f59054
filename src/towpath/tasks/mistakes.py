"""Frequent mistakes, found when they are made. Each error shows the right form.

Three kinds: a value that is no call where calls are taken, a function that cannot be a task, and the name of
a method or an option in another library."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from towpath.core import checks
from towpath.errors import InvalidInput, shortened

TASK_METHODS: Mapping[str, str] = {
    "apply": "{task}(...) to run the function here",
    "apply_async": "{task}.options(delay=...).enqueue(...)",
    "configure": "{task}.options(...)",
    "defer": "{task}.enqueue(...)",
    "defer_async": "{task}.aenqueue(...)",
    "delay": "{task}.enqueue(...)",
    "enqueue_at": "{task}.options(at=...).enqueue(...)",
    "enqueue_in": "{task}.options(delay=...).enqueue(...)",
    "kiq": "{task}.aenqueue(...)",
    "map": "{task}.enqueue_many([{task}.of(each) for each in ...])",
    "retry": "raise towpath.Retry(after=...) in the handler",
    "s": "{task}.of(...)",
    "schedule": "{task}.options(delay=...).enqueue(...)",
    "send": "{task}.enqueue(...)",
    "send_with_options": "{task}.options(...).enqueue(...)",
    "si": "{task}.of(...)",
    "signature": "{task}.of(...)",
    "starmap": "{task}.enqueue_many([{task}.of(*each) for each in ...])",
}
"""Methods of tasks in other libraries, and what to use here."""
CALL_METHODS: Mapping[str, str] = {
    "aenqueue": "{task}.aenqueue(...)",
    "apply_async": "{task}.options(delay=...).enqueue(...)",
    "delay": "{task}.enqueue(...)",
    "enqueue": "{task}.enqueue(...)",
    "options": "{task}.options(...).of(...)",
}
"""Methods that a call does not have, and what to use: a call is for app.chain, app.group and batches."""
JOB_METHODS: Mapping[str, str] = {
    "get": "job.result()",
    "ready": "job.status().state",
    "return_value": "job.result()",
    "revoke": "job.cancel()",
    "state": "job.status().state",
    "wait": "job.finished()",
}
"""Methods of jobs in other libraries, and what to use here."""
APP_METHODS: Mapping[str, str] = {
    "enqueue": "task.enqueue(...) of a function with @app.task",
    "periodic_task": "@app.cron(...) or @app.every(...)",
    "queues": "app.queue(name) for one queue, app.ledger.queues() for all",
    "schedule": "@app.cron(...) or @app.every(...)",
    "send_task": "task.enqueue(...) of a function with @app.task",
    "start": "app.run()",
    "work": "app.run()",
    "worker": "app.run()",
    "worker_main": "app.run()",
}
"""Methods of apps in other libraries, and what to use here."""
OPTIONS: Mapping[str, str] = {
    "autoretry_for": "backoff=Policy(...)",
    "countdown": "delay",
    "depends_on": "after",
    "eta": "at",
    "expires": "ttl",
    "idempotency_key": "key",
    "job_id": "id",
    "job_timeout": "timeout",
    "lock": "key with on_conflict='serial'",
    "max_retries": "max_attempts",
    "queueing_lock": "key",
    "rate_limit": "app.queue(name).configure(rate=...)",
    "retries": "max_attempts",
    "retry": "max_attempts",
    "retry_backoff": "backoff",
    "retry_delay": "backoff",
    "run_at": "at",
    "schedule_at": "at",
    "schedule_in": "delay",
    "soft_time_limit": "timeout",
    "task_id": "id",
    "time_limit": "timeout",
    "unique_key": "key",
}
"""Options in other libraries, and the option here."""


def no_attribute(owner: object, what: str, name: str, known: Mapping[str, str]) -> AttributeError:
    """The error of an attribute that `owner` does not have; `what` is how the error names it."""
    if name not in known:
        return AttributeError(f"{what} has no attribute {name!r}", name=name, obj=owner)
    return AttributeError(f"{what} has no {name!r}: use {known[name]}", name=name, obj=owner)


class CallHints:
    """The errors of attributes that a call does not have."""

    __slots__ = ()

    if not TYPE_CHECKING:  # with it, a type checker would accept every attribute

        def __getattr__(self: Any, name: str) -> Any:
            task = "task" if name == "task" else _name_of(self)
            known = {each: use.format(task=task) for each, use in CALL_METHODS.items()}
            raise no_attribute(self, f"the call {task}.of(...)", name, known)


def check_options(
    options: Collection[str], known: Collection[str], owner: str, others: Mapping[str, str]
) -> None:
    """Raise for the first option that is not known. `others`: options that belong elsewhere, and where."""
    for name in sorted(set(options) - set(known)):
        if name in others:
            raise checks.unknown("option", name, known, owner, others[name])
        hint = f"use {OPTIONS[name]}" if name in OPTIONS else ""
        raise checks.unknown("option", name, known, owner, hint)


def misplaced(
    error: InvalidInput, task: str, names: Collection[str], options: Collection[str]
) -> InvalidInput:
    """The error of a call with arguments that do not fit; if one of them is the name of an option, the error
    names the place of options."""
    found = next((name for name in names if name in options or name in OPTIONS), None)
    if found is None:
        return error
    option = found if found in options else OPTIONS[found]
    shown = f"{option}=..." if option in options else "..."
    message = f"{error}. {found!r} looks like an option: write {task}.options({shown}).enqueue(...)"
    return InvalidInput(field=error.field, value=error.value, expected=error.expected, message=message)


def no_calls(given: object, where: str) -> InvalidInput:
    """The error of something that is not a list of calls."""
    name = _name_of(given)
    shown = f"{name}.of(...)" if hasattr(given, "spec") else shortened(given)
    message = f"{where} takes a list of calls: write {where}([{name}.of(...), ...]), not {where}({shown})"
    return InvalidInput(field="calls", value=given, expected="a list of calls", message=message)


def no_call(given: object, where: str, task: str = "") -> InvalidInput:
    """The error of something that is not a call of `task`, if it is known which task was meant."""
    name = task or _name_of(given)
    if isinstance(given, Coroutine):
        given.close()  # or Python warns that it was never awaited
        shown = f"{name}(...), which runs the function here"
    elif hasattr(given, "enqueue"):
        shown = name
    elif hasattr(given, "cancel") and hasattr(given, "id"):
        shown = "task.enqueue(...), which has enqueued a job already"
    elif isinstance(given, list) and any(hasattr(each, "spec") for each in given):
        message = f"{where} takes calls, not a list of them: write {where}(*calls)"
        return InvalidInput(field="call", value=given, expected="a call", message=message)
    elif isinstance(given, tuple | list | dict) and task:
        shown = shortened(given)
    else:
        shown = f"{shortened(given)} ({name}(...) runs the function here and returns its result)"
    message = f"{where} takes calls: write {name}.of(...) instead of {shown}"
    return InvalidInput(field="call", value=given, expected="a call: task.of(...)", message=message)


def without_times(function: object, verb: str, example: str) -> InvalidInput:
    """The error of `@app.cron` and `@app.every` without parentheses."""
    message = f"@app.{verb} needs the times at which {_name_of(function)} runs: write {example}"
    return InvalidInput(field=verb, value=function, expected="the times", message=message)


def _name_of(given: object) -> str:
    """The name of the task that was meant."""
    name = getattr(getattr(given, "task", given), "__name__", "task")
    return name if isinstance(name, str) and name.isidentifier() else "task"


def check_function(function: Any, process: bool) -> None:
    """Raise if the function cannot be a task."""
    if hasattr(function, "enqueue") and hasattr(function, "of"):
        message = (
            f"{function!r} is a task already: write @app.task below @app.cron and @app.every, or leave it out"
        )
        raise _not_a_task(function, message)
    if not callable(function):
        message = (
            f"@app.task takes a function, not {shortened(function)}; options have names: name=..., queue=..."
        )
        raise _not_a_task(function, message)
    name = getattr(function, "__qualname__", type(function).__name__)
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        message = f"{name} has a yield, so it is a generator: a task is a function that returns its result"
        raise _not_a_task(function, message)
    try:
        inspect.signature(function)
    except ValueError:
        message = f"{name} has no signature that Python can read: write a function that calls it"
        raise _not_a_task(function, message) from None
    if _is_method(function, name):
        message = (
            f"{name} is a method, and a worker has no object to call it on: "
            "make it a function at the top level of its module, which takes an id"
        )
        raise _not_a_task(function, message)
    if process and (inspect.ismethod(function) or "<locals>" in name or "<lambda>" in name):
        what = (
            "a bound method"
            if inspect.ismethod(function)
            else "a lambda"
            if "<lambda>" in name
            else "a closure"
        )
        message = (
            f"{name} is {what}, which another process cannot import: "
            "with process=True, define the function at the top level of its module"
        )
        raise _not_a_task(function, message)


def _is_method(function: Callable[..., Any], name: str) -> bool:
    """True in the body of a class, where `self` is not bound."""
    inside = name.rpartition(".")[0]
    if not inside or inside.endswith("<locals>") or inspect.ismethod(function):
        return False
    return next(iter(inspect.signature(function).parameters), "") in ("self", "cls")


def _not_a_task(function: object, message: str) -> InvalidInput:
    return InvalidInput(field="task", value=function, expected="a function", message=message)


def check_naming(field: str, naming: object, task: str, parameters: Collection[str]) -> None:
    """Raise if a template of `unique`, `part` or `route` names something that is no parameter of the task."""
    if naming is None or callable(naming) or (field == "unique" and isinstance(naming, bool)):
        return
    names = ", ".join(f"{{{each}}}" for each in parameters)
    if not isinstance(naming, str):
        expected = f"a template of its parameters ({names}), or a function of them"
        expected = f"True, {expected}" if field == "unique" else expected
        raise InvalidInput(field=f"{field} of {task}", value=naming, expected=expected)
    try:
        used = [each for _, each, _, _ in string.Formatter().parse(naming) if each is not None]
    except ValueError as error:
        message = f"{field}={shortened(naming)} of {task} is no template: {error}"
        raise InvalidInput(
            field=f"{field} of {task}", value=naming, expected="a template", message=message
        ) from None
    for each in used:
        if each.partition(".")[0].partition("[")[0] not in parameters:
            message = (
                f"{field}={shortened(naming)} of {task} has {{{each}}}, which is no parameter of the task: "
                + (f"it can have {names}" if names else "the task takes no arguments")
            )
            raise InvalidInput(
                field=f"{field} of {task}", value=naming, expected=f"a template of {names}", message=message
            )
