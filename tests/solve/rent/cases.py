"""Small allocation problems, and their optimum by trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.types import (
    Allocation,
    AllocationLimits,
    Market,
    RoleDemand,
    RunningColumn,
    Supply,
)

NO_LIMITS = AllocationLimits()


@dataclass(frozen=True)
class Case:
    """What `allocate` is given."""

    roles: tuple[RoleDemand, ...]
    supply: Supply
    limits: AllocationLimits = NO_LIMITS
    init_penalty: float = 0.0
    running: tuple[RunningColumn, ...] = ()


def supply_of(
    available: Sequence[Sequence[int]],
    usd: Sequence[Sequence[float]],
    gpus: Sequence[int],
    market: Market = "on-demand",
) -> Supply:
    """One offer per (region, node type)."""
    regions, types = len(available), len(gpus)
    return Supply(
        tuple(f"r{g}" for g in range(regions)),
        tuple(f"t{c}" for c in range(types)),
        np.array(gpus, np.int64),
        np.repeat(np.arange(regions), types),
        np.tile(np.arange(types), regions),
        (market,) * (regions * types),
        np.array(usd, np.float64).ravel(),
        np.array(available, np.int64).ravel(),
    )


SPOT: Literal["spot"] = "spot"


def with_spot(supply: Supply, discount: float, available: Sequence[int]) -> Supply:
    """Add a spot offer for every offer there is."""
    return replace(
        supply,
        region=np.tile(supply.region, 2),
        type=np.tile(supply.type, 2),
        market=(*supply.market, *(SPOT,) * len(supply.market)),
        usd=np.concatenate([supply.usd, supply.usd * discount]),
        available=np.concatenate([supply.available, np.array(available, np.int64)]),
    )


def role(
    name: str,
    counts: Sequence[Sequence[int]],
    throughput: Sequence[float],
    demand: float,
    *,
    weight: float = 1.0,
) -> RoleDemand:
    """A role from lists."""
    return RoleDemand(
        name, np.array(counts, np.int8), np.array(throughput, np.float64), demand, weight=weight
    )


def random_case(seed: int, *, roles: int = 2, templates: int = 4, types: int = 3, regions: int = 2,
                most: int = 3) -> Case:  # fmt: skip
    """A small problem in which larger nodes are dearer and carry more, with some noise."""
    rng = np.random.default_rng(seed)
    gpus = [1, 2, 4, 8][:types]
    usd = np.outer(rng.uniform(0.9, 1.3, regions), gpus) * rng.uniform(0.8, 1.2, (regions, types))
    available = rng.integers(0, most + 1, (regions, types))
    made = []
    for r in range(roles):
        counts = np.unique(rng.integers(0, 3, (templates, types)), axis=0)
        counts = counts[counts.sum(axis=1) > 0]
        rate = (counts @ np.array(gpus)) * rng.uniform(0.6, 1.4, len(counts))
        demand = float(rng.uniform(0.3, 1.0) * (available * gpus).sum() / (1.3 * roles))
        made.append(role(f"m{r}", counts.tolist(), rate.tolist(), max(0.1, demand)))
    return Case(tuple(made), supply_of(available.tolist(), usd.tolist(), gpus))


def brute_force(case: Case, fraction: float = 1.0) -> float:
    """Return the least cost of serving a fraction of every demand (inf: impossible)."""
    best = np.inf
    for used, init in _deployments(case, fraction):
        best = min(best, _rent(case, used) + init)
    return best


def best_fraction(case: Case) -> float:
    """Return the largest common fraction of demand that can be served."""
    levels = {1.0}
    for r, demand in enumerate(case.roles):
        most = [int(n) for n in _most(case, r)]
        for numbers in itertools.product(*(range(m + 1) for m in most)):
            levels.add(min(1.0, _served(case, r, numbers) / demand.demand))
    for level in sorted(levels, reverse=True):
        if level == 0.0 or np.isfinite(brute_force(case, level * (1 - 1e-12))):
            return level
    return 0.0


def _columns(case: Case, r: int) -> list[tuple[NDArray[np.int8], int, float]]:
    demand = case.roles[r]
    return [
        (demand.counts[t], g, float(demand.throughput[t]))
        for t in range(len(demand.throughput))
        for g in range(len(case.supply.regions))
        if demand.allowed is None or not np.any((demand.counts[t] > 0) & ~demand.allowed)
    ]


def _most(case: Case, r: int) -> list[int]:
    nodes = _nodes(case)
    out = []
    for counts, g, _ in _columns(case, r):
        some = counts > 0
        out.append(int((nodes[g][some] // counts[some]).min()))
    return out


def _nodes(case: Case) -> NDArray[np.int64]:
    supply = case.supply
    nodes = np.zeros((len(supply.regions), len(supply.node_types)), np.int64)
    np.add.at(nodes, (supply.region, supply.type), supply.available)
    return nodes


def _served(case: Case, r: int, numbers: Sequence[int]) -> float:
    return sum(n * rate for n, (_, _, rate) in zip(numbers, _columns(case, r), strict=True))


def _deployments(case: Case, fraction: float) -> Iterator[tuple[NDArray[np.int64], float]]:
    """All (nodes in use, cost of starting) that serve every role."""
    choices = [list(_role_choices(case, r, fraction)) for r in range(len(case.roles))]
    nodes = _nodes(case)
    for combined in itertools.product(*choices):
        used = sum((u for u, _ in combined), np.zeros_like(nodes))
        if np.all(used <= nodes):
            yield used, sum(init for _, init in combined)


def _role_choices(case: Case, r: int, fraction: float) -> Iterator[tuple[NDArray[np.int64], float]]:
    columns, nodes = _columns(case, r), _nodes(case)
    base = np.full(nodes.shape, np.inf)
    some = case.supply.available > 0
    np.minimum.at(base, (case.supply.region[some], case.supply.type[some]), case.supply.usd[some])
    if case.roles[r].demand <= 0.0:
        yield np.zeros_like(nodes), 0.0
        return
    for numbers in itertools.product(*(range(m + 1) for m in _most(case, r))):
        if _served(case, r, numbers) < fraction * case.roles[r].demand * (1 - 1e-12):
            continue
        used, init, regions = np.zeros_like(nodes), 0.0, set()
        for n, (counts, g, _) in zip(numbers, columns, strict=True):
            if n:
                regions.add(g)
                used[g] += n * counts.astype(np.int64)
                kept = sum(
                    c.number
                    for c in case.running
                    if c.role == r and c.region == g and np.array_equal(c.counts, counts)
                )
                price = float(base[g][counts > 0] @ counts[counts > 0])
                init += max(0, n - kept) * price * case.init_penalty
        if len(regions) >= case.limits.spread and np.all(used <= nodes):
            yield used, init


def _rent(case: Case, used: NDArray[np.int64]) -> float:
    """Cheapest offers for the nodes in use within the limits (inf: none)."""
    supply, limits = case.supply, case.limits
    if limits.max_nodes is not None and used.sum() > limits.max_nodes:
        return np.inf
    cells = list(zip(*np.nonzero(used), strict=True))
    options = []
    for g, c in cells:
        offers = np.flatnonzero((supply.region == g) & (supply.type == c))
        splits = [
            split
            for split in itertools.product(*(range(int(supply.available[k]) + 1) for k in offers))
            if sum(split) == used[g, c]
        ]
        options.append((offers, splits))
    best = np.inf
    for chosen in itertools.product(*(splits for _, splits in options)):
        rented = np.zeros(len(supply.usd), np.int64)
        for (offers, _), split in zip(options, chosen, strict=True):
            rented[offers] = split
        if allowed(case, rented):
            best = min(best, float(supply.usd @ rented))
    return best


def allowed(case: Case, rented: NDArray[np.int64]) -> bool:
    """Whether rented nodes keep the limits on the whole."""
    supply, limits = case.supply, case.limits
    gpus = supply.gpus[supply.type] * rented
    spot = np.array([market == "spot" for market in supply.market])
    if limits.budget is not None and supply.usd @ rented > limits.budget + 1e-9:
        return False
    if limits.spot_share is not None and gpus[spot].sum() > limits.spot_share * gpus.sum() + 1e-9:
        return False
    return limits.max_nodes is None or int(rented.sum()) <= limits.max_nodes


def faults(case: Case, answer: Allocation) -> list[str]:  # noqa: C901 - one list of checks
    """Return what is wrong with an answer, apart from whether it is the cheapest."""
    supply, found = case.supply, []
    used = np.zeros((len(supply.regions), len(supply.node_types)), np.int64)
    served = np.zeros(len(case.roles))
    regions: list[set[int]] = [set() for _ in case.roles]
    for chosen in answer.instances:
        used[chosen.region] += chosen.number * chosen.counts.astype(np.int64)
        served[chosen.role] += chosen.number * chosen.throughput
        regions[chosen.role].add(chosen.region)
        asked = case.roles[chosen.role]
        known = chosen.template is None or np.array_equal(
            asked.counts[chosen.template], chosen.counts
        )
        if not known:
            found.append("template and counts differ")
        if asked.allowed is not None and np.any((chosen.counts > 0) & ~asked.allowed):
            found.append("a node type that is not allowed")
        if not 0 <= chosen.kept <= chosen.number or chosen.number <= 0:
            found.append("kept more than there are")
    rented = np.zeros_like(used)
    np.add.at(rented, (supply.region, supply.type), answer.offers_used)
    if np.any(used != rented):
        found.append("rented nodes are not the nodes in use")
    if np.any(answer.offers_used > supply.available) or np.any(answer.offers_used < 0):
        found.append("more nodes than can be had")
    if not allowed(case, answer.offers_used):
        found.append("a limit is broken")
    for r, asked in enumerate(case.roles):
        share = 1.0 if asked.demand <= 0.0 else min(1.0, served[r] / asked.demand)
        if abs(share - answer.served[r]) > 1e-9:
            found.append("served fraction is not what instances serve")
        if answer.status in ("optimal", "feasible") and share < 1.0 - 1e-8:
            found.append("demand is not met")
        if served[r] > 0.0 and len(regions[r]) < case.limits.spread:
            found.append("a role stands in too few regions")
    if abs(float(supply.usd @ answer.offers_used) - answer.usd_per_hour) > 1e-9:
        found.append("cost does not add up")
    if abs(answer.usd_per_hour + answer.init_usd - answer.objective) > 1e-9:
        found.append("objective does not add up")
    if answer.bound > answer.objective + 1e-9:
        found.append("bound above objective")
    return found
