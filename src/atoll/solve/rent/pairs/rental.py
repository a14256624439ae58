"""The part of every master problem that rents nodes: offers, node balance per cell, limits on the whole.

Columns x_k (nodes rented of offer k) come first. Rows, all of the form >=:

    cell (g, c)     sum_k x_k - nodes in use >= 0
    limits          budget, spot share, number of nodes

What uses the nodes is added by those who build on it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.solve.lp import LinearProgram, LpResult, MipResult, Sparse
from atoll.solve.rent.columns import RentModel
from atoll.solve.rent.relaxation import Prices

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class RentalProgramme:
    """A linear programme with offers, cells and limits; `rent` = 0 makes nodes free of charge."""

    def __init__(self, model: RentModel, *, rent: float, seed: int) -> None:
        self.model = model
        self.lp = LinearProgram(seed)
        self.rent = rent
        self.limit_rows: dict[str, int] = {}
        self._add_rows()
        self._add_offers()

    def _add_rows(self) -> None:
        limits = self.model.limits
        lower = [0.0] * self.model.cells
        for name, least in (
            ("budget", None if limits.budget is None else -limits.budget),
            ("spot_share", None if limits.spot_share is None else 0.0),
            ("max_nodes", None if limits.max_nodes is None else -float(limits.max_nodes)),
        ):
            if least is not None:
                self.limit_rows[name] = len(lower)
                lower.append(least)
        self.add_empty_rows(np.array(lower))

    def add_empty_rows(self, lower: Floats) -> int:
        """Add rows >= `lower` to be filled by columns; return the first."""
        nothing = np.zeros(0, np.int64)
        entries = Sparse.of(nothing, nothing, np.zeros(0), len(lower))
        return self.lp.add_rows(lower, np.full(len(lower), np.inf), entries)

    def _add_offers(self) -> None:
        model, supply = self.model, self.model.supply
        offers = np.arange(len(supply.usd))
        rows, values = [model.offer_cell], [np.ones(len(offers))]
        share = model.limits.spot_share
        for name, row in self.limit_rows.items():
            rows.append(np.full(len(offers), row))
            if name == "budget":
                values.append(-supply.usd)
            elif name == "max_nodes":
                values.append(-np.ones(len(offers)))
            elif share is not None:
                values.append(supply.gpus[supply.type] * (share - model.spot()))
        entries = Sparse.of(
            np.tile(offers, len(rows)), np.concatenate(rows), np.concatenate(values), len(offers)
        )
        self.lp.add_columns(
            self.rent * supply.usd,
            np.zeros(len(offers)),
            supply.available.astype(np.float64),
            entries,
        )

    def prices(self, result: LpResult) -> Prices:
        """Return the duals that a Lagrangian bound is made of."""
        duals = np.maximum(0.0, result.duals)
        limit = {name: float(duals[row]) for name, row in self.limit_rows.items()}
        return Prices(
            duals[: self.model.cells],
            limit.get("budget", 0.0),
            limit.get("spot_share", 0.0),
            limit.get("max_nodes", 0.0),
            self.rent,
        )

    def solve_integer(
        self,
        integer: Ints,
        *,
        time_limit_s: float,
        gap: float,
        absolute_gap: float,
        start: Floats | None,
        node_limit: int | None,
    ) -> MipResult:
        """Solve with whole nodes and these further columns whole."""
        offers = np.arange(len(self.model.supply.usd))
        self.lp.set_integer(np.concatenate([offers, integer]))
        # A share of what is in use: renting idle nodes must not buy room for more spot.
        exact = np.arange(self.model.cells if "spot_share" in self.limit_rows else 0)
        self.lp.set_row_bounds(exact, 0.0, 0.0)
        result = self.lp.solve_mip(
            time_limit_s=time_limit_s,
            gap=gap,
            absolute_gap=absolute_gap,
            start=start,
            node_limit=node_limit,
        )
        self.lp.set_row_bounds(exact, 0.0, np.inf)
        return result
