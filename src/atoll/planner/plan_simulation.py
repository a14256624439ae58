"""A plan under a trace: what requests would see, and a report of it as one page."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from atoll.api.fleet_plan import FleetPlan
from atoll.api.fleet_report import FleetReport, FleetTaskReport
from atoll.core.errors import UsageError
from atoll.plan.problem import Problem
from atoll.planner.questions import AskedFleet, SimulateAsk
from atoll.planner.whatif import PlannedFleet
from atoll.planner.worker import Report, Said
from atoll.prove.quick_plan import plan_quickly
from atoll.report.promises import describe_groups
from atoll.sim.problem_demand import demand_of
from atoll.sim.sim_result import Spread
from atoll.workload.builtin import NAMES, get_builtin
from atoll.workload.requests import Workload, collect
from atoll.workload.spec import workload_of
from atoll.workload.traces import TraceReplay, read_trace

MAX_REQUESTS = 200_000
"""In one simulation; what comes later is left out, and the answer says so."""
_SIZING_S = 120.0
"""For how long plans are simulated that are made here first."""
_MAX_POINTS = 200


def find_simulation(arguments: Said, report: Report) -> Said:
    """Simulate (`worker.Job`): `place` is a AskedFleet, `ask` a SimulateAsk, `trace_path` an upload's file.

    Its result has the report as `html`.
    """
    began_s = time.monotonic()
    place, ask = AskedFleet.parse(arguments["place"]), SimulateAsk.parse(arguments["ask"])
    problem = place.read().problem
    plan = place.read_plan(problem)
    if plan is None:
        found = plan_quickly(
            problem,
            simulate_s=_SIZING_S,
            seed=0,
            tell=lambda text: report({"text": text, "share": 0.1}),
        )
        plan = PlannedFleet.of(found).plan
    if not plan.instances:
        raise UsageError(
            "there is no plan for this fleet", hint="ask what would help: atoll explain"
        )
    report({"text": "simulating", "share": 0.5})
    said = _simulate(plan, ask, arguments.get("trace_path"))
    return {**said, "usd_per_hour": plan.usd_per_hour, "seconds": time.monotonic() - began_s}


def workload_for(ask: SimulateAsk, path: str | None, problem: Problem) -> Workload:
    """Return what is asked of a plan, cut to its duration."""
    if ask.trace is None:
        return demand_of(problem, ask.duration_s)
    if ask.trace in NAMES:
        rate = get_builtin(ask.trace).rate_per_s * ask.speed
        return workload_of(f"{ask.trace}@{rate!r}/s for={ask.duration_s!r}s")
    if path is None:
        raise UsageError("which trace?", hint="name a built-in one, or upload it", field="trace")
    return TraceReplay(read_trace(path), speed=ask.speed, duration_s=ask.duration_s)


def _simulate(plan: FleetPlan, ask: SimulateAsk, path: str | None) -> dict[str, Any]:
    requests, whole = None, True
    if plan.executor_instances:
        # Any-to-any services run under their own demand: traces do not say what requests bring and want.
        if ask.trace is not None:
            raise UsageError(
                "fleets with any-to-any models are simulated under their own demand",
                hint="choose no trace",
                field="trace",
            )
        found = plan.simulate(duration_s=ask.duration_s, seed=ask.seed)
    else:
        requests = collect(workload_for(ask, path, plan.problem), ask.seed, limit=MAX_REQUESTS + 1)
        whole = len(requests) <= MAX_REQUESTS
        if not whole:
            requests = requests.take(slice(0, MAX_REQUESTS))
        if not len(requests):
            hint = "take longer"
            raise UsageError("no request comes in this time", hint=hint, field="duration_s")
        found = plan.simulate(requests, service=ask.service, seed=ask.seed)
    count = sum(s.requests for s in found.outcomes) if requests is None else len(requests)
    return {
        "kept": found.kept,
        "requests": count,
        "whole": whole,
        "services": [
            {
                **service._asdict(),
                "ttft_s": _percentiles(service.ttft_s),
                "tpot_s": _percentiles(service.tpot_s),
                "groups": describe_groups(service.groups),
            }
            for service in found.outcomes
        ],
        "timeline": draw_timeline(found),
        "html": found.render_page(),
    }


def _percentiles(spread: Spread | None) -> dict[str, float | None] | None:
    return None if spread is None else {"p50": spread.p50, "p95": spread.p95, "p99": spread.p99}


def draw_timeline(report: FleetReport | FleetTaskReport) -> dict[str, list[float | None]]:
    """Return how many requests run and how long first tokens take, over time, in few points.

    A point of `ttft_s` is the mean over requests that came then; None where none did, or none was answered.
    There are none of runs with any-to-any services, of which no time series are kept.
    """
    if isinstance(report, FleetTaskReport):
        return {"t_s": [], "running": [], "ttft_s": []}
    series = report.series
    bins = len(series.flying)
    per = max(1, -(-bins // _MAX_POINTS))
    width_s = per * series.bin_s
    points = -(-bins // per)
    columns = report.requests
    place = np.minimum((columns.arrival_s / width_s).astype(np.int64), points - 1)
    answered = np.isfinite(columns.ttft_s)
    counts = np.bincount(place[answered], minlength=points)
    sums = np.bincount(place[answered], weights=columns.ttft_s[answered], minlength=points)
    running = [float(series.flying[at * per : (at + 1) * per].mean()) for at in range(points)]
    return {
        "t_s": [at * width_s for at in range(points)],
        "running": list(running),
        "ttft_s": [float(s / n) if n else None for s, n in zip(sums, counts, strict=True)],
    }
