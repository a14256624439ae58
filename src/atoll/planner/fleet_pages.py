"""Fleets and how they stand: `/atoll/v1/fleets`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from atoll.engines.table import find_engine
from atoll.planner.fleets import FleetList, ServedFleet, ShownFleet, describe_status
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.runtime.http.api_route import PREFIX
from atoll.runtime.http.handlers import Answer
from atoll.runtime.http.http_client import FetchError, fetch
from atoll.runtime.local.fleet_state import FleetState, list_running_fleets

_STATUS_S = 2.0
"""For how long a gateway or an instance is waited for."""


async def show_fleets(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with all fleets."""
    del request
    return json_response(await planner.list_fleets())


async def show_fleet(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with how one fleet stands."""
    name = request.names["name"]
    entry = await asyncio.to_thread(planner.shelf.find, name)
    sight = await planner.shelf.look_at(entry)
    states = [state for state in list_running_fleets() if state.name == name]
    lives = await asyncio.gather(*map(ask_fleet, states))
    served = [ServedFleet(fleet=s, live=live) for s, live in zip(states, lives, strict=True)]
    return json_response(describe_status(entry, sight, served))


async def ask_fleet(fleet: FleetState) -> dict[str, Any]:
    """Ask the gateway and the instances of a fleet that is served here; who does not answer is left out."""
    questions = {"gateway": _ask_status(fleet.url, fleet.admin_socket)}
    questions |= {
        e.id: _ask_status(e.url) for e in fleet.endpoints if find_engine(e.kind).has_status
    }
    answers = await asyncio.gather(*questions.values())
    return {
        name: answer for name, answer in zip(questions, answers, strict=True) if answer is not None
    }


async def _ask_status(url: str, admin_socket: str = "") -> Any:
    try:
        code, body = await fetch(
            f"{url}{PREFIX}status",
            timeout_s=_STATUS_S,
            unix_socket=Path(admin_socket) if admin_socket else None,
        )
        return json.loads(body) if code == 200 else None
    except (FetchError, ValueError):
        return None


ROUTES = (
    PlannerRoute("GET", "fleets", "viewer", show_fleets, "All fleets", gives=FleetList),
    PlannerRoute(
        *("GET", "fleets/{name}", "viewer", show_fleet, "How a fleet stands"), gives=ShownFleet
    ),
)
