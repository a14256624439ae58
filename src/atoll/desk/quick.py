"""Plans in a second or two: a heuristic over few templates, sized by simulating it.

`atoll plan` proves what it finds and takes a minute where it must. Here the fast solver plans, the plan is
simulated, and services of which too few requests keep their promises are planned with more headroom, until
enough of all do; then headroom that was not needed is taken back. Nothing is proven of the price, and says
so: such a plan has no bound. Where not everything can be served, for want of machines or money, all services
get the largest common share of their demand whose plan fits.

Machines of a fixed cluster are placed with little effort; any-to-any models are planned as ever, with a
deadline.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.api.fleet import Fleet
from atoll.api.plan import FleetPlan
from atoll.core.errors import InfeasibleError
from atoll.plan.problem import Problem
from atoll.solve.effort import Effort

CLUSTER_S = 30.0
"""Seconds after which a placement is what was found by then: a net, its work ends before."""
GRAPHS_S = 6.0
"""The same for a plan of any-to-any models, which mostly is cut short by it, and says so."""
_CLUSTER_WORK, _GRAPHS_WORK = 0.01, 0.1
_ROUNDS, _TRIMS = 8, 2
"""How often headroom is added, and taken back again, at most."""
_SHARES = 6
"""Plans on the way to the largest share of demand that fits, at most."""
_LEAST_STEP = 0.01
_STEP, _MOST_STEP, _FAR = 0.08, 0.4, 0.1
"""By what headroom grows, more every time, at most; and how short a share is of which it grows twice that."""
_FRESH_SEEDS = (1001,)
"""Arrivals besides those that are shown, so that a plan is not made for these alone."""
_CACHED = 64

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class QuickPlan:
    """A plan and what it keeps, by service and simulation; `served` is the share of demand that it is for.

    Where that is not all, the plan of rented machines is one for the fleet with that share of its demand.
    """

    plan: FleetPlan
    kept: Mapping[str, float | None]
    served: float

    @property
    def keeps_all(self) -> bool:
        """Whether every promise was kept."""
        return not short_services(self.plan.problem, self.kept)


def short_services(problem: Problem, kept: Mapping[str, float | None]) -> dict[str, float]:
    """Return the services of which too few requests keep their promises, with the share that does."""
    targets = {service.name: service.attainment for service in problem.services}
    return {
        name: share
        for name, share in kept.items()
        if share is not None and name in targets and share < targets[name]
    }


def plan_quickly(
    problem: Problem, *, simulate_s: float, seed: int, tell: Tell = lambda _text: None
) -> QuickPlan:
    """Return a plan of a fleet with what it keeps in `simulate_s` seconds of its demand."""
    key = (problem.content_hash(), simulate_s, seed)
    found = _cache.get(key)
    if found is None:
        found = _QuickPlanner(problem, simulate_s, seed, tell).run()
        _cache[key] = found
        while len(_cache) > _CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return found


_cache: OrderedDict[tuple[str, float, int], QuickPlan] = OrderedDict()
"""Plans of this process: what there is now is asked for again with every what-if."""


def simulate_kept(
    plan: FleetPlan, *, share: float = 1.0, simulate_s: float, seed: int
) -> dict[str, float | None]:
    """Return which share of requests keeps its promises, by service, under a share of the demand."""
    if not plan.instances:
        return {service.name: None for service in plan.problem.services}
    asked = plan if share >= 1.0 else FleetPlan.of(plan, scale_demand(plan.problem, share))
    if plan.problem.has_graphs:
        return asked.simulate_tasks(duration_s=simulate_s, seed=seed).kept
    return asked.simulate(duration_s=simulate_s, seed=seed).kept


def scale_demand(problem: Problem, share: float) -> Problem:
    """Return the problem with a share of every service's demand."""
    return problem.replace(
        services=tuple(
            service.model_copy(update={"rate_per_s": service.rate_per_s * share})
            for service in problem.services
        )
    )


