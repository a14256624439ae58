"""Costs against something else: plans along a sweep of promises, errors, or prices of energy and carbon.

Every point is a plan. Looser promises or more errors may cost less; a price of energy or carbon may cost
more and draw less. A point that another one beats in dollars and in what they are swept against is dominated.
Plans found on the way of a sweep of prices all count: what is best at a price is the best of all of them, so
that a higher price never draws more. Work is counted in plans; equal fleets give equal curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from atoll.core.errors import InputError, UsageError
from atoll.core.units import format_share
from atoll.plan.choice import Choice, ModelMix
from atoll.plan.footprint import DRAWN, Drawn, ObjectiveWeights, PowerGrid
from atoll.plan.plan import Plan
from atoll.plan.power import FIGURES, draw_of
from atoll.prove.front import AXES, ON_THE_WAY, Axis, ParetoFront, ParetoPoint, ParetoReport, mark
from atoll.prove.planning import plan
from atoll.solve.plan_request import FindPlan, PlanRequest
from atoll.solve.solve_progress import Progress
from atoll.solve.weighted import WeighedPlan, plan_weighted, refuse_unweighable

if TYPE_CHECKING:
    from atoll.plan.problem import Problem

Scaled = Literal["both", "ttft", "tpot"]
"""Which promises a sweep of latency scales."""

POINTS = 7
"""Plans of a curve unless somebody says otherwise."""
MIN_POINTS = 2
MAX_POINTS = 50
"""Every point is a plan of its own, so many of them take long."""
_TIGHTEST = 0.5
"""Multiple of the promises at which a sweep of latency begins."""
_LOOSEST = 4.0
"""Multiple of the promises at which it ends."""
_DECADES = 1.5
"""Prices are swept so many decades to either side of the one at which they count as much as rent."""
_ALL_SERVED = 1.0 - 1e-9
"""Share of demand from which on it counts as met: the rest is rounding."""


def check_axes(axes: Sequence[str], problem: Problem) -> tuple[Axis, ...]:
    """Return what to sweep against, each once; raise where the fleet has no such thing."""
    if not axes:
        raise UsageError("nothing to sweep against", hint=f"name some of {', '.join(AXES)}")
    found: list[Axis] = []
    for name in axes:
        axis = next((axis for axis in AXES if axis == name), None)
        if axis is None:
            raise UsageError(
                f"{name!r} is nothing to sweep against",
                hint=f"use {', '.join(AXES)}",
                field="against",
            )
        if axis not in found:
            found.append(axis)
    if problem.family == "place":
        raise UsageError(
            f"{problem.name} is a fixed cluster, which costs the same whatever is planned",
            hint="sweep a fleet of rented nodes",
            field="against",
        )
    if "error" in found and not any(
        _largest_error(choice) > choice.min_error for choice in problem.choices
    ):
        raise InputError(
            f"no service of {problem.name} has models with different errors",
            hint="give one `models: [{model: ..., error: 6%}, ...]`",
            field="against",
        )
    for name, drawn in DRAWN.items():
        if name in found:
            refuse_unweighable(problem.replace(weights=drawn.alone(1.0)))
    return tuple(found)


def find_pareto(
    problem: Problem,
    axes: Sequence[str],
    request: PlanRequest | None = None,
    *,
    points: int = POINTS,
    scaled: Scaled = "both",
    find: FindPlan = plan,
) -> ParetoReport:
    """Return the curves of dollars against each axis, `points` plans each.

    Each plan has the request's deadline; unless that is `capacity_only`, plans keep promises in simulation,
    which takes far longer. `find` makes them.
    """
    swept = check_axes(axes, problem)
    if not MIN_POINTS <= points <= MAX_POINTS:
        raise UsageError(
            f"{points} points", hint=f"take {MIN_POINTS} to {MAX_POINTS}", field="points"
        )
    sweep = _Sweep(problem, request or PlanRequest(), find, len(swept) * points)
    run: dict[Axis, Callable[[], list[ParetoPoint]]] = {
        "latency": lambda: sweep.latency(points, scaled),
        "error": lambda: sweep.error(points),
        **{name: partial(sweep.prices, name, points) for name in DRAWN},
    }
    fronts = tuple(ParetoFront(against=axis, points=mark(run[axis]())) for axis in swept)
    return ParetoReport(fleet=problem.name, fronts=fronts, plans=sweep.plans)


class _Sweep:
    """Plans of one fleet for all of its sweeps; the same question is asked once."""

    def __init__(self, problem: Problem, request: PlanRequest, find: FindPlan, total: int) -> None:
        self.problem, self.find, self.total = problem, find, total
        self.catalog = request.catalog_for(problem)
        self.on_progress = request.on_progress
        # Plans do not report progress of their own: that of the sweep counts.
        self.request = replace(request, catalog=self.catalog, on_progress=None, error_bars=False)
        self.plans = 0
        self.points = 0
        self._known: dict[tuple[str, bool], Plan] = {}

    def _say(self, text: str) -> None:
        if self.on_progress is not None:
            share = min(1.0, self.points / self.total)
            work = {"points": self.points, "plans": self.plans}
            self.on_progress(Progress("pareto", text, share, work))
        self.points += 1

    def _plan(self, problem: Problem, request: PlanRequest) -> Plan:
        # A budget is in the effort where prices stand for more than rent; then prices differ, too.
        key = (problem.content_hash(), request.capacity_only)
        if key not in self._known:
            self.plans += 1
            # What plans draw is worked out here, for points.
            bare = problem.replace(grid=PowerGrid()) if problem.weights.rent_only else problem
            self._known[key] = self.find(bare, request)
        return self._known[key]

    def _find(self, problem: Problem) -> Plan:
        if problem.weights.rent_only:
            return self._plan(problem, self.request)
        return self._weigh(problem, None)

    def _weigh(self, problem: Problem, on_plan: Callable[[WeighedPlan], None] | None) -> Plan:
        return plan_weighted(
            problem,
            self.request,
            lambda asked, step: self._plan(asked, replace(step, capacity_only=True)),
            keep=None if self.request.capacity_only else self._plan,
            on_plan=on_plan,
        )

    def latency(self, points: int, scaled: Scaled) -> list[ParetoPoint]:
        """Plans with promises from half to four times today's; today's are among them."""
        factors = geometric(_TIGHTEST, _LOOSEST, points)
        # Today's promises take the place of the nearest factor, so that the curve passes through today's
        # plan.
        nearest = min(range(points), key=lambda i: abs(math.log(factors[i])))
        factors[nearest] = 1.0
        found = []
        for factor in factors:
            name = {"both": "ttft and tpot"}.get(scaled, scaled)
            self._say(f"{name} x {factor:.2f}")
            problem = self.problem if factor == 1.0 else _slower(self.problem, factor, scaled)
            plan = self._find(problem)
            asked = f"{name} x {factor:.3g}"
            found.append(self._point(plan, problem, asked, factor, today=factor == 1.0))
        return found

    def error(self, points: int) -> list[ParetoPoint]:
        """Plans from the fewest errors that models allow to the most that is of any use; and today's."""
        found = []
        asked: list[tuple[str, Problem, bool]] = []
        for i in range(points):
            share = i / (points - 1)
            limits = {
                c.name: c.min_error + share * (_largest_error(c) - c.min_error)
                for c in self.problem.choices
                if _may_err(c)
            }
            text = ", ".join(f"{name} {format_share(limit)}" for name, limit in limits.items())
            asked.append((f"max_error {text}", _with_errors(self.problem, limits), False))
        asked.append(("today", self.problem, True))
        for text, problem, today in asked:
            self._say(text)
            plan = self._find(problem)
            value = mean_error(self.problem, plan.mixes)
            found.append(self._point(plan, problem, text, value, today=today))
        return found

    def prices(self, axis: Drawn, points: int) -> list[ParetoPoint]:
        """Plans along prices of what is drawn, with nothing but rent and nothing but it at the ends."""
        drawn = DRAWN[axis]
        self._say(f"{axis}: today's plan")
        today = self._find(self.problem)
        if not today.instances:
            return []
        pool: dict[str, WeighedPlan] = {}

        def note(one: WeighedPlan) -> None:
            pool.setdefault(_identity(one.plan), one)

        start = self._value(axis, today)
        # The price at which it counts as much as rent.
        even = drawn.figure_per_unit * today.usd_per_hour / start if start > 0.0 else 1.0
        # Two of the points are the ends: rent alone and the other thing alone.
        sweep = geometric(even * 10**-_DECADES, even * 10**_DECADES, max(1, points - 2))
        weights = [drawn.alone(price, usd=1.0) for price in sweep]
        weights.append(drawn.alone(1.0))
        for one in weights:
            self._say(f"{axis}: {_price_text(axis, one)}")
            self._weigh(self.problem.replace(weights=one), note)
        # All that were found, each under the names of the prices at which it is best.
        named: dict[str, list[str]] = {key: [] for key in pool}
        full = [key for key, one in pool.items() if _is_full(one.plan)]
        for one in (ObjectiveWeights(), *weights):
            if full:
                # The key breaks ties, so that equal worth always names the same plan.
                best = min(full, key=lambda key: (*self._worth(pool[key], one, axis), key))
                named[best].append(_price_text(axis, one))
        found = [
            self._point(
                one.plan,
                self.problem,
                _join(named[key]) or ON_THE_WAY,
                self._value(axis, one.plan),
                today=key == _identity(today),
            )
            for key, one in pool.items()
        ]
        # Today's plan may be none of those that were found for prices, but a curve shows it.
        if _identity(today) not in pool:
            found.append(self._point(today, self.problem, "today", start, today=True))
        return found

    def _worth(
        self, one: WeighedPlan, weights: ObjectiveWeights, axis: Drawn
    ) -> tuple[float, float]:
        rent = one.plan.usd_per_hour + one.plan.init_usd
        price = weights.price(DRAWN[axis])
        value = self._value(axis, one.plan) / DRAWN[axis].figure_per_unit
        # At no price, ties in rent go to the plan that draws less; else ties go to the one that rents less.
        if price == 0.0:
            return (weights.usd * rent, value)
        return (weights.usd * rent + price * value, rent)

    def _value(self, axis: Drawn, plan: Plan) -> float:
        """Watts, kg CO2 per hour: what a plan draws."""
        draw = draw_of(plan, self.problem, self.catalog)
        return FIGURES[DRAWN[axis].figure](self.problem.grid, draw) or 0.0

    def _point(
        self, plan: Plan, problem: Problem, asked: str, value: float, *, today: bool
    ) -> ParetoPoint:
        draw = draw_of(plan, problem, self.catalog)
        drawn = {name: figure(self.problem.grid, draw) for name, figure in FIGURES.items()}
        kept = all(p.is_kept for p in plan.promises) if plan.promises else None
        return ParetoPoint(
            asked=asked,
            usd_per_hour=plan.usd_per_hour,
            value=value,
            watts=drawn["watts"],
            kg_per_hour=drawn["kg_per_hour"],
            error=mean_error(self.problem, plan.mixes) if plan.mixes else None,
            nodes=plan.nodes,
            gpus=plan.gpus,
            served=min(plan.served_fraction.values(), default=0.0) if plan.instances else 0.0,
            kept=kept,
            today=today,
            plan_hash=_identity(plan),
        )


