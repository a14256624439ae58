"""Small renting problems, their optimum by an integer program of its own, and a check of answers.

Nothing here shares code with the allocator: offers, slices, phases and limits are written down once more,
from what is asked, and solved by another route to an integer solver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from atoll.solve.rent.allocation_types import (
    BOTH,
    DECODE,
    PREFILL,
    Allocation,
    AllocationLimits,
    RoleTemplates,
    RunningColumn,
    ServiceDemand,
    Supply,
)
from atoll.solve.rent.items import RentModel, items_of

Aim = Literal["cost", "common", "weighted", "stand"]
Offers = Sequence[tuple[int, str, int, bool, float, int, bool]]
"""(region, GPU, GPUs of the machine, spot, USD per hour, available, whole machines only) of each offer."""

NO_LIMITS = AllocationLimits()
LITTLE = 1e-6
_MANY = 1000.0


@dataclass(frozen=True)
class Case:
    """What `allocate` is given."""

    services: tuple[ServiceDemand, ...]
    supply: Supply
    limits: AllocationLimits = NO_LIMITS
    init_penalty: float = 0.0
    running: tuple[RunningColumn, ...] = ()


def supply_of(offers: Offers, regions: int = 1, link: float = 0.0) -> Supply:
    """A market in which machines of a power of two GPUs may be cut into smaller powers of two."""

    def sizes(gpus: int, whole: bool) -> list[int]:
        return [gpus] if whole else [s for s in (1, 2, 4, 8) if gpus % s == 0]

    kinds = sorted({f"{gpu}:{s}" for _, gpu, n, *_, whole in offers for s in sizes(n, whole)})
    return Supply(
        tuple(f"r{g}" for g in range(regions)),
        tuple(kinds),
        np.array([o[0] for o in offers], np.int64),
        np.array([o[2] for o in offers], np.int64),
        tuple(
            tuple((s, kinds.index(f"{gpu}:{s}")) for s in sizes(n, whole))
            for _, gpu, n, _, _, _, whole in offers
        ),
        np.array([o[3] for o in offers], np.bool_),
        np.array([o[4] for o in offers], np.float64),
        np.array([o[5] for o in offers], np.int64),
        np.full((regions, regions), link),
    )


def service(
    name: str,
    supply: Supply,
    demand: float,
    templates: Mapping[int, Sequence[tuple[Mapping[str, int], float]]],
    **options: object,
) -> ServiceDemand:
    """A service whose templates are (nodes by kind, throughput), by phase."""
    roles = []
    for phase, some in sorted(templates.items()):
        counts = [[nodes.get(kind, 0) for kind in supply.kinds] for nodes, _ in some]
        roles.append(
            RoleTemplates(
                phase,
                np.array(counts, np.int8).reshape(len(some), len(supply.kinds)),
                np.array([rate for _, rate in some], np.float64),
                demand,
            )
        )
    made = ServiceDemand(name, tuple(roles), np.ones(len(supply.kinds), np.bool_))
    return replace(made, **options)  # type: ignore[arg-type]


def model_of(case: Case) -> RentModel:
    """The allocator's own view of a case."""
    return RentModel(
        case.supply,
        case.limits,
        case.services,
        tuple(items_of(s, m, case.running, case.supply) for m, s in enumerate(case.services)),
        case.init_penalty * case.supply.usd / case.supply.gpus,
    )


