"""`manage.py towpath_worker`: the command `towpath worker` with the settings of the project."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from towpath.contrib.django.backend import towpath_app
from towpath.contrib.django.bridge import close_apps
from towpath.errors import InvalidInput

TARGET = "towpath.contrib.django.worker"
NOT_OFFERED = ("url", "json", "verbose", "quiet")
"""Options of `towpath worker` that have another form here: TASKS has the URL, --verbosity the level."""


class Command(BaseCommand):
    help = "Runs the tasks of a Towpath backend until SIGINT or SIGTERM."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--backend", default="default", help='The alias in TASKS. Default: "default".', metavar="ALIAS"
        )
        for option in _options():
            given: dict[str, Any] = {"dest": option.name, "help": _help(option)}
            if option.is_flag:
                given["action"] = "store_true"
            elif option.multiple:
                given |= {"action": "append", "metavar": option.metavar}
            else:
                given["metavar"] = option.metavar or option.name.upper()
            parser.add_argument(*option.opts, **given)

    def handle(self, **options: Any) -> None:
        from towpath.cli import main

        alias = options["backend"]
        try:
            towpath_app(alias)
        except InvalidInput as error:
            raise CommandError(str(error)) from error
        words = ["worker", f"{TARGET}:{alias}", *_level(options)]
        for option in _options():
            words += _words(option.opts[0], options[option.name])
        try:
            with _importable():
                code = main(words)
        finally:
            close_apps()
        if code:
            # The command has printed the reason.
            sys.exit(code)


def _options() -> list[Any]:
    """The options of `towpath worker`, as click has them."""
    from towpath.cli.worker import worker

    found = [each for each in worker.params if each.param_type_name == "option"]
    return [each for each in found if each.name not in NOT_OFFERED]


def _help(option: Any) -> str:
    text = "Queues or patterns to consume, such as a,b. Default: QUEUES in TASKS; all, if it is empty."
    return (text if option.name == "queues" else str(option.help)).replace("%", "%%")


def _level(options: dict[str, Any]) -> list[str]:
    verbosity = 1 if options["log_level"] else options["verbosity"]
    return ["--quiet"] if verbosity == 0 else ["--verbose"] if verbosity > 1 else []


def _words(name: str, value: Any) -> list[str]:
    """A given option as words of the command line."""
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    values = value if isinstance(value, list | tuple) else [value]
    return [word for each in values for word in (name, str(each))]


@contextmanager
def _importable() -> Iterator[None]:
    """Let the children of --processes import what this process can import."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
