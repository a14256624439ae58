"""The default solver: exact templates, then the cheapest allocation of them with a proven bound."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase
from atoll.core.units import format_share
from atoll.plan.handover import cut_sizes, handover
from atoll.plan.losses import find_shortest, kind_of, list_left, region_of, survives
from atoll.plan.plan import Instance, Market, Plan
from atoll.plan.problem import Problem
from atoll.solve.assembly import NewInstance, Source, infeasible, keep, plan_from_layouts
from atoll.solve.deadline import Deadline
from atoll.solve.derating import Derating, find_templates
from atoll.solve.effort import RentLimit
from atoll.solve.rent import allocation_types as types
from atoll.solve.rent.allocation import WORK, allocate, simplify
from atoll.solve.rent.choosing.level_choice import choose_levels
from atoll.solve.rent.simple_allocation import SimpleGoal
from atoll.solve.rent.spot_ways import SpotWays, with_bound
from atoll.solve.templates.library import Libraries

SOLVER = "optimal"
DEADLINE_S = 300.0
GAP = 1e-3
_FINISH_S = 5e-4
"""Seconds for making an allocation a plan that is checked, for each service and region."""

_PHASES = {
    Phase.PREFILL: types.PREFILL,
    Phase.DECODE: types.DECODE,
    Phase.BOTH: types.BOTH,
}
_MARKETS: tuple[Market, ...] = ("owned", "on-demand", "spot")


@dataclass(frozen=True)
class Solved:
    """A plan with the allocation behind it, whose duals and statistics explain it."""

    plan: Plan
    allocation: types.Allocation


@dataclass(frozen=True)
class Draft:
    """An allocation of templates, before it is made a plan."""

    problem: Problem
    catalog: Catalog
    libraries: Libraries
    allocation: types.Allocation
    running: list[list[Instance]]
    derating: Derating | None = None

    @property
    def merit(self) -> tuple[float, float, float]:
        """Order of drafts: more served, as the problem counts it, then less cost."""
        served = self.allocation.served
        weights = np.array([service.priority for service in self.problem.services])
        min_served, mean = float(served.min(initial=1.0)), float(served @ weights)
        # By priority, the weighted sum goes before the least served service.
        if self.problem.settings.on_shortage == "priority":
            min_served, mean = mean, min_served
        return min_served, mean, -self.allocation.objective

    def plan(self, solver: str = SOLVER) -> Plan:
        """Return its plan: layouts of its templates on machines, as found by `solver`."""
        problem, allocation = self.problem, self.allocation
        if allocation.status == "infeasible":
            return infeasible(
                problem,
                solver=solver,
                reasons=allocation.binding,
                cut_short=allocation.cut_short,
            )
        phases = {number: phase for phase, number in _PHASES.items()}
        started: list[NewInstance] = []
        stock = _TakenSlices(problem, allocation.slices)
        for chosen in allocation.instances:
            stock.reserve(chosen.places)
        kept = choose_kept(
            [
                (self.running[c.running], c.number)
                for c in allocation.instances
                if c.running is not None
            ]
        )
        # Those that may not stand on spot take their nodes first.
        for chosen in sorted(allocation.instances, key=lambda some: some.on_spot):
            service = problem.services[chosen.service]
            if chosen.running is not None:
                continue
            role = next(r for r in service.roles if r.phase is phases[chosen.phase])
            library = self.libraries.roles[str(role)]
            region = problem.regions[chosen.region]
            layout = library.layout(chosen.template or 0)
            kinds = Counter(kind for stage in layout.stages for kind in stage.nodes)
            placed = stock.split(chosen, kinds)
            started += [
                NewInstance(str(role), region, layout, *stock.take(region, kinds, own))
                for own in placed
            ]
        plan = plan_from_layouts(
            problem,
            self.catalog,
            started,
            status=allocation.status,
            solver=solver,
            kept=kept,
            # The bound is what this solver proves; a draft of another one has none.
            bound=allocation.bound if solver == SOLVER and allocation.proven else None,
            reasons=allocation.binding,
            cut_short=allocation.cut_short,
            derating=self.derating,
        )
        return say_unsurvived(plan, problem, self.catalog)


def say_unsurvived(plan: Plan, problem: Problem, catalog: Catalog) -> Plan:
    """Return a plan that leaves too little after some loss as a partial one that says so."""
    if not problem.limits.survival.lost or plan.status not in ("optimal", "feasible"):
        return plan
    short = find_shortest(list_left(plan, problem, catalog), plan, problem)
    if not short:
        return plan
    reasons = tuple(
        f"with {left.loss.name} lost only {format_share(left.shares[name])} of the demand of {name} is served"
        for name, left in short.items()
    )
    return plan.model_copy(update={"status": "partial", "reasons": (*plan.reasons, *reasons)})


def finish_s(problem: Problem) -> float:
    """Return the seconds that are kept for making an allocation a plan and checking that."""
    return _FINISH_S * len(problem.services) * len(problem.regions)


def solve(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    *,
    deadline_s: float = DEADLINE_S,
    gap: float = GAP,
    work: float = 1.0,
    log: types.Log | None = None,
    derating: Derating | None = None,
) -> Solved:
    """Return the cheapest plan, proven to `gap` or as far as `work` (1: the usual effort) allows."""
    found = draft(
        problem,
        catalog,
        libraries,
        deadline_s=deadline_s,
        gap=gap,
        work=work,
        log=log,
        derating=derating,
    )
    return Solved(found.plan(), found.allocation)


def draft(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    *,
    deadline_s: float,
    gap: float,
    work: float,
    log: types.Log | None = None,
    derating: Derating | None = None,
    rent_limit: RentLimit | None = None,
) -> Draft:
    """Return the cheapest allocation, see `solve`."""
    end = Deadline(deadline_s)
    running = running_columns(problem, catalog, derating)
    if derating is not None:
        libraries = derating.choose_engines(libraries)
    demands = service_demands(problem, catalog, libraries, derating)
    limits = limits_of(problem, rent_limit)

    def allocated(limits: types.AllocationLimits) -> types.Allocation:
        return _allocate(
            demands,
            supply_of(problem, catalog, rent_limit),
            limits,
            problem.limits.spot_share,
            [column for column, _ in running],
            problem.settings.on_shortage,
            {
                "init_penalty": problem.settings.init_penalty,
                # What was read so far has taken a part of the deadline.
                "deadline_s": end.share(1.0, finish_s(problem)),
                "work": work * WORK,
                "gap": gap,
                "seed": problem.settings.seed,
                "log": log,
            },
        )

    allocation = allocated(limits)
    groups = [group for _, group in running]
    found = Draft(problem, catalog, libraries, allocation, groups, derating)
    if limits.losses is None or survives(found.plan(), problem, catalog):
        return found
    # What counts with its part only in the program may take more with it in truth.
    allocation = allocated(replace(limits, losses=replace(limits.losses, safe=True)))
    if allocation.status not in ("optimal", "feasible"):
        return found
    allocation = with_bound(allocation, found.allocation.bound)
    return replace(found, allocation=allocation)


class _Effort(TypedDict):
    init_penalty: float
    deadline_s: float
    work: float
    gap: float
    seed: int
    log: types.Log | None


def _allocate(
    demands: Sequence[types.ServiceDemand],
    supply: types.Supply,
    limits: types.AllocationLimits,
    spot_share: float | None,
    running: Sequence[types.RunningColumn],
    on_shortage: types.Shortage,
    effort: _Effort,
) -> types.Allocation:
    """Return the cheapest allocation; where spot is limited, over all shares of it that are allowed."""

    def plain(
        services: Sequence[types.ServiceDemand],
        market: types.Supply,
        columns: Sequence[types.RunningColumn],
        shortage: types.Shortage,
    ) -> types.Allocation:
        return allocate(services, market, limits, running=columns, on_shortage=shortage, **effort)

    ways = SpotWays.of(demands, supply, spot_share, running)
    if ways is None:
        return plain(demands, supply, running, on_shortage)
    if ways.share <= 0.0:
        return ways.answer(plain(ways.at(ways.off()), ways.supply, ways.running, on_shortage))
    found = choose_levels(
        ways.services, ways.supply, limits, ways.rows, running=ways.running, **effort
    )
    if found.allocation is None:
        return ways.try_levels(plain, on_shortage, found.levels)
    reason = "spot share" if max(found.error_usd, default=0.0) > 0.0 else None
    return ways.answer(found.allocation, reason=reason)


def redraft(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    cheapest: Plan,
    *,
    deadline_s: float,
    derating: Derating | None = None,
    rent_limit: RentLimit | None = None,
) -> Draft | None:
    """Return the simplest allocation that costs little more than a plan; None if none was found.

    How much that may be, `settings.simplicity` says. What is proven of the plan's cost holds of it, too.
    """
    simplicity, objective = problem.settings.simplicity, cheapest.objective or 0.0
    running = running_columns(problem, catalog, derating)
    columns = [column for column, _ in running]
    if derating is not None:
        libraries = derating.choose_engines(libraries)
    demands = service_demands(problem, catalog, libraries, derating)
    supply, limits = supply_of(problem, catalog, rent_limit), limits_of(problem, rent_limit)
    chosen = _chosen(problem, libraries, cheapest, [group for _, group in running])
    ways = SpotWays.of(demands, supply, problem.limits.spot_share, columns)
    if ways is not None:
        # As much on spot as the cheapest plan has: ways are plain services then.
        on, shares = _on_spot(problem, cheapest)
        demands = list(ways.at(shares))
        supply, columns = ways.supply, list(ways.running)
        chosen = [
            (replace(one, service=2 * one.service + (name in on)), name) for one, name in chosen
        ]
    allocation = simplify(
        demands,
        supply,
        limits,
        [one for one, _ in chosen],
        cheapest.bound or 0.0,
        SimpleGoal(simplicity, objective * (1.0 + simplicity)),
        init_penalty=problem.settings.init_penalty,
        running=columns,
        deadline_s=deadline_s,
        seed=problem.settings.seed,
    )
    if allocation is None:
        return None
    if ways is not None:
        allocation = ways.answer(allocation)
    groups = [group for _, group in running]
    return Draft(problem, catalog, libraries, allocation, groups, derating)


def _chosen(
    problem: Problem, libraries: Libraries, plan: Plan, running: Sequence[Sequence[Instance]]
) -> list[tuple[types.AllocatedInstances, str]]:
    """The instances of a plan as an allocation has them, with their ids; not those that no template makes."""
    names = [service.name for service in problem.services]
    kept = {one.id: number for number, group in enumerate(running) for one in group}
    found: list[tuple[types.AllocatedInstances, str]] = []
    for one in plan.instances:
        place = (names.index(one.service), _PHASES[one.phase], problem.regions.index(one.region), 1)
        if one.kept and one.id in kept:
            found.append((types.AllocatedInstances(*place, running=kept[one.id]), one.id))
            continue
        library = libraries.roles[one.role]
        rows = find_templates(library.counts, libraries.kinds, [one.node_counts])[one.node_counts]
        found += [(types.AllocatedInstances(*place, template=int(r)), one.id) for r in rows[:1]]
    return found


def _on_spot(problem: Problem, plan: Plan) -> tuple[set[str], dict[int, float]]:
    """The instances of a plan that serve on spot, or mostly so, and the levels of each service's ways."""
    on: set[str] = set()
    levels: dict[int, float] = {}
    for m, service in enumerate(problem.services):
        spot = {
            one.id
            for one in plan.instances
            if one.service == service.name and any(node.market == "spot" for node in one.nodes)
        }
        used: dict[str, float] = defaultdict(float)
        share = 0.0
        for route in plan.routes:
            if route.service == service.name:
                risky = bool(spot & {*route.instances})
                share += route.share * risky
                for name in route.instances:
                    used[name] += route.share if risky else -route.share
        # One that serves both counts where it serves more.
        on |= spot | {name for name, more in used.items() if more > 0.0}
        levels |= {2 * m: 1.0 - share, 2 * m + 1: share}
    return on, levels


