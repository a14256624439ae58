"""What the desk knows, what it is asked, and who may ask: the words that its modules share.

A module with endpoints has a tuple `ROUTES`; `server` puts them together. An endpoint is

    async def show(desk: PlanDesk, request: DeskRequest) -> Answer: ...
    ROUTES = (DeskRoute("GET", "/atoll/v1/fleets/{name}", "viewer", show),)

and must not block: what reads files or asks machines goes through `asyncio.to_thread`, what
computes is a job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, unquote

from atoll.desk.answers import Answers
from atoll.desk.fleets import FleetShelf
from atoll.desk.folder import DeskFolder
from atoll.desk.jobs import JobRunner
from atoll.desk.plans import PlanBook
from atoll.desk.traces import TraceStore
from atoll.desk.watch import FleetWatch
from atoll.runtime.http.handlers import Answer, Response
from atoll.runtime.openai import ApiError

Role = Literal["viewer", "member", "admin"]
"""Viewers look, members also ask what-if and simulate, admins also approve plans."""
_RANK = {role: rank for rank, role in enumerate(get_args(Role))}


@dataclass(frozen=True, slots=True)
class DeskRequest:
    """A request whose route was found: `names` are the parts of its path, `role` who asks."""

    role: Role
    names: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    def object(self) -> dict[str, Any]:
        """Return the JSON object of the body; ApiError where it is none."""
        try:
            found = json.loads(self.body, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "the body is no JSON") from error
        if not isinstance(found, dict):
            raise ApiError(400, "the body must be a JSON object")
        return found

    def number(self, name: str, usual: int, *, least: int, most: int) -> int:
        """Return a whole number of the query."""
        text = self.query.get(name, str(usual))
        if not re.fullmatch(r"\d{1,9}", text) or not least <= int(text) <= most:
            raise ApiError(400, f"{name} must be a number from {least} to {most}", param=name)
        return int(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


class PlanDesk:
    """The state of a desk: its fleets, its workers, and a folder of its own that goes when it ends.

    `jobs` answers people who wait, `background` works on what nobody waits for.
    """

    def __init__(self, files: Iterable[Path] = (), jobs: JobRunner | None = None) -> None:
        # One more than the dashboard lets one person have.
        self.jobs = jobs or JobRunner(3)
        self.background = JobRunner(1, nice=10)
        self.shelf = FleetShelf(tuple(files))
        self.watch = FleetWatch(self.list_fleets)
        self.plans = PlanBook(self.background)
        self._folder = DeskFolder()
        self.folder = self._folder.path
        self.answers = Answers()
        self.traces = TraceStore(self.folder / "traces")

    async def list_fleets(self) -> dict[str, Any]:
        """Return all fleets as they are listed; `plans` rises when more is known of plans."""
        return await self.shelf.describe() | {"plans": self.plans.version}

    async def close(self) -> None:
        """End its workers and remove its folder."""
        await self.plans.close()
        await self.jobs.close()
        await self.background.close()
        self._folder.remove()


Endpoint = Callable[[PlanDesk, DeskRequest], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class DeskRoute:
    """A method and a path ("/atoll/v1/fleets/{name}"), the least role that may ask, and what answers."""

    method: str
    path: str
    role: Role
    endpoint: Endpoint

    @property
    def segments(self) -> tuple[str, ...]:
        """The path in its parts."""
        return tuple(self.path.split("/"))

    def match(self, segments: tuple[str, ...]) -> dict[str, str] | None:
        """Return the named parts of a path, None where it is another path."""
        own = self.segments
        if len(own) != len(segments):
            return None
        names = {}
        for mine, given in zip(own, segments, strict=True):
            if mine.startswith("{"):
                names[mine[1:-1]] = unquote(given)
            elif mine != given:
                return None
        return names


def find_route(
    routes: Iterable[DeskRoute], method: str, path: str, role: Role
) -> tuple[DeskRoute, dict[str, str]]:
    """Return what answers a request, with the names in its path; ApiError where nothing does or may."""
    segments = tuple(path.split("/"))
    found = [(route, names) for route in routes if (names := route.match(segments)) is not None]
    if not found:
        raise ApiError(404, f"nothing is at {path[:200]}", code="not_found")
    for route, names in found:
        if route.method == method:
            if _RANK[role] < _RANK[route.role]:
                raise ApiError(
                    403,
                    f"{'an' if route.role == 'admin' else 'a'} {route.role} may do this, not a {role}",
                    kind="permission_error",
                    code="role_forbids",
                )
            return route, names
    allow = ", ".join(sorted({route.method for route, _ in found}))
    raise ApiError(405, f"{method} is not for {path[:200]}", allow=allow)


def read_role(headers: dict[bytes, bytes]) -> Role:
    """Return the role that a request is made in: what its header lowers it to, else admin."""
    said = headers.get(b"x-atoll-role", b"admin").decode("latin-1")
    for role in get_args(Role):
        if said == role:
            return role  # type: ignore[no-any-return]
    raise ApiError(400, "x-atoll-role is viewer, member or admin", param="x-atoll-role")


def read_query(query: bytes) -> dict[str, str]:
    """Return the names and values of a query, the last of each name."""
    return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=64))


def json_response(data: object, status: int = 200) -> Response:
    """Return plain data as an answer that nobody keeps."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status, headers=(("cache-control", "no-store"),))
