"""Fleets and how they stand: `/atoll/v1/fleets`, and `/atoll/v1/live` for whoever stays."""

from __future__ import annotations

import asyncio

from atoll.desk.desk import Desk, DeskRequest, Route, json_response
from atoll.desk.fleets import describe_standing
from atoll.runtime.http.handlers import Answer, EventStream


async def show_fleets(desk: Desk, request: DeskRequest) -> Answer:
    """Answer with all fleets."""
    del request
    return json_response(await desk.list_fleets())


async def show_fleet(desk: Desk, request: DeskRequest) -> Answer:
    """Answer with how one fleet stands."""
    entry = await asyncio.to_thread(desk.shelf.find, request.names["name"])
    seen = {} if entry.record is None else await desk.shelf.look()
    return json_response(describe_standing(entry, seen.get(entry.name)))


async def show_live(desk: Desk, request: DeskRequest) -> Answer:
    """Answer with fleets, at once and when something has changed."""
    del request
    return EventStream(desk.watch.listen(), (("cache-control", "no-store"),))


ROUTES = (
    Route("GET", "/atoll/v1/fleets", "viewer", show_fleets),
    Route("GET", "/atoll/v1/fleets/{name}", "viewer", show_fleet),
    Route("GET", "/atoll/v1/live", "viewer", show_live),
)