def geometric(low: float, high: float, points: int) -> list[float]:
    """Return so many numbers from `low` to `high`, each the same multiple of the one before."""
    # One point has no ends: the middle of the range.
    if points == 1:
        return [math.sqrt(low * high)]
    return [low * (high / low) ** (i / (points - 1)) for i in range(points)]


def mean_error(problem: Problem, mixes: Iterable[ModelMix]) -> float:
    """Return the share of wrong answers over all choices, by their requests."""
    rates = {
        choice.name: min(problem.service(v.service).rate_per_s for v in choice.variants)
        for choice in problem.choices
        if _may_err(choice)
    }
    found = [(rates[mix.name], mix.error) for mix in mixes if mix.name in rates]
    total = sum(rate for rate, _ in found)
    return sum(rate * error for rate, error in found) / total if total > 0.0 else 0.0


def _may_err(choice: Choice) -> bool:
    """Whether anybody said that its models err; services that merely share instances do not."""
    return any(error > 0.0 for error in choice.errors.values())


def _largest_error(choice: Choice) -> float:
    """The mean error with all but the least shares on the model that errs most."""
    errors = choice.errors
    rest = max(0.0, 1.0 - sum(choice.min_share.values()))
    floors = sum(share * errors[model] for model, share in choice.min_share.items())
    return floors + rest * max(errors.values())


