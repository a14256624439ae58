"""From an any-to-any service to what its virtual world needs: its executors, and a curve for each class.

As `fluid_calibration` does for plain services, with the simulator of tasks: the service is planned with its
promises at its own mix and with each class asked for more, which gives the executors worth knowing and the
room they need (`prove.graph_promises`). Plans of them at several sizes are simulated, for each class with as
much asked as fills the executors that it goes over, and all are slowed down until enough requests of every
class keep their promises, or taken to be faster as long as they do. At last the plan for the fleet's own
rates is simulated at several loads of each class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from atoll.control.decision.control_view import name_class
from atoll.control.decision.lane_capacity import list_needs
from atoll.control.virtual.executor_fluid import ExecutorLoads
from atoll.control.virtual.executor_planner import ExecutorPlanner, KnownExecutors
from atoll.control.virtual.fluid import KeptCurve
from atoll.control.virtual.virtual_demand import restate_classes
from atoll.core.errors import InfeasibleError

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem, Service
    from atoll.sim.tasks.task_result import TaskResult
    from atoll.solve.effort import Effort

SIZES = (0.6, 1.0, 1.8)
"""Sizes of the service at which plans are simulated, as multiples of its rate."""
LOADS = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3)
"""Loads at which the curves are simulated."""
MORE_OF_ONE = 1.5
"""By how much more each class is asked for, one after the other, where executors worth knowing are sought."""
OVERLOAD_FACTOR = 3.0
SLOWER = 1.05
"""By what executors are slowed down after a trial in which too few requests kept their promises."""
CLOSE_POINTS = 2.0
"""Points over the target that are no reason to look for executors that carry more."""
MAX_TRIALS = 12
RUNS_PER_LOAD = 2
"""Simulations of every load, of curves and of full plans alike: so a full plan keeps its class's target."""
_REQUESTS = 3_000
"""Requests of a simulation."""
_EFFORT = 0.1


@dataclass(frozen=True)
class CalibratedService:
    """The executors of an any-to-any service, and the curves of its classes by `name_class`."""

    known: KnownExecutors
    curves: Mapping[str, KeptCurve]


def calibrate_executors(
    problem: Problem,
    service: Service,
    catalog: Catalog,
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda _text: None,
) -> CalibratedService:
    """Return what a virtual world of an any-to-any service needs; see the module's text."""
    alone = problem.replace(services=(service,), running=())
    known = _find_executors(alone, service, say)
    enough: KnownExecutors | None = None
    for trial in range(MAX_TRIALS):
        worst = 100.0
        for size in SIZES:
            worst = min(worst, 100.0 * _margin_when_full(alone, known, catalog, size, seed))
            if worst < 0.0:
                break
        say(
            f"{service.name}, trial {trial}: full plans keep {worst:+.1f} points over their targets"
        )
        if worst < 0.0 and enough is not None:
            break
        if worst < 0.0:
            known = known.slower(SLOWER)
            continue
        # What executors carry alone is careful: together they may carry more.
        enough, faster = known, known.slower(1.0 / SLOWER)
        if worst <= CLOSE_POINTS or faster == known:
            break
        known = faster
    known = enough or known
    say(f"{service.name}: simulating loads")
    return CalibratedService(known, _find_curves(alone, known, catalog, seed))


def _find_executors(alone: Problem, service: Service, say: Callable[[str], None]) -> KnownExecutors:
    """Return the executors that plans have for the service's mix, and with more of each class."""
    from atoll.prove.graph_promises import size_executors
    from atoll.solve.effort import Effort
    from atoll.solve.plan_request import PlanRequest

    say(f"{service.name}: planning")
    request = PlanRequest(effort=Effort(work=_EFFORT), deadline_s=3600.0, error_bars=False)
    sized = size_executors(alone, request)
    plans = [sized.plan]
    effort = Effort(work=_EFFORT, slowdown=sized.slowdown)
    rates = [service.rate_per_s * klass.share for klass in service.classes]
    for at in range(len(rates)):
        more = [rate * (MORE_OF_ONE if at == k else 1.0) for k, rate in enumerate(rates)]
        plans.append(_plan_capacity(restate_classes(alone, {service.name: more}), effort))
    used = [one for plan in plans for one in plan.executor_instances]
    if not used:
        why = "; ".join(sized.plan.reasons[:2]) or "no executors keep its promises"
        raise InfeasibleError(f"nothing can be operated: {service.name}: {why}")
    return KnownExecutors(
        service,
        tuple(sorted({one.parts for one in used})),
        frozenset(one.nodes[0].kind for one in used),
        sized.slowdown,
    )


