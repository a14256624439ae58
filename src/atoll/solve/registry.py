"""All solvers behind one call: a problem in, a checked plan out.

    plan = solve(problem)

There are three families. Where nodes are on offer, the cheapest of them are rented (`rent`); where a cluster
is given, layers are placed on it (`place`); where models have several components, those are put together on
executors (`cells`). Nobody else has to know which family a problem belongs to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from atoll.core.errors import (
    InfeasibleError,
    InternalError,
    MissingDependencyError,
    UnknownNameError,
    UsageError,
)
from atoll.plan.validate.violation import InvalidPlanError
from atoll.solve.effort import DEADLINE_S, Countdown, Effort
from atoll.solve.progress import Progress, SolveStats
from atoll.solve.resizing import sized_like

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.comparison import Compared
    from atoll.solve.family import SolverFamily
    from atoll.solve.progress import OnProgress

_PACKAGES = ("numba", "highspy", "scipy")
LATE = "a longer --deadline may find a plan that serves more"
"""What to do where the deadline came before the search ended."""
CUT_SHORT = "the deadline came before the search had ended"
"""The reason that a plan gives where it was cut short."""
_LENIENCE = 0.1
"""Share of a deadline that what follows it may take."""
_LENIENCE_S = 1.0
_ALL = 1.0 - 1e-9


def solve(
    problem: Problem,
    *,
    solver: str | None = None,
    effort: Effort | None = None,
    deadline_s: float = DEADLINE_S,
    on_progress: OnProgress | None = None,
    catalog: Catalog | None = None,
    stats: SolveStats | None = None,
) -> Plan:
    """Return a plan for a problem that has passed the validator.

    `solver` is one of `solvers(problem)`, by default the first of them. The search ends when the plan is
    proven as close to the best as `effort` asks or the work that it allows is done; `on_progress` is told how
    far it is. `catalog` are the facts to plan with, by default those of the problem. Where there is no plan
    its status is "infeasible" and its reasons say why. Equal arguments give equal plans, unless `deadline_s`
    seconds pass first: then the plan is the best so far or of the best baseline, whichever serves more, and
    says that it was `cut_short`. `stats` is told what it took. Where the problem has choices between models,
    the plan has the mixes that were chosen and is one for the problem that they settle.
    """
    if not deadline_s > 0:
        raise UsageError(f"a deadline of {deadline_s:g} s", hint="give it some time, as in 30.0")
    require_packages()
    family = _family(problem)
    name = solver or family.names[0]
    _check_name(name, problem)
    facts = problem.catalog() if catalog is None else catalog
    if not problem.weights.rent_only:
        from atoll.solve.weighted import plan_weighted

        def at_prices(priced: Problem, spent: Effort, seconds: float) -> Plan:
            return solve(
                priced,
                solver=solver,
                effort=spent,
                deadline_s=seconds,
                on_progress=on_progress,
                catalog=facts,
                stats=stats,
            )

        return plan_weighted(
            problem,
            facts,
            effort or Effort(),
            at_prices,
            deadline_s=deadline_s,
            on_progress=on_progress,
        )
    own = SolveStats()
    began, cpu = time.perf_counter(), time.process_time()
    tell, chosen = own.watch(on_progress), effort or Effort()

    def find(asked: Problem, seconds: float) -> Plan:
        return _Asked(family, asked, facts, chosen, seconds, tell).solve(name)

    try:
        if problem.choices:
            plan = _solve_choice(name, problem, facts, chosen, deadline_s, find, tell)
        else:
            plan = find(problem, deadline_s)
    finally:
        own.seconds, own.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        if stats is not None:
            stats.add(own)
    return plan


def _solve_choice(
    name: str,
    problem: Problem,
    facts: Catalog,
    effort: Effort,
    deadline_s: float,
    find: Callable[[Problem, float], Plan],
    tell: OnProgress,
) -> Plan:
    """Return a plan with the mixes of models that it is for, checked against what was asked."""
    from atoll.plan.validate.check import check
    from atoll.solve.rent.choosing.solver import solve_choice

    plan = solve_choice(name, problem, facts, effort, deadline_s, find, tell)
    if plan.cut_short and CUT_SHORT not in plan.reasons:
        plan = plan.model_copy(update={"reasons": (*plan.reasons, CUT_SHORT)})
    check(plan, problem, facts)
    return plan


class _Asked:
    """What a solver is asked, and the net under it: a deadline never costs more than the search."""

    def __init__(
        self,
        family: SolverFamily,
        problem: Problem,
        facts: Catalog,
        effort: Effort,
        deadline_s: float,
        tell: OnProgress,
    ) -> None:
        self.family, self.problem, self.facts = family, problem, facts
        self.effort, self.tell = effort, tell
        self.deadline = Countdown(deadline_s)
        self.rescued_by = Countdown(deadline_s * (1 + _LENIENCE) + _LENIENCE_S)

    def solve(self, name: str) -> Plan:
        """Return the plan of one solver; where it was cut short or fell over late, the best there is."""
        rule = name in self.family.baselines
        best: Plan | None = None
        try:
            best = self._check(name, self.deadline.seconds)
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
            best = best if rule or best.goal == "latency" else self._rescue(best) or best
        reasons = best.reasons if CUT_SHORT in best.reasons else (*best.reasons, CUT_SHORT)
        return best.model_copy(update={"cut_short": True, "reasons": reasons})

    def _check(self, name: str, seconds: float, *, modest: bool = False) -> Plan:
        from atoll.plan.validate.check import check

        asked = _without_spot(self.problem) if modest else self.problem
        plan = self.family.solve(name, asked, self.facts, self.effort, seconds, self.tell)
        if asked is not self.problem:
            plan = plan.model_copy(update={"problem_hash": self.problem.content_hash()})
        check(plan, self.problem, self.facts)
        return plan

    def _rescue(self, found: Plan | None) -> Plan | None:
        """Return what serves most: a plan, quick ones, or the baselines until there is no time left for more.

        One is tried in any case, and all of them while nothing is served.
        """
        best, served = found, _served(found, self.problem)
        for tried, name in enumerate((*self.family.quick, *self.family.baselines)):
            if served[0] >= _ALL or (tried and served[1] > 0.0 and self.rescued_by.passed):
                break
            self.tell(Progress("baselines", f"{name}, as the deadline has come"))
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
    from atoll.solve.explain.explanation import served_share

    if plan is None:
        return (0.0, 0.0)
    return (served_share(plan, problem), served_share(plan, problem, mean=True))


def solvers(problem: Problem) -> tuple[str, ...]:
    """Return the names of the solvers that fit a problem, the default first."""
    return _family(problem).names


def baselines(problem: Problem) -> tuple[str, ...]:
    """Return the names of those solvers that are simple rules to compare with."""
    return _family(problem).baselines


def compare_solvers(
    plan: Plan,
    problem: Problem,
    *,
    effort: Effort | None = None,
    deadline_s: float = DEADLINE_S,
    on_progress: OnProgress | None = None,
    catalog: Catalog | None = None,
) -> Iterator[Compared]:
    """Yield what simple rules make of the problem, beside a plan for it, until `deadline_s` is over."""
    from atoll.solve.comparison import broken, compare

    facts = problem.catalog() if catalog is None else catalog
    problem = problem.settled(plan.mixes)
    left = Countdown(deadline_s)
    # What a rule would rent for the same promises, its instances carrying what the plan's do.
    problem, derating = sized_like(plan, problem, facts)
    if derating is not None:
        effort = replace(effort or Effort(), derating=derating)
    if plan.promises and problem.has_graphs:
        from atoll.solve.cells.room import slowdown_of

        # Executors of a rule are given the room that those of the plan have, on average.
        slow = slowdown_of(plan, problem, facts)
        effort = replace(effort or Effort(), slowdown=slow)
    names = [name for name in _family(problem).baselines if name != plan.solver]
    for tried, name in enumerate(names):
        if left.passed:
            return
        try:
            other = solve(
                problem,
                solver=name,
                effort=effort,
                deadline_s=left.share(1 / (len(names) - tried)),
                on_progress=on_progress,
                catalog=facts,
            )
        except InvalidPlanError as error:
            # Baselines know no limits of the whole; the validator says which they break.
            yield broken(name, error)
        else:
            yield compare(other, plan, problem)


def count_templates(
    problem: Problem, *, catalog: Catalog | None = None, cached: bool = True
) -> dict[str, dict[str, int]]:
    """Return by role how many templates there are, of how many sets of nodes; placing needs none."""
    facts = problem.catalog() if catalog is None else catalog
    return _family(problem).count_templates(problem, facts, cached)


def require(plan: Plan, problem: Problem, *, strict: bool = False) -> InfeasibleError | None:
    """Return why a plan is not good enough, None if it is: there is none, or it must meet all demand.

    `strict` asks for all demand; a fleet that says `on_shortage: fail` does so, too.
    """
    from atoll.core.units import format_share

    late = plan.cut_short
    why = CUT_SHORT if late else "; ".join(plan.reasons[:3])
    because = f": {why}" if why else ""
    family = _family(problem)
    if plan.status == "infeasible":
        hint = LATE if late else family.hint
        return InfeasibleError(family.failure.format(name=plan.problem_name) + because, hint=hint)
    if plan.status == "partial" and (strict or problem.settings.on_shortage == "fail"):
        least = min(plan.served_fraction.values())
        accept = "accept that (no --strict, no 'on_shortage: fail'), or ask `atoll explain`"
        return InfeasibleError(
            f"only {format_share(least)} of the demand can be met{because}",
            hint=LATE if late else accept,
        )
    return None


def require_packages() -> None:
    """Say which extra to install where the packages that plan are missing."""
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise MissingDependencyError(package, "plan", needed_for="planning")


def _family(problem: Problem) -> SolverFamily:
    """Return the solvers for a problem: the one place that asks whether it has a cluster or classes."""
    if problem.cluster is not None:
        from atoll.solve.place.solver import FAMILY as PLACING

        return PLACING
    if problem.has_graphs:
        from atoll.solve.cells.solver import FAMILY as COMPOSING

        return COMPOSING
    from atoll.solve.rent.solver import FAMILY as RENTING

    return RENTING


def _check_name(name: str, problem: Problem) -> None:
    """Refuse a solver that nobody knows, or that is for another kind of problem."""
    from atoll.solve.cells.solver import FAMILY as COMPOSING
    from atoll.solve.place.solver import FAMILY as PLACING
    from atoll.solve.rent.solver import FAMILY as RENTING

    fitting = solvers(problem)
    if name in fitting:
        return
    known = (*RENTING.names, *PLACING.names, *COMPOSING.names)
    if name not in known:
        raise UnknownNameError("solver", name, known)
    what = "classes of requests" if problem.has_graphs else "no classes of requests"
    if problem.cluster is not None or name in PLACING.names:
        what = "a fixed cluster" if problem.cluster is not None else "no fixed cluster"
    raise UsageError(f"{problem.name} has {what}", hint=f"use {', '.join(fitting)}", field="solver")
