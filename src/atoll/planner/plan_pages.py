"""A fleet's plan, its history, and the change that comes next: `/atoll/v1/fleets/NAME/plan` and so on."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, TypedDict

import msgspec
from pydantic import Field, StrictBool, StrictStr

from atoll.control.operation.approval import ComingChange, NextChange
from atoll.control.operation.fleet_history import HistoryEvent
from atoll.control.operation.fleet_home import FleetHome, is_dead
from atoll.core.frozen import Frozen
from atoll.planner.fleets import FleetEntry
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.planner.plans import DrawnPlan
from atoll.runtime.http.handlers import Answer
from atoll.runtime.openai import ApiError

_FLEET = "fleets/{name}"


class NextAnswer(Frozen):
    """Whether the change of an id may be done."""

    id: Annotated[StrictStr, Field(max_length=64)]
    approve: StrictBool


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many of the last events are meant, and of which instance."""

    last: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 200
    instance: str | None = None


class HistoryEvents(TypedDict):
    """What was decided about a fleet and why, the newest last."""

    events: list[HistoryEvent]


class ShownNext(TypedDict):
    """The change that comes next; null where everything stays."""

    next: ComingChange | None


async def show_plan(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with the plan in force, to be drawn."""
    return json_response(await planner.plans.show(await _find(planner, request)))


async def show_history(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with what was decided and why, the newest last."""
    query = request.read(EventsQuery)
    entry = await _find(planner, request)
    if entry.home is None:
        return json_response(HistoryEvents(events=[]))
    read = entry.home.history.read
    events = await asyncio.to_thread(read, instance=query.instance, last=query.last)
    return json_response(HistoryEvents(events=list(events)))


async def show_next(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with the change that comes next."""
    entry = await _find(planner, request)
    found = None if entry.home is None else await asyncio.to_thread(_read_next, entry.home)
    return json_response(ShownNext(next=describe_next(found)))


async def answer_next(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Approve or refuse the change that comes next, if it is still the one that is named."""
    asked = NextAnswer.parse(request.object())
    entry = await _find(planner, request)
    if entry.home is None:
        raise _conflict("this fleet is not operated", "not_operated")
    found = await asyncio.to_thread(_read_next, entry.home)
    if found is None or found.id != asked.id:
        raise _conflict("this is not the change that comes next any more: look again", "changed")
    if not found.on_page:
        raise _conflict("it is asked at the controller's terminal", "asked_elsewhere")
    if found.state == "applying":
        raise _conflict("it is being applied already", "applying")
    board = entry.home.board
    await asyncio.to_thread(board.answer, asked.id, approve=asked.approve, now_s=time.time())
    return json_response(ShownNext(next=describe_next(found)), 202)


def describe_next(change: NextChange | None) -> ComingChange | None:
    """Return a change as it is shown."""
    if change is None:
        return None
    return ComingChange.parse(change.model_dump(mode="json", exclude={"holder"}))


def _read_next(home: FleetHome) -> NextChange | None:
    """Return what comes next, None where who wrote it is dead and nobody will do it."""
    found = home.board.read()
    return None if found is None or is_dead(found.holder) else found


async def _find(planner: PlanningService, request: PlannerRequest) -> FleetEntry:
    return await asyncio.to_thread(planner.shelf.find, request.names["name"])


def _conflict(text: str, code: str) -> ApiError:
    return ApiError(409, text, code=code)


ROUTES = (
    PlannerRoute(
        *("GET", f"{_FLEET}/plan", "viewer", show_plan, "The plan in force"), gives=DrawnPlan
    ),
    PlannerRoute(
        *("GET", f"{_FLEET}/history", "viewer", show_history, "What was decided and why"),
        gives=HistoryEvents,
        query=EventsQuery,
    ),
    PlannerRoute(
        *("GET", f"{_FLEET}/next", "viewer", show_next, "The change that comes next"),
        gives=ShownNext,
    ),
    PlannerRoute(
        *("POST", f"{_FLEET}/next", "operator", answer_next, "Approve or refuse that change"),
        takes=NextAnswer,
        gives=ShownNext,
        status=202,
    ),
)
