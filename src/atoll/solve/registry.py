"""All solvers behind one call: a problem in, a checked plan out.

    plan = solve(problem, PlanRequest(deadline_s=30.0))

`solve` plans for capacity: templates and machines carry what the performance model gives them. Energy and
carbon are weighed around it (`weighted`), choices between models are settled around it (`rent.choosing`), and
the family of the problem (`family`) finds the plan. `prove.planning` sizes plans by simulation on top.
"""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from atoll.core.errors import InfeasibleError, InternalError, MissingDependencyError
from atoll.plan import proof
from atoll.plan.validate.violation import InvalidPlanError
from atoll.solve.deadline import Deadline
from atoll.solve.family import check_solver, family_of
from atoll.solve.plan_request import PlanRequest
from atoll.solve.solve_progress import SolveStats

if TYPE_CHECKING:
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem

_PACKAGES = ("numba", "highspy", "scipy")
LATE = "a longer --deadline may find a plan that serves more"
"""Hint where the deadline came before the search ended."""
CUT_SHORT = proof.LATE
_LENIENCE = 0.1
"""Share of a deadline that what follows it may take."""
_LENIENCE_S = 1.0
_MANY = 1000
"""Services in regions from which on a simple rule takes many seconds."""
_ALL_SERVED = 1.0 - 1e-9
"""Share of demand from which on it counts as met: the rest is rounding."""


def solve(problem: Problem, request: PlanRequest | None = None) -> Plan:
    """Return a plan for a problem that has passed the validator.

    Where there is no plan its status is "infeasible" and its reasons say why. Where the deadline came first,
    it is the best so far or that of the best baseline, whichever serves more. Where the problem has choices
    between models, the plan has the mixes that were chosen and is one for the problem that they settle.
    """
    request = request or PlanRequest()
    request.check_deadline()
    require_packages()
    name = request.solver or family_of(problem).names[0]
    check_solver(name, problem)
    request = replace(request, solver=name, catalog=request.catalog_for(problem))
    if not problem.weights.rent_only:
        from atoll.solve.weighted import plan_weighted

        return plan_weighted(problem, request, solve)
    own = SolveStats()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    watched = replace(request, on_progress=own.watch(request.on_progress))
    try:
        return (_solve_plain if problem.is_settled else _solve_choice)(problem, watched)
    finally:
        own.seconds, own.cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
        if request.stats is not None:
            request.stats.add(own)


def _solve_plain(problem: Problem, request: PlanRequest) -> Plan:
    return _SafetyNet(problem, request).solve()


def _solve_choice(problem: Problem, request: PlanRequest) -> Plan:
    """Return a plan with the mixes of models that it is for, checked against what was asked."""
    from atoll.plan.validate.check import check
    from atoll.solve.rent.choosing.solver import solve_choice

    plan = solve_choice(problem, request, _solve_plain)
    if plan.cut_short and CUT_SHORT not in plan.reasons:
        plan = plan.model_copy(update={"reasons": (*plan.reasons, CUT_SHORT)})
    check(plan, problem, request.catalog)
    return plan