def service_demands(
    problem: Problem, catalog: Catalog, libraries: Libraries, derating: Derating | None = None
) -> list[types.ServiceDemand]:
    """Return what each service needs and the templates its roles may use."""
    regions = problem.regions
    demands = []
    for service in problem.services:
        allowed = np.array([service.allows(kind) for kind in libraries.kinds])
        roles = []
        for role in service.roles:
            library = libraries.roles[str(role)]
            roles.append(
                types.RoleTemplates(
                    _PHASES[role.phase],
                    library.counts,
                    library.throughput
                    if derating is None
                    else derating.throughput(str(role), library),
                    problem.demand(role),
                )
            )
        moved = handover(problem, catalog, service)
        pairs: tuple[tuple[int, int], ...] = ()
        if moved is not None:
            pairs = tuple(
                sorted(
                    (regions.index(a), regions.index(b))
                    for a, b in moved.pairs
                    if a in regions and b in regions
                )
            )
        demands.append(
            types.ServiceDemand(
                service.name,
                tuple(roles),
                allowed,
                weight=service.priority,
                pairs=pairs,
                kv_bytes_per_s=0.0
                if moved is None
                else moved.bytes_per_request * service.demand_per_s,
            )
        )
    return demands


def supply_of(
    problem: Problem, catalog: Catalog, rent_limit: RentLimit | None = None
) -> types.Supply:
    """Return the offers of a problem as arrays, in the problem's order."""
    offers, regions, kinds = problem.offers, problem.regions, problem.kinds
    cuts = cut_sizes(problem, catalog)
    # Inside a region nothing is limited: only links between regions have a bandwidth.
    link = np.full((len(regions), len(regions)), np.inf)
    for g, a in enumerate(regions):
        for h, b in enumerate(regions):
            if g != h:
                link[g, h] = catalog.links.between(a, b).bandwidth_bytes_per_s
    return types.Supply(
        regions=regions,
        kinds=kinds,
        region=np.array([regions.index(o.region) for o in offers], np.int64),
        gpus=np.array([o.gpus for o in offers], np.int64),
        sizes=tuple(
            tuple(
                (size, kinds.index(kind))
                for size, kind in zip(o.sizes, o.kinds, strict=True)
                if size in cuts[o.key]
            )
            for o in offers
        ),
        spot=np.array([o.market == "spot" for o in offers], np.bool_),
        usd=np.array([o.usd_per_hour for o in offers]),
        available=np.array([o.available for o in offers], np.int64),
        link=link,
        paid=None
        if rent_limit is None
        else np.array([rent_limit.usd_per_hour[o.key] for o in offers]),
    )


