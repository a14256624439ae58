"""Fleets and how they stand: `/atoll/v1/fleets`, and `/atoll/v1/live` for whoever stays."""

from __future__ import annotations

import asyncio

from atoll.desk.desk import DeskRequest, DeskRoute, PlanDesk, json_response
from atoll.desk.fleets import describe_standing
from atoll.runtime.http.handlers import Answer, EventStream


async def show_fleets(desk: PlanDesk, request: DeskRequest) -> Answer:
    """Answer with all fleets."""
    del request
    return json_response(await desk.list_fleets())


async def show_fleet(desk: PlanDesk, request: DeskRequest) -> Answer:
    """Answer with how one fleet stands."""
    entry = await asyncio.to_thread(desk.shelf.find, request.names["name"])
    seen = {} if entry.record is None else await desk.shelf.look()
    return json_response(describe_standing(entry, seen.get(entry.name)))


async def show_live(desk: PlanDesk, request: DeskRequest) -> Answer:
    """Answer with fleets, at once and when something has changed."""
    del request
    return EventStream(desk.watch.listen(), (("cache-control", "no-store"),))


ROUTES = (
    DeskRoute("GET", "/atoll/v1/fleets", "viewer", show_fleets),
    DeskRoute("GET", "/atoll/v1/fleets/{name}", "viewer", show_fleet),
    DeskRoute("GET", "/atoll/v1/live", "viewer", show_live),
)
