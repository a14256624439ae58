"""The server of the planner: finds what answers a request, and runs until it is told to stop.

It listens on a Unix socket that only its user can open, or on a port of this machine for those with its
token.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.planner import (
    file_pages,
    fleet_pages,
    log_pages,
    machine_pages,
    model_pages,
    plan_pages,
    question_pages,
)
from atoll.planner.jobs import to_api_error
from atoll.planner.openapi import document
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    find_route,
    json_response,
    read_query,
    read_role,
)
from atoll.planner.worker import describe_error
from atoll.runtime.http.handlers import Answer, HandlerServer
from atoll.runtime.http.http_server import ConnectionDeadlines, ConnectionLimits, Request
from atoll.runtime.http.listen_address import own_socket
from atoll.runtime.http.program import close_when_told
from atoll.runtime.openai import ApiError

ROUTES: tuple[PlannerRoute, ...] = (
    *fleet_pages.ROUTES,
    *log_pages.ROUTES,
    *plan_pages.ROUTES,
    *file_pages.ROUTES,
    *model_pages.ROUTES,
    *machine_pages.ROUTES,
    *question_pages.ROUTES,
)
"""Everything that the planner answers."""

HOST = "127.0.0.1"
TRACES = b"/atoll/v1/traces"
_MAX_TRACE_BYTES = 64 * 2**20
_MAX_BODY_BYTES = 2 * 2**20
_TOKEN_BYTES = 24


@dataclass(frozen=True, slots=True)
class PlannerLimits(ConnectionLimits):
    """Bodies are small, but for traces."""

    body_bytes: int = _MAX_TRACE_BYTES
    connections: int = 1000
    buffered_bytes: int = 512 * 2**20

    def body_limit(self, path: bytes) -> int:
        """Return how many bytes the body of a request may have."""
        return _MAX_TRACE_BYTES if path == TRACES else _MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class PlannerAddress:
    """Where a planner listens: a socket, or a URL with the token that opens it."""

    socket: str | None = None
    url: str | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Options of a planner: fleet files and folders of operated fleets beside those it finds itself, and
    where to listen.

    Without a port it listens on the socket, by default one of its own in the user's runtime folder; port 0
    is any. `token` opens the port; one is made where none is given.
    """

    files: tuple[Path, ...] = ()
    states: tuple[Path, ...] = ()
    socket: Path | None = None
    port: int | None = None
    token: str | None = None


class PlannerServer:
    """A planner that can be asked."""

    def __init__(self, planner: PlanningService, routes: tuple[PlannerRoute, ...] = ROUTES) -> None:
        self.planner = planner
        self._routes = routes
        self._token: str | None = None
        self._http = HandlerServer(self.answer, PlannerLimits(), ConnectionDeadlines(body_s=300.0))

    async def start(self, options: PlannerOptions) -> PlannerAddress:
        """Listen, and return where."""
        if options.port is None:
            path = options.socket or own_socket("planner", os.getpid())
            await self._http.start_on_socket(path)
            return PlannerAddress(socket=str(path))
        self._token = options.token or secrets.token_urlsafe(_TOKEN_BYTES)
        host, port = await self._http.start(HOST, options.port)
        return PlannerAddress(url=f"http://{host}:{port}", token=self._token)

    async def close(self) -> None:
        """Stop at once."""
        await self._http.close()
        await self.planner.close()

    async def answer(self, request: Request) -> Answer:
        """Answer a request (`atoll.runtime.http.handlers.Handler`)."""
        self._check_token(request)
        role = read_role(request.headers)
        if request.path == b"/openapi.json" and request.method == b"GET":
            return json_response(document(self._routes))
        path, method = request.path.decode("latin-1"), request.method.decode("latin-1")
        route, names = find_route(self._routes, method, path, role)
        asked = PlannerRequest(
            role, names, read_query(request.query), request.headers, request.body
        )
        try:
            return await route.endpoint(self.planner, asked)
        except AtollError as error:
            raise to_api_error(describe_error(error)) from error

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        shown = request.headers.get(b"authorization", b"")
        if not hmac.compare_digest(shown, b"Bearer " + self._token.encode()):
            raise ApiError(
                401,
                "the planner's token is needed",
                kind="authentication_error",
                code="invalid_token",
            )


async def serve(options: PlannerOptions, ready: Callable[[PlannerAddress], None]) -> None:
    """Run a planner until the process is told to stop; `ready` is told where it listens."""
    server = PlannerServer(PlanningService(options.files, options.states))
    try:
        ready(await server.start(options))
        await server.planner.jobs.warm()
        await close_when_told(server.close)
    finally:
        await server.close()
