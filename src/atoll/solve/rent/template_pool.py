"""The templates that can matter, where there are too many to look at all of them in every region.

At given prices of rows a template is *needed* in a region only if no others there carry as much together for
less. Whoever has all needed ones serves every service for the least there is, so the Lagrangian bound over a
pool is one over all templates at any prices whose needed templates are in the pool. The pool begins with what
is needed at some prices and grows by what is needed at the next ones; searches look at the pool only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.core.compiling import entry
from atoll.solve.array_types import Bools, Floats, Small
from atoll.solve.cover import cheapest_by_weight, closure
from atoll.solve.rent.allocation_types import RoleTemplates, ServiceDemand, Supply
from atoll.solve.rent.items import available_nodes, find_possible, list_useful

COMPILED_AS = "the allocator"
_LEVELS = 8192
"""Steps of the largest throughput of a role in which templates are compared."""
_TOLERANCE = 1e-9
"""Share of a cost that counts as no more."""


@dataclass(frozen=True)
class _RoleKind:
    """Templates that several roles share: in which regions each can stand, and what it takes and carries."""

    useful: Small
    kind: Small
    number: Small
    throughput: Floats
    possible: Bools


class TemplatePool:
    """The templates of all services that are searched; those of roles that share theirs are chosen once."""

    def __init__(self, services: Sequence[ServiceDemand], supply: Supply) -> None:
        self._services = services
        self._kinds = len(supply.kinds)
        nodes = available_nodes(supply)
        self._shared: dict[tuple[int, int, bytes], _RoleKind] = {}
        self._chosen: dict[tuple[int, int, bytes], Bools] = {}
        for service in services:
            for role in service.roles:
                key = _key(service, role)
                if key in self._shared:
                    continue
                useful, kind, number = list_useful(role)
                max_nodes = np.ascontiguousarray(
                    np.minimum(np.where(service.allowed, nodes, 0), 127)
                )
                possible = np.empty((len(nodes), len(useful)), np.bool_)
                find_possible(kind, number, max_nodes, possible)
                throughput = np.ascontiguousarray(role.throughput[useful], np.float64)
                self._shared[key] = _RoleKind(useful, kind, number, throughput, possible)
                self._chosen[key] = np.zeros(len(useful), np.bool_)

    def __len__(self) -> int:
        return sum(int(chosen.sum()) for chosen in self._chosen.values())

    def grow(self, row_price: Floats, near: float = 0.0) -> int:
        """Add what is needed at these prices or dearer by up to a share `near`; return how many are new."""
        before = len(self)
        for key, role in self._shared.items():
            for region in range(len(role.possible)):
                first = region * self._kinds
                price = row_price[first : first + self._kinds]
                self._chosen[key] |= _find_needed(role, region, price, near)
        return len(self) - before

    def services(self) -> list[ServiceDemand]:
        """Return all services with the templates of the pool."""
        among = {key: self._shared[key].useful[chosen] for key, chosen in self._chosen.items()}
        return [
            replace(
                service,
                roles=tuple(
                    replace(role, among=among[_key(service, role)]) for role in service.roles
                ),
            )
            for service in self._services
        ]


def _key(service: ServiceDemand, role: RoleTemplates) -> tuple[int, int, bytes]:
    return id(role.counts), id(role.throughput), service.allowed.tobytes()


def _find_needed(role: _RoleKind, region: int, price: Floats, near: float) -> Bools:
    """Return which templates of a region no others of it undercut by more than a share `near`."""
    which = np.flatnonzero(role.possible[region])
    needed = np.zeros(len(role.throughput), np.bool_)
    if not len(which):
        return needed
    cost = np.empty(len(role.throughput))
    _price_templates(role.kind, role.number, np.ascontiguousarray(price), cost)
    cost, throughput = cost[which], role.throughput[which]
    steps = throughput * (_LEVELS / float(role.throughput.max()))
    down = steps.astype(np.int32)
    best = cheapest_by_weight(cost, down, np.zeros(len(which), np.int32), 1, _LEVELS + 1)[0]
    best[0] = np.inf
    # Rounded down, a cover is a true one; up to the next step it carries at least as much as the template.
    cover, _, _ = closure(best)
    others = cover[np.minimum(down + (steps > down), _LEVELS)]
    some = np.flatnonzero(cost <= others * (1.0 + near + _TOLERANCE))
    # Within a step all look alike: what another one carries for no more is not needed.
    some = some[np.lexsort((cost[some], -throughput[some]))]
    low = np.minimum.accumulate(np.concatenate([[np.inf], cost[some][:-1]]))
    # Of equals the first is enough, or all would be needed where prices are 0.
    dearer = (cost[some] > low) & (cost[some] <= low * (1.0 + near))
    needed[which[some[(cost[some] < low) | dearer]]] = True
    return needed


@entry("(int32[:, ::1], int32[:, ::1], float64[::1], float64[::1])")
def _price_templates(kind: Small, number: Small, price: Floats, cost: Floats) -> None:
    for t in range(len(cost)):
        total = 0.0
        for j in range(kind.shape[1]):
            if kind[t, j] < 0:
                break
            total += number[t, j] * price[kind[t, j]]
        cost[t] = total
