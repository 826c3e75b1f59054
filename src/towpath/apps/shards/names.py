"""Names of database objects. Every function is pure: the same table, shard and node give the same name.

The logical table is in the schema of its record. All other relations are in the schema `towpath_shards`:

| relation        | node                                | kind                                           |
|-----------------|-------------------------------------|------------------------------------------------|
| `t_s0`          | primary                             | table, attached to the logical table           |
| `t_s0`          | replica, or target of a move        | table, not attached, guarded                   |
| `t_s0`          | former primary, until the plan ends | foreign table that forwards to the new primary |
| `t_s0_g2_route` | every node except the primary       | foreign table, attached to the logical table   |
| `t_s0_g1_old`   | former primary, until the plan ends | table with the rows at the moment of the pivot |

Logical replication maps tables by schema and name, so a shard table has one name on every node."""

from __future__ import annotations

import hashlib
import re

from towpath.errors import InvalidInput

SCHEMA = "towpath_shards"
"""Schema of all shard tables, routes and functions."""
SERVER_PREFIX = "towpath_"
GUARD = "towpath_guard"
"""Name of the trigger that refuses writes of ordinary sessions to a table that is not the primary copy, and
of its function."""
MAX_IDENTIFIER = 63
"""Bytes of an identifier in PostgreSQL."""
MAX_TABLE = 30
"""Characters of a table's name: the longest name derived from it still is an identifier."""
MAX_SHARDS = 3_000

_TABLE = re.compile(rf"[a-z_][a-z0-9_]{{0,{MAX_TABLE - 1}}}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,49}")


def check_table(name: str) -> str:
    """The name of a logical table; raises `InvalidInput`."""
    if not _TABLE.fullmatch(name):
        raise InvalidInput(
            field="table", value=name, expected=f"1 to {MAX_TABLE} characters: a-z, 0-9 and _, no digit first"
        )
    return name


def check_node(name: str) -> str:
    """The name of a node; raises `InvalidInput`."""
    if not _NODE.fullmatch(name):
        raise InvalidInput(
            field="node", value=name, expected="1 to 50 characters: letters, digits, _, . and -"
        )
    return name


def shard_table(table: str, shard: int) -> str:
    """The table with the rows of a shard, on its primary, its replicas and the target of a move."""
    return f"{table}_s{shard}"


def route_table(table: str, shard: int, generation: int) -> str:
    """The foreign table that stands for a shard on the nodes that are not its primary."""
    return f"{table}_s{shard}_g{generation}_route"


def old_table(table: str, shard: int, generation: int) -> str:
    """The former primary's table after the pivot of a move away from this generation."""
    return f"{table}_s{shard}_g{generation}_old"


def server_name(node: str) -> str:
    """The foreign server for a peer node."""
    return f"{SERVER_PREFIX}{node}"


def hash_check(table: str, shard: int) -> str:
    """The CHECK constraint equal to the partition constraint, which makes ATTACH skip its scan."""
    return f"{table}_s{shard}_hash"


def publication(table: str, shard: int, node: str) -> str:
    """The publication of a shard on its primary, for one subscriber node: a publication is dropped with the
    subscription that uses it."""
    return _short(f"towpath_{table}_s{shard}_to_{node}")


def slot(table: str, shard: int, node: str) -> str:
    """The replication slot on the primary for one subscriber node. Slots allow only a-z, 0-9 and _."""
    name = f"towpath_{table}_s{shard}_to_{node}"
    allowed = re.sub(r"[^a-z0-9_]", "_", name.lower())
    return _short(allowed if allowed == name else f"{allowed}_{_digest(name)}")


def subscription(table: str, shard: int, node: str) -> str:
    """The subscription on the subscriber node."""
    return _short(f"towpath_{table}_s{shard}_on_{node}")


def lock(table: str) -> str:
    """The plan lock that every plan on a table takes."""
    return f"shards/{table}"


def note(table: str) -> str:
    """The key of the table's note in the ledger."""
    return f"shards/{table}"


def _short(name: str) -> str:
    """A name of at most 63 bytes: a longer one ends with a digest of the whole."""
    if len(name) <= MAX_IDENTIFIER:
        return name
    return f"{name[: MAX_IDENTIFIER - 9]}_{_digest(name)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]


_SHARD_OF = re.compile(
    r"(?P<table>[a-z_][a-z0-9_]*?)_s(?P<shard>\d+)(?:_g(?P<generation>\d+)_(?:route|old))?"
)


def shard_of(relation: str) -> tuple[str, int, int | None] | None:
    """(table, shard, generation) of a relation in the schema of shards; None for another name."""
    found = _SHARD_OF.fullmatch(relation)
    if found is None:
        return None
    generation = found["generation"]
    return found["table"], int(found["shard"]), None if generation is None else int(generation)
