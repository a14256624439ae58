"""Plans that hold in a share of scenarios, for rising shares: what certainty costs, and the plan asked for.

1. The plan that knows of no risk, proven by simulation as always.
2. Options of each service from harder problems (`service_options`), each tried on planning scenarios
   (`trial`).
3. For every level the cheapest options that hold together in so many of those (`option_choice`). The
   scenarios in doubt are simulated, and it is chosen again, until the choice stays.
4. Every plan of the curve is judged with fresh scenarios (`judge`). One that a surer plan undercuts is
   replaced by it, so that along the curve costs never fall.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.errors import UsageError
from atoll.plan.robustness import CertaintyLevel, RiskModel, Robustness
from atoll.prove.kept import look_at
from atoll.prove.robust.crossing import cross_phases
from atoll.prove.robust.expected_prices import ExpectedPrices
from atoll.prove.robust.judge import ScenarioVerdict, judge_plan_in
from atoll.prove.robust.option_choice import OptionTable, choose_options
from atoll.prove.robust.scenarios import draw_scenarios, resolve_risk
from atoll.prove.robust.service_options import Rungs, compose, list_rungs
from atoll.prove.robust.trial import ScenarioLab, ServiceTrial, joint
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.deadline import Deadline
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest
from atoll.solve.registry import solve
from atoll.solve.solve_progress import SolveStats

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem

LEVELS = (0.8, 0.9, 0.95, 0.99)
"""Shares of scenarios that the curve has, beside the one that is asked for."""
USUAL = 0.95
"""The share that is asked for unless somebody says otherwise."""
_PLANNING = 256
"""Scenarios to plan with."""
_JUDGED = 512
"""Fresh scenarios to judge with: a plan looks better in those that it was chosen with."""
_MAX_SIMULATED = 40
"""Scenarios in which a plan of the curve is simulated, at most."""
_MIN_SIMULATED = 12
_WORK = 4.0e6
"""Requests that may be simulated to judge the curve, about: with heavy demand fewer scenarios are."""
_MIN_S = 300.0
"""Seconds that a simulation is of, at the least."""
_MAX_ROUNDS = 4
"""How often a level is chosen anew."""
_DOUBTFUL_SCENARIOS = 6
"""Scenarios in doubt that are simulated of each option before that."""
_EXTRA_STANDARD_ERRORS = 0.5
"""Standard errors by which a plan must hold more often than asked in the scenarios that it is chosen with:
what is chosen for how it fares there fares a little worse elsewhere."""


def plan_robust(
    problem: Problem,
    request: PlanRequest | None = None,
    *,
    asked: float | None = None,
    risk: RiskModel | None = None,
    unserved_usd: float | None = None,
) -> Plan:
    """Return the cheapest plan found that holds in a share of scenarios, with the curve in `robustness`.

    `asked` is that share; None is the level with the least expected rent and broken promises where
    `unserved_usd`, the price of 1000 requests that do not keep theirs, is given, and 95 % otherwise. `risk`
    is by default the problem's, or the usual one. Where choices are open they are settled without risk first.
    The work is counted; the deadline is a net, and a plan that it cut short says so.
    """
    refuse_unfit(problem)
    _check_asked(asked, unserved_usd)
    own, request = SolveStats(), request or PlanRequest()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    run = _Run(
        problem,
        replace(request, catalog=request.catalog_for(problem), stats=own, error_bars=False),
        asked,
        unserved_usd,
        risk,
    )
    found = run.run()
    if request.stats is not None:
        # All of it, simulations included, not only what solvers took.
        own.seconds, own.cpu_seconds = time.perf_counter() - began_s, time.process_time() - cpu_s
        request.stats.add(own)
    return found


def refuse_unfit(problem: Problem) -> None:
    """Raise UsageError for problems that are not planned with risk."""
    if problem.family == "place":
        raise UsageError(
            "robust plans rent more nodes; a fixed cluster has no more to give",
            field="robust",
            hint="leave it out; error bars say how sure a placement is",
        )
    if problem.family == "graph":
        raise UsageError(
            "robust plans know no classes of requests: their scenarios move demand and templates of plain "
            "services",
            field="robust",
            hint="leave it out for any-to-any models",
        )


def _check_asked(asked: float | None, unserved_usd: float | None) -> None:
    if asked is not None and not 0.0 < asked < 1.0:
        raise UsageError(
            f"{asked:g} is no share of scenarios between 0 and 1", hint="write 95%", field="robust"
        )
    if unserved_usd is not None and not (0.0 <= unserved_usd < math.inf):
        raise UsageError(f"{unserved_usd:g} is no price in USD", field="unserved-usd")


@dataclass(frozen=True)
class _Found:
    """A plan of the curve: for which share, and in which share of planning scenarios it holds."""

    asked: float | None
    plan: Plan
    planned: float
    usd: float


class _Run:
    """Where the search stands."""

    def __init__(
        self,
        problem: Problem,
        request: PlanRequest,
        asked: float | None,
        unserved_usd: float | None,
        risk: RiskModel | None,
    ) -> None:
        self.given, self.request = problem, request
        self.asked, self.unserved_usd = asked, unserved_usd
        self.catalog, self.deadline = request.catalog_for(problem), Deadline(request.deadline_s)
        self.risk = resolve_risk(problem, risk)
        self.late = False
        """Whether the deadline ended the search for some option."""

    def run(self) -> Plan:
        from atoll.prove.planning import plan

        # The plan without risk gets most of the time: it is the answer where the rest is not reached.
        nominal = plan(self.given, replace(self.request, deadline_s=self.deadline.share(0.6)))
        # Where not even all demand is met there is nothing to insure.
        if not nominal.instances or nominal.status == "partial" or nominal.cut_short:
            return nominal
        self.problem = self.given.settled(nominal.mixes)
        self.lab = ScenarioLab(self.problem, self.catalog, self.deadline)
        together = {name: mix.name for mix in nominal.mixes for name in mix.shares}

        # Two sets by name, so that scenarios that judge were never planned with.
        self.scenarios = draw_scenarios(
            self.problem, self.catalog, self.risk, _PLANNING, name="planning", together=together
        )
        self.fresh = draw_scenarios(
            self.problem, self.catalog, self.risk, _JUDGED, name="fresh", together=together
        )
        self.prices = ExpectedPrices(self.problem, self.fresh)
        try:
            return self._with_curve(nominal)
        except SimulationCutShortError:
            late = "the deadline came before a plan for risk was found: this one knows of none"
            return nominal.model_copy(update={"cut_short": True, "notes": (*nominal.notes, late)})

    def _with_curve(self, nominal: Plan) -> Plan:
        options = self._find_options(nominal)
        curve = self._find_curve(nominal, options)
        simulated = self._count_simulated(len({id(one.plan) for one in curve}))
        curve, levels = self._judge_all(curve, simulated)
        best = None
        if self.unserved_usd is not None:
            best = min(range(len(levels)), key=lambda at: (levels[at].expected_total_usd, at))
        chosen = next(
            (at for at, level in enumerate(levels) if level.asked == self._wanted()),
            len(levels) - 1,
        )
        if self.asked is None and best is not None:
            chosen = best
        taken = curve[chosen]
        robustness = Robustness(
            risk=self.risk,
            levels=levels,
            chosen=chosen,
            best=best,
            unserved_usd_per_1000=self.unserved_usd,
            scenarios=len(self.scenarios),
            judged=len(self.fresh),
            simulated=simulated,
            capped=taken.asked is not None and taken.planned < taken.asked,
        )
        return self._finish(nominal, taken.plan, robustness)

    def _judge_all(
        self, curve: list[_Found], simulated: int
    ) -> tuple[list[_Found], tuple[CertaintyLevel, ...]]:
        """The levels that there is time to judge: the one without risk and the one asked for first."""
        # Most needed first: a curve that time cuts short still compares these two.
        order = sorted(
            range(len(curve)), key=lambda at: (at > 0, curve[at].asked != self._wanted(), at)
        )
        judged: dict[int, CertaintyLevel] = {}
        for at in order:
            try:
                judged[at] = self._level(curve[at], self._judge(curve[at].plan, simulated))
            except SimulationCutShortError:
                # Fewer than two levels are no curve: the plan without risk is returned instead.
                if len(judged) < 2:
                    raise
                self.late = True
                break
        kept = sorted(judged)
        return [curve[at] for at in kept], tuple(judged[at] for at in kept)

    def _wanted(self) -> float:
        return USUAL if self.asked is None else self.asked

    def _say(self, text: str) -> None:
        self.request.say("robust", text)

    # Options

    def _find_options(self, nominal: Plan) -> dict[str, list[ServiceTrial]]:
        """Return by service ways to serve it that keep its promises when nothing turns out otherwise."""
        rungs = Rungs(
            self.problem, self.catalog, self.risk, nominal, self._solve, self.request.effort
        )
        plans = [nominal]
        listed = list_rungs(self.problem, self.risk)
        for number, rung in enumerate(listed):
            self._say(f"planning for worse, {number + 1} of {len(listed)}")
            made = rungs.plan(rung)
            if made is not None:
                plans.append(made)
        options: dict[str, list[ServiceTrial]] = {}
        for service in self._services():
            seen: dict[int, ServiceTrial] = {}
            for plan in plans:
                trial = self.lab.trial(plan, service)
                # Equal instances give the same trial, which is tried once.
                seen.setdefault(id(trial), trial)
            more = cross_phases(list(seen.values()), nominal, self.lab, self.scenarios, self.prices)
            seen |= {id(trial): trial for trial in more}
            for trial in seen.values():
                self._say(f"trying {service}, {self.lab.simulations} simulations")
                self.lab.calibrate(trial, self.scenarios)
            # The first is the plan's own: it was proven with more simulations than this.
            options[service] = [t for t in seen.values() if t.is_valid or t.plan is nominal]
        return options

    def _services(self) -> list[str]:
        return [s.name for s in self.problem.services if s.rate_per_s > 0.0]

    def _solve(self, problem: Problem, catalog: Catalog, effort: Effort) -> Plan:
        step = replace(
            self.request,
            effort=effort,
            deadline_s=self.deadline.share(0.3),
            catalog=catalog,
            on_progress=None,
        )
        found = solve(problem, step)
        self.late = self.late or found.cut_short
        return found

    # The curve

    def _find_curve(
        self, nominal: Plan, options: Mapping[str, Sequence[ServiceTrial]]
    ) -> list[_Found]:
        """Return plans for rising shares, the one without risk first, none dearer than a surer one."""
        found = [self._find(level, options, nominal) for level in sorted({*LEVELS, self._wanted()})]
        first = _Found(None, nominal, self._planned(nominal), self.prices.of_plan(nominal))
        curve: list[_Found] = []
        # From the surest down: a level is replaced where a surer plan is no dearer.
        for one in reversed(found):
            surer = curve[0] if curve else None
            if surer is not None and surer.usd <= one.usd and surer.planned >= one.planned:
                one = _Found(one.asked, surer.plan, surer.planned, surer.usd)
            curve.insert(0, one)
        return [first, *curve]

    def _planned(self, plan: Plan) -> float:
        """The share of planning scenarios in which a plan holds."""
        trials = [self.lab.trial(plan, service) for service in self._services()]
        for trial in trials:
            self.lab.look(trial, self.scenarios)
        return float(joint([trial.holds(self.scenarios.name) for trial in trials]).mean())

    def _find(
        self, level: float, options: Mapping[str, Sequence[ServiceTrial]], nominal: Plan
    ) -> _Found:
        """Return the cheapest plan found that holds in this share of planning scenarios."""
        target = level + _EXTRA_STANDARD_ERRORS * math.sqrt(
            level * (1.0 - level) / len(self.scenarios)
        )
        services = self._services()
        names = [options[service] for service in services]
        taken: tuple[int, ...] = ()
        for number in range(_MAX_ROUNDS):
            chosen = choose_options(self._tables(names), self.prices.machines, min(target, 1.0))
            if chosen == taken:
                break
            taken = chosen
            if number == _MAX_ROUNDS - 1:
                break
            self._say(f"for {level:.0%}: looking closer, {self.lab.simulations} simulations")
            for ways, at in zip(names, taken, strict=True):
                self.lab.refine(ways[at], self.scenarios, _DOUBTFUL_SCENARIOS)
        instances = [
            instance
            for ways, at in zip(names, taken, strict=True)
            for instance in ways[at].instances
        ]
        plan = self._stand(nominal, instances) or self._surest(nominal, names, target)
        return _Found(level, plan, self._planned(plan), self.prices.of_plan(plan))

    def _tables(self, names: Sequence[Sequence[ServiceTrial]]) -> list[OptionTable]:
        tables = []
        for ways in names:
            counts = [self.prices.count(way.instances) for way in ways]
            tables.append(
                OptionTable(
                    np.stack([way.holds(self.scenarios.name) for way in ways]),
                    np.stack([whole for whole, _ in counts]),
                    np.stack([cut for _, cut in counts]),
                )
            )
        return tables

    def _stand(self, nominal: Plan, instances: Sequence[Instance]) -> Plan | None:
        ids = {i.id: i for i in nominal.instances}
        if len(instances) == len(ids) and all(ids.get(i.id) == i for i in instances):
            return nominal
        return compose(self.problem, self.catalog, instances)

    def _surest(
        self, nominal: Plan, names: Sequence[Sequence[ServiceTrial]], target: float
    ) -> Plan:
        """Of whole plans, which stand together: the cheapest that holds often enough, or most often."""
        plans = {id(way.plan): way.plan for ways in names for way in ways}
        whole = [
            p
            for p in plans.values()
            if all(self.lab.trial(p, s).is_valid for s in self._services())
        ]
        return min(
            [nominal, *whole],
            key=lambda p: (max(0.0, target - self._planned(p)), self.prices.of_plan(p)),
        )

    # Judging

    def _count_simulated(self, plans: int) -> int:
        rate = sum(service.rate_per_s for service in self.problem.services)
        work = max(1.0, plans * rate * _MIN_S)
        return int(np.clip(_WORK / work, _MIN_SIMULATED, _MAX_SIMULATED))

    def _judge(self, plan: Plan, simulated: int) -> ScenarioVerdict:
        self._say(f"judging with fresh scenarios, {self.lab.simulations} simulations")
        return judge_plan_in(plan, self.problem, self.lab, self.fresh, simulated)

    def _level(self, one: _Found, verdict: ScenarioVerdict) -> CertaintyLevel:
        machines = one.plan.count_nodes()
        price = self.unserved_usd
        return CertaintyLevel(
            asked=one.asked,
            usd_per_hour=one.plan.usd_per_hour,
            expected_usd_per_hour=one.usd,
            nodes=one.plan.nodes,
            spot_nodes=sum(n for (_, _, market), n in machines.items() if market == "spot"),
            planned=one.planned,
            holds=verdict.holds,
            low=verdict.low,
            high=verdict.high,
            requests_kept=verdict.requests_kept,
            unserved_per_hour=verdict.unserved_per_hour,
            unserved_usd=None if price is None else price * verdict.unserved_per_hour / 1000.0,
            kept_by_service=verdict.kept_by_service,
            headroom={
                name: self.lab.headroom(self.lab.trial(one.plan, name)) for name in self._services()
            },
        )

    def _finish(self, nominal: Plan, plan: Plan, robustness: Robustness) -> Plan:
        """The plan with its figures: what requests keep when nothing turns out otherwise, the curve."""
        if plan is nominal:
            return plan.model_copy(update={"robustness": robustness, "cut_short": self.late})
        self._say("simulating the plan as the fleet file has it")
        try:
            promises = look_at(plan, self.problem, self.catalog, self.deadline)
        except SimulationCutShortError:
            promises, self.late = (), True
        return plan.model_copy(
            update={
                "promises": promises,
                # What is proven is proven of plans that know of no risk; they are no dearer.
                "bound": None,
                "gap": None,
                "capacity_bound": nominal.capacity_bound,
                "mixes": nominal.mixes,
                "engines": nominal.engines,
                "robustness": robustness,
                "cut_short": self.late,
            }
        )
