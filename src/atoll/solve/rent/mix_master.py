"""The master problem over mixes: whole sets of instances of a service, machines for all of them.

Columns beside those of `rental_program`: z_m of each service left unserved (one for all where the common
fraction counts), mixes p. Rows, all of the form >=:

    demand m    sum_p share_p lambda_p + z_m >= 1
    single m    - sum_p lambda_p >= -1

A mix is found by a service's oracle at the duals, so the relaxation reaches the best Lagrangian bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.core.errors import InternalError
from atoll.core.rng import stream
from atoll.solve.array_types import Floats, Ints
from atoll.solve.lp import LpResult, Sparse
from atoll.solve.rent.incumbent import Incumbent, MipLimits
from atoll.solve.rent.items import RentModel
from atoll.solve.rent.relaxation import (
    Evaluation,
    Goal,
    Prices,
    evaluate,
    lift,
    market_prices,
)
from atoll.solve.rent.rental_program import RentalProgram, cheapest_supply, costs
from atoll.solve.rent.service_oracle import Legs, ServiceOracle
from atoll.solve.rent.step_functions import GRID

_MIN_SHARE_USED = 1e-6
"""Share of a mix, or of a demand, from which on the relaxation counts as using, or leaving, it."""
_MIN_GAIN = 1e-6
"""Share by which the bound must rise for a round to count as a better one."""
_VARIED_ROUNDS = 16
"""How often mixes are sought at prices a little off, until some fit together."""
_VARIED = 0.1
"""How far off: the standard deviation of the logarithm of their ratio to the best."""
_ROUND = 2.0
"""Time of a round, as a multiple of that of a bound: it finds mixes, too."""
_TABLE_WORK = 3.0
"""Work of a service's functions, in simplex iterations, for each phase and zone."""
_ITEM_WORK = 1e-4
"""Work of pricing one item, in simplex iterations."""


@dataclass(frozen=True)
class Pace:
    """How prices are sought: `stay` is how near new prices stay to the best.

    It ends when the bound is within `near` of the gap that is asked for, after so many `rounds`, after
    `patience` rounds in which the bound did not rise by a `step` of that gap, and when `spend` of the work is
    spent. Leaving services unserved gets `dearer` times as dear where that is all that is left to gain: once
    the bound is that near, or within a share `dear` of the relaxation.
    """

    rounds: int
    stay: float
    near: float
    patience: int
    spend: float
    dearer: float
    dear: float = 0.0
    step: float = 0.0


@dataclass(frozen=True)
class Mix:
    """Items of one service by index and number, and the share of its demand they serve."""

    items: tuple[tuple[int, int], ...]
    share: float