def _plan_capacity(problem: Problem, effort: Effort) -> Plan:
    from atoll.solve.plan_request import PlanRequest
    from atoll.solve.registry import solve

    return solve(problem, PlanRequest(effort=effort, deadline_s=3600.0))


def _loads_of(plan: Plan, service: Service, catalog: Catalog) -> np.ndarray:
    """Return the loads of a service's classes at its own rates."""
    needs = list_needs(catalog.model(service.model), service)
    loads = ExecutorLoads(needs, plan.executor_instances, plan.paths)
    return loads.of([service.rate_per_s * klass.share for klass in service.classes])


def _simulate(plan: Plan, alone: Problem, catalog: Catalog, times: float, seed: int) -> TaskResult:
    """Simulate a plan with so many times as much asked as its problem says."""
    from atoll.sim.tasks.from_plan import simulate_services

    (service,) = alone.services
    asked = service.model_copy(update={"rate_per_s": times * service.rate_per_s})
    return simulate_services(
        plan,
        alone.model_copy(update={"services": (asked,)}),
        catalog,
        (service.name,),
        requests=_REQUESTS,
        seed=seed,
    )


def _mean_kept(
    plan: Plan, alone: Problem, catalog: Catalog, times: float, klass: str, seed: int
) -> float:
    """Return the share of a class's requests that keep their promises: the mean of some draws.

    Near full load one draw may keep them all and the next hardly any.
    """
    runs = [
        _simulate(plan, alone, catalog, times, seed + 1 + k).klass(klass).kept_all
        for k in range(RUNS_PER_LOAD)
    ]
    return float(np.mean([1.0 if kept is None else kept for kept in runs]))


def _margin_when_full(
    alone: Problem, known: KnownExecutors, catalog: Catalog, size: float, seed: int
) -> float:
    """Return by how much the class that keeps least exceeds its target where a plan is full.

    The first that keeps too little is enough.
    """
    (service,) = alone.services
    asked = service.model_copy(update={"rate_per_s": size * service.rate_per_s})
    problem = alone.model_copy(update={"services": (asked,)})
    plan = ExecutorPlanner(catalog, known)(problem)
    if not plan.instances:
        raise InfeasibleError(
            f"there are not machines enough for {size:g} times the requests of {service.name}",
            hint="offer more",
        )
    least = 1.0
    # Each class where its own executors are full, whatever others are then.
    for klass, load in zip(service.classes, _loads_of(plan, asked, catalog).tolist(), strict=True):
        kept = _mean_kept(plan, problem, catalog, 1.0 / load, klass.name, seed)
        least = min(least, kept - service.class_target(klass.name))
        if least < 0.0:
            break
    return least


def _find_curves(
    alone: Problem, known: KnownExecutors, catalog: Catalog, seed: int
) -> dict[str, KeptCurve]:
    """Return the curve of every class, simulated on the plan for the fleet's own rates."""
    (service,) = alone.services
    plan = ExecutorPlanner(catalog, known)(alone)
    curves = {}
    loads = _loads_of(plan, service, catalog).tolist()
    for klass, own in zip(service.classes, loads, strict=True):
        shares = [_mean_kept(plan, alone, catalog, load / own, klass.name, seed) for load in LOADS]
        most = _simulate(plan, alone, catalog, OVERLOAD_FACTOR / own, seed).klass(klass.name)
        stretch = max(1.0, most.requests_per_s * own / (service.rate_per_s * klass.share))
        falling = np.minimum.accumulate(np.array(shares))
        # Beyond what is finished a queue grows: those loads are for the queue to tell.
        use = [at for at, load in enumerate(LOADS) if load <= stretch]
        curves[name_class(service.name, klass.name)] = KeptCurve(
            tuple(LOADS[at] for at in use), tuple(float(falling[at]) for at in use), stretch
        )
    return curves
