"""A request of the management API: its line in the table of all, how it is found, and how it is read.

The API is one, whoever answers: the gateway (`runtime.gateway.console`), the planner (`atoll.planner`) and
the console before both (`atoll.dashboard`) each have a tuple of `ApiRoute`, of which `openapi` makes the
description, and a `RouteTable` that finds what answers and refuses who may not ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from atoll.core.roles import Role, may
from atoll.runtime.openai import ApiError

PREFIX = "/atoll/v1/"
"""Before the path of every request."""
JSON = "application/json"
EVENTS = "text/event-stream"
_MAX_FIELDS = 32
"""Fields of a query."""
_PART = re.compile(r"\{(\w+)(:path)?\}")
_FIELD = re.compile(r"`\$?\.?(\w+)[^`]*`$")
"""Of a query, at the end of what msgspec says is wrong with it."""
H = TypeVar("H")
Q = TypeVar("Q", bound=msgspec.Struct)


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query of a request that has none."""


@dataclass(frozen=True)
class ApiRoute(Generic[H]):
    """A method and a path, the least role that may ask, what answers, and the types of all that is said.

    `takes` and `gives` are the types of JSON bodies: structs, typed dicts or models of pydantic; a body of
    `bytes` is no JSON. `query` has a field for each field of the query.
    """

    method: str
    path: str
    """After `/atoll/v1/`; `{name}` stands for a part of it, `{name:path}` also for one with slashes in it."""
    role: Role
    handler: H
    summary: str
    takes: Any = None
    gives: Any = None
    query: type[msgspec.Struct] = NoQuery
    status: int = 200
    """Of what is well."""
    makes: tuple[str, ...] = (JSON,)
    """Content types of its answers."""

    @property
    def names(self) -> tuple[str, ...]:
        """The named parts of the path."""
        return tuple(name for name, _ in _PART.findall(self.path))

    @property
    def shown_path(self) -> str:
        """The whole path, as it is written for people."""
        return PREFIX + _PART.sub(r"{\1}", self.path)


class RouteTable(Generic[H]):
    """Finds the route of a request; paths without names first, then in the order of the table."""

    def __init__(self, routes: Iterable[ApiRoute[H]]) -> None:
        self._exact: dict[str, dict[str, ApiRoute[H]]] = {}
        self._named: dict[re.Pattern[str], dict[str, ApiRoute[H]]] = {}
        for route in routes:
            if route.names:
                known = self._named.setdefault(_compile(route.path), {})
            else:
                known = self._exact.setdefault(route.path, {})
            known[route.method] = route

    def find(self, method: bytes, path: bytes, role: Role) -> tuple[ApiRoute[H], dict[str, str]]:
        """Return what answers, and the named parts of the path; ApiError where nothing does or may."""
        try:
            text = path.decode("ascii")
        except UnicodeDecodeError:
            raise ApiError(404, "there is nothing here", code="not_found") from None
        routes, names = self._look(text.removeprefix(PREFIX) if text.startswith(PREFIX) else "")
        if not routes:
            raise nothing_at(text)
        route = routes.get(method.decode("latin-1"))
        if route is None:
            raise not_allowed(method, ", ".join(sorted(routes)))
        if not may(role, route.role):
            raise ApiError(
                403,
                f"{_with_article(route.role)} may do this, not {_with_article(role)}",
                kind="permission_error",
                code="role_forbids",
            )
        return route, names

    def _look(self, path: str) -> tuple[dict[str, ApiRoute[H]], dict[str, str]]:
        routes = self._exact.get(path)
        if routes is not None:
            return routes, {}
        for pattern, named in self._named.items():
            match = pattern.fullmatch(path)
            if match is not None:
                return named, {name: unquote(text) for name, text in match.groupdict().items()}
        return {}, {}


def read_query(kind: type[Q], query: bytes) -> Q:
    """Read a query; 400 for a field that is unknown, there twice or wrong."""
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError:
        raise ApiError(400, "the query cannot be read") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ApiError(400, "a field of the query is there twice")
    for field in fields.keys() - set(kind.__struct_fields__):
        raise ApiError(400, f"there is no field {field[:100]!r} of the query", param=field[:100])
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        param = None if found is None else found[1]
        what = str(error).partition(" - at ")[0]
        raise ApiError(400, f"{param or 'the query'}: {what}", param=param) from None


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; 400 where it is none."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON object: {error}", code="invalid_json") from None


def nothing_at(path: str) -> ApiError:
    """Return the error for a path where nothing is."""
    return ApiError(404, f"there is nothing at {path[:200]}", code="not_found")


def not_allowed(method: bytes, allowed: str) -> ApiError:
    """Return the error for a method that is not one of those allowed (`GET, HEAD`)."""
    return ApiError(
        405,
        f"{method.decode(errors='replace')} is not allowed here; use {allowed}",
        code="method_not_allowed",
        allow=allowed,
    )


def _compile(path: str) -> re.Pattern[str]:
    """Return what matches a path with names in it."""
    text, at = "", 0
    for part in _PART.finditer(path):
        text += re.escape(path[at : part.start()])
        text += f"(?P<{part[1]}>{'.+' if part[2] else '[^/]+'})"
        at = part.end()
    return re.compile(text + re.escape(path[at:]))


def _with_article(role: Role) -> str:
    return f"{'an' if role[0] in 'ao' else 'a'} {role}"
