"""Plans beside a given one, written down one by one: what nobody says can be done for less.

Shares no code with the solvers and leaves nothing out for what a model says that it carries. `list_pieces`
are all instances on one machine, or a slice of it, and all pipelines of two, on every engine and in every
split of their GPUs that the validator lets stand; `list_rivals` are all plans of one to three of them, and
the given plan with an instance left out or another in its place. `least_by_capacity` is an integer program
over the same pieces (HiGHS through scipy): what it finds is a plan that capacities allow, so that a bound
above it is false.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError
from atoll.core.ids import Phase, RoleId, format_node_type, parse_node_type
from atoll.perf.step import Position
from atoll.plan.capacities import node_capacity
from atoll.plan.choice import Choice
from atoll.plan.plan import Flow, Instance, Market, Node, OfferKey, Plan, Route
from atoll.plan.problem import Problem, Service
from atoll.plan.validate.check import validate

MOST_INSTANCES = 3
CAPACITY_RULES = frozenset(
    {"node-capacity", "demand", "served", "throughput", "route", "status", "goal"}
)
"""Rules about what a plan says, or the model says that instances carry: that is for simulation to find."""
Levels = Mapping[str, float]
"""Shares of a choice that its services answer."""
_NOTHING = 1e-9
_LEVELS = 5
"""Shares that are tried between the least and the most that a model may answer."""


@dataclass(frozen=True, slots=True)
class Slice:
    """GPUs of one machine of an offer, with the layers [start, end) split over groups of `tp` of them."""

    offer: OfferKey
    gpus: int
    tp: int
    start: int
    end: int

    @property
    def kind(self) -> str:
        return format_node_type(parse_node_type(self.offer[1]).gpu, self.gpus)


@dataclass(frozen=True, slots=True)
class Piece:
    """An instance that may stand: who runs what on which slices, and its capacity in units of its role per s.

    `parts` are those of an any-to-any model; none for a plain llm.
    """

    role: RoleId
    engine: str | None
    slices: tuple[Slice, ...]
    per_s: float
    parts: tuple[str, ...] = ()

    @property
    def on_spot(self) -> bool:
        return any(one.offer[2] == "spot" for one in self.slices)

    @property
    def region(self) -> str:
        return self.slices[0].offer[0]


@dataclass(frozen=True)
class Rival:
    """A plan that `make` writes down, and the settled problem that it answers.

    `carries` is the least share of any service's demand that its capacities carry, as the model has it.
    `stands_on` is equal for plans of the same roles on the same slices, whatever runs them.
    """

    make: Callable[[], Plan]
    problem: Problem
    how: str
    usd_per_hour: float
    carries: float
    stands_on: Hashable

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return self.make()

    @cached_property
    def in_words(self) -> str:
        """What it rents, in a line."""
        names = Counter(f"{i.role} {i.describe()} ({i.engine})" for i in self.plan.instances)
        return "; ".join(f"{n}x {name}" for name, n in sorted(names.items()))


class Yard:
    """The pieces of one problem, and plans made of them."""

    def __init__(self, problem: Problem, catalog: Catalog) -> None:
        self.problem, self.catalog = problem, catalog
        self.offers = {offer.key: offer for offer in problem.offers}
        # Several variants of a choice are services of their own.
        self.pieces = {
            service.name: [
                piece
                for role in service.roles
                for piece in self._stand(self._pieces(service, role))
            ]
            for service in problem.plain_services
        }

    # What may stand

    def _pieces(self, service: Service, role: RoleId) -> Iterator[Piece]:
        layers = self.catalog.model(service.model).llm.layers
        settings = self.problem.settings
        slices = [
            (offer.key, size)
            for offer in self.problem.offers
            for size in offer.sizes
            if offer.available and service.allows(f"{parse_node_type(offer.node_type).gpu}:{size}")
        ]
        for engine in settings.engines or ((settings.engine,) if self.problem.hosts else (None,)):
            for key, size in slices:
                for tp in divisors(size):
                    one = Slice(key, size, tp, 0, layers)
                    yield Piece(role, engine, (one,), self._rate(service, role, engine, one, 1))
            if settings.stages > 1:
                for a, b in itertools.product(slices, repeat=2):
                    if a[0][0] == b[0][0]:
                        yield from self._pairs(service, role, engine, a, b, layers)

    def _pairs(
        self,
        service: Service,
        role: RoleId,
        engine: str | None,
        a: tuple[OfferKey, int],
        b: tuple[OfferKey, int],
        layers: int,
    ) -> Iterator[Piece]:
        """Pipelines of two slices, each split over all of its GPUs: of all cuts the one that carries most."""
        best: Piece | None = None
        for cut in range(1, layers):
            two = (Slice(*a, a[1], 0, cut), Slice(*b, b[1], cut, layers))
            rate = min(self._rate(service, role, engine, one, 2) for one in two)
            if rate > (0.0 if best is None else best.per_s):
                best = Piece(role, engine, two, rate)
        if best is not None:
            yield best

    def _rate(
        self, service: Service, role: RoleId, engine: str | None, one: Slice, stages: int
    ) -> float:
        position = Position.WHOLE
        if stages > 1:
            position = Position.FIRST if one.start == 0 else Position.LAST
        try:
            return node_capacity(
                self.problem.run_by(engine),
                self.catalog,
                service,
                role,
                one.kind,
                one.end - one.start,
                stages,
                position,
                tp=one.tp,
                region=one.offer[0],
                machine=one.offer[1],
            )
        except AtollError:
            return 0.0

    def _stand(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Those that break no rule but for what they carry."""
        plain = self.problem.replace(choices=())
        for piece in pieces:
            if not math.isfinite(self.price((piece,))):
                continue
            alone = self.assemble(plain, (piece,), {})
            broken = validate(alone, plain, self.catalog, same_problem=False)
            if not any(b.rule not in CAPACITY_RULES for b in broken):
                yield piece

    # Plans

    def list_rivals(self, plan: Plan, under_usd: float) -> Iterator[Rival]:
        """Yield plans below a price: all of at most three instances, and the given plan with one changed."""
        for settled, levels in self._settlements(plan):
            names = [s.name for s in settled.services if s.rate_per_s > 0.0]
            for chosen in self._combinations(names, under_usd):
                rival = self._rival(plan, settled, chosen, levels, "of three")
                if rival is not None:
                    yield rival
        if len(plan.instances) > MOST_INSTANCES:
            yield from self._changed(plan, under_usd)

    def _changed(self, plan: Plan, under_usd: float) -> Iterator[Rival]:
        """Leave one instance out, or put any other of its role in its place."""
        settled = self.problem.settled(plan.mixes)
        own = [piece_of(instance) for instance in plan.instances]
        for at, old in enumerate(own):
            rest = own[:at] + own[at + 1 :]
            if old in own[:at]:
                continue  # one like it was changed already
            others = [p for p in self.pieces[old.role.model] if p.role == old.role]
            for chosen in (rest, *([*rest, other] for other in others)):
                if self.price(chosen) < under_usd:
                    rival = self._rival(plan, settled, chosen, {}, "one changed")
                    if rival is not None:
                        yield rival

    def _settlements(self, plan: Plan) -> Iterator[tuple[Problem, Levels]]:
        """Problems without choices: the mixes of the plan, and others that err no more than is allowed."""
        yield self.problem.settled(plan.mixes), {}
        if self.problem.choices:
            for levels in itertools.product(*(list(_levels(c)) for c in self.problem.choices)):
                merged = {name: share for own in levels for name, share in own.items()}
                # Choices that share a service may contradict each other.
                with suppress(AtollError):
                    yield self.problem.settled(self.problem.mixes_at(merged)), merged

    def _combinations(self, names: Sequence[str], under_usd: float) -> Iterator[list[Piece]]:
        """Every set of at most three pieces below a price: one more never makes it cheaper."""
        every = [piece for name in names for piece in self.pieces[name]]

        def grow(chosen: list[Piece], first: int) -> Iterator[list[Piece]]:
            for at in range(first, len(every)):
                larger = [*chosen, every[at]]
                if self.price(larger) < under_usd:
                    yield larger
                    if len(larger) < MOST_INSTANCES:
                        yield from grow(larger, at)

        return grow([], 0)

    def price(self, chosen: Iterable[Piece]) -> float:
        """Return USD/h of the machines that pieces need, cut ones whole; infinite where there are too few."""
        gpus: Counter[OfferKey] = Counter()
        for piece in chosen:
            for one in piece.slices:
                gpus[one.offer] += one.gpus
        usd = 0.0
        for key, number in gpus.items():
            offer = self.offers[key]
            machines = -(-number // offer.gpus)
            if machines > offer.available:
                return math.inf
            usd += machines * offer.usd_per_hour
        return usd

    def _rival(
        self, plan: Plan, settled: Problem, chosen: Sequence[Piece], levels: Levels, how: str
    ) -> Rival | None:
        """Return the plan of some pieces; None where a service has none, or one has nothing to do."""
        shares, carried = self._deal(settled, chosen)
        if shares is None:
            return None
        mixes = self.problem.mixes_at(levels) if levels else plan.mixes
        update = {"mixes": mixes, "engines": plan.engines}

        def make() -> Plan:
            return self.assemble(settled, chosen, shares).model_copy(update=update)

        return Rival(make, settled, how, self.price(chosen), carried, stands_on(chosen))

    def _deal(
        self, settled: Problem, chosen: Sequence[Piece]
    ) -> tuple[dict[tuple[int, ...], float] | None, float]:
        """Shares of ways over pieces by what they carry, within the limit on spot; None: one lacks any.

        Also the least share of any service's demand that they carry.
        """
        shares: dict[tuple[int, ...], float] = {}
        least = math.inf
        for service in settled.services:
            if service.rate_per_s <= 0.0:
                continue
            own = {n: p for n, p in enumerate(chosen) if p.role.model == service.name}
            weights = self._ways(service, own)
            if not weights:
                return None, 0.0
            total = sum(weights.values())
            least = min(least, total)
            ways = {way: weight / total for way, weight in weights.items()}
            limit = self.problem.limits.spot_share
            if limit is not None:
                on = {way for way in ways if any(own[n].on_spot for n in way)}
                taken = sum(ways[way] for way in on)
                if taken > limit:
                    rest = 1.0 - taken
                    if rest <= _NOTHING or limit <= _NOTHING:
                        return None, 0.0  # what is on spot must serve, and may not
                    ways = {
                        way: share * (limit / taken if way in on else (1.0 - limit) / rest)
                        for way, share in ways.items()
                    }
            shares |= ways
        used = {n for way in shares for n in way}
        return (shares, least) if len(used) == len(chosen) else (None, 0.0)

    def _ways(self, service: Service, own: Mapping[int, Piece]) -> dict[tuple[int, ...], float]:
        """By way the share of demand that it carries; where nothing is said to, all ways alike."""

        def carried(number: int) -> float:
            return own[number].per_s / service.demand(own[number].role)

        by_phase: dict[tuple[Phase, str], list[int]] = defaultdict(list)
        for number, piece in own.items():
            by_phase[piece.role.phase, piece.region].append(number)
        ways: dict[tuple[int, ...], float] = {}
        for (phase, region), numbers in by_phase.items():
            if phase is Phase.BOTH:
                ways |= {(n,): carried(n) for n in numbers}
            elif phase is Phase.PREFILL:
                into = by_phase.get((Phase.DECODE, region), [])
                first, second = sum(map(carried, numbers)), sum(map(carried, into))
                for a, b in itertools.product(numbers, into):
                    parts = carried(a) / first * carried(b) / second if first and second else 0.0
                    ways[a, b] = min(first, second) * parts
        if ways and min(ways.values()) <= 0.0:
            return dict.fromkeys(ways, 1e-6)
        return ways

    def assemble(
        self, settled: Problem, chosen: Sequence[Piece], ways: Mapping[tuple[int, ...], float]
    ) -> Plan:
        nodes_of = self._place(chosen)
        instances = []
        for number, piece in enumerate(chosen):
            nodes = nodes_of[number]
            names = ["source", *(node.id for node in nodes), "sink"]
            per_s = max(piece.per_s, 1e-6)
            usd = sum(
                self.offers[one.offer].usd_per_hour * one.gpus / self.offers[one.offer].gpus
                for one in piece.slices
            )
            instances.append(
                Instance(
                    id=f"i{number}",
                    service=piece.role.model,
                    role=str(piece.role),
                    region=piece.region,
                    stages=len(nodes),
                    nodes=nodes,
                    flows=tuple(
                        Flow(src=a, dst=b, per_s=per_s) for a, b in itertools.pairwise(names)
                    ),
                    throughput_per_s=per_s,
                    usd_per_hour=usd,
                    engine=piece.engine,
                )
            )
        machines: set[tuple[OfferKey, object]] = set()
        for number, piece in enumerate(chosen):
            for one, node in zip(piece.slices, nodes_of[number], strict=True):
                machine = node.host or (node.slot if node.slot is not None else (number, node.id))
                machines.add((one.offer, machine))
        usd = sum(self.offers[key].usd_per_hour for key, _ in machines)
        return Plan(
            problem_hash=settled.content_hash(),
            problem_name=settled.name,
            instances=tuple(instances),
            routes=tuple(
                Route(
                    service=chosen[way[0]].role.model,
                    instances=tuple(f"i{n}" for n in way),
                    share=min(1.0, share),
                )
                for way, share in ways.items()
            ),
            served_fraction={s.name: 1.0 for s in settled.services},
            usd_per_hour=usd,
            objective=usd,
            status="feasible",
            solver="enumeration",
        )

    def _place(self, chosen: Sequence[Piece]) -> list[tuple[Node, ...]]:
        """Give every slice GPUs of a machine: sizes divide each other, so the largest first always fit."""
        wanted = [
            (one.gpus, number, at)
            for number, piece in enumerate(chosen)
            for at, one in enumerate(piece.slices)
        ]
        used: Counter[OfferKey] = Counter()
        cluster = self.problem.cluster
        machines = () if cluster is None else cluster.nodes
        hosts = {
            key: [n.name for n in machines if (n.region, n.node_type) == key[:2]]
            for key in self.offers
        }
        found: dict[tuple[int, int], Node] = {}
        for size, number, at in sorted(wanted, key=lambda w: (-w[0], w[1], w[2])):
            one = chosen[number].slices[at]
            offer = self.offers[one.offer]
            slot, first = divmod(used[one.offer], offer.gpus)
            used[one.offer] += size
            cut = size < offer.gpus
            market: Market = one.offer[2]
            found[number, at] = Node(
                id=f"n{at}",
                node_type=one.offer[1],
                market=market,
                start=one.start,
                end=one.end,
                tp=one.tp,
                host=hosts[one.offer][slot] if machines else None,
                slot=slot if cut and not machines else None,
                gpu_ids=tuple(range(first, first + size)) if cut else None,
            )
        return [
            tuple(found[number, at] for at in range(len(piece.slices)))
            for number, piece in enumerate(chosen)
        ]

    # What capacities allow

    def least_by_capacity(self) -> float | None:
        """Return what the cheapest plan of these pieces costs that carries all demand by their capacities.

        None where there is none. Any plan will do: it is an upper limit of what a true bound may be.
        """
        return _CapacityProgram(self).least()


def stands_on(chosen: Iterable[Piece]) -> Hashable:
    """Return what pieces have of which machines, and for what."""
    held = ((str(p.role), *((one.offer, one.gpus) for one in p.slices)) for p in chosen)
    return tuple(sorted(held, key=repr))


def piece_of(instance: Instance) -> Piece:
    slices = tuple(
        Slice((instance.region_of(n), n.node_type, n.market), n.gpus, n.tp, n.start, n.end)
        for n in instance.nodes
    )
    return Piece(instance.role_id, instance.engine, slices, instance.throughput_per_s)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _levels(choice: Choice) -> Iterator[Levels]:
    """Shares of the variants of a choice that err no more than is allowed: one alone, or two in steps."""
    names = [variant.service for variant in choice.variants]
    errors = {variant.service: variant.error for variant in choice.variants}
    most = 1.0 if choice.max_error is None else choice.max_error
    if choice.min_share:
        return
    for name in names:
        if errors[name] <= most:
            yield {name: 1.0}
    for a, b in itertools.combinations(sorted(names, key=lambda n: errors[n]), 2):
        if errors[a] > most:
            continue
        largest = 1.0 if errors[b] <= most else (most - errors[a]) / (errors[b] - errors[a])
        for step in range(1, _LEVELS + 1):
            share = largest * step / _LEVELS * (1.0 - 1e-9)
            if 0.0 < share < 1.0:
                yield {a: 1.0 - share, b: share}


class _CapacityProgram:
    """The least cost of pieces whose capacities carry everything: whole numbers of pieces and machines."""

    def __init__(self, yard: Yard) -> None:
        self.yard, self.problem = yard, yard.problem
        self.high: list[float] = []
        self.whole: list[bool] = []
        self.cost: dict[int, float] = {}
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def _variable(self, high: float, whole: bool) -> int:
        self.high.append(high)
        self.whole.append(whole)
        return len(self.high) - 1

    def least(self) -> float | None:
        from scipy.optimize import Bounds, LinearConstraint, milp

        yard = self.yard
        used: dict[OfferKey, dict[int, float]] = {}
        for key, offer in yard.offers.items():
            machines = self._variable(offer.available, True)
            self.cost[machines] = offer.usd_per_hour
            used[key] = {machines: -float(offer.gpus)}
        for service in self.problem.services:
            self._serve(service, used)
        for choice in self.problem.choices:
            level = {self.levels[v.service]: 1.0 for v in choice.variants}
            self.rows.append((level, 1.0, 1.0))
            if choice.max_error is not None:
                errs = {self.levels[v.service]: v.error for v in choice.variants}
                self.rows.append((errs, -np.inf, choice.max_error))
        self.rows += [(terms, -np.inf, 0.0) for terms in used.values()]
        size = len(self.high)
        matrix = np.zeros((len(self.rows), size))
        for at, (terms, _, _) in enumerate(self.rows):
            for column, value in terms.items():
                matrix[at, column] += value
        objective = np.zeros(size)
        for column, value in self.cost.items():
            objective[column] = value
        found = milp(
            objective,
            constraints=LinearConstraint(
                matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
            ),
            integrality=np.array(self.whole, np.int64),
            bounds=Bounds(np.zeros(size), np.array(self.high)),
            options={"time_limit": 20.0},
        )
        if found.x is None:
            return None
        return float(objective @ np.where(self.whole, np.round(found.x), 0.0))

    @cached_property
    def levels(self) -> dict[str, int]:
        """How much of its demand each service answers: all, but for variants of a choice."""
        return {s.name: self._variable(1.0, False) for s in self.problem.services}

    def _serve(self, service: Service, used: dict[OfferKey, dict[int, float]]) -> None:
        pieces: dict[tuple[Phase, str, bool], dict[int, float]] = defaultdict(dict)
        for piece in self.yard.pieces[service.name]:
            if piece.per_s <= 0.0:
                continue
            number = self._variable(64.0, True)
            for one in piece.slices:
                own = used[one.offer]
                own[number] = own.get(number, 0.0) + one.gpus
            share = piece.per_s / service.demand(piece.role)
            pieces[piece.role.phase, piece.region, piece.on_spot][number] = share
        ways: dict[int, bool] = {}
        loads: dict[tuple[Phase, str, bool], dict[int, float]] = defaultdict(dict)
        for phase, region, spot in list(pieces):
            if phase is Phase.BOTH:
                way = self._variable(1.0, False)
                ways[way] = spot
                loads[phase, region, spot][way] = 1.0
            elif phase is Phase.PREFILL:
                for other in (False, True):
                    if (Phase.DECODE, region, other) in pieces:
                        way = self._variable(1.0, False)
                        ways[way] = spot or other
                        loads[phase, region, spot][way] = 1.0
                        loads[Phase.DECODE, region, other][way] = 1.0
        for key, load in loads.items():
            carried = {number: -share for number, share in pieces[key].items()}
            self.rows.append(({**load, **carried}, -np.inf, 0.0))
        level = self.levels[service.name]
        optional = {name for names in self.problem.variants.values() for name in names}
        if service.name not in optional:
            self.rows.append(({level: 1.0}, 1.0, 1.0))
        self.rows.append(({**dict.fromkeys(ways, 1.0), level: -1.0}, 0.0, 0.0))
        limit = self.problem.limits.spot_share
        if limit is not None:
            spot_ways = {way: 1.0 for way, spot in ways.items() if spot}
            self.rows.append(({**spot_ways, level: -limit}, -np.inf, 0.0))
