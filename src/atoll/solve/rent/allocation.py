"""How many instances of which template in which region, on which nodes: the cheapest, with proof.

    minimise    sum_k usd_k x_k + K sum_i base_i (n_i beyond those running)
    subject to  sum_i throughput_i n_i >= demand_r                     for every role r
                sum_i nodes_{i,c} n_i <= sum of x_k over offers in (g, c)   for every region g, node type c
                0 <= x_k <= available_k, limits, all whole numbers

over all templates in all regions; base_i is what the nodes of an instance cost at the cheapest offers of
its region. See `search` for how, `relaxation` for why the bound holds, `scarcity` for what happens when
demand cannot be met.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InternalError, UsageError
from atoll.solve.rent.answer import cheapest_nodes, costs, instances, keep_equals, restrict
from atoll.solve.rent.columns import RentModel, available_nodes, kept_of, pairs_of
from atoll.solve.rent.relaxation import Prices, cheapest_rents, rents
from atoll.solve.rent.scarcity import ServedDemand, serve_most
from atoll.solve.rent.search import SearchOutcome, minimise
from atoll.solve.rent.standing import Deadline, Incumbent, Target
from atoll.solve.rent.types import (
    AllocatedInstances,
    Allocation,
    AllocationLimits,
    Log,
    RoleDemand,
    RunningColumn,
    Shortage,
    Statistics,
    Status,
    Supply,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_KEEP = 1e-6
"""Share of a node's price that starting it is taken to cost at least, so that equal instances are kept."""
_FULL = 1e-9
_PATIENCE = 0.4
"""Share of the time after which, nothing being found that meets all demand, less is looked for."""
_BINDS = 1e-6
_SCARCE = 0.7
"""Share of the time left in which to find what can be served; the rest is for serving it cheaply."""


def allocate(
    roles: Sequence[RoleDemand],
    supply: Supply,
    limits: AllocationLimits,
    *,
    init_penalty: float = 0.0,
    running: Sequence[RunningColumn] = (),
    deadline_s: float = 30.0,
    gap: float = 1e-3,
    on_shortage: Shortage = "fraction",
    seed: int = 0,
    log: Log | None = None,
) -> Allocation:
    """Return the cheapest allocation found within `deadline_s` seconds of wall time and what is proven of it.

    Stops at a proven relative `gap`. `init_penalty` is K: what starting an instance costs, as a share of
    its hourly price. When demand cannot be met the most is served that can be (see `scarcity`), unless
    `on_shortage` is "fail". Equal inputs give equal answers when the gap is reached before the deadline.
    """
    return _Allocator(
        roles, supply, limits, init_penalty, running, Deadline(deadline_s), gap, seed, log
    ).run(on_shortage)


