"""What the processes of a fleet write: `/atoll/v1/fleets/NAME/logs`, whole or as it comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Annotated, TypedDict

import msgspec

from atoll.control.operation import instance_logs
from atoll.control.operation.instance_logs import FleetLogs, ReadLines, find_new, read_tail
from atoll.core.errors import AtollError, UnknownNameError
from atoll.planner.fleets import FleetEntry
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.runtime.http.api_route import EVENTS, JSON
from atoll.runtime.http.handlers import Answer, EventStream
from atoll.runtime.openai import ApiError

_MAX_LINES = 100_000
_FOLLOWED = 1000
"""Lines that are looked at for what is new; more than an instance says between two looks."""
_EVERY_S = 1.0
_GATEWAY_LOG = "gateway.log"


class LogQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many of the last lines are meant, and whether those to come are told, too."""

    lines: Annotated[int, msgspec.Meta(ge=1, le=_MAX_LINES)] = 200
    follow: bool = False


class LogList(TypedDict):
    """Processes whose lines can be read, and why those of others cannot."""

    logs: list[str]
    errors: list[str]


class LastLines(TypedDict):
    """The last lines of a process."""

    instance: str
    text: str


async def show_logs(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with what can be read of a fleet."""
    logs = await _find(planner, request)
    return json_response(LogList(logs=sorted(logs.readers), errors=list(logs.errors)))


async def show_log(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with the last lines of a process; with `follow=1` also with those to come."""
    name = request.names["instance"]
    query = request.read(LogQuery)
    lines = query.lines
    logs = await _find(planner, request)
    # The beginning of a name will do, if only one begins so.
    fitting = [each for each in logs.readers if each.startswith(name)]
    read = logs.readers.get(fitting[0] if len(fitting) == 1 else name)
    if read is None:
        if logs.errors:
            raise ApiError(
                404, f"{name} is not to be found, and {logs.errors[0]}", code="not_found"
            )
        raise UnknownNameError("log", name, logs.readers)
    if query.follow:
        return EventStream(_follow(read, lines), (("cache-control", "no-store"),))
    text = await asyncio.to_thread(read, lines)
    return json_response(LastLines(instance=name, text=text))


async def _follow(read: ReadLines, lines: int) -> AsyncGenerator[bytes, None]:
    """Yield the last lines, and then what comes after them, until nobody listens."""
    yield b": \n\n"
    seen = (await asyncio.to_thread(read, max(lines, _FOLLOWED))).splitlines()
    yield _event(seen[-lines:])
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            now = (await asyncio.to_thread(read, _FOLLOWED)).splitlines()
        except AtollError as error:
            yield b"event: error\ndata: %b\n\n" % json.dumps({"message": str(error)}).encode()
            return
        fresh = find_new(seen, now)
        seen = now
        if fresh:
            yield _event(fresh)


def _event(lines: list[str]) -> bytes:
    return b"event: lines\ndata: %b\n\n" % json.dumps({"lines": lines}).encode()


async def _find(planner: PlanningService, request: PlannerRequest) -> FleetLogs:
    entry = await asyncio.to_thread(planner.shelf.find, request.names["name"])
    return await asyncio.to_thread(list_logs, entry)


def list_logs(entry: FleetEntry) -> FleetLogs:
    """Return what can be read of a fleet: of one that is operated, or served on this machine."""
    if entry.home is not None and entry.record is not None:
        return instance_logs.list_logs(entry.home, entry.record)
    readers: dict[str, ReadLines] = {}
    if entry.served is not None:
        own = Path(entry.served.folder) / _GATEWAY_LOG
        if own.exists():
            readers["gateway"] = partial(read_tail, own)
        for endpoint in entry.served.endpoints:
            for node in endpoint.nodes:
                readers[node.process] = partial(read_tail, Path(node.log))
    return FleetLogs(readers, ())


ROUTES = (
    # What engines write may have words of requests in it.
    PlannerRoute(
        *("GET", "fleets/{name}/logs", "operator", show_logs),
        "Whose lines can be read",
        gives=LogList,
    ),
    PlannerRoute(
        *("GET", "fleets/{name}/logs/{instance}", "operator", show_log),
        "The last lines of an instance, or of `gateway` or `hub`, and with `follow` those to come",
        gives=LastLines,
        query=LogQuery,
        makes=(JSON, EVENTS),
    ),
)
