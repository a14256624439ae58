"""Solvers for fixed clusters behind one call: a problem with a cluster in, a plan out.

`flow.search` is the default; `flow.milp` proves optima of small clusters; `cp` goes by simulated latency; the
others are simple rules to compare with (`place_baselines`, `memp`). What a plan is best at is its
objective: `max-flow` is the largest flow, as published, `sustain` what of it lasts once KV caches must hold
all requests in flight (see `docs/internals/placement.md`), and `latency` how soon requests are answered, in
simulation.

Machines with several GPUs may be cut. Placements on the cluster whole and cut in several ways are compared,
and with a promise replicas of exact templates as well (`replicas`): the one that serves the largest
share of the demand is taken, and of those the one with the best objective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError, UsageError
from atoll.core.units import format_duration, format_share
from atoll.plan.cluster_profiles import cluster_of, request_tokens
from atoll.plan.plan import Goal, Plan
from atoll.plan.problem import Problem, Service
from atoll.solve.assembly import infeasible
from atoll.solve.deadline import Deadline
from atoll.solve.effort import KnownPlacement, Measured
from atoll.solve.family import SolverFamily
from atoll.solve.place.coverage import coverage_of
from atoll.solve.place.evaluate import max_flow
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.from_problem import flow_instance
from atoll.solve.place.latency import flow_within
from atoll.solve.place.machine_cuts import even_cuts
from atoll.solve.place.place_service import (
    CP,
    MEMP,
    MILP,
    NAMES,
    OBJECTIVES,
    RULES,
    SEARCH,
    FlowEffort,
    ServicePlacement,
    describe_limit,
    known_placements,
    places,
    reasons,
    shortage,
    starts,
    within_rates,
)
from atoll.solve.place.place_to_plan import Placed, fit_links, plan_of
from atoll.solve.place.replicas import place_replicas
from atoll.solve.place.sites.site_placement import is_large, place_sites
from atoll.solve.plan_request import PlanRequest

_LEAST_MEASURED = 24
"""Simulated placements with the least effort: the known ones and a few others."""
_RANKED = 6
"""Placements that are ranked where a `Rank` is given, before the best are changed further."""
_CUT_WORK = 0.25
"""Share of the usual work that goes into placements on a cluster that is cut."""
_LASTING_WORK = 0.5
"""Share of the usual work for placements that last, of which some keep a promise."""
_SAID = 3
"""Instances of a large cluster whose bottlenecks are named."""
_MAX_CUT = 64
"""Pieces of a cluster up to which even cuts are searched."""

_ROUTERS = {
    "atoll": "Atoll's router",
    "plain": "plain round robin over the plan's flows",
}
"""What plans call routers."""

_LOOSEST_PROMISE = 64.0
"""Times the promise up to which a pipeline that keeps it is sought."""
_PROMISE_STEPS = 12
"""Bisections of that factor: to 0.1 %."""


def solve(name: str, problem: Problem, catalog: Catalog, effort: FlowEffort | None = None) -> Plan:
    """Return the plan of the flow solver called `name`; "infeasible", with reasons, where there is none."""
    chosen = effort or FlowEffort()
    if name not in FAMILY.names:
        raise UnknownNameError("solver", name, FAMILY.names)
    if chosen.goal not in OBJECTIVES:
        raise UnknownNameError("objective", chosen.goal, OBJECTIVES)
    # Before anything is built: an integer program cannot pursue another goal, however much work it gets.
    if name == MILP:
        chosen = _linear(chosen)
    cluster_of(problem)
    _refuse_limits(problem)
    if chosen.known:
        _check_known(name, problem, catalog, chosen)
    deadline = Deadline(chosen.seconds)
    if name in (CP, MEMP) or chosen.goal == "latency":
        plan = _solve_by_latency(name, problem, catalog, chosen, deadline)
    elif len(problem.services) > 1:
        from atoll.solve.place.fairness import solve_fairly

        plan = solve_fairly(name, problem, catalog, chosen, deadline)
    else:
        plan = _solve_one(name, problem, catalog, chosen, deadline)
    return plan.model_copy(update={"cut_short": True}) if deadline.missed else plan


def _solve_by_latency(
    name: str, problem: Problem, catalog: Catalog, effort: FlowEffort, deadline: Deadline
) -> Plan:
    from atoll.solve.place.cp.cp_solver import search_latency, solve_cp, solve_memp

    if name == MEMP:
        return solve_memp(problem, catalog, effort)
    if name == CP:
        if effort.objective not in (None, "latency"):
            raise UsageError(
                f"{CP} does not know the objective {effort.objective}",
                hint=f"use {SEARCH}, or leave the objective out",
                field="solver",
            )
        return solve_cp(problem, catalog, effort, deadline)
    if name != SEARCH:
        raise UsageError(
            f"{name} does not know the objective latency",
            hint=f"use {SEARCH} or {CP}",
            field="solver",
        )
    return search_latency(name, problem, catalog, effort, deadline)


def _solve_one(
    name: str, problem: Problem, catalog: Catalog, effort: FlowEffort, deadline: Deadline
) -> Plan:
    (service,) = problem.services
    if name == SEARCH and is_large(problem):
        plan = _solve_large(problem, catalog, service, effort, deadline)
        if plan is not None:
            return plan
    # A shortage is told before any search: no work can make up for memory that is not there.
    lacking = shortage(problem, catalog, service)
    if lacking:
        return infeasible(problem, solver=name, reasons=(lacking,))
    notes: tuple[str, ...] = ()
    ranked = effort.rank is not None and effort.goal == "sustained" and name == SEARCH
    answers = list(_candidates(name, problem, catalog, service, effort, deadline, ranked=ranked))
    if not answers:
        why = say_why(name, problem, catalog, service, effort)
        return infeasible(problem, solver=name, reasons=(why,))
    best = max(answers, key=lambda answer: _merit(service, answer))
    bounds = [answer.bound for answer in answers if answer.bound is not None]
    # With a promise the merit already counts what lasts; simulated ranks are for plans without one.
    if ranked and effort.rank is not None and not effort.promise:
        # `refine` works on one instance, so only placements on the same cut as the best are compared.
        same = [a for a in answers if a.placed.instance.units == best.placed.instance.units]
        same.sort(key=lambda answer: _merit(service, answer), reverse=True)
        best, notes = _rank(problem, catalog, same[:_RANKED], effort, deadline)
    plan = plan_of(
        problem,
        catalog,
        (best.placed,),
        goal=effort.goal,
        # Every bound holds for all placements, so the least of them is the one to tell.
        bound=min(bounds, default=None),
        solver=name,
        reasons=() if best.limit is None else (best.limit,),
    )
    said = (*plan.reasons, *reasons(plan, problem, catalog))
    return plan.model_copy(update={"reasons": said, "notes": notes})


def _solve_large(
    problem: Problem, catalog: Catalog, service: Service, effort: FlowEffort, deadline: Deadline
) -> Plan | None:
    """Return the plan of a cluster that is placed site by site; None where too many machines differ."""
    found = place_sites(problem, catalog, service, effort, deadline)
    if found is None:
        return None
    if not found.placed:
        promise = f"keeps ttft {format_duration(service.ttft_s)} and tpot {format_duration(service.tpot_s)}"
        why = f"no pipeline within a site {promise if effort.promise else 'carries anything'}"
        if found.missing.layers:
            why = f"{service.model}: {found.missing}"
        return infeasible(problem, solver=SEARCH, reasons=(why,))
    plan = plan_of(
        problem, catalog, found.placed, goal=effort.goal, bound=found.bound, solver=SEARCH
    )
    # Instances of groups are much alike: the first ones stand for all.
    first = plan.model_copy(update={"instances": plan.instances[:_SAID]})
    return plan.model_copy(update={"reasons": tuple(reasons(first, problem, catalog))})


def _merit(service: Service, answer: ServicePlacement) -> tuple[float, float, float]:
    """Return the order of placements: the share of the demand it serves, then what it carries.

    Of placements that keep a promise, those come first whose KV caches hold the demand for long: capacity
    counts every node by itself, and in pipelines of unlike nodes requests wait for the slowest.
    """
    from atoll.solve.place.sustained.sustained import sustain

    placed = answer.placed
    carried = placed.flows.value
    demand = service.demand_per_s * request_tokens(service)
    # Without a demand there is no share to compare: only what is carried counts.
    if demand <= 0:
        return 1.0, 1.0, carried
    lasting = carried
    if placed.promised and placed.instance.timing is not None:
        lasting = sustain(placed.instance, placed.placement, placed.flows).tokens_per_s
    return min(1.0, carried / demand), min(1.0, lasting / demand), carried


def _candidates(
    name: str,
    problem: Problem,
    catalog: Catalog,
    service: Service,
    effort: FlowEffort,
    deadline: Deadline,
    *,
    ranked: bool,
) -> Iterator[ServicePlacement]:
    """Yield the placements of the solver on the cluster whole and cut, with links that slices share."""
    max_placements = _RANKED if ranked else 1
    if name != SEARCH:
        yield from places(name, problem, catalog, service, effort, deadline)
        return
    # The cluster whole stands first; it gets the full work, every cut only a part.
    cuts = even_cuts(problem)
    bound = None
    if len(cuts) > 1 or effort.promise:
        bound = coverage_of(problem, catalog, service, promise=effort.promise).bound()
    if effort.promise:
        replicas = place_replicas(
            problem,
            catalog,
            deadline,
            partial=effort.partial,
            work=min(1.0, effort.work),
            done=effort.done,
        )
        if replicas is not None:
            cut, placed = replicas
            if cut not in cuts:
                # Second, after the cluster whole: the cut that replicas want is tried before even cuts, while
                # time is left.
                cuts.insert(1, cut)
            if placed[0].flows.value > 0:
                yield ServicePlacement(placed[0], bound)
    for number, cut in enumerate(cuts):
        # The cluster whole is always searched, also when the time is over: there must be an answer.
        if number > 0 and (deadline.is_over() or len(cut) > _MAX_CUT):
            break
        own = effort if number == 0 else replace(effort, work=effort.work * _CUT_WORK)
        for answer in places(
            name, problem, catalog, service, own, deadline, units=cut, max_placements=max_placements
        ):
            (placed_on,) = fit_links(problem, catalog, (answer.placed,))
            # What bounds flows on whole machines does not bind those that are cut.
            yield replace(answer, placed=placed_on, bound=bound if len(cuts) > 1 else answer.bound)
    # Last, since it is an extra: what lasts longest may keep the promise where the largest flow does not.
    if effort.promise and effort.goal == "sustained" and not deadline.is_over():
        yield from _lasting(problem, catalog, service, effort, deadline, bound)


def _lasting(
    problem: Problem,
    catalog: Catalog,
    service: Service,
    effort: FlowEffort,
    deadline: Deadline,
    bound: float | None,
) -> Iterator[ServicePlacement]:
    """Yield the placements whose flow lasts best, with as much of it as keeps the promise."""
    from atoll.solve.place.latency import flow_within

    work = effort.work * _LASTING_WORK
    # The search itself runs without the promise; `flow_within` then takes as much of each as keeps it.
    free = replace(effort, promise=False, bounded=False, work=work, log=None)
    for answer in places(SEARCH, problem, catalog, service, free, deadline, max_placements=_RANKED):
        placed = answer.placed
        flows = flow_within(placed.instance, placed.placement)
        if flows.value > 0:
            yield ServicePlacement(replace(placed, flows=flows, promised=True), bound)


def _rank(
    problem: Problem,
    catalog: Catalog,
    answers: Sequence[ServicePlacement],
    effort: FlowEffort,
    deadline: Deadline,
) -> tuple[ServicePlacement, tuple[str, ...]]:
    """Return the best placement by the rank of `effort`, and how it was found."""
    from atoll.core.rng import stream
    from atoll.solve.place.evaluate import max_flow
    from atoll.solve.place.refine import MEASURED, refine
    from atoll.solve.place.sustained.sustained import best_flows, evaluator, site_of, sustain

    service, instance = answers[0].placed.service, answers[0].placed.instance
    site = site_of(instance)

    def lasting(cluster: FlowInstance, placement: Placement) -> Flows:
        return within_rates(cluster, placement, best_flows(cluster, placement, site).flows)

    def uneven(cluster: FlowInstance, placement: Placement) -> Flows:
        flows = best_flows(cluster, placement, site, balanced=False).flows
        return within_rates(cluster, placement, flows)

    def largest(cluster: FlowInstance, placement: Placement) -> Flows:
        flows = sustain(cluster, placement, max_flow(cluster, placement), site).flows
        return within_rates(cluster, placement, flows)

    def measure(placement: Placement, flows: Flows, draw: int) -> Measured:
        placed = Placed(service, instance, placement, flows)
        goal: Goal = "sustained"
        assert effort.rank is not None
        plan = plan_of(problem, catalog, (placed,), goal=goal, bound=None, solver=SEARCH)
        return effort.rank(plan, draw)

    refined = refine(
        instance,
        [answer.placed.placement for answer in answers],
        (lasting, uneven, largest),
        measure,
        known=known_placements(
            instance, problem.settings.seed, (*_running(problem, service), *effort.known)
        ),
        max_runs=max(_LEAST_MEASURED, round(MEASURED * effort.work)),
        quick=evaluator(site),
        deadline=deadline,
        random=stream(problem.settings.seed, "refine"),
    )
    effort.done.update({"simulated placements": refined.runs})
    limit = describe_limit(instance, refined.placement, refined.flows)
    placed = Placed(service, instance, refined.placement, refined.flows)
    note = (
        f"generates {refined.value.tokens_per_s:,.1f} tokens/s under full load, and under a calm one prompts "
        f"take {refined.value.prompt_s:.2f} s and tokens {refined.value.token_s:.2f} s: the best of "
        f"{refined.runs:,} simulations (the best by its analytic value: {refined.first.tokens_per_s:,.1f})"
    )
    routers = problem.settings.routers
    assumed = " and under ".join(_ROUTERS[router] for router in routers)
    ranked = f"ranked under {assumed}" + (", by the worse (--router)" if len(routers) > 1 else "")
    return ServicePlacement(placed, answers[0].bound, limit), (note, ranked)


def _running(problem: Problem, service: Service) -> list[KnownPlacement]:
    """What runs now of a service, as a placement."""
    nodes = (n for one in problem.running if one.service == service.name for n in one.nodes)
    running = {str(node.host): (node.start, node.end) for node in nodes}
    return [running] if running else []


def _linear(effort: FlowEffort) -> FlowEffort:
    """An integer program knows the largest flow only: take that as the goal, refuse any other."""
    if effort.objective not in (None, "max-flow") or effort.promise:
        asked = "a promise" if effort.promise else f"the objective {effort.objective}"
        hint = f"use {SEARCH}" + (", or ask for best effort" if effort.promise else "")
        raise UsageError(f"{MILP} does not know {asked}", hint=hint, field="solver")
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


def _check_known(name: str, problem: Problem, catalog: Catalog, effort: FlowEffort) -> None:
    """Raise UsageError where known placements would not be looked at, or do not fit."""
    reason = {
        f"solver {name}": name not in (SEARCH, MILP),
        "objective latency": effort.goal == "latency",
        "several services": len(problem.services) > 1,
        "more than 100 machines": is_large(problem),
    }
    for what, is_so in reason.items():
        if is_so:
            raise UsageError(f"--known with {what}", hint="leave one of them out", field="known")
    # What fits within a promise differs with it, and promises are tightened on the way to a plan.
    if effort.promise:
        return
    whole = flow_instance(problem, catalog, problem.services[0])
    room = dict(zip(whole.names, whole.max_layers.tolist(), strict=True))
    for known in effort.known:
        for machine, (start, end) in known.items():
            if end - start > room.get(machine, 0) or end > whole.layers:
                raise UsageError(
                    f"layers {start} to {end} of a known placement do not fit machine {machine}: "
                    f"{room.get(machine, 0)} of the model's {whole.layers} layers do",
                    hint="name a placement of the same model and precision",
                    field="known",
                )


def _solve_for_family(problem: Problem, request: PlanRequest) -> Plan:
    name, effort = request.solver or SEARCH, request.effort

    def log(_seconds: float, value: float, bound: float) -> None:
        request.say("placing", _describe(value, bound))

    if name in (SEARCH, MILP) and effort.objective != "latency":
        # The deadline is for searching: on a machine where nothing was compiled yet, that comes before.
        from atoll.core.compiling import compile_entries
        from atoll.solve.place.search import anneal, moves
        from atoll.solve.place.sustained import sustained_kernel as kernel

        for module in (anneal, moves, kernel):
            compile_entries(module.__name__)
    flow = FlowEffort(
        request.deadline_s,
        effort.objective,
        effort.partial,
        effort.promise,
        log=log,
        rank=effort.rank,
        work=effort.work,
        latency=effort.latency,
        gap=effort.gap,
        known=effort.placements,
        say=partial(request.say, "placing"),
    )
    plan = solve(name, problem, request.catalog_for(problem), flow)
    request.say("placing", "done", 1.0, flow.done)
    return plan


def _describe(value: float, bound: float) -> str:
    best = f"best {value:,.1f} tokens/s" if value > 0 else "no placement yet"
    if math.isfinite(bound) and bound > 0:
        best += f", gap {format_share(max(0.0, 1 - value / bound))}, bound {bound:,.1f}"
    return best


FAMILY = SolverFamily(
    names=(*NAMES, CP, MEMP),
    baselines=(*RULES, MEMP),
    solve=_solve_for_family,
    count_templates=lambda _problem, _request: {},
    failure="{name} has no placement",
    hint="add machines or links, or choose a smaller model or precision",
)


def say_why(
    name: str, problem: Problem, catalog: Catalog, service: Service, effort: FlowEffort
) -> str:
    """Say in a line why a solver found no placement of a service."""
    instance = flow_instance(
        problem, catalog, service, partial=effort.partial, promised=effort.promise
    )
    placements = starts(instance, problem.settings.seed, Deadline(effort.seconds))
    flowing = [p for p in placements if max_flow(instance, p).value > 0]
    if flowing and effort.promise:
        return _broken_promise(problem, catalog, service, flowing)
    if flowing:
        return f"the rule of {name} puts no whole model on these nodes"
    cut = _missing_link(instance)
    if cut is None and name in RULES:
        return f"the rule of {name} puts no whole model on these nodes"
    return cut or "no links lead from source over all layers to sink"


def _missing_link(instance: FlowInstance) -> str | None:
    if not (instance.enter > 0).any():
        return "no link leads from source to any node that can hold the model"
    if not (instance.leave > 0).any():
        return "no link leads to sink from any node that can hold the model"
    if (instance.max_layers < instance.layers).all() and not (instance.link > 0).any():
        return "no node holds all layers, and no link joins any two nodes"
    return None


def _broken_promise(
    problem: Problem, catalog: Catalog, service: Service, placements: Sequence[Placement]
) -> str:
    """Say how much looser the promise would have to be for the quickest pipeline of some placements."""

    def keeps(times: float) -> bool:
        looser = service.scale_promises(ttft=times, tpot=times)
        instance = flow_instance(problem, catalog, looser, promised=True)
        return any(flow_within(instance, placement).value > 0 for placement in placements)

    asked = (
        f"no pipeline keeps ttft {format_duration(service.ttft_s)} and tpot "
        f"{format_duration(service.tpot_s)}"
    )
    if not keeps(_LOOSEST_PROMISE):
        return f"{asked}, nor {_LOOSEST_PROMISE:g} times that"
    low, high = 1.0, _LOOSEST_PROMISE
    for _ in range(_PROMISE_STEPS):
        # The geometric mean: the factor is a ratio, so the steps halve it on a logarithmic scale.
        middle = (low * high) ** 0.5
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return (
        f"{asked}: the quickest found needs {high:.2f} times that; promise less, or take what these "
        "machines give (--best-effort)"
    )
