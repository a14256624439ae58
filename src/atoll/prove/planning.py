"""Planning: solve, size by simulation, prove. Every plan is made here, whoever asks for it.

    plan(problem, PlanRequest(deadline_s=60.0))

1. **Weigh.** Where energy or carbon count beside rent, machines get prices that stand for all that counts,
   and steps 2 and 3 plan at those prices, a few times over (`solve.weighted`).
2. **Solve.** `solve.registry.solve` finds the best plan by what the performance model says that machines
   carry. With `capacity_only`, and for rules to compare with, that is the plan.
3. **Size.** The plan is simulated. Where too few requests keep their promises it is planned again with what
   simulation found, until enough do. How depends on the family (`_SIZING`): templates carry less where nodes
   are rented (`rent_promises`; `choice_promises` where several models may answer), layers move on a fixed
   cluster (`place_promises`), and executors take longer (`graph_promises`); plans of the fast solver get
   headroom (`headroom`). At last the plan is simulated on
   arrivals that it was not sized with: its `promises` say what requests keep there.
4. **Prove.** Promises get error bars, over what the performance model may be wrong by (`uncertainty`). The
   plan says what it draws where the fleet says what electricity emits.

Plans for uncertain demand (`robust`), curves (`pareto_sweep`) and plans within seconds (`quick_plan`) ask
this module for every plan on their way.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.plan.footprint import PowerGrid
from atoll.prove.choice_promises import keep_chosen_promises
from atoll.prove.graph_promises import keep_graph_promises
from atoll.prove.headroom import keep_quickly
from atoll.prove.place_promises import add_simulations, keep_on_cluster, use_deadline
from atoll.prove.rent_promises import keep_promises, plan_simply
from atoll.solve.deadline import Deadline
from atoll.solve.family import family_of, solvers
from atoll.solve.loss_routes import with_loss_routes
from atoll.solve.plan_request import FindPlan, PlanRequest
from atoll.solve.registry import solve
from atoll.solve.solve_progress import SolveStats

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Family, Problem

NO_ERROR_BARS = "no error bars, as the deadline came first"
"""The note of a plan that does not say how likely its promises are, though that was asked for."""
NOT_FOR_LARGE = "no error bars, which are not simulated on clusters of more than 100 machines"
"""The same, where it is the cluster."""


def plan(problem: Problem, request: PlanRequest | None = None) -> Plan:
    """Return a plan that keeps its promises for the share of requests that each service asks for.

    Simulations end with the deadline like everything else. Choices between models are settled by the mixes
    that the plan has.
    """
    request = request or PlanRequest()
    catalog = request.catalog_for(problem)
    own = SolveStats(compile_seconds=_compile(problem, request))
    deadline = Deadline(request.deadline_s)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    made = _find(problem, replace(request, catalog=catalog, stats=own))
    if problem.family != "graph" and made.promises and request.error_bars:
        made = _add_error_bars(made, problem.settled(made.mixes), catalog, deadline)
    if problem.weights.rent_only and problem.grid != PowerGrid():
        from atoll.solve.weighted import stamp_power

        # Who says what electricity costs the climate wants to know what a plan draws.
        made = stamp_power(made, problem, catalog)
    if made.instances and problem.limits.survival.lost:
        made = with_loss_routes(made, problem.settled(made.mixes), catalog)
    if made.status == "optimal" and not all(promise.is_kept for promise in made.promises):
        # The bound is on plans that keep them, of which this is none.
        made = made.model_copy(update={"status": "feasible"})
    if request.stats is not None:
        # All of it, simulations included, not only what solvers took.
        own.seconds, own.cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
        request.stats.add(own)
    return made


def _compile(problem: Problem, request: PlanRequest) -> float:
    """Compile what was not yet on this machine, before the deadline begins; return the seconds it took."""
    from atoll.prove.warm import MODULES_OF, warm

    began_s = time.perf_counter()

    def tell(_done: int, _total: int, what: str) -> None:
        request.say("compiling", f"{what}, once on this machine")

    number = warm(tell, MODULES_OF[problem.family])
    return time.perf_counter() - began_s if number else 0.0


def _find(problem: Problem, request: PlanRequest) -> Plan:
    """Return the plan of steps 1 to 3, with its promises."""
    request.check_deadline()
    if not problem.is_settled:
        from atoll.solve.rent.choosing.solver import refuse_others

        refuse_others(problem)
    if not problem.weights.rent_only:
        return _find_weighted(problem, request)
    if problem.family == "place":
        request = add_simulations(problem, use_deadline(request))
    quick = request.solver in family_of(problem).quick
    sized = quick or request.solver in (None, solvers(problem)[0])
    plain = problem.family == "rent" and problem.is_settled
    if request.capacity_only and sized and not quick and plain:
        return plan_simply(problem, request)
    if request.capacity_only or not sized:
        return solve(problem, request)
    from atoll.core.compiling import compile_entries
    from atoll.sim import event_loop as loop

    # Before the deadline begins.
    compile_entries(loop.__name__)
    if quick:
        return keep_quickly(problem, request)
    return _SIZING[problem.family](problem, request)


def _find_weighted(problem: Problem, request: PlanRequest) -> Plan:
    """Plan where energy or carbon count: every plan on the way is one in which prices alone do."""
    from atoll.solve.weighted import plan_weighted

    def find(priced: Problem, step: PlanRequest) -> Plan:
        return _find(priced, replace(step, capacity_only=True, rank=False))

    def keep(priced: Problem, step: PlanRequest) -> Plan:
        return _find(priced, replace(step, rank=False))

    return plan_weighted(problem, request, find, keep=None if request.capacity_only else keep)


def _size_rented(problem: Problem, request: PlanRequest) -> Plan:
    keep = keep_promises if problem.is_settled else keep_chosen_promises
    return keep(problem, request)


_SIZING: dict[Family, FindPlan] = {
    "rent": _size_rented,
    "place": keep_on_cluster,
    "graph": keep_graph_promises,
}
"""How plans of each family are sized by simulation, so that their promises are kept."""


def _add_error_bars(plan: Plan, problem: Problem, catalog: Catalog, deadline: Deadline) -> Plan:
    """The plan with how likely each promise is kept, over what the performance model may be wrong by."""
    from atoll.prove.kept import is_large
    from atoll.prove.simulation_deadline import SimulationCutShortError
    from atoll.prove.uncertainty import judge_certainty

    if is_large(problem):
        return plan.model_copy(update={"notes": (*plan.notes, NOT_FOR_LARGE)})
    try:
        found = judge_certainty(plan, problem, catalog, deadline=deadline)
    except SimulationCutShortError:
        # A longer deadline gives the same plan with them: whoever compares the two must know why.
        return plan.model_copy(update={"notes": (*plan.notes, NO_ERROR_BARS)})
    promises = tuple(
        promise.model_copy(update={"chance": found.chance.get(promise.service)})
        for promise in plan.promises
    )
    notes = plan.notes
    if found.measure is not None and min(found.chance.values()) < 1.0:
        gpu, op = found.measure
        notes = (
            *notes,
            f"measuring {op} on {gpu} would make the promises more certain than anything else",
        )
    return plan.model_copy(update={"promises": promises, "notes": notes})