def _with_errors(problem: Problem, limits: dict[str, float]) -> Problem:
    choices = tuple(
        choice.model_copy(update={"max_error": min(1.0, limits[choice.name])})
        if choice.name in limits
        else choice
        for choice in problem.choices
    )
    return problem.replace(choices=choices)


def _slower(problem: Problem, factor: float, scaled: Scaled) -> Problem:
    """The problem with promises that allow `factor` times as long."""
    ttft = factor if scaled in ("both", "ttft") else 1.0
    tpot = factor if scaled in ("both", "tpot") else 1.0
    services = tuple(service.scale_promises(ttft=ttft, tpot=tpot) for service in problem.services)
    return problem.replace(services=services)


def _price_text(axis: Drawn, weights: ObjectiveWeights) -> str:
    if weights.usd == 0.0:
        return f"{axis} alone"
    if weights.rent_only:
        return "rent alone"
    return DRAWN[axis].price_form.format(weights.price(DRAWN[axis]))


def _join(names: Sequence[str]) -> str:
    """The first and last of the prices at which a plan is best."""
    return " to ".join(dict.fromkeys((names[0], names[-1]))) if names else ""


def _identity(plan: Plan) -> str:
    """Return the identity of a plan: instances, routes and mixes, not what is said of them."""
    return plan.model_copy(
        update={
            "problem_hash": "",
            "power": None,
            "bound": None,
            "gap": None,
            "capacity_bound": None,
            "reasons": (),
            "notes": (),
            "status": "feasible",
            "promises": (),
            "mixes": tuple(mix.model_copy(update={"usd_per_point": None}) for mix in plan.mixes),
        }
    ).content_hash()


def _is_full(plan: Plan) -> bool:
    served = min(plan.served_fraction.values(), default=1.0) >= _ALL_SERVED
    return served and all(promise.is_kept for promise in plan.promises)
