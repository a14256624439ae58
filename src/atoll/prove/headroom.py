"""Headroom for promises: plans of a quick solver, sized by how much more than its demand each service gets.

Services of which too few requests keep their promises in simulation are planned with more headroom, until
enough of all do; then headroom that was not needed is taken back. That is blunter than knowing what each
template carries (`rent_promises`), and needs a few plans and simulations only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from atoll.core.errors import InfeasibleError
from atoll.core.units import format_price
from atoll.prove.kept import look_at, sample_kept, worst_of
from atoll.prove.simulation_deadline import SimulationCutShortError
from atoll.solve.deadline import Deadline
from atoll.solve.registry import solve

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import KeptPromise, Plan
    from atoll.plan.problem import Problem
    from atoll.solve.plan_request import PlanRequest

_HEADROOM_STEP = 0.08
"""By what share headroom grows, more every time."""
_MAX_HEADROOM_STEP = 0.4
_DOUBLE_STEP_MARGIN = 0.1
"""Where the share that is kept is below its target by more than this, headroom grows twice as fast."""
_TRIAL_SEED = 1
"""The first seed of arrivals that a plan which is kept is sized with."""
_TRIAL_RUNS = 2
"""Simulations of such a plan in a round, at least."""
_MAX_RUNS = 6
"""The same at most, while it is not sure what is kept."""
_SPOT_SHARE = 0.6
"""Share of the deadline for a plan with spot nodes where those are lost; the rest is for one without."""
_SERVED = 1.0 - 1e-9
"""Share of its demand from which on a service counts as served: the rest is rounding."""

Tell = Callable[[str], None]
Shares = dict[str, float | None]
"""By service, the share of requests that keeps its promises, or of the group of them that falls shortest
(`plan.request_groups`); None where no request was judged."""
Judge = Callable[["Plan"], Shares]
Solve = Callable[["Problem"], "Plan"]


def short_services(problem: Problem, kept: Mapping[str, float | None]) -> dict[str, float]:
    """Return the services of which too few requests keep their promises, with the share that does."""
    targets = {service.name: service.target for service in problem.services}
    return {
        name: share
        for name, share in kept.items()
        if share is not None and name in targets and share < targets[name]
    }


def keep_quickly(problem: Problem, request: PlanRequest) -> Plan:
    """Return a plan of the request's solver, with headroom so that its promises are kept, and with them.

    Where that takes more than there is or may be spent, it is the plan that comes closest, and its `promises`
    say what is kept of it; services that cannot be served at all are left as they are. A deadline that comes
    first ends it with the best plan so far, `cut_short`. Where spot nodes are lost a plan without any is
    made as well, and the cheaper one taken that keeps its promises.
    """
    limits, deadline = problem.limits, Deadline(request.deadline_s)
    lossy = limits.spot_loss_per_h > 0.0 and any(o.market == "spot" for o in problem.offers)
    if not lossy:
        return _keep_with_headroom(problem, request)
    found = _keep_with_headroom(problem, replace(request, deadline_s=deadline.share(_SPOT_SHARE)))
    without = problem.replace(limits=limits.model_copy(update={"spot_share": 0.0}))
    other = _keep_with_headroom(without, replace(request, deadline_s=deadline.share(1.0)))
    best = other if _merit(other) > _merit(found) else found
    note = (
        f"spot nodes that are lost: {format_price(found.usd_per_hour)} with headroom and "
        f"{format_price(other.usd_per_hour)} without spot were tried, and nothing between"
    )
    settled = problem.settled(best.mixes)
    fields = {
        "notes": (*best.notes, note),
        "problem_hash": settled.content_hash(),
        # What is proven of plans without spot is not proven of all.
        "capacity_bound": found.capacity_bound,
    }
    return best.model_copy(update=fields)


def _merit(plan: Plan) -> tuple[bool, bool, float]:
    """Order of plans: all is served, promises are kept, at the lower price."""
    whole = plan.status in ("optimal", "feasible")
    kept = bool(plan.promises) and all(promise.is_kept for promise in plan.promises)
    return whole, kept, -plan.usd_per_hour


def _keep_with_headroom(problem: Problem, request: PlanRequest) -> Plan:
    deadline, catalog = Deadline(request.deadline_s), request.catalog_for(problem)

    def find(asked: Problem) -> Plan:
        return solve(asked, replace(request, deadline_s=deadline.share(1.0)))

    first = find(problem)
    if not first.instances:
        return first
    # A mix that is settled stays: sizing must not change the choice of models from round to round.
    asked, late = problem.settled(first.mixes), False
    judge = _KeptJudge(asked, catalog, deadline)
    try:
        tell = partial(request.say, "promises")
        found, _ = HeadroomSizing(asked, first, find, judge, tell).run()
        promises = judge.promises_of(found)
    except SimulationCutShortError:
        late = True
        found, promises = judge.best or (first, ())
    fields: dict[str, object] = {"mixes": first.mixes, "promises": promises}
    fields["problem_hash"] = asked.content_hash()
    if first.bound is not None and first.status in ("optimal", "feasible"):
        # What a solver proves of demand with headroom says nothing of other ways to keep promises.
        fields |= {"bound": None, "gap": None, "capacity_bound": first.bound}
        fields["status"] = "feasible" if found.status == "optimal" else found.status
    return found.model_copy(update=fields | ({"cut_short": True} if late else {}))


class _KeptJudge:
    """What requests keep of plans: on arrivals for sizing, and where that is enough on fresh ones, too."""

    def __init__(self, problem: Problem, catalog: Catalog, deadline: Deadline) -> None:
        self.problem, self.catalog, self.deadline = problem, catalog, deadline
        self.targets = {service.name: service.target for service in problem.services}
        self.seen: list[tuple[Plan, tuple[KeptPromise, ...]]] = []

    def __call__(self, plan: Plan) -> Shares:
        found = sample_kept(
            plan,
            self.problem,
            self.catalog,
            self.targets,
            first_seed=_TRIAL_SEED,
            min_runs=_TRIAL_RUNS,
            max_runs=_MAX_RUNS,
            until_short=True,
            deadline=self.deadline,
        )
        kept: Shares = {name: one.worst(self.targets[name]).both for name, one in found.items()}
        if not short_services(self.problem, kept):
            for promise in self.promises_of(plan):
                after, worst = promise.min_after_loss, worst_of(promise).both
                kept[promise.service] = worst if after is None else min(worst, after)
        return kept

    def promises_of(self, plan: Plan) -> tuple[KeptPromise, ...]:
        """Return what requests of a plan keep on fresh arrivals."""
        for other, promises in self.seen:
            if other is plan:
                return promises
        promises = look_at(plan, self.problem, self.catalog, self.deadline)
        self.seen.append((plan, promises))
        return promises

    @property
    def best(self) -> tuple[Plan, tuple[KeptPromise, ...]] | None:
        """The cheapest plan so far that keeps all promises."""
        kept = [one for one in self.seen if all(promise.is_kept for promise in one[1])]
        return min(kept, key=lambda one: one[0].usd_per_hour, default=None)


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often headroom is added and taken back again; steps grow from the size of the `first_step`th."""

    most: int = 8
    trims: int = 2
    first_step: int = 1


