"""How many instances of which template in which region, on which machines: the cheapest, with proof.

    minimise    sum_k usd_k b_k + K sum_k usd_k s/gpus_k w_{k,s}
    subject to  gpus_k b_k >= GPUs that new slices w_{k,s} and kept instances take of offer k
                new instances in region g take no more nodes of a kind than slices of it are taken there
                every service is served: phases together, or as much prefill as decode in each region
                0 <= b_k <= available_k, limits, all whole numbers

over all templates in all regions, K being the initialisation penalty. Since a new node costs what its own
offer does, markets need not be part of a template; what runs holds the machines it has. See `rent_search`
for how, `relaxation` for why the bound holds, `scarcity` for what happens when demand cannot be met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.core.errors import InternalError, UsageError
from atoll.solve.array_types import Floats
from atoll.solve.deadline import Deadline
from atoll.solve.rent.allocation_types import (
    BOTH,
    DECODE,
    PREFILL,
    AllocatedInstances,
    Allocation,
    AllocationLimits,
    Log,
    LossLimits,
    RunningColumn,
    ServiceDemand,
    Shortage,
    Statistics,
    Status,
    Supply,
)
from atoll.solve.rent.greedy_allocation import served_share
from atoll.solve.rent.incumbent import Incumbent, Target, Work
from atoll.solve.rent.items import RentModel, ServiceItems, Solution, items_of
from atoll.solve.rent.many.fluid_program import FluidProgram
from atoll.solve.rent.relaxation import (
    Goal,
    Prices,
    evaluate,
    gpu_starts,
    machine_rents,
    market_prices,
)
from atoll.solve.rent.rent_search import (
    SearchOutcome,
    better,
    is_large,
    minimise,
    oracles_of,
    rate_at,
)
from atoll.solve.rent.rental_program import cheapest_supply, costs
from atoll.solve.rent.scarcity import ServedDemand, serve_most
from atoll.solve.rent.simple_allocation import MOST, SimpleGoal, find_simplest
from atoll.solve.rent.simple_allocation import WORK as SIMPLE_WORK
from atoll.solve.rent.surviving import find_max_left, minimise_surviving
from atoll.solve.rent.template_pool import TemplatePool

WORK = 450_000
"""Effort of an allocation, in simplex iterations (see `incumbent.Work`)."""
OPTIMAL = 1e-3
"""An answer is called optimal if it is proven to this share."""
KEEP = 1e-6
"""Share of a GPU's price that taking it anew is taken to cost at least, so that equal instances are kept."""
_SHARE_TOLERANCE = 1e-9
"""Share of a demand that integer solves and rounding may add to or take from what is served."""
_MIN_DUAL = 1e-6
"""Prices of a limit above this say that it stands in the way of a better answer."""
_SHORTAGE_WORK = 0.6
"""Share of the effort left for finding what can be served; the rest is for serving it cheaply."""
_MANY_SHORTAGE_WORK = 0.9
"""The same where services are very many: they are served cheaply in the same search."""
_MANY_ITEMS = 50_000_000
"""Templates in regions, of all services, up to which all of them are searched."""
_LAST, _MAX_LAST = 4.0, 0.25
"""Time that is kept for proving a bound over all templates: a multiple of what choosing them took, and
the share of a deadline that it may be."""
_LATE = 0.1
"""Share of that time after which nothing more is proven."""
_GROWTHS = 5
"""Times that templates needed under shortage are added to those that are searched, at most."""
_GROWING = 0.4
"""Share of the time left after which no more are added."""
_FEW_NEW = 0.01
"""Share of all of them up to which new ones change little."""
_NEAR = 0.02
"""Share by which templates may be dearer than what they are compared with, and be searched."""
_LEFT_WORK = 0.1
"""Share of the effort left for finding the most that losses can leave, and again for what that costs."""


