"""The house rules as a program: allowed imports, readers of the clock, and limits of size.

A new module needs a row in `MAY_IMPORT`; a new third-party package needs a row in `PACKAGES`. Each rule is
tried on a tiny source that breaks it, so that a rule which catches nothing is noticed."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

_BASE = "errors clock events escapes"
_OBSERVE = f"observe {_BASE}"
_DRIVER = "ledger ledger.sql core errors clock escapes"

# Rooms -> the rooms that they may import, besides themselves. The room "towpath" is the public surface,
# `towpath/__init__.py`.
ROOMS: Sequence[tuple[str, str]] = (
    ("clock escapes", ""),
    ("errors events", "escapes"),
    ("core", "errors escapes"),
    ("settings commands", "core errors"),
    ("ledger ledger.sql", "core errors clock escapes"),
    ("ledger.model ledger.memory ledger.tables ledger.remote", _DRIVER),
    ("ledger.model_ledger", f"{_DRIVER} ledger.model"),
    ("ledger.sqlite ledger.postgres", f"{_DRIVER} ledger.tables"),
    ("observe runtime", f"core ledger fleet {_BASE}"),
    ("tasks", f"core ledger fleet runtime observe {_BASE}"),
    ("queues operations", f"core ledger fleet flows ledger.tables runtime tasks queues settings {_OBSERVE}"),
    ("fleet flows", "core ledger errors escapes"),
    ("app towpath", f"core ledger runtime tasks queues operations flows settings commands app {_BASE}"),
    ("http", f"app queues flows core ledger ledger.remote runtime tasks observe {_BASE}"),
    ("apps contrib", "towpath commands clock flows errors escapes"),
    ("cli __main__", f"towpath app cli fleet http apps commands queues operations flows settings {_BASE}"),
    (
        "testing",
        f"towpath app core ledger ledger.memory runtime tasks queues operations flows commands {_BASE}",
    ),
)
MAY_IMPORT: Mapping[str, Sequence[str]] = {
    room: allowed.split() for rooms, allowed in ROOMS for room in rooms.split()
}
# Only inside a function, so that an optional driver costs nothing until it is opened.
MAY_IMPORT_LATE: Mapping[str, Sequence[str]] = {
    "ledger": (
        "ledger.model_ledger",
        "ledger.memory",
        "ledger.sqlite",
        "ledger.postgres",
        "ledger.objects",
        "ledger.remote",
    ),
    "testing": (
        "ledger.model_ledger",
        "ledger.sqlite",
        "ledger.postgres",
        "ledger.objects",
        "ledger.remote",
        "http",
    ),
    "app": ("testing",),
    "towpath": ("ledger.sqlite",),
    "operations": ("ledger.sqlite", "ledger.postgres"),
    "cli": ("observe",),
    "contrib": ("cli",),
}
# Third-party package -> the rooms that may import it.
PACKAGES: Mapping[str, Sequence[str]] = {
    "msgspec": [room for room in MAY_IMPORT if room not in ("towpath", "commands", *_BASE.split())],
    "apsw": ("ledger.sqlite", "testing"),
    "psycopg": ("ledger.postgres", "operations", "apps", "testing"),
    "psycopg_pool": ("ledger.postgres",),
    "obstore": ("ledger.objects",),
    "cronsim": ("core",),
    "click": ("cli",),
    "rich": ("cli", "operations"),
    **dict.fromkeys(("litestar", "uvicorn", "httptools", "multipart", "cryptography"), ("http",)),
    "httpx2": ("http", "operations"),
    **dict.fromkeys(("prometheus_client", "opentelemetry"), ("observe",)),
    **dict.fromkeys(("django", "django_tasks", "asgiref"), ("contrib",)),
    **dict.fromkeys(("pytest", "hypothesis"), ("testing",)),
}
# Standard modules that no module imports: two SQLite libraries on one file lose commits, and payloads are
# never code.
FORBIDDEN = ("sqlite3", "pickle", "marshal", "shelve")
_PURE = (
    "time threading asyncio os socket random secrets uuid multiprocessing concurrent subprocess signal"
    " tempfile pathlib io"
)
NOT_IN: Mapping[str, Sequence[str]] = {
    "core": _PURE.split(" "),
    "flows": ("time", "threading", "asyncio", "socket", "random"),
    "ledger": ("time", "threading", "asyncio", "socket", "random", "os"),
}
# Readers of the wall clock, which only clock.py may name. Durations (monotonic, perf_counter) are not time.
_TIME_READERS = "time time_ns localtime gmtime ctime strftime clock_gettime clock_gettime_ns"
WALL_CLOCK = frozenset(
    {f"time.{name}" for name in _TIME_READERS.split(" ")}
    | {f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")}
    | {"datetime.date.today"},
)

MOST_LINES, WALL_OF_LINES = 500, 600
MAY_BE_LONG: Mapping[str, int] = {"towpath.ledger.model": 900, "towpath.errors": WALL_OF_LINES}
"""Modules allowed to pass 500 lines, and how far. The model is one file on purpose: it is read from top to
bottom. So is the tree of errors."""
MOST_FUNCTION_LINES = 60
MOST_PUBLIC_METHODS = 18
_LEDGERS = ("memory.ledger.MemoryLedger", "model_ledger.ModelLedger", "remote.ledger.RemoteLedger")
MAY_BE_WIDE: Mapping[str, int] = {
    "towpath.app.App": 33,
    "towpath.queues.message.Message": 20,
    **{f"towpath.ledger.{name}": 24 for name in _LEDGERS},
}
"""Classes with more public methods: the one door for users, and the methods of the ledger protocol."""
MOST_PARAMETERS = 7
MOST_FILES = 306
"""Of the package without testing/ and contrib/: 162 before the HTTP server, plans and shards."""
MOST_FILES_AT_THE_TOP = 10
MOST_ROWS = 17

MAY_SHARE_A_NAME: Mapping[str, str] = {
    "Cancel": "the command of the ledger, and the exception by which a handler ends its job",
}
"""Names of classes that several modules define, and why."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def room_of(module: str) -> str | None:
    """The room of a module by its dotted name; None if the table has no row for it."""
    names = module.split(".")[1:]
    room = ".".join(names[:2]) if names[:1] == ["ledger"] else ".".join(names[:1]) or "towpath"
    return room if room in MAY_IMPORT else None


