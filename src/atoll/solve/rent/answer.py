"""From a solution of the search to the answer: nodes to rent, cost, instances by template and region."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atoll.solve.rent.columns import Kept, RentModel, Solution
from atoll.solve.rent.types import AllocatedInstances, RoleDemand

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def restrict(solution: Solution | None, roles: list[int], active: list[int]) -> Solution | None:
    """Return the solution of some of the roles it was found for."""
    if solution is None:
        return None
    here = [roles.index(r) for r in active]
    return replace(
        solution,
        started=tuple(solution.started[i] for i in here),
        kept=tuple(solution.kept[i] for i in here),
    )


def nodes_used(model: RentModel, solution: Solution) -> Ints:
    """Nodes in use per cell."""
    used = np.zeros(model.cells + 1, np.int64)
    for role, started in enumerate(solution.started):
        pairs, kept = model.pairs[role], model.kept[role].pairs
        index = pairs.find(started.keys(), model.regions)
        number = np.array(list(started.values()), np.int64)
        np.add.at(used, pairs.cells[index], np.repeat(number[:, None], pairs.cells.shape[1], 1))
        kept_number = solution.kept[role]
        np.add.at(used, kept.cells, np.repeat(kept_number[:, None], kept.cells.shape[1], 1))
    return used[:-1]


def cheapest_nodes(model: RentModel, solution: Solution) -> Ints:
    """Return how many nodes of each offer to rent: the cheapest that serve, no more than are used."""
    if model.limits.spot_share is not None:
        return solution.rented
    left = nodes_used(model, solution)
    rented = np.zeros(len(model.supply.usd), np.int64)
    for k in np.argsort(model.supply.usd, kind="stable"):
        cell = model.offer_cell[k]
        rented[k] = min(int(left[cell]), int(model.supply.available[k]))
        left[cell] -= rented[k]
    return rented


def costs(model: RentModel, solution: Solution, penalty: Floats) -> tuple[float, float]:
    """Return rent and initialisation cost per hour of a solution."""
    init = 0.0
    for role, started in enumerate(solution.started):
        pairs = model.pairs[role]
        index = pairs.find(started.keys(), model.regions)
        init += float(pairs.take(index).prices(penalty) @ np.array(list(started.values()), float))
    return float(model.supply.usd @ solution.rented), init


def keep_equals(model: RentModel, solution: Solution) -> Solution:
    """Count instances as kept where the same multiset runs in the same region and was to be stopped."""
    started = [dict(counts) for counts in solution.started]
    kept = [counts.copy() for counts in solution.kept]
    for role, running in enumerate(model.kept):
        keys = running.pairs.keys(model.regions)
        for i in np.flatnonzero(running.pairs.template >= 0):
            key = int(keys[i])
            more = min(started[role].get(key, 0), int(running.number[i] - kept[role][i]))
            if more > 0:
                kept[role][i] += more
                started[role][key] -= more
                if not started[role][key]:
                    del started[role][key]
    return replace(solution, started=tuple(started), kept=tuple(kept))


def instances(
    model: RentModel, solution: Solution, index: int, role: int, demand: RoleDemand
) -> list[AllocatedInstances]:
    """The chosen instances of one role by template and region, kept and started ones together."""
    merged: dict[tuple[int, bytes], AllocatedInstances] = {}

    def put(chosen: AllocatedInstances) -> None:
        key = (chosen.region, chosen.counts.tobytes())
        old = merged.get(key)
        if old is not None:
            number, kept = old.number + chosen.number, old.kept + chosen.kept
            chosen = replace(old, number=number, kept=kept)
        merged[key] = chosen

    running: Kept = model.kept[index]
    for i in np.flatnonzero(solution.kept[index]):
        number = int(solution.kept[index][i])
        template = int(running.pairs.template[i])
        region = int(running.pairs.region[i])
        put(
            AllocatedInstances(
                role,
                region,
                template if template >= 0 else None,
                running.counts[i],
                float(running.throughput[i]),
                number,
                number,
            )
        )
    for key, number in sorted(solution.started[index].items()):
        template, region = divmod(key, model.regions)
        counts = np.asarray(demand.counts[template], np.int8)
        put(
            AllocatedInstances(
                role, region, template, counts, float(demand.throughput[template]), number
            )
        )
    return sorted(merged.values(), key=lambda c: (c.region, c.counts.tobytes()))
