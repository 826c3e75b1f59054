"""The OpenAPI document and the tables of the reference, from the route table. The schemas are those of the
types that requests are decoded as and responses are encoded from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any

import msgspec

from towpath.http.exchange import Exchange
from towpath.http.problems import ErrorEnvelope
from towpath.http.table import ERRORS, PATH_PARAMETERS, Media, Route, by_path, errors_of

_JSON = "application/json"
_REFERENCE = "#/components/schemas/{name}"


class DocumentRoute:
    """`/openapi.json`: the document about these routes and itself."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.route = Route(
            method="GET",
            path="/openapi.json",
            handler=self._send,
            summary="This description of the server, as OpenAPI 3.1.",
            tag="server",
            response=Media(_JSON, "An OpenAPI document."),
        )
        self._routes = (*routes, self.route)

    @cached_property
    def _body(self) -> bytes:
        return msgspec.json.encode(document(self._routes))

    async def _send(self, exchange: Exchange) -> None:
        await exchange.send(200, [(b"content-type", b"application/json")], self._body)


def document(routes: Sequence[Route]) -> dict[str, Any]:
    schemas = _Schemas(routes)
    paths = {
        path: {method.lower(): _operation(route, schemas) for method, route in methods.items()}
        for path, methods in by_path(routes).items()
    }
    description = (
        "Durable queues, jobs and locks. Times in views are ISO 8601 in UTC, spans are seconds. Every error "
        "has a code, a sentence and, beyond the calls of lockd, a next step. The calls of lockd accept every "
        "method. `x-right` is the right that the client needs."
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Towpath", "version": version("towpath"), "description": description},
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {"schemas": schemas.components},
    }


class _Schemas:
    """The schemas of all types of the routes. `components` has those that are referred to by name."""

    def __init__(self, routes: Iterable[Route]) -> None:
        types: dict[Any, None] = {ErrorEnvelope: None}
        for route in routes:
            for each in (route.arguments, route.request, route.response):
                kind = each.schema if isinstance(each, Media) else each
                if kind is not None:
                    types[kind] = None
        found, self.components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
        self._by_type: dict[Any, dict[str, Any]] = dict(zip(types, found, strict=True))
        arguments = {route.arguments for route in routes if route.arguments is not None}
        # The fields of these types are parameters, not schemas.
        self._arguments = {each: self.components.pop(each.__name__) for each in arguments}

    def of(self, kind: Any) -> dict[str, Any]:
        return self._by_type[kind]

    def has_required(self, kind: Any) -> bool:
        """Whether an object without fields does not fit."""
        return bool(self.components[kind.__name__].get("required"))

    def parameters(self, arguments: type | None) -> list[dict[str, Any]]:
        """The arguments of a query string."""
        if arguments is None:
            return []
        found = self._arguments[arguments]
        return [
            {
                "name": name,
                "in": "query",
                "required": name in found.get("required", ()),
                "description": schema.get("description", ""),
                "schema": {field: value for field, value in schema.items() if field != "description"},
                **({"style": "form", "explode": False} if schema.get("type") == "array" else {}),
            }
            for name, schema in found["properties"].items()
        ]


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"[^A-Za-z0-9]+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [*_parameters(route), *schemas.parameters(route.arguments)],
        "responses": {**_successes(route, schemas), **_failures(route, schemas)},
    }
    if route.right is not None:
        operation["x-right"] = route.right.value
    if route.request is not None:
        required = isinstance(route.request, Media) or schemas.has_required(route.request)
        operation["requestBody"] = {"required": required, **_body(route.request, schemas, is_request=True)}
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    text = {"type": "string"}
    return [
        *(
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": PATH_PARAMETERS[name],
                "schema": {**text, "minLength": 1},
            }
            for name in route.parameters
        ),
        *(
            {"name": name, "in": "header", "required": False, "description": meaning, "schema": text}
            for name, meaning in route.headers.items()
        ),
    ]


def _successes(route: Route, schemas: _Schemas) -> dict[str, Any]:
    found: dict[str, Any] = {"200": {"description": "Done."}}
    if route.response is not None:
        found["200"] |= _body(route.response, schemas)
    for status, meaning in route.responses.items():
        found[str(status)] = {"description": meaning}
        if status != 204 and route.response is not None:
            found[str(status)] |= {"content": _body(route.response, schemas)["content"]}
    return found


def _body(body: type | Media, schemas: _Schemas, is_request: bool = False) -> dict[str, Any]:
    if not isinstance(body, Media):
        return {"content": {_JSON: {"schema": schemas.of(body)}}}
    schema: dict[str, Any] = {} if body.schema is None else schemas.of(body.schema)
    if body.content_type.startswith("multipart/"):
        binary = {"type": "string", "contentMediaType": "application/octet-stream"}
        properties = {"meta": schema, "payload": binary}
        schema = {"type": "object", "properties": properties, "required": ["meta"]}
    elif body.content_type != _JSON:
        schema = {"type": "string", **({"contentSchema": schema} if schema else {})}
    content: dict[str, Any] = {"schema": schema}
    if is_request and body.content_type.startswith("multipart/"):
        content["encoding"] = {"meta": {"contentType": _JSON}}
    return {"description": body.description, "content": {body.content_type: content}}


def _failures(route: Route, schemas: _Schemas) -> dict[str, Any]:
    found: dict[int, list[str]] = {}
    for code in errors_of(route):
        found.setdefault(ERRORS[code].status, []).append(code)
    content = {_JSON: {"schema": schemas.of(ErrorEnvelope)}}
    if route.error_type:
        content[route.error_type] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {}
    for status, codes in sorted(found.items()):
        text = " ".join(f"`{code}`: {ERRORS[code].meaning}" for code in codes)
        responses[str(status)] = {"description": text, "content": content, "x-error-codes": codes}
    if "405" in responses:
        schema = {"type": "string"}
        responses["405"]["headers"] = {"Allow": {"description": "The methods.", "schema": schema}}
    return responses


def endpoint_table(routes: Sequence[Route]) -> str:
    """The endpoints as a table in Markdown."""
    lines = ["| method | path | right | effect |", "|---|---|---|---|"]
    for route in routes:
        right = "" if route.right is None else route.right.value
        lines.append(f"| {route.method} | `{route.path}` | {right} | {route.summary} |")
    return "\n".join(lines)


def error_table() -> str:
    """The codes of errors as a table in Markdown."""
    lines = ["| status | code | meaning | next step |", "|---|---|---|---|"]
    rows = sorted(ERRORS.items(), key=lambda entry: entry[1].status)
    lines += [f"| {each.status} | `{code}` | {each.meaning} | {each.next_step} |" for code, each in rows]
    return "\n".join(lines)
