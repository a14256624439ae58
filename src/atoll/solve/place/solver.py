"""Solvers for fixed clusters behind one call: a problem with a cluster in, a plan out.

`flow.search` is the default; `flow.milp` proves optima of small clusters; the others are simple rules to
compare with (`baselines`). What a plan is best at is its objective: `max-flow` is the largest flow, as
published, and `sustain` what of it lasts once KV caches must hold all requests in flight; see
`docs/internals/placement.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError, UsageError
from atoll.plan.cluster_profiles import cluster_of
from atoll.plan.plan import Goal, Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.assembly import infeasible
from atoll.solve.place.bottleneck import bottleneck
from atoll.solve.place.candidates import Score
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.instance import FlowInstance, Flows, Placement
from atoll.solve.place.refine import Measured
from atoll.solve.place.to_plan import Placed, plan_of

SEARCH, MILP = "flow.search", "flow.milp"
RULES = ("swarm", "petals", "separate", "separate-plus", "chain", "random")
NAMES = (SEARCH, MILP, *RULES)
OBJECTIVES: tuple[Goal, ...] = ("sustained", "max-flow")
SECONDS = 60.0
_LANES_S = 5.0

_RANKED = 6
"""Placements that are ranked where a `Rank` is given, before the best are changed further."""
_SEARCHING = 0.5
"""Share of the time for the search by the analytic value where a `Rank` is given."""

Log = Callable[[float, float, float], None]
"""Told seconds so far, the best value and the proven bound, both in tokens/s."""
Rank = Callable[[Plan], Measured]
"""What a plan generates and how soon, by simulation, say."""


@dataclass(frozen=True)
class FlowEffort:
    """How to solve: for how long, what for, and with partial inference or without it.

    With `promise`, no pipeline may be slower than the service promises (`latency`). `rank` values plans
    (a simulation, say): the best few by `sustain` throughput are ranked by it and the best changed
    further (`refine`); without it the best by `sustain` is taken.
    """

    seconds: float = SECONDS
    objective: Goal | None = None
    partial: bool = False
    promise: bool = False
    workers: int = 1
    log: Log | None = None
    rank: Rank | None = None

    @property
    def goal(self) -> Goal:
        """The objective, by default the first of those that can be asked for."""
        return self.objective or OBJECTIVES[0]


@dataclass(frozen=True)
class ServicePlacement:
    """A placement of one service, the proven bound on any in tokens/s, and what limits it if not a cut."""

    placed: Placed
    bound: float | None
    limit: str | None = None


def solve(name: str, problem: Problem, catalog: Catalog, effort: FlowEffort | None = None) -> Plan:
    """Return the plan of the flow solver called `name`; "infeasible", with reasons, where there is none."""
    own = effort or FlowEffort()
    if name not in NAMES:
        raise UnknownNameError("solver", name, NAMES)
    if own.goal not in OBJECTIVES:
        raise UnknownNameError("objective", own.goal, OBJECTIVES)
    if name == MILP:
        own = _linear(own)
    cluster_of(problem)
    _refuse_limits(problem)
    if len(problem.services) > 1:
        from atoll.solve.place.fairness import solve_fairly

        return solve_fairly(name, problem, catalog, own)
    began, cpu = time.perf_counter(), time.process_time()
    (service,) = problem.services
    lacking = shortage(problem, catalog, service)
    if lacking:
        return infeasible(problem, solver=name, reasons=(lacking,))
    notes: tuple[str, ...] = ()
    if own.rank is not None and own.goal == "sustained" and name == SEARCH and not own.promise:
        shorter = replace(own, seconds=own.seconds * _SEARCHING)
        answers = places(name, problem, catalog, service, shorter, most=_RANKED)
        if answers:
            left = own.seconds - (time.perf_counter() - began)
            answers, notes = _rank(problem, catalog, answers, own.rank, left)
    else:
        answers = places(name, problem, catalog, service, own)
    times = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    if not answers:
        return infeasible(problem, solver=name, reasons=(_why_nothing(name),), **times)
    limit = answers[0].limit
    plan = plan_of(
        problem,
        catalog,
        (answers[0].placed,),
        goal=own.goal,
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

    def lasting(own: FlowInstance, placement: Placement) -> Flows:
        return within_rates(own, placement, best_flows(own, placement, site).flows)

    def largest(own: FlowInstance, placement: Placement) -> Flows:
        flows = sustain(own, placement, max_flow(own, placement), site).flows
        return within_rates(own, placement, flows)

    def measure(placement: Placement, flows: Flows) -> Measured:
        placed = Placed(service, instance, placement, flows)
        goal: Goal = "sustained"
        return rank(plan_of(problem, catalog, (placed,), goal=goal, bound=None, solver=SEARCH))

    found = refine(
        instance,
        [answer.placed.placement for answer in answers],
        (lasting, largest),
        measure,
        quick=evaluator(site),
        seconds=seconds,
        random=stream(problem.settings.seed, "refine"),
    )
    limit = _limit(instance, found.placement, found.flows)
    placed = Placed(service, instance, found.placement, found.flows)
    note = (
        f"generates {found.value.tokens_per_s:,.1f} tokens/s under full load, prompts take "
        f"{found.value.prompt_s:.2f} s: the best of {found.runs:,} simulated plans (the best by its "
        f"analytic value: {found.first.tokens_per_s:,.1f}, {found.first.prompt_s:.2f} s)"
    )
    return [ServicePlacement(placed, answers[0].bound, limit)], (note,)


def place(
    name: str,
    problem: Problem,
    catalog: Catalog,
    service: Service,
    effort: FlowEffort,
    *,
    nodes: Sequence[str] | None = None,
) -> ServicePlacement | None:
    """Place one service on the cluster, or on some nodes of it, by name; None if nothing flows."""
    found = places(name, problem, catalog, service, effort, nodes=nodes)
    return found[0] if found else None


def places(
    name: str,
    problem: Problem,
    catalog: Catalog,
    service: Service,
    effort: FlowEffort,
    *,
    nodes: Sequence[str] | None = None,
    most: int = 1,
) -> list[ServicePlacement]:
    """Return the best placements of one service, best first; more than one for `sustain` searches only."""
    instance = flow_instance(problem, catalog, service, partial=effort.partial, nodes=nodes)
    seed = problem.settings.seed
    score = _score(service, effort)
    bound: float | None = None
    placements: list[Placement | None]
    if name in RULES:
        instance, placement = by_rule(name, instance, seed)
        placements = [placement]
    elif effort.goal == "max-flow" and not effort.promise:
        placement, bound = _search_flow(name, instance, effort, seed)
        placements = [placement]
    else:
        placements, bound = _search_scored(instance, score, effort, seed, most)
    found = []
    for placement in placements:
        flows = None if placement is None else score(instance, placement)
        if placement is None or flows is None or flows.value <= 0:
            continue
        placed = Placed(service, instance, placement, flows)
        lasting = effort.goal == "sustained" and not effort.promise
        limit = _limit(instance, placement, flows) if lasting else None
        found.append(ServicePlacement(placed, bound, limit))
    return found


def _score(service: Service, effort: FlowEffort) -> Score:
    """Return what makes the flow of a placement: the largest, the lasting one, or one in time."""
    from atoll.solve.place.evaluate import max_flow

    def within(instance: FlowInstance, placement: Placement) -> Flows:
        from atoll.solve.place.latency import flow_within, scale_flows

        flows = flow_within(instance, placement, service.ttft_s, service.tpot_s)
        if effort.goal != "sustained" or flows.value <= 0:
            return flows
        from atoll.solve.place.sustained.sustained import sustain

        # With less flow every way is quicker, so what lasts keeps the promise as well.
        lasting = sustain(instance, placement, flows).flows.value
        return scale_flows(flows, min(1.0, lasting / flows.value))

    def lasting(instance: FlowInstance, placement: Placement) -> Flows:
        from atoll.solve.place.sustained.sustained import best_flows

        return within_rates(instance, placement, best_flows(instance, placement).flows)

    if effort.promise:
        return within
    return lasting if effort.goal == "sustained" else max_flow


def within_rates(instance: FlowInstance, placement: Placement, flows: Flows) -> Flows:
    """Return a flow scaled down until no node carries more than its rate."""
    from atoll.solve.place.latency import scale_flows

    held = placement.end - placement.start
    rate = instance.rate[range(instance.size), held]
    through = flows.enter + flows.edge.sum(axis=0)
    used = through > 0
    return scale_flows(flows, min(1.0, float((rate[used] / through[used]).min(initial=1.0))))


def _search_scored(
    instance: FlowInstance, score: Score, effort: FlowEffort, seed: int, most: int
) -> tuple[list[Placement | None], float]:
    from atoll.solve.place.bound.bounds import upper_bound
    from atoll.solve.place.candidates import best_candidates

    bound = upper_bound(instance).value
    quick = None
    if effort.goal == "sustained" and not effort.promise:
        from atoll.solve.place.sustained.sustained import evaluator, site_of

        quick = evaluator(site_of(instance))
    best = best_candidates(
        instance,
        score,
        starts(instance, seed, effort.seconds),
        seconds=effort.seconds,
        seed=seed,
        workers=effort.workers,
        bound=bound,
        quick=quick,
        log=effort.log,
        most=most,
    )
    return [placement for placement, _ in best], bound


def _limit(instance: FlowInstance, placement: Placement, flows: Flows) -> str | None:
    """Say which node's KV cache is full first."""
    from atoll.solve.place.sustained.sustained import sustain

    found = sustain(instance, placement, flows)
    if found.limiting is None:
        return None
    name, kind = instance.names[found.limiting], instance.node_types[found.limiting]
    held = int(placement.end[found.limiting] - placement.start[found.limiting])
    return (
        f"KV cache of {name} ({kind}, {held} layers) is full with {found.in_flight:,.0f} requests in "
        f"flight for {found.residence_s:,.0f} s each"
    )


