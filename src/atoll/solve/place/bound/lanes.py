"""Placements of blocks of one or two lanes: a small integer program that is often all the search needed.

For a flow F, a block of l layers is one lane, or two beside each other. A lane of flow a is a row of nodes
that each carry a or more and together hold l layers: a node of rates T_k then holds at most J_k(a), the most
layers j with T_k(j) >= a. Two lanes carry a and F - a. Blocks stand one after another, in any order where
links do not bind, so a flow of F or more is there if

    sum_b l_b >= L,   l_b <= sum_k J_k(a) x(b,a,k) for both lanes a of block b,   sum x(.,.,k) <= N_k

with whole numbers l, x. One block per split (a, F - a) suffices, with a or F - a one of the rates. The
largest F is found by bisection over rates and sums of two of them: nothing else can be the flow of two lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.bound.cuts import rates
from atoll.solve.place.flow_instance import FlowInstance, Placement
from atoll.solve.place.milp.model import EngineOutcome, Program, highs

ITERATIONS = 60_000
"""Simplex iterations of all programs of a search for lanes: a few seconds."""
_ONE_PROGRAM = 0.35
"""Share of what is left that one program may take."""
_MIN_ITERATIONS = 50
"""Iterations that a program counts as at least: making it takes time as well."""
_MAX_RATES = 400
"""Different rates of nodes up to which all sums of two are tried as flows."""
_RATE_TOLERANCE = 1.0 - 1e-12
"""A node carries a flow if its rate is this share of it: sums of rates are rounded."""


@dataclass
class IterationAllowance:
    """Simplex iterations left for a row of integer programs."""

    left: int

    def solve(self, program: Program, seconds: float) -> EngineOutcome:
        """Solve a program with a share of what is left; what it took is gone."""
        # A share only: bisection asks several programs, and the first must not use up all of it.
        solved = highs(program, seconds, None, max(1, int(self.left * _ONE_PROGRAM)))
        self.left -= max(solved.iterations, _MIN_ITERATIONS)
        return solved


@dataclass(frozen=True)
class Lane:
    """Nodes of a lane by rate table, and the flow each of them must carry."""

    flow: float
    number: Ints


@dataclass(frozen=True)
class LaneBlock:
    """Lanes beside each other, over the same number of layers."""

    layers: int
    lanes: tuple[Lane, ...]


def lanes(
    instance: FlowInstance,
    *,
    seconds: float = np.inf,
    iterations: int = ITERATIONS,
    low: float = 0.0,
    high: float = np.inf,
) -> Placement | None:
    """Return the best placement of blocks of one or two lanes with a flow in (low, high], tokens/s.

    Links between nodes are not looked at: with slow ones the flow may be less. None where nothing was found
    in about so many simplex `iterations`, or where nodes are of too many kinds. `seconds` is a safety net.
    """
    until = time.perf_counter() + seconds
    allowed = IterationAllowance(iterations)
    node_rates = rates(instance)
    tables, group = np.unique(node_rates, axis=0, return_inverse=True)
    number = np.bincount(group, minlength=len(tables)).astype(np.int64)
    levels = np.unique(tables[tables > 0.0])
    # Too many different rates: sums of two would be too many flows to try.
    if len(levels) > _MAX_RATES:
        return None
    # The flow of one or two lanes is a rate or a sum of two rates, so no other flows have to be tried.
    sums = np.unique(np.concatenate([levels, (levels[:, None] + levels[None, :]).ravel()]))
    sums = sums[(sums > low) & (sums <= high)]

    def place(flow: float) -> Placement | None:
        left = until - time.perf_counter()
        blocks = _blocks(tables, number, flow, instance.layers, left, allowed)
        return None if blocks is None else place_blocks(instance, tables, group, blocks)

    return largest_flow(sums, place, allowed, until)


def largest_flow(
    flows: Floats,
    place: Callable[[float], Placement | None],
    allowed: IterationAllowance,
    until: float,
) -> Placement | None:
    """Return the placement of the largest of some rising flows that can be placed, by bisection."""
    best: Placement | None = None
    first, last = 0, len(flows)
    # A flow that cannot be placed is taken to rule out all larger ones: bisection needs few programs.
    while first < last and allowed.left > 0 and time.perf_counter() < until:
        middle = (first + last) // 2
        placement = place(float(flows[middle]))
        if placement is None:
            last = middle
        else:
            best, first = placement, middle + 1
    return best


def max_layers(tables: Floats, flow: float) -> Ints:
    """Return J_k(flow) of every table."""
    held = np.arange(tables.shape[1])
    return np.asarray(((tables >= flow * _RATE_TOLERANCE) * held).max(axis=1), np.int64)


def _max_layers_each(tables: Floats, flows: Floats) -> Ints:
    """Return J_k of every flow and table."""
    held = np.arange(tables.shape[1])
    able = tables >= flows[:, None, None] * _RATE_TOLERANCE
    return np.asarray((able * held).max(axis=2), np.int64)


def splits(tables: Floats, flow: float) -> list[tuple[float, ...]]:
    """Return the ways to split a flow over one or two lanes, without those that another one matches."""
    levels = np.unique(tables[(tables > 0.0) & (tables < flow * _RATE_TOLERANCE)])
    pairs = [(max(a, flow - a), min(a, flow - a)) for a in levels.tolist()]
    if not pairs:
        return [(flow,)]
    parts = np.array(pairs).ravel()
    holds = _max_layers_each(tables, parts).reshape(len(pairs), -1)
    alone = max_layers(tables, flow)
    # A lane whose nodes hold no more than they would alone needs no second one.
    matched = np.asarray((holds[:, : len(tables)] <= alone).all(axis=1))
    kept: list[int] = []
    # More layers first: a split can only be matched by one that holds as many in total.
    for i in np.argsort(-holds.sum(axis=1), kind="stable").tolist():
        if not matched[i]:
            kept.append(i)
            matched = matched | np.asarray((holds[i] >= holds).all(axis=1))
    return [(flow,), *(pairs[i] for i in sorted(kept))]


def _blocks(
    tables: Floats,
    number: Ints,
    flow: float,
    layers: int,
    seconds: float,
    allowed: IterationAllowance,
) -> list[LaneBlock] | None:
    """Return blocks of all layers at a flow, or None where there are none (or not with so much work)."""
    program = Program(1.0)
    used: list[list[tuple[int, float]]] = [[] for _ in number]
    block_columns: list[tuple[int, list[tuple[float, list[int]]]]] = []
    for split in splits(tables, flow):
        length = program.integer(0, layers)
        lane_columns: list[tuple[float, list[int]]] = []
        for part in split:
            max_held = max_layers(tables, part)
            x = [
                # A kind that holds nothing at this flow gets a column of width 0, so that columns still match
                # kinds.
                program.integer(0, float(n) if held else 0.0)
                for n, held in zip(number, max_held, strict=True)
            ]
            held = [(column, float(j)) for column, j in zip(x, max_held, strict=True)]
            program.add([*held, (length, -1.0)], 0.0, np.inf)
            for terms, column in zip(used, x, strict=True):
                terms.append((column, 1.0))
            lane_columns.append((part, x))
        block_columns.append((length, lane_columns))
    # Blocks one after the other hold every layer once.
    program.add([(length, 1.0) for length, _ in block_columns], layers, layers)
    for terms, n in zip(used, number, strict=True):
        program.add(terms, 0.0, float(n))
    solved = allowed.solve(program, seconds)
    if solved.values is None:
        return None
    whole = np.rint(solved.values).astype(np.int64)
    return [
        LaneBlock(int(whole[length]), tuple(Lane(part, whole[x]) for part, x in lane_columns))
        for length, lane_columns in block_columns
        if whole[length] > 0
    ]


def place_blocks(
    instance: FlowInstance, tables: Floats, group: Ints, blocks: list[LaneBlock]
) -> Placement | None:
    """Give the layers of blocks to nodes, in order; None where ranges do not add up (rates that rise)."""
    free = [list(np.flatnonzero(group == k)[::-1]) for k in range(len(tables))]
    start, end = np.zeros(instance.size, np.int64), np.zeros(instance.size, np.int64)
    done = 0
    for block in blocks:
        for lane in block.lanes:
            nodes = [(k, free[k].pop()) for k in range(len(tables)) for _ in range(lane.number[k])]
            held = _ranges([tables[k] for k, _ in nodes], lane.flow, block.layers)
            if held is None:
                return None
            place = done
            for (_, node), count in zip(nodes, held, strict=True):
                if count:
                    start[node], end[node] = place, place + count
                place += count
        done += block.layers
    return Placement(start, end)


def _ranges(tables: list[Floats], flow: float, layers: int) -> list[int] | None:
    """Return layers of each node, 0 if unused, that carry `flow` and add up to `layers` exactly."""
    allowed = [[0, *np.flatnonzero(table >= flow * _RATE_TOLERANCE)[::-1]] for table in tables]
    reached: list[dict[int, int]] = [{0: 0}]
    for choices in allowed:
        step: dict[int, int] = {}
        for total in reached[-1]:
            for count in choices:
                if total + count <= layers:
                    step.setdefault(total + int(count), int(count))
        reached.append(step)
    if layers not in reached[-1]:
        return None
    held: list[int] = []
    total = layers
    # From the last node back to the first: each step remembers the count that reached its total.
    for step in reached[:0:-1]:
        held.append(step[total])
        total -= step[total]
    return held[::-1]
