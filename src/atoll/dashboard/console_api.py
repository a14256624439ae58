"""The table of the one API: what console, gateway and planner answer, and its description."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Required, TypedDict

import msgspec

from atoll.core.roles import Role
from atoll.runtime.http.api_route import EVENTS, JSON, ApiRoute, RouteTable
from atoll.runtime.http.openapi import Json, describe_failures, make_document

Service = Literal["console", "gateway", "planner"]
"""Who answers a request."""


class LoginRequest(msgspec.Struct):
    """Body of a login: an API key, or the token of a one-time link."""

    key: str | None = None
    token: str | None = None


class LoginWays(TypedDict):
    """Ways to log in that there are."""

    key: bool
    link: bool
    header: bool


class ShownSession(TypedDict, total=False):
    """Who is logged in; where nobody is (`role` is null), `login` has the ways in, and `message` why."""

    role: Required[Role | None]
    login: Required[str | LoginWays]
    message: str | None
    fresh: bool
    """Whether no gateway is known yet."""
    name: str
    owner: str | None
    csrf: str
    keys_needed: bool
    accounts: bool
    gateway: str | None
    base_url: str | None
    planner: bool
    version: str


class LoggedOut(TypedDict):
    """Nothing: nobody is logged in any more."""


def _own(method: str, path: str, summary: str, **more: Any) -> ApiRoute[Service]:
    return ApiRoute(method, path, "viewer", "console", summary, **more)


OWN_ROUTES: tuple[ApiRoute[Service], ...] = (
    _own("GET", "session", "Who is logged in", gives=ShownSession),
    _own(
        *("POST", "session", "Log in with a key or a one-time link"),
        takes=LoginRequest,
        gives=ShownSession,
    ),
    _own("DELETE", "session", "Log out", gives=LoggedOut),
    _own("GET", "live", "How gateway and fleets stand, as events", makes=(EVENTS,)),
)
"""What the console answers by itself."""


class ConsoleApi:
    """All requests; `paths` and `schemas` describe those for models, which need no role."""

    def __init__(
        self,
        gateway: Iterable[ApiRoute[Any]],
        planner: Iterable[ApiRoute[Any]],
        paths: Json,
        schemas: Json,
    ) -> None:
        own = {route.path for route in OWN_ROUTES}
        self.routes: dict[Service, tuple[ApiRoute[Service], ...]] = {
            "console": OWN_ROUTES,
            # What both tell, the console puts together.
            "gateway": tuple(replace(r, handler="gateway") for r in gateway if r.path not in own),
            "planner": tuple(replace(r, handler="planner") for r in planner),
        }
        self._table = RouteTable(route for group in self.routes.values() for route in group)
        self._paths, self._schemas = paths, schemas

    def find_service(self, method: bytes, path: bytes) -> Service:
        """Return who answers a request, and says whether somebody may ask; ApiError where nobody does."""
        return self._table.find(method, path, "admin")[0].handler

    @cached_property
    def document(self) -> Json:
        """Description of everything (OpenAPI)."""
        models = {
            path: {method: _pass_on(operation) for method, operation in operations.items()}
            for path, operations in self._paths.items()
            if path.startswith("/v1/")
        }
        fine = {"200": {"description": "fine", "content": {"application/json": {"schema": {}}}}}
        for path, summary in (
            ("/healthz", "Whether the console answers"),
            ("/openapi.json", "This description"),
        ):
            described = {"summary": summary, "tags": ["console"], "security": []}
            models[path] = {"get": described | {"responses": fine | describe_failures()}}
        document = make_document(
            "Atoll",
            self.routes,
            description="Everything that pages and programs manage, with one login.",
            paths=models,
            schemas=self._schemas,
        )
        document["paths"]["/atoll/v1/session"]["post"]["security"] = []
        return document


def _pass_on(operation: Json) -> Json:
    """Return a request for models as it is asked here, where more can go wrong."""
    own, known = describe_failures(), operation.get("responses", {})
    for status in own.keys() & known.keys():
        # The gateway refuses in the dialect of the request, the console in its own.
        schemas = [each[status]["content"][JSON]["schema"] for each in (known, own)]
        if schemas[0] != schemas[1]:
            own[status]["content"] = {JSON: {"schema": {"anyOf": schemas}}}
        known = {**known, status: own[status]}
    return operation | {"tags": ["models"], "responses": own | known}