def modules() -> dict[str, str]:
    """Dotted name -> source of every module of the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        names = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path.read_text("utf-8")
    return found


MODULES = modules()


@pytest.fixture(scope="module", params=MODULES)
def module(request: pytest.FixtureRequest) -> str:
    """The scope puts the rules for one module of the package together, so that its tree is parsed once."""
    name: str = request.param
    return name


@functools.lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name and its attributes."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(module: str, tree: ast.Module, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    """(line, what is imported, inside a function?) for every import of a module."""
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, Function) or _for_types(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in late
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}", id(node) in late


def _for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:` never runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def wrong_arrows(module: str, source: str, known: Mapping[str, str]) -> Iterator[str]:
    room = room_of(module)
    if room is None:
        yield f"{module}: no room for it; add a row to MAY_IMPORT"
        return
    is_package = any(other.startswith(f"{module}.") for other in known)
    for line, target, late in imports(module, parsed(source), is_package):
        top = target.split(".")[0]
        if top == "towpath":
            yield from (
                f"{module}:{line}: {why}" for why in _wrong_arrow(room, _module_in(target, known), late)
            )
        elif top in FORBIDDEN or top in NOT_IN.get(room, ()):
            yield f"{module}:{line}: {top} may not be imported here"
        elif top not in sys.stdlib_module_names and room not in PACKAGES.get(top, ()):
            yield f"{module}:{line}: the package {top} may not be imported here"


def _module_in(target: str, known: Mapping[str, str]) -> str:
    """`towpath.core.job.Spec` -> `towpath.core.job`."""
    while target not in known and "." in target and room_of(target) != target.removeprefix("towpath."):
        target = target.rpartition(".")[0]
    return target


def _wrong_arrow(room: str, target: str, late: bool) -> Iterator[str]:
    other = room_of(target)
    if other is None:
        yield f"{target} has no room"
    elif other == "testing" and room != "testing" and not (late and other in MAY_IMPORT_LATE.get(room, ())):
        yield "nothing imports testing"
    elif other != room and other not in MAY_IMPORT[room]:
        if other not in MAY_IMPORT_LATE.get(room, ()):
            yield f"{room} may not import {other}"
        elif not late:
            yield f"{room} may import {other} only inside a function"


def clock_readers(module: str, source: str) -> Iterator[str]:
    if module == "towpath.clock":
        return
    tree = parsed(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            full = ".".join(filter(None, [names.get(first, ""), rest]))
            if full in WALL_CLOCK:
                yield f"{module}:{node.lineno}: {full} is read; only clock.py reads the time"


def raw_loggers(module: str, source: str) -> Iterator[str]:
    """Loggers that do not escape untrusted text: `escapes.get_logger` returns loggers that do."""
    if module != "towpath.escapes":
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Attribute | ast.Name) and "getLogger" in (
                getattr(node, "attr", ""),
                getattr(node, "id", ""),
            ):
                yield f"{module}:{node.lineno} must use escapes.get_logger"


def too_long(module: str, source: str, most: int = MOST_LINES) -> Iterator[str]:
    lines = source.count("\n")
    if lines > MAY_BE_LONG.get(module, most):
        yield f"{module}: {lines} lines, at most {most}"


def too_large(module: str, source: str) -> Iterator[str]:
    tree = parsed(source)
    methods = {id(node) for cls in ast.walk(tree) if isinstance(cls, ast.ClassDef) for node in cls.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            # Tests of a shipped suite are called by pytest alone; they widen no interface.
            named = {inner.name for inner in node.body if isinstance(inner, Function)}
            public = {name for name in named if not name.startswith(("_", "test_"))}
            if len(public) > MAY_BE_WIDE.get(f"{module}.{node.name}", MOST_PUBLIC_METHODS):
                yield f"{module}:{node.lineno}: {node.name} has {len(public)} public methods"
        elif isinstance(node, Function):
            yield from (
                f"{module}:{node.lineno}: {node.name} {why}"
                for why in _bad_function(node, id(node) in methods)
            )


def _bad_function(node: Function, is_method: bool) -> Iterator[str]:
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    if is_method and not any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list):
        positional = positional[1:]
    parameters = [*positional, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length > MOST_FUNCTION_LINES:
        yield f"has {length} lines"
    if len(parameters) > MOST_PARAMETERS:
        yield f"has {len(parameters)} parameters"
    bare = [parameter.arg for parameter in parameters if parameter.annotation is None]
    if bare or node.returns is None:
        yield f"is not annotated: {', '.join(bare) or 'what it returns'}"


def private_imports(module: str, source: str, known: Mapping[str, str]) -> Iterator[str]:
    """Names with a leading underscore that belong to another room."""
    tree = parsed(source)
    is_package = any(other.startswith(f"{module}.") for other in known)
    aliases: dict[str, str] = {}
    for line, target, _ in imports(module, tree, is_package):
        home = _module_in(target, known)
        if target.startswith("towpath.") and room_of(home) != room_of(module):
            aliases[target.rpartition(".")[2]] = target
            if any(_is_private(part) for part in target.split(".")):
                yield f"{module}:{line}: {target} is private to its room"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _is_private(node.attr):
            owner = aliases.get(node.value.id)
            if owner in known:
                yield f"{module}:{node.lineno}: {owner}.{node.attr} is private to its room"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def shared_class_names(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Name of a class -> the modules that define it, where these are several."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).add(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_class_names_are_unique() -> None:
    # A bridge in contrib/ has the names of its framework.
    own = {name: source for name, source in MODULES.items() if not name.startswith("towpath.contrib.")}
    shared = shared_class_names(own)
    assert {name: modules for name, modules in shared.items() if name not in MAY_SHARE_A_NAME} == {}
    assert [name for name in MAY_SHARE_A_NAME if name not in shared] == []


def test_a_class_name_that_is_not_unique_is_caught() -> None:
    sources = {"a": "class X: ...\nclass Y: ...", "b": "def f() -> None:\n    class X: ..."}
    assert shared_class_names(sources) == {"X": {"a", "b"}}


def test_private_names_stay_in_their_room(module: str) -> None:
    assert list(private_imports(module, MODULES[module], MODULES)) == []


@pytest.mark.parametrize(
    "source",
    [
        "from towpath.core.job import _hidden",
        "from towpath.core import _hidden",
        "def f() -> None:\n    from towpath.core import job\n    job._hidden",
    ],
)
def test_a_private_name_of_another_room_is_caught(source: str) -> None:
    assert len(list(private_imports("towpath.app", source, MODULES))) == 1
    assert list(private_imports("towpath.core.views", source, MODULES)) == []


def test_the_house_does_not_grow_unnoticed() -> None:
    files = [
        path for path in (SOURCE / "towpath").rglob("*.py") if not {"testing", "contrib"} & {*path.parts}
    ]
    assert len(files) <= MOST_FILES
    assert len(list((SOURCE / "towpath").glob("*.py"))) <= MOST_FILES_AT_THE_TOP
    assert len(ROOMS) <= MOST_ROWS


def test_no_test_imports_from_another_test() -> None:
    """Shared helpers are in tests/support/."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, target, _ in imports("tests", ast.parse(path.read_text("utf-8")), is_package=True)
        if target.startswith("tests.") and any(part.startswith("test_") for part in target.split("."))
    ]
    assert wrong == []


