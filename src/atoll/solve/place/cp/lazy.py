"""Solve over a table that is filled as it is asked for: logic-based Benders decomposition.

Every entry has an optimistic cost until it is known. A solution over such costs is a lower bound; what it
uses is then looked at, which raises costs or makes them exact, and it is solved again. Where all that a
solution uses is exact, no other is better: whatever else could be chosen costs at least its optimistic cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from atoll.solve.array_types import Bools, Floats, Ints
from atoll.solve.place.cp.cp_masters import Master, merge_fronts


class LatencyTable(Protocol):
    """Costs of the entries of every service; what is not known yet is optimistic."""

    @property
    def uses(self) -> Sequence[Ints]:
        """GPUs of each type by service and entry."""
        ...

    def costs(self, service: int) -> Floats:
        """Return the costs of a service's entries, exact or optimistic."""
        ...

    def exact(self, service: int) -> Bools:
        """Return which of them are exact."""
        ...

    def look(self, service: int, entry: int) -> None:
        """Find out more about an entry: after some looks it is exact."""
        ...


@dataclass(frozen=True)
class LazySolution:
    """The entries chosen, what they cost, the proven least cost of any, and how often it was looked."""

    chosen: tuple[int, ...]
    cost: float
    bound: float
    looks: int
    solves: int

    @property
    def gap(self) -> float:
        """The share of the cost that another choice might save."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


Tell = Callable[[float, float, int], None]
"""Told the best cost, the bound and the number of looks."""


def solve_lazily(
    table: LatencyTable,
    stock: Ints,
    master: Master,
    *,
    max_looks: int,
    scout: Master | None = None,
    gap: float = 0.0,
    allowed: Sequence[Bools] | None = None,
    is_over: Callable[[], bool] = lambda: False,
    tell: Tell = lambda _cost, _bound, _looks: None,
) -> LazySolution | None:
    """Return the cheapest choice of an entry for every service, None if no choice fits.

    It ends when the choice is within `gap` of the least cost of any, after `max_looks` looks, or when
    `is_over` says so; the choice is then the best of exact entries. `allowed` names the entries that count.
    A `scout` is a quicker master that says where to look until it would end; then `master` has the word.
    """
    services = range(len(table.uses))
    masks = allowed or [np.ones(len(use), np.bool_) for use in table.uses]
    looks = solves = 0
    best: tuple[float, list[int]] | None = None
    # Whether the budget is spent, remembered for one round: what is looked at then still has to be valued.
    ends = False
    asked = scout or master
    while True:
        costs = [np.where(masks[s], table.costs(s), np.inf) for s in services]
        if best is not None:
            # Smaller tables make the master quicker; entries that cannot be part of a better choice go.
            costs = _promising(costs, *best)
        chosen = asked(costs, table.uses, stock)
        solves += 1
        if chosen is None:
            return None
        # Costs are exact or too low, so the cheapest choice over them is a lower bound.
        bound = float(sum(costs[s][chosen[s]] for s in services))
        known = [np.where(table.exact(s), costs[s], np.inf) for s in services]
        # The best of what is known may mix entries of several rounds.
        found = (
            merge_fronts(known, table.uses, stock)
            if all(np.isfinite(k).any() for k in known)
            else None
        )
        if found is not None:
            best = float(sum(known[s][found[s]] for s in services)), found
            tell(best[0], bound, looks)
        unknown = [s for s in services if not table.exact(s)[chosen[s]]]
        ends, last = looks >= max_looks or is_over(), ends
        if best is not None and (not unknown or best[0] - bound <= gap * best[0] or ends):
            # The scout only says where to look; the master must confirm the end.
            if asked is not master:
                asked = master
                continue
            return LazySolution(tuple(best[1]), best[0], min(best[0], bound), looks, solves)
        if last:
            return None  # what was looked at once more has no cost: there was no time left for it
        asked = scout or master
        # Only what the choice uses is looked at: a table has far more entries than can be simulated.
        for s in unknown:
            table.look(s, chosen[s])
            looks += 1
            # The last round makes the choice exact, else there would be no answer to return.
            while ends and not table.exact(s)[chosen[s]]:
                table.look(s, chosen[s])
                looks += 1


def _promising(costs: Sequence[Floats], best: float, chosen: Sequence[int]) -> list[Floats]:
    """Costs without entries that cost more than the best choice whatever the other services have."""
    min_costs = [float(cost.min()) for cost in costs]
    promising = []
    for cost, own, kept in zip(costs, min_costs, chosen, strict=True):
        useful = cost + (sum(min_costs) - own) <= best
        # The best choice itself stays, so that rounding never leaves a service without an entry.
        useful[kept] = True
        promising.append(np.where(useful, cost, np.inf))
    return promising
