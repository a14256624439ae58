"""The heuristic behind the allocator's own interface: what it is asked and answers are `rent.types`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.fast.polish import cheaper, most_common, shortlist
from atoll.solve.rent.fast.search import FastSearch, Fitted
from atoll.solve.rent.items import RentModel, ServiceItems, Solution, items_of
from atoll.solve.rent.types import (
    BOTH,
    DECODE,
    PREFILL,
    AllocatedInstances,
    Allocation,
    AllocationLimits,
    RunningColumn,
    ServiceDemand,
    Shortage,
    Statistics,
    Status,
    Supply,
)

Floats = NDArray[np.float64]

_KEEP = 1e-6
"""Share of a GPU's price that taking it anew is taken to cost at least, so that equal instances are kept."""
_ALL = 1.0 - 1e-9
_CLOSE = 0.01
"""A plan this close to what everything costs with full machines is left as it is."""
_LITTLE = 1e-3


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
    demanded = [m for m, asked in enumerate(services) if any(r.demand > 0.0 for r in asked.roles)]
    items = {m: items_of(services[m], m, running, supply) for m in demanded}
    active = [m for m in demanded if _servable(items[m], limits.spread, len(supply.regions))]
    penalty = init_penalty
    if any(some.running for some in items.values()):
        penalty = max(penalty, _KEEP)
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
    """Serve everything: by moving services, and by a short programme where that leaves something to gain."""
    found = search.fit(np.ones(len(search.pickers)))
    if found is not None and found.cost <= search.lower_bound() * (1.0 + _CLOSE):
        return found
    used = [{} for _ in search.pickers] if found is None else found.solution.items
    let_in = shortlist(search.pickers, search.bases, used)
    if let_in is None:
        return found
    start = None if found is None else found.solution
    solution = cheaper(search.model, let_in, start)
    better = None if solution is None else search.adopt(solution)
    if better is None or better.served.min() < _ALL:
        return found
    return better if found is None or better.cost < found.cost else found


def fit_most(search: FastSearch, priority: bool) -> Fitted | None:
    """Serve as much as can be found: by bisection, and by a short programme for the largest common share."""
    found = search.fit_most(priority)
    if priority or found is None:
        return found
    let_in = shortlist(search.pickers, search.bases, found.solution.items)
    if let_in is None:
        return found
    solution = most_common(search.model, let_in, found.solution)
    better = None if solution is None else search.adopt(solution)
    if better is None or better.served.min() <= found.served.min() + _LITTLE:
        return found
    return search.settle(better)


def _servable(items: ServiceItems, spread: int, regions: int) -> bool:
    """Whether instances could stand in enough regions, phases together or beside each other."""
    stand = items.stand_in(regions)
    if len(stand[BOTH]) >= spread:
        return True
    apart = min(len(stand[PREFILL]), len(stand[DECODE])) >= spread
    return apart and bool(stand[PREFILL] & stand[DECODE])


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
    init = sum(float(per_gpu[k]) * gpus * n for (k, gpus), n in solution.slices.items())
    served = np.ones(len(services))
    served[demanded] = 0.0
    if found is not None:
        served[active] = np.minimum(1.0, found.served)
    short = bool(served.min(initial=1.0) < _ALL)
    status: Status = "feasible"
    if short:
        status = (
            "partial" if found is not None and found.served.max(initial=0.0) > 0.0 else "infeasible"
        )
    chosen = tuple(
        _allocated(model, m, at, item, number)
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
        slices=solution.slices,
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


def _allocated(
    model: RentModel, service: int, at: int, item: int, number: int
) -> AllocatedInstances:
    items = model.items[at]
    kept = item >= len(items) - items.running
    source = int(items.source[item])
    return AllocatedInstances(
        service,
        int(items.phase[item]),
        int(items.region[item]),
        number,
        template=None if kept else source,
        running=source if kept else None,
    )