class _SafetyNet:
    """Solves a problem; where the deadline cuts the solver short, simple rules may answer instead."""

    def __init__(self, problem: Problem, request: PlanRequest) -> None:
        self.family, self.problem, self.request = family_of(problem), problem, request
        self.name = request.solver or self.family.names[0]
        self.deadline = Deadline(request.deadline_s)
        self.rescued_by = Deadline(request.deadline_s * (1 + _LENIENCE) + _LENIENCE_S)

    def solve(self) -> Plan:
        """Return the plan of the solver; where it was cut short or fell over late, the best there is."""
        rule = self.name in self.family.baselines
        best: Plan | None = None
        try:
            best = self._check(self.name, self.deadline.seconds)
        except (InfeasibleError, InternalError, InvalidPlanError):
            # A search that ends by itself must not fail; one that was torn away may leave anything.
            if rule or not self.deadline.passed:
                raise
            best = self._rescue(None)
            if best is None:
                raise
        else:
            if not best.cut_short:
                return best
            # What answers soonest may serve less than a rule, and is what was asked for.
            if self.request.rescue and not rule and best.goal != "latency":
                best = self._rescue(best) or best
        reasons = best.reasons if CUT_SHORT in best.reasons else (*best.reasons, CUT_SHORT)
        return best.model_copy(update={"cut_short": True, "reasons": reasons})

    def _check(self, name: str, seconds: float, *, modest: bool = False) -> Plan:
        from atoll.plan.validate.check import check

        asked = _without_spot(self.problem) if modest else self.problem
        plan = self.family.solve(asked, replace(self.request, solver=name, deadline_s=seconds))
        if asked is not self.problem:
            plan = plan.model_copy(update={"problem_hash": self.problem.content_hash()})
        check(plan, self.problem, self.request.catalog)
        return plan

    def _rescue(self, found: Plan | None) -> Plan | None:
        """Return what serves most: a plan, quick ones, or the baselines until there is no time left for more.

        One is tried in any case, and all of them while nothing is served; none where something is and
        services are so many that each takes longer than the whole deadline may.
        """
        best, served = found, _served(found, self.problem)
        if served[1] > 0.0 and len(self.problem.services) * len(self.problem.regions) > _MANY:
            return best
        for tried, name in enumerate((*self.family.quick, *self.family.baselines)):
            if served[0] >= _ALL_SERVED or (tried and served[1] > 0.0 and self.rescued_by.passed):
                break
            self.request.say("baselines", f"{name}, as the deadline has come")
            try:
                modest = name not in self.family.quick
                other = self._check(name, self.rescued_by.share(1.0), modest=modest)
            except (InfeasibleError, InternalError, InvalidPlanError):
                continue
            if best is None or _served(other, self.problem) > served:
                best, served = other, _served(other, self.problem)
        return best


def _without_spot(problem: Problem) -> Problem:
    """Return a problem that baselines, which know no limits, answer within a limit on spot."""
    if problem.limits.spot_share is None or problem.cluster is not None:
        return problem
    return problem.replace(offers=tuple(o for o in problem.offers if o.market != "spot"))


def _served(plan: Plan | None, problem: Problem) -> tuple[float, float]:
    """Return the share of demand that a plan serves as the problem counts it, and the mean of all."""
    from atoll.solve.explain.plan_explanation import served_share

    if plan is None:
        return (0.0, 0.0)
    return (served_share(plan, problem), served_share(plan, problem, mean=True))


def count_templates(problem: Problem, request: PlanRequest) -> dict[str, dict[str, int]]:
    """Return by role how many templates there are, of how many sets of nodes; placing needs none."""
    return family_of(problem).count_templates(problem, request)


def require(plan: Plan, problem: Problem, *, strict: bool = False) -> InfeasibleError | None:
    """Return why a plan is not good enough, None if it is: there is none, or it must meet all demand.

    `strict` asks for all demand; a fleet that says `on_shortage: fail` does so, too.
    """
    from atoll.core.units import format_share

    late = plan.cut_short
    why = CUT_SHORT if late else "; ".join(plan.reasons[:3])
    because = f": {why}" if why else ""
    family = family_of(problem)
    if plan.status == "infeasible":
        hint = LATE if late else family.hint
        return InfeasibleError(family.failure.format(name=plan.problem_name) + because, hint=hint)
    if plan.status == "partial" and (strict or problem.settings.on_shortage == "fail"):
        min_share = min(plan.served_fraction.values())
        accept = "accept that (no --strict, no 'on_shortage: fail'), or ask `atoll explain`"
        return InfeasibleError(
            f"only {format_share(min_share)} of the demand can be met{because}",
            hint=LATE if late else accept,
        )
    return None


def require_packages() -> None:
    """Say which extra to install where the packages that plan are missing."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingDependencyError(package, "plan", needed_for="planning")
