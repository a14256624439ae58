"""A bound on the flow that looks at single layers: can whole nodes cover all of them at flow F?

Let N_k nodes share the rates T_k, and let item (k, j) be such a node holding j layers. Every token is
computed by some node at every layer, so the items that hold a layer form a *cover*: a multiset m of items
with sum_(k,j) m(k,j) T_k(j) >= F. If a placement has a flow of F or more, then the programme

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
can be covered. All of it holds with and without partial inference.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atoll.solve.cover import cheapest_cover, closure
from atoll.solve.lp import LinearProgram, Sparse
from atoll.solve.place.bound.cuts import rates
from atoll.solve.place.instance import Floats, FlowInstance, Ints

_GRID = 20_000
_MOST_ITEMS = 1_500
_ROUNDS = 2_000
_ABOVE = 1.0 + 1e-9
_PRECISION, _ROUGH = 1e-6, 2e-4
"""How close the bound comes to that of the programme, as a share: with few nodes, and with many."""
_MANY = 100
_SLACK = 1e-7


class Covers:
    """Items of an instance, and every cover met so far, for questions at different flows."""

    def __init__(self, instance: FlowInstance) -> None:
        node_rates = rates(instance)
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
        part = _parts(self._link >= flow)
        return int(np.bincount(part, held[self.group]).max(initial=0.0) < self.layers)

    def prices(self, flow: float) -> Floats | None:
        """Return prices that refute `flow` (tokens/s), or None where there are none."""
        if self.items == 0:
            return np.zeros(0)
        steps = np.ceil(self.rate / flow * _GRID - 1e-9)
        part = np.clip(steps, 1.0, _GRID - 1.0)
        weight = np.where(self.rate < flow, part, float(_GRID)).astype(np.int32)
        shared = self.shared_layers(flow)
        programme = self._programme(shared)
        known = [m for m in self._met.values() if int(m @ weight) >= _GRID]
        known += [_repeat(i, -(-_GRID // int(w)), self.items) for i, w in enumerate(weight)]
        self._add(programme, known)
        for _ in range(_ROUNDS):
            solved = programme.solve()
            if solved.status != "optimal":
                return None
            price = np.maximum(-solved.duals[: self.items], 0.0)
            reward = max(float(solved.duals[-1]), 0.0)
            least, picks = cheapest_cover(price, weight, _GRID + 1)
            several, more = _several(price, weight) if shared else (np.inf, picks)
            if least > 0.0:
                gain = max(several / least - 1.0, 0.0) if shared else 0.0
                if self.most_covered(price / least) - gain < self.layers - _SLACK:
                    return price / least
            if least >= 1.0 - 1e-9 and several >= 1.0 + reward - 1e-9:
                return None
            if -solved.objective >= self.layers - _SLACK:
                return None
            fresh = []
            for picked, dear in (
                (picks, least >= 1.0 - 1e-9),
                (more, several >= 1.0 + reward - 1e-9),
            ):
                if not dear:
                    fresh.append(np.bincount(picked, minlength=self.items).astype(np.int64))
            self._met.update((cover.tobytes(), cover) for cover in fresh)
            self._add(programme, fresh)
        return None

    def most_covered(self, price: Floats) -> float:
        """Return how many layers can be covered at most, given prices at which no cover costs below 1."""
        most = np.zeros(len(self.number))
        np.maximum.at(most, self.kind, self.held * price)
        return float(most @ self.number)

    def _programme(self, shared: int) -> LinearProgram:
        """Rows of items, of kinds and of shared layers; columns n(k, j), and one for what is not shared."""
        programme = LinearProgram()
        size, kinds = self.items, len(self.number)
        rows = size + kinds + 1
        none = np.zeros(0, np.int64)
        low = np.concatenate([np.full(size + kinds, -np.inf), [float(shared)]])
        high = np.concatenate([np.zeros(size), self.number, [np.inf]])
        programme.add_rows(low, high, Sparse.of(none, none, np.zeros(0), rows))
        amiss = Sparse.of(np.zeros(1, np.int64), np.array([rows - 1]), np.ones(1), 1)
        dear = np.array([10.0 * self.layers])
        programme.add_columns(dear, np.zeros(1), np.full(1, np.inf), amiss)
        indices = np.arange(size)
        entries = Sparse.of(
            np.concatenate([indices, indices]),
            np.concatenate([indices, size + self.kind]),
            np.concatenate([-self.held.astype(np.float64), np.ones(size)]),
            size,
        )
        programme.add_columns(np.zeros(size), np.zeros(size), np.full(size, np.inf), entries)
        return programme

    def _add(self, programme: LinearProgram, covers: list[Ints]) -> None:
        several = np.array([cover.sum() > 1 for cover in covers], np.int64)
        last = np.zeros((len(covers), len(self.number) + 1), np.int64)
        last[:, -1] = several
        table = np.concatenate([np.array(covers), last], axis=1)
        owner, row = np.nonzero(table)
        number = len(covers)
        entries = Sparse.of(owner, row, table[owner, row].astype(np.float64), number)
        programme.add_columns(
            np.full(number, -1.0), np.zeros(number), np.full(number, np.inf), entries
        )


def cover_bound(instance: FlowInstance, *, high: float, value: float = 0.0) -> float:
    """Return an upper bound on the flow, tokens/s, at most `high`, within a millionth of the programme's.

    With more than a hundred nodes, within a few ten-thousandths: covers of many items give little. The bound
    ends just above `value` (a flow some placement has) where that is the optimum. Clusters with very many
    different nodes are given up: `high` is returned.
    """
    covers = Covers(instance)
    if covers.items > _MOST_ITEMS:
        return high
    low = 0.0
    for flow in sorted({value, covers.single_flow()}):
        if low < flow * _ABOVE < high:
            if covers.prices(flow * _ABOVE) is not None:
                return flow * _ABOVE
            low = flow
    precision = _PRECISION if instance.size <= _MANY else _ROUGH
    while high > low * (1.0 + precision) and high > math.ulp(1.0):
        middle = (low + high) / 2
        if covers.prices(middle) is None:
            low = middle
        else:
            high = middle
    # The flow of a chain is one of the rates: if one is this close it is likely the bound.
    for flow in np.unique(covers.rate[(covers.rate >= low) & (covers.rate * _ABOVE < high)]):
        if covers.prices(float(flow) * _ABOVE) is not None:
            return float(flow) * _ABOVE
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
    both = joined | joined.T
    part = np.full(len(joined), -1, np.int64)
    for i in range(len(joined)):
        reached = (np.arange(len(joined)) == i) & (part < 0)
        while reached.any():
            part[reached] = i
            reached = both[reached].any(axis=0) & (part < 0)
    return np.unique(part, return_inverse=True)[1]
