"""The solver called "fast": few templates, a heuristic allocation, and the same assembly as all others.

`allocate_fast` is asked and answers as `allocation.allocate` does. A search fits services together; where
it leaves something to gain, a short integer program over few items follows (`shortlist`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.array_types import Floats, Ints
from atoll.solve.derating import Derating
from atoll.solve.rent import optimal
from atoll.solve.rent.allocation import KEEP, allocated, is_asked, stands
from atoll.solve.rent.allocation_types import (
    Allocation,
    AllocationLimits,
    RunningColumn,
    ServiceDemand,
    Shortage,
    Statistics,
    Status,
    Supply,
)
from atoll.solve.rent.fast.fast_cache import RoleCache, recalled
from atoll.solve.rent.fast.fast_search import FastSearch, Fitted
from atoll.solve.rent.fast.fast_templates import promising_libraries
from atoll.solve.rent.fast.picker import ServicePicker
from atoll.solve.rent.incumbent import MipLimits, Work
from atoll.solve.rent.instance_master import InstanceGoal, InstanceMaster
from atoll.solve.rent.items import RentModel, Solution, items_of
from atoll.solve.rent.spot_ways import SpotWays
from atoll.solve.templates.library import Libraries

SOLVER = "fast"

_ALL_SERVED = 1.0 - 1e-9
"""Share of a demand from which on all of it counts as served: sums of throughputs are rounded."""
_GOOD_GAP = 0.01
"""A plan this close to what everything costs with full machines is left as it is."""
_MIN_GAIN = 1e-3
"""Share of all demand that a program must serve more than the search to be taken."""
MAX_ITEMS = 2400
"""Items of all services together that a program is made of; with more to choose from it is not worth it."""
_MIN_EACH = 8
"""Items of each phase and region that a program needs to be worth it."""
_LEVELS = 16
"""Shares of a demand, evenly spaced, for each of which the cheapest item is let in."""
_CHEAPER = MipLimits(np.inf, 5e-3, 1e-9, iterations=6000, nodes=400)
_MOST_COMMON = replace(_CHEAPER, absolute_gap=1e-3)
"""Counted work only, a fraction of a second: the fast solver has no deadline."""


def plan_fast(
    problem: Problem,
    catalog: Catalog,
    *,
    derating: Derating | None = None,
    libraries: Libraries | None = None,
    cached: bool = True,
) -> Plan:
    """Return a plan found by a heuristic, within all limits; nothing is proven of it.

    `libraries` are templates to choose among; without them few are made (`promising_libraries`). Where not
    everything could be served it is "partial". With `cached` capacities and templates are kept on disk, and
    those that are there are used.
    """
    store = RoleCache() if cached else None
    with recalled(problem, catalog, store):
        templates = libraries
        if templates is None:
            templates = promising_libraries(problem, catalog, cached=cached)
        return _plan(problem, catalog, templates, derating)


def _plan(
    problem: Problem, catalog: Catalog, templates: Libraries, derating: Derating | None
) -> Plan:
    running = optimal.running_columns(problem, catalog, derating)
    allocation = _allocate(
        problem,
        optimal.service_demands(problem, catalog, templates, derating),
        optimal.supply_of(problem, catalog),
        [column for column, _ in running],
    )
    groups = [group for _, group in running]
    draft = optimal.Draft(problem, catalog, templates, allocation, groups, derating)
    return draft.plan(SOLVER)


def _allocate(
    problem: Problem,
    demands: Sequence[ServiceDemand],
    supply: Supply,
    running: Sequence[RunningColumn],
) -> Allocation:
    """Return an allocation; where spot is limited, with as much of it as may be or with none."""
    limits, shortage = optimal.limits_of(problem), problem.settings.on_shortage

    def plain(
        services: Sequence[ServiceDemand],
        market: Supply,
        columns: Sequence[RunningColumn],
        on_shortage: Shortage,
    ) -> Allocation:
        return allocate_fast(
            services,
            market,
            limits,
            init_penalty=problem.settings.init_penalty,
            running=columns,
            on_shortage=on_shortage,
        )

    ways = SpotWays.of(demands, supply, problem.limits.spot_share, running)
    if ways is None:
        return plain(demands, supply, running, shortage)
    if ways.share <= 0.0:
        return ways.answer(plain(ways.at(ways.off()), ways.supply, ways.running, shortage))
    return ways.try_levels(plain, shortage)


def allocate_fast(
    services: Sequence[ServiceDemand],
    supply: Supply,
    limits: AllocationLimits,
    *,
    init_penalty: float = 0.0,
    running: Sequence[RunningColumn] = (),
    on_shortage: Shortage = "fraction",
) -> Allocation:
    """Return an allocation found quickly; nothing is proven of it, so its bound is 0.

    Where it finds none that serves everything it serves a share of all, or some (see `FastSearch.fit_most`),
    and names what there is too little of; that does not mean that there is no better one.
    """
    demanded = [m for m, asked in enumerate(services) if is_asked(asked)]
    items = {m: items_of(services[m], m, running, supply) for m in demanded}
    active = [m for m in demanded if stands(items[m], limits.spread, len(supply.regions))]
    penalty = init_penalty
    if any(some.running for some in items.values()):
        penalty = max(penalty, KEEP)
    model = RentModel(
        supply,
        limits,
        # Requests change regions between phases only where somebody counts what the links carry.
        tuple(replace(services[m], pairs=()) for m in active),
        tuple(items[m] for m in active),
        penalty * supply.usd / supply.gpus,
    )
    search = FastSearch(model)
    whole = len(active) == len(demanded)
    found = fit_all(search) if whole and active else None
    if found is None and active:
        found = fit_most(search, on_shortage == "priority")
    hopeless = [services[m].name for m in demanded if m not in active]
    return _answer(services, supply, init_penalty, model, demanded, active, found, hopeless)


def fit_all(search: FastSearch) -> Fitted | None:
    """Serve everything: by moving services, and by a short program where that leaves something to gain."""
    found = search.fit(np.ones(len(search.pickers)))
    if found is not None and found.cost <= search.lower_bound() * (1.0 + _GOOD_GAP):
        return found
    used = [{} for _ in search.pickers] if found is None else found.solution.items
    let_in = shortlist(search.pickers, search.bases, used)
    if let_in is None:
        return found
    start = None if found is None else found.solution
    solution = _solve_among(search.model, "cost", let_in, start, _CHEAPER)
    better = None if solution is None else search.adopt(solution)
    if better is None or better.served.min() < _ALL_SERVED:
        return found
    return better if found is None or better.cost < found.cost else found


def fit_most(search: FastSearch, priority: bool) -> Fitted | None:
    """Serve as much as can be found: by bisection, and by a short program for the largest common share."""
    found = search.fit_most(priority)
    if priority or found is None:
        return found
    let_in = shortlist(search.pickers, search.bases, found.solution.items)
    if let_in is None:
        return found
    solution = _solve_among(search.model, "common", let_in, found.solution, _MOST_COMMON)
    better = None if solution is None else search.adopt(solution)
    if better is None or better.served.min() <= found.served.min() + _MIN_GAIN:
        return found
    return search.settle(better)


def _answer(
    services: Sequence[ServiceDemand],
    supply: Supply,
    init_penalty: float,
    model: RentModel,
    demanded: list[int],
    active: list[int],
    found: Fitted | None,
    hopeless: list[str],
) -> Allocation:
    nothing = Solution(np.zeros(len(supply.usd), np.int64), {}, ())
    solution = nothing if found is None else found.solution
    usd = float(supply.usd @ solution.machines)
    per_gpu = init_penalty * supply.usd / supply.gpus
    init = sum(float(per_gpu[k]) * gpus * n for (k, gpus), n in solution.count_slices().items())
    served = np.ones(len(services))
    served[demanded] = 0.0
    if found is not None:
        served[active] = np.minimum(1.0, found.served)
    short = bool(served.min(initial=1.0) < _ALL_SERVED)
    status: Status = "feasible"
    if short:
        status = (
            "partial" if found is not None and found.served.max(initial=0.0) > 0.0 else "infeasible"
        )
    chosen = tuple(
        allocated(model, m, at, item, number)
        for at, m in enumerate(active)
        if found is not None
        for item, number in sorted(found.solution.items[at].items())
    )
    reasons = tuple(f"nothing on offer can serve {name}" for name in hopeless)
    if short and not hopeless:
        reasons = ("the fast solver found no way to serve everything",)
    objective = usd + init
    return Allocation(
        status=status,
        instances=chosen,
        machines=solution.machines,
        slices=solution.count_slices(),
        usd_per_hour=usd,
        init_usd=init,
        objective=objective,
        bound=0.0,
        gap=1.0 if objective > 0.0 else 0.0,
        served=served,
        fraction_bound=1.0,
        demand_usd=np.zeros(len(services)),
        node_usd=np.zeros((model.regions, len(supply.kinds))),
        binding=reasons,
        statistics=Statistics(pairs=sum(len(some) for some in model.items)),
    )


def shortlist(
    pickers: Sequence[ServicePicker],
    bases: Sequence[Floats],
    used: Sequence[dict[int, int]],
) -> list[Ints] | None:
    """Return per service the items worth a look at these prices, None where those are too many.

    Machines that are cut, limits and scarce nodes tie services together, and moving one or two services does
    not untie them. A short integer program over these items does: those that are cheap for what they carry.
    """
    groups = [picker.groups() for picker in pickers]
    number = sum(len(some) for some in groups)
    each = max(_MIN_EACH, MAX_ITEMS // max(1, number))
    if number * _MIN_EACH > MAX_ITEMS:
        return None
    found = []
    for m, picker in enumerate(pickers):
        items, some = picker.items, set(used[m])
        for base in bases:
            cost = items.prices(base)
            for group in groups[m]:
                some.update(_cheap(group, cost[group], items.share[group], each // len(bases)))
        found.append(np.array(sorted(some), np.int64))
    return found


def _cheap(group: Ints, cost: Floats, share: Floats, max_items: int) -> list[int]:
    """The cheapest of a group at each of some levels, and the cheapest for a share."""
    rate = np.argsort(cost / share, kind="stable")[: max(1, max_items // 2)]
    levels = np.arange(1, _LEVELS + 1) / _LEVELS
    enough = np.where(share[None, :] >= levels[:, None] * (1.0 - 1e-9), cost[None, :], np.inf)
    best = np.argmin(enough, axis=1)[np.isfinite(enough.min(axis=1))]
    both = list(dict.fromkeys([*best.tolist(), *rate.tolist()]))[: max(4, max_items)]
    return [int(group[place]) for place in both]


def _solve_among(
    model: RentModel,
    goal: InstanceGoal,
    let_in: Sequence[Ints],
    start: Solution | None,
    limits: MipLimits,
) -> Solution | None:
    """Return the best solution with these items: the cheapest, or the largest common share at any price."""
    master = InstanceMaster(model, goal, np.zeros(0), let_in, Work(np.inf), seed=0)
    return master.solve(limits, start).solution