class MixMaster(RentalProgram):
    """Grows by mixes."""

    def __init__(
        self, model: RentModel, goal: Goal, unserved: Floats, standing: Incumbent, seed: int
    ) -> None:
        rent = 1.0 if goal == "cost" else 0.0
        super().__init__(model, rent=rent, seed=seed, work=standing.work)
        self.goal = goal
        number = len(model.services)
        self._demand_row = self.add_empty_rows(np.ones(number))
        self._single_row = self.add_empty_rows(np.full(number, -1.0))
        each = np.arange(number)
        # One column in all rows: the share left out is the same for every service.
        if goal == "common":
            entries = Sparse.of(
                np.zeros(number, np.int64), self._demand_row + each, np.ones(number), 1
            )
            first = self.lp.add_columns(np.ones(1), np.zeros(1), np.ones(1), entries)
            self._unserved = np.array([first])
        else:
            entries = Sparse.of(each, self._demand_row + each, np.ones(number), number)
            first = self.lp.add_columns(unserved, np.zeros(number), np.ones(number), entries)
            self._unserved = first + each
        self._first = self.lp.columns
        self._columns: list[tuple[int, Mix]] = []
        self._known: set[tuple[int, Mix]] = set()
        self._bounded: list[int] = []

    @property
    def number(self) -> int:
        """How many mixes are in."""
        return len(self._columns)

    @property
    def mixes(self) -> tuple[tuple[int, Mix], ...]:
        """All mixes with their services, in the order of their columns."""
        return tuple(self._columns)

    def mix_values(self, result: LpResult) -> Floats:
        """Return how much of each mix a relaxed solution takes."""
        return np.asarray(result.values[self._first :])

    def add(self, service: int, mix: Mix) -> bool:
        """Add a mix; return whether it is new."""
        if (service, mix) in self._known:
            return False
        self._known.add((service, mix))
        model = self.model
        used = model.items[service].use(dict(mix.items), model.rows)
        at = np.flatnonzero(used)
        rows, values = [at], [-used[at].astype(np.float64)]
        rows.append(np.array([self._demand_row + service, self._single_row + service]))
        values.append(np.array([mix.share, -1.0]))
        row = np.concatenate(rows).astype(np.int64)
        entries = Sparse.of(np.zeros(len(row), np.int64), row, np.concatenate(values), 1)
        self.lp.add_columns(np.zeros(1), np.zeros(1), np.ones(1), entries)
        self._columns.append((service, mix))
        return True

    def fix(self, place: int) -> None:
        """Take a mix whole, until `free_all`."""
        self._bound(self._first + place, 1.0, 1.0)

    def give_up(self, service: int) -> None:
        """Leave a service out, until `free_all`; there is one share for each."""
        self._bound(int(self._unserved[service]), 1.0, 1.0)

    def free_all(self) -> None:
        """Let everything be as it was."""
        for column in self._bounded:
            self._bound(column, 0.0, 1.0)
        self._bounded = []

    def _bound(self, column: int, low: float, high: float) -> None:
        self.lp.set_bounds(np.array([column]), np.array([low]), np.array([high]))
        if low:
            self._bounded.append(column)

    def place(self, service: int, mix: Mix) -> int:
        """Return the number of a mix that is in."""
        return self._columns.index((service, mix))

    def set_unserved(self, unserved: Floats) -> None:
        """Change the price of leaving services unserved."""
        self.lp.set_costs(self._unserved, unserved)

    def unserved_shares(self, result: LpResult) -> Floats:
        """Return how much of each service a relaxed solution leaves unserved."""
        return np.asarray(result.values[self._unserved])

    def demand_duals(self, result: LpResult) -> Floats:
        """Return what all of each service's demand is worth."""
        number = len(self.model.services)
        return np.maximum(0.0, result.duals[self._demand_row : self._demand_row + number])

    def choose(self, limits: MipLimits, *, serve_all: bool) -> tuple[dict[int, int], ...] | None:
        """Choose a whole mix for each service, or else (not `serve_all`) for some; None if none was found."""
        number = len(self.model.services)
        # Shut for this solve only: the relaxation needs them to be feasible.
        if serve_all:
            self.lp.set_bounds(self._unserved, np.zeros(number), np.zeros(number))
        result = self.solve_integer(np.arange(self._first, self.lp.columns), limits)
        if serve_all:
            self.lp.set_bounds(self._unserved, np.zeros(number), np.ones(number))
        if result.values is None:
            return None
        chosen: list[dict[int, int]] = [{} for _ in range(number)]
        # Whole numbers up to the engine's tolerance.
        for place in np.flatnonzero(result.values[self._first :] > 0.5):
            service, mix = self._columns[place]
            for item, count in mix.items:
                chosen[service][item] = chosen[service].get(item, 0) + count
        return tuple(chosen)