def allocate(
    services: Sequence[ServiceDemand],
    supply: Supply,
    limits: AllocationLimits,
    *,
    init_penalty: float = 0.0,
    running: Sequence[RunningColumn] = (),
    deadline_s: float = 300.0,
    work: float = WORK,
    gap: float = 1e-3,
    on_shortage: Shortage = "fraction",
    seed: int = 0,
    log: Log | None = None,
) -> Allocation:
    """Return the cheapest allocation found with so much `work`, and what is proven of it.

    Stops at a proven relative `gap`. `init_penalty` is K: what starting an instance costs, as a share of
    its hourly price. When demand cannot be met the most is served that can be (see `scarcity`), unless
    `on_shortage` is "fail". Equal inputs give equal answers, unless `deadline_s` seconds pass before: then
    the answer is the best so far and says that it was `cut_short`.
    """
    return _Allocator(
        services, supply, limits, init_penalty, running, Deadline(deadline_s), Work(work), gap,
        seed, log,
    ).run(on_shortage)  # fmt: skip


def simplify(
    services: Sequence[ServiceDemand],
    supply: Supply,
    limits: AllocationLimits,
    chosen: Sequence[AllocatedInstances],
    bound: float,
    goal: SimpleGoal,
    *,
    init_penalty: float = 0.0,
    running: Sequence[RunningColumn] = (),
    deadline_s: float = 300.0,
    seed: int = 0,
) -> Allocation | None:
    """Return the simplest allocation found that costs no more than its goal allows; None if there is none.

    `chosen` is what to begin with, the cheapest known, and `bound` what is proven of any cost.
    """
    return _Allocator(
        services, supply, limits, init_penalty, running, Deadline(deadline_s), Work(SIMPLE_WORK), 0.0,
        seed, None,
    ).simplify(chosen, bound, goal)  # fmt: skip


