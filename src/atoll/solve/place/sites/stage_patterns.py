"""Whole machines for the stages of a pipeline by an integer program, where all stages are alike.

For the largest flow a machine carries the same wherever it stands. At a flow F a *pattern* is a stage: j
layers, and n_o slices of way o with sum_o n_o R_o(j) >= F. The pipeline is there if patterns p, each used
y_p times, hold all layers with the machines that there are:

    maximise  sum_p j_p y_p    sum_p n_p(o) y_p / pieces_o <= N_k for every entry k,    y whole

There are as many rows as kinds of machines, so few of the y of the program without "whole" are in parts and
little is lost by rounding. Patterns are generated: for each j the cheapest one at the prices of machines is a
knapsack. The largest F is found by bisection.

Where nodes of two stages share the flow by their rates and none carries more than c, at most c^2 / F is on a
link. So with c = sqrt(F l) links of l tokens/s between machines are wide enough, whichever stands where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.cover import cheapest_cover
from atoll.solve.lp import LinearProgram, Sparse
from atoll.solve.place.sites.stage_exchange import Filled
from atoll.solve.place.sites.stage_rates import Place

_GRID = 1_000
"""Steps of a stage's flow in which rates are counted, rounded down."""
_ROUNDS = 40
"""Rounds in which patterns are generated."""
_FIRST_PRICE = 0.5
"""Share of its token-layers that a machine costs at first: low, so that there are patterns to begin with."""
_WORTH = 0.9
"""Layers of a pattern, as a share of its price, from which it is kept: more of them help to round."""
_ROUNDING = 1e-6
"""Layers that are rounding."""
_HIGH = 0.95
"""Share of the bound that is tried first: whole machines cost little."""
_STEPS = 9
"""Flows that are tried: the last ones differ by 0.4 % of the bound."""
_NODES, _ITERATIONS = 200, 20_000
"""Nodes and simplex iterations of an integer program at most."""


@dataclass(frozen=True)
class _StagePattern:
    """A stage: its layers, and slices of it by way."""

    layers: int
    number: Ints


def fill_alike(place: Place, machines: Ints, bound: float, link: float) -> Filled | None:
    """Return stages that carry the most, up to `bound` tokens/s, over links of `link` tokens/s at least.

    All tables of the place are one, by another number of stages. None where no stages were found.
    """
    best: Filled | None = None
    rates = place.tables[0].middle
    slices = rates / place.pieces[:, None]
    low, high, flow = 0.0, bound, _HIGH * bound
    for _ in range(_STEPS):
        # Slices of a machine share its links, so all of them together are capped.
        capped = np.minimum(rates, np.sqrt(flow * link)) / place.pieces[:, None]
        stages = _stages_at(place, machines, capped, flow)
        if stages is None:
            high = flow
        else:
            found = _filled(place, stages, slices)
            low = max(flow, found.flow)
            best = found if best is None or found.flow > best.flow else best
        flow = (low + high) / 2.0
    return best


def _stages_at(
    place: Place, machines: Ints, slices: Floats, flow: float
) -> list[_StagePattern] | None:
    """Return stages that hold all layers and each carry a flow; None where none were found."""
    used = np.unique(place.entry[machines[place.entry] > 0])
    ways = np.flatnonzero(np.isin(place.entry, used))
    row, share = np.searchsorted(used, place.entry[ways]), 1.0 / place.pieces[ways]
    rates, layers = slices[ways], slices.shape[1] - 1
    price = np.zeros(len(used))
    worth = (rates * np.arange(layers + 1)).max(axis=1, initial=0.0) / (flow * share)
    np.maximum.at(price, row, _FIRST_PRICE * worth)
    program, none = LinearProgram(), np.zeros(0, np.int64)
    program.add_rows(
        np.full(len(used), -np.inf),
        machines[used].astype(np.float64),
        Sparse.of(none, none, np.zeros(0), len(used)),
    )
    known: dict[tuple[int, ...], _StagePattern] = {}
    held = 0.0
    for _ in range(_ROUNDS):
        fresh = {
            (pattern.layers, *pattern.number.tolist()): pattern
            for pattern in _patterns_worth(rates, price[row] * share, flow)
        }
        fresh = {key: pattern for key, pattern in fresh.items() if key not in known}
        if not fresh:
            break
        known.update(fresh)
        takes = np.zeros((len(fresh), len(used)))
        for taken, pattern in zip(takes, fresh.values(), strict=True):
            np.add.at(taken, row, pattern.number * share)
        owner, at = np.nonzero(takes)
        program.add_columns(
            np.array([-float(pattern.layers) for pattern in fresh.values()]),
            np.zeros(len(fresh)),
            np.full(len(fresh), np.inf),
            Sparse.of(owner, at, takes[owner, at], len(fresh)),
        )
        solved = program.solve()
        held, price = -solved.objective, np.maximum(-solved.duals, 0.0)
    if held < layers - _ROUNDING:
        return None
    program.set_integer(np.arange(len(known)))
    # Layers are whole, so what is less than one layer from the bound is the best.
    whole = program.solve_mip(
        time_limit_s=np.inf,
        gap=0.0,
        absolute_gap=1.0 - _ROUNDING,
        node_limit=_NODES,
        iteration_limit=_ITERATIONS,
    )
    if whole.values is None or -whole.objective < layers - _ROUNDING:
        return None
    stages = []
    for pattern, times in zip(known.values(), np.rint(whole.values).tolist(), strict=True):
        number = np.zeros(len(place.entry), np.int64)
        number[ways] = pattern.number
        stages += [_StagePattern(pattern.layers, number)] * int(times)
    return stages


def _patterns_worth(rates: Floats, price: Floats, flow: float) -> Iterator[_StagePattern]:
    """Yield for each number of layers slices that carry a flow for the least, if nearly worth it."""
    for layers in np.flatnonzero((rates > 0.0).any(axis=0)).tolist():
        weight = np.minimum(np.floor(rates[:, layers] * (_GRID / flow)), _GRID).astype(np.int32)
        able = np.flatnonzero(weight)
        if not able.size:
            continue
        cost, picks = cheapest_cover(price[able], weight[able], _GRID + 1)
        if layers > _WORTH * cost:
            yield _StagePattern(layers, np.bincount(able[picks], minlength=len(rates)))


def _filled(place: Place, stages: Sequence[_StagePattern], slices: Floats) -> Filled:
    """Return stages with no layer too many, and what they carry."""
    number = np.array([stage.number for stage in stages])
    carried = number.astype(np.float64) @ slices
    cut = np.array([stage.layers for stage in stages])
    every = np.arange(len(cut))
    # What carries least is relieved first; a stage without a layer is none.
    for _ in range(int(cut.sum()) - (slices.shape[1] - 1)):
        able = carried[every, cut]
        cut[int(np.argmin(able))] -= 1
        kept = cut > 0
        number, carried, cut, every = number[kept], carried[kept], cut[kept], every[: kept.sum()]
    flow = float(carried[every, cut].min())
    return Filled(flow, tuple(cut.tolist()), number, replace(place.tables[0], stages=len(cut)))
