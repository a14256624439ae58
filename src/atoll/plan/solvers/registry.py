"""All solvers by name, behind one call: a problem in, a checked plan out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.catalog.catalog import Catalog
from atoll.core.errors import UnknownNameError
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.solvers import baselines, optimal
from atoll.plan.solvers.library import Libraries
from atoll.plan.validate import check

DEFAULT = optimal.SOLVER
BASELINES: dict[str, Callable[[Problem, Catalog, Libraries], Plan]] = {
    "homogeneous": baselines.homogeneous,
    "homogeneous-node": partial(baselines.homogeneous, most_nodes=1),
    "cauchy": baselines.cauchy,
    "cauchy-node": partial(baselines.cauchy, most_nodes=1),
    "memory-proportional": baselines.memory_proportional,
}
NAMES = (DEFAULT, *BASELINES)


@dataclass(frozen=True)
class Effort:
    """How long to try and how close to the optimum to come; baselines take what they take."""

    deadline_s: float = optimal.DEADLINE_S
    gap: float = optimal.GAP
    log: optimal.Log | None = None


def solve(
    name: str,
    problem: Problem,
    catalog: Catalog,
    libraries: Libraries,
    effort: Effort | None = None,
) -> Plan:
    """Return the plan of the solver called `name`, having passed the validator."""
    own = effort or Effort()
    if name == DEFAULT:
        plan = optimal.solve(
            problem, catalog, libraries, deadline_s=own.deadline_s, gap=own.gap, log=own.log
        ).plan
    elif name in BASELINES:
        plan = BASELINES[name](problem, catalog, libraries)
    else:
        raise UnknownNameError("solver", name, NAMES)
    check(plan, problem, catalog)
    return plan
