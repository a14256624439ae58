"""The solver called "fast": few templates, a heuristic allocation, and the same assembly as all others."""

from __future__ import annotations

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.derating import Derating
from atoll.solve.rent import optimal
from atoll.solve.rent.fast.allocate import allocate_fast
from atoll.solve.rent.fast.cache import RoleCache
from atoll.solve.rent.fast.recall import recalled
from atoll.solve.rent.fast.templates import promising_libraries
from atoll.solve.templates.library import Libraries

SOLVER = "fast"


def plan_fast(
    problem: Problem,
    catalog: Catalog,
    *,
    derating: Derating | None = None,
    libraries: Libraries | None = None,
    cached: bool = True,
) -> Plan:
    """Return a plan found by a heuristic, within all limits; nothing is proven of it.

    `libraries` are templates to choose among; without them few are made (`promising_libraries`). Where not
    everything could be served it is "partial". With `cached` capacities and templates are kept on disk, and
    those that are there are used.
    """
    store = RoleCache() if cached else None
    with recalled(problem, catalog, store):
        templates = libraries
        if templates is None:
            templates = promising_libraries(problem, catalog, cached=cached)
        return _plan(problem, catalog, templates, derating)


def _plan(
    problem: Problem, catalog: Catalog, templates: Libraries, derating: Derating | None
) -> Plan:
    running = optimal.running_columns(problem, catalog, derating)
    allocation = allocate_fast(
        optimal.service_demands(problem, catalog, templates, derating),
        optimal.supply_of(problem, catalog),
        optimal.limits_of(problem),
        init_penalty=problem.settings.init_penalty,
        running=[column for column, _ in running],
        on_shortage=problem.settings.on_shortage,
    )
    groups = [group for _, group in running]
    draft = optimal.Draft(problem, catalog, templates, allocation, groups, derating)
    return draft.plan(SOLVER)
