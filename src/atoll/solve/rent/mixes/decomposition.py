"""Choosing one mix per role: column generation whose subproblem is a role's cheapest mix of instances.

The relaxation over mixes (Dantzig-Wolfe) is far tighter than that over single instances when nodes are
scarce, for a mix is whole and fits what can be had. At prices y of nodes every allocation costs at least

    L(y) = sum_r (cheapest mix of r at y) + sum_k min(0, rent_k - y_cell(k)) available_k - ...

(`relaxation` with the capped cover of `mixes` in place of K). Prices are smoothed towards the best known.
Afterwards all mixes within s of their role's cheapest are listed: an integer solve over them that proves
b shows that nothing costs less than min(b, L + s). If s spans the gap to the incumbent, it is the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import InternalError
from atoll.solve.lp import LpResult
from atoll.solve.rent.answer import cheapest_nodes
from atoll.solve.rent.columns import RentModel, Solution
from atoll.solve.rent.mixes.mix_master import MixMaster
from atoll.solve.rent.mixes.mixes import items_of
from atoll.solve.rent.mixes.pool import Mix, MixPool, PricedRole
from atoll.solve.rent.relaxation import Prices, offers_part
from atoll.solve.rent.standing import Incumbent

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDS = 150
_SMOOTH = 0.5
_LISTED = 4000
_LOOSE = 1000
_LIST_WORK = 60_000_000
_FIRST = 2.5e-4
_NARROWEST = 1e-4
_WIDEST = 0.3
_EXACT = 0.02
_STEPS_PER_S = 3e7
"""Steps of the search for mixes in a second, less rather than more."""
_REPRICE = 3
_GATHER = 25
_DEARER = 4.0
_LIKED = 1e-6
_SURE = 0.999


@dataclass(frozen=True)
class Root:
    """The best bound over prices: value, and per role what was found there."""

    prices: Prices
    value: float
    priced: tuple[PricedRole, ...]


class Decomposition:
    """One search over mixes, in steps: `converge` to a bound, `solve_integer` for an answer, `close` the gap.

    `unserved[r]` is the price of leaving role r unserved: part of it too where `partial`, all or nothing
    otherwise; with `serve_all` it is but a device of the relaxation.
    """

    def __init__(
        self,
        model: RentModel,
        unserved: Floats,
        standing: Incumbent,
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
        self._nodes = nodes = np.zeros(model.cells, np.int64)
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
        """Find every role's cheapest mix at these prices; return the bound (-inf if time ran out)."""
        bound = self.standing.bound
        spare = self.standing.target.spare(bound if np.isfinite(bound) else 1e-3)
        eps = _EXACT * spare / max(1, len(self._pools))
        value = offers_part(self.model.supply, self.model.limits, prices)
        priced = []
        for role, pool in enumerate(self._pools):
            if self._root is not None and self.standing.left <= 0.0:
                return -np.inf
            unserved = float(self.unserved[role])
            priced_role = pool.price(prices.cell, unserved if self._partial else np.inf, eps)
            priced.append(priced_role)
            value += priced_role.least if self._serve_all else min(priced_role.least, unserved)
            if priced_role.fresh is not None and pool.add(priced_role.fresh):
                self._master.add(role, [priced_role.fresh])
        if self._root is None or value > self._root.value:
            self._root = Root(prices, value, tuple(priced))
        self.standing.prove(value)
        return value

    def converge(self, prices: Prices, enough: float = np.inf) -> None:
        """Improve the bound from these prices until it meets the relaxation over mixes, or is `enough`."""
        self.evaluate(prices)
        self._gather(enough)
        smooth = _SMOOTH
        while True:
            self.rounds += 1
            result = self._master.lp.solve(self.standing.left)
            if result.status != "optimal":
                return
            near = 0.1 * self.standing.target.spare(result.objective)
            if self.rounds >= _ROUNDS:
                return
            if result.objective - self.root.value <= near:
                if not self._raise_unserved(result):
                    return
                continue
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

    def _gather(self, enough: float) -> None:
        """Collect mixes that look good, without proof: far quicker than `evaluate`."""
        for _ in range(_GATHER):
            result = self._master.lp.solve(self.standing.left)
            if result.status != "optimal" or result.objective < enough < np.inf:
                return
            there = self._master.prices(result)
            some = self._add_fitting(blend(self.root.prices, there, _SMOOTH).cell)
            if not self._add_fitting(there.cell) and not some:
                return

    def _add_fitting(self, cell: Floats) -> bool:
        """Add a good mix of each role at these prices; return whether there was any."""
        added = False
        for role in range(len(self._pools)):
            if self.standing.left <= 0.0:
                return False
            added |= self._add_one(role, cell, self._nodes)
        return added

    def _add_one(self, role: int, cell: Floats, room: Ints) -> bool:
        pool, unserved = self._pools[role], float(self.unserved[role])
        eps = 1e-6 * max(unserved, 1e-3)
        mix = pool.find_fitting(cell, room, unserved if self._partial else np.inf, eps)
        if mix is None or not pool.add(mix):
            return False
        self._master.add(role, [mix])
        return True

    def _raise_unserved(self, result: LpResult) -> bool:
        """Raise the price of leaving unserved what must be served; return whether that was needed."""
        if not self._serve_all or not np.any(self._master.unserved_shares(result) > _LIKED):
            return False
        self.set_unserved(_DEARER * self.unserved)
        return True

    def solve_integer(self, node_limit: int | None) -> float:
        """Solve over the mixes that are in; offer what is found and return the bound over them."""
        self.mips += 1
        answer = self._master.solve_mixes(
            serve_all=self._serve_all,
            start=self._chosen,
            time_limit_s=self.standing.left,
            target=self.standing.target,
            node_limit=node_limit,
        )
        if answer.chosen is not None:
            mixes = [
                pool.mix_of(items) if items else None
                for pool, items in zip(self._pools, answer.chosen, strict=True)
            ]
            if self.standing.offer(solution_of(self.model, mixes, answer.rented), answer.objective):
                self._chosen = mixes, answer.rented
                for role, mix in enumerate(mixes):
                    if mix is not None and self._pools[role].add(mix):
                        self._master.add(role, [mix])
        return answer.bound

    def dive(self) -> None:
        """Fix mixes that the relaxation likes, one after the other, each time with new ones for the rest.

        The new mixes are of the nodes that are left, so the last roles find something too. What the fixed
        mixes are worth is offered; all of them stay in for later solves.
        """
        chosen: list[Mix | None] = [None for _ in self._pools]
        open_roles, room, fixed = set(range(len(chosen))), self._nodes.copy(), list[int]()
        while open_roles and self.standing.left > 0.0:
            result = self._reprice(open_roles, room)
            if result is None:
                break
            before = len(fixed)
            for value, role, column, mix in self._master.list_liked(result, _LIKED):
                if len(fixed) > before and value < _SURE:
                    break
                if role in open_roles and np.all(mix.use <= room):
                    open_roles.remove(role)
                    chosen[role] = mix
                    room -= mix.use
                    fixed.append(column)
                    self._master.fix(column)
            if len(fixed) == before:
                break
        self._master.release(fixed)
        if not (open_roles and self._serve_all):
            self._offer(chosen)

    def _reprice(self, open_roles: set[int], room: Ints) -> LpResult | None:
        """Solve the relaxation with new mixes of what is left of the nodes; None: it has no solution."""
        for _ in range(_REPRICE):
            result = self._master.lp.solve(self.standing.left)
            if result.status != "optimal":
                return None
            cell = self._master.prices(result).cell
            added = [self._add_one(role, cell, room) for role in sorted(open_roles)]
            if not any(added):
                return result
        result = self._master.lp.solve(self.standing.left)
        return result if result.status == "optimal" else None

    def _offer(self, chosen: list[Mix | None]) -> None:
        """Offer a choice of mixes if it keeps the limits; a share of spot is left to integer solves."""
        limits, supply = self.model.limits, self.model.supply
        if limits.spot_share is not None:
            return
        nothing = np.zeros(len(supply.usd), np.int64)
        solution = solution_of(self.model, chosen, nothing)
        rented = cheapest_nodes(self.model, solution)
        rent = float(supply.usd @ rented)
        if limits.budget is not None and rent > limits.budget:
            return
        if limits.max_nodes is not None and rented.sum() > limits.max_nodes:
            return
        objective = self._master.rent * rent
        for mix, unserved in zip(chosen, self.unserved, strict=True):
            share = 0.0 if mix is None else (mix.share if self._partial else 1.0)
            objective += (mix.init if mix is not None else 0.0) + float(unserved) * (1.0 - share)
        if self.standing.offer(replace(solution, rented=rented), objective):
            self._chosen = chosen, rented

    def close(self) -> None:
        """List mixes ever further from the cheapest and solve over them until the gap is proven."""
        standing, root = self.standing, self.root
        scale = max(abs(root.value), standing.target.absolute)
        within, too_many = _FIRST * scale, np.inf
        while not standing.done and _NARROWEST * scale <= within < too_many:
            needed = standing.wanted - root.value
            last = within >= needed
            if not self._list(root, min(within, needed)):
                within, too_many = 0.25 * within, within
                continue
            bound = self.solve_integer(None if last else 200)
            standing.prove(min(bound, root.value + min(within, needed)))
            within *= 2.0
            if last or (standing.solution is None and within > _WIDEST * scale):
                return

    def _list(self, root: Root, within: float) -> bool:
        """Add every mix within that much of its role's cheapest, or every item that could be part of one.

        Returns whether there are few enough.
        """
        for role, pool in enumerate(self._pools):
            left = self.standing.left
            if left <= 0.0:
                return False
            work = int(min(_LIST_WORK, _STEPS_PER_S * left))
            priced_role = root.priced[role]
            unserved = float(self.unserved[role]) if self._partial else np.inf
            limit = priced_role.least + within
            mixes, exhaustive = pool.mixes_below(
                priced_role.cost, priced_role.guide, unserved, limit, _LISTED, work
            )
            if exhaustive:
                self._master.add(role, [mix for mix in mixes if pool.add(mix)])
                continue
            near = pool.items_near(priced_role.guide, limit)
            if self._partial or self.model.limits.spread > 1 or len(near) > _LOOSE:
                return False
            self._master.add_items(role, pool.items.take(near), pool.subadditive(priced_role.cost))
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


def solution_of(model: RentModel, chosen: list[Mix | None], rented: Ints) -> Solution:
    """Return the instances of the chosen mixes."""
    started: list[dict[int, int]] = []
    kept = []
    for role, mix in enumerate(chosen):
        keys = model.pairs[role].keys(model.regions)
        starts: dict[int, int] = {}
        running = np.zeros(len(model.kept[role].pairs), np.int64)
        for source, number in mix.items if mix is not None else ():
            if source >= 0:
                starts[int(keys[source])] = number
            else:
                running[-1 - source] = number
        started.append(starts)
        kept.append(running)
    return Solution(rented, tuple(started), tuple(kept))
