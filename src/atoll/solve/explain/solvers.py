"""Who answers the questions of an explanation: the default solver of each family, with little effort."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.catalog.catalog import Catalog
from atoll.core.ids import RoleId
from atoll.plan.cluster_profiles import request_tokens
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import check
from atoll.solve.effort import Effort
from atoll.solve.explain.planning_again import SolvedProblem
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.rent.optimal import solve as solve_optimal
from atoll.solve.templates.generate import TemplateLibrary, generate
from atoll.solve.templates.library import Libraries, engine_tables, role_library, template_key
from atoll.solve.templates.template_cache import TemplateCache


@dataclass
class RentSolver:
    """Answers about rented nodes. Templates of roles that a change does not touch are used again."""

    catalog: Catalog
    cached: bool = True
    _roles: dict[str, TemplateLibrary] = field(init=False, default_factory=dict)

    def __call__(self, problem: Problem, effort: Effort, seconds: float) -> SolvedProblem:
        """Return the cheapest plan of a problem, checked."""
        solved = solve_optimal(
            problem,
            self.catalog,
            self.libraries(problem),
            deadline_s=seconds,
            gap=effort.gap,
            work=effort.work,
            derating=effort.derating,
        )
        check(solved.plan, problem, self.catalog)
        max_served = float(solved.allocation.fraction_bound)
        return SolvedProblem(
            solved.plan, max_served, solved.allocation, solved.allocation.statistics.iterations
        )

    def use(self, problem: Problem, libraries: Libraries) -> None:
        """Remember templates that are there."""
        for role in problem.roles:
            self._roles[_role_key(problem, role)] = libraries.roles[str(role)]

    def libraries(self, problem: Problem) -> Libraries:
        """Return the templates of all roles of a variant."""
        roles = {str(role): self._library(problem, role) for role in problem.roles}
        return Libraries(problem.kinds, roles)

    def _library(self, problem: Problem, role: RoleId) -> TemplateLibrary:
        key = _role_key(problem, role)
        if key not in self._roles:
            self._roles[key] = role_library(
                problem,
                engine_tables(problem, self.catalog, role),
                problem.settings.max_nodes_per_instance,
                make=TemplateCache().library if self.cached else generate,
            )
        return self._roles[key]


def _role_key(problem: Problem, role: RoleId) -> str:
    """A hash of all that the templates of a role depend on; what other roles there are is not among it."""
    service = problem.service_of(role).model_copy(update={"phases": "auto"})
    return f"{role} {template_key(problem.model_copy(update={'services': (service,)}))}"


@dataclass
class PlanSolver:
    """Answers about a fixed cluster, or any-to-any models, each a checked plan of the default solver."""

    catalog: Catalog

    def __call__(self, problem: Problem, effort: Effort, seconds: float) -> SolvedProblem:
        """Return the best plan found."""
        plan = solve(problem, PlanRequest(effort=effort, deadline_s=seconds, catalog=self.catalog))
        return SolvedProblem(plan, _max_served(plan, problem))


def _max_served(plan: Plan, problem: Problem) -> float:
    """The share of all demand that the bound of a placement leaves possible."""
    asked = sum(request_tokens(s) * s.demand_per_s for s in problem.services)
    if plan.bound is None or plan.goal == "cost" or asked <= 0.0:
        return 1.0
    return min(1.0, plan.bound / asked)
