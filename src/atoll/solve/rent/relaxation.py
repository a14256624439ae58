"""The Lagrangian bound: node balance and limits priced into the objective, each role covered on its own.

With prices y >= 0 per cell (region, node type) and multipliers >= 0 on the limits, every allocation costs
at least

    L(y) = sum_r K_r(y)[G] + sum_k min(0, rent_k - y_cell(k)) available_k - (limits' right-hand sides)

where K_r(y) is the cheapest integer cover of role r (see `cover`) when a node of a cell costs y plus its
initialisation penalty, and rent_k is the price of offer k plus what the limits add. No matter where y
comes from, L(y) is a lower bound over all templates and regions. A pair i of role r in any allocation
costs at least L(y) + slack_i with slack_i = c_i + K_r[G - w_i] - K_r[G]: pairs whose slack reaches
beyond the incumbent are excluded for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atoll.solve.cover import cheapest_by_weight, closure, cover
from atoll.solve.rent.columns import GRID, Kept, Pairs, RentModel
from atoll.solve.rent.types import AllocationLimits, Supply

Floats = NDArray[np.float64]
Goal = Literal["cost", "common", "weighted"]

_STEPS = np.arange(GRID + 1) / GRID
_BELOW = np.maximum(0.0, np.arange(GRID + 1) - 1.0) / GRID
_COARSE = 1024


@dataclass(frozen=True)
class Prices:
    """Multipliers: `cell[g * C + c]` of the node balance; budget, spot share and node limit.

    `rent` is 1 where the goal is the cost and 0 where nodes cost nothing but what the limits make them.
    """

    cell: Floats
    budget: float = 0.0
    spot: float = 0.0
    nodes: float = 0.0
    rent: float = 1.0


@dataclass(frozen=True)
class Covered:
    """One role at some prices: `table[j, d]` as in `cover`, its subadditive part, the lowest price of serving
    the demand at the best pair's price per throughput, and the pair costs.
    """

    table: Floats
    additive: Floats
    rate: float
    cost: Floats
    kept_cost: Floats
    floor: float = -np.inf

    @property
    def serving(self) -> Floats:
        """Cost of covering d where serving nothing is allowed and costs nothing."""
        return np.concatenate([np.zeros(1), self.table[-1, 1:]])

    @property
    def value(self) -> float:
        """Cost of the cheapest cover of the whole demand, or what else is known to be its least."""
        return max(self.floor, self.rate, float(self.table[-1, -1]))


@dataclass(frozen=True)
class Evaluation:
    """The Lagrangian bound at some prices, with each role's cover."""

    goal: Goal
    prices: Prices
    value: float
    covered: tuple[Covered, ...]
    weights: Floats


def cover_role(
    pairs: Pairs, kept: Kept, cell: Floats, penalty: Floats, regions: int, spread: int
) -> Covered:
    """Price all pairs of a role at `cell + penalty` (running ones at `cell`) and cover its demand."""
    cost = pairs.prices(cell + penalty)
    kept_cost = kept.pairs.prices(cell)
    groups = regions if spread > 1 else 1
    best = cheapest_by_weight(cost, pairs.weight, pairs.region, groups, GRID + 1)
    # Whatever the grid, a share of the demand costs at least that share at the best price per throughput;
    # d steps may be hardly more than d - 1 of them.
    new_rate = float((cost / pairs.share).min(initial=np.inf))
    additive, _, _ = closure(best.min(axis=0))
    plain = additive
    if len(cost):
        additive = np.maximum(additive, new_rate * _STEPS)
    if spread == 1 and not len(kept.pairs):
        table = np.maximum(plain, new_rate * _BELOW) if len(cost) else plain
        return Covered(np.stack([table, table]), additive, new_rate, cost, kept_cost)
    rate = min(new_rate, float((kept_cost / kept.pairs.share).min(initial=np.inf)))
    group = kept.pairs.region if groups > 1 else np.zeros(len(kept.pairs), np.int32)
    table = cover(best, spread, group.astype(np.int64), kept.pairs.weight, kept_cost, kept.number)
    if np.isfinite(rate):
        table = np.maximum(table, rate * _BELOW)
    return Covered(table, additive, rate, cost, kept_cost)


