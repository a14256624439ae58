"""Items that a service can be made of: (template, region) pairs to start, running instances to keep.

Both take from *rows*: first the cells (region, kind), numbered g * C + c, which new nodes come from; then one
row for each offer, in GPUs, which instances that run hold directly, for they stand on a market already. An
item's price is a sum over rows, of how much it takes of each. A template takes the same in every region, and
there are millions of items where there are many regions: rows are listed once, for a *pattern*. Throughput is
in shares of the service's demand, at most 1 (more than all of it is worth no more).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import entry
from atoll.solve.array_types import Bools, Floats, Ints, Small
from atoll.solve.rent.allocation_types import (
    BOTH,
    DECODE,
    PREFILL,
    AllocationLimits,
    NodePlace,
    RoleTemplates,
    RunningColumn,
    ServiceDemand,
    Supply,
)

COMPILED_AS = "the allocator"
MANY = 1_000_000
PHASES = (PREFILL, DECODE, BOTH)


@dataclass(frozen=True)
class ItemPatterns:
    """Properties of items that are the same in every region.

    `rows[p]` (padded with -1) and `amount[p]` of each; rows of templates count from the first cell of an
    item's region, those of running instances from the first of all. `source` is the template, or the number
    of the running column; `upper` is how many there can be.
    """

    rows: Small
    amount: Small
    share: Floats
    source: Small
    upper: Small


@dataclass(frozen=True)
class ServiceItems:
    """Items of one service: new ones by phase, region and template first, then `running` ones.

    Item i is as `patterns` say of p = `pattern[i]`; a region has `kinds` cells.
    """

    phase: NDArray[np.int8]
    region: Small
    pattern: Small
    patterns: ItemPatterns
    kinds: int
    running: int

    def __len__(self) -> int:
        return len(self.pattern)

    @cached_property
    def share(self) -> Floats:
        """The share of the service's demand that each item carries."""
        return self.patterns.share[self.pattern]

    @cached_property
    def source(self) -> Small:
        """The template of each item, or its running column."""
        return self.patterns.source[self.pattern]

    @cached_property
    def upper(self) -> Small:
        """How many there can be of each item."""
        return self.patterns.upper[self.pattern]

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

    def levels(self, number: Mapping[int, int], regions: int) -> Floats:
        """Return the share of the demand that so many of some items carry, by phase and region."""
        level = np.zeros((len(PHASES), regions))
        for item, count in number.items():
            level[self.phase[item], self.region[item]] += self.share[item] * count
        return level

    def stand_in(self, regions: int) -> list[set[int]]:
        """Return the regions that items of each phase can stand in."""
        some = np.diff(self.cuts(regions)).reshape(len(PHASES), regions) > 0
        new = len(self) - self.running
        some[self.phase[new:], self.region[new:]] = True
        return [set(np.flatnonzero(here).tolist()) for here in some]

    def prices(self, row_price: Floats) -> Floats:
        """Return the price of each item under prices per row."""
        out = np.empty(len(self))
        _price_items(
            self.pattern, self.region, self.patterns.rows, self.patterns.amount, self.kinds,
            len(self) - self.running, row_price, out,
        )  # fmt: skip
        return out

    def taken(self) -> Ints:
        """Return how much each item takes of all rows together."""
        return np.asarray(self.patterns.amount.sum(axis=1)[self.pattern])

    def list_use(self, which: Ints) -> tuple[Ints, Ints, Ints]:
        """Return what some items take, as lists: which of them, of which row, how much."""
        rows = self.patterns.rows[self.pattern[which]]
        place, column = np.nonzero(rows >= 0)
        first = np.where(which < len(self) - self.running, self.region[which] * self.kinds, 0)
        amount = self.patterns.amount[self.pattern[which[place]], column]
        return place, (first[place] + rows[place, column]).astype(np.int64), amount.astype(np.int64)

    def use(self, number: dict[int, int], rows: int) -> Ints:
        """Return what so many of some items take of each row."""
        used = np.zeros(rows, np.int64)
        which = np.array(sorted(number), np.int64)
        place, row, amount = self.list_use(which)
        np.add.at(used, row, amount * np.array([number[int(i)] for i in which], np.int64)[place])
        return used


