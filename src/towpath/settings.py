"""Settings and the origin of each: argument, environment (`TOWPATH_URL` and so on), file, default.

The file is the nearest one upwards from the working directory: `towpath.toml`, or a `pyproject.toml` with
`[tool.towpath]`. A relative `sqlite:///` path in a file is relative to that file, so that a program may be
started anywhere in the project."""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from towpath.core import checks
from towpath.core.bandwidth import plan
from towpath.core.commands import SetQueue
from towpath.core.depths import check_depth
from towpath.core.job import HIGHEST, LOWEST, PRIORITIES, rank
from towpath.core.lanes import Lane, check
from towpath.core.lanes import lanes_of as lanes_of
from towpath.core.limits import Rate
from towpath.core.nodes import FILES, Node, nodes_of
from towpath.core.retry import DEPLOY_WINDOW
from towpath.errors import Described, InvalidInput

DEFAULT_URL = "sqlite:///towpath.db"
PREFIX = "TOWPATH_"
MAX_NESTING = 32
"""The deepest nesting of tables and lists; only arguments of schedules are deep."""


class QueueSettings(msgspec.Struct, frozen=True):
    """The limits of a queue in a settings file. A limit that the file does not name is UNSET."""

    setting: SetQueue
    warn_depth: int | msgspec.UnsetType | None = msgspec.UNSET


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an App and its worker. `origins` maps each name to its origin. Spans are seconds."""

    url: str = DEFAULT_URL
    name: str | None = None
    include: tuple[str, ...] = ()
    """The modules that define tasks. A worker imports them when it starts; `*` stands for every module of a
    package."""
    queues: tuple[str, ...] = ()
    """The queues that a worker consumes; empty means every queue that the app's tasks name."""
    concurrency: int = 32
    processes: int = 1
    lease: float = 30.0
    grace: float = 30.0
    deploy_window: float = DEPLOY_WINDOW
    """How long a job with arguments that do not fit the signature waits for a worker with other code."""
    lanes: Mapping[str, Lane] = {}
    """Sets of queues with reserved slots, by name, the preferred one first; instead of `queues`."""
    limits: Mapping[str, QueueSettings] = {}
    """Limits of queues, from `[limits.<queue>]` in the file. A worker stores them in the ledger when it
    starts and when it reloads."""
    schedules: Mapping[str, Mapping[str, Any]] = {}
    """Schedules, from `[schedules.<name>]` in the file. A worker stores them likewise."""
    bandwidth: Mapping[str, Any] = {}
    """The limits of `app.bandwidth`, from `[bandwidth]` in the file: the options of `Bandwidth`."""
    priorities: Mapping[str, int] = msgspec.field(default_factory=lambda: PRIORITIES)
    """Names of priorities: `high`, `normal` and `low`, changed and added to by `[priorities]` in the file."""
    serve: Mapping[str, Any] = {}
    """Options of `towpath serve`, from `[serve]` in the file. The command checks them."""
    nodes: Mapping[str, Node] = {}
    """Nodes of plans, from `[nodes.<name>]` in the file. A worker stores their concurrency in the ledger."""
    origins: Mapping[str, str] = {}

    def rank(self, priority: int | str) -> int:
        """A priority as a number."""
        return rank(priority, self.priorities)

    @property
    def origin(self) -> str:
        """The origin of the URL."""
        return self.origins["url"]


NAMES: tuple[str, ...] = tuple(name for name in Settings.__struct_fields__ if name != "origins")
TABLES: Mapping[str, tuple[str, ...]] = {
    "limits": ("cap", "rate", "capacity", "retention", "keep", "warn_depth"),
    "schedules": ("task", "cron", "every", "tz", "missed", "args"),
}
"""Settings that are tables of tables, each with these fields; only a file has them."""
BANDWIDTH: Mapping[str, Any] = {"up": None, "down": None, "total": None, "schedule": (), "tz": "UTC"}
"""Without limits."""
_WHOLE = ("concurrency", "processes")
SPANS = ("lease", "grace", "deploy_window")
"""The settings that are seconds."""