class Decomposition:
    """Finds the best prices by column generation over mixes, and with them a bound and good mixes."""

    pace = Pace(rounds=60, stay=0.65, near=0.2, patience=20, spend=0.75, dearer=4.0)
    rough = replace(pace, near=1.0, patience=5, step=0.1)
    """The pace where services are very many: each round takes seconds."""

    def __init__(
        self,
        model: RentModel,
        oracles: list[ServiceOracle],
        goal: Goal,
        unserved: Floats,
        standing: Incumbent,
        seed: int,
    ) -> None:
        self.model, self.oracles, self.goal, self.standing = model, oracles, goal, standing
        self.unserved = unserved
        self.master = MixMaster(model, goal, unserved, standing, seed)
        self.rounds = 0
        self.relaxed: tuple[Prices, Floats] | None = None
        self._seed = seed
        self._root: Evaluation | None = None
        self._rate_s = 0.0
        self._round_work = sum(
            _TABLE_WORK * 3 * oracle.zones * oracle.grid / GRID + _ITEM_WORK * len(oracle.items)
            for oracle in oracles
        )

    @property
    def root(self) -> Evaluation:
        """The best bound so far; there is one after `rate`."""
        if self._root is None:
            raise InternalError("no prices were evaluated yet")
        return self._root

    def rate(self, prices: Prices) -> Evaluation:
        """Evaluate the bound at some prices."""
        self.standing.work.charge(self._round_work)
        before = self.standing.deadline.spent
        found = evaluate(self.model, self.oracles, self.goal, prices, self.unserved)
        self._rate_s = self.standing.deadline.spent - before
        if self._root is None or found.value > self._root.value:
            self._root = found
        self.standing.prove(found.value)
        return found

    def include(self, service: int, items: dict[int, int]) -> int:
        """Add a mix that serves all of a service; return its place among all."""
        mix = Mix(tuple(sorted(items.items())), 1.0)
        self.master.add(service, mix)
        return self.master.place(service, mix)

    def gather(self, prices: Prices, duals: Floats, services: Sequence[int] | None = None) -> bool:
        """Add the best mixes of each service, or of some, at these prices; return whether any is new."""
        some = range(len(self.oracles)) if services is None else services
        self.standing.work.charge(self._round_work * len(some) / max(1, len(self.oracles)))
        row = prices.row
        added = False
        for service in some:
            oracle = self.oracles[service]
            legs = oracle.legs(row, lower=False)
            level = oracle.grid
            # For the least cost all is served, else as much as pays most at these duals.
            if self.goal != "cost":
                level = best_level(legs, float(duals[service]))
            if level == 0:
                continue
            for items in oracle.pick_several(legs, level):
                mix = Mix(tuple(sorted(items.items())), level / oracle.grid)
                added |= self.master.add(service, mix)
        return added

    def converge(self, prices: Prices | None = None) -> None:
        """Improve the bound until it meets the relaxation over mixes, or hardly improves any more.

        Mixes are sought near the prices of the best bound: the relaxation's own jump about while few mixes
        are known.
        """
        start = prices or market_prices(self.model, self.master.rent)
        if self._root is None:
            self.rate(start)
        if not self._has_time():
            return
        # Ones: before the first relaxation nothing says what demands are worth.
        self.gather(start, np.ones(len(self.oracles)))
        pace, stalled = self.pace, 0
        # The rest of the work is for the searches after this one.
        enough = (1.0 - pace.spend) * self.standing.work.left
        while self.rounds < pace.rounds and not self.standing.done and stalled < pace.patience:
            if self.standing.work.left < enough or not self._has_time():
                return
            self.rounds += 1
            self.standing.work.rounds += 1
            result = self.master.relax(self.standing.deadline.limit())
            if result.status != "optimal":
                return
            there = lift(self.model, self.master.prices(result))
            duals = self.master.demand_duals(result)
            self.relaxed = there, duals
            above = result.objective - self.root.value
            spare = self.standing.target.spare(result.objective)
            # The bound may be near only because leaving services out is cheap.
            if above <= max(pace.near * spare, pace.dear * result.objective):
                if self._raise_unserved(result):
                    continue
                if above <= pace.near * spare:
                    return
            before = self.root.value
            between = blend(self.root.prices, there, pace.stay)
            self.rate(between)
            added = self.gather(between, duals)
            # Nothing new near the best prices: the relaxation's own decide whether there is any.
            if not added:
                self.rate(there)
                added = self.gather(there, duals)
            better = self.root.value > before + max(_MIN_GAIN * abs(before), pace.step * spare)
            stalled = 0 if better else stalled + 1
            if not added and not better:
                return

    def _has_time(self) -> bool:
        """Return whether there is time for a round, which nothing interrupts."""
        return self.standing.deadline.lasts(_ROUND * self._rate_s)

    def _raise_unserved(self, result: LpResult) -> bool:
        """Raise the price of leaving unserved what must be served; return whether that was needed."""
        if self.goal != "cost" or not np.any(self.master.unserved_shares(result) > _MIN_SHARE_USED):
            return False
        # Dearer than any plan by far: what is still left out cannot be served.
        if float(self.unserved.max()) > 1e3 * max(1.0, self.standing.ceiling):
            return False
        self.unserved = self.pace.dearer * self.unserved
        self.master.set_unserved(self.unserved)
        return True

    def short(self) -> bool:
        """Return whether not even the relaxation serves everything."""
        result = self.master.relax(self.standing.deadline.limit())
        return result.status == "optimal" and bool(
            np.any(self.master.unserved_shares(result) > _MIN_SHARE_USED)
        )

    def choose(self, node_limit: int) -> None:
        """Offer the best whole mixes among those found."""
        if self.standing.done:
            return
        chosen = self._choose(node_limit, serve_all=self.goal == "cost")
        # Mixes are not made to stand in several regions.
        if chosen is None or self.goal != "cost" or self.model.limits.spread > 1:
            return
        offer_items(self.model, chosen, self.standing, self._seed)

    def vary(self, node_limit: int) -> None:
        """Offer whole mixes as soon as some fit together, with more of them found at prices a little off.

        Mixes of the best prices share what is scarce by parts: few leave whole nodes for each other.
        """
        rng = stream(self._seed, "mixes")
        for _ in range(_VARIED_ROUNDS):
            if self.standing.done or self.standing.solution is not None:
                return
            result = self.master.relax(self.standing.deadline.limit())
            if result.status != "optimal":
                return
            prices = self.master.prices(result)
            row = prices.row * rng.lognormal(0.0, _VARIED, len(prices.row))
            self.gather(replace(prices, row=row), self.master.demand_duals(result))
            self.choose(node_limit)

    def choose_some(self, unserved: Floats, node_limit: int) -> tuple[dict[int, int], ...] | None:
        """Return the best whole mixes where leaving a service out costs so much; None if none was found."""
        self.master.set_unserved(unserved)
        chosen = self._choose(node_limit, serve_all=False)
        self.master.set_unserved(self.unserved)
        return chosen

    def _choose(self, node_limit: int, *, serve_all: bool) -> tuple[dict[int, int], ...] | None:
        limits = self.standing.limits(self.standing.work.part(0.1), nodes=node_limit)
        return self.master.choose(limits, serve_all=serve_all)

    def used_items(self) -> list[Ints]:
        """Return per service the items of mixes that the relaxation takes a part of."""
        found: list[set[int]] = [set() for _ in self.oracles]
        result = self.master.relax(self.standing.deadline.limit())
        if result.status == "optimal":
            taken = self.master.mix_values(result)
            for (service, mix), share in zip(self.master.mixes, taken, strict=True):
                if share > _MIN_SHARE_USED:
                    found[service].update(item for item, _ in mix.items)
        return [np.array(sorted(items), np.int64) for items in found]


