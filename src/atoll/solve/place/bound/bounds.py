"""Upper bounds on the flow of any placement, and what is missing where there is none.

Notation: node i carries at most T_i(j) tokens/s when it holds j of the L layers; F is the flow.

    U1  compute:  every token needs L layers, so F L <= sum_i max_j j T_i(j).
    U2  coverage: no node carries more than F, so F L <= sum_i max_j j min(T_i(j), F); U2 is the largest F.

The right side of U2 over F never rises with F, so bisection finds it. The network tightens both: T_i is cut
to what the links of node i carry, and the nodes of a region R together compute at most X_R min(L, layers
they hold) token-layers per second (`cuts`). All bounds hold with and without partial inference.

The tightest bound, by covers, looks at single layers: can whole nodes cover all of them at flow F? Let N_k
nodes share the rates T_k, and let item (k, j) be such a node holding j layers. Every token is computed by
some node at every layer, so the items that hold a layer form a *cover*: a multiset m of items with
sum_(k,j) m(k,j) T_k(j) >= F. If a placement has a flow of F or more, then the program

    maximise   sum_c y_c                                      (layers covered by cover c)
    subject to sum_c m_c(k,j) y_c <= j n(k,j)  for all items  (an item stands in j layers)
               sum_j n(k,j) <= N_k             for all k,     y, n >= 0

has a value of L or more. Its dual is a price p(k,j) >= 0 per item and layer at which no cover costs less than
1; then at most sum_k N_k max_j j p(k,j) layers can be covered, and less than L refutes F. Prices are found by
column generation, the cheapest cover by a knapsack on a grid: with w = ceil(G T / F), but at most G - 1 for
T < F, items of every cover weigh G or more together, so prices checked on the grid are good for all covers.
U2 is the case p = min(1, T / F).

Slow links. If every layer is held by one node only, all of F passes every node, and they form one chain over
links of F or more: inside one part of the cluster that such links join. If no part has the nodes for such a
chain, some layer is held by two nodes or more: y_c over covers of several items add up to 1 or more. The dual
gains a reward q >= 0, where such covers cost 1 + q or more, and at most sum_k N_k max_j j p(k,j) - q layers
can be covered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atoll.solve.array_types import Floats, Ints
from atoll.solve.cover import cheapest_cover, closure
from atoll.solve.lp import LinearProgram, Sparse
from atoll.solve.place.bound.cuts import needed_cuts, rates, region_cuts
from atoll.solve.place.flow_instance import FlowInstance

Kind = Literal["memory", "compute", "coverage", "network", "covers"]

_BISECTION_STEPS = 200
"""Enough to bring any two doubles together."""
_WORK_TOLERANCE = 1e-12
"""Share of the token-layers needed that rounding may take away."""
_GRID = 20_000
"""G: steps of a cover's weight."""
_MAX_ITEMS = 1_500
"""Items up to which the bound by covers is worked out; the knapsack takes time in proportion."""
_MAX_ROUNDS = 2_000
"""Rounds of column generation for one flow."""
_JUST_ABOVE = 1.0 + 1e-9
"""Flows are refuted a little above a node's rate: at the rate itself one node less is needed."""
_PRECISION = 1e-6
"""How close the bound comes to that of the program, as a share."""
_ROUGH_PRECISION = 2e-4
"""The same for more than `_MANY_NODES` nodes, where a round takes longer."""
_MANY_NODES = 100
_LAYER_TOLERANCE = 1e-7
"""Layers that a linear program may miss by rounding."""


@dataclass(frozen=True)
class Bound:
    """No placement has a flow above `value` tokens/s; which argument says so, and in words."""

    value: float
    kind: Kind
    why: str


@dataclass(frozen=True)
class Missing:
    """Layers of a model that have no place on a cluster (0: all have one), and their memory."""

    layers: int
    held: int
    needed: int
    layer_gb: float
    """GB of one layer."""

    @property
    def gb(self) -> float:
        """GB of all layers without a place."""
        return self.layers * self.layer_gb

    def __str__(self) -> str:
        if not self.layers:
            return f"all {self.needed} layers have a place: the nodes hold {self.held}"
        memory = f", {self.gb:.3g} GB at {self.layer_gb:.3g} GB a layer" if self.layer_gb else ""
        noun = "layer has" if self.layers == 1 else "layers have"
        return f"{self.layers} of {self.needed} {noun} no place{memory}: the nodes hold {self.held}"


