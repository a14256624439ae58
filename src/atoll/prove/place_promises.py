"""Placements whose promises are kept: on a cluster machines are given, so it is layers that move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from atoll.prove.kept import FRESH_SEED, are_surely_kept, look_at, sample_kept, worst_of
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.prove.step_tokens import fit_steps
from atoll.solve.deadline import Deadline
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
    tried before (`solve.place.simple_placement`).
    """
    from atoll.plan.validate.check import check

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
    first = plan = place(problem, _FIRST_SHARE if promised else _ONLY_SHARE)
    tighter = problem
    best: tuple[tuple[bool, float], Plan] | None = None
    for number in range(1, _MAX_PLACEMENTS + 1):
        if not plan.instances or (number > 1 and plan.status == "partial"):
            break
        # Placed for tighter promises it may be, but its engines are told those that are asked for.
        stated = {"problem_hash": problem.content_hash(), "engines": problem.launches()}
        plan = plan.model_copy(update=stated)
        check(plan, problem, catalog)
        say("simulating arrivals")
        try:
            plan = fit_steps(plan, problem, catalog, deadline)
            promises = look_at(plan, problem, catalog, deadline, first_seed=_fresh_seed(number))
        except SimulationCutShortError:
            break
        plan = plan.model_copy(update={"promises": promises})
        sure = are_surely_kept(promises)
        rank = sure, min((p.margin for p in promises), default=0.0)
        if best is None or rank > best[0]:
            best = rank, plan
        if sure or number == _MAX_PLACEMENTS or not promised:
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
    done: Counter[str] = Counter()
    plan = place_simply(problem, catalog, part, partial=effort.partial, done=done)
    if request.stats is not None:
        request.stats.add(SolveStats(work=done))
    if plan is None or part.missed:
        return None
    check(plan, problem, catalog)
    try:
        plan = fit_steps(plan, problem, catalog, deadline)
        promises = look_at(plan, problem, catalog, deadline)
    except SimulationCutShortError:
        return None
    kept = are_surely_kept(promises)
    return plan.model_copy(update={"promises": promises}) if kept else None


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
    helps = (
        f"would keep it at {share:.0%} of the demand" if share > 0 else "at no share of the demand"
    )
    return plan.model_copy(
        update={
            "promises": tuple(
                p if p.is_kept else p.model_copy(update={"cause": f"{p.cause}; {helps}"})
                for p in promises
            )
        }
    )


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
    while high - low > 1:
        middle = (low + high) // 2
        say(f"simulating {middle / _PARTS:.0%} of the demand")
        less = problem.replace(
            services=tuple(
                s.model_copy(update={"rate_per_s": s.rate_per_s * middle / _PARTS})
                for s in problem.services
            )
        )
        kept = sample_kept(
            plan, less, catalog, targets, first_seed=1, min_runs=3, max_runs=3, deadline=deadline
        )
        good = all(one.worst(targets[name]).both >= targets[name] for name, one in kept.items())
        low, high = (middle, high) if good else (low, middle)
    return low / _PARTS