def offer_items(
    model: RentModel, chosen: tuple[dict[int, int], ...], standing: Incumbent, seed: int
) -> bool:
    """Offer items that serve everything with the cheapest machines; return whether that was better."""
    if not links_hold(model, chosen):
        return False
    solution = cheapest_supply(model, chosen, seed)
    if solution is None:
        return False
    return standing.offer(solution, sum(costs(model, solution)))


def links_hold(model: RentModel, chosen: tuple[dict[int, int], ...]) -> bool:
    """Return whether phases meet inside regions; what must cross is left to the program over instances."""
    for items, number, service in zip(model.items, chosen, model.services, strict=True):
        if not service.pairs:
            continue
        level = items.levels(number, model.regions)
        if float(np.minimum(level[0], level[1]).sum() + level[2].sum()) < 1.0 - 1e-9:
            return False
    return True


def best_level(legs: Legs, worth: float) -> int:
    """Return the level at which serving gains most, all of the demand being worth so much."""
    gain = worth * legs.total.level / legs.grid - legs.total.value
    return int(legs.total.level[int(np.argmax(gain))])


def blend(a: Prices, b: Prices, weight: float) -> Prices:
    """Return `weight` of a and the rest of b."""
    return replace(
        a,
        row=weight * a.row + (1.0 - weight) * b.row,
        budget=weight * a.budget + (1.0 - weight) * b.budget,
        nodes=weight * a.nodes + (1.0 - weight) * b.nodes,
    )
