"""The families of solvers, one for each way to plan a problem (`Problem.family`).

rent   nodes are on offer: the cheapest instances of templates are rented
place  a cluster is given: layers are placed on its machines
graph  models have several components: those are put together on executors

Nobody else has to know which family a problem belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from atoll.core.errors import UnknownNameError, UsageError
from atoll.solve.plan_request import FindPlan, PlanRequest

if TYPE_CHECKING:
    from atoll.plan.problem import Family, Problem

_MODULES: dict[Family, str] = {
    "rent": "atoll.solve.rent.rent_solver",
    "place": "atoll.solve.place.place_solver",
    "graph": "atoll.solve.graph.graph_solver",
}
"""Where each family is, imported when it is needed: solvers are heavy."""


@dataclass(frozen=True)
class SolverFamily:
    """Solvers by name, the default first; `baselines` are simple rules to compare with.

    `solve` returns the plan of the request's solver, not yet checked; its status is "infeasible", with
    reasons, where there is none. `quick` are solvers that answer at once, within all limits: they are tried
    first when a deadline has come. `choosers` are baselines that choose between models themselves.
    `count_templates` says by role how many templates there are, of how many sets of nodes. `failure` says of
    a problem's name that there is no plan, `hint` what to do then.
    """

    names: tuple[str, ...]
    baselines: tuple[str, ...]
    solve: FindPlan
    count_templates: Callable[[Problem, PlanRequest], dict[str, dict[str, int]]]
    failure: str
    hint: str
    quick: tuple[str, ...] = ()
    choosers: tuple[str, ...] = ()


def family_of(problem: Problem) -> SolverFamily:
    """Return the solvers for a problem."""
    return _load(problem.family)


def _load(family: Family) -> SolverFamily:
    found: SolverFamily = import_module(_MODULES[family]).FAMILY
    return found


def solvers(problem: Problem) -> tuple[str, ...]:
    """Return the names of the solvers that fit a problem, the default first."""
    return family_of(problem).names


def baselines(problem: Problem) -> tuple[str, ...]:
    """Return the names of those solvers that are simple rules to compare with."""
    return family_of(problem).baselines


def check_solver(name: str, problem: Problem) -> None:
    """Refuse a solver that nobody knows, or that is for another kind of problem."""
    fitting = solvers(problem)
    if name in fitting:
        return
    known = {family: _load(family).names for family in _MODULES}
    if not any(name in names for names in known.values()):
        raise UnknownNameError("solver", name, [one for names in known.values() for one in names])
    what = {
        "place": "a fixed cluster",
        "graph": "no fixed cluster" if name in known["place"] else "classes of requests",
        "rent": "no fixed cluster" if name in known["place"] else "no classes of requests",
    }[problem.family]
    raise UsageError(f"{problem.name} has {what}", hint=f"use {', '.join(fitting)}", field="solver")