class HeadroomSizing:
    """The headroom that each service needs for its promises."""

    def __init__(
        self,
        problem: Problem,
        first: Plan,
        solve: Solve,
        judge: Judge,
        tell: Tell,
        rounds: Rounds = Rounds(),
    ) -> None:
        self.problem, self.solve, self.judge, self.tell = problem, solve, judge, tell
        self.rounds = rounds
        self.first = first.model_copy(update={"mixes": ()})
        self.served = self.first.served_fraction
        self.headroom = {service.name: service.headroom for service in problem.services}
        self.too_little: dict[str, float] = {}
        self.times: Counter[str] = Counter()

    def run(self) -> tuple[Plan, Shares]:
        """Return the plan that keeps its promises, or comes closest, and what it keeps."""
        plan, kept = self.first, self.judge(self.first)
        # Rounds may overshoot or fail, so the plan that missed by least is remembered.
        closest = (self._missing(kept), plan, kept)
        for number in range(self.rounds.most):
            short = self._short(kept)
            if not short:
                return self._trim(plan, kept)
            self.tell(f"more room for {', '.join(sorted(short))}, round {number + 1}")
            self._add(short)
            found = self._plan(self.headroom)
            if found is None:
                break
            plan, kept = found, self.judge(found)
            closest = min(closest, (self._missing(kept), plan, kept), key=lambda one: one[0])
        return closest[1], closest[2]

    def _add(self, short: Mapping[str, float]) -> None:
        for name, share in short.items():
            self.too_little[name] = self.headroom[name]
            self.times[name] += 1
            far = self.problem.service(name).target - share > _DOUBLE_STEP_MARGIN
            # Steps grow with every round, since each round costs a plan and simulations.
            size = self.rounds.first_step + self.times[name] - 1
            step = _HEADROOM_STEP * size * (2 if far else 1)
            self.headroom[name] *= 1.0 + min(_MAX_HEADROOM_STEP, step)

    def _trim(self, plan: Plan, kept: Shares) -> tuple[Plan, Shares]:
        """Try what lies between too little headroom and enough, while that is cheaper."""
        enough = dict(self.headroom)
        for _ in range(self.rounds.trims if self.too_little else 0):
            between = {
                name: (self.too_little.get(name, room) + room) / 2.0
                for name, room in enough.items()
            }
            found = self._plan(between)
            if found is not None and found.usd_per_hour >= plan.usd_per_hour * (1.0 - 1e-6):
                # As dear: whatever is cheaper needs less.
                enough = between
                continue
            seen = {} if found is None else self.judge(found)
            if found is not None and not self._short(seen):
                plan, kept, enough = found, seen, between
            else:
                self.too_little |= {name: between[name] for name in self.too_little}
        return plan, kept

    def _plan(self, headroom: Mapping[str, float]) -> Plan | None:
        services = tuple(
            service.model_copy(update={"headroom": headroom[service.name]})
            for service in self.problem.services
        )
        try:
            found = self.solve(self.problem.replace(services=services))
        except InfeasibleError:
            return None
        served = found.served_fraction
        # More room for one must not be taken from another.
        whole = all(served.get(name, 0.0) >= share for name, share in self.served.items())
        return found if whole else None

    def _short(self, kept: Mapping[str, float | None]) -> dict[str, float]:
        """The services that fall short, of those that are served: room helps no other."""
        short = short_services(self.problem, kept)
        return {
            name: share for name, share in short.items() if self.served.get(name, 0.0) >= _SERVED
        }

    def _missing(self, kept: Mapping[str, float | None]) -> float:
        targets = {service.name: service.target for service in self.problem.services}
        short = self._short(kept)
        return max((targets[name] - share for name, share in short.items()), default=0.0)
