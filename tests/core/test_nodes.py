"""Nodes of plans in the settings: checked values, relative secret files, and no secret in an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from towpath.core.nodes import Node, nodes_of
from towpath.errors import InvalidInput
from towpath.settings import resolve

SECRET = "geheim-1"


def test_a_table_becomes_a_node() -> None:
    table = {"address": "postgresql://ada@db/shop", "concurrency": 3, "password_env": "PW", "timeout": 5}
    [node] = nodes_of({"db-1": table}, "here").values()
    assert node == Node(
        name="db-1", address="postgresql://ada@db/shop", concurrency=3, password_env="PW", timeout=5.0
    )
    assert node.queue == "node/db-1"
    assert nodes_of({"db-1": node}, "here") == {"db-1": node}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"address": f"postgresql://ada:{SECRET}@db/shop"}, "use password_env or password_file"),
        ({"address": f"host=db password={SECRET}"}, "use password_env or password_file"),
        ({"address": f"postgresql://db/shop?sslpassword={SECRET}"}, "use password_env or password_file"),
        ({"address": f"https://ada:{SECRET}@api"}, "use password_env or password_file"),
        ({"password": SECRET}, "has no field 'password'"),
        ({"password_env": SECRET}, "the name of an environment variable"),
        ({"pass_env": [SECRET]}, "the name of an environment variable"),
        ({"concurrency": SECRET}, "got `str`"),
        ({"concurrency": 0}, "from 1 to 10000"),
        ({"max_output": 2**30}, "from 0 to"),
        ({"timeout": 0}, "timeout"),
        ({"connect_timeout": -1}, "connect_timeout"),
        ({"token_env": "A", "token_file": "b"}, "left out beside token_file"),
        ({"name": "other"}, "not a field"),
        (SECRET, "a table of address"),
    ],
)
def test_wrong_tables_are_refused_without_their_values(table: Any, why: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        nodes_of({"db": table}, "here")
    assert why in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.details}"


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "x" * 101])
def test_wrong_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        nodes_of({name: {}}, "here")


def test_a_settings_file_has_nodes(tmp_path: Path) -> None:
    file = tmp_path / "towpath.toml"
    file.write_text('[nodes.db]\npassword_file = "secret"\ntoken_file = "/run/token"\n[nodes.web]\n')
    found = resolve(None, environment={}, file=file)
    assert found.origins["nodes"] == str(file)
    assert list(found.nodes) == ["db", "web"]
    assert (found.nodes["db"].password_file, found.nodes["db"].token_file) == (
        str(tmp_path / "secret"),
        "/run/token",
    )
    assert resolve(None, environment={"TOWPATH_NODES": "x"}, folder=Path("/")).nodes == {}
    file.write_text("nodes = 3\n")
    with pytest.raises(InvalidInput, match="written as tables"):
        resolve(None, environment={}, file=file)
