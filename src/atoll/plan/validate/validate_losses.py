"""The rule of `validate` for losses: what is left after each serves what must be kept."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.catalog.catalog import Catalog
from atoll.core.units import format_share
from atoll.plan.losses import Left, find_shortest, list_left
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.validate_routes import check_loads, check_ways
from atoll.plan.validate.violation import Violation, violation


def find_unsurvived(plan: Plan, problem: Problem, catalog: Catalog) -> dict[str, Left]:
    """Return by service the loss that leaves too little of it; none where nodes are a fixed cluster's.

    What a loss leaves of a cluster, whose instances go on without a node, is simulated (`promises`).
    """
    if problem.family != "rent" or not problem.limits.survival.lost:
        return {}
    return find_shortest(list_left(plan, problem, catalog), plan, problem)


def check_loss_routes(plan: Plan, problem: Problem) -> Iterator[Violation]:
    """Yield routes after a loss that lead nowhere, or to instances that are lost or have no room for them."""
    keep = problem.limits.survival.keep
    served = {name: keep * share for name, share in plan.served_fraction.items()}
    for loss in plan.after_loss:
        left = tuple(one for one in plan.instances if one.id not in loss.instances)
        after = plan.model_copy(
            update={"instances": left, "routes": loss.routes, "served_fraction": served}
        )
        found = [*check_ways(after)]
        if plan.status in ("optimal", "feasible"):
            found += check_loads(after, problem)
        for one in found:
            text = f"with {loss.lost} lost {one.message}"
            yield violation("route", one.where, text, one.amount, field="after_loss")


def check_losses(plan: Plan, problem: Problem, short: dict[str, Left]) -> Iterator[Violation]:
    """Yield losses that leave too little, of a plan that does not say that it is partial."""
    if plan.status not in ("optimal", "feasible"):
        return
    keep = problem.limits.survival.keep
    for name, left in short.items():
        share = left.shares[name]
        message = (
            f"with {left.loss.name} lost serves {format_share(share)} of its demand, "
            f"{format_share(keep)} must be kept"
        )
        yield violation("survive", name, message, keep - share)
