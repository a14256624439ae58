"""All solvers by name, behind one call: a problem in, a checked plan out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError, UsageError
from atoll.plan.plan import Goal, Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import check
from atoll.solve.place import solver as flow
from atoll.solve.rent import baselines, optimal
from atoll.solve.templates.library import Libraries

DEFAULT = optimal.SOLVER
BASELINES: dict[str, Callable[[Problem, Catalog, Libraries], Plan]] = {
    "homogeneous": baselines.homogeneous,
    "homogeneous-node": partial(baselines.homogeneous, most_nodes=1),
    "cauchy": baselines.cauchy,
    "cauchy-node": partial(baselines.cauchy, most_nodes=1),
    "memory-proportional": baselines.memory_proportional,
}
RENTING = (DEFAULT, *BASELINES)
NAMES = (*RENTING, *flow.NAMES)


@dataclass(frozen=True)
class Effort:
    """How long to try and how close to the optimum to come; baselines take what they take.

    `objective`, `partial` (inference), `promise` (no pipeline slower than it) and `rank` (which of the best
    plans to take) are for fixed clusters only.
    """

    deadline_s: float = optimal.DEADLINE_S
    gap: float = optimal.GAP
    log: optimal.Log | None = None
    objective: Goal | None = None
    partial: bool = False
    promise: bool = False
    rank: flow.Rank | None = None


def default_for(problem: Problem) -> str:
    """Return the solver to use unless told: the cheapest fleet, or the best placement on a cluster."""
    return DEFAULT if problem.cluster is None else flow.SEARCH


def fits(name: str, problem: Problem) -> None:
    """Refuse a solver that nobody knows, or that is for another kind of problem."""
    if name not in NAMES:
        raise UnknownNameError("solver", name, NAMES)
    if (name in flow.NAMES) != (problem.cluster is not None):
        what = "no fixed cluster" if problem.cluster is None else "a fixed cluster"
        own = RENTING if problem.cluster is None else flow.NAMES
        raise UsageError(f"{problem.name} has {what}", hint=f"use {', '.join(own)}", field="solver")


def solve(
    name: str,
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries | None,
    effort: Effort | None = None,
) -> Plan:
    """Return the plan of the solver called `name`, having passed the validator.

    Solvers for fixed clusters need no template libraries.
    """
    own = effort or Effort()
    fits(name, problem)
    if name in flow.NAMES:
        plan = flow.solve(
            name,
            problem,
            catalog,
            flow.FlowEffort(
                own.deadline_s, own.objective, own.partial, own.promise, log=own.log, rank=own.rank
            ),
        )
    elif libraries is None:
        raise UsageError(f"{name} needs the templates of the problem")
    elif name == DEFAULT:
        plan = optimal.solve(
            problem, catalog, libraries, deadline_s=own.deadline_s, gap=own.gap, log=own.log
        ).plan
    else:
        plan = BASELINES[name](problem, catalog, libraries)
    check(plan, problem, catalog)
    return plan
