"""Published rules for renting, on the same problem and through the same validator, to compare with.

homogeneous          Coral's Homo: every replica on nodes of one type; for each model and phase, greedily the
                     replica with the most throughput per dollar, as many as demand needs.
cauchy               Cauchy as Coral adapts it: per model a combination of one homogeneous prefill replica and
                     the homogeneous decode replicas it can feed; an integer program meets all demands at
                     the best sum of per-model cost efficiencies, read as dollars per request and second.
                     With equal rates that is the least cost over such combinations, the strongest reading.
memory-proportional  OpenFabric's memP: each model gets a share of every kind of node in proportion to arrival
                     rate times model size, and serves from that share with homogeneous replicas.

`gh` and `agh`, which choose models as well, are in `choosing.joint_fleet`.

`homogeneous-node` and `cauchy-node` are the same with replicas of a single node each, tensor-parallel inside:
what the paper's runs of both show. The others may also be pipelines over several equal nodes, which makes
them stronger.

Replicas come from the same exact layouts as Atoll's own templates, so a baseline never loses by a bad cut of
layers. They have whole machines. Where the last greedy replica would overshoot, the cheapest replica that
covers the rest is taken instead; prefill and decode of a request stand in one region; and where phases may
run apart or together, the greedy ones take the cheaper path. The papers do not say so, and it can only help
the baseline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase, RoleId
from atoll.plan.plan import Market, Plan
from atoll.plan.problem import Offer, Problem, Service
from atoll.solve.assembly import NewInstance, plan_from_layouts
from atoll.solve.lp import LinearProgram, Sparse
from atoll.solve.templates.library import Libraries

_DEMAND_TOLERANCE = 1e-9
"""Share of a demand that rounding may leave unserved."""
_CAUCHY_SECONDS = 30.0
"""Safety net of one integer program."""
_CAUCHY_ITERATIONS = 100_000
"""Simplex iterations of one integer program."""
_MAX_DECODES = 8
"""Decode replicas that one prefill replica may feed."""
_BISECTIONS = 12
"""Bisections of a share of demand: to 0.03 %."""


@dataclass(frozen=True)
class HomogeneousReplica:
    """A homogeneous replica: `count` nodes of one type in one region, offered at one price."""

    role: str
    offer: int
    region: str
    node_type: str
    market: Market
    count: int
    throughput: float
    usd: float

    @property
    def efficiency(self) -> float:
        """Throughput per dollar; a node of one's own is the better the more it carries."""
        return self.throughput / max(self.usd, 1e-6)


def replicas(
    problem: Problem, libraries: Libraries, max_nodes: int | None = None
) -> dict[str, list[HomogeneousReplica]]:
    """Return every homogeneous replica of every role on every offer, best per dollar first."""
    by_role: dict[str, list[HomogeneousReplica]] = {}
    limit = max_nodes or problem.settings.max_nodes_per_instance
    # Roles that are asked the same share their capacities.
    shared: dict[int, dict[tuple[int, int], float]] = {}
    for role in problem.roles:
        library = libraries.roles[str(role)]
        tables = library.tables
        rates = shared.setdefault(id(tables), {})
        options: list[HomogeneousReplica] = []
        for index, offer in enumerate(problem.offers):
            c = libraries.kinds.index(offer.node_type)
            for count in range(1, limit + 1):
                if count * tables.memory_bytes[c] > tables.memory_limit and count > 1:
                    break
                if (c, count) not in rates:
                    counts = np.zeros(len(libraries.kinds), np.int8)
                    counts[c] = count
                    rates[c, count] = library.layout_of(counts).throughput
                rate = rates[c, count]
                if rate > 0.0:
                    usd = offer.usd_per_hour * count
                    options.append(
                        HomogeneousReplica(
                            str(role),
                            index,
                            offer.region,
                            offer.node_type,
                            offer.market,
                            count,
                            rate,
                            usd,
                        )
                    )
        options.sort(key=lambda r: (-r.efficiency, r.usd, r.region, r.node_type, r.market, r.count))
        by_role[str(role)] = options
    return by_role


class _Stock:
    """Nodes left of each offer."""

    def __init__(self, available: Sequence[int]) -> None:
        self.left = list(available)

    def fits(self, replica: HomogeneousReplica) -> int:
        """Return how many of this replica the stock still allows."""
        return self.left[replica.offer] // replica.count

    def take(self, replica: HomogeneousReplica, number: int) -> None:
        self.left[replica.offer] -= replica.count * number

    def copy(self) -> _Stock:
        return _Stock(self.left)