def random_case(
    seed: int, *, services: int = 2, regions: int = 2, scarce: float = 1.0, pairs: bool = False,
    running: bool = False, most: int = 3,
) -> Case:  # fmt: skip
    """A small problem in which more GPUs are dearer and carry more, with noise; `scarce` scales demand."""
    rng = np.random.default_rng(seed)
    offers = []
    for g in range(regions):
        for gpu, gpus, price in (("A", 4, 1.0), ("A", 1, 1.1), ("B", 2, 0.6)):
            usd = gpus * price * float(rng.uniform(0.8, 1.25))
            number, whole = int(rng.integers(0, most + 1)), bool(rng.random() < 0.3)
            offers.append((g, gpu, gpus, False, usd, number, whole))
            if rng.random() < 0.5:
                number = int(rng.integers(1, most + 1))
                offers.append((g, gpu, gpus, True, usd * 0.4, number, whole))
    supply = supply_of(offers, regions, link=10.0)
    gpus_in_all = float(supply.gpus @ supply.available)
    made = []
    for m in range(services):
        ways = [(BOTH,), (PREFILL, DECODE), (PREFILL, DECODE, BOTH)][int(rng.integers(3))]
        worth = {PREFILL: 2.4, DECODE: 1.8, BOTH: 0.95}
        templates = {
            phase: [
                _random_template(rng, supply.kinds, worth[phase])
                for _ in range(int(rng.integers(2, 4)))
            ]
            for phase in ways
        }
        demand = scarce * float(rng.uniform(0.25, 0.6)) * gpus_in_all / services
        allowed = rng.random(len(supply.kinds)) < 0.85
        some = [(g, h) for g in range(regions) for h in range(regions) if g != h]
        crossing = tuple(p for p in some if pairs and rng.random() < 0.7)
        made.append(
            service(
                f"m{m}", supply, max(0.3, demand), templates, allowed=allowed,
                weight=float(rng.integers(1, 4)), pairs=crossing,
                kv_bytes_per_s=float(rng.uniform(5.0, 60.0)),
            )
        )  # fmt: skip
    kept = _random_running(rng, made, supply) if running else ()
    penalty = float(rng.choice([0.0, 0.2, 1.0])) if running else 0.0
    return Case(tuple(made), supply, init_penalty=penalty, running=kept)


def _random_template(
    rng: np.random.Generator, kinds: Sequence[str], worth: float
) -> tuple[dict[str, int], float]:
    some = rng.choice(len(kinds), int(rng.integers(1, 3)), replace=False)
    nodes = {kinds[c]: int(rng.integers(1, 3)) for c in some}
    gpus = sum(n * int(kind.split(":")[1]) for kind, n in nodes.items())
    return nodes, worth * gpus * float(rng.uniform(0.6, 1.3))


def _random_running(
    rng: np.random.Generator, services: Sequence[ServiceDemand], supply: Supply
) -> tuple[RunningColumn, ...]:
    found = []
    for m, asked in enumerate(services):
        for _ in range(int(rng.integers(1, 3))):
            role = asked.roles[int(rng.integers(len(asked.roles)))]
            g = int(rng.integers(len(supply.regions)))
            there = np.flatnonzero(supply.region == g)
            some = rng.choice(there, int(rng.integers(1, 3)), replace=False)
            gpus = tuple((int(k), int(rng.choice([s for s, _ in supply.sizes[k]]))) for k in some)
            rate = sum(n for _, n in gpus) * float(rng.uniform(0.5, 2.0))
            found.append(RunningColumn(m, role.phase, g, gpus, int(rng.integers(1, 3)), rate))
    return tuple(found)