@dataclass(frozen=True)
class RentModel:
    """The problem as every part of the solver reads it: the market, and the items of every service.

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

    @cached_property
    def lenders(self) -> dict[int, int]:
        """By service that borrows, the one of its name whose single phases it may use a part of."""
        owner = {
            service.name: m
            for m, (service, items) in enumerate(zip(self.services, self.items, strict=True))
            if not service.borrows and np.any(items.phase != BOTH)
        }
        return {
            m: owner[service.name]
            for m, service in enumerate(self.services)
            if service.borrows and service.name in owner
        }

    def cell(self, k: int, kind: int) -> int:
        """Return the cell that slices of offer k of this kind go to."""
        return int(self.supply.region[k]) * len(self.supply.kinds) + kind


@dataclass(frozen=True)
class Solution:
    """Whole numbers: machines per offer, new slices by (offer, GPUs, kind), per service items by index.

    `places` are by service and item the nodes that are parts of machines, where it matters of which.
    """

    machines: Ints
    slices: dict[tuple[int, int, int], int]
    items: tuple[dict[int, int], ...]
    places: dict[tuple[int, int], tuple[NodePlace, ...]] = field(default_factory=dict)

    def count_slices(self) -> dict[tuple[int, int], int]:
        """Return new slices by (offer, GPUs), whatever kind they count as."""
        counts: dict[tuple[int, int], int] = {}
        for (k, gpus, _), number in self.slices.items():
            counts[k, gpus] = counts.get((k, gpus), 0) + number
        return counts


@entry(
    "(int32[::1], int32[::1], int32[:, ::1], int32[:, ::1], int64, int64, float64[::1], float64[::1])"
)
def _price_items(
    pattern: Small,
    region: Small,
    rows: Small,
    amount: Small,
    kinds: int,
    new: int,
    row_price: Floats,
    out: Floats,
) -> None:
    width = rows.shape[1]
    for i in range(len(pattern)):
        p = pattern[i]
        first = region[i] * kinds if i < new else 0
        total = 0.0
        for j in range(width):
            if rows[p, j] < 0:
                break
            total += amount[p, j] * row_price[first + rows[p, j]]
        out[i] = total


@entry("(int32[:, ::1], int32[:, ::1], int64[:, ::1], boolean[:, ::1])")
def find_possible(kind: Small, number: Small, max_nodes: Ints, possible: Bools) -> int:
    """Write for each (region, template) whether its nodes can all be had; return how many can."""
    templates, width = kind.shape
    found = 0
    for g in range(len(max_nodes)):
        for t in range(templates):
            fits = True
            for j in range(width):
                c = kind[t, j]
                if c < 0:
                    break
                if number[t, j] > max_nodes[g, c]:
                    fits = False
                    break
            possible[g, t] = fits
            if fits:
                found += 1
    return found


@entry("(boolean[:, ::1], int64, int32[::1], int32[::1])")
def _fill_items(possible: Bools, first: int, region: Small, pattern: Small) -> None:
    """Write the items of a role by region and template; `first` is the pattern of the first template."""
    regions, templates = possible.shape
    i = 0
    for g in range(regions):
        for t in range(templates):
            if possible[g, t]:
                region[i] = g
                pattern[i] = first + t
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
    max_nodes = np.ascontiguousarray(np.minimum(np.where(service.allowed, nodes, 0), 127))
    demands = {role.phase: role.demand for role in service.roles}
    roles = [_PossibleItems(role, max_nodes, fraction) for role in service.roles]
    kept = _running_columns(running, index, supply, demands)
    new = sum(role.items for role in roles)
    phase = np.empty(new + len(kept), np.int8)
    region, pattern = np.empty(len(phase), np.int32), np.empty(len(phase), np.int32)
    begin, first = 0, 0
    for asked, role in zip(service.roles, roles, strict=True):
        here = slice(begin, begin + role.items)
        _fill_items(role.possible, first, region[here], pattern[here])
        phase[here] = asked.phase
        begin += role.items
        first += len(role.patterns.share)
    phase[new:] = [r.phase for _, r in kept]
    region[new:] = [r.region for _, r in kept]
    pattern[new:] = first + np.arange(len(kept))
    every = [*(role.patterns for role in roles), _list_running(kept, demands, nodes.size, fraction)]
    patterns = ItemPatterns(
        _stack([each.rows for each in every], -1),
        _stack([each.amount for each in every], 0),
        np.concatenate([each.share for each in every]),
        np.concatenate([each.source for each in every]),
        np.concatenate([each.upper for each in every]),
    )
    return ServiceItems(phase, region, pattern, patterns, nodes.shape[1], len(kept))


def _stack(tables: Sequence[Small], padding: int) -> Small:
    """One table below the other, padded to the widest."""
    height, width = (sum(len(table) for table in tables), max(t.shape[1] for t in tables))
    out = np.full((height, width), padding, np.int32)
    begin = 0
    for table in tables:
        out[begin : begin + len(table), : table.shape[1]] = table
        begin += len(table)
    return out


class _PossibleItems:
    """Templates of a role that carry anything, and in which regions their nodes can all be had."""

    def __init__(self, role: RoleTemplates, max_nodes: Ints, fraction: float) -> None:
        useful, kind, number = list_useful(role)
        share = np.minimum(1.0, role.throughput[useful] / (role.demand * fraction))
        upper = np.full(len(useful), MANY, np.int32)
        self.patterns = ItemPatterns(kind, number, share, useful, upper)
        self.possible = np.empty((len(max_nodes), len(useful)), np.bool_)
        self.items = find_possible(kind, number, max_nodes, self.possible)


_LISTED: OrderedDict[tuple[int, int, int], tuple[RoleTemplates, Small, Small, Small]] = (
    OrderedDict()
)
_MAX_LISTED = 64


def list_useful(role: RoleTemplates) -> tuple[Small, Small, Small]:
    """Templates that carry anything, and their kinds; roles that share their templates are listed once."""
    key = (id(role.counts), id(role.throughput), id(role.among))
    known = _LISTED.get(key)
    # The role is kept beside the answer, so ids of its arrays cannot have passed to others.
    if known is None:
        useful = role.among
        if useful is None:
            useful = np.flatnonzero(role.throughput > 0.0).astype(np.int32)
        known = (role, useful, *_list_kinds(role.counts[useful]))
        _LISTED[key] = known
        while len(_LISTED) > _MAX_LISTED:
            _LISTED.popitem(last=False)
    return known[1:]


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


def _running_columns(
    running: Sequence[RunningColumn], service: int, supply: Supply, demands: dict[int, float]
) -> list[tuple[int, RunningColumn]]:
    """Return the running instances of a service that can stay, with their numbers."""
    return [
        (i, r)
        for i, r in enumerate(running)
        if r.service == service
        and r.phase in demands
        and r.number > 0
        and r.throughput > 0.0
        and all(g <= supply.available[k] * supply.gpus[k] for k, g in r.gpus)
    ]


def _list_running(
    kept: Sequence[tuple[int, RunningColumn]],
    demands: dict[int, float],
    cells: int,
    fraction: float,
) -> ItemPatterns:
    width = max([1, *(len(r.gpus) for _, r in kept)])
    rows = np.full((len(kept), width), -1, np.int32)
    amount = np.zeros((len(kept), width), np.int32)
    for at, (_, r) in enumerate(kept):
        for place, (k, gpus) in enumerate(sorted(r.gpus)):
            rows[at, place], amount[at, place] = cells + k, gpus
    share = [min(1.0, r.throughput / (demands[r.phase] * fraction)) for _, r in kept]
    return ItemPatterns(
        rows,
        amount,
        np.array(share, np.float64),
        np.array([i for i, _ in kept], np.int32),
        np.array([min(r.number, MANY) for _, r in kept], np.int32),
    )