def find_missing(instance: FlowInstance, bytes_per_layer: float = 0.0) -> Missing:
    """Return how many layers the nodes cannot hold together, with the memory these take."""
    held = int(instance.max_layers.sum())
    short = max(0, instance.layers - held)
    return Missing(short, held, instance.layers, bytes_per_layer / 1e9)


def compute_bound(instance: FlowInstance) -> float:
    """Return U1, tokens/s, links not counted."""
    held = np.arange(instance.rate.shape[1])
    inside = held[None, :] <= np.minimum(instance.max_layers, instance.layers)[:, None]
    return float((held * instance.rate * inside).max(axis=1).sum() / instance.layers)


def coverage_bound(instance: FlowInstance) -> float:
    """Return U2, tokens/s, tightened by links of nodes and of regions."""
    held = np.arange(instance.rate.shape[1])
    node_rates = rates(instance)
    groups = [
        (
            cut.inside,
            cut.tokens_per_s * min(instance.layers, int(instance.max_layers[cut.inside].sum())),
        )
        for cut in region_cuts(instance)
    ]

    def fits(flow: float) -> bool:
        work = (held * np.minimum(node_rates, flow)).max(axis=1)
        total = sum(min(float(work[inside].sum()), max_work) for inside, max_work in groups)
        return total >= flow * instance.layers * (1.0 - _WORK_TOLERANCE)

    # All nodes together bound the flow; a cluster without any rate still gets an interval to halve.
    low, high = 0.0, max(1e-9, float(node_rates.sum()))
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        # The middle equals an end when no double lies between the two.
        if not low < middle < high:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    # The upper end is returned: a bound may be too high by rounding, never too low.
    return high


def upper_bound(instance: FlowInstance, *, tight: bool = True, value: float = 0.0) -> Bound:
    """Return the least of all bounds; `tight` also tries the one by covers, which takes seconds.

    `value` is what some placement is known to reach: the search for the bound ends where it is met.
    """
    short = find_missing(instance)
    # Without room for all layers no other bound has a meaning.
    if short.layers:
        return Bound(0.0, "memory", str(short))
    cuts = needed_cuts(instance)
    narrow = min(cuts, key=lambda cut: cut.tokens_per_s)
    bounds = [
        Bound(compute_bound(instance), "compute", "all nodes at their best number of layers"),
        Bound(
            coverage_bound(instance),
            "coverage",
            "all nodes busy, none with more than the whole flow",
        ),
        Bound(narrow.tokens_per_s, "network", f"links at {narrow.name} carry no more"),
    ]
    best = min(bounds, key=lambda bound: bound.value)
    # Where a placement already reaches the quick bounds, the dear one has nothing to add.
    if tight and best.value > value:
        layered = cover_bound(instance, high=best.value, value=value)
        if layered < best.value:
            return Bound(
                layered, "covers", "layers cannot all be covered by whole nodes at a higher flow"
            )
    return best