def resolve(
    url: str | None = None,
    given: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    file: Path | None = None,
) -> Settings:
    """Return the settings for these arguments in this environment. `given` has any of the names of
    `Settings`; None means not given. `file` replaces the nearest file upwards from `folder`."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(NAMES, "the default")
    sources = [
        _from_nearest(folder or Path.cwd()) if file is None else _from_file(file) or {},
        _from_environment(os.environ if environment is None else environment),
        _checked({**(given or {}), "url": url}, lambda name: f"the argument {name}"),
    ]
    for found in sources:
        for name, (value, origin) in found.items():
            values[name], origins[name] = value, origin
    return Settings(**values, origins=origins)


_Found = dict[str, tuple[Any, str]]


def _from_environment(environment: Mapping[str, str]) -> _Found:
    of_files = (*TABLES, "bandwidth", "priorities", "serve", "nodes")
    found = {name: environment.get(PREFIX + name.upper()) or None for name in NAMES if name not in of_files}
    values = {name: _parsed(name, value) for name, value in found.items()}
    return _checked(values, lambda name: f"the environment variable {PREFIX}{name.upper()}")


def _parsed(name: str, text: str | None) -> Any:
    """Parse a number or a list from a text. A text that cannot be parsed is returned as it is; the check
    refuses it and names its origin."""
    if text is None:
        return None
    if name in ("queues", "include"):
        return [each.strip() for each in text.split(",") if each.strip()]
    if name == "lanes":
        return lanes_of([each.strip() for each in text.split(";") if each.strip()])
    try:
        return int(text) if name in _WHOLE else float(text) if name in SPANS else text
    except ValueError:
        return text


def _from_nearest(folder: Path) -> _Found:
    for place in (folder, *folder.parents):
        for name in ("towpath.toml", "pyproject.toml"):
            if (place / name).is_file() and (found := _from_file(place / name)) is not None:
                return found
    return {}


def _from_file(path: Path) -> _Found | None:
    """The settings in a file; None if it is a `pyproject.toml` without any."""
    document, owner = _read(path)
    if path.name != "pyproject.toml":
        return _of_table(document, owner, path)
    tool = document.get("tool", {})
    table = tool.get("towpath") if isinstance(tool, dict) else None
    return None if table is None else _of_table(table, owner, path)


def _read(path: Path) -> tuple[dict[str, Any], int]:
    """The content of the file, and the user id of its owner."""
    try:
        with path.open("rb") as file:
            return tomllib.loads(file.read().decode()), os.fstat(file.fileno()).st_uid
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        message = f"{path} cannot be read as TOML: {error}"
        raise InvalidInput(
            field=str(path), value=str(error), expected="a TOML file", message=message
        ) from error
    except RecursionError:
        raise _too_deep(path) from None


def _refuse_foreign_file(path: Path, owner: int) -> None:
    """Refuse a settings file of another user: in a directory such as /tmp any user can create one above the
    directories of others."""
    if sys.platform == "win32" or not path.parent.stat().st_mode & stat.S_IWOTH:
        return
    foreign = {owner, path.lstat().st_uid} - {0, os.geteuid()}
    if foreign:
        expected = (
            "a file of yours or of root, since every user can write its directory; "
            "remove it, or work in another directory"
        )
        raise InvalidInput(
            field=str(path), value=Described(f"a file of user {min(foreign)}"), expected=expected
        )


def _check_nesting(table: Mapping[str, Any], path: Path) -> None:
    level: list[Any] = [table]
    for _ in range(MAX_NESTING):
        level = [each for value in level for each in (value.values() if isinstance(value, dict) else value)]
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return
    raise _too_deep(path)


def _too_deep(path: Path) -> InvalidInput:
    return InvalidInput(
        field=str(path),
        value=Described("nested too deeply"),
        expected=f"at most {MAX_NESTING} tables and lists deep",
    )


def _of_table(table: Any, owner: int, path: Path) -> _Found:
    _refuse_foreign_file(path, owner)
    if not isinstance(table, dict):
        raise InvalidInput(field=f"tool.towpath in {path}", value=table, expected="a table")
    _check_nesting(table, path)
    unknown = sorted(set(table) - set(NAMES))
    if unknown:
        raise checks.unknown("setting", unknown[0], NAMES, str(path))
    found = _checked(table, lambda name: f"{name} in {path}")
    if "url" in found:
        found["url"] = (_beside(found["url"][0], path.parent), str(path))
    if "nodes" in found:
        found["nodes"] = ({name: _node_beside(each, path) for name, each in found["nodes"][0].items()}, "")
    return {name: (value, str(path)) for name, (value, _) in found.items()}


def _beside(url: str, folder: Path) -> str:
    """`sqlite:///work.db` in a file is beside that file; `sqlite:////abs.db` stays where it is."""
    prefix = "sqlite:///"
    if not url.startswith(prefix) or url.startswith(prefix + "/"):
        return url
    return prefix + str(folder.resolve() / url.removeprefix(prefix))


def _node_beside(node: Node, path: Path) -> Node:
    """Relative secret files are beside the settings file."""
    names = {name: getattr(node, name) for name in FILES if getattr(node, name) is not None}
    return msgspec.structs.replace(
        node, **{name: str(path.parent.resolve() / file) for name, file in names.items()}
    )


def _checked(values: Mapping[str, Any], origin: Callable[[str], str]) -> _Found:
    found: _Found = {}
    for name, value in values.items():
        if value is None:
            continue
        if name not in NAMES:
            raise checks.unknown("setting", name, NAMES, "Towpath")
        where = origin(name)
        found[name] = (_right(name, value, where), where)
    return found


def _right(name: str, value: Any, where: str) -> Any:
    if name in _WHOLE:
        checks.whole(where, value, 1, 10_000)
    elif name in SPANS:
        checks.micros(value, where)
        return float(value)
    elif name == "queues":
        for each in _listed(value, where, "a list of queue names or patterns"):
            checks.pattern(where, each)
        return tuple(value)
    elif name == "include":
        return included(value, where)
    elif name == "lanes":
        return _lanes(value, where)
    elif name in TABLES:
        return _tables(name, value, where)
    elif name == "bandwidth":
        return _bandwidth(value, where)
    elif name == "priorities":
        return _priorities(value, where)
    elif name == "nodes":
        return nodes_of(value, where)
    elif name == "serve":
        if not isinstance(value, Mapping):
            raise InvalidInput(field=where, value=value, expected="a table of options of towpath serve")
    else:
        checks.text(where, value, 200 if name == "name" else 4096, least=1)
    return value


def _listed(value: Any, where: str, expected: str) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise InvalidInput(field=where, value=value, expected=expected)
    return value


def included(value: Any, where: str) -> tuple[str, ...]:
    """Names of modules, or patterns of names. Raises InvalidInput."""
    for each in _listed(value, where, 'a list of modules, such as ["shop.tasks"]'):
        parts = each.split(".") if isinstance(each, str) else [""]
        if parts[0] == "*" or not all(part == "*" or part.isidentifier() for part in parts):
            expected = "modules such as shop.tasks; after the first dot, * stands for every module"
            raise InvalidInput(field=where, value=each, expected=expected)
    return tuple(value)


def _lanes(value: Any, where: str) -> Mapping[str, Lane]:
    """Lanes as objects, or as the tables of a file."""
    if not isinstance(value, Mapping):
        raise InvalidInput(field=where, value=value, expected="a table of lanes")
    found: dict[str, Lane] = {}
    for name, table in value.items():
        try:
            found[name] = table if isinstance(table, Lane) else msgspec.convert(table, Lane)
        except msgspec.ValidationError as error:
            expected = f"a table of queues, and if you like reserved, lends, ageing and adaptive: {error}"
            raise InvalidInput(field=f"lanes.{name} ({where})", value=table, expected=expected) from error
    check(found)
    return found


def _tables(name: str, value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(field=where, value=value, expected=f"written as tables: [{name}.a_name]")
    for each, fields in value.items():
        checks.name(f"{name} in {where}", each)
        if not isinstance(fields, Mapping) or not fields.keys() <= set(TABLES[name]):
            expected = f"a table of {', '.join(TABLES[name])}"
            raise InvalidInput(field=f"{name}.{each} of {where}", value=fields, expected=expected)
    if name == "schedules":
        return dict(value)
    return {queue: _limits_of(queue, fields, where) for queue, fields in value.items()}


def _limits_of(queue: str, fields: Mapping[str, Any], where: str) -> QueueSettings:
    limits = dict(fields)
    try:
        depth = limits.pop("warn_depth", msgspec.UNSET)
        if depth is not msgspec.UNSET:
            check_depth(depth, limits.get("capacity"))
        if "rate" in limits:
            limits["rate"] = Rate.of(limits["rate"])
        if "retention" in limits:
            limits["retention"] = checks.micros(limits["retention"], "retention")
        return QueueSettings(SetQueue(queue=queue, **limits), depth)
    except InvalidInput as error:
        raise error.renamed(f"{error.field} of queue {queue}, {where}") from None


def _bandwidth(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value.keys() <= BANDWIDTH.keys():
        raise InvalidInput(field=where, value=value, expected=f"a table of {', '.join(BANDWIDTH)}")
    found = {**BANDWIDTH, **_without_none(value)}
    try:
        plan(**found)
    except InvalidInput as error:
        raise error.renamed(f"{error.field} of {where}") from None
    return found


def _priorities(value: Any, where: str) -> Mapping[str, int]:
    if not isinstance(value, Mapping):
        raise InvalidInput(field=where, value=value, expected="a table of names and numbers")
    for name, number in value.items():
        checks.name(f"a name of {where}", name)
        checks.whole(f"{name} of {where}", number, HIGHEST, LOWEST)
    return {**PRIORITIES, **value}


def _without_none(value: Any) -> Any:
    """TOML has no null; the text "none" stands for it."""
    if isinstance(value, Mapping):
        return {name: _without_none(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_none(each) for each in value]
    return None if value == "none" else value


def merged(queue: str, before: QueueSettings | None, now: QueueSettings | None) -> QueueSettings:
    """The limits in force; a limit that was in force and is no longer named is lifted."""
    limits: dict[str, Any] = {**dict.fromkeys(_named(before)), **_named(now)}
    depth = limits.pop("warn_depth", msgspec.UNSET)
    return QueueSettings(SetQueue(queue=queue, **limits), depth)


def _named(limits: QueueSettings | None) -> dict[str, Any]:
    """The limits that the setting names."""
    if limits is None:
        return {}
    found = {name: getattr(limits.setting, name, limits.warn_depth) for name in TABLES["limits"]}
    return {name: value for name, value in found.items() if value is not msgspec.UNSET}
