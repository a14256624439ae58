"""A short integer programme over few items, where moving services leaves something to gain.

Machines that are cut, limits and scarce nodes tie services together in ways that moving one or two of them
does not untie. A programme over the items that are cheap for what they carry, at the prices that the search
uses, does so in a fraction of a second as long as there are few of them. It ends after counted iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.fast.picker import ServicePicker
from atoll.solve.rent.instances import InstanceGoal, InstanceMaster
from atoll.solve.rent.items import RentModel, Solution
from atoll.solve.rent.standing import Work

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_ITEMS = 2400
"""Items of all services together that a programme is made of; with more to choose from it is not worth it."""
_LEAST_EACH = 8
_ITERATIONS = 6000
_NODES = 400
_GAP = 5e-3
_LEVELS = 16


def shortlist(
    pickers: Sequence[ServicePicker],
    bases: Sequence[Floats],
    used: Sequence[dict[int, int]],
) -> list[Ints] | None:
    """Return per service the items worth a look at these prices, None where those are too many."""
    groups = [picker.groups() for picker in pickers]
    number = sum(len(some) for some in groups)
    each = max(_LEAST_EACH, MOST_ITEMS // max(1, number))
    if number * _LEAST_EACH > MOST_ITEMS:
        return None
    found = []
    for m, picker in enumerate(pickers):
        items, some = picker.items, set(used[m])
        for base in bases:
            cost = items.prices(base)
            for group in groups[m]:
                some.update(_cheap(group, cost[group], items.share[group], each // len(bases)))
        found.append(np.array(sorted(some), np.int64))
    return found


def _cheap(group: Ints, cost: Floats, share: Floats, most: int) -> list[int]:
    """The cheapest of a group at each of some levels, and the cheapest for a share."""
    rate = np.argsort(cost / share, kind="stable")[: max(1, most // 2)]
    levels = np.arange(1, _LEVELS + 1) / _LEVELS
    enough = np.where(share[None, :] >= levels[:, None] * (1.0 - 1e-9), cost[None, :], np.inf)
    best = np.argmin(enough, axis=1)[np.isfinite(enough.min(axis=1))]
    both = list(dict.fromkeys([*best.tolist(), *rate.tolist()]))[: max(4, most)]
    return [int(group[place]) for place in both]


def cheaper(
    model: RentModel, let_in: Sequence[Ints], start: Solution | None, seed: int = 0
) -> Solution | None:
    """Return what serves everything with these items for least, as far as the programme gets."""
    return _solved(model, "cost", let_in, start, seed, absolute_gap=1e-9)


def most_common(
    model: RentModel, let_in: Sequence[Ints], start: Solution | None, seed: int = 0
) -> Solution | None:
    """Return what serves the largest common share of everything with these items, at any price."""
    return _solved(model, "common", let_in, start, seed, absolute_gap=1e-3)


def _solved(
    model: RentModel,
    goal: InstanceGoal,
    let_in: Sequence[Ints],
    start: Solution | None,
    seed: int,
    *,
    absolute_gap: float,
) -> Solution | None:
    master = InstanceMaster(model, goal, np.zeros(0), let_in, Work(np.inf), seed)
    answer = master.solve(
        time_limit_s=np.inf,
        gap=_GAP,
        absolute_gap=absolute_gap,
        start=start,
        node_limit=_NODES,
        iteration_limit=_ITERATIONS,
    )
    return answer.solution
