"""What a service can be made of: (template, region) pairs to start and running instances to keep.

Both take from *rows*: first the cells (region, kind), numbered g * C + c, which new nodes come from; then one
row for each offer, in GPUs, which instances that run hold directly, for they stand on a market already. An
item lists its rows and how much of each it takes, so that its price is a sum over rows. Throughput is in
shares of the service's demand, at most 1 (more than all of it is worth no more).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import entry
from atoll.solve.rent.types import (
    BOTH,
    DECODE,
    PREFILL,
    AllocationLimits,
    RoleTemplates,
    RunningColumn,
    ServiceDemand,
    Supply,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Small = NDArray[np.int32]
Bools = NDArray[np.bool_]

COMPILED_AS = "the allocator"
MANY = 1_000_000
PHASES = (PREFILL, DECODE, BOTH)


@dataclass(frozen=True)
class ServiceItems:
    """Items of one service: new ones by phase, region and template first, then those that run.

    `rows[i]` (padded with the number of rows) and `amount[i]` of each; `source` is the template, or for the
    last `running` items the number of the running column; `upper` is how many there can be.
    """

    phase: NDArray[np.int8]
    region: Small
    rows: Small
    amount: Small
    share: Floats
    source: Small
    upper: Small
    running: int

    def __len__(self) -> int:
        return len(self.share)

    @property
    def kept(self) -> Bools:
        """Which items run already."""
        return np.arange(len(self)) >= len(self) - self.running

    def cuts(self, regions: int) -> Ints:
        """Return where the new items of each (phase, region) begin, in this order, and where the last end."""
        new = len(self) - self.running
        by_phase = np.searchsorted(self.phase[:new], np.arange(len(PHASES) + 1, dtype=np.int8))
        each = np.arange(regions, dtype=np.int32)
        begins = [
            begin + np.searchsorted(self.region[begin:end], each)
            for begin, end in itertools.pairwise(by_phase)
        ]
        return np.concatenate([*begins, by_phase[-1:]]).astype(np.int64)

    def stand_in(self, regions: int) -> list[set[int]]:
        """Return the regions that items of each phase can stand in."""
        some = np.diff(self.cuts(regions)).reshape(len(PHASES), regions) > 0
        new = len(self) - self.running
        some[self.phase[new:], self.region[new:]] = True
        return [set(np.flatnonzero(here).tolist()) for here in some]

    def prices(self, row_price: Floats) -> Floats:
        """Return the price of each item under prices per row."""
        out = np.empty(len(self))
        _price_items(self.rows, self.amount, np.append(row_price, 0.0), out)
        return out

    def use(self, number: dict[int, int], rows: int) -> Ints:
        """Return what so many of some items take of each row."""
        used = np.zeros(rows + 1, np.int64)
        for item, count in number.items():
            np.add.at(used, self.rows[item], self.amount[item].astype(np.int64) * count)
        return used[:-1]


@dataclass(frozen=True)
class RentModel:
    """What every part of the solver reads: the market, and the items of every service.

    `start[k]` is what taking one GPU of offer k anew costs on top of its rent.
    """

    supply: Supply
    limits: AllocationLimits
    services: tuple[ServiceDemand, ...]
    items: tuple[ServiceItems, ...]
    start: Floats

    @property
    def regions(self) -> int:
        """Number of regions."""
        return len(self.supply.regions)

    @property
    def cells(self) -> int:
        """Number of (region, kind) cells."""
        return self.regions * len(self.supply.kinds)

    @property
    def rows(self) -> int:
        """Number of rows: cells, then offers."""
        return self.cells + len(self.supply.usd)

    def cell(self, k: int, kind: int) -> int:
        """Return the cell that slices of offer k of this kind go to."""
        return int(self.supply.region[k]) * len(self.supply.kinds) + kind


@dataclass(frozen=True)
class Solution:
    """Whole numbers: machines per offer, new slices by (offer, size), and per service items by index."""

    machines: Ints
    slices: dict[tuple[int, int], int]
    items: tuple[dict[int, int], ...]


@entry("(int32[:, ::1], int32[:, ::1], float64[::1], float64[::1])")
def _price_items(rows: Small, amount: Small, row_price: Floats, out: Floats) -> None:
    number, width = rows.shape
    last = len(row_price) - 1
    for i in range(number):
        total = 0.0
        for j in range(width):
            row = rows[i, j]
            if row == last:
                break
            total += amount[i, j] * row_price[row]
        out[i] = total


@entry("(int32[:, ::1], int32[:, ::1], int64[:, ::1], boolean[:, ::1])")
def _find_possible(kind: Small, number: Small, most: Ints, possible: Bools) -> int:
    """Write for each (region, template) whether its nodes can all be had; return how many can."""
    templates, width = kind.shape
    found = 0
    for g in range(len(most)):
        for t in range(templates):
            fits = True
            for j in range(width):
                c = kind[t, j]
                if c < 0:
                    break
                if number[t, j] > most[g, c]:
                    fits = False
                    break
            possible[g, t] = fits
            if fits:
                found += 1
    return found


@entry(
    "(int32[:, ::1], int32[:, ::1], float64[::1], int32[::1], boolean[:, ::1], int64, int64,"
    " int32[:, ::1], int32[:, ::1], int32[::1], int32[::1], float64[::1])"
)
def _fill_items(
    kind: Small,
    number: Small,
    carried: Floats,
    useful: Small,
    possible: Bools,
    kinds: int,
    padding: int,
    rows: Small,
    amount: Small,
    region: Small,
    source: Small,
    share: Floats,
) -> None:
    """Write the items of a role by region and template; `useful[t]` is which template t is."""
    regions, templates = possible.shape
    width, columns = kind.shape[1], rows.shape[1]
    i = 0
    for g in range(regions):
        for t in range(templates):
            if not possible[g, t]:
                continue
            for j in range(columns):
                if j < width and kind[t, j] >= 0:
                    rows[i, j] = g * kinds + kind[t, j]
                    amount[i, j] = number[t, j]
                else:
                    rows[i, j] = padding
                    amount[i, j] = 0
            region[i] = g
            source[i] = useful[t]
            share[i] = carried[t]
            i += 1


def available_nodes(supply: Supply) -> Ints:
    """Return how many nodes of each (region, kind) there can be at once, if nothing else is taken."""
    nodes = np.zeros((len(supply.regions), len(supply.kinds)), np.int64)
    for k, sizes in enumerate(supply.sizes):
        for gpus, kind in sizes:
            nodes[supply.region[k], kind] += supply.available[k] * supply.gpus[k] // gpus
    return nodes


def items_of(
    service: ServiceDemand,
    index: int,
    running: Sequence[RunningColumn],
    supply: Supply,
    fraction: float = 1.0,
) -> ServiceItems:
    """Return the items of a service asked for a fraction of its demand."""
    nodes = available_nodes(supply)
    most = np.ascontiguousarray(np.minimum(np.where(service.allowed, nodes, 0), 127))
    total = nodes.size + len(supply.usd)
    demands = {role.phase: role.demand for role in service.roles}
    kept = _running_items(running, index, supply, demands, nodes.size, fraction)
    roles = [_PossibleItems(role, most) for role in service.roles]
    width = max([kept.rows.shape[1], *(role.kind.shape[1] for role in roles)])
    new = sum(role.items for role in roles)
    size = new + len(kept)
    rows, amount = np.empty((size, width), np.int32), np.empty((size, width), np.int32)
    phase, share = np.empty(size, np.int8), np.empty(size)
    region, source = np.empty(size, np.int32), np.empty(size, np.int32)
    begin = 0
    for asked, role in zip(service.roles, roles, strict=True):
        here = slice(begin, begin + role.items)
        _fill_items(
            role.kind, role.number,
            np.minimum(1.0, asked.throughput / (asked.demand * fraction))[role.useful],
            role.useful, role.possible, nodes.shape[1], total,
            rows[here], amount[here], region[here], source[here], share[here],
        )  # fmt: skip
        phase[here] = asked.phase
        begin += role.items
    rows[new:], amount[new:] = total, 0
    rows[new:, : kept.rows.shape[1]] = kept.rows
    amount[new:, : kept.rows.shape[1]] = kept.amount
    phase[new:], region[new:], share[new:], source[new:] = (
        kept.phase, kept.region, kept.share, kept.source,
    )  # fmt: skip
    upper = np.full(size, MANY, np.int32)
    upper[new:] = kept.upper
    return ServiceItems(phase, region, rows, amount, share, source, upper, len(kept))


class _PossibleItems:
    """Templates of a role that carry anything, and in which regions their nodes can all be had."""

    def __init__(self, role: RoleTemplates, most: Ints) -> None:
        self.useful = np.flatnonzero(role.throughput > 0.0).astype(np.int32)
        self.kind, self.number = _list_kinds(role.counts[self.useful])
        self.possible = np.empty((len(most), len(self.useful)), np.bool_)
        self.items = _find_possible(self.kind, self.number, most, self.possible)


def _list_kinds(counts: NDArray[np.integer[Any]]) -> tuple[Small, Small]:
    """The kinds of each template, padded with -1, and how many nodes of each."""
    template, kind = np.nonzero(counts)
    used = np.bincount(template, minlength=len(counts))
    place = np.arange(len(template)) - np.repeat(np.cumsum(used) - used, used)
    kinds = np.full((len(counts), int(used.max(initial=1))), -1, np.int32)
    number = np.zeros_like(kinds)
    kinds[template, place] = kind
    number[template, place] = counts[template, kind]
    return kinds, number


def _running_items(
    running: Sequence[RunningColumn],
    service: int,
    supply: Supply,
    demands: dict[int, float],
    cells: int,
    fraction: float,
) -> ServiceItems:
    mine = [
        (i, r)
        for i, r in enumerate(running)
        if r.service == service
        and r.phase in demands
        and r.number > 0
        and r.throughput > 0.0
        and all(g <= supply.available[k] * supply.gpus[k] for k, g in r.gpus)
    ]
    width = max([1, *(len(r.gpus) for _, r in mine)])
    total = cells + len(supply.usd)
    rows, amount = (
        np.full((len(mine), width), total, np.int32),
        np.zeros((len(mine), width), np.int32),
    )
    for at, (_, r) in enumerate(mine):
        for place, (k, gpus) in enumerate(sorted(r.gpus)):
            rows[at, place], amount[at, place] = cells + k, gpus
    share = [min(1.0, r.throughput / (demands[r.phase] * fraction)) for _, r in mine]
    return ServiceItems(
        np.array([r.phase for _, r in mine], np.int8),
        np.array([r.region for _, r in mine], np.int32),
        rows,
        amount,
        np.array(share, np.float64),
        np.array([i for i, _ in mine], np.int32),
        np.array([min(r.number, MANY) for _, r in mine], np.int32),
        len(mine),
    )
