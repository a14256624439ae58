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

import numpy as np
from numpy.typing import NDArray

from atoll.plan.solvers.allocation_types import AllocationLimits, Supply
from atoll.plan.solvers.columns import Kept, Pairs
from atoll.plan.solvers.cover import cheapest_by_weight, closure, cover

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Prices:
    """Multipliers: `cell[g * C + c]` of the node balance; budget, spot share and node limit."""

    cell: Floats
    budget: float = 0.0
    spot: float = 0.0
    nodes: float = 0.0


@dataclass(frozen=True)
class Covered:
    """One role at some prices: `table[j, d]` as in `cover`, the subadditive part and the pair costs."""

    table: Floats
    additive: Floats
    cost: Floats
    kept_cost: Floats

    @property
    def value(self) -> float:
        """Cost of the cheapest cover of the whole demand."""
        return float(self.table[-1, -1])


def grid_weights(share: Floats, grid: int) -> NDArray[np.int32]:
    """Return throughputs in steps of 1 / grid of the demand, rounded up: a cover stays a cover."""
    return np.minimum(np.ceil(share * grid - 1e-9), grid).astype(np.int32)


def cover_role(
    pairs: Pairs, kept: Kept, cell: Floats, penalty: Floats, regions: int, spread: int, grid: int
) -> Covered:
    """Price all pairs of a role at `cell + penalty` (running ones at `cell`) and cover its demand."""
    cost = pairs.prices(cell + penalty)
    kept_cost = kept.pairs.prices(cell)
    groups = regions if spread > 1 else 1
    best = cheapest_by_weight(cost, grid_weights(pairs.share, grid), pairs.region, groups, grid + 1)
    if spread == 1 and not len(kept.pairs):
        value, _, _ = closure(best[0])
        table = np.stack([value, value])
        return Covered(table, value, cost, kept_cost)
    additive, _, _ = closure(best.min(axis=0))
    group = kept.pairs.region if groups > 1 else np.zeros(len(kept.pairs), np.int32)
    table = cover(
        best,
        spread,
        group.astype(np.int64),
        grid_weights(kept.pairs.share, grid),
        kept_cost,
        kept.number,
    )
    return Covered(table, additive, cost, kept_cost)


def rents(supply: Supply, limits: AllocationLimits, prices: Prices) -> Floats:
    """Return what renting one node of each offer costs once the limits are priced in."""
    rent = supply.usd * (1.0 + prices.budget) + prices.nodes
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


def slack(covered: Covered, weight: NDArray[np.int32], cost: Floats) -> Floats:
    """Return by how much each pair, once used, raises the bound at least."""
    table = covered.table
    rest = table[max(0, len(table) - 2)]
    return cost + rest[table.shape[1] - 1 - weight] - covered.value
