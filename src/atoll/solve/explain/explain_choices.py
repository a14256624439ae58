"""Price of right answers, by planning again: a point of error more and less, and models that are unused.

Plans are for capacity and in dollars, whatever else counts; a plan with a looser error is never taken to cost
more than one with a tighter one. How many are made is counted; what there is no room for is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.catalog.catalog import Catalog
from atoll.plan.choice import Choice, ModelMix
from atoll.plan.footprint import ObjectiveWeights
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Effort
from atoll.solve.explain.quality import ChoiceQuality, ErrorStep, UnusedModel
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve

POINT = 0.01
"""Of an error."""
_WORK = 0.25
"""Share of the usual work that goes into a plan."""
_ERROR_TOLERANCE = 1e-9
"""Errors closer than this are the same."""

Tell = Callable[[int, str], None]
"""Called with the plans made so far and the question being answered."""


@dataclass
class ErrorQuestions:
    """Asks what errors cost, in at most `max_plans` plans until a deadline; counts them in `plans`."""

    problem: Problem
    catalog: Catalog
    deadline: Deadline
    max_plans: int
    cached: bool = True
    tell: Tell = lambda _plans, _question: None
    plans: int = 0
    left_out: list[str] = field(default_factory=list)
    _stepped: set[str] = field(default_factory=set)

    def ask(self, plan: Plan) -> tuple[ChoiceQuality, ...]:
        """Return the quality of every choice between models of a plan; ways to one model are no choice."""
        known = {mix.name: mix for mix in plan.mixes}
        asked = [c for c in self.problem.choices if c.name in known and len(c.models) > 1]
        if not asked:
            return ()
        room = self.max_plans > 1
        now = self._cost(self.problem, "the fleet as it is") if room else None
        if now is not None and not plan.promises and self.problem.weights.rent_only:
            now = min(now, plan.objective or now)
        found = [self._quality(choice, known[choice.name], now) for choice in asked]
        if plan.promises:
            found = [quality.model_copy(update={"promised": True}) for quality in found]
        missing = [c.name for c in asked if c.max_error is not None and c.name not in self._stepped]
        if missing:
            self.left_out.append(f"what a point of error costs of {', '.join(missing)}")
        unasked = [u.model for quality in found for u in quality.unused if not u.asked]
        if unasked:
            self.left_out.append(f"what {', '.join(dict.fromkeys(unasked))} would cost alone")
        return tuple(found)

    def _quality(self, choice: Choice, mix: ModelMix, now: float | None) -> ChoiceQuality:
        looser = tighter = None
        if choice.max_error is not None and self._room:
            self._stepped.add(choice.name)
            top, min_error = max(choice.errors.values()), choice.min_error
            if choice.max_error < top - _ERROR_TOLERANCE:
                looser = self._step(choice, min(top, choice.max_error + POINT), now)
            if choice.max_error > min_error + _ERROR_TOLERANCE and now is not None and self._room:
                tighter = self._step(choice, max(min_error, choice.max_error - POINT), now)
        return ChoiceQuality(
            choice=choice.name,
            error=mix.error,
            max_error=choice.max_error,
            usd_per_point=mix.usd_per_point,
            usd_per_hour=now,
            looser=looser,
            tighter=tighter,
            unused=tuple(
                self._unused(choice, model)
                for model in choice.models
                if mix.model_shares.get(model, 0.0) <= 0.0
            ),
        )

    def _step(self, choice: Choice, error: float, now: float | None) -> ErrorStep:
        """Return the cost of another max_error; looser is never dearer, and tighter never cheaper."""
        other = choice.model_copy(update={"max_error": error})
        usd = self._cost(self._with(other), f"{choice.name} with max_error {error:.2%}")
        if now is not None:
            looser = choice.max_error is not None and error > choice.max_error
            if looser:
                usd = now if usd is None else min(usd, now)
            elif usd is not None:
                usd = max(usd, now)
        return ErrorStep(max_error=error, usd_per_hour=usd)

    def _unused(self, choice: Choice, model: str) -> UnusedModel:
        error = choice.errors[model]
        if not self._room:
            return UnusedModel(model=model, error=error, asked=False)
        own = tuple(variant for variant in choice.variants if variant.model == model)
        alone = Choice(name=choice.name, variants=own)
        usd = self._cost(self._with(alone), f"{choice.name} by {model} alone")
        return UnusedModel(model=model, error=error, usd_per_hour=usd)

    @property
    def _room(self) -> bool:
        # Nothing compares with a fleet that was not planned as it is.
        return 0 < self.plans < self.max_plans and not self.deadline.passed

    def _with(self, other: Choice) -> Problem:
        """The problem with one choice another; ways that nobody names any more are left out."""
        choices = tuple(other if c.name == other.name else c for c in self.problem.choices)
        before = {v.service for c in self.problem.choices for v in c.variants}
        named = {v.service for c in choices for v in c.variants}
        gone = before - named
        kept = tuple(s for s in self.problem.services if s.name not in gone)
        return self.problem.replace(choices=choices, services=kept)

    def _cost(self, problem: Problem, question: str) -> float | None:
        """Return the cost of the cheapest plan found, USD per hour; None if it leaves demand unserved."""
        self.tell(self.plans, question)
        self.plans += 1
        plan = solve(
            problem.replace(weights=ObjectiveWeights()),
            PlanRequest(
                effort=Effort(cached=self.cached, work=_WORK),
                deadline_s=max(0.5, self.deadline.left),
                catalog=self.catalog,
            ),
        )
        return plan.objective if plan.status in ("optimal", "feasible") else None
