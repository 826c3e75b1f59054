"""Load a plan from a Python file, a module or a JSON file, and the App that belongs to it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from towpath.cli.base import BAD_INPUT, Failure, Session, bad_input, combine, join_names
from towpath.cli.targets import import_failure, load_module, usable_url
from towpath.escapes import without_password
from towpath.flows.plan import Plan

if TYPE_CHECKING:
    from towpath.app import App

MODULE = "towpath_plan_file"
"""Name of the module that a Python file becomes if its own name is taken."""
MAX_JSON = 256 * 1024 * 1024

file_options = combine(
    click.argument("file", metavar="FILE[:NAME]"),
    click.option(
        "--arg",
        "arguments",
        multiple=True,
        metavar="NAME=VALUE",
        help="An argument of the function that returns the plan, as JSON or text. Repeatable.",
    ),
)


class LoadedPlan(msgspec.Struct, frozen=True):
    """A plan, and the module that defines it; None for JSON."""

    plan: Plan
    module: Any

    def app(self, session: Session) -> App:
        """The App of the module, if it has exactly one, else an App without tasks."""
        from towpath.app import App

        found = {id(value): value for value in vars(self.module or object).values() if isinstance(value, App)}
        if len(found) != 1:
            return App(usable_url(session.url))
        [app] = found.values()
        if session.url is not None and app.url != session.url:
            raise bad_input(
                f"The app of the file has its own URL {without_password(app.url)}, not the one of --url.",
                "Remove --url, or remove the URL from the program.",
            )
        return app


def load_plan(session: Session, file: str, arguments: Sequence[str] = ()) -> LoadedPlan:
    """Load the plan of `FILE.json`, `FILE.py[:NAME]` or `MODULE:NAME`."""
    if session.url is not None:
        os.environ["TOWPATH_URL"] = session.url  # for an App of the module without a URL
    path, _, name = file.partition(":") if ".py:" in file else (file, "", "")
    if path.endswith(".json"):
        return LoadedPlan(_from_json(Path(path), arguments), None)
    if path.endswith(".py"):
        module = _import_file(Path(path))
    else:
        path, _, name = file.partition(":")
        module = load_module(path)
    return LoadedPlan(_plan_in(module, path, name, arguments), module)


def _from_json(path: Path, arguments: Sequence[str]) -> Plan:
    if arguments:
        raise bad_input("--arg is for a function that returns a plan, and JSON has none.")
    try:
        with path.open("rb") as opened:
            return Plan.from_json(opened.read(MAX_JSON))
    except OSError as error:
        raise _unreadable(path, error) from error


def _import_file(path: Path) -> Any:
    """Import the file as a module of its name, so that its tasks have the same names as in a worker. Its
    directory is first on the path, as for `python FILE`."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = MODULE if taken else path.stem
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path.absolute())
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise import_failure(str(path), error) from error
    return module


def _unreadable(path: Path, error: OSError) -> Failure:
    step = "Give a Python file, a JSON file of a plan, or MODULE:NAME."
    return bad_input(f"{path} cannot be read: {error.strerror}.", step)


def _plan_in(module: Any, where: str, name: str, arguments: Sequence[str]) -> Plan:
    if not name:
        name = _only_name(module, where)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise bad_input(f"{where} has no {name}.", f"Plans in it: {join_names(_names(module))}")
        found = getattr(found, part)
    if not isinstance(_built(found), Plan) and callable(found):
        found = _called(found, name, arguments)
    elif arguments:
        raise bad_input(f"{name} of {where} is no function, so that it takes no --arg.")
    plan = _built(found)
    if not isinstance(plan, Plan):
        step = "Name a Plan, a builder of app.plans.new(...), or a function that returns one of them."
        raise bad_input(f"{name} of {where} is a {type(found).__name__}, not a plan.", step)
    return plan


def _built(value: Any) -> Any:
    """The plan of a builder; other values as they are."""
    return value.built if isinstance(getattr(type(value), "built", None), property) else value


def _names(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(_built(value), Plan)]


def _only_name(module: Any, where: str) -> str:
    names = _names(module)
    if len(names) == 1:
        return names[0]
    if not names and callable(getattr(module, "plan", None)):
        return "plan"
    step = f"Name one of them: {where}:{names[0]}." if names else f"Name a function: {where}:NAME."
    raise bad_input(f"{where} has {len(names)} plans: {join_names(names)}.", step)


def _called(function: Any, name: str, arguments: Sequence[str]) -> Any:
    given: dict[str, Any] = {}
    for each in arguments:
        key, equals, text = each.partition("=")
        if not (equals and key.isidentifier()):
            raise click.UsageError(f"--arg {each}: write it as NAME=VALUE.", click.get_current_context())
        try:
            given[key] = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            given[key] = text
    try:
        return function(**given)
    except Exception as error:
        failure = import_failure(name, error)
        message = f"{name}({', '.join(given)}) failed: {type(error).__name__}: {error}"
        raise Failure(message, BAD_INPUT, failure.step) from error
