"""Promises with a choice of models: which model answers is chosen for what its promises take.

Levels are chosen for capacity first, and the plan for the problem that they settle is sized by simulation
(`rent_promises`). What a promise takes differs by model: short of it are those whose instances are nearly
full, and few. So levels are chosen once more with the demand of each way scaled by what its promise cost
beside its capacity; a model that was not tried counts with its capacity. That is done a few times, while it
gives other levels, and the cheapest plan that keeps its promises is taken. Then cheaper machines are tried
with levels at which they are equally busy (`LevelEvener`): models that fall short carry a little less, until
none does. The bound is over all levels, with every template carrying as much as one that nobody has simulated
(`simulated_bound`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.core.ids import Phase
from atoll.prove.kept import find_worst, sample_kept
from atoll.prove.rent_promises import keep_promises
from atoll.prove.simulated_bound import UNKNOWN
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.deadline import Deadline
from atoll.solve.derating import Derating
from atoll.solve.registry import solve
from atoll.solve.rent.choosing.choose import ChosenLevels
from atoll.solve.rent.choosing.level_rows import LevelRows
from atoll.solve.rent.choosing.solver import choose_mixes, with_mixes

if TYPE_CHECKING:
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.solve.plan_request import PlanRequest

ROUNDS = 3
"""How often levels are chosen, at most."""
_LEVEL_DECIMALS = 4
"""Decimals of a share in which levels must differ to be others."""
_FIRST_SHARE = 0.5
"""Share of the time that is left for choosing models, and for the first plan: more rounds may follow."""
_SAME_COST = 5e-3
"""Share of a cost that is not worth another mix."""
_MAX_EVENED = 8
"""How often levels are tried at which machines are equally busy."""
_LESS = 0.95
"""Of what the instances of a model that falls short carried before, what they carry in the next try."""
_RUNS = 3
"""Simulations of such a try."""
_HALVINGS = 24
"""Steps in which the least share of what machines carry is found that is enough."""
_MAX_FACTOR = 10.0
"""Largest factor that a promise may put on the demand of a choice's service."""


def keep_chosen_promises(problem: Problem, request: PlanRequest) -> Plan:
    """Return the cheapest plan found whose promises are kept, over mixes of models; it has its mixes."""
    deadline = Deadline(request.deadline_s)

    def within(share: float) -> PlanRequest:
        return replace(request, deadline_s=deadline.share(share))

    first: ChosenLevels | None = None
    best: Plan | None = None
    tried: set[tuple[tuple[str, float], ...]] = set()
    factors: dict[str, float] = {}
    for number in range(ROUNDS):
        request.say("promises", f"choosing models, round {number + 1}")
        chosen = choose_mixes(problem, request, Deadline(deadline.share(_FIRST_SHARE)), factors)
        first = first or chosen
        key = tuple(sorted((name, round(y, _LEVEL_DECIMALS)) for name, y in chosen.levels.items()))
        if key in tried:
            break
        tried.add(key)
        settled = problem.settled(chosen.mixes)
        plan = keep_promises(settled, within(_FIRST_SHARE if number == 0 else 1.0))
        made = with_mixes(plan, replace(chosen, bound=first.bound))
        made = made.model_copy(
            update={"capacity_bound": made.bound if made.promises else made.capacity_bound}
        )
        if best is None or _merit(made) > _merit(best):
            best = made
        if number + 1 == ROUNDS or deadline.passed or not plan.instances:
            break
        capacity = chosen.plan or solve(settled, within(_FIRST_SHARE))
        factors |= _factors(plan, capacity)
    assert best is not None
    assert first is not None
    if not best.promises:
        return best
    # What is left of the time is for the bound, too.
    evener = LevelEvener(problem, replace(request, deadline_s=deadline.share(_FIRST_SHARE)), best)
    for levels in () if deadline.passed else evener.find():
        mixes = problem.mixes_at(levels)
        plan = keep_promises(problem.settled(mixes), within(_FIRST_SHARE))
        made = with_mixes(plan, replace(first, mixes=mixes))
        made = made.model_copy(update={"capacity_bound": made.bound})
        if _merit(made) > _merit(best):
            best = made
            break
    # Whatever mix is simulated, no model's instances are taken to carry more than `UNKNOWN` says.
    request.say("promises", "looking for a bound")
    eased = {service.name: 1.0 / UNKNOWN for service in problem.services}
    bound, late = None, deadline.passed
    if not late:
        bound = choose_mixes(problem, request, Deadline(deadline.share(_FIRST_SHARE)), eased).bound
    late = late or best.cut_short
    return with_mixes(best, replace(first, mixes=best.mixes, bound=bound, cut_short=late))