def limits_of(problem: Problem, rent_limit: RentLimit | None = None) -> types.AllocationLimits:
    """Return the limits of a problem."""
    limits = problem.limits
    return types.AllocationLimits(
        budget=limits.budget_usd_per_hour if rent_limit is None else rent_limit.budget_usd_per_hour,
        max_nodes=limits.max_nodes,
        spread=limits.spread,
        losses=losses_of(problem),
    )


def losses_of(problem: Problem) -> types.LossLimits | None:
    """Return the losses that a problem's plan must survive, None if there are none."""
    survival = problem.limits.survival
    if not survival.lost:
        return None
    by_region: dict[str, list[int]] = defaultdict(list)
    for g, place in enumerate(problem.regions):
        if kind_of("region", place) not in survival.spared:
            by_region[region_of(place)].append(g)
    zones = [
        (g,)
        for g, place in enumerate(problem.regions)
        if kind_of("zone", place) not in survival.spared
    ]
    regions = [tuple(some) for some in by_region.values()]
    places = [
        tuple(sorted(g for some in lost for g in some))
        for number, units in ((survival.zones, zones), (survival.regions, regions))
        for lost in itertools.combinations(units, min(number, len(units)))
        if lost
    ]
    return types.LossLimits(
        survival.machines,
        tuple(places),
        survival.keep,
        frozenset(survival.services),
        frozenset(
            k
            for k, o in enumerate(problem.offers)
            if kind_of("machine", o.region, o.node_type, o.market) in survival.spared
        ),
    )


