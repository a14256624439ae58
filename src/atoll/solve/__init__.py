"""Problems into plans: every solver, behind one call.

from atoll.solve import solve

plan = solve(problem)

registry    `solve`: picks the solver, makes what it needs, checks its plan
plan_request  `PlanRequest`: solver, effort, deadline, catalog, who is told of progress
effort      how hard to try and what for; `deadline` until when; `solve_progress` what is told meanwhile
family      the three families of solvers and their protocol
templates/  every useful layout of a role over unlike nodes, exactly
rent/       the cheapest instances of templates on offer, with a proven bound; baselines
place/      layers on machines that are there, network and all; baselines
graph/      components of any-to-any models on executors
joint/      GH and AGH, baselines that choose models and machines
weighted    energy and carbon beside rent
explain/    what binds, what loosening it is worth, what would repair a plan
simplicity  pieces of a plan, and how long requests wait beside them
assembly    chosen layouts into a plan: flows, routes, cost
comparison  a plan beside those of other solvers
lp, cover   HiGHS, and covering functions, shared by the solvers
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.solve.comparison import compare_solvers
    from atoll.solve.effort import Effort
    from atoll.solve.family import solvers
    from atoll.solve.plan_request import PlanRequest
    from atoll.solve.registry import solve
    from atoll.solve.solve_progress import Progress, SolveStats

_HOME = {
    "Effort": "effort",
    "PlanRequest": "plan_request",
    "Progress": "solve_progress",
    "SolveStats": "solve_progress",
    "compare_solvers": "comparison",
    "solve": "registry",
    "solvers": "family",
}

__all__ = [
    "Effort",
    "PlanRequest",
    "Progress",
    "SolveStats",
    "compare_solvers",
    "solve",
    "solvers",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"atoll.solve.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
