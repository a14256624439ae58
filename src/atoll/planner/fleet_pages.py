"""Fleets and how they stand: `/atoll/v1/fleets`."""

from __future__ import annotations

import asyncio

from atoll.planner.fleets import FleetList, ShownFleet, describe_status
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.runtime.http.handlers import Answer


async def show_fleets(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with all fleets."""
    del request
    return json_response(await planner.list_fleets())


async def show_fleet(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with how one fleet stands."""
    entry = await asyncio.to_thread(planner.shelf.find, request.names["name"])
    seen = {} if entry.record is None else await planner.shelf.look()
    return json_response(describe_status(entry, seen.get(entry.name)))


ROUTES = (
    PlannerRoute("GET", "fleets", "viewer", show_fleets, "All fleets", gives=FleetList),
    PlannerRoute(
        *("GET", "fleets/{name}", "viewer", show_fleet, "How a fleet stands"), gives=ShownFleet
    ),
)
