"""Solvers for fixed clusters behind one call: a problem with a cluster in, a plan out.

`flow.search` is the default; `flow.milp` proves optima of small clusters; the others are simple rules to
compare with (`baselines`). What a plan is best at is its objective: `max-flow` is the largest flow, as
published, and `sustain` what of it lasts once KV caches must hold all requests in flight; see
`docs/internals/placement.md`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.units import format_share
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.plan import Goal, Plan
from atoll.plan.problem import Problem
from atoll.solve.assembly import infeasible
from atoll.solve.effort import Effort, Measured, Rank
from atoll.solve.family import SolverFamily
from atoll.solve.place.instance import FlowInstance, Flows, Placement
from atoll.solve.place.service import (
    MILP,
    NAMES,
    OBJECTIVES,
    RULES,
    SEARCH,
    FlowEffort,
    ServicePlacement,
    describe_limit,
    places,
    reasons,
    shortage,
    within_rates,
)
from atoll.solve.place.to_plan import Placed, plan_of
from atoll.solve.progress import OnProgress, Progress

_RANKED = 6
"""Placements that are ranked where a `Rank` is given, before the best are changed further."""
_SEARCHING = 0.5
"""Share of the time for the search by the analytic value where a `Rank` is given."""


def solve(name: str, problem: Problem, catalog: Catalog, effort: FlowEffort | None = None) -> Plan:
    """Return the plan of the flow solver called `name`; "infeasible", with reasons, where there is none."""
    chosen = effort or FlowEffort()
    if name not in NAMES:
        raise UnknownNameError("solver", name, NAMES)
    if chosen.goal not in OBJECTIVES:
        raise UnknownNameError("objective", chosen.goal, OBJECTIVES)
    if name == MILP:
        chosen = _linear(chosen)
    cluster_of(problem)
    _refuse_limits(problem)
    if len(problem.services) > 1:
        from atoll.solve.place.fairness import solve_fairly

        return solve_fairly(name, problem, catalog, chosen)
    began, cpu = time.perf_counter(), time.process_time()
    (service,) = problem.services
    lacking = shortage(problem, catalog, service)
    if lacking:
        return infeasible(problem, solver=name, reasons=(lacking,))
    notes: tuple[str, ...] = ()
    if (
        chosen.rank is not None
        and chosen.goal == "sustained"
        and name == SEARCH
        and not chosen.promise
    ):
        shorter = replace(chosen, seconds=chosen.seconds * _SEARCHING)
        answers = places(name, problem, catalog, service, shorter, most=_RANKED)
        if answers:
            left = chosen.seconds - (time.perf_counter() - began)
            answers, notes = _rank(problem, catalog, answers, chosen.rank, left)
    else:
        answers = places(name, problem, catalog, service, chosen)
    times = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    if not answers:
        return infeasible(problem, solver=name, reasons=(_why_nothing(name),), **times)
    limit = answers[0].limit
    plan = plan_of(
        problem,
        catalog,
        (answers[0].placed,),
        goal=chosen.goal,
        bound=answers[0].bound,
        solver=name,
        reasons=() if limit is None else (limit,),
    )
    said = (*plan.reasons, *reasons(plan, problem, catalog))
    return plan.model_copy(update={"reasons": said, "notes": notes, **times})


def _rank(
    problem: Problem,
    catalog: Catalog,
    answers: Sequence[ServicePlacement],
    rank: Rank,
    seconds: float,
) -> tuple[list[ServicePlacement], tuple[str, ...]]:
    """Return the best placement by `rank`, and how it was found."""
    from atoll.core.rng import stream
    from atoll.solve.place.evaluate import max_flow
    from atoll.solve.place.refine import refine
    from atoll.solve.place.sustained.sustained import best_flows, evaluator, site_of, sustain

    service, instance = answers[0].placed.service, answers[0].placed.instance
    site = site_of(instance)

    def lasting(cluster: FlowInstance, placement: Placement) -> Flows:
        return within_rates(cluster, placement, best_flows(cluster, placement, site).flows)

    def largest(cluster: FlowInstance, placement: Placement) -> Flows:
        flows = sustain(cluster, placement, max_flow(cluster, placement), site).flows
        return within_rates(cluster, placement, flows)

    def measure(placement: Placement, flows: Flows) -> Measured:
        placed = Placed(service, instance, placement, flows)
        goal: Goal = "sustained"
        return rank(plan_of(problem, catalog, (placed,), goal=goal, bound=None, solver=SEARCH))

    refined = refine(
        instance,
        [answer.placed.placement for answer in answers],
        (lasting, largest),
        measure,
        quick=evaluator(site),
        seconds=seconds,
        random=stream(problem.settings.seed, "refine"),
    )
    limit = describe_limit(instance, refined.placement, refined.flows)
    placed = Placed(service, instance, refined.placement, refined.flows)
    note = (
        f"generates {refined.value.tokens_per_s:,.1f} tokens/s under full load, prompts take "
        f"{refined.value.prompt_s:.2f} s: the best of {refined.runs:,} simulated plans (the best by its "
        f"analytic value: {refined.first.tokens_per_s:,.1f}, {refined.first.prompt_s:.2f} s)"
    )
    return [ServicePlacement(placed, answers[0].bound, limit)], (note,)


def _linear(effort: FlowEffort) -> FlowEffort:
    """An integer programme knows the largest flow only: take that as the goal, refuse any other."""
    if effort.objective not in (None, "max-flow") or effort.promise:
        asked = "a promise" if effort.promise else f"the objective {effort.objective}"
        raise UsageError(f"{MILP} does not know {asked}", hint=f"use {SEARCH}", field="solver")
    return replace(effort, objective="max-flow")


def _refuse_limits(problem: Problem) -> None:
    """A cluster is there and paid for: limits on what to rent have no meaning."""
    limits = problem.limits
    for name, given in (
        ("budget", limits.budget_usd_per_hour),
        ("spot_share", limits.spot_share),
        ("max_nodes", limits.max_nodes),
        ("spread", limits.spread if limits.spread > 1 else None),
    ):
        if given is not None:
            raise UsageError(
                f"limits.{name} does not apply to a fixed cluster", hint="leave it out", field=name
            )


def _why_nothing(name: str) -> str:
    if name in RULES:
        return f"the rule of {name} puts no whole model on these nodes"
    return "no links lead from source over all layers to sink"


def _solve_for_family(
    name: str,
    problem: Problem,
    catalog: Catalog,
    effort: Effort,
    deadline_s: float,
    on_progress: OnProgress | None,
) -> Plan:
    def log(seconds: float, value: float, bound: float) -> None:
        if on_progress is not None:
            on_progress(Progress("placing", _describe(seconds, value, bound)))

    if name in (SEARCH, MILP):
        # The deadline is for searching: on a machine where nothing was compiled yet, that comes before.
        from atoll.core.compiling import compile_entries
        from atoll.solve.place.search import anneal, moves
        from atoll.solve.place.sustained import kernel

        for module in (anneal, moves, kernel):
            compile_entries(module.__name__)
    flow = FlowEffort(
        deadline_s, effort.objective, effort.partial, effort.promise, log=log, rank=effort.rank
    )
    return solve(name, problem, catalog, flow)


def _describe(seconds: float, value: float, bound: float) -> str:
    best = f"best {value:,.1f} tokens/s" if value > 0 else "no placement yet"
    if math.isfinite(bound) and bound > 0:
        best += f", gap {format_share(max(0.0, 1 - value / bound))}, proven {bound:,.1f}"
    return f"{seconds:.1f}s: {best}"


FAMILY = SolverFamily(
    names=NAMES,
    baselines=RULES,
    solve=_solve_for_family,
    count_templates=lambda _problem, _catalog, _cached: {},
    failure="{name} has no placement",
    hint="add machines or links, or choose a smaller model or precision",
)
