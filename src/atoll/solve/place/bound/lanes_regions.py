"""Placements of lanes over several regions: blocks stay inside a region, and get wide where regions meet.

As in `lanes`, for nodes of slow links between regions. Regions stand one after another, in some order; inside
one the blocks are as in `lanes`. Where two regions meet, a flow F leaves a block of lanes a_1, a_2, ... and
enters one of lanes b_1, b_2, ...; sent in proportion, the link from lane u to lane v carries a_u b_v / F, so
the two fit if

    max_u a_u max_v b_v <= c F,   c the slowest link between the regions.

Each meeting takes one such block on either side (of one lane, two, or up to four equal ones), chosen by a 0/1
column z: z <= l_b <= L z, one per side, and z_u + z_v <= 1 for two that do not fit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.bound.cuts import rates
from atoll.solve.place.bound.lanes import (
    IterationAllowance,
    Lane,
    LaneBlock,
    largest_flow,
    max_layers,
    place_blocks,
    splits,
)
from atoll.solve.place.flow_instance import FlowInstance, Placement
from atoll.solve.place.milp.model import Program

ITERATIONS = 120_000
"""Simplex iterations of all programs; these are larger than those of `lanes`."""
_MAX_REGIONS = 4
_MAX_RATES = 400
_WIDEST = 4


@dataclass(frozen=True)
class _Slot:
    """A block that may be there: its lanes, the column of its length, and x of each lane and kind."""

    split: tuple[float, ...]
    length: int
    nodes: list[dict[int, int]]
    chosen: int | None


@dataclass(frozen=True)
class _NodeGroups:
    """Nodes by region and rate table: tables, how many, in which region; slowest links between regions."""

    layers: int
    tables: Floats
    number: Ints
    region: Ints
    slowest: Floats


def region_lanes(
    instance: FlowInstance,
    *,
    seconds: float = np.inf,
    iterations: int = ITERATIONS,
    low: float = 0.0,
    high: float = np.inf,
) -> Placement | None:
    """Return a placement region by region with a flow in (low, high], tokens/s, the best of its kind.

    None where nothing was found in about so many simplex `iterations`, with one region only, or with too
    many. `seconds` is a safety net.
    """
    until = time.perf_counter() + seconds
    allowed = IterationAllowance(iterations)
    node_rates = rates(instance)
    names, place = np.unique(np.array(instance.regions), return_inverse=True)
    levels = np.unique(node_rates[node_rates > 0.0])
    # One region needs no order, and the orders of many regions are too many to try.
    if not 1 < len(names) <= _MAX_REGIONS or len(levels) > _MAX_RATES:
        return None
    keyed, group = np.unique(np.column_stack([place, node_rates]), axis=0, return_inverse=True)
    pool = _NodeGroups(
        instance.layers,
        keyed[:, 1:],
        np.bincount(group).astype(np.int64),
        keyed[:, 0].astype(np.int64),
        _slowest(instance, place, len(names)),
    )
    # Orders of all regions first: they have the most nodes to use.
    orders = [
        order
        for size in range(len(names), 0, -1)
        for order in itertools.permutations(range(len(names)), size)
    ]
    several = [levels * k for k in range(1, _WIDEST + 1)]
    flows = np.unique(np.concatenate([*several, (levels[:, None] + levels[None, :]).ravel()]))
    flows = flows[(flows > low) & (flows <= high)]

    def place_in_order(flow: float) -> Placement | None:
        for order in orders:
            left = until - time.perf_counter()
            if left <= 0.0 or allowed.left <= 0:
                break
            blocks = _blocks(pool, flow, order, left, allowed)
            if blocks is not None:
                placement = place_blocks(instance, pool.tables, group, blocks)
                if placement is not None:
                    return placement
        return None

    return largest_flow(flows, place_in_order, allowed, until)


def _slowest(instance: FlowInstance, place: Ints, regions: int) -> Floats:
    """Return the slowest link from each region to each other one, tokens/s."""
    slow = np.zeros((regions, regions))
    for a, b in itertools.permutations(range(regions), 2):
        slow[a, b] = instance.link[np.ix_(place == a, place == b)].min()
    return slow


def _blocks(
    pool: _NodeGroups,
    flow: float,
    order: Sequence[int],
    seconds: float,
    allowed: IterationAllowance,
) -> list[LaneBlock] | None:
    """Return blocks of all layers, in order, at a flow, or None: there are none, or it takes too long."""
    program = Program(1.0)
    used: list[list[tuple[int, float]]] = [[] for _ in pool.number]
    rows: list[list[_Slot]] = []
    before: list[_Slot] = []
    for step, region in enumerate(order):
        inside = pool.region == region
        narrow = splits(pool.tables[inside], flow)
        # Where regions meet, more and narrower lanes may pass links that one wide lane cannot.
        wide = [*narrow, *((flow / k,) * k for k in range(2, _WIDEST + 1))]
        if step:
            after = [_slot(program, pool, used, region, split, end=True) for split in wide]
            _meet(program, before, after, flow * pool.slowest[order[step - 1], region])
            rows.append(after)
        rows.append([_slot(program, pool, used, region, split) for split in narrow])
        if step + 1 < len(order):
            before = [_slot(program, pool, used, region, split, end=True) for split in wide]
            rows.append(before)
    slots = [slot for row in rows for slot in row]
    # Blocks of all regions together hold every layer once.
    program.add([(slot.length, 1.0) for slot in slots], pool.layers, pool.layers)
    for terms, number in zip(used, pool.number, strict=True):
        program.add(terms, 0.0, float(number))
    solved = allowed.solve(program, seconds)
    if solved.values is None:
        return None
    whole = np.rint(solved.values).astype(np.int64)
    return [
        LaneBlock(int(whole[slot.length]), _lanes(slot, whole, len(pool.number)))
        for slot in slots
        if whole[slot.length] > 0
    ]


def _lanes(slot: _Slot, whole: Ints, kinds: int) -> tuple[Lane, ...]:
    lanes = []
    for flow, nodes in zip(slot.split, slot.nodes, strict=True):
        number = np.zeros(kinds, np.int64)
        for kind, column in nodes.items():
            number[kind] = whole[column]
        lanes.append(Lane(flow, number))
    return tuple(lanes)


def _slot(
    program: Program,
    pool: _NodeGroups,
    used: list[list[tuple[int, float]]],
    region: int,
    split: tuple[float, ...],
    *,
    end: bool = False,
) -> _Slot:
    """Add the columns and rows of one block; `end`: of one where regions meet."""
    length = program.integer(0, pool.layers)
    lanes: list[dict[int, int]] = []
    for flow in split:
        max_held = max_layers(pool.tables, flow)
        able = np.flatnonzero((pool.region == region) & (max_held > 0)).tolist()
        nodes = {kind: program.integer(0, float(pool.number[kind])) for kind in able}
        held = [(column, float(max_held[kind])) for kind, column in nodes.items()]
        program.add([*held, (length, -1.0)], 0.0, np.inf)
        for kind, column in nodes.items():
            used[kind].append((column, 1.0))
        lanes.append(nodes)
    chosen = program.integer(0, 1) if end else None
    if chosen is not None:
        # Chosen if and only if it holds a layer or more.
        program.add([(length, 1.0), (chosen, -1.0)], 0.0, np.inf)
        program.add([(length, 1.0), (chosen, -float(pool.layers))], -np.inf, 0.0)
    return _Slot(split, length, lanes, chosen)


def _meet(program: Program, before: list[_Slot], after: list[_Slot], most: float) -> None:
    """Choose one block on either side of a meeting of regions, two that fit."""
    for side in (before, after):
        program.add([(slot.chosen, 1.0) for slot in side if slot.chosen is not None], 1.0, 1.0)
    for a, b in itertools.product(before, after):
        # Two lanes exchange their flows' product over the whole flow; the slowest link must carry that.
        if a.chosen is not None and b.chosen is not None and max(a.split) * max(b.split) > most:
            program.add([(a.chosen, 1.0), (b.chosen, 1.0)], 0.0, 1.0)
