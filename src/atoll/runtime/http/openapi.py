"""Description of the management API (OpenAPI), made from its routes and the types that they check by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from atoll.core.roles import ROLES, may
from atoll.core.version import __version__
from atoll.runtime.http.api_route import JSON, ApiRoute
from atoll.runtime.openai import ERROR_SCHEMA

Json = dict[str, Any]
Routes = Iterable[ApiRoute[Any]]
REF = "#/components/schemas/{name}"
FAILURES = {
    "400": "the request is malformed, or names what cannot be",
    "401": "nobody is logged in, or the key is not good",
    "403": "not in this role, not from this page, or not served here",
    "404": "there is no such thing",
    "405": "another method is needed",
    "408": "the request took too long to arrive",
    "409": "not as things stand",
    "413": "the body is too large",
    "415": "JSON is needed",
    "421": "not under this name",
    "429": "too many failed logins, or questions at once",
    "431": "the headers are too large",
    "500": "a worker has ended",
    "502": "the service behind does not answer",
    "503": "full, or what is needed is away",
    "504": "not done in time",
}
"""What may come of any request of the management API."""
_SECURITY: Json = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key; its role counts."},
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "atoll_session",
        "description": "Of a page that is logged in; changes need its x-csrf-token, too.",
    },
}


def make_document(
    title: str,
    routes: Mapping[Any, Routes],
    *,
    description: str = "",
    paths: Json | None = None,
    schemas: Json | None = None,
) -> Json:
    """Return the document of routes by tag; `paths` and `schemas` are of what is described elsewhere."""
    every = [route for group in routes.values() for route in group]
    described: Json = dict(paths or {})
    for tag, group in routes.items():
        for route in group:
            operation = _describe(route) | {"tags": [tag]}
            described.setdefault(route.shown_path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": description},
        "security": [{"key": []}, {"session": []}],
        "tags": [{"name": tag} for tag in routes],
        "paths": described,
        "components": {
            "schemas": {"Error": ERROR_SCHEMA, **_list_schemas(every), **(schemas or {})},
            "securitySchemes": _SECURITY,
        },
    }


def _list_schemas(routes: Routes) -> Json:
    """Return the schemas of all that routes take and give, by name."""
    models: dict[type[BaseModel], None] = {}

    def refer(kind: type) -> Json:
        # What msgspec does not know is a model of pydantic.
        models[kind] = None
        return {"$ref": REF.format(name=kind.__name__)}

    kinds = {
        kind: None
        for route in routes
        for kind in (route.takes, route.gives)
        if kind not in (None, bytes)
    }
    for kind in [kind for kind in kinds if _is_model(kind)]:
        del kinds[kind]
        refer(kind)
    _, schemas = msgspec.json.schema_components(kinds, schema_hook=refer, ref_template=REF)
    _, found = models_json_schema(
        [(model, "validation") for model in models],
        ref_template=REF.replace("{name}", "{model}"),
    )
    more: Json = found.get("$defs", {})
    if twice := schemas.keys() & more.keys():
        raise TypeError(f"types of the API with one name: {', '.join(sorted(twice))}")
    return schemas | more


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _describe(route: ApiRoute[Any]) -> Json:
    who = ", ".join(role for role in ROLES if may(role, route.role))
    content: Json = {kind: {"schema": {"type": "string"}} for kind in route.makes}
    if JSON in content:
        shown = {"type": "object"} if route.gives is None else _refer(route.gives)
        content[JSON] = {"schema": shown}
    described: Json = {
        "summary": route.summary,
        "description": f"Roles: {who}.",
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in route.names
            ),
            *_list_fields(route.query),
        ],
        "responses": {str(route.status): {"description": "fine", "content": content}}
        | describe_failures(),
    }
    if route.takes is bytes:
        binary = {"schema": {"type": "string", "format": "binary"}}
        described["requestBody"] = {
            "required": True,
            "content": {"application/octet-stream": binary},
        }
    elif route.takes is not None:
        body = {JSON: {"schema": _refer(route.takes)}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def describe_failures(failures: Mapping[str, str] = FAILURES, shape: str = "Error") -> Json:
    """Return what may go wrong with a request, by status and in one shape."""
    content = {JSON: {"schema": {"$ref": REF.format(name=shape)}}}
    return {status: {"description": text, "content": content} for status, text in failures.items()}


def _list_fields(query: type[msgspec.Struct]) -> list[Json]:
    """Return the parameters of a query: a field may be left out, and null is not written."""
    _, schemas = msgspec.json.schema_components([query], ref_template=REF)
    fields: Json = schemas[query.__name__]["properties"]
    found = []
    for name, schema in fields.items():
        kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
        shown = kinds[0] if len(kinds) == 1 else {k: v for k, v in schema.items() if v is not None}
        found.append({"name": name, "in": "query", "required": False, "schema": shown})
    return found


def _refer(kind: Any) -> Json:
    return {"$ref": REF.format(name=kind.__name__)}
