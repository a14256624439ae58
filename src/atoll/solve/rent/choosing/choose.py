"""Choosing levels for a problem with choices: what each way serves, and what no mix of models goes below.

The allocation of a problem with levels free (`level_choice`), and the plain problem that its levels leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.catalog.catalog import Catalog
from atoll.plan.choice import ModelMix
from atoll.plan.plan import Instance, Plan
from atoll.plan.problem import Problem
from atoll.solve.derating import Derating
from atoll.solve.rent.allocation import WORK
from atoll.solve.rent.allocation_types import (
    Allocation,
    Log,
    ServiceDemand,
)
from atoll.solve.rent.choosing.level_choice import LevelAllocation, choose_levels
from atoll.solve.rent.choosing.level_rows import LevelRows
from atoll.solve.rent.optimal import (
    Draft,
    limits_of,
    running_columns,
    service_demands,
    supply_of,
)
from atoll.solve.rent.spot_ways import SpotWays
from atoll.solve.templates.library import Libraries

Floats = NDArray[np.float64]

_EFFORT = 0.4
"""Of what an allocation may take: the settled problem is planned after it."""
_POINT = 0.01
"""Of an error: 1 %."""


@dataclass(frozen=True)
class ChosenLevels:
    """Levels by name of a service, the mixes of models that they are, and what is proven.

    `bound` is in USD per hour over all mixes, None where not all demand can be met or nothing was proven.
    `duals` are by choice the USD per hour that one more unit of mean error saves. `plan` is one for the
    settled problem, None where none was found that serves everything.
    """

    levels: dict[str, float]
    mixes: tuple[ModelMix, ...]
    bound: float | None
    duals: dict[str, float]
    plan: Plan | None = None
    cut_short: bool = False


def choose(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    *,
    deadline_s: float = 300.0,
    gap: float = 1e-3,
    work: float = 1.0,
    log: Log | None = None,
    derating: Derating | None = None,
    scale: Mapping[str, float] | None = None,
) -> ChosenLevels:
    """Return the levels of the cheapest plan found, proven to `gap` or as far as `work` allows.

    `scale` multiplies the demand of services, by name: what must be carried for a promise to be kept, say.
    Then there is no plan of it, and what is proven is of the demand that was scaled.
    """
    scaled = scale or {}
    running = running_columns(problem, catalog, derating)
    demands = [
        _times(demand, scaled.get(demand.name, 1.0))
        for demand in service_demands(problem, catalog, libraries, derating)
    ]
    rows, limits = LevelRows.of(problem), limits_of(problem)
    supply, columns = supply_of(problem, catalog), [column for column, _ in running]
    ways = SpotWays.of(demands, supply, problem.limits.spot_share, columns)
    asked = (demands, supply, rows, columns)
    if ways is not None:
        asked = (list(ways.services), ways.supply, ways.widen(rows), list(ways.running))
    found = choose_levels(
        asked[0],
        asked[1],
        limits,
        asked[2],
        init_penalty=problem.settings.init_penalty,
        running=asked[3],
        deadline_s=deadline_s,
        work=work * _EFFORT * WORK,
        gap=gap,
        seed=problem.settings.seed,
        log=log,
    )
    if asked[0] is not demands and ways is not None:
        found = _joined(found, ways)
    levels = {problem.services[way].name: level for way, level in found.levels.items()}
    duals = {row.name: usd for row, usd in zip(rows.by_choice, found.error_usd, strict=False)}
    prices = {
        row.name: duals[row.name] * _POINT for row in rows.by_choice if row.max_error is not None
    }
    # Where not all is served, money is not what more errors would buy.
    mixes = problem.mixes_at(levels, {} if found.allocation is None else prices)
    plan = None
    # A plan for scaled demand would not be one for the problem.
    if found.allocation is not None and not scaled:
        groups = [group for _, group in running]
        plan = _plan_of(problem, catalog, libraries, mixes, found.allocation, groups, derating)
    # With templates missing, there may be something cheaper.
    proven = found.allocation is not None and not libraries.cut_short
    return ChosenLevels(
        levels, mixes, found.bound if proven else None, duals, plan, found.cut_short
    )


def _joined(found: LevelAllocation, ways: SpotWays) -> LevelAllocation:
    """Levels and allocation of services whose ways, off spot and on it, were found."""
    levels: dict[int, float] = {}
    for way, level in found.levels.items():
        levels[way // 2] = min(1.0, levels.get(way // 2, 0.0) + level)
    own = None if found.allocation is None else ways.answer(found.allocation)
    return replace(found, levels=levels, allocation=own)


def _times(demand: ServiceDemand, factor: float) -> ServiceDemand:
    if factor == 1.0:
        return demand
    roles = tuple(replace(role, demand=role.demand * factor) for role in demand.roles)
    return replace(demand, roles=roles, kv_bytes_per_s=demand.kv_bytes_per_s * factor)


def _plan_of(
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    mixes: tuple[ModelMix, ...],
    allocation: Allocation,
    running: list[list[Instance]],
    derating: Derating | None,
) -> Plan:
    """The plan of an allocation, for the problem that the mixes leave."""
    settled = problem.settled(mixes)
    place = {service.name: m for m, service in enumerate(settled.services)}
    names = [service.name for service in problem.services]
    kept = [
        replace(some, service=place[names[some.service]])
        for some in allocation.instances
        if names[some.service] in place
    ]
    own = replace(allocation, instances=tuple(kept))
    return Draft(settled, catalog, libraries, own, running, derating).plan()
