"""The largest flow over pipelines of parts of machines: an upper bound, and cuts of the layers worth trying.

A flow is a sum of flows over ways, each of S nodes that hold all L layers one after another. A node of
entry k that holds j layers of a way with S nodes carries at most R_k(j, S) of it (`stage_rates`), so a way
with x tokens/s takes x / R_k(j, S) of such a machine, and the largest sum of x with

    sum over ways and their nodes of x / R_k(j, S) <= N_k        for every entry k

is a bound on every placement. Ways are generated: with a price per machine the cheapest one of S nodes is
found by steps over layers, min over k of price_k / R_k(j, S) for each step. Prices at which no way costs less
than c bound the flow by sum_k price_k N_k / c, whatever is still to be generated.

Ways inside a place use its own tables. Those between places need links that are slower; for these there is
one more place of all machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.sites.stage_rates import Place, cap_rates, place_in

Cut = tuple[int, ...]
"""Layers of every stage of a pipeline, from the first to the last."""
TableCut = tuple[int, Cut]
"""A cut, and the number of the table in its place that it was found with."""

_MAX_ROUNDS = 400
_PRECISION = 3e-4
"""How close the bound comes to that of the whole program, as a share."""
_MAX_CAPS = 12
"""How often rates are cut to the bound itself."""
_CAPPED = 5e-4
"""A bound that falls by less than this share is not cut to once more."""
_REDUCED = 1e-7
"""Ways cheaper than 1 by less than this are rounding."""


@dataclass(frozen=True)
class PipelineBound:
    """The bound in tokens/s, a price per machine of each entry, and the cuts met, once each."""

    value: float
    prices: Floats
    cuts: tuple[TableCut, ...]


@dataclass(frozen=True)
class _Way:
    """A way: its stages by layers, and machines of each entry that a token/s of it takes."""

    cut: TableCut
    takes: Floats


def bound_pipelines(places: Sequence[Place], machines: Ints) -> PipelineBound:
    """Return the bound for pipelines in some places; `machines` has the number of each entry."""
    known: dict[TableCut, None] = {}
    prices = _first_prices(places, len(machines))
    value = before = np.inf
    for _ in range(_MAX_CAPS):
        before, (value, prices) = value, _bound(places, machines, prices, known)
        # No node carries more than the whole flow.
        capped = [cap_rates(place, value) for place in places]
        if value >= before * (1.0 - _CAPPED) or all(
            new is old for new, old in zip(capped, places, strict=True)
        ):
            break
        places = capped
    return PipelineBound(min(value, before), prices, tuple(known))


def _bound(
    places: Sequence[Place], machines: Ints, prices: Floats, known: dict[TableCut, None]
) -> tuple[float, Floats]:
    """Return the bound for tables as they are, and its prices; cuts met are added to those known."""
    master = _WayProgram(machines)
    # Sites are solved by themselves first: with their ways the program of all begins close to its end.
    for place in places if len(places) > 1 else ():
        own = np.zeros(len(machines), np.int64)
        entries = np.unique(place.entry)
        own[entries] = machines[entries]
        if len(entries) < len(machines):
            program = _WayProgram(own)
            program.run([place], prices, known)
            master.add(program.ways)
    return master.run(places, prices, known)


class _WayProgram:
    """The linear program over ways, which grows by the cheapest ones; flows are in `unit` tokens/s."""

    def __init__(self, machines: Ints) -> None:
        from atoll.solve.lp import LinearProgram, Sparse

        none = np.zeros(0, np.int64)
        self._machines, self._program, self._unit = machines, LinearProgram(), 0.0
        self.ways: list[_Way] = []
        self._program.add_rows(
            np.full(len(machines), -np.inf),
            machines.astype(np.float64),
            Sparse.of(none, none, np.zeros(0), len(machines)),
        )

    def add(self, ways: Sequence[_Way]) -> None:
        """Add ways as columns."""
        from atoll.solve.lp import Sparse

        if not ways:
            return
        if not self._unit:
            # Flows are counted in what a way gets out of one machine.
            self._unit = 1.0 / float(ways[0].takes.sum())
        takes = np.array([way.takes for way in ways]) * self._unit
        owner, row = np.nonzero(takes)
        self._program.add_columns(
            np.full(len(ways), -1.0),
            np.zeros(len(ways)),
            np.full(len(ways), np.inf),
            Sparse.of(owner, row, takes[owner, row], len(ways)),
        )
        self.ways += ways

    def run(
        self, places: Sequence[Place], prices: Floats, known: dict[TableCut, None]
    ) -> tuple[float, Floats]:
        """Return the bound of some places and the prices of machines, per token/s."""
        best, value = np.inf, 0.0
        if self.ways:
            value, prices = self._solve()
        for _ in range(_MAX_ROUNDS):
            fresh: list[_Way] = []
            dear = np.inf
            # All machines together come first: while they have cheaper ways, sites are not asked.
            for place in reversed(places):
                for cost, way in _cheapest_ways(place, prices):
                    dear = min(dear, cost)
                    if cost < 1.0 - _REDUCED or not self.ways:
                        fresh.append(way)
                if fresh and self.ways:
                    break
            else:
                # Where a way costs nothing, prices say nothing yet.
                if np.isfinite(dear) and dear > 0.0:
                    best = min(best, float(prices @ self._machines) / dear)
            if not fresh or best <= value * (1.0 + _PRECISION):
                break
            known.update(dict.fromkeys(way.cut for way in fresh))
            self.add(fresh)
            value, prices = self._solve()
        return (best if self.ways else 0.0), prices

    def _solve(self) -> tuple[float, Floats]:
        solved = self._program.solve()
        return -solved.objective * self._unit, np.maximum(-solved.duals, 0.0) * self._unit


def _first_prices(places: Sequence[Place], entries: int) -> Floats:
    """Return the token-layers a second of a machine of each entry at its best."""
    prices = np.zeros(entries)
    for place in places:
        for table in place.tables:
            held = np.arange(table.middle.shape[1])
            for rate in (table.first, table.middle, table.last):
                np.maximum.at(prices, place.entry, (rate * held).max(axis=1, initial=0.0))
    return prices


def _cheapest_ways(place: Place, prices: Floats) -> Iterator[tuple[float, _Way]]:
    """Yield the cheapest way of every number of stages in a place, with its cost per token/s."""
    price = prices[place.entry]
    folded: dict[int, CheapestStages] = {}
    priced: dict[int, tuple[Floats, Ints]] = {}
    for number, table in enumerate(place.tables):
        costs = []
        for rate in (table.first, table.middle, table.last):
            if id(rate) not in priced:
                priced[id(rate)] = _cheapest(price, rate)
            costs.append(priced[id(rate)])
        fold = folded.get(id(table.middle))
        if fold is None:
            fold = folded[id(table.middle)] = CheapestStages(costs[0][0], costs[1][0])
        cost, cut = fold.cut(table.stages, costs[2][0])
        if not np.isfinite(cost):
            continue
        takes = np.zeros(len(prices))
        for stage, layers in enumerate(cut):
            picked = costs[place_in(stage, table.stages)][1][layers]
            takes[place.entry[picked]] += 1.0 / table.at(stage)[picked, layers]
        yield cost, _Way((number, cut), takes)


def _cheapest(price: Floats, rate: Floats) -> tuple[Floats, Ints]:
    """Return the least price of a token/s with each number of layers, and the way it is had."""
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(rate > 0.0, price[:, None] / rate, np.inf)
    cheapest = cost.argmin(axis=0)
    return cost[cheapest, np.arange(rate.shape[1])], cheapest.astype(np.int64)


class CheapestStages:
    """The cheapest pipelines of any number of stages, by what a stage of each number of layers costs."""

    def __init__(self, first: Floats, middle: Floats) -> None:
        self._middle = middle
        self._costs = [first]
        self._from: list[Ints] = []
        held = np.arange(len(first))
        # Row l, column j: the layers held before a stage of j layers that ends at l; none of them below 0.
        self._before = np.where(held[:, None] >= held[None, :], held[:, None] - held[None, :], -1)

    def cut(self, stages: int, last: Floats) -> tuple[float, Cut]:
        """Return the cost of the cheapest pipeline of so many stages, and its cut."""
        layers = len(last) - 1
        if stages == 1:
            return float(last[layers]), (layers,)
        while len(self._costs) < stages - 1:
            # The entry past the end stands for fewer than no layers.
            costs = np.append(self._costs[-1], np.inf)[self._before] + self._middle[None, :]
            taken = costs.argmin(axis=1)
            self._from.append(taken.astype(np.int64))
            self._costs.append(costs[np.arange(layers + 1), taken])
        ends = self._costs[stages - 2][::-1] + last
        held = int(np.argmin(ends))
        cost = float(ends[held])
        if not np.isfinite(cost):
            return cost, ()
        cut, left = [held], layers - held
        for stage in range(stages - 2, 0, -1):
            held = int(self._from[stage - 1][left])
            cut.append(held)
            left -= held
        return cost, (left, *cut[::-1])
