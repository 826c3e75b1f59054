"""The route table: every code is described, the document is valid and complete."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import towpath.http
from tests.support.api_reference import routes
from tests.support.wire import Remote
from towpath.http.table import ERRORS, Route, errors_of

SOURCE = Path(towpath.http.__file__).parent


@pytest.fixture(scope="module")
def table() -> tuple[Route, ...]:
    return routes()


@pytest.fixture(scope="module")
def document(local: Remote) -> Any:
    with local.connect() as wire:
        wire.request("/openapi.json", method="GET")
        answer = wire.answer()
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    return json.loads(answer.body)


def problems() -> dict[str, set[int]]:
    """The statuses of each code in the source: `Problem(400, "code", ...)`."""
    found: dict[str, set[int]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
                status, code = node.args[:2]
                for each in [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]:
                    if isinstance(each, ast.Constant) and isinstance(status, ast.Constant):
                        found.setdefault(str(each.value), set()).add(int(str(status.value)))
    return found


def test_every_code_is_in_the_table() -> None:
    found = problems()
    assert len(found) > 40
    assert {code: {ERRORS[code].status} for code in found} == found
    # `first_missing` has the code as an argument.
    assert ERRORS.keys() - found.keys() == {"missing_fields"}


def test_every_code_belongs_to_a_route(table: tuple[Route, ...]) -> None:
    codes = {code for route in table for code in errors_of(route)}
    assert codes | {"unknown_path", "unsupported"} == ERRORS.keys()


def test_operations_are_named_once(document: Any, table: tuple[Route, ...]) -> None:
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len(operations) == len(table) == len({each["operationId"] for each in operations})
    assert all(each["summary"].endswith(".") for each in operations)


def test_references_lead_to_schemas(document: Any) -> None:
    text = json.dumps(document)
    names = document["components"]["schemas"]
    references = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert references <= names.keys()
    assert names.keys() <= references


def test_the_document_names_method_right_and_errors(document: Any) -> None:
    operation = document["paths"]["/v1/queue/enqueueMany"]["post"]
    assert operation["x-right"] == "produce"
    assert {"400", "403", "405", "413", "415", "429", "503"} <= operation["responses"].keys()
    enqueue = document["paths"]["/v1/queue/enqueue"]["post"]
    assert "multipart/form-data" in enqueue["requestBody"]["content"]
    watch = document["paths"]["/v1/queue/watch"]["post"]
    assert "text/event-stream" in watch["responses"]["200"]["content"]


def test_head_is_get_without_a_body(local: Remote) -> None:
    with local.connect() as wire:
        wire.request("/v1/queues", method="HEAD")
        status, headers = wire.head()
        assert (status, headers["content-type"]) == (200, "application/json")
        wire.request("/v1/queue/ackMany", method="HEAD")
        status, headers = wire.head()
        assert (status, headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    "path", ["/v1/jobs/", "/v1/jobs//", "/v1/jobs/a/b/c", "/v1/jobs%2Fa", "/v1/jobs/a/result/", "/v1/queuesx"]
)
def test_paths_that_no_route_has(local: Remote, path: str) -> None:
    with local.connect() as wire:
        wire.request(path, method="GET")
        assert wire.answer().status == 404