class LevelEvener:
    """Looks for levels at which machines that cost less than the best plan keep their promises."""

    def __init__(self, problem: Problem, request: PlanRequest, best: Plan) -> None:
        self.problem, self.request, self.best = problem, request, best
        self.catalog = request.catalog_for(problem)
        self.deadline = Deadline(request.deadline_s)
        self.used = {service.name: 1.0 for service in problem.services}
        """By service the share of what its instances carry that counts."""
        self._short: dict[tuple[tuple[str, float], ...], set[str]] = {}

    def find(self) -> Iterator[dict[str, float]]:
        """Yield such levels by service, with more and more room."""
        try:
            for _ in range(_MAX_EVENED):
                machines = self._cheaper()
                levels = None if machines is None else even_levels(self.problem, machines)
                if levels is None or self.deadline.passed:
                    return
                key = tuple(sorted((name, round(y, _LEVEL_DECIMALS)) for name, y in levels.items()))
                if key not in self._short:
                    self._short[key] = self._find_short(levels)
                    if not self._short[key]:
                        yield levels
                # Who was not enough on fresh arrivals, for all that a trial showed, was so together.
                short = self._short[key] or levels
                self.used |= {name: _LESS * self.used[name] for name in short}
        except SimulationCutShortError:
            return

    def _cheaper(self) -> Plan | None:
        """The cheapest machines for all levels; None where they cost as much as the best plan."""
        priors = {
            (str(role), nodes): self.used[service.name]
            for service in self.problem.services
            for role in service.roles
            for nodes in range(1, self.problem.settings.max_nodes_per_instance + 1)
        }
        effort = replace(self.request.effort, derating=Derating(priors=priors))
        asked = replace(self.request, effort=effort)
        plan = choose_mixes(self.problem, asked, Deadline(self.deadline.share(_FIRST_SHARE))).plan
        if plan is None or plan.status not in ("optimal", "feasible"):
            return None
        kept = all(promise.is_kept for promise in self.best.promises)
        saves = (plan.objective or 0.0) < (self.best.objective or 0.0) * (1.0 - _SAME_COST)
        return plan if saves or not kept else None

    def _find_short(self, levels: dict[str, float]) -> set[str]:
        """Simulate the cheapest plan at some levels; return the services that fall short of their promise."""
        settled = self.problem.settled(self.problem.mixes_at(levels))
        plan = solve(settled, replace(self.request, deadline_s=self.deadline.share(_FIRST_SHARE)))
        targets = {service.name: service.target for service in settled.services}
        if plan.status not in ("optimal", "feasible"):
            return {*targets}
        self.request.say("promises", f"simulating ${plan.usd_per_hour:.2f} at equal loads")
        found = sample_kept(
            plan,
            settled,
            self.catalog,
            targets,
            first_seed=1,
            min_runs=_RUNS,
            max_runs=_RUNS,
            until_short=True,
            deadline=self.deadline,
        )
        kept = {name: find_worst(one.mean, targets[name]).both for name, one in found.items()}
        return {name for name, share in kept.items() if share < targets[name]}


def even_levels(problem: Problem, plan: Plan) -> dict[str, float] | None:
    """Return the levels of services, by name, at which the busiest of a plan's models is least so."""
    rows = LevelRows.of(problem)
    most: dict[int, float] = {}
    for way in rows.ways:
        service = problem.services[way]
        carried = dict.fromkeys(Phase, 0.0)
        for instance in plan.instances:
            if instance.service == service.name:
                role = instance.role_id
                carried[role.phase] += instance.throughput_per_s / problem.demand(role)
        most[way] = carried[Phase.BOTH] + min(carried[Phase.PREFILL], carried[Phase.DECODE])
    low, high = 0.0, 1.0
    found: dict[int, float] = {}
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        levels = rows.least({}, most={way: share * level for way, level in most.items()})
        if levels is None:
            low = share
        else:
            high, found = share, levels
    return {problem.services[way].name: level for way, level in found.items()} or None


def _merit(plan: Plan) -> tuple[bool, bool, float, float]:
    """Return the order of plans: all is served, promises are kept, at the lower price."""
    kept = bool(plan.promises) and all(promise.is_kept for promise in plan.promises)
    served = min(plan.served_fraction.values(), default=0.0)
    whole = plan.status in ("optimal", "feasible")
    return whole, kept, served if not whole else 1.0, -(plan.objective or 0.0)


def _factors(plan: Plan, capacity: Plan) -> dict[str, float]:
    """By service what its promise costs beside its capacity, at least 1."""
    usd: dict[str, float] = {}
    for instance in capacity.instances:
        usd[instance.service] = usd.get(instance.service, 0.0) + instance.usd_per_hour
    kept: dict[str, float] = {}
    for instance in plan.instances:
        kept[instance.service] = kept.get(instance.service, 0.0) + instance.usd_per_hour
    return {
        name: min(_MAX_FACTOR, max(1.0, kept[name] / cost))
        for name, cost in usd.items()
        if cost > 0.0 and name in kept
    }