class Covers:
    """Items of an instance, and every cover met so far, for questions at different flows."""

    def __init__(self, instance: FlowInstance) -> None:
        node_rates = rates(instance)
        # Nodes with equal rates are one kind: the program grows with kinds and not with nodes.
        rows, self.group = np.unique(node_rates, axis=0, return_inverse=True)
        self.layers = instance.layers
        self.number = np.bincount(self.group, minlength=len(rows)).astype(np.float64)
        self.kind, self.held = (part.astype(np.int64) for part in np.nonzero(rows > 0.0))
        self.rate: Floats = rows[self.kind, self.held]
        self._link = instance.link
        self._met: dict[bytes, Ints] = {}

    @property
    def items(self) -> int:
        """Number of items (k, j)."""
        return len(self.rate)

    def single_flow(self) -> float:
        """Return the highest flow at which nodes one after another, each with all of it, hold all layers."""
        best = 0.0
        # From the highest: the first flow at which the layers fit is the answer.
        for flow in np.unique(self.rate)[::-1]:
            able = self.rate >= flow
            held = np.zeros(len(self.number))
            np.maximum.at(held, self.kind[able], self.held[able].astype(np.float64))
            if float(held @ self.number) >= self.layers:
                best = float(flow)
                break
        return best

    def shared_layers(self, flow: float) -> int:
        """Return 1 if at `flow` some layer must be held by several nodes, because links are slow; else 0."""
        able = self.rate >= flow
        held = np.zeros(len(self.number))
        np.maximum.at(held, self.kind[able], self.held[able].astype(np.float64))
        # A chain must stay inside a part that links of this flow join.
        part = _parts(self._link >= flow)
        return int(np.bincount(part, held[self.group]).max(initial=0.0) < self.layers)

    def prices(self, flow: float) -> Floats | None:
        """Return prices that refute `flow` (tokens/s), or None where there are none."""
        if self.items == 0:
            return np.zeros(0)
        # Weights are rounded up, which only lets more covers count: prices that hold for them hold for all.
        steps = np.ceil(self.rate / flow * _GRID - 1e-9)
        # A node below the flow is no cover by itself, so its weight stays below the whole grid.
        part = np.clip(steps, 1.0, _GRID - 1.0)
        weight = np.where(self.rate < flow, part, float(_GRID)).astype(np.int32)
        shared = self.shared_layers(flow)
        program = self._program(shared)
        # Covers met at other flows start the program; those that do not reach this flow are no covers here.
        known = [m for m in self._met.values() if int(m @ weight) >= _GRID]
        # One item repeated is always a cover, so the program has a column for every item from the start.
        known += [_repeat(i, -(-_GRID // int(w)), self.items) for i, w in enumerate(weight)]
        self._add(program, known)
        for _ in range(_MAX_ROUNDS):
            solved = program.solve()
            if solved.status != "optimal":
                return None
            # Duals of a minimised program are negative for rows that bind; rounding may leave the wrong sign.
            price = np.maximum(-solved.duals[: self.items], 0.0)
            reward = max(float(solved.duals[-1]), 0.0)
            min_price, picks = cheapest_cover(price, weight, _GRID + 1)
            several, more = _several(price, weight) if shared else (np.inf, picks)
            # Prices of an unfinished program serve too: divided by the cheapest cover, no cover costs less
            # than 1.
            if min_price > 0.0:
                gain = max(several / min_price - 1.0, 0.0) if shared else 0.0
                if self.max_covered(price / min_price) - gain < self.layers - _LAYER_TOLERANCE:
                    return price / min_price
            # No cover is cheaper than its price says, so the program is optimal and does not refute the flow.
            if min_price >= 1.0 - 1e-9 and several >= 1.0 + reward - 1e-9:
                return None
            # The covers so far already cover all layers: further ones cannot refute the flow.
            if -solved.objective >= self.layers - _LAYER_TOLERANCE:
                return None
            fresh = []
            for picked, dear in (
                (picks, min_price >= 1.0 - 1e-9),
                (more, several >= 1.0 + reward - 1e-9),
            ):
                if not dear:
                    fresh.append(np.bincount(picked, minlength=self.items).astype(np.int64))
            self._met.update((cover.tobytes(), cover) for cover in fresh)
            self._add(program, fresh)
        return None

    def max_covered(self, price: Floats) -> float:
        """Return how many layers can be covered at most, given prices at which no cover costs below 1."""
        most = np.zeros(len(self.number))
        np.maximum.at(most, self.kind, self.held * price)
        return float(most @ self.number)

    def _program(self, shared: int) -> LinearProgram:
        """Rows of items, of kinds and of shared layers; columns n(k, j), and one for what is not shared."""
        program = LinearProgram()
        size, kinds = self.items, len(self.number)
        rows = size + kinds + 1
        none = np.zeros(0, np.int64)
        low = np.concatenate([np.full(size + kinds, -np.inf), [float(shared)]])
        high = np.concatenate([np.zeros(size), self.number, [np.inf]])
        program.add_rows(low, high, Sparse.of(none, none, np.zeros(0), rows))
        amiss = Sparse.of(np.zeros(1, np.int64), np.array([rows - 1]), np.ones(1), 1)
        # What is not shared costs more than all layers gain, so it is used only where nothing else is
        # possible.
        dear = np.array([10.0 * self.layers])
        program.add_columns(dear, np.zeros(1), np.full(1, np.inf), amiss)
        indices = np.arange(size)
        entries = Sparse.of(
            np.concatenate([indices, indices]),
            np.concatenate([indices, size + self.kind]),
            np.concatenate([-self.held.astype(np.float64), np.ones(size)]),
            size,
        )
        program.add_columns(np.zeros(size), np.zeros(size), np.full(size, np.inf), entries)
        return program

    def _add(self, program: LinearProgram, covers: list[Ints]) -> None:
        several = np.array([cover.sum() > 1 for cover in covers], np.int64)
        last = np.zeros((len(covers), len(self.number) + 1), np.int64)
        last[:, -1] = several
        table = np.concatenate([np.array(covers), last], axis=1)
        owner, row = np.nonzero(table)
        number = len(covers)
        entries = Sparse.of(owner, row, table[owner, row].astype(np.float64), number)
        program.add_columns(
            np.full(number, -1.0), np.zeros(number), np.full(number, np.inf), entries
        )


def cover_bound(instance: FlowInstance, *, high: float, value: float = 0.0) -> float:
    """Return an upper bound on the flow, tokens/s, at most `high`, within a millionth of the program's.

    With more than a hundred nodes, within a few ten-thousandths: covers of many items give little. The bound
    ends just above `value` (a flow some placement has) where that is the optimum. Clusters with very many
    different nodes are given up: `high` is returned.
    """
    covers = Covers(instance)
    # The knapsack takes time in proportion to items, so the bound is given up and not only made slow.
    if covers.items > _MAX_ITEMS:
        return high
    low = 0.0
    # A placement's own flow and that of a chain are likely optima: refuted just above, the search ends at
    # once.
    for flow in sorted({value, covers.single_flow()}):
        if low < flow * _JUST_ABOVE < high:
            if covers.prices(flow * _JUST_ABOVE) is not None:
                return flow * _JUST_ABOVE
            low = flow
    precision = _PRECISION if instance.size <= _MANY_NODES else _ROUGH_PRECISION
    while high > low * (1.0 + precision) and high > math.ulp(1.0):
        middle = (low + high) / 2
        if covers.prices(middle) is None:
            low = middle
        else:
            high = middle
    # The flow of a chain is one of the rates: if one is this close it is likely the bound.
    for flow in np.unique(covers.rate[(covers.rate >= low) & (covers.rate * _JUST_ABOVE < high)]):
        if covers.prices(float(flow) * _JUST_ABOVE) is not None:
            return float(flow) * _JUST_ABOVE
    return high


def _repeat(item: int, times: int, size: int) -> Ints:
    cover = np.zeros(size, np.int64)
    cover[item] = times
    return cover


def _several(price: Floats, weight: NDArray[np.int32]) -> tuple[float, Ints]:
    """Return the least cost of a cover of two items or more, and its items, repeated."""
    dearer = np.full(_GRID + 1, np.inf)
    np.minimum.at(dearer, weight, price)
    value = closure(dearer)[0]
    rest = np.maximum(_GRID - weight, 1)
    first = int(np.argmin(price + value[rest]))
    width = int(rest[first])
    others = cheapest_cover(price, np.minimum(weight, np.int32(width)), width + 1)[1]
    return float(price[first] + value[width]), np.append(others, first)


def _parts(joined: NDArray[np.bool_]) -> Ints:
    """Return a number per node, equal for nodes joined by links in either direction."""
    # Links in one direction are enough to join: parts may be too large, which only weakens the bound.
    both = joined | joined.T
    part = np.full(len(joined), -1, np.int64)
    for i in range(len(joined)):
        reached = (np.arange(len(joined)) == i) & (part < 0)
        while reached.any():
            part[reached] = i
            reached = both[reached].any(axis=0) & (part < 0)
    return np.unique(part, return_inverse=True)[1]
