"""The planner as the console has it: the table of its requests, and the way of one to its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from atoll.core.errors import AtollError
from atoll.core.roles import Role
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
from atoll.planner.planner_service import PlannerRequest, PlannerRoute, PlanningService
from atoll.planner.worker import describe_error
from atoll.runtime.http.api_route import PREFIX, RouteTable
from atoll.runtime.http.handlers import Answer
from atoll.runtime.http.http_request import Request
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

_TRACES = f"{PREFIX}traces".encode()
_MAX_BODY_BYTES = 2 * 2**20
"""Of a body that is no trace."""


class PlannerApi:
    """A planner that can be asked, in the process that it is made in."""

    def __init__(self, planner: PlanningService, routes: tuple[PlannerRoute, ...] = ROUTES) -> None:
        self.planner = planner
        self._table = RouteTable(routes)

    async def answer(self, request: Request, role: Role, owner: str = "") -> Answer:
        """Answer a request that somebody makes in a role; ApiError where that cannot be."""
        route, names = self._table.find(request.method, request.path, role)
        if len(request.body) > _MAX_BODY_BYTES and request.path != _TRACES:
            text = f"this takes at most {_MAX_BODY_BYTES} bytes"
            raise ApiError(413, text, code="request_too_large")
        asked = PlannerRequest(role, owner, names, request.query, request.headers, request.body)
        try:
            return await route.handler(self.planner, asked)
        except AtollError as error:
            raise to_api_error(describe_error(error)) from error

    def listen(self) -> AsyncGenerator[bytes, None]:
        """Yield `fleets` as an event, at once and whenever something has changed."""
        return self.planner.watch.listen()

    async def close(self) -> None:
        """End its workers."""
        await self.planner.close()
