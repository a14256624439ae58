"""Routes over what is left after each loss that a plan must survive, worked out before it happens."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.catalog.catalog import Catalog
from atoll.plan.losses import Loss, list_losses
from atoll.plan.plan import LossRoutes, Plan, Route
from atoll.plan.problem import Problem
from atoll.solve.legs import routes_of

MAX_ROUTES = 5_000
"""Routes after losses that a plan has, about: those of further losses are found when they happen."""


def with_loss_routes(
    plan: Plan, problem: Problem, catalog: Catalog, some: Iterable[Loss] | None = None
) -> Plan:
    """Return a plan of rented nodes with the routes of each loss, of single units first, or of `some`.

    Each takes what the instances that are left carry, on spot or off it.
    """
    survival = problem.limits.survival
    if problem.family != "rent" or not survival.lost:
        return plan
    freed = problem.replace(limits=problem.limits.model_copy(update={"spot_share": None}))
    planned = _by_service(plan.routes)
    found: list[LossRoutes] = []
    number = 0
    for loss in list_losses(plan.instances, survival) if some is None else some:
        if number >= MAX_ROUTES:
            break
        left = [one for one in plan.instances if one.id not in loss.instances]
        routes = _by_service(routes_of(freed, catalog, left)[0])
        hit = {one.service for one in plan.instances if one.id in loss.instances}
        hit |= {name for name, own in routes.items() if own != planned.get(name)}
        own = tuple(route for name in sorted(hit) for route in routes.get(name, ()))
        number += max(1, len(own))
        found.append(
            LossRoutes(
                lost=loss.name,
                instances=tuple(sorted(loss.instances)),
                services=tuple(sorted(hit)),
                routes=own,
            )
        )
    return plan.model_copy(update={"after_loss": tuple(found)})


def _by_service(routes: Iterable[Route]) -> dict[str, tuple[Route, ...]]:
    found: dict[str, tuple[Route, ...]] = {}
    for route in routes:
        found[route.service] = (*found.get(route.service, ()), route)
    return found
