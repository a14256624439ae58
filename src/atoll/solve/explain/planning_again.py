"""Answers to "what if" about a plan, found by planning again with one thing changed.

A `Planner` remembers every plan that was made, with the problem it was made for. Its answer to a question is
the best of them that holds there (`merit`), so that more nodes or a larger budget never serve less or cost
more than fewer, even where a search ended early. The plan that is explained is the first it knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.catalog.catalog import Catalog
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.validate.check import validate
from atoll.solve.effort import Effort
from atoll.solve.explain.merit import Merit, merit, relaxes
from atoll.solve.explain.plan_explanation import MIN_SERVED, MIN_USD, Worth, served_share

if TYPE_CHECKING:
    from atoll.solve.rent.allocation_types import Allocation

MAX_SECONDS = 120.0
MAX_PLANS = 40
_MIN_TOKENS = 1e-3

Asked = Callable[[int, str], None]
"""Called with the plans made so far and the question being answered."""


class OutOfTimeError(Exception):
    """The plans or the seconds allowed for an explanation are used up."""


@dataclass(frozen=True)
class SolvedProblem:
    """Answer of a solver: a checked plan, and what is known beside it.

    `max_served` is the largest share of demand that any plan could serve, as far as proven. The
    allocation, where there is one, has the prices that estimates are made of; `work` is what it took, in
    iterations of simplex.
    """

    plan: Plan
    max_served: float = 1.0
    allocation: Allocation | None = None
    work: int = 0


def holds(plan: Plan, problem: Problem, catalog: Catalog) -> bool:
    """Return whether a plan made for another problem holds for this one."""
    return not validate(plan, problem, catalog, same_problem=False)


AskSolver = Callable[[Problem, Effort, float], SolvedProblem]
"""Answers a problem with some effort, within some seconds."""


@dataclass(frozen=True)
class Known:
    """A plan and the problem it holds for; with `best_effort` it need not keep promises."""

    problem: Problem
    best_effort: bool
    plan: Plan
    merit: Merit


@dataclass
class Planner:
    """Plans variants of a problem, within so many plans, so much counted work and so many seconds in all."""

    problem: Problem
    catalog: Catalog
    solver: AskSolver
    effort: Effort = field(default_factory=Effort)
    max_plans: int = MAX_PLANS
    max_work: int | None = None
    max_seconds: float = MAX_SECONDS
    progress: Asked | None = None
    remix: AskSolver | None = None
    """Answers a problem with its models chosen anew, where its services are those of a mix of models."""
    holds: Callable[[Plan, Problem, Catalog], bool] = holds
    plans: int = 0
    work: int = 0
    started: float = field(init=False)
    known: list[Known] = field(init=False, default_factory=list)
    _answers: dict[tuple[str, bool], SolvedProblem] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.started = time.perf_counter()

    @property
    def seconds_left(self) -> float:
        """Seconds left for all questions together."""
        return self.max_seconds - (time.perf_counter() - self.started)

    @property
    def plans_left(self) -> int:
        """How often may still be planned again."""
        return max(0, self.max_plans - self.plans)

    @property
    def is_spent(self) -> bool:
        """Whether all the work is done that is allowed for."""
        return self.max_work is not None and self.work >= self.max_work

    def learn(self, problem: Problem, plan: Plan, *, best_effort: bool = False) -> None:
        """Remember a plan that holds for a problem."""
        if plan.status != "infeasible":
            self.known.append(Known(problem, best_effort, plan, merit(plan, problem)))

    def keep_for(self, problem: Problem, plan: Plan) -> None:
        """Remember a plan for a tighter problem than it was made for, if it holds there, too."""
        if self.holds(plan, problem, self.catalog):
            self.learn(problem, plan)

    def ask(
        self,
        problem: Problem,
        question: str,
        *,
        best_effort: bool = False,
        effort: Effort | None = None,
        always: bool = False,
    ) -> Plan:
        """Return the best plan known for a variant after planning for it, with other `effort` if given.

        Raises OutOfTimeError if there is no time left for the question, unless it is `always` answered.
        """
        key = (problem.content_hash(), best_effort)
        if key not in self._answers:
            chosen = effort or self.effort
            if best_effort:
                chosen = replace(chosen, promise=False)
            self._answers[key] = answer = self._solve(problem, question, chosen, always=always)
            self.learn(problem, answer.plan, best_effort=best_effort)
        # A plan known from elsewhere may be better than the solver's own answer: a larger change is never
        # worse.
        return self.best(problem, best_effort=best_effort) or self._answers[key].plan

    def ask_fresh(self, problem: Problem, question: str, *, effort: Effort) -> Plan:
        """Return the plan for a variant by itself, whatever is known of others; it is not remembered."""
        return self._solve(problem, question, effort).plan

    def ask_remixed(self, problem: Problem, question: str) -> Plan | None:
        """Return the plan for a variant with its models chosen anew; None where none meets all demand.

        None, too, where there is no choice, or no time for the question.
        """
        if self.remix is None:
            return None
        try:
            plan = self._solve(problem, f"{question}, other models", self.effort, self.remix).plan
        except OutOfTimeError:
            return None
        return plan if merit(plan, problem).meets_demand else None

    def _solve(
        self,
        problem: Problem,
        question: str,
        effort: Effort,
        solver: AskSolver | None = None,
        *,
        always: bool = False,
    ) -> SolvedProblem:
        # Three limits: plans and work are counted, and the clock is a net.
        if not always and (self.plans_left == 0 or self.seconds_left <= 0 or self.is_spent):
            raise OutOfTimeError
        if self.progress is not None:
            self.progress(self.plans, question)
        self.plans += 1
        # Half a second at least, so that a question that must be answered has a chance.
        answer = (solver or self.solver)(problem, effort, max(0.5, self.seconds_left))
        self.work += answer.work
        return answer

    def best(self, problem: Problem, *, best_effort: bool = False) -> Plan | None:
        """Return the best plan known that holds for a problem, the first learnt among equals."""
        best: Known | None = None
        for known in self.known:
            if known.best_effort and not best_effort:
                continue
            # A plan holds for every problem that asks for less than the one it was made for.
            if (best is None or known.merit > best.merit) and relaxes(problem, known.problem):
                best = known
        return None if best is None else best.plan

    def answer(self, problem: Problem, *, best_effort: bool = False) -> SolvedProblem | None:
        """Return what the solver itself said about a variant, None if it was not asked."""
        return self._answers.get((problem.content_hash(), best_effort))


def gains(now: Plan, then: Plan, problem: Problem, *, machines: bool = False) -> bool:
    """Return whether a plan is worth mentioning beside another: serves more, or as much for less.

    With `machines` also if it serves as much, for as much, on fewer machines.
    """
    before, after = merit(now, problem), merit(then, problem)
    if before.served < 0:
        return after.mean > 0
    # Shares are compared with a margin: differences of rounding are not worth a mention.
    if after.served - before.served > MIN_SERVED:
        return True
    if after.served < before.served - MIN_SERVED:
        return False
    if before.meets_demand != after.meets_demand:
        return after.meets_demand
    if after.mean - before.mean > MIN_SERVED:
        return True
    if now.goal == "cost":
        saved = after.value - before.value
        if machines and after.spared > before.spared and after.meets_demand:
            return saved > -MIN_USD
        return saved > MIN_USD
    return after.value > before.value * (1.0 + _MIN_TOKENS)


def grows_on_average(now: Plan, then: Plan, problem: Problem) -> bool:
    """Return whether shares served are to be told as means: the least served service gets no more."""
    min_growth = served_share(then, problem) - served_share(now, problem)
    mean = served_share(then, problem, mean=True) - served_share(now, problem, mean=True)
    return min_growth <= MIN_SERVED < mean


def worth(now: Plan, then: Plan, problem: Problem, again: Plan, bound: float | None) -> Worth:
    """Return what is gained from one plan to another.

    `again` is the best plan known without a change, and `bound` what is proven of the cost after it.
    """
    mean = grows_on_average(now, then, problem)
    served, served_now = (served_share(plan, problem, mean=mean) for plan in (then, now))
    planned = gains(now, again, problem) and not gains(again, then, problem)
    if now.goal != "cost":
        return Worth(
            usd_per_hour=0.0,
            served=served,
            served_now=served_now,
            mean=mean,
            tokens_per_s=then.objective,
            tokens_per_s_now=now.objective,
            again=planned,
        )
    objective = now.objective or 0.0
    saved = objective - (then.objective or 0.0)
    fuller = served > served_now + MIN_SERVED
    return Worth(
        usd_per_hour=saved,
        served=served,
        served_now=served_now,
        # Where more is served the costs do not compare, so there is no limit to tell.
        at_most=None if bound is None or fuller else max(saved, objective - bound),
        mean=mean,
        again=planned,
    )
