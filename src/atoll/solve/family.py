"""A family of solvers: those that fit one kind of problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort
from atoll.solve.progress import OnProgress

Solve = Callable[[str, Problem, Catalog, Effort, float, OnProgress | None], Plan]
"""(name, problem, facts, effort, deadline in seconds, told of progress) -> plan, not yet checked."""


@dataclass(frozen=True)
class SolverFamily:
    """Solvers by name, the default first; `baselines` are simple rules to compare with.

    `quick` are those that answer at once, within all limits: what is tried first when a deadline has come.
    `count_templates` says by role how many templates there are, of how many sets of nodes. `failure` says of
    a problem's name that there is no plan, `hint` what to do then.
    """

    names: tuple[str, ...]
    baselines: tuple[str, ...]
    solve: Solve
    count_templates: Callable[[Problem, Catalog, bool], dict[str, dict[str, int]]]
    failure: str
    hint: str
    quick: tuple[str, ...] = ()
