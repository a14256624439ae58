"""The cheapest plan of a small problem by one integer program, written from the problem.

Shares no code with the solvers: `plan.capacities` says what nodes carry, `plan.handover` where KV may go.
With every layout of at most `max_nodes_per_instance` nodes worth having (`rent_layouts`), for services m,
regions g, h, offers k of machines with gpus_k GPUs, sizes s:

    n[r, g, t]   instances of layout t of role r to start in region g        whole numbers
    y[i]         1 where running instance i stays, with its own layout       0 or 1
    b[k]         machines rented, w[k, s] new slices of s GPUs of them       whole numbers
    a[m, g, h]   share of m's requests prefilled in g and decoded in h (only g = h, or where the link allows)
    t[m, g]      share of m's requests that run together in g

    sum_k w[k, s] = slices of s GPUs that the new instances in the region have, by GPU type
    gpus_k b[k] >= sum_s s (w[k, s] + slices that kept instances have of k),     b[k] <= available_k
    demand(m prefill) sum_h a[m, g, h] <= throughput of prefill instances in g, decode and together likewise
    sum_m demand_m a[m, g, h] KV bytes of a prompt <= bandwidth from g to h                          (g != h)
    budget, number of machines
    every role that stands stands in `spread` regions

Where spot is limited, n, y, w and t are there twice, off spot and on it, and a four times, for both sides of
either phase. Instances off spot take slices of other markets only, those on spot slices of any; requests that
an instance on spot serves, in any phase, are at most `spot_share` of what is served.

    served[m] = sum of a and t; cost = sum_k usd_k b[k] + K sum_k,s usd_k s / gpus_k w[k, s]

Solved by HiGHS through scipy, which may share a process with the planner. A found answer is rounded and held
against every row again; `proved` is false where that fails or time ran out.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.catalog import Catalog
from atoll.core.ids import Phase, RoleId, format_node_type, parse_node_type
from atoll.perf.memory_model import position_of
from atoll.plan.capacities import node_capacity
from atoll.plan.handover import cut_sizes, handover
from atoll.plan.plan import Instance
from atoll.plan.problem import Offer, Problem, Service
from tests.reference.engine_layouts import engine_cuts
from tests.reference.quiet import silence_output
from tests.reference.rent_layouts import Kinds, best_cuts, rates_by_kind, worth_having

Floats = NDArray[np.float64]
Terms = Mapping[int, float]

STANDS = 1e-4
"""Share of its demand that a service must get to count as served at all."""
_EXACT = 2e-6
"""What rounding may leave of a row of the program, whose rows are of the order of 1."""
_WHOLE = 1e-4
_HAIR = 1e-7
"""Share of what is asked for that rounding may cost."""


@dataclass(frozen=True)
class Optimum:
    """What the program found: the value, what is proven of it, and the plan in words.

    `value` is None where there is no answer (`proved`: because there is none). `bound` is never worse than
    the true optimum: below the least cost, above the largest share. `values` are those of the variables.
    """

    value: float | None
    bound: float | None
    proved: bool
    chosen: tuple[str, ...] = ()
    served: Mapping[str, float] = field(default_factory=dict)
    values: Floats = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)


@dataclass
class _Program:
    """A mixed-integer program in the making."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def variable(self, high: float = np.inf, *, whole: bool = False) -> int:
        self.low.append(0.0)
        self.high.append(high)
        self.whole.append(whole)
        return len(self.low) - 1

    def row(self, terms: Terms, low: float = -np.inf, high: float = np.inf) -> None:
        kept = {column: value for column, value in terms.items() if value != 0.0}
        if kept:
            self.rows.append((kept, low, high))

    def minimise(
        self, cost: Terms, more: Iterable[tuple[Terms, float, float]], time_limit_s: float
    ) -> tuple[float | None, float | None, bool, Floats]:
        """Return value, bound, whether proven, and the values of all variables."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        size = len(self.low)
        objective = np.zeros(size)
        for column, value in cost.items():
            objective[column] += value
        rows = [*self.rows, *((dict(t), a, b) for t, a, b in more if t)]
        entries = [(r, c, v) for r, (terms, _, _) in enumerate(rows) for c, v in terms.items()]
        index = np.array([(r, c) for r, c, _ in entries], np.int64).reshape(-1, 2).T
        matrix = coo_array(
            (np.array([v for _, _, v in entries]), (index[0], index[1])), shape=(len(rows), size)
        ).tocsr()
        least = np.array([low for _, low, _ in rows])
        most = np.array([high for _, _, high in rows])
        with silence_output():
            found = milp(
                objective,
                constraints=LinearConstraint(matrix, least, most),
                integrality=np.array(self.whole, np.int64),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
            )
        if found.status == 2:
            return None, None, True, np.zeros(0)
        if found.x is None:
            return None, found.mip_dual_bound, False, np.zeros(0)
        whole = np.array(self.whole)
        x = np.where(whole, np.round(found.x), found.x)
        reached = matrix @ x
        holds = bool(
            np.all(np.abs(x - found.x) <= _WHOLE)
            and np.all(reached >= least - _EXACT * (1.0 + np.abs(least)))
            and np.all(reached <= most + _EXACT * (1.0 + np.abs(most)))
        )
        return float(objective @ x), found.mip_dual_bound, holds and found.status == 0, x


@dataclass(frozen=True)
class _Column:
    """Instances that may stand: a layout of a role in a region, or one that runs there now."""

    role: RoleId
    region: str
    kinds: Kinds
    throughput: float
    variable: int
    running: Instance | None = None
    on_spot: bool = False


class RentReference:
    """The program of one problem; ask it for the least cost or the most that can be served."""

    def __init__(self, problem: Problem, catalog: Catalog, *, time_limit_s: float = 60.0) -> None:
        self.problem, self.catalog, self.time_limit_s = problem, catalog, time_limit_s
        self.program = _Program()
        self.cost: dict[int, float] = defaultdict(float)
        self.columns: list[_Column] = []
        self.machines = {
            offer.key: self.program.variable(offer.available, whole=True)
            for offer in problem.offers
        }
        limit = problem.limits.spot_share
        self.sides = (False,) if limit is None else (False, True)
        self.wanted = [s for s in problem.services if s.demand_per_s > 0.0]
        for service in self.wanted:
            for role in service.roles:
                self._add_layouts(role)
        for instance in problem.running:
            self._add_running(instance)
        self._rent()
        self.crossing: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self.shares = {service.name: self._serve(service) for service in self.wanted}
        self._links()
        self._limits()
        self._spread()

    # What can stand.

    def _add_layouts(self, role: RoleId) -> None:
        problem = self.problem
        for kinds, throughput in layouts(problem, self.catalog, role).items():
            for region in problem.regions:
                most = min(
                    self._slices(region, kind) // count for kind, count in Counter(kinds).items()
                )
                for side in self.sides if most > 0 else ():
                    variable = self.program.variable(most, whole=True)
                    column = _Column(role, region, kinds, throughput, variable, on_spot=side)
                    self.columns.append(column)

    def _slices(self, region: str, kind: str) -> int:
        """How many slices of this kind all machines of a region give."""
        gpus = parse_node_type(kind).gpu_count
        return sum(
            offer.available * (offer.gpus // gpus)
            for offer in self.problem.offers
            if offer.region == region and kind in offer.kinds
        )

    def _add_running(self, instance: Instance) -> None:
        problem = self.problem
        names = {str(role) for service in self.wanted for role in service.roles}
        if instance.role not in names:
            return
        service = problem.service(instance.service)
        for node in instance.nodes:
            offer = problem.offer(instance.region_of(node), node.node_type, node.market)
            if offer is None or node.gpus not in offer.sizes or not service.allows(node.kind):
                return
        throughput = own_throughput(problem, self.catalog, instance)
        if throughput > 0.0:
            kinds = tuple(sorted(node.kind for node in instance.nodes))
            spot = any(node.market == "spot" for node in instance.nodes)
            stays: dict[int, float] = {}
            for side in self.sides:
                if spot and not side and len(self.sides) > 1:
                    continue
                variable = self.program.variable(1.0, whole=True)
                stays[variable] = 1.0
                self.columns.append(
                    _Column(
                        instance.role_id,
                        instance.region,
                        kinds,
                        throughput,
                        variable,
                        instance,
                        side,
                    )
                )
            self.program.row(stays, high=1.0)

    # What it takes.

    def _rent(self) -> None:
        problem, program = self.problem, self.program
        self.slices: dict[tuple[str, str, str], dict[int, int]] = {}
        sources: dict[tuple[str, str, bool], dict[int, float]] = defaultdict(dict)
        cuts = cut_sizes(problem, self.catalog)
        for offer in problem.offers:
            gpu = parse_node_type(offer.node_type).gpu
            new: dict[int, int] = {}
            for size in cuts[offer.key]:
                for side in self.sides:
                    if len(self.sides) > 1 and not side and offer.market == "spot":
                        continue
                    most = offer.available * (offer.gpus // size)
                    slices = program.variable(most, whole=True)
                    new[slices] = size
                    sources[offer.region, format_node_type(gpu, size), side][slices] = -1.0
                    penalty = problem.settings.init_penalty * offer.usd_per_hour * size / offer.gpus
                    self.cost[slices] += penalty
            self.slices[offer.key] = new
            self.cost[self.machines[offer.key]] += offer.usd_per_hour
        for column in self.columns:
            if column.running is None:
                for kind, count in Counter(column.kinds).items():
                    own = sources[column.region, kind, column.on_spot]
                    own[column.variable] = float(count)
        for terms in sources.values():
            program.row(terms, 0.0, 0.0)
        for offer in problem.offers:
            used = self._gpus(offer)
            program.row({**used, self.machines[offer.key]: -float(offer.gpus)}, high=0.0)

    def _gpus(self, offer: Offer) -> dict[int, float]:
        """GPUs of an offer in use, as terms: new slices and those of running instances that stay."""
        terms = {variable: float(size) for variable, size in self.slices[offer.key].items()}
        for column in self.columns:
            if column.running is None:
                continue
            gpus = sum(
                node.gpus
                for node in column.running.nodes
                if (column.running.region_of(node), node.node_type, node.market) == offer.key
            )
            if gpus:
                terms[column.variable] = float(gpus)
        return terms

    # What it serves.

    def _serve(self, service: Service) -> dict[int, float]:
        """Add the ways of a service's requests; returns their shares as terms."""
        program, regions = self.program, self.problem.regions
        names = {role.phase: role for role in service.roles}
        risky: dict[int, bool] = {}
        through: dict[tuple[Phase, str, bool], dict[int, float]] = defaultdict(dict)
        if Phase.PREFILL in names:
            moving = handover(self.problem, self.catalog, service)
            assert moving is not None
            links = sorted({(g, g) for g in regions} | moving.pairs)
            for (g, h), first, second in itertools.product(links, self.sides, self.sides):
                way = program.variable(1.0)
                risky[way] = first or second
                through[Phase.PREFILL, g, first][way] = 1.0
                through[Phase.DECODE, h, second][way] = 1.0
                if g != h:
                    per_s = service.demand_per_s * moving.bytes_per_request
                    self.crossing[g, h][way] = per_s
        if Phase.BOTH in names:
            for g, side in itertools.product(regions, self.sides):
                way = program.variable(1.0)
                risky[way] = side
                through[Phase.BOTH, g, side][way] = 1.0
        for (phase, g, side), ways in through.items():
            self._cover(names[phase], g, ways, side)
        shares = dict.fromkeys(risky, 1.0)
        program.row(shares, high=1.0)
        limit = self.problem.limits.spot_share
        if limit is not None:
            program.row({way: on - limit for way, on in risky.items()}, high=0.0)
        return shares

    def _cover(self, role: RoleId, region: str, ways: Terms, side: bool) -> None:
        """The ways through a role in a region carry no more than its instances there."""
        demand = self.problem.demand(role)
        terms = dict(ways)
        for column in self.columns:
            if (column.role, column.region, column.on_spot) == (role, region, side):
                # No more than all requests come: what an instance could do beyond is nothing.
                terms[column.variable] = -min(1.0, column.throughput / demand)
        self.program.row(terms, high=0.0)

    def _links(self) -> None:
        links = self.catalog.links
        for (g, h), terms in sorted(self.crossing.items()):
            limit = links.between(g, h).bandwidth_bytes_per_s
            self.program.row({way: size / limit for way, size in terms.items()}, high=1.0)

    # What may not be exceeded.

    def _limits(self) -> None:
        problem, program = self.problem, self.program
        limits = problem.limits
        rent = {self.machines[o.key]: o.usd_per_hour for o in problem.offers}
        if limits.budget_usd_per_hour is not None:
            scale = max(1.0, limits.budget_usd_per_hour)
            terms = {column: usd / scale for column, usd in rent.items()}
            program.row(terms, high=limits.budget_usd_per_hour / scale)
        if limits.max_nodes is not None:
            program.row(dict.fromkeys(rent, 1.0), high=float(limits.max_nodes))

    def _spread(self) -> None:
        spread = self.problem.limits.spread
        if spread < 2:
            return
        program = self.program
        for role in sorted({column.role for column in self.columns}, key=str):
            own = [column for column in self.columns if column.role == role]
            stands = program.variable(1.0, whole=True)
            regions: dict[int, float] = {}
            for region in sorted({column.region for column in own}):
                here = program.variable(1.0, whole=True)
                regions[here] = 1.0
                there = {c.variable: -1.0 for c in own if c.region == region}
                program.row({here: 1.0, **there}, high=0.0)
            for column in own:
                most = program.high[column.variable]
                program.row({column.variable: 1.0, stands: -most}, high=0.0)
            program.row({**regions, stands: -float(spread)}, low=0.0)

    # Questions.

    def min_cost(self, served: Mapping[str, float] | None = None) -> Optimum:
        """Return the least cost of serving at least these shares, by service; all of everything if None."""
        asked = served or {service.name: 1.0 for service in self.wanted}
        rows = [
            (self.shares[name], min(1.0, asked.get(name, 0.0)) * (1.0 - _HAIR), np.inf)
            for name in self.shares
        ]
        return self._ask(self.cost, rows, 1.0)

    def most_common(self, services: Iterable[str] | None = None) -> Optimum:
        """Return the largest share that every one of these services can get at once."""
        names = [s.name for s in self.wanted] if services is None else sorted(services)
        common = self._common
        rows = [({**self.shares[name], common: -1.0}, 0.0, np.inf) for name in names]
        return self._ask({common: -1.0}, rows, -1.0)

    def max_weighted(self) -> Optimum:
        """Return the largest mean share, services weighing what their priority says."""
        total = sum(service.priority for service in self.wanted)
        terms: dict[int, float] = {}
        for service in self.wanted:
            for way in self.shares[service.name]:
                terms[way] = -service.priority / total
        return self._ask(terms, [], -1.0)

    def max_standing(self) -> Optimum:
        """Return how many services can get something at once."""
        rows = []
        for service, flag in self._flags.items():
            rows.append(({**self.shares[service], flag: -STANDS}, 0.0, np.inf))
        return self._ask(dict.fromkeys(self._flags.values(), -1.0), rows, -1.0)

    @cached_property
    def _common(self) -> int:
        return self.program.variable(1.0)

    @cached_property
    def _flags(self) -> dict[str, int]:
        return {s.name: self.program.variable(1.0, whole=True) for s in self.wanted}

    def _ask(self, cost: Terms, rows: Sequence[tuple[Terms, float, float]], sign: float) -> Optimum:
        value, bound, proved, x = self.program.minimise(cost, rows, self.time_limit_s)
        if value is None:
            return Optimum(None, None if bound is None else sign * bound, proved)
        limit = value if bound is None else bound
        return Optimum(
            sign * value, sign * limit, proved, tuple(self._describe(x)), self._served(x), x
        )

    def _served(self, x: Floats) -> dict[str, float]:
        return {name: float(sum(x[way] for way in ways)) for name, ways in self.shares.items()}

    def _describe(self, x: Floats) -> Iterable[str]:
        for column in self.columns:
            number = round(x[column.variable])
            if number:
                what = " + ".join(column.kinds)
                kept = " (runs now)" if column.running is not None else ""
                yield f"{number}x {column.role} in {column.region}: {what}, {column.throughput:g}/s{kept}"
        for offer in self.problem.offers:
            number = round(x[self.machines[offer.key]])
            if number:
                new = Counter(
                    {s: round(x[v]) for v, s in self.slices[offer.key].items() if round(x[v])}
                )
                yield f"{number}x {' '.join(offer.key)} at ${offer.usd_per_hour:g}/h, new slices {new}"


