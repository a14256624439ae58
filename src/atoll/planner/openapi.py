"""The planner's description of itself: its routes, with bodies as the types that check them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from atoll.core.version import __version__
from atoll.planner.planner_service import PlannerRoute, Role
from atoll.runtime.openai import ERROR_SCHEMA

_REF = "#/components/schemas/{model}"
_FAILURES = {
    "400": "the request is malformed, or names what cannot be",
    "401": "the token is needed",
    "403": "not in this role",
    "404": "there is no such thing",
    "405": "another method is needed",
    "408": "the request took too long to arrive",
    "409": "not as things stand",
    "413": "the body is too large",
    "429": "too many questions at once",
    "431": "the headers are too large",
    "500": "a worker has ended",
    "503": "full",
    "504": "not done in time",
}


@cache
def document(routes: tuple[PlannerRoute, ...]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _describe(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Atoll planner", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR_SCHEMA, **_schemas(routes)}},
    }


def _schemas(routes: Iterable[PlannerRoute]) -> dict[str, Any]:
    taken: list[type[BaseModel]] = [route.takes for route in routes if route.takes is not None]
    _, found = models_json_schema([(each, "validation") for each in taken], ref_template=_REF)
    schemas: dict[str, Any] = found.get("$defs", {})
    return schemas


def _describe(route: PlannerRoute) -> dict[str, Any]:
    roles = get_args(Role)
    who = ", ".join(roles[roles.index(route.role) :])
    names = [part[1:-1] for part in route.segments if part.startswith("{")]
    places = [(name, "path") for name in names] + [(name, "query") for name in route.query]
    content = {
        kind: {"schema": {"type": "object" if kind == "application/json" else "string"}}
        for kind in route.makes
    }
    fine = {"description": "fine", "content": content}
    described: dict[str, Any] = {
        "summary": route.summary,
        "description": f"Roles: {who}.",
        "parameters": [
            {"name": name, "in": at, "required": at == "path", "schema": {"type": "string"}}
            for name, at in places
        ],
        "responses": dict.fromkeys(("200", "201", "202"), fine)
        | {status: _failure(text) for status, text in _FAILURES.items()},
    }
    if route.takes is not None:
        schema = {"$ref": _REF.format(model=route.takes.__name__)}
        body: dict[str, Any] = {"application/json": {"schema": schema}}
        described["requestBody"] = {"required": True, "content": body}
    elif route.method in ("POST", "PUT", "PATCH"):
        body = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _failure(text: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model="Error")}
    return {"description": text, "content": {"application/json": {"schema": schema}}}
