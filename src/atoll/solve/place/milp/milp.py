"""Flow placement by integer programming: proves optima of small clusters, and checks the search.

Starts are the placements given and those of simple rules (one chain, lanes). The objective is limited to
lie between the best start and the upper bound, so an engine ends as soon as it meets the bound. Engines that
take a start get it; for the others only better ones are allowed, and finding none proves the start. Where no
link can bind, nodes with the same rates are counted together (`equal_model`), a far smaller program than
the paper's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.core.errors import UsageError
from atoll.solve.place.bound.bounds import upper_bound
from atoll.solve.place.bound.cuts import links_are_loose
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement, PlacementResult
from atoll.solve.place.milp.model import (
    HIGHS,
    EngineOutcome,
    MipEngine,
    PlacementModel,
    equal_model,
    paper_model,
    prune_links,
)

Log = Callable[[float, float, float], None]
"""Told seconds so far, the best value and the proven bound, both in tokens/s."""

_FLOW_TOLERANCE = 1e-7
"""Flows closer than this share of the bound count as equal."""


@dataclass(frozen=True)
class _Start:
    placement: Placement
    flows: Flows


def solve_milp(
    instance: FlowInstance,
    *,
    seconds: float = np.inf,
    engine: MipEngine = HIGHS,
    start: Sequence[Placement] = (),
    heuristics: bool = True,
    aggregate: bool | None = None,
    degree: int | None = None,
    log: Log | None = None,
) -> PlacementResult:
    """Return the best placement found and the proven bound, tokens/s; `seconds` is a safety net.

    `aggregate` counts equal nodes together, which needs links that cannot bind; None does so where it can.
    `degree` prunes links of the paper's program to that many per node first (`prune_links`): its bound is
    then no longer one of the cluster, and the bound returned is that of `upper_bound`.
    """
    began, cpu = time.perf_counter(), time.process_time()
    # What is given may already be optimal; then nothing else is run.
    best = _best(instance, start, None)
    bound = upper_bound(instance, value=best.flows.value).value
    # Rules are quick and often reach the bound: then no program has to be solved.
    if heuristics and best.flows.value < bound * (1.0 - _FLOW_TOLERANCE):
        best = _best(instance, _rules(instance, best.flows.value, bound, seconds / 4), best)
        bound = max(bound, best.flows.value)
    nodes, late = 0, False
    if log:
        log(time.perf_counter() - began, best.flows.value, bound)
    if best.flows.value < bound * (1.0 - _FLOW_TOLERANCE):
        together = links_are_loose(instance, bound) if aggregate is None else aggregate
        if together and not links_are_loose(instance, bound):
            raise UsageError(
                "links of this cluster can bind", hint="aggregate=False", field="aggregate"
            )
        # Pruning is for the program that goes node by node; over equal nodes there are no links.
        small = instance if degree is None or together else prune_links(instance, degree)
        model: PlacementModel = equal_model(small, bound) if together else paper_model(small, bound)
        left = seconds - (time.perf_counter() - began)
        outcome = _solve(model, best, bound, engine, max(left, 0.0))
        nodes, late = outcome.nodes, outcome.timed_out
        if outcome.values is not None:
            best = _best(instance, [model.placement(outcome.values)], best)
        # A bound of the pruned cluster says nothing about the whole one.
        if small is instance:
            bound = min(bound, _proven_bound(outcome, best, bound))
        # Rounding may put the bound a little below a flow that exists.
        bound = max(bound, best.flows.value)
        if log:
            log(time.perf_counter() - began, best.flows.value, bound)
    spent = time.perf_counter() - began, time.process_time() - cpu, late
    return PlacementResult(best.placement, best.flows.value, bound, nodes, *spent)


def _solve(
    model: PlacementModel, best: _Start, bound: float, engine: MipEngine, seconds: float
) -> EngineOutcome:
    """Look for a flow above the best start."""
    program = model.program
    known = best.flows.value
    # An engine that takes a start must be allowed to keep it.
    takes = engine.takes_start and known > 0.0
    program.limit(
        known * (1.0 - _FLOW_TOLERANCE) if takes else known + _FLOW_TOLERANCE * bound, bound
    )
    hint = model.hint(best.placement, best.flows) if takes else None
    return engine.solve(program, seconds, hint)


def _proven_bound(outcome: EngineOutcome, best: _Start, bound: float) -> float:
    """Return the bound an outcome proves, tokens/s."""
    # Nothing above the best flow exists, but for the tolerance with which it was asked for.
    if outcome.status == "infeasible":
        return best.flows.value + _FLOW_TOLERANCE * bound
    return max(outcome.bound, best.flows.value)


def _best(instance: FlowInstance, placements: Sequence[Placement], known: _Start | None) -> _Start:
    """Return the placement of the largest flow; with none at all, one that uses no node."""
    from atoll.solve.place.evaluate import max_flow

    size = instance.size
    nothing = np.zeros(size, np.int64)
    idle = Flows(0.0, np.zeros((size, size)), np.zeros(size), np.zeros(size))
    best = known or _Start(Placement(nothing, nothing), idle)
    for placement in placements:
        flows = max_flow(instance, placement)
        if flows.value > best.flows.value:
            best = _Start(placement, flows)
    return best


def _rules(instance: FlowInstance, low: float, high: float, seconds: float) -> list[Placement]:
    from atoll.solve.place.bound.lanes import lanes
    from atoll.solve.place.bound.lanes_regions import region_lanes
    from atoll.solve.place.place_baselines import chain

    placements = (
        chain(instance),
        lanes(instance, seconds=seconds, low=low, high=high),
        region_lanes(instance, seconds=seconds, low=low, high=high),
    )
    return [placement for placement in placements if placement is not None]