def _greedy(
    replicas_of_role: list[HomogeneousReplica], demand: float, stock: _Stock
) -> list[tuple[HomogeneousReplica, int]]:
    """Cover a demand with the most efficient replicas that the stock allows."""
    taken: list[tuple[HomogeneousReplica, int]] = []
    rest = demand
    while rest > _DEMAND_TOLERANCE * max(1.0, demand):
        best = next((r for r in replicas_of_role if stock.fits(r) > 0), None)
        if best is None:
            break
        number = min(stock.fits(best), int(rest // best.throughput))
        if number == 0:
            # The last one: whatever covers the rest at the lowest price.
            covering = [r for r in replicas_of_role if r.throughput >= rest and stock.fits(r) > 0]
            best = min(covering, key=lambda r: (r.usd, -r.throughput), default=best)
            number = 1
        stock.take(best, number)
        taken.append((best, number))
        rest -= best.throughput * number
    return taken


Taken = list[tuple[HomogeneousReplica, int]]


@dataclass(frozen=True)
class _ServicePath:
    """How requests of a service can be served in a region: by replicas of one role or of one each of two."""

    region: str
    roles: tuple[str, ...]
    units: tuple[float, ...]
    options: tuple[list[HomogeneousReplica], ...]

    def price(self, stock: _Stock) -> float:
        """Return dollars per request and second with the best replicas left, inf where one is missing."""
        usd = 0.0
        for unit, options in zip(self.units, self.options, strict=True):
            best = next((r for r in options if stock.fits(r) > 0), None)
            usd += math.inf if best is None else unit / best.efficiency
        return usd

    def cover(self, rate: float, stock: _Stock) -> Taken | None:
        """Take replicas for so many requests per second out of the stock, None where it has too few.

        Roles take what they like best in turn; where that leaves too little, in the other order.
        """
        both = list(zip(self.units, self.options, strict=True))
        for order in (both, both[::-1]):
            trial, taken = stock.copy(), list[tuple[HomogeneousReplica, int]]()
            for unit, options in order:
                own = _greedy(options, rate * unit, trial)
                if sum(r.throughput * n for r, n in own) < rate * unit * (1 - _DEMAND_TOLERANCE):
                    break
                taken += own
            else:
                stock.left = trial.left
                return taken
        return None


def _service_paths(
    problem: Problem, service: Service, every: dict[str, list[HomogeneousReplica]]
) -> list[_ServicePath]:
    """Return the ways in which a service's requests can be served, region by region."""
    roles = {role.phase: str(role) for role in service.roles}
    apart = (Phase.PREFILL, Phase.DECODE)
    kinds = [(Phase.BOTH,)] if Phase.BOTH in roles else []
    chains = [*kinds, *([apart] if Phase.PREFILL in roles else [])]
    paths = []
    for region in problem.regions:
        for chain in chains:
            names = tuple(roles[phase] for phase in chain)
            options = tuple([r for r in every[name] if r.region == region] for name in names)
            units = tuple(problem.demand(name) / service.demand_per_s for name in names)
            paths.append(_ServicePath(region, names, units, options))
    return paths


def _cover(
    problem: Problem,
    service: Service,
    every: dict[str, list[HomogeneousReplica]],
    stock: _Stock,
) -> Taken:
    """Serve a service greedily: the cheapest path first, as much of it as the stock allows."""
    taken: Taken = []
    if service.demand_per_s <= 0.0:
        return taken
    paths = _service_paths(problem, service, every)
    rest = service.demand_per_s
    while paths and rest > _DEMAND_TOLERANCE * service.demand_per_s:
        path = min(paths, key=lambda w: (w.price(stock), w.region, w.roles))
        if math.isinf(path.price(stock)):
            break
        rate = _max_rate(path, rest, stock)
        own = path.cover(rate, stock) if rate > 0.0 else None
        if own is None:
            paths.remove(path)
            continue
        taken += own
        rest -= rate
        if rate < rest:
            paths.remove(path)
    return taken


def _max_rate(path: _ServicePath, rate: float, stock: _Stock) -> float:
    """Return how many requests per second, up to `rate`, a path can serve out of the stock."""
    if path.cover(rate, stock.copy()) is not None:
        return rate
    low, high = 0.0, rate
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if path.cover(middle, stock.copy()) is None:
            high = middle
        else:
            low = middle
    return low


def plan_homogeneous(
    problem: Problem, catalog: Catalog, libraries: Libraries, *, max_nodes: int | None = None
) -> Plan:
    """Return the plan of greedy homogeneous replicas, models in the problem's order."""
    stock = _Stock([offer.available for offer in problem.offers])
    every = replicas(problem, libraries, max_nodes)
    taken: Taken = []
    for service in problem.services:
        taken += _cover(problem, service, every, stock)
    name = "homogeneous-node" if max_nodes == 1 else "homogeneous"
    return plan_replicas(problem, catalog, libraries, taken, name)


def plan_memory_proportional(problem: Problem, catalog: Catalog, libraries: Libraries) -> Plan:
    """Return the plan in which each model serves from its share of every offer."""
    weights = {
        service.name: service.rate_per_s * catalog.model(service.model).llm.weight_bytes
        for service in problem.services
    }
    total = sum(weights.values()) or 1.0
    every = replicas(problem, libraries)
    taken: Taken = []
    shares = _shares(problem.offers, {name: w / total for name, w in weights.items()})
    for service in problem.services:
        taken += _cover(problem, service, every, _Stock(shares[service.name]))
    return plan_replicas(problem, catalog, libraries, taken, "memory-proportional")


def _shares(offers: Iterable[Offer], weights: dict[str, float]) -> dict[str, list[int]]:
    """Divide the nodes of each offer by weight: whole nodes, largest remainders first."""
    out: dict[str, list[int]] = {name: [] for name in weights}
    for offer in offers:
        exact = {name: offer.available * weight for name, weight in weights.items()}
        whole = {name: int(value) for name, value in exact.items()}
        spare = offer.available - sum(whole.values())
        order = sorted(weights, key=lambda name: (whole[name] - exact[name], name))
        for name in order[:spare]:
            whole[name] += 1
        for name in weights:
            out[name].append(whole[name])
    return out


@dataclass(frozen=True)
class Combination:
    """One prefill replica and the decode replicas it feeds, in one region."""

    service: int
    prefill: HomogeneousReplica
    decode: HomogeneousReplica
    decodes: int
    requests: float

    @property
    def usd(self) -> float:
        """USD per hour of all its replicas."""
        return self.prefill.usd + self.decodes * self.decode.usd

    @property
    def uses(self) -> Counter[int]:
        """Nodes of each offer that it takes."""
        uses = Counter({self.prefill.offer: self.prefill.count})
        uses[self.decode.offer] += self.decodes * self.decode.count
        return uses


def plan_cauchy(
    problem: Problem, catalog: Catalog, libraries: Libraries, *, max_nodes: int | None = None
) -> Plan:
    """Return the plan of prefill-decode combinations with the best per-model cost efficiency."""
    every = replicas(problem, libraries, max_nodes)
    chosen = _solve_cauchy(problem, combinations(problem, every))
    taken: list[tuple[HomogeneousReplica, int]] = []
    for combination, number in chosen:
        taken += [(combination.prefill, number), (combination.decode, number * combination.decodes)]
    # Services whose phases run together have no pairs: they are served as in `plan_homogeneous`.
    stock = _Stock([offer.available for offer in problem.offers])
    for replica, number in taken:
        stock.take(replica, number)
    for service in problem.services:
        if service.phases == "together":
            taken += _cover(problem, service, every, stock)
    name = "cauchy-node" if max_nodes == 1 else "cauchy"
    return plan_replicas(problem, catalog, libraries, taken, name)


def combinations(problem: Problem, every: dict[str, list[HomogeneousReplica]]) -> list[Combination]:
    """Per model and region: for each pair of node types the best ratio of decode to prefill replicas."""
    found = []
    for index, service in enumerate(problem.services):
        if service.phases == "together":
            continue
        first, second = (
            _best_per_offer(every[str(RoleId(service.name, "llm", phase))])
            for phase in (Phase.PREFILL, Phase.DECODE)
        )
        for p in first:
            for d in second:
                if p.region != d.region:
                    continue
                feeds = p.throughput / service.lengths.input_mean
                eats = d.throughput / service.lengths.output_mean
                options = []
                for decodes in range(1, _MAX_DECODES + 1):
                    rate = min(feeds, decodes * eats)
                    options.append(Combination(index, p, d, decodes, rate))
                found.append(min(options, key=lambda c: (c.usd / c.requests, c.decodes)))
    return found


def _best_per_offer(sorted_replicas: list[HomogeneousReplica]) -> list[HomogeneousReplica]:
    """The most efficient replica on each offer."""
    best: dict[int, HomogeneousReplica] = {}
    for replica in sorted_replicas:
        best.setdefault(replica.offer, replica)
    return list(best.values())


def _solve_cauchy(
    problem: Problem, combinations: list[Combination]
) -> list[tuple[Combination, int]]:
    """Meet every demand, or the largest common fraction of all, at the least dollars per request."""
    apart = [
        i for i, s in enumerate(problem.services) if s.phases != "together" and s.demand_per_s > 0
    ]
    combinations = [c for c in combinations if c.service in apart]
    if not combinations or not apart:
        return []
    fraction = 1.0
    low = 0.0
    answer = _meet(problem, combinations, apart, fraction)
    if answer is not None:
        return answer
    # A model that no combination in stock can carry would drag the others down to nothing.
    stock = [offer.available for offer in problem.offers]
    usable = [c for c in combinations if _in_stock(c, stock)]
    apart = [i for i in apart if any(c.service == i for c in usable)]
    combinations = [c for c in usable if c.service in apart]
    if not combinations:
        return []
    # Scarcity: scale all demands down until a solution exists, as Coral's section 6.4 does.
    best: list[tuple[Combination, int]] = []
    for _ in range(_BISECTIONS):
        middle = (low + fraction) / 2.0
        scaled = _meet(problem, combinations, apart, middle)
        if scaled is None:
            fraction = middle
        else:
            low, best = middle, scaled
    return best


def _in_stock(combination: Combination, stock: list[int]) -> bool:
    return all(stock[offer] >= number for offer, number in combination.uses.items())


def _meet(
    problem: Problem, combinations: list[Combination], apart: list[int], fraction: float
) -> list[tuple[Combination, int]] | None:
    lp = LinearProgram(problem.settings.seed)
    demand = np.array([problem.services[i].demand_per_s * fraction for i in apart])
    stock = np.array([float(offer.available) for offer in problem.offers])
    rows = len(demand) + len(stock)
    lower = np.concatenate([demand, np.full(len(stock), -np.inf)])
    upper = np.concatenate([np.full(len(demand), np.inf), stock])
    empty = np.zeros(0, np.int64)
    lp.add_rows(lower, upper, Sparse.of(empty, empty, np.zeros(0), rows))
    owner, index, value = [], [], []
    for column, c in enumerate(combinations):
        entries = [(apart.index(c.service), c.requests)]
        entries += [(len(demand) + offer, float(n)) for offer, n in c.uses.items()]
        for row, amount in entries:
            owner.append(column)
            index.append(row)
            value.append(amount)
    rates = [max(service.rate_per_s, 1e-9) for service in problem.services]
    cost = np.array([c.usd / rates[c.service] for c in combinations])
    number = len(combinations)
    matrix = Sparse.of(
        np.array(owner, np.int64), np.array(index, np.int64), np.array(value), number
    )
    lp.add_columns(cost, np.zeros(number), np.full(number, np.inf), matrix)
    lp.set_integer(np.arange(number, dtype=np.int64))
    result = lp.solve_mip(
        time_limit_s=_CAUCHY_SECONDS, gap=1e-4, iteration_limit=_CAUCHY_ITERATIONS
    )
    if result.values is None:
        return None
    counts = np.round(result.values).astype(int)
    return [(c, int(n)) for c, n in zip(combinations, counts, strict=True) if n > 0]


def plan_replicas(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    taken: Iterable[tuple[HomogeneousReplica, int]],
    solver: str,
) -> Plan:
    """Return the plan of so many replicas each."""
    chosen = []
    for replica, number in taken:
        counts = np.zeros(len(libraries.kinds), np.int8)
        counts[libraries.kinds.index(replica.node_type)] = replica.count
        layout = libraries.roles[replica.role].layout_of(counts)
        rented = {(replica.node_type, replica.node_type, replica.market): replica.count}
        chosen += [NewInstance(replica.role, replica.region, layout, rented)] * number
    return plan_from_layouts(
        problem,
        catalog,
        chosen,
        status="feasible",
        solver=solver,
        reasons=(f"baseline {solver}: no bound is known",),
    )


BASELINES: dict[str, Callable[[Problem, Catalog, Libraries], Plan]] = {
    "homogeneous": plan_homogeneous,
    "homogeneous-node": partial(plan_homogeneous, max_nodes=1),
    "cauchy": plan_cauchy,
    "cauchy-node": partial(plan_cauchy, max_nodes=1),
    "memory-proportional": plan_memory_proportional,
}