def running_columns(
    problem: Problem, catalog: Catalog, derating: Derating | None = None
) -> list[tuple[types.RunningColumn, list[Instance]]]:
    """Return what runs now and may stay, equal instances together, as they run.

    Equal ones hold as many GPUs of the same offers and carry the same under today's promise.
    """
    offers = {offer.key: k for k, offer in enumerate(problem.offers)}
    names = [service.name for service in problem.services]
    groups: dict[tuple[int, int, int, tuple[tuple[int, int], ...], float], list[Instance]]
    groups = defaultdict(list)
    for instance in problem.running:
        # What the problem no longer has keeps nothing.
        if instance.service not in names or instance.region not in problem.regions:
            continue
        service = problem.service(instance.service)
        if instance.role_id not in service.roles:
            continue
        gpus: Counter[int] = Counter()
        stays = True
        for node in instance.nodes:
            k = offers.get((instance.region, node.node_type, node.market))
            # No such offer, no longer cut like this, or a node outside the region: it cannot stay as it is.
            if k is None or node.gpus not in problem.offers[k].sizes or node.region is not None:
                stays = False
                break
            stays = stays and service.allows(node.kind)
            gpus[k] += node.gpus
        if not stays:
            continue
        kept = keep(problem, catalog, instance)
        rate = kept.throughput_per_s * (1.0 if derating is None else derating.share(kept))
        key = (
            names.index(instance.service),
            _PHASES[instance.phase],
            problem.regions.index(instance.region),
            tuple(sorted(gpus.items())),
            rate,
        )
        groups[key].append(instance)
    columns = []
    # In the same order whatever the order of what runs.
    for (index, phase, region, used, rate), group in sorted(groups.items()):
        # Of equal ones the first stands for all.
        nodes = tuple((problem.kinds.index(kind), n) for kind, n in group[0].node_counts)
        column = types.RunningColumn(
            index, phase, region, used, len(group), rate, tuple(sorted(nodes))
        )
        columns.append((column, group))
    return columns