def test_only_conftest_defines_url() -> None:
    """It has a parameter for each ledger, so that a module's own `url` would run once for each."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert [path.name for path in files if "\ndef url(" in path.read_text("utf-8")] == []


def test_imports_follow_the_arrows(module: str) -> None:
    assert list(wrong_arrows(module, MODULES[module], MODULES)) == []


def test_only_the_clock_reads_the_time(module: str) -> None:
    assert list(clock_readers(module, MODULES[module])) == []


def test_every_logger_escapes(module: str) -> None:
    assert list(raw_loggers(module, MODULES[module])) == []


@pytest.mark.parametrize(
    "source", ["import logging\nlogging.getLogger('a')", "from logging import getLogger\ngetLogger('a')"]
)
def test_a_raw_logger_is_caught(source: str) -> None:
    assert len(list(raw_loggers("towpath.app", source))) == 1


def test_sizes(module: str) -> None:
    assert [*too_long(module, MODULES[module]), *too_large(module, MODULES[module])] == []


@pytest.mark.parametrize("folder", ["tests", "bench", "examples"])
def test_no_file_passes_the_wall(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert [
        why for path in files for why in too_long(path.name, path.read_text("utf-8"), WALL_OF_LINES)
    ] == []


def test_named_queries_have_short_lines() -> None:
    """Migrations may have longer ones: SQLite stores their text."""
    assert [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(SOURCE.rglob("queries.sql"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > 110
    ] == []


def test_the_exceptions_are_still_needed() -> None:
    short = {name for name in MAY_BE_LONG if MODULES.get(name, "").count("\n") <= MOST_LINES}
    assert short == set(), "take these out of MAY_BE_LONG"


WRONG_ARROWS = [
    ("towpath.errors", "from towpath.core.job import Job", "errors may not import core"),
    ("towpath.clock", "import msgspec", "the package msgspec"),
    ("towpath.core.job", "from towpath.clock import Clock", "core may not import clock"),
    ("towpath.core.job", "from towpath import ledger", "core may not import ledger"),
    ("towpath.core.job", "from ..ledger import Ledger", "core may not import ledger"),
    ("towpath.core.job", "def f() -> None:\n    import time", "time may not"),
    ("towpath.core.job", "import os.path", "os may not"),
    ("towpath.core.job", "from random import Random", "random may not"),
    ("towpath.core.job", "from asyncio import sleep", "asyncio may not"),
    ("towpath.core.job", "import threading", "threading may not"),
    ("towpath.core.job", "import socket", "socket may not"),
    ("towpath.ledger", "from towpath.ledger.memory import MemoryLedger", "only inside a function"),
    ("towpath.ledger", "from .memory import MemoryLedger", "only inside a function"),
    (
        "towpath.ledger.memory",
        "from towpath.ledger.sqlite import SqliteLedger",
        "may not import ledger.sqlite",
    ),
    (
        "towpath.ledger.memory",
        "def f() -> None:\n    from towpath.ledger import sqlite",
        "may not import ledger.sqlite",
    ),
    ("towpath.ledger.memory", "import apsw", "the package apsw"),
    ("towpath.ledger.sqlite.maintenance", "import sqlite3", "sqlite3 may not"),
    ("towpath.ledger.sqlite.maintenance", "from towpath.app import new_id", "may not import app"),
    ("towpath.ledger.redis", "", "no room"),
    ("towpath.runtime.worker", "from towpath.app import App", "runtime may not import app"),
    (
        "towpath.runtime.worker",
        "from towpath.ledger.sqlite import SqliteLedger",
        "may not import ledger.sqlite",
    ),
    (
        "towpath.flows.plan",
        "from towpath.runtime.commit.committer import Committer",
        "flows may not import runtime",
    ),
    ("towpath.http.server", "from towpath.operations import service", "http may not import operations"),
    ("towpath.apps.sync", "from towpath.core.job import Job", "apps may not import core"),
    ("towpath.cli", "from towpath.ledger import open_ledger", "cli may not import ledger"),
    ("towpath.cli", "from towpath.testing import suite", "nothing imports testing"),
    ("towpath.app", "from towpath.testing.clock import ManualClock", "nothing imports testing"),
    (
        "towpath.queues.message",
        "def f() -> None:\n    from towpath.testing.app import bench",
        "nothing imports testing",
    ),
    ("towpath.tasks", "from towpath.app import App", "tasks may not import app"),
    (
        "towpath.tasks.codec",
        "from towpath.operations.workers import Workers",
        "tasks may not import operations",
    ),
    ("towpath.app", "import requests", "the package requests"),
    ("towpath.app", "import pickle", "pickle may not"),
]
RIGHT_ARROWS = [
    (
        "towpath.core.job",
        "import re\nimport msgspec\nfrom towpath.core import checks\nfrom towpath.errors import Refused",
    ),
    ("towpath.ledger", "def f() -> None:\n    from towpath.ledger.sqlite import SqliteLedger"),
    (
        "towpath.ledger.sqlite.maintenance",
        "import apsw\nfrom towpath.ledger.sqlite import rows\nfrom towpath.ledger import Ledger",
    ),
    (
        "towpath.apps.sync",
        "import towpath\nfrom towpath.flows.plan import Plan\nfrom towpath.commands import Append",
    ),
    ("towpath.cli", "from towpath.apps.sync import main\nfrom towpath.http.server import serve"),
    ("towpath.app", "def f() -> None:\n    from towpath.testing.app import bench"),
    ("towpath.app", "if TYPE_CHECKING:\n    from towpath.testing.app import Bench"),
    ("towpath.testing.suite", "import pytest\nimport towpath\nfrom towpath.testing.clock import ManualClock"),
]


@pytest.mark.parametrize(("module", "source", "why"), WRONG_ARROWS)
def test_a_wrong_arrow_is_caught(module: str, source: str, why: str) -> None:
    found = list(wrong_arrows(module, source, MODULES))
    assert len(found) == 1
    assert why in found[0]


@pytest.mark.parametrize(("module", "source"), RIGHT_ARROWS)
def test_a_right_arrow_is_not(module: str, source: str) -> None:
    assert list(wrong_arrows(module, source, MODULES)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time as t\nt.time_ns()",
        "from time import time_ns as n\nn()",
        "import datetime\ndatetime.datetime.now()",
        "import datetime as d\nd.date.today()",
        "from datetime import datetime\nclock = datetime.utcnow",
        "def f() -> None:\n    from time import time\n    time()",
    ],
)
def test_a_reader_of_the_clock_is_caught(source: str) -> None:
    assert len(list(clock_readers("towpath.runtime.worker", source))) == 1
    assert list(clock_readers("towpath.clock", source)) == []


def test_a_duration_is_not_the_time() -> None:
    source = (
        "import time\nfrom datetime import"
        " datetime\ntime.monotonic()\ntime.sleep(1)\ndatetime.fromtimestamp(0)"
    )
    assert list(clock_readers("towpath.runtime.worker", source)) == []


SEVEN, EIGHT = (", ".join(f"{name}: int" for name in names) for names in ("abcdefg", "abcdefgh"))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def f() -> None:\n" + "    pass\n" * 60, "has 61 lines"),
        (f"def f({EIGHT}) -> None: ...", "has 8 parameters"),
        (f"class C:\n    def f(self, {EIGHT}) -> None: ...", "has 8 parameters"),
        (f"class C:\n    @staticmethod\n    def f({EIGHT}) -> None: ...", "has 8 parameters"),
        (f"def f({SEVEN}, *more: int) -> None: ...", "has 8 parameters"),
        (
            "class C:\n" + "".join(f"    def f{n}(self) -> None: ...\n" for n in range(19)),
            "has 19 public methods",
        ),
        ("def f(a) -> None: ...", "is not annotated: a"),
        ("def f(*a, **b) -> None: ...", "is not annotated: a, b"),
        ("async def f(): ...", "is not annotated: what it returns"),
    ],
)
def test_a_thing_that_is_too_large_is_caught(source: str, why: str) -> None:
    found = list(too_large("towpath.x", source))
    assert len(found) == 1
    assert why in found[0]


def test_a_thing_of_the_right_size_is_not() -> None:
    methods = (
        "".join(f"    def f{n}(self) -> None: ...\n" for n in range(18))
        + "    def _more(self) -> None: ...\n"
    )
    methods += "".join(f"    def test_{n}(self) -> None: ...\n" for n in range(30))
    source = f"class C:\n{methods}    def __init__(self, {SEVEN}) -> None:\n" + "        pass\n" * 59
    assert list(too_large("towpath.x", source)) == []


def test_a_file_that_is_too_long_is_caught() -> None:
    assert list(too_long("towpath.x", "\n" * 501)) == ["towpath.x: 501 lines, at most 500"]
    assert list(too_long("towpath.x", "\n" * 500)) == []
    assert list(too_long("tests.x", "\n" * 601, WALL_OF_LINES)) == ["tests.x: 601 lines, at most 600"]
