"""One description of all that is managed here (OpenAPI): the dashboard's own requests, and what it passes on.

Gateway and planner describe themselves; their paths stand here as they are asked through the dashboard. Of a
service that does not answer there is nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from atoll.core.version import __version__
from atoll.dashboard.services import ServiceCall, ServiceDirectory, own
from atoll.runtime.http.http_client import FetchError
from atoll.runtime.openai import ERROR_SCHEMA, ApiError

Json = dict[str, Any]
_MANAGED = "/atoll/v1/"
_ALL = (_MANAGED, "/v1/")
_FRESH_S = 10.0
"""For how long what services said of themselves is told again."""
_METHODS = frozenset({"get", "put", "post", "delete", "patch"})
_REFS = "#/components/schemas/"
_FAILURES = {
    "400": "the request is malformed",
    "401": "nobody is logged in, or the key is not good",
    "403": "not in this role, or not from this page",
    "404": "there is no such thing",
    "405": "another method is needed",
    "408": "the request took too long to arrive",
    "413": "the body is too large",
    "415": "JSON is needed",
    "421": "not under this name",
    "429": "too many failed logins, or questions at once",
    "431": "the headers are too large",
    "502": "the service behind does not answer",
    "503": "full, or the service is not known here",
}
"""What may come of any request on its way through the dashboard."""
_SECURITY: Json = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key; its role counts."},
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "atoll_session",
        "description": "Of a page that is logged in; changes need its x-csrf-token, too.",
    },
}


class ApiDocument:
    """The document as gateway and planner describe themselves now, asked for again after a while."""

    def __init__(self, services: ServiceDirectory, clock: Callable[[], float]) -> None:
        self._services, self._clock = services, clock
        self._read_s = -_FRESH_S
        self._document: Json = {}

    async def read(self) -> Json:
        """Return the document."""
        if self._clock() - self._read_s >= _FRESH_S:
            names = ("gateway", "planner")
            found = await asyncio.gather(*map(self._ask, names))
            self._document = describe_api(dict(zip(names, found, strict=True)))
            self._read_s = self._clock()
        return self._document

    async def _ask(self, name: str) -> Json | None:
        try:
            address = self._services.need(name)
            call = own(address) if address.is_owned else ServiceCall(address, over_socket=False)
            answer = await call.ask("GET", "/openapi.json")
            found = msgspec.json.decode(answer.body) if answer.status == 200 else None
        except (FetchError, ApiError, msgspec.DecodeError):
            return None
        return found if isinstance(found, dict) and "paths" in found else None


def describe_api(services: Mapping[str, Json | None]) -> Json:
    """Return the document; `services` has those of gateway and planner by name, None where one is away."""
    paths: Json = _own_paths()
    schemas: Json = {"Error": ERROR_SCHEMA}
    for service, document in services.items():
        if document is None:
            continue
        prefix = service.capitalize()
        for path, operations in document["paths"].items():
            if path in paths or not path.startswith(_MANAGED if service == "planner" else _ALL):
                continue
            paths[path] = {
                method: _pass_on(_rename(operation, prefix), service)
                for method, operation in operations.items()
                if method in _METHODS
            }
        found = document.get("components", {}).get("schemas", {})
        schemas |= {f"{prefix}{name}": _rename(schema, prefix) for name, schema in found.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Atoll",
            "version": __version__,
            "description": "Everything that pages and programs manage, with one login.",
        },
        "security": [{"key": []}, {"session": []}],
        "tags": [{"name": name} for name in ("console", *services)],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _SECURITY},
    }


def _pass_on(operation: Json, service: str) -> Json:
    known = operation.get("responses", {})
    return operation | {"tags": [service], "responses": _failures() | known}


def _rename(value: Any, prefix: str) -> Any:
    """Return a description with the names of its schemas as they are here."""
    if isinstance(value, dict):
        found = {key: _rename(each, prefix) for key, each in value.items()}
        ref = found.get("$ref")
        if isinstance(ref, str) and ref.startswith(_REFS):
            found["$ref"] = f"{_REFS}{prefix}{ref.removeprefix(_REFS)}"
        return found
    if isinstance(value, list):
        return [_rename(each, prefix) for each in value]
    return value


def _own_paths() -> Json:
    login = {
        "type": "object",
        "properties": {"key": {"type": ["string", "null"]}, "token": {"type": ["string", "null"]}},
    }
    body = {"required": True, "content": {"application/json": {"schema": login}}}
    return {
        "/healthz": {"get": _own("Whether the dashboard answers") | {"security": []}},
        "/openapi.json": {"get": _own("This description") | {"security": []}},
        f"{_MANAGED}session": {
            "get": _own("Who is logged in"),
            "post": _own("Log in with a key or a one-time link")
            | {"requestBody": body, "security": []},
            "delete": _own("Log out"),
        },
        f"{_MANAGED}live": {
            "get": _own("How gateway and fleets stand, as events", "text/event-stream")
        },
    }


def _own(summary: str, makes: str = "application/json") -> Json:
    schema = {"type": "object" if makes == "application/json" else "string"}
    fine = {"description": "fine", "content": {makes: {"schema": schema}}}
    return {"summary": summary, "tags": ["console"], "responses": {"200": fine, **_failures()}}


def _failures() -> Json:
    content = {"application/json": {"schema": {"$ref": f"{_REFS}Error"}}}
    return {status: {"description": text, "content": content} for status, text in _FAILURES.items()}
