"""The Lagrangian bound: rows and limits priced into the objective, each service served on its own.

With prices y >= 0 per row (cells, and GPUs of offers) and multipliers >= 0 on the limits, every allocation
costs at least

    L(y) = sum_m S_m(y) + sum_k O_k(y) - (limits' right-hand sides)

where S_m(y) is the least cost of serving m when rows cost y (`service_oracle`), and O_k <= 0 is what renting
the machines of offer k, cut as is best, may gain at these prices. Wherever y comes from, L(y) is a lower
bound over all templates and regions. Where the goal is a common share and machines cost nothing, a share is
impossible, too, if serving it costs more than 0 here: S_m is a step function, of which the best prices for a
share know only the hull. An item of slack s in any allocation makes it cost L(y) + s at least:
items whose slack reaches beyond the incumbent need not be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from atoll.solve.array_types import Floats
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.service_oracle import Legs, ServiceOracle

Goal = Literal["cost", "common", "weighted"]

_ROUNDING = 1e-9
"""Share of what all there is is worth by which sums may differ."""


@dataclass(frozen=True)
class Prices:
    """Multipliers: `row` of each row; budget and machine limit.

    `rent` is 1 where the goal is the cost and 0 where machines cost nothing but what the limits make them.
    """

    row: Floats
    budget: float = 0.0
    nodes: float = 0.0
    rent: float = 1.0


@dataclass(frozen=True)
class Evaluation:
    """The Lagrangian bound at some prices, with each service's functions."""

    goal: Goal
    prices: Prices
    value: float
    legs: tuple[Legs, ...]


def machine_rents(model: RentModel, prices: Prices) -> Floats:
    """Return what renting one machine of each offer costs, limits priced in."""
    supply = model.supply
    # Prices stand for more than rent here, but the budget is for rent.
    if supply.paid is not None:
        rents = supply.usd * prices.rent + supply.paid * prices.budget
        return np.asarray(rents + prices.nodes)
    return np.asarray(supply.usd * (prices.rent + prices.budget) + prices.nodes)


def gpu_starts(model: RentModel, prices: Prices) -> Floats:
    """Return what taking one GPU of each offer anew costs beside its machine's rent."""
    return np.asarray(model.start * prices.rent)


def market_prices(model: RentModel, rent: float = 1.0, *, alone: bool = False) -> Prices:
    """Return prices at which nobody gains by renting: GPUs of a machine share its rent.

    `alone`: new slices cost all of their machine instead.
    """
    supply = model.supply
    per_gpu = rent * supply.usd / supply.gpus
    row = np.zeros(model.rows)
    row[model.cells :] = per_gpu
    cell = np.full(model.cells, np.inf)
    for k, sizes in enumerate(supply.sizes):
        if supply.available[k] > 0:
            for gpus, kind in sizes:
                at = model.cell(k, kind)
                paid = supply.gpus[k] if alone else gpus
                cell[at] = min(cell[at], paid * per_gpu[k] + gpus * rent * model.start[k])
    row[: model.cells] = np.where(np.isfinite(cell), cell, 0.0)
    return Prices(row, rent=rent)


def offers_part(model: RentModel, prices: Prices) -> float:
    """Return the part of L(y) that does not depend on the services."""
    supply, limits = model.supply, model.limits
    rents, starts = machine_rents(model, prices), gpu_starts(model, prices)
    held = prices.row[model.cells :]
    total = 0.0
    for k, sizes in enumerate(supply.sizes):
        # Each offer is taken not at all or whole, whichever makes L(y) less.
        machine = min(0.0, float(rents[k] - supply.gpus[k] * held[k]))
        slices = min(
            starts[k] + held[k] - prices.row[model.cell(k, kind)] / gpus for gpus, kind in sizes
        )
        total += supply.available[k] * (machine + supply.gpus[k] * min(0.0, float(slices)))
    if limits.budget is not None:
        total -= prices.budget * limits.budget
    if limits.max_nodes is not None:
        total -= prices.nodes * limits.max_nodes
    return total


def lift(model: RentModel, prices: Prices) -> Prices:
    """Return prices of rows no lower than anybody sells at: the bound is no lower there.

    Duals of what nobody uses may be anything down to nothing, and each cell that looks free is a round lost.
    """
    supply = model.supply
    row = prices.row.copy()
    rents, starts = machine_rents(model, prices), gpu_starts(model, prices)
    held = row[model.cells :]
    np.maximum(held, rents / supply.gpus, out=held)
    least = np.full(model.cells, np.inf)
    for k, sizes in enumerate(supply.sizes):
        if supply.available[k] > 0:
            for gpus, kind in sizes:
                at = model.cell(k, kind)
                least[at] = min(least[at], gpus * (starts[k] + held[k]))
    some = np.flatnonzero(np.isfinite(least))
    row[some] = np.maximum(row[some], least[some])
    return replace(prices, row=row)


def price_of_all(model: RentModel) -> float:
    """Return what no allocation costs more than: all machines there are, all of them started anew."""
    supply = model.supply
    rent = float(supply.usd @ supply.available)
    # A budget bounds the cost only where prices are rents.
    if model.limits.budget is not None and supply.paid is None:
        rent = min(rent, model.limits.budget)
    return rent + float((model.start * supply.gpus) @ supply.available)


def evaluate(
    model: RentModel,
    oracles: Sequence[ServiceOracle],
    goal: Goal,
    prices: Prices,
    weights: Floats,
) -> Evaluation:
    """Return the Lagrangian bound at these prices; `weights` of the services matter to a weighted goal."""
    row = prices.row
    legs = tuple(oracle.legs(row) for oracle in oracles)
    value = offers_part(model, prices) + sum(leg.gain for leg in legs)
    if goal == "cost":
        value += sum(leg.least for leg in legs)
    elif goal == "common":
        grid = oracles[0].grid
        left = 1.0 - np.arange(grid + 1) / grid
        taken = sum((leg.total.dense(grid) for leg in legs), np.zeros(grid + 1))
        # A level that takes more than all there is worth at these prices cannot be served.
        possible = np.flatnonzero(value + taken <= _ROUNDING * max(1.0, -value))
        value = max(value + float((left + taken).min()), float(left[possible[-1]]))
    else:
        for weight, leg in zip(weights, legs, strict=True):
            value += float((weight * (1.0 - leg.total.level / leg.grid) + leg.total.value).min())
    return Evaluation(goal, prices, value, legs)


def slacks(oracles: Sequence[ServiceOracle], at: Evaluation) -> list[Floats]:
    """Return per service by how much each item, once used, raises the bound at least (goal cost)."""
    return [oracle.slacks(legs) for oracle, legs in zip(oracles, at.legs, strict=True)]
