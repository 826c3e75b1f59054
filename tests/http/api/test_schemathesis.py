"""Requests that are generated from the OpenAPI document: every answer has a documented status and schema, and
none is 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.api_reference import routes
from tests.support.wire import Remote
from towpath.http.openapi import document

# Responses without end, or that wait for an event without limit.
STREAMS = r"^/v1/(events|queue/(subscribe|dequeue|watch).*|acquire)$"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


schemathesis.serializer.alias("application/msgpack", "text/plain")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


schema = schemathesis.openapi.from_dict(document(routes())).exclude(path_regex=STREAMS)


@schema.parametrize()
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_documented_answers(case: Any, local: Remote, session: requests.Session) -> None:
    if case.query:
        case.query.pop("wait", None)
    case.call_and_validate(base_url=local.address, session=session, checks=CHECKS)
