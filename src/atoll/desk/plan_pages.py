"""A fleet's plan, its history, and the change that comes next: `/atoll/v1/fleets/NAME/plan` and so on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from atoll.control.operation.approval import NextChange
from atoll.control.operation.home import FleetHome, is_dead
from atoll.desk.desk import DeskRequest, DeskRoute, PlanDesk, json_response
from atoll.desk.fleets import FleetEntry
from atoll.runtime.http.handlers import Answer
from atoll.runtime.openai import ApiError

_MOST_EVENTS = 10_000


async def show_plan(desk: PlanDesk, request: DeskRequest) -> Answer:
    """Answer with the plan in force, to be drawn."""
    return json_response(await desk.plans.show(await _find(desk, request)))


async def show_history(desk: PlanDesk, request: DeskRequest) -> Answer:
    """Answer with what was decided and why, the newest last."""
    last = request.number("last", 200, least=1, most=_MOST_EVENTS)
    entry = await _find(desk, request)
    if entry.home is None:
        return json_response({"events": []})
    events = await asyncio.to_thread(entry.home.history.read, last=last)
    return json_response({"events": [event.model_dump(mode="json") for event in events]})


async def show_next(desk: PlanDesk, request: DeskRequest) -> Answer:
    """Answer with the change that comes next."""
    entry = await _find(desk, request)
    found = None if entry.home is None else await asyncio.to_thread(_read_next, entry.home)
    return json_response({"next": describe_next(found)})


async def answer_next(desk: PlanDesk, request: DeskRequest) -> Answer:
    """Approve or refuse the change that comes next, if it is still the one that is named."""
    asked = request.object()
    name, approve = asked.get("id"), asked.get("approve")
    if not isinstance(name, str) or not isinstance(approve, bool):
        raise ApiError(400, 'the body is {"id": ..., "approve": true or false}')
    entry = await _find(desk, request)
    if entry.home is None:
        raise _conflict("this fleet is not operated", "not_operated")
    found = await asyncio.to_thread(_read_next, entry.home)
    if found is None or found.id != name:
        raise _conflict("this is not the change that comes next any more: look again", "changed")
    if not found.on_page:
        raise _conflict("it is asked at the controller's terminal", "asked_elsewhere")
    if found.state == "applying":
        raise _conflict("it is being applied already", "applying")
    board = entry.home.board
    await asyncio.to_thread(board.answer, name, approve=approve, now_s=time.time())
    return json_response({"next": describe_next(found)}, 202)


def describe_next(change: NextChange | None) -> dict[str, Any] | None:
    """Return a change as it is shown."""
    if change is None:
        return None
    return change.model_dump(mode="json", exclude={"holder"})


def _read_next(home: FleetHome) -> NextChange | None:
    """Return what comes next, None where who wrote it is dead and nobody will do it."""
    found = home.board.read()
    return None if found is None or is_dead(found.holder) else found


async def _find(desk: PlanDesk, request: DeskRequest) -> FleetEntry:
    return await asyncio.to_thread(desk.shelf.find, request.names["name"])


def _conflict(text: str, code: str) -> ApiError:
    return ApiError(409, text, code=code)


ROUTES = (
    DeskRoute("GET", "/atoll/v1/fleets/{name}/plan", "viewer", show_plan),
    DeskRoute("GET", "/atoll/v1/fleets/{name}/history", "viewer", show_history),
    DeskRoute("GET", "/atoll/v1/fleets/{name}/next", "viewer", show_next),
    DeskRoute("POST", "/atoll/v1/fleets/{name}/next", "admin", answer_next),
)
