"""Mixes: instances of one role that together serve it, found by depth-first search under availability.

A mix is a multiset of items (pairs, or running instances) whose shares add up to 1 and whose nodes can
all be had at once. Items are ordered by falling share and picked in that order, so each mix that needs
all its items is met exactly once. A partial mix of cost a that leaves d steps of demand uncovered can
not be completed below a + K[d] (`cover`, which ignores availability): that bound keeps the search to
a few hundred steps where a role takes a handful of instances. Where it does not, availability itself is
priced: with a surcharge s >= 0 per node, what is spent and ahead at surcharged prices less s times all
that can be had is still a lower bound. Where part of the demand may go unserved at a price, a mix may
stop anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import entry, part
from atoll.solve.rent.columns import Kept, Pairs, price_pairs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DEEPEST = 64
"""Most items in a mix; a role that needs more is none for this search."""
COMPILED_AS = "the allocator"
_WHOLE = 1e-9


@part
def _place(left: Ints, cells: NDArray[np.int32], i: int, by: int) -> bool:
    """Take (`by` = -1) or give back (1) the nodes of item i; return whether there were enough."""
    padding = len(left) - 1
    enough = True
    for k in range(cells.shape[1]):
        c = cells[i, k]
        if c == padding:
            break
        left[c] += by
        if left[c] < 0:
            enough = False
    return enough


@part
def _leave(here: Ints, region: int) -> int:
    """Take an item out of a region; return 1 if it was the last there, else 0."""
    here[region] -= 1
    return 1 if here[region] == 0 else 0


@part
def _steps(rest: float, last: int, partial: bool) -> int:
    """Demand left in steps: rounded up, a cover stays one; where a part may go unserved, rounded down."""
    if rest <= _WHOLE:
        return 0
    return int(rest * last) if partial else math.ceil(rest * last - _WHOLE)


@part
def _next(
    i: int,
    rest: float,
    spent: float,
    regions: int,
    here: Ints,
    guide: Floats,
    share: Floats,
    region: NDArray[np.int32],
    table: Floats,
    limit: float,
    partial: bool,
) -> int:
    """The first item from i on that may lead to a mix below `limit`."""
    spread, last = len(table) - 1, table.shape[1] - 1
    while i < len(guide):
        need = spread - regions - (1 if here[region[i]] == 0 else 0)
        ahead = table[max(0, need), _steps(rest - share[i], last, partial)]
        if spent + guide[i] + ahead < limit:
            break
        i += 1
    return i


def search_mixes(
    cost: Floats,
    guide: Floats,
    surplus: float,
    share: Floats,
    region: NDArray[np.int32],
    cells: NDArray[np.int32],
    room: Ints,
    table: Floats,
    unserved: float,
    limit: float,
    most: int,
    work: int,
) -> tuple[Ints, Ints, bool]:
    """Return (picks per mix, their lengths, whether the search was exhaustive).

    `most` = 1: a cheapest mix below `limit`; above: all mixes below it, up to `most`. `table[j, d]` bounds
    what covers d and stands in j more regions at surcharged prices `guide`; `surplus` is the surcharge on
    all that can be had; `unserved` is the price of leaving all demand unserved
    (inf: not allowed); `room` is what can be had per cell, the last for padding; `work` bounds the steps.
    """
    found, lengths = np.zeros((most, DEEPEST), np.int64), np.zeros(most, np.int64)
    count, exhaustive = _search(
        cost, guide, float(surplus), share, region, cells, room.copy(),
        np.zeros(int(region.max()) + 1, np.int64), table, float(unserved), float(limit), most, work,
        np.zeros(DEEPEST, np.int64), np.zeros((3, DEEPEST + 1)), found, lengths,
    )  # fmt: skip
    return found[:count], lengths[:count], exhaustive


@entry(
    "(float64[::1], float64[::1], float64, float64[::1], int32[::1], int32[:, ::1], int64[::1],"
    " int64[::1], float64[:, ::1], float64, float64, int64, int64, int64[::1], float64[:, ::1],"
    " int64[:, ::1], int64[::1])"
)
def _search(
    cost: Floats,
    guide: Floats,
    surplus: float,
    share: Floats,
    region: NDArray[np.int32],
    cells: NDArray[np.int32],
    left: Ints,
    here: Ints,
    table: Floats,
    unserved: float,
    limit: float,
    most: int,
    work: int,
    pick: Ints,
    sums: Floats,
    found: Ints,
    lengths: Ints,
) -> tuple[int, bool]:
    """The search itself: fills `found` and `lengths`, returns how many and whether those are all."""
    spread = len(table) - 1
    partial = unserved < np.inf
    spent, served, guided = sums[0], sums[1], sums[2]
    count, depth, i, regions = 0, 0, 0, 0
    exhaustive = True
    while work > 0:
        work -= 1
        j = _next(
            i, 1.0 - served[depth], guided[depth], regions, here, guide, share, region, table,
            limit + surplus, partial,
        )  # fmt: skip
        work -= (j - i) >> 3
        i = j
        if i == len(cost):
            if depth == 0:
                break
            depth -= 1
            i = pick[depth]
            regions -= _leave(here, region[i])
        elif _place(left, cells, i, -1):
            pick[depth] = i
            depth += 1
            spent[depth] = spent[depth - 1] + cost[i]
            guided[depth] = guided[depth - 1] + guide[i]
            served[depth] = served[depth - 1] + share[i]
            here[region[i]] += 1
            if here[region[i]] == 1:
                regions += 1
            whole = served[depth] >= 1.0 - _WHOLE
            ends = regions >= spread
            value = spent[depth]
            if not whole:
                value += max(0.0, 1.0 - served[depth]) * unserved
            if ends and value < limit:
                if most == 1:
                    limit, count = value, 0
                for k in range(depth):
                    found[count, k] = pick[k]
                lengths[count] = depth
                count += 1
                if most > 1 and count == most:
                    exhaustive = False
                    break
            if not (whole and ends) and depth < DEEPEST:
                continue
            exhaustive = exhaustive and whole and ends
            depth -= 1
            regions -= _leave(here, region[i])
        _place(left, cells, i, 1)
        i += 1
    return count, exhaustive and work > 0


@dataclass(frozen=True)
class MixItems:
    """What mixes of one role are made of, by falling share.

    `cells` has an own cell for every running item, with room for as many as run. `init` is the cost of
    starting, `source` the pair (or -1 - i for running item i).
    """

    share: Floats
    weight: NDArray[np.int32]
    region: NDArray[np.int32]
    cells: NDArray[np.int32]
    init: Floats
    source: NDArray[np.int32]
    room: Ints

    def __len__(self) -> int:
        return len(self.share)

    def take(self, which: NDArray[np.bool_] | Ints) -> MixItems:
        """Return some of the items, in order."""
        return MixItems(
            self.share[which],
            self.weight[which],
            self.region[which],
            self.cells[which],
            self.init[which],
            self.source[which],
            self.room,
        )

    def prices(self, cell_price: Floats) -> Floats:
        """Return what each item costs with nodes at these prices per (region, node type) cell."""
        full = np.zeros(len(self.room))
        full[: len(cell_price)] = cell_price
        return price_pairs(self.cells, full) + self.init

    def surcharges(self, surcharge: Floats) -> Floats:
        """Return the surcharge on each item; `surcharge` per place in `room`."""
        return price_pairs(self.cells, surcharge)

    def use(self, picks: Ints) -> Ints:
        """Return what some items take of `room`, the padding apart."""
        return np.bincount(self.cells[picks].ravel(), minlength=len(self.room))[:-1]


def items_of(pairs: Pairs, kept: Kept, nodes: Ints, penalty: Floats) -> MixItems:
    """Return the items of a role; `nodes` are available per cell."""
    cells, running = len(nodes), len(kept.pairs)
    padding = cells + running
    width = max(pairs.cells.shape[1], kept.pairs.cells.shape[1] + 1 if running else 1)
    listed = np.full((len(pairs) + running, width), padding, np.int32)
    # Cell numbers are packed to the left, so the running item's own cell comes first.
    listed[: len(pairs), : pairs.cells.shape[1]] = np.where(
        pairs.cells == cells, padding, pairs.cells
    )
    if running:
        listed[len(pairs) :, 0] = cells + np.arange(running)
        listed[len(pairs) :, 1 : kept.pairs.cells.shape[1] + 1] = np.where(
            kept.pairs.cells == cells, padding, kept.pairs.cells
        )
    share = np.concatenate([pairs.share, kept.pairs.share])
    order = np.argsort(-share, kind="stable")
    return MixItems(
        share[order],
        np.concatenate([pairs.weight, kept.pairs.weight])[order],
        np.concatenate([pairs.region, kept.pairs.region])[order],
        np.ascontiguousarray(listed[order]),
        np.concatenate([pairs.prices(penalty), np.zeros(running)])[order],
        np.concatenate([np.arange(len(pairs)), -1 - np.arange(running)])[order].astype(np.int32),
        np.concatenate([nodes, kept.number, [0]]).astype(np.int64),
    )