@dataclass
class _Program:
    """Columns and rows by name, for `milp`."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def column(self, cost: float = 0.0, upper: float = np.inf, *, whole: bool = True) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, entries: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        summed: dict[int, float] = {}
        for column, value in entries:
            summed[column] = summed.get(column, 0.0) + value
        self.rows.append((summed, lower, upper))

    def solve(self) -> float:
        """Return the least cost, inf if nothing is possible."""
        if not self.cost:
            return 0.0
        at = [(r, c, v) for r, (entries, _, _) in enumerate(self.rows) for c, v in entries.items()]
        matrix = coo_array(
            ([v for *_, v in at], ([r for r, *_ in at], [c for _, c, _ in at])),
            shape=(len(self.rows), len(self.cost)),
        ).tocsr()
        result = milp(
            np.array(self.cost),
            integrality=np.array(self.whole, np.int64),
            bounds=Bounds(np.zeros(len(self.upper)), np.array(self.upper)),
            constraints=LinearConstraint(
                matrix, np.array([r[1] for r in self.rows]), np.array([r[2] for r in self.rows])
            ),
            options={"mip_rel_gap": 0.0},
        )
        assert result.status in (0, 2), result.message
        return float(result.fun) if result.status == 0 else np.inf


def optimum(  # noqa: C901 - one program, written down in one go
    case: Case, aim: Aim = "cost", fraction: Sequence[float] | None = None
) -> float:
    """Return the least cost of serving a fraction of each service (inf: impossible), or what can be served.

    That is the largest common fraction, the largest weighted mean fraction, or how many services can stand
    at once plus half the weighted share of those that do, by `aim`.
    """
    supply, limits, lp = case.supply, case.limits, _Program()
    paid = 1.0 if aim == "cost" else 0.0
    # To stand is to serve a little: every instance serves all of that.
    unit, full = (LITTLE, 1.0) if aim == "stand" else (1.0, np.inf)
    offers = range(len(supply.usd))
    rent = [lp.column(paid * float(supply.usd[k]), float(supply.available[k])) for k in offers]
    gpu_rows: list[list[tuple[int, float]]] = [[(rent[k], float(supply.gpus[k]))] for k in offers]
    cells: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for k in offers:
        for gpus, kind in supply.sizes[k]:
            start = case.init_penalty * float(supply.usd[k]) * gpus / float(supply.gpus[k])
            column = lp.column(paid * start)
            gpu_rows[k].append((column, -float(gpus)))
            cells.setdefault((int(supply.region[k]), kind), []).append((column, 1.0))
    links: dict[tuple[int, int], list[tuple[int, float]]] = {}
    served: list[list[tuple[int, float]]] = []
    for m, asked in enumerate(case.services):
        part = 1.0 if fraction is None else float(fraction[m])
        levels: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for role in asked.roles:
            for t, rate in enumerate(role.throughput):
                kinds = np.flatnonzero(role.counts[t])
                if rate <= 0.0 or not np.all(asked.allowed[kinds]):
                    continue
                for g in range(len(supply.regions)):
                    if all((g, int(c)) in cells for c in kinds):
                        column = lp.column()
                        level = (column, min(full, rate / (role.demand * unit)))
                        levels.setdefault((role.phase, g), []).append(level)
                        for c in kinds:
                            cells[g, int(c)].append((column, -float(role.counts[t, c])))
            for kept in case.running:
                if kept.service == m and kept.phase == role.phase and kept.throughput > 0.0:
                    column = lp.column(upper=float(kept.number))
                    level = (column, min(full, kept.throughput / (role.demand * unit)))
                    levels.setdefault((role.phase, kept.region), []).append(level)
                    for k, gpus in kept.gpus:
                        gpu_rows[k].append((column, -float(gpus)))
        whole = [entry for g in range(len(supply.regions)) for entry in levels.get((BOTH, g), [])]
        sent: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for g, h in [*((g, g) for g in range(len(supply.regions))), *asked.pairs]:
            flow = lp.column(whole=False)
            whole.append((flow, 1.0))
            sent.setdefault((PREFILL, g), []).append((flow, -1.0))
            sent.setdefault((DECODE, h), []).append((flow, -1.0))
            if g != h:
                links.setdefault((g, h), []).append((flow, asked.kv_bytes_per_s * unit))
        for key, flows in sent.items():
            lp.row([*levels.get(key, []), *flows], 0.0, np.inf)
        if limits.spread > 1:
            _spread(lp, levels, limits.spread)
        served.append(whole)
        if aim == "cost":
            lp.row(whole, part, np.inf)
    for rows in cells.values():
        lp.row(rows, 0.0, 0.0)
    for rows in gpu_rows:
        lp.row(rows, 0.0, np.inf)
    for (g, h), rows in links.items():
        lp.row(rows, -np.inf, float(supply.link[g, h]))
    if limits.budget is not None:
        charged = supply.usd if supply.paid is None else supply.paid
        lp.row([(rent[k], float(charged[k])) for k in offers], -np.inf, limits.budget)
    if limits.max_nodes is not None:
        lp.row([(rent[k], 1.0) for k in offers], -np.inf, limits.max_nodes)
    return _aim(lp, case, aim, served)


def _spread(
    lp: _Program, levels: Mapping[tuple[int, int], list[tuple[int, float]]], spread: int
) -> None:
    """A phase that stands anywhere stands in enough regions."""
    for phase in (PREFILL, DECODE, BOTH):
        groups = [some for (p, _), some in levels.items() if p == phase]
        if not groups:
            continue
        stands = lp.column(upper=1.0)
        regions = [lp.column(upper=1.0) for _ in groups]
        for region, some in zip(regions, groups, strict=True):
            lp.row([*((c, 1.0) for c, _ in some), (region, -1.0)], 0.0, np.inf)
            lp.row([*((c, 1.0) for c, _ in some), (stands, -_MANY)], -np.inf, 0.0)
        lp.row([*((region, 1.0) for region in regions), (stands, -float(spread))], 0.0, np.inf)


def _aim(lp: _Program, case: Case, aim: Aim, served: Sequence[list[tuple[int, float]]]) -> float:
    if aim == "cost" or not served:
        return lp.solve()
    weights = np.array([asked.weight for asked in case.services])
    if aim == "common":
        share = lp.column(-1.0, 1.0, whole=False)
        for whole in served:
            lp.row([*whole, (share, -1.0)], 0.0, np.inf)
    elif aim == "weighted":
        for whole, weight in zip(served, weights, strict=True):
            share = lp.column(-float(weight / weights.sum()), 1.0, whole=False)
            lp.row([*whole, (share, -1.0)], 0.0, np.inf)
    else:
        for whole, weight in zip(served, weights, strict=True):
            stands = lp.column(-1.0 - 0.5 * float(weight / weights.sum()), 1.0)
            lp.row([*whole, (stands, -1.0)], 0.0, np.inf)
    return -lp.solve()


def only(case: Case, some: Sequence[int]) -> Case:
    """A case with some of its services."""
    running = tuple(
        replace(kept, service=list(some).index(kept.service))
        for kept in case.running
        if kept.service in some
    )
    return replace(case, services=tuple(case.services[m] for m in some), running=running)


def faults(case: Case, answer: Allocation) -> list[str]:
    """Return what is wrong with an answer, apart from whether it is the cheapest."""
    found = [*_supply_faults(case, answer), *_limit_faults(case, answer)]
    if answer.status != "infeasible":
        found += _service_faults(case, answer)
    elif answer.instances or answer.machines.any() or answer.slices:
        found.append("infeasible, but something is rented")
    usd = float(case.supply.usd @ answer.machines)
    init = sum(
        case.init_penalty * float(case.supply.usd[k]) * gpus / float(case.supply.gpus[k]) * n
        for (k, gpus), n in answer.slices.items()
    )
    if abs(usd - answer.usd_per_hour) > 1e-9 or abs(init - answer.init_usd) > 1e-9:
        found.append("cost does not add up")
    if abs(usd + init - answer.objective) > 1e-9:
        found.append("objective does not add up")
    if answer.bound > answer.objective + 1e-9:
        found.append("bound above objective")
    if answer.status in ("optimal", "feasible") and np.any(answer.served < 1.0 - 1e-8):
        found.append("demand is not met")
    return found


def _supply_faults(case: Case, answer: Allocation) -> list[str]:
    supply, found = case.supply, []
    nodes = np.zeros((len(supply.regions), len(supply.kinds)), np.int64)
    held = np.zeros(len(supply.usd), np.int64)
    kept: dict[int, int] = {}
    for chosen in answer.instances:
        asked = case.services[chosen.service]
        if chosen.number < 1:
            found.append("less than one instance")
        if chosen.template is not None:
            role = next(r for r in asked.roles if r.phase == chosen.phase)
            nodes[chosen.region] += chosen.number * role.counts[chosen.template].astype(np.int64)
            if np.any((role.counts[chosen.template] > 0) & ~asked.allowed):
                found.append("a kind that is not allowed")
        else:
            assert chosen.running is not None
            kept[chosen.running] = kept.get(chosen.running, 0) + chosen.number
            column = case.running[chosen.running]
            if (column.service, column.phase, column.region) != (
                chosen.service, chosen.phase, chosen.region,
            ):  # fmt: skip
                found.append("a kept instance of something else")
            for k, gpus in column.gpus:
                held[k] += chosen.number * gpus
    if any(number > case.running[column].number for column, number in kept.items()):
        found.append("kept more than there are")
    for (k, gpus), number in answer.slices.items():
        held[k] += gpus * number
        kind = dict(supply.sizes[k])[gpus]
        nodes[supply.region[k], kind] -= number
    if np.any(nodes != 0):
        found.append("slices are not the nodes in use")
    if np.any(held > answer.machines * supply.gpus):
        found.append("more GPUs in use than are rented")
    if np.any(answer.machines > supply.available) or np.any(answer.machines < 0):
        found.append("more machines than can be had")
    return found


def _limit_faults(case: Case, answer: Allocation) -> list[str]:
    supply, limits, found = case.supply, case.limits, []
    charged = supply.usd if supply.paid is None else supply.paid
    if limits.budget is not None and float(charged @ answer.machines) > limits.budget + 1e-6:
        found.append("over the budget")
    if limits.max_nodes is not None and answer.machines.sum() > limits.max_nodes:
        found.append("too many machines")
    for m in range(len(case.services)):
        for phase in (PREFILL, DECODE, BOTH):
            regions = {c.region for c in answer.instances if c.service == m and c.phase == phase}
            if regions and len(regions) < limits.spread:
                found.append("a role stands in too few regions")
    return found


def _service_faults(case: Case, answer: Allocation) -> list[str]:
    """Whether instances serve what the answer says, over the links there are."""
    lp, links = _Program(), dict[tuple[int, int], list[tuple[int, float]]]()
    for m, asked in enumerate(case.services):
        if not any(role.demand > 0.0 for role in asked.roles):
            continue
        level = np.zeros((3, len(case.supply.regions)))
        demands = {role.phase: role.demand for role in asked.roles}
        for chosen in answer.instances:
            if chosen.service == m:
                role = next(r for r in asked.roles if r.phase == chosen.phase)
                rate = (
                    case.running[chosen.running].throughput
                    if chosen.running is not None
                    else float(role.throughput[chosen.template or 0])
                )
                level[chosen.phase, chosen.region] += chosen.number * rate / demands[chosen.phase]
        ways = [(g, g) for g in range(len(case.supply.regions))] + list(asked.pairs)
        flows = [lp.column(whole=False) for _ in ways]
        for g in range(len(case.supply.regions)):
            out = [(f, 1.0) for f, way in zip(flows, ways, strict=True) if way[0] == g]
            into = [(f, 1.0) for f, way in zip(flows, ways, strict=True) if way[1] == g]
            lp.row(out, -np.inf, float(level[PREFILL, g]))
            lp.row(into, -np.inf, float(level[DECODE, g]))
        for f, (g, h) in zip(flows, ways, strict=True):
            if g != h:
                links.setdefault((g, h), []).append((f, asked.kv_bytes_per_s))
        wanted = float(answer.served[m]) - float(level[BOTH].sum())
        lp.row([(f, 1.0) for f in flows], wanted - 1e-7, np.inf)
    for (g, h), rows in links.items():
        lp.row(rows, -np.inf, float(case.supply.link[g, h]) * (1 + 1e-9))
    return [] if np.isfinite(lp.solve()) else ["instances do not serve what is said"]
