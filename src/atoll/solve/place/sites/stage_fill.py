"""Whole machines for the stages of a pipeline: cuts are filled, then nodes exchanged while that helps.

A cut gives every stage its layers. If machines could be divided, the flow would be that of a linear program:

    maximise F    F <= sum_o R_o(j_s, S) x(o, s)  for every stage s,    x no more than the machines give

Rounded down, some slices are left; `stage_exchange` gives them to stages, and moves the others, with the cut
itself free. The cuts tried are those of the bound (`pipeline_bound`) that promise the most: by their program,
less what whole machines cost, which is more where stages are many and machines few.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from atoll.solve.array_types import Floats, Ints
from atoll.solve.place.sites.pipeline_bound import Cut, TableCut
from atoll.solve.place.sites.stage_exchange import Filled, exchange
from atoll.solve.place.sites.stage_rates import Place

_ROUNDING = 0.35
"""Share of a node that whole machines cost a stage, roughly."""
_EACH_DEPTH = 2
"""Cuts of a number of stages that are tried."""


def fill_best(
    place: Place,
    machines: Ints,
    cuts: Sequence[TableCut],
    *,
    tries: int,
    steps: int,
    enough: float = np.inf,
) -> Filled | None:
    """Return the best filling met from `tries` cuts, with `steps` exchanges each after the last better one.

    None where nothing flows. A flow of `enough` tokens/s ends the search.
    """
    best: Filled | None = None
    for start in _likely(place, machines, cuts)[:tries]:
        if best is not None and best.flow >= enough:
            break
        found = exchange(place, machines, start, steps)
        if found is not None and (best is None or found.flow > best.flow):
            best = found
    return best


def _likely(place: Place, machines: Ints, cuts: Iterable[TableCut]) -> list[Filled]:
    """Return cuts filled with machines rounded down, and the flow as if they were not, best first."""
    nodes = float(machines[np.unique(place.entry)].sum())
    ranked = []
    for number, cut in dict.fromkeys((number, in_order(cut)) for number, cut in cuts):
        table = place.tables[number]
        rate = np.array([table.at(s)[:, j] for s, j in enumerate(cut)])
        flow, slices = _divided(place, machines, rate)
        if flow > 0.0:
            worth = flow * (1.0 - _ROUNDING * len(cut) / nodes)
            ranked.append((worth, Filled(flow, cut, slices, table)))
    ranked.sort(key=lambda entry: (-entry[0], entry[1].cut))
    # Cuts of a depth are much alike: after exchanges they often come to the same.
    kept: list[Filled] = []
    depth: dict[int, int] = {}
    for _, filled in ranked:
        depth[len(filled.cut)] = depth.get(len(filled.cut), 0) + 1
        if depth[len(filled.cut)] <= _EACH_DEPTH:
            kept.append(filled)
    return kept


def in_order(cut: Sequence[int]) -> Cut:
    """Return a cut with the stages between the first and the last in order: they are alike."""
    if len(cut) <= 2:
        return tuple(int(j) for j in cut)
    return (int(cut[0]), *sorted(int(j) for j in cut[1:-1]), int(cut[-1]))


def _divided(place: Place, machines: Ints, rate: Floats) -> tuple[float, Ints]:
    """Return the flow of stages if machines could be divided, and the whole slices in it by stage and way."""
    from atoll.solve.lp import LinearProgram, Sparse

    stages = len(rate)
    stage, way = np.nonzero((rate > 0.0) & (machines[place.entry] > 0)[None, :])
    number = np.zeros(rate.shape, np.int64)
    if len(np.unique(stage)) < stages:
        return 0.0, number
    unit = float(rate.max())
    columns, entries = len(stage), place.entry[way]
    used = np.unique(entries)
    program, none = LinearProgram(), np.zeros(0, np.int64)
    cost = np.zeros(columns + 1)
    cost[-1] = -1.0
    program.add_columns(
        cost,
        np.zeros(columns + 1),
        np.full(columns + 1, np.inf),
        Sparse.of(none, none, np.zeros(0), columns + 1),
    )
    every = np.arange(columns)
    program.add_rows(
        np.concatenate([np.zeros(stages), np.full(len(used), -np.inf)]),
        np.concatenate([np.full(stages, np.inf), machines[used].astype(np.float64)]),
        Sparse.of(
            np.concatenate([stage, np.arange(stages), stages + np.searchsorted(used, entries)]),
            np.concatenate([every, np.full(stages, columns), every]),
            np.concatenate([rate[stage, way] / unit, np.full(stages, -1.0), np.ones(columns)]),
            stages + len(used),
        ),
    )
    solved = program.solve()
    whole = np.floor(solved.values[:-1] * place.pieces[way] + 1e-6).astype(np.int64)
    number[stage, way] = whole
    return -solved.objective * unit, number
