"""Endpoints that work something out, or keep what is needed for it: what-ifs, traces and simulations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypedDict
from urllib.parse import unquote

from atoll.core.errors import UnknownNameError
from atoll.planner.answers import AnsweringRunner, key_of
from atoll.planner.dials import Dials, describe_dials
from atoll.planner.jobs import stream_job
from atoll.planner.planner_service import (
    PlannerRequest,
    PlannerRoute,
    PlanningService,
    json_response,
)
from atoll.planner.plans import ShownPlan
from atoll.planner.questions import (
    SIMULATION,
    WHATIF,
    AskedFleet,
    FleetAsk,
    SimulateAsk,
    WhatIfAsk,
    place_of,
)
from atoll.planner.source import read_source
from atoll.planner.trace_store import ShownTrace, clean_name, read_upload
from atoll.planner.worker import NamedJob, Said
from atoll.runtime.http.api_route import EVENTS
from atoll.runtime.http.handlers import Answer, Response
from atoll.workload.builtin import NAMES


class TraceList(TypedDict):
    """Built-in and uploaded traces."""

    traces: list[ShownTrace]


class DeletedTrace(TypedDict):
    """The trace that is gone."""

    deleted: str


async def show_dials(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with what a what-if of a fleet can turn."""
    name = request.names["name"]

    def read() -> Dials:
        entry = planner.shelf.find(name)
        plan = entry.read_plan()
        usd = None if plan is None else plan.usd_per_hour
        return describe_dials(read_source(entry.source), name, usd)

    said = await asyncio.to_thread(read)
    if said["usd_per_hour"] is None:
        said["usd_per_hour"] = planner.plans.made_usd(name)
    return json_response(said)


async def ask_whatif(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with a fleet as it is and as it would be."""
    ask = WhatIfAsk.parse(request.object())
    place = await asyncio.to_thread(_place, planner, ask)
    arguments = {"place": place.model_dump(), "ask": ask.model_dump(mode="json")}

    def keep_plan(said: Said) -> Said:
        made = said.pop("made", None)
        if made is not None and ask.fleet is not None:
            shown = ShownPlan(said["now"]["plan"], time.time(), made["problem"], made["plan"])
            planner.plans.keep(ask.fleet, shown)
        return said

    before = planner.beforehand if ask.fleet == planner.first else None
    return _stream(planner, WHATIF, arguments, keep_plan, before)


async def ask_simulation(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with what a trace would see of a fleet."""
    ask = SimulateAsk.parse(request.object())
    path = None
    if ask.trace is not None and ask.trace not in NAMES:
        path = str(planner.traces.find(ask.trace).path)
    place = await asyncio.to_thread(_place, planner, ask)
    arguments = {
        "place": place.model_dump(),
        "ask": ask.model_dump(mode="json"),
        "trace_path": path,
    }
    return _stream(planner, SIMULATION, arguments)


async def show_traces(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with all traces."""
    del request
    return json_response(TraceList(traces=await asyncio.to_thread(planner.traces.describe)))


async def take_trace(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Take a trace that is uploaded; answer with what is in it."""
    sent = request.headers.get(b"x-atoll-filename", b"").decode("latin-1")
    shown = clean_name(unquote(sent))
    name, path = await asyncio.to_thread(planner.traces.receive, request.body)
    target = planner.traces.target(name)
    try:
        said = await planner.jobs.run(read_upload, {"path": str(path), "target": str(target)})
    finally:
        # A worker that was killed has left it.
        path.unlink(missing_ok=True)
    trace = await asyncio.to_thread(planner.traces.add, name, shown, said["stats"])
    return json_response(trace.describe(), 201)


async def delete_trace(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Delete a trace that was uploaded."""
    await asyncio.to_thread(planner.traces.remove, request.names["id"])
    return json_response(DeletedTrace(deleted=request.names["id"]))


async def show_report(planner: PlanningService, request: PlannerRequest) -> Answer:
    """Answer with a report as one page."""
    name = request.names["id"]
    html = planner.answers.reports.get(name)
    if html is None:
        raise UnknownNameError(
            "report", name, (), hint="simulate again: only the last ten are kept"
        )
    headers = (("cache-control", "no-store"),)
    return Response(html.encode(), 200, "text/html; charset=utf-8", headers)


def _stream(
    planner: PlanningService,
    job: NamedJob,
    arguments: Said,
    on_result: Callable[[Said], Said] = lambda said: said,
    before: asyncio.Task[None] | None = None,
) -> Answer:
    key = key_of(job, arguments)
    runner = AnsweringRunner(planner.jobs, planner.answers, key, on_result, before)
    return stream_job(runner, job, arguments)


def _place(planner: PlanningService, ask: FleetAsk) -> AskedFleet:
    ask.check()
    if ask.fleet is None:
        return AskedFleet(text=ask.file)
    return place_of(planner.shelf.find(ask.fleet))


ROUTES = (
    PlannerRoute(
        *("GET", "fleets/{name}/dials", "viewer", show_dials),
        "What a what-if can turn",
        gives=Dials,
    ),
    PlannerRoute(
        *("POST", "whatif", "member", ask_whatif),
        "A fleet as it is and as it would be: `progress`, then `result` or `error`",
        takes=WhatIfAsk,
        makes=(EVENTS,),
    ),
    PlannerRoute("GET", "traces", "viewer", show_traces, "All traces", gives=TraceList),
    PlannerRoute(
        *("POST", "traces", "member", take_trace, "Upload a trace"),
        takes=bytes,
        gives=ShownTrace,
        status=201,
    ),
    PlannerRoute(
        *("DELETE", "traces/{id}", "member", delete_trace, "Delete a trace"), gives=DeletedTrace
    ),
    PlannerRoute(
        *("POST", "simulate", "member", ask_simulation),
        "What a trace would see of a fleet: `progress`, then `result` or `error`",
        takes=SimulateAsk,
        makes=(EVENTS,),
    ),
    PlannerRoute(
        *("GET", "reports/{id}", "viewer", show_report, "A report as a page"),
        makes=("text/html",),
    ),
)
