"""Placements whose promises are kept: on a cluster machines are given, so it is layers that move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from atoll.plan.validate.check import goal_value
from atoll.prove.kept import (
    FRESH_SEED,
    are_hopeless,
    are_surely_kept,
    is_large,
    look_at,
    sample_kept,
    worst_of,
)
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.prove.step_tokens import fit_steps
from atoll.solve.assembly import assemble
from atoll.solve.deadline import Deadline
from atoll.solve.effort import DEADLINE_S, MAX_WORK
from atoll.solve.registry import solve
from atoll.solve.solve_progress import SolveStats

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import KeptPromise, Plan
    from atoll.plan.problem import Problem
    from atoll.solve.plan_request import PlanRequest

Say = Callable[[str], None]

_MAX_PLACEMENTS = 4
"""How often layers are placed anew on a cluster."""
_TIGHTEN_FACTOR = 0.85
"""Factor on a promise that is missed, each time."""
_ONLY_SHARE = 0.85
"""Share of the time left for the one placement there is; simulating it takes the rest."""
_FIRST_SHARE = 0.65
"""The same for the first one, where others may follow that would keep a tighter promise."""
_AGAIN_SHARE = 0.15
"""Share of the deadline that must be left for another one."""
_SIMPLE_SHARE = 0.3
"""Share of the time for the simplest placement, at most."""
_SEEDS = 100
"""Seeds that are set aside for one placement."""
_PARTS = 16
"""Shares of the demand that are looked at where too few requests keep their promises."""
_PART_RUNS = 3
"""Simulations of each of them; one is enough of a large cluster."""
_SIMPLE_TRIES = 3
"""How often the simplest placement of a large cluster is sought, each time for tighter promises."""


def use_deadline(request: PlanRequest) -> PlanRequest:
    """Return a request for best effort with more work where there is more time than usual, in proportion.

    Within a promise there is none to spend: what keeps it for all demand is not improved on.
    """
    effort, times = request.effort, request.deadline_s / DEADLINE_S
    if effort.promise or times <= 1.0:
        return request
    work = max(effort.work, min(effort.work * times, MAX_WORK))
    return replace(request, effort=replace(effort, work=work))


def add_simulations(problem: Problem, request: PlanRequest) -> PlanRequest:
    """Return the request with the simulations that solvers for clusters ask for, unless it has its own.

    Those that go by latency need tables of it; others have their best placements ranked, with `rank`.
    """
    effort, by_latency = request.effort, _goes_by_latency(request)
    if not by_latency and not request.rank:
        return request
    from atoll.core.compiling import compile_entries
    from atoll.sim import event_loop as loop

    # Before the deadline begins.
    compile_entries(loop.__name__)
    catalog, deadline = request.catalog_for(problem), Deadline(request.deadline_s)
    if by_latency and effort.latency is None:
        from atoll.prove.cp_tables import SimulatedLatency

        say = partial(request.say, "simulating")
        effort = replace(effort, latency=SimulatedLatency(catalog, say, deadline=deadline))
    elif not by_latency and effort.rank is None:
        from atoll.prove.rank import Simulated

        say = partial(request.say, "ranking")
        effort = replace(effort, rank=Simulated(problem, catalog, say, deadline=deadline))
    return replace(request, effort=effort)


def _goes_by_latency(request: PlanRequest) -> bool:
    from atoll.solve.place.place_service import CP

    return request.solver == CP or request.effort.objective == "latency"


def keep_on_cluster(problem: Problem, request: PlanRequest) -> Plan:
    """Return a placement that keeps its promises for enough requests, or the one that comes closest.

    Machines are given, so there is no more to rent: where too few requests keep a promise, steps are made
    shorter (`step_tokens`), and if that is not enough pipelines are placed that would keep a tighter one,
    shorter or less loaded. A placement is taken when it surely keeps them, and else the one that comes
    closest. Unless an objective is asked for, the simplest placement that serves all demand is
    tried before (`solve.place.simple_placement`); on a large cluster that cannot serve all of it so, it is
    the one for the largest share that keeps all promises.
    """
    catalog, deadline = request.catalog_for(problem), Deadline(request.deadline_s)
    say = partial(request.say, "promises")

    def place(asked: Problem, share: float = 0.5) -> Plan:
        return solve(asked, replace(request, deadline_s=deadline.share(share)))

    if _goes_by_latency(request):
        # Tighter promises would not make it answer sooner.
        return see_promises(
            place(problem, _ONLY_SHARE), problem, catalog, deadline=deadline, say=say
        )
    simple = _keep_simply(problem, request, deadline)
    if simple is not None:
        return simple
    say("placing")
    # Where no placement is tried for a tighter promise, the first one may take what simulating it leaves.
    promised = request.effort.promise
    first = place(problem, _FIRST_SHARE if promised else _ONLY_SHARE)
    if is_large(problem) and promised and request.effort.objective is None:
        found = _keep_share(problem, request, deadline, first)
        if found is not None:
            return found
    return _keep_tighter(problem, request, deadline, first, place)


def _keep_tighter(
    problem: Problem,
    request: PlanRequest,
    deadline: Deadline,
    first: Plan,
    place: Callable[[Problem], Plan],
) -> Plan:
    """Return the first plan if it keeps its promises, one placed for tighter ones, or the closest."""
    from atoll.plan.validate.check import check

    catalog, say = request.catalog_for(problem), partial(request.say, "promises")
    plan, tighter, large = first, problem, is_large(problem)
    best: tuple[tuple[bool, float], Plan] | None = None
    for number in range(1, _MAX_PLACEMENTS + 1):
        if not plan.instances or (number > 1 and plan.status == "partial"):
            break
        plan = _stated(plan, problem)
        check(plan, problem, catalog)
        say("simulating arrivals")
        try:
            if not (large and plan.status == "partial"):
                # Shorter steps carry less: they help nobody where too little is carried.
                plan = fit_steps(plan, problem, catalog, deadline)
            promises = look_at(plan, problem, catalog, deadline, first_seed=_fresh_seed(number))
        except SimulationCutShortError:
            break
        plan = plan.model_copy(update={"promises": promises})
        sure = are_surely_kept(promises)
        rank = sure, min((p.margin for p in promises), default=0.0)
        if best is None or rank > best[0]:
            best = rank, plan
        if sure or number == _MAX_PLACEMENTS or not request.effort.promise:
            break
        if large and are_hopeless(promises):
            break
        if deadline.left < _AGAIN_SHARE * deadline.seconds:
            break
        tighter = _tighten(tighter, promises)
        say(f"placing with tighter promises, try {number + 1}")
        plan = place(tighter)
    if best is None:
        return first.model_copy(update={"cut_short": True}) if first.instances else first
    if best[0][1] >= 0.0:
        return best[1]
    return see_promises(best[1], problem, catalog, deadline=deadline, say=say)


def _keep_simply(problem: Problem, request: PlanRequest, deadline: Deadline) -> Plan | None:
    """Return the simplest placement if it keeps all promises, else None."""
    from atoll.plan.validate.check import check
    from atoll.solve.place.simple_placement import place_simply

    effort, catalog = request.effort, request.catalog_for(problem)
    if effort.objective is not None or not effort.promise:
        return None
    request.say("promises", "looking for the simplest placement")
    part = Deadline(deadline.share(_SIMPLE_SHARE))
    asked = problem
    for number in range(_SIMPLE_TRIES if is_large(problem) else 1):
        done: Counter[str] = Counter()
        plan = place_simply(asked, catalog, part, partial=effort.partial, done=done)
        if request.stats is not None:
            request.stats.add(SolveStats(work=done))
        if plan is None or part.missed:
            return None
        plan = _stated(plan, problem)
        check(plan, problem, catalog)
        seed = FRESH_SEED if number == 0 else _fresh_seed(_MAX_PLACEMENTS + number)
        try:
            plan = fit_steps(plan, problem, catalog, deadline)
            promises = look_at(plan, problem, catalog, deadline, first_seed=seed)
        except SimulationCutShortError:
            return None
        if are_surely_kept(promises):
            return plan.model_copy(update={"promises": promises})
        if are_hopeless(promises):
            break
        asked = _tighten(asked, promises)
    return None


def _keep_share(
    problem: Problem, request: PlanRequest, deadline: Deadline, first: Plan
) -> Plan | None:
    """Return the simplest placement for the largest share of the demand that keeps all promises, or None.

    Shares are sixteenths of what the `first` plan carries. Its pipelines are long and carry the most; these
    are short, and more requests keep their promises.
    """
    from atoll.plan.validate.check import check
    from atoll.solve.place.simple_placement import place_simply

    catalog, say = request.catalog_for(problem), partial(request.say, "promises")
    most = min(first.served_fraction.values(), default=0.0)
    if most <= 0.0:
        return None
    best: tuple[float, Plan] | None = None
    low, high = 0, _PARTS
    try:
        while high - low > 1:
            middle = (low + high) // 2
            share = most * middle / _PARTS
            say(f"placing {share:.0%} of the demand")
            less = problem.scale_demand(share)
            plan = place_simply(
                problem, catalog, deadline, partial=request.effort.partial, share=share
            )
            if plan is not None:
                fitted = fit_steps(_stated(plan, problem), less, catalog, deadline)
                if are_surely_kept(look_at(fitted, less, catalog, deadline)):
                    best, low = (share, fitted), middle
                    continue
            high = middle
        if best is None:
            return None
        share, fitted = best
        plan = assemble(
            problem,
            fitted.instances,
            status="feasible",
            solver=fitted.solver,
            bound=first.bound,
            # Many instances are alike, and so is what binds them.
            reasons=tuple(dict.fromkeys(fitted.reasons)),
            goal=fitted.goal,
            value=goal_value(fitted, problem),
            catalog=catalog,
        )
        steps = fitted.notes[-1:] if fitted.engines != problem.launches() else ()
        own = {
            "engines": fitted.engines,
            "problem_hash": problem.content_hash(),
            "notes": (_note_share(first, share), *steps),
        }
        plan = plan.model_copy(update=own)
        check(plan, problem, catalog)
        say("simulating arrivals")
        promises = look_at(
            plan, problem, catalog, deadline, first_seed=_fresh_seed(_MAX_PLACEMENTS)
        )
        return _with_share(plan, promises, share)
    except SimulationCutShortError:
        return None


def _note_share(first: Plan, share: float) -> str:
    carried = min(first.served_fraction.values())
    return (
        f"keeps its promises at {share:.0%} of the demand in simulation; the placement of the largest flow "
        f"would carry {carried:.0%} by its capacities, and was not simulated"
    )


def _stated(plan: Plan, problem: Problem) -> Plan:
    """The plan for a problem: placed for tighter promises it may be, its engines are told those asked for."""
    stated = {"problem_hash": problem.content_hash(), "engines": problem.launches()}
    return plan.model_copy(update=stated)


def _fresh_seed(number: int) -> int:
    """The first seed of the arrivals that a placement is judged by, counted from 0: each has its own.

    One that is chosen for what it keeps would be flattered by arrivals that others were judged by.
    """
    return FRESH_SEED + _SEEDS * number


def see_promises(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    *,
    deadline: Deadline | None = None,
    say: Say = lambda _text: None,
) -> Plan:
    """Return a plan with what requests keep of its promises, in simulation, when it meets its demand.

    Where too few do, it also says at which share of the demand enough of them would.
    """
    if not plan.instances:
        return plan
    say("simulating arrivals")
    try:
        promises = look_at(plan, problem, catalog, deadline)
        if all(promise.is_kept for promise in promises):
            return plan.model_copy(update={"promises": promises})
        share = _largest_share(plan, problem, catalog, deadline, say)
    except SimulationCutShortError:
        return plan.model_copy(update={"cut_short": True})
    return _with_share(plan, promises, share)


def _with_share(plan: Plan, promises: tuple[KeptPromise, ...], share: float) -> Plan:
    """The plan with its promises, of which those that are missed say at which share they would be kept."""
    helps = (
        f"would keep it at {share:.0%} of the demand" if share > 0 else "at no share of the demand"
    )
    told = (
        p if p.is_kept else p.model_copy(update={"cause": f"{p.cause}; {helps}"}) for p in promises
    )
    return plan.model_copy(update={"promises": tuple(told)})


def _tighten(problem: Problem, promises: tuple[KeptPromise, ...]) -> Problem:
    """The problem with tighter promises where it is not sure that enough requests keep them."""
    seen = {promise.service: promise for promise in promises}
    services = []
    for service in problem.services:
        found = seen.get(service.name)
        if found is not None and not found.is_surely_kept:
            worst = worst_of(found)
            # Where neither is missed by itself, it is the one that more requests miss.
            least = max(found.target, min(worst.ttft, worst.tpot))
            service = service.scale_promises(
                ttft=_TIGHTEN_FACTOR if worst.ttft <= least else 1.0,
                tpot=_TIGHTEN_FACTOR if worst.tpot <= least else 1.0,
            )
        services.append(service)
    return problem.replace(services=tuple(services))


def _largest_share(
    plan: Plan, problem: Problem, catalog: Catalog, deadline: Deadline | None, say: Say
) -> float:
    """The largest share of the demand, in sixteenths, at which every service keeps enough promises."""
    targets = {service.name: service.target for service in problem.services}
    low, high = 0, _PARTS
    runs = 1 if is_large(problem) else _PART_RUNS
    while high - low > 1:
        middle = (low + high) // 2
        say(f"simulating {middle / _PARTS:.0%} of the demand")
        less = problem.scale_demand(middle / _PARTS)
        kept = sample_kept(
            plan,
            less,
            catalog,
            targets,
            first_seed=1,
            min_runs=runs,
            max_runs=runs,
            deadline=deadline,
        )
        good = all(one.worst(targets[name]).both >= targets[name] for name, one in kept.items())
        low, high = (middle, high) if good else (low, middle)
    return low / _PARTS