def choose_kept(wanted: Sequence[tuple[Sequence[Instance], int]]) -> list[Instance]:
    """Return so many of each group of equal running instances: those that stand beside others that stay.

    Slices that stay are not moved, so what goes should leave whole machines free.
    """
    kept: list[Instance] = []
    taken: Counter[tuple[str, str, Market, int]] = Counter()
    # Groups that leave no choice come first.
    for group, number in sorted(wanted, key=lambda pair: len(pair[0]) > pair[1]):
        left = list(group)
        for _ in range(number):
            best = max(left, key=lambda one: sum(taken[at] for at, _ in _slices(one)))
            left.remove(best)
            kept.append(best)
            for at, gpus in _slices(best):
                taken[at] += gpus
    return kept


def _slices(instance: Instance) -> list[tuple[tuple[str, str, Market, int], int]]:
    """The machines that an instance has a part of, and how many GPUs."""
    return [
        ((instance.region_of(node), node.node_type, node.market, node.slot), node.gpus)
        for node in instance.nodes
        if node.slot is not None and node.gpu_ids is not None
    ]


class _TakenSlices:
    """Slices that an allocation takes, handed out to its new instances: one's own first and spot last."""

    def __init__(self, problem: Problem, slices: dict[tuple[int, int], int]) -> None:
        self._offers = problem.offers
        self._left: dict[tuple[str, str], list[tuple[int, str, Market]]] = defaultdict(list)
        for (k, gpus), number in sorted(slices.items()):
            offer = problem.offers[k]
            kind = dict(zip(offer.sizes, offer.kinds, strict=True))[gpus]
            source = (_MARKETS.index(offer.market), offer.node_type, offer.market)
            self._left[offer.region, kind] += [source] * number
        # `take` pops from the end: what is first in `_MARKETS` goes first.
        for sources in self._left.values():
            sources.sort(reverse=True)

    def reserve(self, places: Iterable[types.NodePlace]) -> None:
        """Keep slices of certain machines from those who may have any."""
        for place in places:
            kind, node_type, market = self._source(place)
            source = (_MARKETS.index(market), node_type, market)
            self._left[self._offers[place.offer].region, kind].remove(source)

    def split(
        self, chosen: types.AllocatedInstances, kinds: Counter[str]
    ) -> list[list[types.NodePlace]]:
        """Return the places of each of some equal instances: nodes of one on as few machines as can be."""
        left: dict[str, list[types.NodePlace]] = defaultdict(list)
        for place in sorted(chosen.places, key=lambda p: (p.offer, p.slot, p.gpus)):
            left[self._source(place)[0]].append(place)
        each: list[list[types.NodePlace]] = []
        for _ in range(chosen.number):
            own = [place for kind, n in sorted(kinds.items()) for place in left[kind][:n]]
            for kind, n in kinds.items():
                del left[kind][:n]
            each.append(own)
        return each

    def take(
        self, region: str, kinds: Counter[str], placed: Sequence[types.NodePlace]
    ) -> tuple[dict[Source, int], dict[Source, tuple[int, ...]]]:
        """Take nodes by kind in a region, some of them of certain machines.

        Returns how many of each (kind, node type, market), and which machines those are of.
        """
        taken: Counter[Source] = Counter()
        slots: dict[Source, tuple[int, ...]] = {}
        for place in placed:
            source = self._source(place)
            taken[source] += 1
            slots[source] = (*slots.get(source, ()), place.slot)
        for kind, number in sorted(kinds.items()):
            for _ in range(number - sum(n for source, n in taken.items() if source[0] == kind)):
                _, node_type, market = self._left[region, kind].pop()
                taken[kind, node_type, market] += 1
        return dict(taken), slots

    def _source(self, place: types.NodePlace) -> Source:
        offer = self._offers[place.offer]
        kind = dict(zip(offer.sizes, offer.kinds, strict=True))[place.gpus]
        return kind, offer.node_type, offer.market
