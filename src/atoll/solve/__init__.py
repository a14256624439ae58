"""Problems into plans: every solver, behind one call.

from atoll.solve import solve

plan = solve(problem)

registry    `solve`: picks the solver, makes what it needs, checks its plan
effort      how hard to try and what for; progress is what is told meanwhile
family      what solvers of one kind of problem have in common
templates/  every useful layout of a role over unlike nodes, exactly
rent/       the cheapest instances of templates on offer, with a proven bound; baselines
place/      layers on machines that are there, network and all; baselines
cells/      components of any-to-any models on executors
choice/     the joint problem of GH and AGH, to be compared with
weighted    energy and carbon beside rent
explain/    what binds, what loosening it is worth, what would repair a plan
assembly    chosen layouts into a plan: flows, routes, cost
comparison  a plan beside those of other solvers
lp, cover   HiGHS, and covering functions, shared by the solvers
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.solve.effort import Effort
    from atoll.solve.progress import Progress, SolveStats
    from atoll.solve.registry import compare_solvers, solve, solvers

_HOME = {
    "Effort": "effort",
    "Progress": "progress",
    "SolveStats": "progress",
    "compare_solvers": "registry",
    "solve": "registry",
    "solvers": "registry",
}

__all__ = ["Effort", "Progress", "SolveStats", "compare_solvers", "solve", "solvers"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"atoll.solve.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
