"""Fleets and how they stand: `/atoll/v1/fleets`, and `/atoll/v1/live` for whoever stays."""

from __future__ import annotations

import asyncio

from atoll.planner.fleets import describe_status
from atoll.planner.planner_service import (
    EVENTS,
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.runtime.http.handlers import Answer, EventStream


async def show_fleets(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with all fleets."""
    del request
    return json_response(await planner.list_fleets())


async def show_fleet(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with how one fleet stands."""
    entry = await asyncio.to_thread(planner.shelf.find, request.names["name"])
    seen = {} if entry.record is None else await planner.shelf.look()
    return json_response(describe_status(entry, seen.get(entry.name)))


async def show_live(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with fleets, at once and when something has changed."""
    del request
    return EventStream(planner.watch.listen(), (("cache-control", "no-store"),))


ROUTES = (
    PlannerRoute("GET", "/atoll/v1/fleets", "viewer", show_fleets, "All fleets"),
    PlannerRoute("GET", "/atoll/v1/fleets/{name}", "viewer", show_fleet, "How a fleet stands"),
    PlannerRoute(
        *("GET", "/atoll/v1/live", "viewer", show_live, "All fleets, as events"),
        makes=(EVENTS,),
    ),
)