def cheapest_rents(model: RentModel) -> Floats:
    """Return the lowest price on offer in each cell (0 where nothing is)."""
    rent = np.full(model.cells, np.inf)
    some = model.supply.available > 0
    np.minimum.at(rent, model.offer_cell[some], model.supply.usd[some])
    return np.where(np.isfinite(rent), rent, 0.0)


def price_of_all(model: RentModel) -> float:
    """Return what no allocation costs more than: all nodes there are, all of them started anew."""
    supply, penalty = model.supply, model.penalty[model.offer_cell]
    rent = float(supply.usd @ supply.available)
    if model.limits.budget is not None:
        rent = min(rent, model.limits.budget)
    return rent + float(penalty @ supply.available)


def rents(supply: Supply, limits: AllocationLimits, prices: Prices) -> Floats:
    """Return what renting one node of each offer costs once the limits are priced in."""
    rent = supply.usd * (prices.rent + prices.budget) + prices.nodes
    if limits.spot_share is not None:
        spot = np.array([market == "spot" for market in supply.market], np.float64)
        rent = rent + prices.spot * supply.gpus[supply.type] * (spot - limits.spot_share)
    return rent


def offers_part(supply: Supply, limits: AllocationLimits, prices: Prices) -> float:
    """Return the part of L(y) that does not depend on the roles."""
    cells = supply.region * len(supply.node_types) + supply.type
    left = np.minimum(0.0, rents(supply, limits, prices) - prices.cell[cells])
    total = float(left @ supply.available)
    if limits.budget is not None:
        total -= prices.budget * limits.budget
    if limits.max_nodes is not None:
        total -= prices.nodes * limits.max_nodes
    return total


def evaluate(model: RentModel, goal: Goal, prices: Prices, weights: Floats) -> Evaluation:
    """Return the Lagrangian bound at these prices; `weights` of the roles matter to a weighted goal."""
    penalty = model.penalty if goal == "cost" else np.zeros(model.cells)
    covered = tuple(
        cover_role(pairs, kept, prices.cell, penalty, model.regions, model.limits.spread)
        for pairs, kept in zip(model.pairs, model.kept, strict=True)
    )
    value = offers_part(model.supply, model.limits, prices)
    tables = [c.serving for c in covered]
    if goal == "cost":
        value += sum(c.value for c in covered)
    elif goal == "common":
        value += float((1.0 - _STEPS + sum(tables, np.zeros(GRID + 1))).min())
    else:
        value += sum(
            float((weight * (1.0 - _STEPS) + table).min())
            for weight, table in zip(weights, tables, strict=True)
        )
    return Evaluation(goal, prices, value, covered, weights)


def slacks(model: RentModel, at: Evaluation) -> list[Floats]:
    """Return per role by how much each pair, once used, raises the bound at least."""
    if at.goal == "cost":
        return [_slack(c, pairs.weight) for c, pairs in zip(at.covered, model.pairs, strict=True)]
    out = []
    for role, (covered, pairs) in enumerate(zip(at.covered, model.pairs, strict=True)):
        weight, others = float(at.weights[role]), np.zeros(GRID + 1)
        if at.goal == "common":
            weight = 1.0
            others = sum((c.serving for c in at.covered if c is not covered), others)
        out.append(_share_slack(covered, pairs.weight, weight * (1.0 - _STEPS), others))
    return out


def _slack(covered: Covered, weight: NDArray[np.int32]) -> Floats:
    rest = covered.table[-2]
    return np.asarray(np.maximum(0.0, covered.cost + rest[GRID - weight] - covered.value))


def _share_slack(
    covered: Covered, weight: NDArray[np.int32], unserved: Floats, others: Floats
) -> Floats:
    """Slack where serving d leaves `unserved[d]`, falling, and costs other roles `others[d]`, rising.

    Between two coarse steps a < d <= b nothing is below `unserved` at b and the rest at a: coarse steps
    keep the table of (served, weight) small.
    """
    width = GRID // _COARSE
    last = np.arange(0, GRID + 1, width)
    first = np.concatenate([[0], last[:-1] + 1])
    base = unserved[last] + others[first]
    least = float((unserved + others + covered.serving).min())
    rest = covered.table[-2].copy()
    rest[0] = 0.0
    by_weight = np.array([(base + rest[np.maximum(0, first - w)]).min() for w in last])
    up = -(-weight.astype(np.int64) // width)
    return np.asarray(np.maximum(0.0, covered.cost + by_weight[up] - least))
