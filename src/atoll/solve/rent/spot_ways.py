"""Allocations with a limit on spot: every service has two ways to serve a request, off spot and on it.

Way 2m of service m has instances without spot nodes; way 2m + 1 has instances that may have some. An
instance of a phase alone may serve both: the second way borrows what the first does not need of it
(`RentModel.lenders`). Levels of both add up to 1, and that of the second is at most the share allowed
(`choosing.level_rows`): requests on spot are counted, not machines, and an instance that carries little
counts little. Nodes come from cells of two sorts, kind c for instances off spot and C + c for others: offers
off spot supply both, those on spot the second only. So what is proven is proven over all instances, markets
and shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.solve.rent.allocation import OPTIMAL
from atoll.solve.rent.allocation_types import (
    Allocation,
    RoleTemplates,
    RunningColumn,
    ServiceDemand,
    Shortage,
    Supply,
)
from atoll.solve.rent.choosing.level_rows import ChoiceRow, LevelRows

_ALL_SERVED = 1.0 - 1e-9
"""Share of a demand from which on all of it counts as served."""
_MAX_TRIES = 12
"""Levels that are tried where nothing is proven of them."""
Allocate = Callable[
    [Sequence[ServiceDemand], Supply, Sequence[RunningColumn], Shortage], Allocation
]
"""Allocates services to supply, beside what runs, with no limit on spot."""


@dataclass(frozen=True)
class SpotWays:
    """A question to an allocator with two ways for each service, and its answers as those of the services."""

    services: tuple[ServiceDemand, ...]
    supply: Supply
    running: tuple[RunningColumn, ...]
    share: float
    given: Supply

    @classmethod
    def of(
        cls,
        services: Sequence[ServiceDemand],
        supply: Supply,
        share: float | None,
        running: Sequence[RunningColumn],
    ) -> SpotWays | None:
        """Return the ways, None where spot is not limited to a `share` or not on offer."""
        if share is None or share >= 1.0 or not (supply.spot & (supply.available > 0)).any():
            return None
        kinds = len(supply.kinds)
        sizes = tuple(
            (*(() if spot else own), *((gpus, kinds + kind) for gpus, kind in own))
            for spot, own in zip(supply.spot.tolist(), supply.sizes, strict=True)
        )
        wide = replace(supply, kinds=(*supply.kinds, *supply.kinds), sizes=sizes)
        ways = [_way(service, first) for service in services for first in (True, False)]
        return cls(
            tuple(ways),
            wide,
            tuple(_running(column, supply, kinds) for column in running),
            float(share),
            supply,
        )

    @property
    def rows(self) -> LevelRows:
        """The conditions on levels where there is no choice but that between the two ways."""
        return self.widen(LevelRows(()))

    def widen(self, rows: LevelRows) -> LevelRows:
        """Return conditions on levels of services as those of their ways, spot limited."""
        chosen = {way for row in rows.by_choice for way in row.ways}
        wide = [self._both(row) for row in rows.by_choice]
        wide += [
            ChoiceRow(self.services[2 * m].name, (2 * m, 2 * m + 1), (0.0, 1.0), self.share)
            for m in range(len(self.services) // 2)
            if m not in chosen
        ]
        return LevelRows(tuple(wide))

    def _both(self, row: ChoiceRow) -> ChoiceRow:
        return ChoiceRow(
            row.name,
            tuple(2 * way + on for way in row.ways for on in (0, 1)),
            tuple(error for error in row.errors for _ in (0, 1)),
            row.max_error,
            tuple(
                (tuple(2 * way + on for way in ways for on in (0, 1)), floor)
                for ways, floor in row.floors
            ),
            tuple((2 * way, 2 * way + 1, self.share) for way in row.ways),
        )

    def at(self, levels: Mapping[int, float]) -> tuple[ServiceDemand, ...]:
        """Return the ways as plain services, each asked for its level of the demand by itself."""
        return tuple(
            replace(
                way,
                roles=tuple(
                    replace(role, demand=role.demand * levels.get(m, 0.0)) for role in way.roles
                ),
                kv_bytes_per_s=way.kv_bytes_per_s * levels.get(m, 0.0),
                borrows=False,
            )
            for m, way in enumerate(self.services)
        )

    def off(self) -> dict[int, float]:
        """Return the levels with nothing on spot."""
        return {m: float(m % 2 == 0) for m in range(len(self.services))}

    def most(self) -> dict[int, float]:
        """Return the levels with as much on spot as may be."""
        return {m: self.share if m % 2 else 1.0 - self.share for m in range(len(self.services))}

    def answer(self, found: Allocation, *, reason: str | None = None) -> Allocation:
        """Return an allocation of the ways as one of the services."""
        instances = tuple(
            replace(some, service=some.service // 2, on_spot=some.service % 2 == 1)
            for some in found.instances
        )
        binding = tuple(dict.fromkeys((*found.binding, *([reason] if reason else []))))
        return replace(
            found,
            instances=instances,
            served=found.served.reshape(-1, 2).min(axis=1),
            demand_usd=found.demand_usd.reshape(-1, 2).max(axis=1),
            node_usd=found.node_usd[:, : len(self.given.kinds)],
            binding=binding,
        )

    def try_levels(
        self,
        allocate: Allocate,
        on_shortage: Shortage,
        known: Mapping[int, float] | None = None,
    ) -> Allocation:
        """Return the best of some allocations at given levels; nothing is proven of it.

        Nothing on spot, levels that are `known` to be good, or as much as may be; then other shares for one
        service after the other. The same
        share of everything is served where not all is, for ways that get different shares of their demand
        would leave too much on spot.
        """
        levels = self.off()
        best = self.answer(allocate(self.at(levels), self.supply, self.running, on_shortage))
        tries = [*([] if known is None else [self._whole(known)]), self.most()]
        for _ in range(_MAX_TRIES):
            if not tries:
                break
            other = tries.pop(0)
            found = self.answer(allocate(self.at(other), self.supply, self.running, "fraction"))
            whole = found.served.min(initial=1.0) >= _ALL_SERVED
            if (whole or on_shortage == "fraction") and _merit(found) > _merit(best):
                best, levels = found, other
            if not tries and other == self.most():
                shares = (0.0, 0.5 * self.share, self.share)
                tries = [
                    levels | {way: 1.0 - share, way + 1: share}
                    for way in range(0, len(self.services), 2)
                    for share in shares
                    if share != levels[way + 1]
                ]
        return replace(with_bound(best, 0.0), fraction_bound=1.0, proven=False)

    def _whole(self, levels: Mapping[int, float]) -> dict[int, float]:
        """Return levels of which those of each service add up to 1."""
        found = self.off()
        for way in range(0, len(self.services), 2):
            off, on = levels.get(way, 0.0), levels.get(way + 1, 0.0)
            if off + on > 0.0:
                share = min(self.share, on / (off + on))
                found |= {way: 1.0 - share, way + 1: share}
        return found


def _merit(found: Allocation) -> tuple[float, float]:
    """Order of allocations: more served, then less cost."""
    return round(float(found.served.min(initial=1.0)), 9), -found.objective


def with_bound(found: Allocation, bound: float) -> Allocation:
    """Return an allocation of which so much is proven."""
    bound = max(0.0, min(bound, found.objective))
    gap = 0.0 if found.objective <= 0.0 else (found.objective - bound) / found.objective
    status = found.status
    if status in ("optimal", "feasible"):
        status = "optimal" if gap <= OPTIMAL else "feasible"
    return replace(found, bound=bound, gap=gap, status=status)


def _way(service: ServiceDemand, off: bool) -> ServiceDemand:
    """A service that takes all of its nodes from one sort of cells."""

    def wide(role: RoleTemplates) -> RoleTemplates:
        nothing = np.zeros_like(role.counts)
        both = (role.counts, nothing) if off else (nothing, role.counts)
        return replace(role, counts=np.ascontiguousarray(np.hstack(both)))

    allowed = np.concatenate([service.allowed, service.allowed])
    roles = tuple(map(wide, service.roles))
    return replace(service, roles=roles, allowed=allowed, borrows=not off)


def _running(column: RunningColumn, supply: Supply, kinds: int) -> RunningColumn:
    """What runs, with its way: on spot where it has a node there."""
    on = any(supply.spot[k] for k, _ in column.gpus)
    nodes = tuple((kind + kinds * on, n) for kind, n in column.nodes)
    return replace(column, service=2 * column.service + on, nodes=nodes)
