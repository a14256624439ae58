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

from atoll.core.errors import InternalError
from atoll.plan.solvers.columns import Model, Solution
from atoll.plan.solvers.mix_master import MixMaster
from atoll.plan.solvers.mixes import items_of
from atoll.plan.solvers.pool import Mix, MixPool, Priced
from atoll.plan.solvers.relaxation import Prices, offers_part
from atoll.plan.solvers.standing import Standing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDS = 150
_SMOOTH = 0.5
_LISTED = 4000
_LIST_WORK = 60_000_000
_NARROWEST = 2e-3
_WIDEST = 0.3
_EXACT = 0.02


@dataclass(frozen=True)
class Root:
    """The best bound over prices: value, and per role what was found there."""

    prices: Prices
    value: float
    priced: tuple[Priced, ...]


class Decomposition:
    """One search over mixes, in steps: `converge` to a bound, `integer` for an answer, `close` the gap.

    `unserved[r]` is the price of leaving role r unserved: part of it too where `partial`, all or nothing
    otherwise; with `serve_all` it is but a device of the relaxation.
    """

    def __init__(
        self,
        model: Model,
        unserved: Floats,
        standing: Standing,
        *,
        rent: float = 1.0,
        partial: bool = False,
        serve_all: bool = True,
        seed: int = 0,
    ) -> None:
        self.model, self.standing, self.unserved = model, standing, unserved
        self.rounds = 0
        self.mips = 0
        self._partial, self._serve_all = partial, serve_all
        nodes = np.zeros(model.cells, np.int64)
        np.add.at(nodes, model.offer_cell, model.supply.available)
        self._pools = [
            MixPool(
                items_of(pairs, kept, nodes, model.penalty),
                model.cells,
                model.regions,
                model.limits.spread,
            )
            for pairs, kept in zip(model.pairs, model.kept, strict=True)
        ]
        self._master = MixMaster(model, unserved, rent=rent, partial=partial, seed=seed)
        self._root: Root | None = None
        self._chosen: tuple[list[Mix | None], Ints] | None = None

    @property
    def root(self) -> Root:
        """The best bound so far; there is one after `evaluate`."""
        if self._root is None:
            raise InternalError("no prices were evaluated yet")
        return self._root

    @property
    def mixes(self) -> int:
        """How many mixes are in."""
        return self._master.number

    def set_unserved(self, unserved: Floats) -> None:
        """Change the price of leaving roles unserved."""
        self.unserved = unserved
        self._master.set_unserved(unserved)

    def evaluate(self, prices: Prices) -> float:
        """Find every role's cheapest mix at these prices; return the bound."""
        bound = self.standing.bound
        spare = self.standing.target.spare(bound if np.isfinite(bound) else 1e-3)
        eps = _EXACT * spare / max(1, len(self._pools))
        value = offers_part(self.model.supply, self.model.limits, prices)
        priced = []
        for role, pool in enumerate(self._pools):
            unserved = float(self.unserved[role])
            own = pool.price(prices.cell, unserved if self._partial else np.inf, eps)
            priced.append(own)
            value += own.least if self._serve_all else min(own.least, unserved)
            if own.fresh is not None and pool.add(own.fresh):
                self._master.add(role, [own.fresh])
        if self._root is None or value > self._root.value:
            self._root = Root(prices, value, tuple(priced))
        self.standing.prove(value)
        return value

    def converge(self, prices: Prices, enough: float = np.inf) -> None:
        """Improve the bound from these prices until it meets the relaxation over mixes, or is `enough`."""
        self.evaluate(prices)
        smooth = _SMOOTH
        while True:
            self.rounds += 1
            result = self._master.lp.solve(self.standing.deadline.left)
            near = 0.1 * self.standing.target.spare(result.objective)
            if result.objective - self.root.value <= near or self.rounds >= _ROUNDS:
                return
            if self.root.value > enough or result.objective < enough < np.inf:
                return
            known, before = self.mixes, self.root.value
            there = self._master.prices(result)
            self.evaluate(blend(self.root.prices, there, smooth))
            if self.standing.done:
                return
            if self.mixes > known or self.root.value > before:
                smooth = _SMOOTH
            elif smooth == 0.0:
                return
            else:
                smooth = 0.0

    def integer(self, node_limit: int | None) -> float:
        """Solve over the mixes that are in; offer what is found and return the bound over them."""
        self.mips += 1
        answer = self._master.solve_mixes(
            serve_all=self._serve_all,
            start=self._chosen,
            time_limit_s=self.standing.deadline.left,
            target=self.standing.target,
            node_limit=node_limit,
        )
        if answer.chosen is not None:
            solution = solution_of(self.model, answer.chosen, answer.rented)
            if self.standing.offer(solution, answer.objective):
                self._chosen = answer.chosen, answer.rented
        return answer.bound

    def close(self) -> None:
        """List mixes ever further from the cheapest and solve over them until the gap is proven."""
        standing, root = self.standing, self.root
        within = _NARROWEST * max(abs(root.value), standing.target.absolute)
        while not standing.done:
            needed = standing.wanted - root.value
            last = within >= needed
            if not self._list(root, min(within, needed)):
                return
            bound = self.integer(None if last else 200)
            standing.prove(min(bound, root.value + min(within, needed)))
            within *= 2.0
            if last or (standing.solution is None and within > _WIDEST * abs(root.value)):
                return

    def _list(self, root: Root, within: float) -> bool:
        """Add every mix within that much of its role's cheapest; return whether they could be listed."""
        for role, pool in enumerate(self._pools):
            own = root.priced[role]
            unserved = float(self.unserved[role]) if self._partial else np.inf
            mixes, exhaustive = pool.below(
                own.cost, own.table, unserved, own.least + within, _LISTED, _LIST_WORK
            )
            if not exhaustive:
                return False
            self._master.add(role, [mix for mix in mixes if pool.add(mix)])
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