def by_rule(name: str, instance: FlowInstance, seed: int) -> tuple[FlowInstance, Placement | None]:
    """Return the placement by a simple rule; Petals' needs partial inference, so the instance may change."""
    from atoll.solve.place import baselines

    if name == "petals":
        instance = replace(instance, partial=True)
        return instance, baselines.petals(instance, seed)
    if name == "random":
        return instance, baselines.at_random(instance, seed)
    rules = {
        "swarm": baselines.swarm,
        "separate": baselines.separate,
        "separate-plus": baselines.separate_plus,
        "chain": baselines.chain,
    }
    return instance, rules[name](instance)


def starts(instance: FlowInstance, seed: int, seconds: float) -> list[Placement]:
    """Return placements to search from: the simple rules, and one or two lanes of blocks (`lanes`)."""
    from atoll.solve.place.bound.lanes import lanes

    names = [name for name in RULES if name not in ("petals", "random")]
    if instance.partial:
        names.append("petals")
    found = [by_rule(name, instance, seed)[1] for name in names]
    found.append(lanes(instance, seconds=min(_LANES_S, seconds / 4)))
    return [placement for placement in found if placement is not None]


def _search_flow(
    name: str, instance: FlowInstance, effort: FlowEffort, seed: int
) -> tuple[Placement | None, float | None]:
    from atoll.solve.place.search.search import search

    given = starts(instance, seed, effort.seconds)
    found = search(
        instance,
        seconds=effort.seconds if name == SEARCH else min(effort.seconds / 4, 10.0),
        seed=seed,
        workers=effort.workers,
        start=given,
        log=effort.log,
    )
    if name == MILP and found.value < found.bound:
        from atoll.solve.place.milp.milp import solve_milp

        proven = solve_milp(
            instance,
            seconds=max(0.0, effort.seconds - found.seconds),
            start=[found.placement],
            log=effort.log,
        )
        found = replace(
            proven if proven.value >= found.value else found, bound=min(found.bound, proven.bound)
        )
    return found.placement, found.bound


def reasons(plan: Plan, problem: Problem, catalog: Catalog) -> list[str]:
    """Name the bottleneck of every instance of a plan."""
    found = []
    for instance in plan.instances:
        cut = bottleneck(instance, problem, catalog)
        if cut is not None:
            own = f"{instance.service}: " if len(plan.instances) > 1 else ""
            found.append(f"{own}bottleneck {cut}")
    return found


def shortage(
    problem: Problem, catalog: Catalog, service: Service, nodes: Sequence[str] | None = None
) -> str | None:
    """Say how much is missing where nodes cannot hold all layers of a model together."""
    from atoll.solve.place.bound.bounds import find_missing

    spec = catalog.model(service.model).llm
    per_layer = sum(spec.layer_weight_bytes(i) for i in range(spec.layers)) / spec.layers
    found = find_missing(flow_instance(problem, catalog, service, nodes=nodes), per_layer)
    return f"{service.model}: {found}" if found.layers else None


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
