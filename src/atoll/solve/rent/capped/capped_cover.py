"""Covering with whole instances that keep within a few scarce cells (numba).

Notation. Scarce cells j hold cap_j nodes each. A state u says how many of each are used at most; states are
numbered in mixed radix, cap_j + 1 values of u_j, so that u - v is a difference of numbers wherever v <= u.
An item takes v of them, covers w steps of LEVELS and costs c. Then

    T[u, d] = min over items with v <= u of c + T[u - v, d - w],    T[u, 0] = 0

is the least that covering d costs with at most u. Two phases that share the cells: with T and T' of both,
min over u of T[u, d] + T'[cap - u, d], and cap - u is the state counted from the end.

An item is *known* (worth trying) only if what is known before it does not cover as much within the same
cells for as little; the others can be replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.core.compiling import entry, part
from atoll.solve.array_types import Floats, Ints

COMPILED_AS = "the allocator"
LEVELS = 1024
"""Steps of a demand. Coarser than elsewhere: tables are by state, too."""


@dataclass(frozen=True)
class CappedTable:
    """T by state and level, and the known items: index, state, steps and cost of each."""

    value: Floats
    item: Ints
    state: Ints
    steps: Ints
    cost: Floats
    digits: Ints

    def pick(self, state: int, level: int, caps: Ints) -> list[int]:
        """Return the items, repeated, that cover a level with at most a state."""
        chosen: list[int] = []
        while level > 0:
            # Follow the recurrence back: some known item gives the value of this state and level.
            here = _digits_of(np.array([state], np.int64), caps)[0]
            fits = np.flatnonzero((self.digits <= here).all(axis=1))
            rest = np.maximum(0, level - self.steps[fits])
            value = self.cost[fits] + self.value[state - self.state[fits], rest]
            best = int(np.argmin(value))
            chosen.append(int(self.item[fits[best]]))
            state, level = state - int(self.state[fits[best]]), int(rest[best])
        return chosen


def _digits_of(state: Ints, caps: Ints) -> Ints:
    """The use of each scarce cell in each state."""
    out = np.zeros((len(state), len(caps)), np.int64)
    rest = state.copy()
    for j in range(len(caps) - 1, -1, -1):
        out[:, j] = rest % (caps[j] + 1)
        rest //= caps[j] + 1
    return out


def cover_capped(taken: Ints, steps: Ints, cost: Floats, caps: Ints) -> tuple[CappedTable, int]:
    """Return T over items that take `taken[i, j]` of cell j, and the work done in steps of a table.

    Items that take more than there is are left out, as are those that cover nothing.
    """
    which = np.flatnonzero((taken <= caps).all(axis=1) & (steps > 0))
    radix = np.ones(len(caps), np.int64)
    for j in range(len(caps) - 2, -1, -1):
        radix[j] = radix[j + 1] * (caps[j + 1] + 1)
    states = int(radix[0] * (caps[0] + 1)) if len(caps) else 1
    state = taken[which] @ radix if len(caps) else np.zeros(len(which), np.int64)
    # Of a state, an item that one of as many steps undercuts is never needed; then by rising steps.
    order = np.lexsort((cost[which], -steps[which], state))[::-1]
    order = order[_undercut_none(state[order], cost[which[order]])]
    which, state = which[order], np.ascontiguousarray(state[order])
    digits = np.ascontiguousarray(_digits_of(np.arange(states), caps))
    value = np.full((states, LEVELS + 1), np.inf)
    known = np.empty(max(1, len(which)), np.int64)
    count = np.zeros(2, np.int64)
    _cover_capped(
        state, np.ascontiguousarray(steps[which]), np.ascontiguousarray(cost[which]), digits,
        value, known, count,
    )  # fmt: skip
    some = known[: count[0]]
    return CappedTable(
        value, which[some], state[some], steps[which[some]], cost[which[some]], digits[state[some]]
    ), int(count[1])


def _undercut_none(state: Ints, cost: Floats) -> Ints:
    """Return the items cheaper than all of their state that come after, by rising state."""
    kept = np.zeros(len(state), np.bool_)
    _mark_cheapest(state, cost, kept)
    some = np.flatnonzero(kept)
    return some[np.argsort(state[some], kind="stable")]


@entry("(int64[::1], float64[::1], boolean[::1])")
def _mark_cheapest(state: Ints, cost: Floats, kept: NDArray[np.bool_]) -> None:
    min_cost = np.inf
    for i in range(len(state) - 1, -1, -1):
        first = i == len(state) - 1 or state[i] != state[i + 1]
        if first or cost[i] < min_cost:
            kept[i] = True
            min_cost = cost[i]


@part
def _fits(digits: Ints, v: int, u: int) -> bool:
    fit = True
    for j in range(digits.shape[1]):
        fit = fit and digits[v, j] <= digits[u, j]
    return fit


@part
def _use_once(row: Floats, before: Floats, w: int, c: float) -> None:
    """Let an item be used on top of what `before`, another row, covers."""
    # Two plain loops over what lies side by side: each is done for several levels at a time.
    first, later = c + before[0], row[w:]
    for d in range(w):
        row[d] = min(row[d], first)
    for d in range(len(later)):
        covered = c + before[d]
        later[d] = min(later[d], covered)


@part
def _use_often(row: Floats, w: int, c: float) -> None:
    """Let an item be used any number of times on top of what its own row covers."""
    for d in range(1, len(row)):
        row[d] = min(row[d], c + row[max(0, d - w)])


@part
def _least(row: Floats, steps: Ints, cost: Floats, known: Ints, free: int, w: int) -> float:
    """Return the cost of covering w with what is known and one item that takes no scarce nodes."""
    min_cost: float = row[w]
    for n in range(free):
        i = known[n]
        min_cost = min(min_cost, cost[i] + row[max(0, w - steps[i])])
    return min_cost


@entry(
    "(int64[::1], int64[::1], float64[::1], int64[:, ::1], float64[:, ::1], int64[::1], int64[::1])"
)
def _cover_capped(
    state: Ints, steps: Ints, cost: Floats, digits: Ints, value: Floats, known: Ints, count: Ints
) -> None:
    states, width = value.shape
    number, free, work, at = 0, 0, 0, 0
    # By rising number: what an item leaves is a smaller one, whose row is done.
    for u in range(states):
        row = value[u]
        row[0] = 0.0
        # Items that take something, of smaller states.
        for n in range(free, number):
            i = known[n]
            # A check takes little beside a row of the table, but not nothing.
            work += 10
            if _fits(digits, state[i], u):
                _use_once(row, value[u - state[i]], steps[i], cost[i])
                work += width
        # Items of this very state: any number of those that take nothing, else one beside such.
        while at < len(state) and state[at] == u:
            # Worth trying only if nothing known covers as much for as little within this state.
            if cost[at] < _least(row, steps, cost, known, free, steps[at]):
                known[number] = at
                number += 1
                if u == 0:
                    _use_often(row, steps[at], cost[at])
                else:
                    _use_once(row, value[0], steps[at], cost[at])
                work += width
            at += 1
        # Items of state 0 take nothing scarce: they go beside any other, any number of times.
        if u == 0:
            free = number
        else:
            for n in range(free):
                _use_often(row, steps[known[n]], cost[known[n]])
                work += width
    count[0] = number
    count[1] = work
