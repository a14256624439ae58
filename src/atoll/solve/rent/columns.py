"""All (template, region) pairs of each role, as arrays that shrink when a bound excludes pairs for good.

A cell is a (region, node type) pair, numbered g * C + c. A pair lists the cells of its nodes, so that
its price is a sum of cell prices. Throughput is in shares of the role's demand, at most 1 (more than
all of it is worth no more), and in steps of 1/GRID of it, rounded up (see `cover`). Running instances
are pairs too, bounded by how many run and free of the initialisation penalty; they stand in arrays of
their own (`Kept`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import entry
from atoll.core.errors import UsageError
from atoll.solve.rent.types import AllocationLimits, RoleDemand, RunningColumn, Supply

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

COMPILED_AS = "the allocator"
GRID = 32768


@dataclass(frozen=True)
class Pairs:
    """Pairs of one role: `cells[i]` (padded with R * C), `share[i]` of the demand, region and template."""

    cells: NDArray[np.int32]
    share: Floats
    weight: NDArray[np.int32]
    region: NDArray[np.int32]
    template: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.share)

    def take(self, which: Bools | Ints) -> Pairs:
        """Return some of the pairs, in order."""
        return Pairs(
            self.cells[which],
            self.share[which],
            self.weight[which],
            self.region[which],
            self.template[which],
        )

    def keys(self, regions: int) -> Ints:
        """Return a number per pair that stays the same when others are taken away (ascending)."""
        return self.template.astype(np.int64) * regions + self.region

    def find(self, keys: Iterable[int], regions: int) -> Ints:
        """Return the positions of pairs that are here by their keys."""
        return np.searchsorted(self.keys(regions), np.array(list(keys), np.int64)).astype(np.int64)

    def prices(self, cell_price: Floats) -> Floats:
        """Return the price of each pair under prices per cell (R * C of them)."""
        return price_pairs(self.cells, np.append(cell_price, 0.0))


@dataclass(frozen=True)
class Kept:
    """Running pairs of one role, at most `number[i]` of each; template -1: not among the templates."""

    pairs: Pairs
    number: Ints
    counts: tuple[NDArray[np.int8], ...]
    throughput: Floats


@dataclass(frozen=True)
class RentModel:
    """What every part of the solver reads: the market, and per role its pairs and running pairs.

    `penalty[cell]` is what starting an instance costs per node there, on top of its rent.
    """

    supply: Supply
    limits: AllocationLimits
    pairs: tuple[Pairs, ...]
    kept: tuple[Kept, ...]
    penalty: Floats

    @property
    def regions(self) -> int:
        """Number of regions."""
        return len(self.supply.regions)

    @property
    def cells(self) -> int:
        """Number of (region, node type) cells."""
        return self.regions * len(self.supply.node_types)

    @property
    def offer_cell(self) -> Ints:
        """Cell of each offer."""
        return self.supply.region * len(self.supply.node_types) + self.supply.type

    def spot(self) -> Floats:
        """1 for each offer on spot."""
        return np.array([market == "spot" for market in self.supply.market], np.float64)


@dataclass(frozen=True)
class Solution:
    """Whole numbers: nodes rented per offer; per role instances started by key (`Pairs.keys`), and kept."""

    rented: Ints
    started: tuple[dict[int, int], ...]
    kept: tuple[Ints, ...]


def price_pairs(cells: NDArray[np.int32], cell_price: Floats) -> Floats:
    """Sum the prices of each pair's cells."""
    out = np.empty(len(cells))
    _price_pairs(cells, cell_price, out)
    return out


@entry("(int32[:, ::1], float64[::1], float64[::1])")
def _price_pairs(cells: NDArray[np.int32], cell_price: Floats, out: Floats) -> None:
    number, width = cells.shape
    last = len(cell_price) - 1
    for i in range(number):
        total = 0.0
        for j in range(width):
            cell = cells[i, j]
            if cell == last:
                break
            total += cell_price[cell]
        out[i] = total