@dataclass
class _Allocator:
    roles: Sequence[RoleDemand]
    supply: Supply
    limits: AllocationLimits
    init_penalty: float
    running: Sequence[RunningColumn]
    deadline: Deadline
    gap: float
    seed: int
    log: Log | None

    def __post_init__(self) -> None:
        self.cpu = time.process_time()
        _check(self.roles, self.supply, self.limits, self.init_penalty)
        self.nodes = available_nodes(self.supply)
        demanded = [r for r, role in enumerate(self.roles) if role.demand > 0.0]
        model = self._model(demanded, np.ones(len(self.roles)))
        servable = [_servable(model, i, self.limits.spread) for i in range(len(demanded))]
        self.active = [r for r, good in zip(demanded, servable, strict=True) if good]
        self.hopeless = [r for r, good in zip(demanded, servable, strict=True) if not good]
        self.model = (
            model if not self.hopeless else self._model(self.active, np.ones(len(self.roles)))
        )

    def _model(self, active: list[int], fraction: Floats) -> RentModel:
        """The problem of some roles, each asked for a fraction of its demand."""
        demands = [
            replace(self.roles[r], demand=self.roles[r].demand * float(fraction[r])) for r in active
        ]
        model = RentModel(
            self.supply,
            self.limits,
            tuple(pairs_of(role, self.nodes) for role in demands),
            tuple(
                kept_of(r, role, self.running, self.nodes)
                for r, role in zip(active, demands, strict=True)
            ),
            np.zeros(self.nodes.size),
        )
        penalty = self.init_penalty
        if any(len(kept.pairs) for kept in model.kept):
            penalty = max(penalty, _KEEP)
        return replace(model, penalty=penalty * cheapest_rents(model))

    def run(self, on_shortage: Shortage) -> Allocation:
        if not self.hopeless:
            standing = Incumbent(Target(self.gap), self.deadline, self.log, patience=_PATIENCE)
            outcome = minimise(self.model, standing, self.seed)
            if standing.solution is not None:
                return self._answer(self.active, self.model, standing, outcome, None)
        served = self._most(on_shortage == "priority")
        if not self.hopeless and served.fraction.min(initial=1.0) >= 1.0 - _FULL:
            return self._serve(self.active, self.model, served, None)
        if on_shortage == "fail" or served.solution is None:
            return self._nothing(served)
        fraction = np.zeros(len(self.roles))
        # A hair less than was served, so that rounding cannot turn away what was found.
        fraction[self.active] = served.fraction * (1.0 - _FULL)
        active = [r for r in self.active if fraction[r] > _FULL]
        return self._serve(active, self._model(active, fraction), served, served)

    def _serve(
        self, active: list[int], model: RentModel, served: ServedDemand, short: ServedDemand | None
    ) -> Allocation:
        """Serve what is known to fit, at the least cost."""
        standing = Incumbent(Target(self.gap), self.deadline, self.log)
        start = restrict(served.solution, self.active, active)
        if start is not None:
            start = replace(start, rented=cheapest_nodes(model, start))
            standing.offer(start, sum(costs(model, start, model.penalty)))
        outcome = minimise(model, standing, self.seed)
        return self._answer(active, model, standing, outcome, short)

    def _most(self, priority: bool) -> ServedDemand:
        return serve_most(
            self.model,
            lambda some, fraction: self._model(
                [self.active[i] for i in some], np.full(len(self.roles), fraction)
            ),
            np.array([self.roles[r].weight for r in self.active]),
            self.deadline.part(_SCARCE),
            priority=priority,
            seed=self.seed,
        )

    def _nothing(self, served: ServedDemand) -> Allocation:
        return self._assemble(
            "infeasible", (), np.zeros(len(self.supply.usd), np.int64), (0.0, 0.0), 0.0,
            served, served.prices, np.zeros(len(self.roles)), served.statistics,
        )  # fmt: skip

    def _answer(
        self,
        active: list[int],
        model: RentModel,
        standing: Incumbent,
        outcome: SearchOutcome,
        served: ServedDemand | None,
    ) -> Allocation:
        if standing.solution is None:
            raise InternalError("nothing was found that could be answered")
        solution = keep_equals(model, standing.solution)
        solution = replace(solution, rented=cheapest_nodes(model, solution))
        usd, init = costs(model, solution, self.init_penalty * cheapest_rents(model))
        # What is proven of the objective with the keeping penalty holds but for that penalty.
        bound = min(usd + init, standing.bound / (1.0 + _KEEP if self.running else 1.0))
        demand = np.zeros(len(self.roles))
        for i, r in enumerate(active):
            demand[r] = outcome.demand[i]
        status: Status = "feasible"
        if served is not None:
            status = "partial"
        elif usd + init - bound <= Target(self.gap + _KEEP).spare(usd + init):
            status = "optimal"
        chosen = tuple(
            c for i, r in enumerate(active) for c in instances(model, solution, i, r, self.roles[r])
        )
        return self._assemble(
            status, chosen, solution.rented, (usd, init), bound, served, outcome.prices, demand,
            outcome.statistics,
        )  # fmt: skip

    def _assemble(
        self,
        status: Status,
        chosen: tuple[AllocatedInstances, ...],
        rented: Ints,
        cost: tuple[float, float],
        bound: float,
        served: ServedDemand | None,
        prices: Prices,
        demand: Floats,
        statistics: Statistics,
    ) -> Allocation:
        objective = sum(cost)
        rates = np.zeros(len(self.roles))
        for c in chosen:
            rates[c.role] += c.throughput * c.number
        required = np.array([role.demand for role in self.roles])
        nobody = required <= 0.0
        fraction = np.where(nobody, 1.0, np.minimum(1.0, rates / np.where(nobody, 1.0, required)))
        dropped = [] if served is None else self._find_dropped(served)
        binding = self._binding(prices if served is None else served.prices, dropped)
        if served is not None and not binding:
            binding = self._binding(prices, dropped)
        return Allocation(
            status=status,
            instances=chosen,
            offers_used=rented,
            usd_per_hour=cost[0],
            init_usd=cost[1],
            objective=objective,
            bound=bound,
            gap=0.0 if objective <= 0.0 else (objective - bound) / objective,
            served=fraction,
            fraction_bound=1.0 if served is None else served.most,
            demand_usd=np.where(nobody, 0.0, demand / np.where(nobody, 1.0, required)),
            node_usd=self._node_usd(prices),
            binding=binding,
            seconds=self.deadline.passed,
            cpu_seconds=time.process_time() - self.cpu,
            statistics=statistics,
        )

    def _find_dropped(self, served: ServedDemand) -> list[int]:
        """Roles that others leave no node for, under shortage."""
        if served.solution is None:
            return []
        return [r for r, f in zip(self.active, served.fraction, strict=True) if f <= _FULL]

    def _node_usd(self, prices: Prices) -> Floats:
        """What one more node would save: its worth in the relaxation less its cheapest rent."""
        cells = self.supply.region * len(self.supply.node_types) + self.supply.type
        least = np.full(self.nodes.size, np.inf)
        np.minimum.at(least, cells, rents(self.supply, self.limits, prices))
        saved = np.where(
            np.isfinite(least), prices.cell - np.where(np.isfinite(least), least, 0), 0
        )
        return np.maximum(0.0, saved).reshape(self.nodes.shape)

    def _binding(self, prices: Prices, dropped: list[int]) -> tuple[str, ...]:
        """Name what stands in the way of a cheaper (or fuller) answer, dearest first."""
        worth = self._node_usd(prices)
        scale = _BINDS * max(1.0, float(prices.cell.max(initial=0.0)))
        cells = sorted(
            ((-worth[g, c], g, c) for g, c in zip(*np.nonzero(worth > scale), strict=True)),
        )
        names = [
            f"availability of {self.supply.node_types[c]} in {self.supply.regions[g]}"
            for _, g, c in cells
        ]
        names += [
            name
            for name, price in (
                ("budget", prices.budget),
                ("spot share", prices.spot),
                ("number of nodes", prices.nodes),
            )
            if price > _BINDS
        ]
        return (
            *(f"nothing on offer can serve {self.roles[r].name}" for r in self.hopeless),
            *(f"no room for {self.roles[r].name} beside the others" for r in dropped),
            *names,
        )


def _check(
    roles: Sequence[RoleDemand], supply: Supply, limits: AllocationLimits, init_penalty: float
) -> None:
    for role in roles:
        if not (np.isfinite(role.demand) and role.demand >= 0.0):
            raise UsageError(f"demand of {role.name} is {role.demand}", hint="0 or more")
        if role.counts.shape != (len(role.throughput), len(supply.node_types)):
            raise UsageError(f"templates of {role.name} have shape {role.counts.shape}")
    if np.any(supply.usd < 0.0) or np.any(supply.available < 0):
        raise UsageError("an offer with a negative price or number of nodes")
    if limits.spread < 1:
        raise UsageError(f"a spread of {limits.spread}", hint="1 or more regions")
    if init_penalty < 0.0:
        raise UsageError(f"an initialisation penalty of {init_penalty}", hint="0 or more")


def _servable(model: RentModel, role: int, spread: int) -> bool:
    regions = np.concatenate([model.pairs[role].region, model.kept[role].pairs.region])
    return len(np.unique(regions)) >= spread