@dataclass
class _Allocator:
    services: Sequence[ServiceDemand]
    supply: Supply
    limits: AllocationLimits
    init_penalty: float
    running: Sequence[RunningColumn]
    deadline: Deadline
    work: Work
    gap: float
    seed: int
    log: Log | None

    def __post_init__(self) -> None:
        _check(self.services, self.supply, self.limits, self.init_penalty)
        self._parts: list[Work] = []
        self._pool: TemplatePool | None = None
        self._last_s = 0.0
        self._end = self.deadline
        number = sum(len(role.throughput) for service in self.services for role in service.roles)
        if number * len(self.supply.regions) > _MANY_ITEMS:
            before = self.deadline.spent
            self._pool = TemplatePool(self.services, self.supply)
            bare = rent_model((), self.supply, self.limits, (), self.init_penalty, {})
            self._pool.grow(market_prices(bare).row, _NEAR)
            self.services = self._pool.services()
            # The last steps look at all templates once more, and are not interrupted.
            self._last_s = min(
                _MAX_LAST * self.deadline.seconds, _LAST * (self.deadline.spent - before)
            )
            self.deadline = Deadline(self.deadline.seconds - self._last_s, self.deadline.began)
        # Services without demand need nothing, and those that nothing can carry are named, not searched for.
        demanded = [m for m, s in enumerate(self.services) if is_asked(s)]
        model = self._model(demanded, np.ones(len(self.services)))
        servable = [is_servable(model, i, self.limits.spread) for i in range(len(demanded))]
        self.active = [m for m, good in zip(demanded, servable, strict=True) if good]
        self.hopeless = [m for m, good in zip(demanded, servable, strict=True) if not good]
        self.model = (
            model if not self.hopeless else self._model(self.active, np.ones(len(self.services)))
        )

    def _model(self, active: list[int], fraction: Floats) -> RentModel:
        some = {m: float(fraction[m]) for m in active}
        return rent_model(
            self.services, self.supply, self.limits, self.running, self.init_penalty, some
        )

    def run(self, on_shortage: Shortage) -> Allocation:
        first = None
        if not self.hopeless:
            # The rest is for the case that not everything can be served.
            standing = self._standing(0.7)
            outcome = self._minimise(self.model, standing, self.limits.losses)
            self.work.charge(standing.work.spent)
            if standing.solution is not None:
                return self._answer(self.active, self.model, standing, outcome, None)
            first = standing, outcome
            if self.limits.losses is not None:
                found = self._keep_most(self.limits.losses)
                if found is not None:
                    return found
        served = self._most(on_shortage == "priority", None if first is None else first[1].partial)
        # Looking for the most may find that everything can be served.
        if first is not None and served.fraction.min(initial=1.0) >= 1.0 - _SHARE_TOLERANCE:
            # Prices and mixes of before are of fewer templates.
            if self._pool is not None:
                first = first[0], replace(first[1], relaxation=None)
            return self._go_on(*first, served) or self._serve(self.active, self.model, served, None)
        if on_shortage == "fail" or served.solution is None:
            return self._nothing(served)
        fraction = np.zeros(len(self.services))
        # A hair less than was served, so that rounding cannot turn away what was found.
        fraction[self.active] = served.fraction * (1.0 - _SHARE_TOLERANCE)
        active = [m for m in self.active if fraction[m] > _SHARE_TOLERANCE]
        return self._serve(active, self._model(active, fraction), served, served)

    def _minimise(
        self, model: RentModel, standing: Incumbent, losses: LossLimits | None
    ) -> SearchOutcome:
        if losses is None:
            return minimise(model, standing, self.seed)
        return minimise_surviving(model, losses, standing, self.seed, safe=losses.safe)

    def _keep_most(self, losses: LossLimits) -> Allocation | None:
        """Serve everything, and keep as much as can be after a loss; None where not all can be served.

        What is proven of it is what is proven of any allocation.
        """
        standing = self._standing(_LEFT_WORK)
        left = find_max_left(self.model, losses, standing, self.seed) * (1.0 - _SHARE_TOLERANCE)
        self.work.charge(standing.work.spent)
        if left <= _SHARE_TOLERANCE:
            return None
        standing = self._standing(_LEFT_WORK)
        fewer = replace(losses, keep=losses.keep * left, safe=True)
        outcome = self._minimise(self.model, standing, fewer)
        self.work.charge(standing.work.spent)
        if standing.solution is None:
            return None
        return self._answer(self.active, self.model, standing, outcome, None)

    def simplify(
        self, chosen: Sequence[AllocatedInstances], bound: float, goal: SimpleGoal
    ) -> Allocation | None:
        self._parts.append(self.work)
        model = self.model
        prices = market_prices(model)
        found = None
        if not self.hopeless:
            found = find_simplest(
                model,
                self._model(self.active, np.full(len(self.services), MOST)),
                self._start(chosen),
                self.running,
                prices,
                goal,
                deadline=self.deadline,
                work=self.work,
                seed=self.seed,
            )
        if found is None:
            return None
        outcome = SearchOutcome(prices, np.zeros(len(self.active)), 0, 0)
        return self._assemble("feasible", self.active, model, found, bound, None, outcome)

    def _start(self, chosen: Sequence[AllocatedInstances]) -> Solution | None:
        """The solution of instances that are known, None where they do not serve everything by themselves."""
        picked: list[dict[int, int]] = [{} for _ in self.active]
        for one in chosen:
            at = self.active.index(one.service)
            items = self.model.items[at]
            source = one.template if one.running is None else one.running
            own = (items.phase == one.phase) & (items.region == one.region)
            found = np.flatnonzero(
                own & (items.source == source) & (items.kept == (one.running is not None))
            )
            for item in found[:1].tolist():
                picked[at][item] = picked[at].get(item, 0) + one.number
        for items, number in zip(self.model.items, picked, strict=True):
            if served_share(items, number, self.model.regions) < 1.0 - _SHARE_TOLERANCE:
                return None
        return cheapest_supply(self.model, tuple(picked), self.seed)

    def _standing(self, share: float) -> Incumbent:
        part = Work(self.work.part(share))
        self._parts.append(part)
        # A hair closer than asked, so that rounding cannot leave it a hair away.
        return Incumbent(Target(0.99 * self.gap), self.deadline, part, self.log)

    def _serve(
        self, active: list[int], model: RentModel, served: ServedDemand, short: ServedDemand | None
    ) -> Allocation:
        """Serve what is known to fit, at the least cost."""
        standing = self._standing(1.0)
        start = served.solution
        if start is not None:
            items = tuple(start.items[self.active.index(m)] for m in active)
            # With machines chosen anew: looking for the most did not count their cost.
            cheap = cheapest_supply(model, items, self.seed)
            if cheap is not None:
                standing.offer(cheap, sum(costs(model, cheap)))
        # Where services are very many, prices of what was found come with it.
        if served.guide is not None and standing.solution is not None:
            outcome = rate_at(model, served.guide, standing, self.seed)
        else:
            outcome = minimise(model, standing, self.seed)
        return self._answer(active, model, standing, outcome, short)

    def _go_on(
        self, standing: Incumbent, outcome: SearchOutcome, served: ServedDemand
    ) -> Allocation | None:
        """Go on with a search that had found nothing, from what serves everything; None where it cannot."""
        cheap = None
        if served.solution is not None and outcome.relaxation is not None:
            cheap = cheapest_supply(self.model, served.solution.items, self.seed)
        if cheap is None or outcome.relaxation is None:
            return None
        standing.offer(cheap, sum(costs(self.model, cheap)))
        before = standing.work.spent
        better(self.model, outcome.relaxation, standing, self.seed)
        self.work.charge(standing.work.spent - before)
        survivors = 0 if standing.closed else outcome.survivors
        outcome = replace(outcome, survivors=survivors)
        return self._answer(self.active, self.model, standing, outcome, None)

    def _most(self, priority: bool, start: Solution | None) -> ServedDemand:
        many = is_large(self.model)
        part = Work(self.work.part(_MANY_SHORTAGE_WORK if many else _SHORTAGE_WORK))
        self._parts.append(part)
        prices = None if priority else self._grow()
        served = serve_most(
            self.model,
            lambda some, fraction: self._model(
                [self.active[i] for i in some], np.full(len(self.services), fraction)
            ),
            self.deadline,
            self._end,
            part,
            priority=priority,
            seed=self.seed,
            start=start,
            prices=prices,
        )
        self.work.charge(part.spent)
        if self._pool is None:
            return served
        if served.proof is None or priority:
            return replace(served, fraction_bound=1.0)
        every = np.ones(len(self.services))
        bound = 1.0 - self._prove(self.active, every, "common", served.proof, 0.0)
        return replace(served, fraction_bound=max(served.achieved, min(1.0, bound)))

    def _grow(self) -> Prices | None:
        """Let what is needed under shortage be searched, too; return prices of serving the most there."""
        if self._pool is None:
            return None
        soon = Deadline(self.deadline.share(_GROWING))
        prices = None
        program: FluidProgram | None = None
        # So many rounds at most, whatever the effort: without these templates little can be found.
        for _ in range(_GROWTHS):
            free = replace(self.model, start=np.zeros(len(self.model.start)))
            if program is None:
                program = FluidProgram(free, rent=0.0, seed=self.seed, work=Work(np.inf))
            else:
                program.widen(free)
            prices = program.converge(soon)
            if soon.is_over():
                self.deadline.missed = True
                break
            before = len(self._pool)
            if self._pool.grow(prices.row, _NEAR) <= _FEW_NEW * before:
                break
            self.services = self._pool.services()
            self.model = self._model(self.active, np.ones(len(self.services)))
        return prices

    def _nothing(self, served: ServedDemand) -> Allocation:
        none = Solution(np.zeros(len(self.supply.usd), np.int64), {}, ())
        return self._assemble(
            "infeasible", [], self.model, none, 0.0, served,
            SearchOutcome(served.prices, np.zeros(0), 0, 0),
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
        solution = standing.solution
        bound = standing.bound
        if self._pool is not None:
            found = outcome.relaxation
            best = outcome.prices if found is None else found.root.prices
            asked = np.ones(len(self.services))
            if served is not None:
                asked[self.active] = served.fraction * (1.0 - _SHARE_TOLERANCE)
            bound = min(bound, self._prove(active, asked, "cost", best, outcome.market_bound))
        # What must survive stands on the machines that it was given.
        if self.limits.losses is None:
            solution = cheapest_supply(model, solution.items, self.seed) or solution
        # What is proven of the objective with the keeping penalty holds but for that penalty.
        hair = KEEP if any(some.running for some in model.items) else 0.0
        bound /= 1.0 + hair
        return self._assemble(
            "partial" if served is not None else "feasible",
            active, model, solution, bound, served, outcome,
        )  # fmt: skip

    def _prove(
        self, active: list[int], fraction: Floats, goal: Goal, prices: Prices, known: float
    ) -> float:
        """Return the bound at some prices over all templates, also those that were not searched.

        `known` is what is known of it, for the case that there is no time left.
        """
        if self._pool is None or self.deadline.left < -_LATE * self._last_s:
            return known
        self._pool.grow(prices.row)
        asked = {m: float(fraction[m]) for m in active}
        whole = rent_model(
            self._pool.services(),
            self.supply,
            self.limits,
            self.running,
            self.init_penalty if goal == "cost" else 0.0,
            asked,
        )
        value = evaluate(whole, oracles_of(whole), goal, prices, np.zeros(len(active))).value
        return max(known, value)

    def _assemble(
        self,
        status: Status,
        active: list[int],
        model: RentModel,
        solution: Solution,
        bound: float,
        served: ServedDemand | None,
        outcome: SearchOutcome,
    ) -> Allocation:
        usd = float(self.supply.usd @ solution.machines)
        per_gpu = self.init_penalty * self.supply.usd / self.supply.gpus
        init = sum(float(per_gpu[k]) * gpus * n for (k, gpus), n in solution.count_slices().items())
        objective = usd + init
        # Rounding and the keeping penalty can leave the bound a hair above the objective.
        bound = max(0.0, min(bound, objective))
        gap = 0.0 if objective <= 0.0 else (objective - bound) / objective
        if status == "feasible" and gap <= OPTIMAL:
            status = "optimal"
        fraction = np.ones(len(self.services))
        if served is not None:
            fraction[:] = [0.0 if is_asked(s) else 1.0 for s in self.services]
            fraction[self.active] = served.fraction
        demand = np.zeros(len(self.services))
        for i, m in enumerate(active):
            demand[m] = outcome.demand[i] / self.services[m].roles[0].demand
        dropped = [] if served is None else self._find_dropped(served)
        binding = self._binding(outcome.prices if served is None else served.prices, dropped)
        # Nothing stands in the way of serving more: then what stands in the way of serving it for less.
        if served is not None and not binding:
            binding = self._binding(outcome.prices, dropped)
        chosen = tuple(
            replace(allocated(model, m, i, item, count), places=solution.places.get((i, item), ()))
            for i, m in enumerate(active)
            for item, count in sorted(solution.items[i].items())
        )
        parts = self._parts
        return Allocation(
            status=status,
            instances=chosen,
            machines=solution.machines,
            slices=solution.count_slices(),
            usd_per_hour=usd,
            init_usd=init,
            objective=objective,
            bound=bound,
            gap=gap,
            served=fraction,
            fraction_bound=1.0 if served is None else served.fraction_bound,
            demand_usd=demand,
            node_usd=self._node_usd(outcome.prices),
            binding=binding,
            # Also where the last step of all ran out of time.
            cut_short=self.deadline.missed or (gap > self.gap and self.deadline.limit() <= 0.0),
            statistics=Statistics(
                rounds=sum(w.rounds for w in parts),
                mixes=outcome.mixes,
                mips=sum(w.mips for w in parts),
                nodes=sum(w.nodes for w in parts),
                iterations=sum(w.iterations for w in parts),
                pairs=sum(len(items) for items in model.items),
                survivors=outcome.survivors,
            ),
        )

    def _find_dropped(self, served: ServedDemand) -> list[int]:
        """Services that others leave no node for, under shortage."""
        if served.solution is None:
            return []
        return [
            m for m, f in zip(self.active, served.fraction, strict=True) if f <= _SHARE_TOLERANCE
        ]

    def _node_usd(self, prices: Prices) -> Floats:
        """Return USD per hour that one more node saves: worth in the relaxation less its cheapest rent."""
        model = self.model
        rents, starts = machine_rents(model, prices), gpu_starts(model, prices)
        min_usd = np.full(model.cells, np.inf)
        for k, sizes in enumerate(self.supply.sizes):
            for gpus, kind in sizes:
                cost = gpus * (rents[k] / self.supply.gpus[k] + starts[k])
                at = model.cell(k, kind)
                min_usd[at] = min(min_usd[at], float(cost))
        worth = prices.row[: model.cells]
        saved = np.where(
            np.isfinite(min_usd), worth - np.where(np.isfinite(min_usd), min_usd, 0), 0
        )
        return np.maximum(0.0, saved).reshape(model.regions, len(self.supply.kinds))

    def _binding(self, prices: Prices, dropped: list[int]) -> tuple[str, ...]:
        """Name what stands in the way of a cheaper (or fuller) answer, dearest first."""
        worth = self._node_usd(prices)
        # Beside the prices there are, what is a hair above 0 is rounding.
        scale = _MIN_DUAL * max(1.0, float(prices.row.max(initial=0.0)))
        cells = sorted(
            ((-worth[g, c], g, c) for g, c in zip(*np.nonzero(worth > scale), strict=True)),
        )
        names = [
            f"availability of {self.supply.kinds[c]} in {self.supply.regions[g]}"
            for _, g, c in cells
        ]
        names += [
            name
            for name, price in (
                ("budget", prices.budget),
                ("number of nodes", prices.nodes),
            )
            if price > _MIN_DUAL
        ]
        return (
            *(f"nothing on offer can serve {self.services[m].name}" for m in self.hopeless),
            *(f"no room for {self.services[m].name} beside the others" for m in dropped),
            *names,
        )


def rent_model(
    services: Sequence[ServiceDemand],
    supply: Supply,
    limits: AllocationLimits,
    running: Sequence[RunningColumn],
    init_penalty: float,
    fraction: Mapping[int, float],
) -> RentModel:
    """Return the problem of some services, by number, each asked for a fraction of its demand."""
    items = tuple(items_of(services[m], m, running, supply, f) for m, f in fraction.items())
    # What runs must be a hair cheaper than its equal, or either might be taken.
    if any(some.running for some in items):
        init_penalty = max(init_penalty, KEEP)
    asked = tuple(
        replace(
            services[m],
            kv_bytes_per_s=services[m].kv_bytes_per_s * f,
            # Shares of two services are of the same demand where both are asked for all of it.
            borrows=services[m].borrows and f == 1.0,
        )
        for m, f in fraction.items()
    )
    return RentModel(supply, limits, asked, items, init_penalty * supply.usd / supply.gpus)


def allocated(
    model: RentModel, service: int, index: int, item: int, count: int
) -> AllocatedInstances:
    """Return so many of an item of the service at `index` of a model as instances of `service`."""
    items = model.items[index]
    kept = item >= len(items) - items.running
    source = int(items.patterns.source[items.pattern[item]])
    return AllocatedInstances(
        service,
        int(items.phase[item]),
        int(items.region[item]),
        count,
        template=None if kept else source,
        running=source if kept else None,
    )


def is_asked(service: ServiceDemand) -> bool:
    """Return whether there is any demand for a service."""
    return any(role.demand > 0.0 for role in service.roles)


def _check(
    services: Sequence[ServiceDemand],
    supply: Supply,
    limits: AllocationLimits,
    init_penalty: float,
) -> None:
    for service in services:
        for role in service.roles:
            if not (np.isfinite(role.demand) and role.demand >= 0.0):
                raise UsageError(f"demand of {service.name} is {role.demand}", hint="0 or more")
            if role.counts.shape != (len(role.throughput), len(supply.kinds)):
                raise UsageError(f"templates of {service.name} have shape {role.counts.shape}")
    if np.any(supply.usd < 0.0) or np.any(supply.available < 0):
        raise UsageError("an offer with a negative price or number of nodes")
    if limits.spread < 1:
        raise UsageError(f"a spread of {limits.spread}", hint="1 or more regions")
    if init_penalty < 0.0:
        raise UsageError(f"an initialisation penalty of {init_penalty}", hint="0 or more")


def is_servable(model: RentModel, service: int, spread: int) -> bool:
    """Return whether instances of a service could stand in enough regions, phases together or paired."""
    return stands(model.items[service], spread, model.regions, model.services[service].pairs)


def stands(
    items: ServiceItems, spread: int, regions: int, pairs: Sequence[tuple[int, int]] = ()
) -> bool:
    """Return whether items could stand in enough regions; `pairs` are those that KV caches cross."""
    stand_in = items.stand_in(regions)
    if len(stand_in[BOTH]) >= spread:
        return True
    prefill, decode = stand_in[PREFILL], stand_in[DECODE]
    if min(len(prefill), len(decode)) < spread:
        return False
    return bool(prefill & decode) or any(g in prefill and h in decode for g, h in pairs)