class _QuickPlanner:
    """Where the search for a plan stands."""

    def __init__(self, problem: Problem, simulate_s: float, seed: int, tell: Tell) -> None:
        self.problem, self.simulate_s, self.seed, self.tell = problem, simulate_s, seed, tell
        self.budget = problem.limits.budget_usd_per_hour

    def run(self) -> QuickPlan:
        if self.problem.hosts:
            return self._take(Effort(work=_CLUSTER_WORK, gap=0.05), CLUSTER_S)
        if self.problem.has_graphs:
            return self._take(Effort(work=_GRAPHS_WORK, gap=0.05), GRAPHS_S)
        whole = self._size(1.0)
        if whole is not None and self._fits(whole):
            return whole
        return self._find_share()

    def _take(self, effort: Effort, deadline_s: float) -> QuickPlan:
        """Plan as ever, in little time, and see what is kept."""
        self.tell("planning")
        plan = Fleet(self.problem).plan(
            effort=effort,
            deadline_s=deadline_s,
            rank=False,
            capacity_only=not self.problem.has_graphs,
            error_bars=False,
        )
        served = min(plan.served_fraction.values(), default=0.0)
        self.tell("simulating")
        kept = simulate_kept(plan, share=served, simulate_s=self.simulate_s, seed=self.seed)
        return QuickPlan(plan, kept, served)

    def _fits(self, found: QuickPlan) -> bool:
        whole = found.plan.status in ("optimal", "feasible")
        return whole and (self.budget is None or found.plan.usd_per_hour <= self.budget)

    def _find_share(self) -> QuickPlan:
        """Return the plan for the largest common share of demand that machines and budget allow."""
        limited = self._solve(self.problem)
        most = min(limited.served_fraction.values(), default=0.0)
        if not limited.instances or most <= 0.0:
            kept = dict.fromkeys((service.name for service in limited.problem.services), None)
            return QuickPlan(limited, kept, 0.0)
        best: QuickPlan | None = None
        fitting: QuickPlan | None = None
        low, high, share = 0.0, most, most
        for number in range(_SHARES):
            self.tell(f"planning for {share:.0%} of the demand, {number + 1} of {_SHARES} at most")
            found = self._size(share)
            fits = found is not None and (
                self.budget is None or found.plan.usd_per_hour <= self.budget
            )
            if fits and found is not None and found.keeps_all:
                low, best = share, found
            else:
                high, fitting = share, found if fits else fitting
            if high - low < _LEAST_STEP:
                break
            share = (low + high) / 2.0
        best = best or fitting
        if best is None:
            kept = simulate_kept(limited, share=most, simulate_s=self.simulate_s, seed=self.seed)
            return QuickPlan(limited, kept, most)
        return best

    def _size(self, share: float) -> QuickPlan | None:
        """Plan for a share of the demand so that its promises are kept; None where it cannot be served."""
        asked = self.problem if share >= 1.0 else scale_demand(self.problem, share)
        limits = asked.limits.model_copy(update={"budget_usd_per_hour": None})
        own = asked.replace(limits=limits)
        self.tell("planning")
        first = self._solve(own)
        if first.status not in ("optimal", "feasible"):
            return None
        plan, kept = _Sizing(own.settled(first.mixes), first, self).run()
        whole = asked.settled(first.mixes).content_hash()
        fields = {"mixes": first.mixes, "problem_hash": whole}
        return QuickPlan(FleetPlan.of(plan.model_copy(update=fields), asked), kept, share)

    def _solve(self, problem: Problem) -> FleetPlan:
        return Fleet(problem).plan(solver="fast", error_bars=False)

    def solve(self, problem: Problem) -> FleetPlan | None:
        """Return a plan that serves everything, None where there is none."""
        try:
            plan = self._solve(problem)
        except InfeasibleError:
            return None
        return plan if plan.status in ("optimal", "feasible") else None


class _Sizing:
    """The headroom that each service needs for its promises."""

    def __init__(self, problem: Problem, first: FleetPlan, planner: _QuickPlanner) -> None:
        self.problem, self.planner = problem, planner
        self.first = FleetPlan.of(first.model_copy(update={"mixes": ()}), problem)
        self.headroom = {service.name: service.headroom for service in problem.services}
        self.too_little: dict[str, float] = {}
        self.times: Counter[str] = Counter()

    def run(self) -> tuple[FleetPlan, dict[str, float | None]]:
        plan, kept = self.first, self._judge(self.first)
        closest = (self._missing(kept), plan, kept)
        for number in range(_ROUNDS):
            short = short_services(self.problem, kept)
            if not short:
                return self._trim(plan, kept)
            self.planner.tell(f"more room for {', '.join(sorted(short))}, round {number + 1}")
            self._add(short)
            found = self._plan(self.headroom)
            if found is None:
                break
            plan, kept = found, self._judge(found)
            closest = min(closest, (self._missing(kept), plan, kept), key=lambda one: one[0])
        return closest[1], closest[2]

    def _add(self, short: Mapping[str, float]) -> None:
        for name, share in short.items():
            self.too_little[name] = self.headroom[name]
            self.times[name] += 1
            far = self.problem.service(name).attainment - share > _FAR
            step = _STEP * self.times[name] * (2 if far else 1)
            self.headroom[name] *= 1.0 + min(_MOST_STEP, step)

    def _trim(
        self, plan: FleetPlan, kept: dict[str, float | None]
    ) -> tuple[FleetPlan, dict[str, float | None]]:
        """Try what lies between too little headroom and enough, while that is cheaper."""
        enough = dict(self.headroom)
        for _ in range(_TRIMS if self.too_little else 0):
            between = {
                name: (self.too_little.get(name, room) + room) / 2.0
                for name, room in enough.items()
            }
            found = self._plan(between)
            if found is not None and found.usd_per_hour >= plan.usd_per_hour * (1.0 - 1e-6):
                # As dear: whatever is cheaper needs less.
                enough = between
                continue
            seen = {} if found is None else self._judge(found)
            if found is not None and not short_services(self.problem, seen):
                plan, kept, enough = found, seen, between
            else:
                self.too_little |= {name: between[name] for name in self.too_little}
        return plan, kept

    def _plan(self, headroom: Mapping[str, float]) -> FleetPlan | None:
        services = tuple(
            service.model_copy(update={"headroom": headroom[service.name]})
            for service in self.problem.services
        )
        found = self.planner.solve(self.problem.replace(services=services))
        return None if found is None else FleetPlan.of(found, self.problem)

    def _judge(self, plan: FleetPlan) -> dict[str, float | None]:
        """What is kept: of the arrivals that are shown, or of all together where only that is too little."""
        simulate_s = self.planner.simulate_s
        kept = simulate_kept(plan, simulate_s=simulate_s, seed=self.planner.seed)
        if short_services(self.problem, kept):
            return kept
        runs = [kept]
        for seed in _FRESH_SEEDS:
            runs.append(simulate_kept(plan, simulate_s=simulate_s, seed=seed))
            mean = {name: _mean([run.get(name) for run in runs]) for name in kept}
            short = short_services(self.problem, mean)
            if short:
                return {name: short.get(name, share) for name, share in kept.items()}
        return kept

    def _missing(self, kept: Mapping[str, float | None]) -> float:
        targets = {service.name: service.attainment for service in self.problem.services}
        short = short_services(self.problem, kept)
        return max((targets[name] - share for name, share in short.items()), default=0.0)


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None