def layouts(problem: Problem, catalog: Catalog, role: RoleId) -> dict[Kinds, float]:
    """Return what every set of nodes worth having carries of a role, by its kinds."""
    if problem.settings.engines:
        found = worth_having(engine_cuts(problem, catalog, role))
        return {kinds: cut.throughput for kinds, cut in found.items()}
    model = catalog.model(problem.service_of(role).model).llm
    cuts = best_cuts(
        rates_by_kind(problem, catalog, role),
        problem.settings.max_nodes_per_instance,
        {kind: float(catalog.node(kind).memory_bytes) for kind in problem.kinds},
        problem.settings.memory_ratio * model.weight_bytes,
    )
    return {kinds: cut.throughput for kinds, cut in worth_having(cuts).items()}


def own_throughput(problem: Problem, catalog: Catalog, instance: Instance) -> float:
    """Return what a running instance carries as it stands: stage by stage, the slowest counts."""
    service = problem.service(instance.service)
    spec = catalog.model(service.model).llm
    stages: dict[tuple[int, int], float] = defaultdict(float)
    for node in instance.nodes:
        stages[node.start, node.end] += node_capacity(
            problem.run_by(instance.engine),
            catalog,
            service,
            instance.role_id,
            node.kind,
            node.layers,
            instance.stages,
            position_of(spec, node.start, node.end),
            tp=node.tp,
            region=instance.region_of(node),
            machine=node.node_type,
        )
    return min(stages.values())
