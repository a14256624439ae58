"""Choosing one mix per role: column generation whose subproblem is a role's cheapest mix of instances.

The relaxation over mixes (Dantzig-Wolfe) is far tighter than that over single instances when nodes are
scarce, for a mix is whole and fits what can be had. At prices y of nodes every allocation costs at least

    L(y) = sum_r (cheapest mix of r at y) + sum_k min(0, rent_k - y_cell(k)) available_k - ...

(`relaxation` with the capped cover of `mixes` in place of K). Prices are smoothed towards the best known.
Afterwards all mixes within s of their role's cheapest are listed: an integer solve over them that proves
b shows that nothing costs less than min(b, L + s). If s spans the gap to the incumbent, it is the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.plan.solvers.columns import Model
from atoll.plan.solvers.lp import LpResult, Sparse
from atoll.plan.solvers.mixes import items_of
from atoll.plan.solvers.pool import Mix, MixPool, Priced
from atoll.plan.solvers.relaxation import Prices, offers_part
from atoll.plan.solvers.rental import Rental
from atoll.plan.solvers.search import Deadline, Solution, Target

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDS = 150
_SMOOTH = 0.5
_LISTED = 4000
_LIST_WORK = 60_000_000
_NARROWEST = 2e-3


class MixMaster(Rental):
    """Columns beside those of `rental`: z_r of each role left unserved, and the mixes.

    demand r: sum share_p lambda_p + z_r >= 1; with `partial` mixes also one mix per role at most.
    """

    def __init__(
        self, model: Model, unserved: Floats, *, rent: float, partial: bool, seed: int
    ) -> None:
        super().__init__(model, rent=rent, seed=seed)
        roles = len(model.pairs)
        self._partial = partial
        self._demand_row = self.add_empty_rows(np.ones(roles))
        self._single_row = self.add_empty_rows(np.full(roles if partial else 0, -1.0))
        each = np.arange(roles)
        self._unserved = self.lp.add_columns(
            unserved,
            np.zeros(roles),
            np.ones(roles),
            Sparse.of(each, self._demand_row + each, np.ones(roles), roles),
        )
        self._first = self.lp.columns
        self._known: list[tuple[int, Mix]] = []

    @property
    def number(self) -> int:
        """How many mixes are in."""
        return len(self._known)

    def add(self, role: int, mixes: list[Mix]) -> None:
        """Add mixes of a role."""
        if not mixes:
            return
        use = np.array([m.use for m in mixes])
        owner, cell = np.nonzero(use)
        each = np.arange(len(mixes))
        share = np.array([m.share if self._partial else 1.0 for m in mixes])
        owners = [owner, each]
        rows = [cell, np.full(len(mixes), self._demand_row + role)]
        values = [-use[owner, cell].astype(np.float64), share]
        if self._partial:
            owners.append(each)
            rows.append(np.full(len(mixes), self._single_row + role))
            values.append(np.full(len(mixes), -1.0))
        self.lp.add_columns(
            np.array([m.init for m in mixes]),
            np.zeros(len(mixes)),
            np.ones(len(mixes)),
            Sparse.of(
                np.concatenate(owners), np.concatenate(rows), np.concatenate(values), len(mixes)
            ),
        )
        self._known += [(role, mix) for mix in mixes]

    def unserved(self, result: LpResult) -> Floats:
        """Return how much of each role a relaxed solution leaves unserved."""
        return result.values[self._unserved : self._unserved + len(self.model.pairs)]

    def solve_mixes(
        self,
        *,
        serve_all: bool,
        start: list[Mix | None] | None,
        time_limit_s: float,
        target: Target,
        node_limit: int | None,
    ) -> tuple[float, float, list[Mix | None] | None]:
        """Return (objective, bound over the mixes that are in, mix per role) of an integer solve."""
        roles = len(self.model.pairs)
        columns = self._unserved + np.arange(roles)
        if serve_all:
            self.lp.set_bounds(columns, np.zeros(roles), np.zeros(roles))
        found = self.solve_integer(
            np.arange(self._first, self.lp.columns),
            time_limit_s=time_limit_s,
            gap=0.5 * target.gap,
            absolute_gap=0.5 * target.absolute,
            start=None if start is None else self._values(start),
            node_limit=node_limit,
        )
        if serve_all:
            self.lp.set_bounds(columns, np.zeros(roles), np.ones(roles))
        bound = np.inf if found.status == "infeasible" else found.bound
        if found.values is None:
            return np.inf, bound, None
        chosen: list[Mix | None] = [None] * roles
        for i in np.flatnonzero(found.values[self._first :] > 0.5):
            role, mix = self._known[i]
            chosen[role] = mix
        self.rented = np.rint(found.values[: len(self.model.supply.usd)]).astype(np.int64)
        return found.objective, bound, chosen

    def _values(self, start: list[Mix | None]) -> Floats:
        values = np.zeros(self.lp.columns)
        values[self._unserved : self._unserved + len(start)] = [
            1.0 if mix is None else (1.0 - mix.share if self._partial else 0.0) for mix in start
        ]
        for i, (role, mix) in enumerate(self._known):
            if mix is start[role]:
                values[self._first + i] = 1.0
        values[: len(self.rented)] = self.rented
        return values


@dataclass(frozen=True)
class Root:
    """The best bound over prices: value, and per role what was found there."""

    prices: Prices
    value: float
    priced: tuple[Priced, ...]


class Decomposition:
    """One search over mixes; `run` carries it to its target, to where listing mixes is hopeless, or to the end.

    `unserved[r]` is the price of leaving role r unserved: part of it too where `partial`, all or nothing
    otherwise; with `serve_all` it is but a device of the relaxation.
    """

    def __init__(
        self,
        model: Model,
        unserved: Floats,
        target: Target,
        deadline: Deadline,
        *,
        rent: float = 1.0,
        partial: bool = False,
        serve_all: bool = True,
        seed: int = 0,
    ) -> None:
        self.model, self.target, self.deadline = model, target, deadline
        self.unserved, self.partial, self.serve_all = unserved, partial, serve_all
        nodes = np.zeros(model.cells, np.int64)
        np.add.at(nodes, model.offer_cell, model.supply.available)
        self.pools = [
            MixPool(
                items_of(pairs, kept, nodes, model.penalty),
                model.cells,
                model.regions,
                model.limits.spread,
            )
            for pairs, kept in zip(model.pairs, model.kept, strict=True)
        ]
        self.master = MixMaster(model, unserved, rent=rent, partial=partial, seed=seed)
        self.root: Root | None = None
        self.bound = -np.inf
        self.objective = np.inf
        self.chosen: list[Mix | None] | None = None
        self.rented = np.zeros(len(model.supply.usd), np.int64)
        self.short = False
        self.complete = False
        self.rounds = 0
        self.mips = 0

    def evaluate(self, prices: Prices) -> float:
        """Find every role's cheapest mix at these prices; return the bound."""
        scale = max(abs(self.bound) if np.isfinite(self.bound) else 0.0, 1e-3)
        eps = 0.02 * max(self.target.gap * scale, self.target.absolute) / max(1, len(self.pools))
        value = offers_part(self.model.supply, self.model.limits, prices)
        priced = []
        for role, pool in enumerate(self.pools):
            own = pool.price(
                prices.cell, float(self.unserved[role]) if self.partial else np.inf, eps
            )
            priced.append(own)
            value += own.least if self.serve_all else min(own.least, float(self.unserved[role]))
            if own.fresh is not None and pool.add(own.fresh):
                self.master.add(role, [own.fresh])
        if self.root is None or value > self.root.value:
            self.root = Root(prices, value, tuple(priced))
        self.bound = max(self.bound, value)
        return value

    def converge(self, prices: Prices) -> LpResult:
        """Improve the bound from these prices until it meets the relaxation over mixes."""
        self.evaluate(prices)
        smooth = _SMOOTH
        while True:
            self.rounds += 1
            result = self.master.lp.solve(self.deadline.left)
            root = self.root
            assert root is not None
            if self._near(result.objective) or self.rounds >= _ROUNDS or self._over():
                break
            there = self.master.prices(result)
            known = self.master.number
            before = root.value
            self.evaluate(blend(root.prices, there, smooth))
            fresh = self.master.number > known
            if not fresh and self.bound <= before:
                if smooth == 0.0:
                    break
                smooth = 0.0
            else:
                smooth = _SMOOTH
        self.short = bool(self.master.unserved(result).max(initial=0.0) > 1e-7)
        return result

    def _near(self, objective: float) -> bool:
        return objective - self.bound <= 0.1 * self.target.spare(objective)

    def _over(self) -> bool:
        return self.deadline.left <= 0.0 or self.bound == np.inf

    def done(self) -> bool:
        """Whether the target is reached or time is up."""
        found = bool(np.isfinite(self.objective))
        near = found and self.objective - self.bound <= self.target.spare(self.objective)
        return near or self._over()

    def integer(self, node_limit: int | None) -> float:
        """Solve over the mixes that are in; keep what is better and return the bound over them."""
        self.mips += 1
        if self.chosen is not None:
            self.master.rented = self.rented
        objective, bound, chosen = self.master.solve_mixes(
            serve_all=self.serve_all,
            start=self.chosen,
            time_limit_s=self.deadline.left,
            target=self.target,
            node_limit=node_limit,
        )
        if chosen is not None and objective < self.objective:
            self.objective, self.chosen, self.rented = objective, chosen, self.master.rented
        return bound

    def close(self) -> None:
        """List mixes ever further from the cheapest and solve over them until the gap is proven."""
        root = self.root
        assert root is not None
        spread = _NARROWEST * max(abs(root.value), self.target.absolute)
        while not self.done():
            needed = np.inf
            if np.isfinite(self.objective):
                needed = self.objective - self.target.spare(self.objective) - root.value
            last = spread >= needed
            within = min(spread, needed)
            if not self._list(root, within):
                return
            bound = self.integer(None if last else 200)
            self.bound = max(self.bound, min(bound, root.value + within))
            spread *= 2.0
            if last:
                self.complete = True
                return

    def _list(self, root: Root, within: float) -> bool:
        """Add every mix within that much of its role's cheapest; return whether they could be listed."""
        for role, pool in enumerate(self.pools):
            own = root.priced[role]
            unserved = float(self.unserved[role]) if self.partial else np.inf
            mixes, exhaustive = pool.below(
                own.cost, own.table, unserved, own.least + within, _LISTED, _LIST_WORK
            )
            if not exhaustive:
                return False
            self.master.add(role, [mix for mix in mixes if pool.add(mix)])
        return True


def blend(a: Prices, b: Prices, weight: float) -> Prices:
    """Return `weight` of a and the rest of b."""
    return Prices(
        weight * a.cell + (1.0 - weight) * b.cell,
        weight * a.budget + (1.0 - weight) * b.budget,
        weight * a.spot + (1.0 - weight) * b.spot,
        weight * a.nodes + (1.0 - weight) * b.nodes,
        a.rent,
    )


def solution_of(model: Model, chosen: list[Mix | None], rented: Ints) -> Solution:
    """Return the instances of the chosen mixes."""
    started: list[dict[int, int]] = []
    kept = []
    for role, mix in enumerate(chosen):
        keys = model.pairs[role].keys(model.regions)
        own: dict[int, int] = {}
        running = np.zeros(len(model.kept[role].pairs), np.int64)
        for source, number in mix.items if mix is not None else ():
            if source >= 0:
                own[int(keys[source])] = number
            else:
                running[-1 - source] = number
        started.append(own)
        kept.append(running)
    return Solution(rented, tuple(started), tuple(kept))