def _possible(counts: NDArray[np.int8], most: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Pairs (template, region) whose nodes can all be had; `most[g, c]` nodes."""
    template = np.empty(len(counts) * len(most), np.int32)
    region = np.empty(len(template), np.int32)
    found = _fill_possible(counts, most, template, region)
    return template[:found].copy(), region[:found].copy()


@entry("(int8[:, ::1], int64[:, ::1], int32[::1], int32[::1])")
def _fill_possible(
    counts: NDArray[np.int8],
    most: Ints,
    template: NDArray[np.int32],
    region: NDArray[np.int32],
) -> int:
    number, types = counts.shape
    found = 0
    for t in range(number):
        for g in range(len(most)):
            fits = True
            for c in range(types):
                if counts[t, c] > most[g, c]:
                    fits = False
                    break
            if fits:
                template[found] = t
                region[found] = g
                found += 1
    return found


def _list_cells(
    counts: NDArray[np.int8],
    template: NDArray[np.int32],
    region: NDArray[np.int32],
    width: int,
    cells: int,
) -> NDArray[np.int32]:
    """The cell of each node of each pair, padded with `cells`."""
    out = np.full((len(template), width), cells, np.int32)
    _fill_cells(counts, template, region, out)
    return out


@entry("(int8[:, ::1], int32[::1], int32[::1], int32[:, ::1])")
def _fill_cells(
    counts: NDArray[np.int8],
    template: NDArray[np.int32],
    region: NDArray[np.int32],
    out: NDArray[np.int32],
) -> None:
    types = counts.shape[1]
    for i in range(len(template)):
        place = 0
        for c in range(types):
            for _ in range(counts[template[i], c]):
                out[i, place] = region[i] * types + c
                place += 1


def available_nodes(supply: Supply) -> Ints:
    """Return how many nodes each (region, node type) has on offer over all markets."""
    nodes = np.zeros((len(supply.regions), len(supply.node_types)), np.int64)
    np.add.at(nodes, (supply.region, supply.type), supply.available)
    return nodes


def pairs_of(role: RoleDemand, nodes: Ints) -> Pairs:
    """Return the pairs whose nodes are allowed and on offer in sufficient number, by template and region."""
    counts = np.ascontiguousarray(role.counts, np.int8)
    most = nodes if role.allowed is None else np.where(role.allowed, nodes, 0)
    template, region = _possible(counts, np.ascontiguousarray(np.minimum(most, 127)))
    return _pairs(counts, role.throughput, role.demand, template, region, nodes.size)


def _pairs(
    counts: NDArray[np.int8],
    throughput: Floats,
    demand: float,
    template: NDArray[np.int32],
    region: NDArray[np.int32],
    cells: int,
) -> Pairs:
    width = max(1, int(counts.sum(axis=1, dtype=np.int64).max(initial=1)))
    share = np.minimum(1.0, throughput / demand)[template]
    useful = share > 0.0
    template, region, share = template[useful], region[useful], share[useful]
    # The hair's breadth keeps a share that is a whole number of steps from being rounded past it.
    weight = np.minimum(np.ceil(share * GRID - 1e-9), GRID).astype(np.int32)
    listed = _list_cells(counts, template, region, width, cells)
    return Pairs(listed, share, weight, region, template)


def kept_of(role: int, demand: RoleDemand, running: Sequence[RunningColumn], nodes: Ints) -> Kept:
    """Return the running pairs of a role whose nodes are still on offer."""
    columns = [r for r in running if r.role == role and r.number > 0]
    counts, throughput, template, region, number = [], [], [], [], []
    for r in columns:
        index, rate = _lookup(demand, r)
        if rate <= 0.0 or np.any(r.counts > nodes[r.region]):
            continue
        if demand.allowed is not None and np.any((r.counts > 0) & ~demand.allowed):
            continue
        counts.append(np.asarray(r.counts, np.int8))
        throughput.append(rate)
        template.append(index)
        region.append(r.region)
        number.append(r.number)
    table = np.array(counts, np.int8).reshape(len(counts), nodes.shape[1])
    pairs = _pairs(
        table,
        np.array(throughput, np.float64),
        demand.demand,
        np.arange(len(counts), dtype=np.int32),
        np.array(region, np.int32),
        nodes.size,
    )
    pairs = replace(pairs, template=np.array(template, np.int32))
    return Kept(pairs, np.array(number, np.int64), tuple(counts), np.array(throughput, np.float64))


def _lookup(demand: RoleDemand, running: RunningColumn) -> tuple[int, float]:
    same = np.flatnonzero((demand.counts == running.counts).all(axis=1))
    if len(same):
        best = int(same[np.argmax(demand.throughput[same])])
        return best, float(demand.throughput[best])
    if running.throughput is None:
        raise UsageError(
            f"running instance of {demand.name} has a node multiset without a template",
            hint="give its throughput",
        )
    return -1, float(running.throughput)
