"""Plans in a second or two: a heuristic over few templates, sized by simulating it.

The usual pipeline (`planning`) proves what it finds and takes a minute where it must. Here it is asked for
plans of the fast solver. Services of which too few requests keep their promises in simulation are planned
with more headroom, until enough of all do; then headroom that was not needed is taken back. Nothing is proven
of the price: such a plan has no bound.

Where not everything can be served, for want of machines or
money, all services get the largest common share of their demand whose plan fits.

Machines of a fixed cluster are placed with little effort. Any-to-any models get headroom in the same way, of
the little effort that their programme needs for a plan; a fleet that is like another begins with the headroom
that the other needed. All of it is bounded by work: the same question has the same answer on any machine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from atoll.plan.kept_groups import min_share
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.prove.graph_kept import simulate_mixed
from atoll.prove.headroom import HeadroomSizing, Rounds, Shares, Tell, short_services
from atoll.prove.planning import plan
from atoll.solve.effort import Effort
from atoll.solve.plan_request import PlanRequest

CLUSTER_S = 30.0
"""Seconds after which a placement is what was found by then: a net, its work ends before."""
GRAPHS_S = 300.0
"""The same for one round of a plan of any-to-any models."""
EXACT_S = 120.0
"""The same for an exact plan."""
_CLUSTER_WORK = 0.01
"""Share of the usual effort for a placement: somebody waits for it."""
_GRAPHS_WORK = 0.05
"""The same for a round of any-to-any models."""
_GRAPHS_ROUNDS = Rounds(most=3, trims=0, first_step=2)
"""Of any-to-any models, whose plans take most of a second each: few rounds, of large steps."""
_SHARES = 6
"""Plans on the way to the largest share of demand that fits, at most."""
_MIN_STEP = 0.01
_FRESH_SEEDS = (1001,)
"""Arrivals besides those that are shown, so that a plan is not made for these alone."""
_CACHED = 64


@dataclass(frozen=True, slots=True)
class QuickPlan:
    """A plan for a problem and what it keeps, by service and simulation.

    `served` is the share of demand that the plan is for. Where that is not all, the plan of rented machines
    is one for the problem with that share of its demand. That of any-to-any models is for the problem with
    the `headroom` that its services needed.
    """

    plan: Plan
    problem: Problem
    kept: Mapping[str, float | None]
    served: float
    headroom: Mapping[str, float] = field(default_factory=dict)

    @property
    def keeps_all(self) -> bool:
        """Whether every promise was kept."""
        return not short_services(self.problem, self.kept)


def plan_quickly(
    problem: Problem,
    *,
    simulate_s: float,
    seed: int,
    tell: Tell = lambda _text: None,
    like: Mapping[str, float] = MappingProxyType({}),
) -> QuickPlan:
    """Return a plan of a fleet with what it keeps in `simulate_s` seconds of its demand.

    `like` is the headroom that a similar fleet needed, which an any-to-any one begins with.
    """
    likely = tuple(sorted(like.items())) if problem.family == "graph" else ()
    key = (problem.content_hash(), simulate_s, seed, likely)
    found = _cache.get(key)
    if found is None:
        found = _QuickPlanner(problem, simulate_s, seed, tell, dict(likely)).run()
        _cache[key] = found
        while len(_cache) > _CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    return found


def plan_exactly(
    problem: Problem, *, simulate_s: float, seed: int, tell: Tell = lambda _text: None
) -> QuickPlan:
    """Return the plan that is made without hurry, with its bound and promises, and what it keeps."""
    tell("planning exactly, which takes up to some minutes")
    request = PlanRequest(
        deadline_s=EXACT_S, on_progress=lambda said: tell(f"{said.stage}: {said.text}")
    )
    found = plan(problem, request)
    served = min(found.served_fraction.values(), default=0.0)
    tell("simulating")
    settled = _settle(problem, found)
    kept = simulate_demand(found, settled, share=served, simulate_s=simulate_s, seed=seed)
    return QuickPlan(found, problem, kept, served)


_cache: OrderedDict[tuple[str, float, int, object], QuickPlan] = OrderedDict()
"""Plans of this process: what there is now is asked for again with every what-if."""


def simulate_demand(
    plan: Plan, problem: Problem, *, share: float = 1.0, simulate_s: float, seed: int
) -> Shares:
    """Return which share of requests keeps its promises, by service, under a share of the demand.

    Of the group of them that falls shortest where there are groups (`plan.request_groups`). None where no
    request was judged.
    """
    from atoll.sim.api import simulate
    from atoll.sim.problem_demand import demand_of
    from atoll.sim.sim_options import SimOptions
    from atoll.workload.requests import collect

    asked = _settle(problem, plan)
    if not plan.instances:
        return {service.name: None for service in asked.services}
    if share < 1.0:
        asked = scale_demand(asked, share)
    catalog, options = asked.catalog(), SimOptions(seed=seed)
    if plan.executor_instances:
        mixed = simulate_mixed(plan, asked, catalog, options, duration_s=simulate_s)
        seen = [(one.name, one.kept, one.groups) for one in mixed.services]
        plain = mixed.plain
    else:
        arrivals = collect(demand_of(asked, simulate_s), seed)
        plain, seen = simulate(plan, asked, catalog, arrivals, options), []
    seen += [(one.name, one.attainment, one.groups) for one in (plain.services if plain else ())]
    return {
        name: None if kept is None else min_share(kept, asked.service(name).target, groups)
        for name, kept, groups in seen
    }


def _settle(problem: Problem, plan: Plan) -> Problem:
    """The problem as the mixes of a plan settle it; a plan without any answers it as it is."""
    return problem.settled(plan.mixes) if plan.mixes else problem


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

    def __init__(
        self,
        problem: Problem,
        simulate_s: float,
        seed: int,
        tell: Tell,
        like: Mapping[str, float],
    ) -> None:
        self.problem, self.simulate_s, self.seed, self.tell = problem, simulate_s, seed, tell
        self.like = like
        self.budget = problem.limits.budget_usd_per_hour

    def run(self) -> QuickPlan:
        # A fixed cluster has no headroom to size: it is planned once, with little effort.
        if self.problem.hosts:
            return self._place()
        if self.problem.family == "graph":
            return self._size_graphs()
        # All demand without a budget first: if that fits the budget there is no share to look for.
        whole = self._size(1.0)
        if whole is not None and self._fits(whole):
            return whole
        return self._find_share()

    def _size_graphs(self) -> QuickPlan:
        """Plan with more headroom until enough of all promises are kept, from what a similar fleet needed."""
        services = tuple(
            one.model_copy(update={"headroom": max(one.headroom, self.like.get(one.name, 1.0))})
            for one in self.problem.services
        )
        asked = self.problem.replace(services=services)
        self.tell("planning")
        first = self._solve_graphs(asked)
        if not _is_whole(first) and asked != self.problem:
            asked, first = self.problem, self._solve_graphs(self.problem)
        if not _is_whole(first):
            return self._judge(first, min(first.served_fraction.values(), default=0.0))
        settled = asked.settled(first.mixes) if first.mixes else asked
        planned = {first.problem_hash: asked}

        def solve(problem: Problem) -> Plan:
            found = self._solve_graphs(problem)
            planned[found.problem_hash] = problem
            return found

        judge = partial(self._judge_shown, settled)
        found, kept = HeadroomSizing(settled, first, solve, judge, self.tell, _GRAPHS_ROUNDS).run()
        # What flows over its paths is the demand with headroom: it is a plan for a fleet that has that.
        own = planned[found.problem_hash]
        made = found.model_copy(update={"mixes": first.mixes})
        served = min(found.served_fraction.values(), default=0.0)
        headroom = {service.name: service.headroom for service in own.services}
        return QuickPlan(made, own, kept, served, headroom)

    def _solve_graphs(self, problem: Problem) -> Plan:
        # Of links nothing is told apart: all are as slow as the slowest, unless nothing can be served so.
        effort = Effort(work=_GRAPHS_WORK, gap=0.05, patterns=False)
        found = self._plan_soon(problem, effort, GRAPHS_S)
        if found.instances:
            return found
        return self._plan_soon(problem, replace(effort, patterns=True), GRAPHS_S)

    def _plan_soon(self, problem: Problem, effort: Effort, deadline_s: float) -> Plan:
        request = PlanRequest(
            effort=effort,
            deadline_s=deadline_s,
            rank=False,
            capacity_only=True,
            error_bars=False,
        )
        return plan(problem, request)

    def _place(self) -> QuickPlan:
        """Place on a cluster in little time, and see what is kept."""
        self.tell("planning")
        found = self._plan_soon(self.problem, Effort(work=_CLUSTER_WORK, gap=0.05), CLUSTER_S)
        served = min(found.served_fraction.values(), default=0.0)
        self.tell("simulating")
        return self._judge(found, served)

    def _judge(self, found: Plan, served: float) -> QuickPlan:
        kept = simulate_demand(
            found, self.problem, share=served, simulate_s=self.simulate_s, seed=self.seed
        )
        return QuickPlan(found, self.problem, kept, served)

    def _fits(self, found: QuickPlan) -> bool:
        return _is_whole(found.plan) and (
            self.budget is None or found.plan.usd_per_hour <= self.budget
        )

    def _find_share(self) -> QuickPlan:
        """Return the plan for the largest common share of demand that machines and budget allow."""
        # With the limits as they are the solver says which share is possible at all: the search starts there.
        limited = self._solve(self.problem)
        max_share = min(limited.served_fraction.values(), default=0.0)
        if not limited.instances or max_share <= 0.0:
            settled = _settle(self.problem, limited)
            kept = dict.fromkeys((service.name for service in settled.services), None)
            return QuickPlan(limited, self.problem, kept, 0.0)
        best: QuickPlan | None = None
        fitting: QuickPlan | None = None
        low, high, share = 0.0, max_share, max_share
        for number in range(_SHARES):
            self.tell(f"planning for {share:.0%} of the demand, {number + 1} of {_SHARES} at most")
            found = self._size(share)
            fits = found is not None and (
                self.budget is None or found.plan.usd_per_hour <= self.budget
            )
            if fits and found is not None and found.keeps_all:
                low, best = share, found
            else:
                # What fits but misses promises is kept, in case nothing keeps them.
                high, fitting = share, found if fits else fitting
            if high - low < _MIN_STEP:
                break
            share = (low + high) / 2.0
        best = best or fitting
        if best is None:
            return self._judge(limited, max_share)
        return best

    def _size(self, share: float) -> QuickPlan | None:
        """Plan for a share of the demand so that its promises are kept; None where it cannot be served."""
        asked = self.problem if share >= 1.0 else scale_demand(self.problem, share)
        # The budget is left out while sizing; whether the plan keeps it is looked at afterwards.
        limits = asked.limits.model_copy(update={"budget_usd_per_hour": None})
        own = asked.replace(limits=limits)
        self.tell("planning")
        first = self._solve(own)
        if not _is_whole(first):
            return None
        # A mix that is settled stays: sizing must not change the choice of models from round to round.
        settled = own.settled(first.mixes)
        judge = partial(self._judge_shown, settled)
        markets = _SizingMarkets(first, self._solve)
        found, kept = HeadroomSizing(settled, first, markets.solve, judge, self.tell).run()
        if (other := markets.open_spot(found)) is not None:
            seen = judge(other)
            if not short_services(settled, seen) or short_services(settled, kept):
                found, kept = other, seen
        whole = asked.settled(first.mixes).content_hash()
        fields = {"mixes": first.mixes, "problem_hash": whole}
        return QuickPlan(found.model_copy(update=fields), asked, kept, share)

    def _solve(self, problem: Problem) -> Plan:
        return plan(problem, PlanRequest(solver="fast", capacity_only=True, error_bars=False))

    def _judge_shown(self, problem: Problem, plan: Plan) -> Shares:
        """Return the kept shares: of the shown arrivals, or of all together where only that is too little."""
        kept = simulate_demand(plan, problem, simulate_s=self.simulate_s, seed=self.seed)
        # Too little on the shown arrivals already: other ones need not be looked at.
        if short_services(problem, kept):
            return kept
        runs = [kept]
        for seed in _FRESH_SEEDS:
            runs.append(simulate_demand(plan, problem, simulate_s=self.simulate_s, seed=seed))
            mean = {name: _mean([run.get(name) for run in runs]) for name in kept}
            short = short_services(problem, mean)
            if short:
                # Services that fresh arrivals show short count with the mean; the others as they are shown.
                return {name: short.get(name, share) for name, share in kept.items()}
        return kept


class _SizingMarkets:
    """Markets that headroom is sized on: without spot where the first plan has none there.

    With spot the solver tries one share of it after the other, which takes several times as long: it is
    looked at once more when the headroom is known, and not in every round.
    """

    def __init__(self, first: Plan, solve: Callable[[Problem], Plan]) -> None:
        self._first, self._solve = first, solve
        self._is_closed = not any(n.market == "spot" for one in first.instances for n in one.nodes)
        self._asked: list[tuple[Plan, Problem]] = []

    def solve(self, problem: Problem) -> Plan:
        """Return a plan for a problem with more headroom."""
        if not self._is_closed or not problem.limits.spot_share:
            return self._solve(problem)
        limits = problem.limits.model_copy(update={"spot_share": 0.0})
        found = self._solve(problem.replace(limits=limits))
        if found.status not in ("optimal", "feasible"):
            return self._solve(problem)
        found = found.model_copy(update={"problem_hash": problem.content_hash()})
        self._asked.append((found, problem))
        return found

    def open_spot(self, found: Plan) -> Plan | None:
        """Return a cheaper plan with the headroom of the one found, on all markets, if there is one."""
        if found.usd_per_hour <= self._first.usd_per_hour:
            return None
        for made, problem in self._asked:
            if made is found:
                other = self._solve(problem)
                whole = other.status in ("optimal", "feasible")
                return other if whole and other.usd_per_hour < found.usd_per_hour else None
        return None


def _is_whole(plan: Plan) -> bool:
    """Whether a plan serves all that is asked."""
    return plan.status in ("optimal", "feasible")


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None
