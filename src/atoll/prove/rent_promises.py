"""The cheapest plan whose promises a share of requests keeps: capacities found by simulation.

The plan for capacity alone is simulated first: nothing costs less, and it may do. Where too few requests of
a service keep a promise, the phase that loses them is tightened: its templates are planned with a share of
their analytic throughput, the largest at which enough requests keep that phase's promise, found by
simulating one instance alone (`load_curves`). Only templates that a plan uses are simulated, and a few that
it would use next. Others count as those like them on average, until a plan uses none of them; then they
count with nothing, which gives the plan. Then the whole plan is simulated, and how much each phase may lose
is searched between what was enough and what was not (`sizing`). How good it is says a bound with *simulated*
capacities (`simulated_bound`). While it leaves room, plans with one instance less or a cheaper one are tried
(`smaller_plans`).

Where spot nodes are lost, that is found as if none were, and then what is spare for it (`redundancy`).

Of plans that cost at most the share `settings.simplicity` more than what was found, the simplest one is taken
in the end (`solve.rent.simple_allocation`), if it keeps its promises as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.core.ids import Phase, parse_role
from atoll.plan.plan import PROVEN_GAP
from atoll.prove.kept import (
    FRESH_SEED,
    KeptSample,
    KeptShares,
    find_worst,
    kept_after_loss,
    look_at,
    sample_kept,
    worst_of,
)
from atoll.prove.load_curves import LoadCurve, find_loads, simulate_more
from atoll.prove.prospects import Key, find_prospects, find_rivals
from atoll.prove.redundancy import Redundancy, Spare, TrialOutcome
from atoll.prove.simulated_bound import SimulatedBound
from atoll.prove.simulation_deadline import SimulationCutShortError, keep_deadline
from atoll.prove.sizing import Allowance, Sizing
from atoll.prove.smaller_plans import (
    describe_simulated,
    join_instances,
    larger_plans,
    smaller_plans,
)
from atoll.solve.deadline import Deadline
from atoll.solve.derating import Derating, node_set
from atoll.solve.registry import solve
from atoll.solve.simplicity import describe_simplicity, is_simpler
from atoll.solve.templates.generate import PREFERENCE

if TYPE_CHECKING:
    from atoll.plan.plan import Instance, Plan, SimulatedCapacity
    from atoll.plan.problem import Problem
    from atoll.solve.effort import Effort
    from atoll.solve.plan_request import PlanRequest
    from atoll.solve.templates.library import Libraries

_SIZING_ROUNDS = 12
"""Plans on the way to one of simulated templates alone, at most."""
_HOPE_PER_ROUND = 0.6
"""By what hope for templates that nobody has simulated falls with every round."""
_PROSPECTS = 6
"""Templates of each role that are simulated before a plan uses them, in a round."""
_PROSPECT_SLACK = 0.10
"""Share by which such templates may be dearer than those of the plan."""
_SAME_COST = 5e-3
"""Plans that differ by less than this share cost the same; so does one so close to the bound."""
_MAX_TIGHTER = 8
"""How often too much may be lost before a plan is found."""
_MAX_PROBES = 4
"""How often services may then lose more, to make the plan cheaper."""
_MAX_LOOKED_BACK = 3
"""How many plans made on the way are tried after that."""
_MAX_COMBINED = 6
"""How often the cheapest instances of each service that were enough are put together."""
_MAX_SMALLER = 16
"""How many plans are tried that differ from the best in one instance."""
_MAX_LARGER = 4
"""How many instances are added to the plan that comes closest where none keeps its promises."""
_LARGER_AT_ONCE = 3
"""Plans with one instance more that are tried at a time, the cheapest ones."""
_MAX_HEADROOM_STEPS = 8
"""How often a tenth more of everything is tried."""
_ENOUGH_SIMULATIONS = 400
"""After so many simulations of templates a plan that keeps its promises is good enough."""
_SIMPLE_ROUNDS = 4
"""Plans on the way to a simpler one of simulated templates alone, at most."""
_CALM_SHARE = 0.6
"""Share of the deadline for a plan that keeps its promises while no spot node is lost."""
_TRIAL_SEED = 1
_TRIAL_RUNS = 3
"""Simulations of a plan in a trial, at least."""
_MAX_RUNS = 9
"""The same at most, while it is not sure what is kept."""
_SURVIVING = "the price of surviving"
_ROUNDING = 1e-9
_MIN_TARGETS = (0.9, 0.75, 0.5, 0.25, 0.1)


def keep_promises(problem: Problem, request: PlanRequest) -> Plan:
    """Return the cheapest plan found whose promises enough of every service's requests keep.

    Where a target cannot be met the plan comes as close as was found, and says why. The deadline ends it with
    the best plan so far, `cut_short`.
    """
    rate_per_h = problem.limits.spot_loss_per_h
    if rate_per_h <= 0.0 or not any(offer.market == "spot" for offer in problem.offers):
        return _Prover(problem, request).run()
    deadline = Deadline(request.deadline_s)
    # What is proven of plans that lose nothing is proven of those that do.
    limits = problem.limits.model_copy(update={"spot_loss_per_h": 0.0})
    within = replace(request, deadline_s=deadline.share(_CALM_SHARE))
    calm = _Prover(problem.replace(limits=limits), within)
    found = calm.run()
    return _SpotProver(problem, replace(request, deadline_s=deadline.share(1.0)), calm).keep(found)


def plan_simply(problem: Problem, request: PlanRequest) -> Plan:
    """Return the simplest plan for capacity that costs little more than the cheapest, and says how much."""
    deadline = Deadline(request.deadline_s)
    cheapest = solve(problem, request)
    rest = replace(request, deadline_s=deadline.share(1.0))
    simple = _find_simplest(problem, rest, cheapest)
    if not is_simpler(simple, cheapest, problem):
        return cheapest
    return _say_simple(simple, cheapest, problem)


def _say_simple(simple: Plan, cheapest: Plan, problem: Problem) -> Plan:
    """The plan with what its simplicity costs; what keeps the cheapest from being cheaper does so here."""
    said = describe_simplicity(simple, cheapest, problem)
    return simple.model_copy(update={"notes": (*simple.notes, said), "reasons": cheapest.reasons})


def _find_simplest(problem: Problem, request: PlanRequest, best: Plan) -> Plan:
    """Return the simplest plan for what `best` and simplicity may cost; `best` where none serves all."""
    simplicity = problem.settings.simplicity
    # What must survive a loss stands where it does for that.
    if problem.limits.survival.lost:
        return best
    if simplicity <= 0.0 or best.status not in ("optimal", "feasible") or best.cut_short:
        return best
    max_usd = (best.objective or 0.0) * (1.0 + simplicity)
    simple = solve(problem, replace(request, effort=replace(request.effort, simpler_than=best)))
    fits = (simple.objective or 0.0) <= max_usd * (1.0 + _ROUNDING)
    return simple if fits and simple.status in ("optimal", "feasible") else best


class _Prover:
    """The search for a plan that keeps its promises, and what it has found so far."""

    def __init__(self, problem: Problem, request: PlanRequest) -> None:
        self.problem, self.request, self.effort = problem, request, request.effort
        self.catalog = request.catalog_for(problem)
        self.deadline = Deadline(request.deadline_s)
        self.causes: dict[str, str] = {}
        self.promised = {s.name: s.target for s in problem.services}
        allowed = {name: Allowance(target) for name, target in self.promised.items()}
        self.sizing = Sizing(problem, allowed)
        self.simulations = 0
        self.trial = 0
        self.fresh_seed = FRESH_SEED
        self.best: Plan | None = None
        """The cheapest plan that keeps its promises, also on fresh arrivals."""
        self.bound: float | None = None
        """What any plan that keeps them costs at least, once one does."""
        self.closest: tuple[float, Plan] | None = None
        self._samples: dict[tuple[str, object], KeptSample] = {}
        """By service and where its instances stand: in a plan of their own nodes they are on their own."""
        self._tried: dict[object, dict[str, KeptShares]] = {}
        self._kept: dict[object, Plan] = {}
        """Plans that keep their promises, with what they keep."""
        self._stood: dict[str, dict[object, list[Instance]]] = {}
        """By service, its instances in plans that serve everyone, by where they stand."""
        self._short: dict[object, set[str]] = {}
        self._whole: dict[object, tuple[float, Plan]] = {}
        """Plans that serve everyone, with the least that any service keeps above its target."""
        self.hopeless: set[str] = set()
        """Services whose long prompts no instance answers in time."""
        self._on_the_way: dict[object, Plan] = {}
        """Plans that counted on templates which were simulated only afterwards."""
        self._more: dict[object, dict[float, SimulatedCapacity | None]] = {}
        """By template what was simulated above the capacity model, by units/s; None: it was too much."""
        self._hopeful: list[Problem] = []
        """Problems that serve everyone whom the plan for capacity serves."""

    def run(self) -> Plan:
        self._say("planning for capacity")
        self.first = self.simple = self._solve(self.problem, self.effort)
        if not self.first.instances:
            return self.first
        if self._dies(self.first):
            # Capacity alone leaves too little after a loss: no plan of simulated templates leaves more.
            return self._stamp(self.first)
        late = False
        try:
            simple = self._simplify_first()
            if simple is not None:
                return simple
            if not self._search() and self.simulations <= _ENOUGH_SIMULATIONS:
                self._probe()
                self._look_back()
                self._add_headroom()
            self._combine()
            self._grow()
            self._shrink()
            self._simplify_best()
        except SimulationCutShortError:
            late = True
        if self.best is not None:
            found = self.best
        else:
            found = self.first if self.closest is None else self.closest[1]
            try:
                if not late:
                    self._find_bound(found)
                found = self._stamp(found)
            except SimulationCutShortError:
                late = True
        if not late:
            try:
                return self._say_price(found)
            except SimulationCutShortError:
                pass  # nothing but what surviving costs is left to find
        update = {"cut_short": True, "problem_hash": self.problem.content_hash()}
        return found.model_copy(update=update)

    def _dies(self, plan: Plan) -> bool:
        """Whether a plan serves everything, but not after every loss that it should survive."""
        served = min(plan.served_fraction.values(), default=0.0)
        lost = bool(self.problem.limits.survival.lost)
        return lost and plan.status == "partial" and served >= 1.0

    def _say_price(self, plan: Plan) -> Plan:
        """The plan with what surviving losses costs: beside one of the same capacities that need not."""
        survival = self.problem.limits.survival
        if not survival.lost or not plan.instances:
            return plan
        sizing = self.sizing
        self._settle()
        sized = any(sizing.share(one.role) > 0.0 for one in plan.instances)
        asked = sizing.problem if sized else self.problem
        plain = self._plan(
            asked.replace(limits=asked.limits.model_copy(update={"survive": 0})),
            replace(self.effort, derating=sizing.derating("likely")) if sized else self.effort,
        )
        if plain.status not in ("optimal", "feasible"):
            return plan
        more = max(0.0, plan.usd_per_hour - plain.usd_per_hour)
        note = f"{_SURVIVING} the loss of {survival.describe()}: ${more:.2f}/h"
        return plan.model_copy(update={"notes": (*plan.notes, note)})

    def _search(self) -> bool:
        """Tighten phases that lose too much until a plan keeps its promises.

        Returns True where there is no more to look for: capacity alone does, or nothing that was tried.
        """
        plan = self.first
        for number in range(_MAX_TIGHTER + 1):
            short = self._try(plan)
            if not short:
                return number == 0
            if number == _MAX_TIGHTER:
                break
            if number == 1 and self.simulations <= _ENOUGH_SIMULATIONS:
                # Which engines carry most is known now. What this finds ends the rest sooner.
                self._add_headroom()
                self._combine()
            plan = self._size_tighter(plan, short)
            if not plan.instances:
                break  # nothing on offer is that fast
            if not self._saves(plan):
                self._note_enough(self.sizing.allowances)
                return False
        return True

    def _probe(self) -> None:
        """Let services lose more than was enough, as long as that makes the plan cheaper."""
        own = self.sizing.allowances
        for number in range(_MAX_PROBES):
            self._settle()
            phases = [allowance.multiples[(number + 1) % 2] for allowance in own.values()]
            if not [multiple for multiple in phases if multiple.probe()]:
                continue
            plan = self._size_served()
            if not self._saves(plan):
                # As dear as the best: whatever would be cheaper lies beyond.
                self._note_enough(own)
                continue
            for name in self._try(plan):
                for multiple in own[name].multiples:
                    multiple.note_too_much()
        # What was enough of each service by itself, all at once.
        self._settle()
        plan = self._size_served()
        if self._saves(plan):
            self._try(plan)

    def _look_back(self) -> None:
        """Try plans made on the way that cost less than the best, the dearest first.

        What an instance carries alone is careful: together, with fresh luck, they may keep enough.
        """
        for _ in range(_MAX_LOOKED_BACK):
            cheaper = [p for p in self._on_the_way.values() if self._saves(p)]
            untried = [p for p in cheaper if _standing(p) not in self._tried]
            if not untried:
                return
            plan = max(untried, key=lambda p: (p.objective or 0.0, p.content_hash()))
            self._try(plan)

    def _grow(self) -> None:
        """Where no plan keeps what is promised: try the one that comes closest with one instance more.

        Templates that carry too little by themselves, or are lost with spot, may do with others beside them.
        """
        before, own = self.best, self.sizing.allowances
        reached = before is not None and all(promise.is_kept for promise in before.promises)
        if (
            reached
            or self.hopeless
            or self.problem.limits.survival.lost
            or self.first.status == "partial"
        ):
            return
        lowered = {name: allowance.target for name, allowance in own.items()}
        self.best = None
        for name, allowance in own.items():
            allowance.target = self.promised[name]
        plan = min(self._whole.values(), key=lambda one: -one[0], default=(0.0, self.first))[1]
        libraries = self._libraries(self.problem)
        try:
            for _ in range(_MAX_LARGER):
                short = {name for name in own if name not in self._enough(plan)}
                tried: list[tuple[float, Plan]] = []
                larger = larger_plans(plan, self.problem, self.catalog, libraries, short)
                for other in larger[:_LARGER_AT_ONCE]:
                    if not self._find_short(other):
                        return
                    tried.append((self._whole[_standing(other)][0], other))
                if not tried:
                    return
                plan = max(tried, key=lambda one: one[0])[1]
        finally:
            if self.best is None:
                self.best = before
                for name, target in lowered.items():
                    own[name].target = target

    def _enough(self, plan: Plan) -> set[str]:
        """The services of a plan that was tried of which enough requests keep their promises."""
        kept = self._tried.get(_standing(plan), {})
        return {name for name, one in kept.items() if one.both >= self.promised[name]}

    def _shrink(self) -> None:
        """Try the best plan without an instance, or with a cheaper one in its place, while that is enough."""
        tried = 0
        while self.best is not None and not self._is_least(self.best):
            self._look_at_time()
            best = self.best
            libraries = self._libraries(self.problem)
            max_usd = (best.objective or 0.0) * (1.0 - _SAME_COST)
            for plan in smaller_plans(
                best, self.problem, self.catalog, libraries, max_usd, self._carry_more
            ):
                if tried >= _MAX_SMALLER:
                    return
                if _standing(plan) in self._tried:
                    continue
                tried += 1
                if not self._find_short(plan):
                    break
            if self.best is best:
                return

    def _is_least(self, plan: Plan) -> bool:
        """Whether nothing costs less by what instances carry in simulation, if that is known."""
        least = self.first.bound if self.bound is None else self.bound
        return (plan.objective or 0.0) * (1.0 - _SAME_COST) <= (least or 0.0)

    def _carry_more(self, instance: Instance, per_s: float) -> SimulatedCapacity | None:
        """Simulate an instance alone with more than the capacity model gives it."""
        # To a step, as it is simulated: many plans ask for almost the same.
        key = (instance.role, node_set(instance), instance.engine)
        known = self._more.setdefault(key, {})
        for most, found in known.items():
            if (found is None and per_s >= most) or (found is not None and per_s <= most):
                return found
        watch = keep_deadline(self.deadline)
        found = simulate_more(self.problem, self.catalog, instance, per_s, watch=watch)
        known[per_s if found is None else found.per_s] = found
        return found

    def _add_headroom(self) -> None:
        """Try a tenth more capacity for services that fall short, again and again while that is cheaper.

        That is blunt, but cheapest where instances of unlike phases help each other out, of which simulations
        of each alone know nothing; and no plan shall cost more than it would.
        """
        asked, short = self.problem, {*self.promised}
        plan = self._plan_by_engines(asked, short) if self.sizing.engines else self.first
        for _ in range(_MAX_HEADROOM_STEPS):
            short = self._find_short(plan)
            if not short:
                return
            services = tuple(
                s.model_copy(update={"headroom": s.headroom * 1.1}) if s.name in short else s
                for s in asked.services
            )
            asked = asked.replace(services=services)
            plan = self._plan_by_engines(asked, short)
            if plan.status not in ("optimal", "feasible") or not self._saves(plan):
                return

    def _combine(self) -> None:
        """Try the cheapest instances of each service that kept its promises, whatever plan they were in.

        Services on nodes of their own do not disturb each other, and a plan fails if one of them does. Where
        one is just short on fresh arrivals, it is tried with an instance more.
        """
        targets = self._targets()
        for _ in range(_MAX_COMBINED):
            chosen: list[Instance] = []
            for name, known in self._stood.items():
                enough = [
                    some
                    for standing, some in known.items()
                    if find_worst(self._samples[name, standing].mean, targets[name]).both
                    >= targets[name]
                ]
                if not enough:
                    return
                chosen += min(enough, key=lambda some: sum(one.usd_per_hour for one in some))
            plan = join_instances(self.problem, self.catalog, chosen, self.first.solver)
            if plan is None or not self._saves(plan):
                return
            short = self._find_short(plan)
            if not short:
                continue
            for name in short:
                self._stood[name].pop(_standing(plan, name), None)
            libraries = self._libraries(self.problem)
            larger = larger_plans(plan, self.problem, self.catalog, libraries, short)
            for other in [one for one in larger if self._saves(one)][:_LARGER_AT_ONCE]:
                if not self._find_short(other):
                    break

    def _plan_by_engines(self, asked: Problem, services: set[str]) -> Plan:
        """Plan for capacity, with templates of some services run by what carries most in simulation."""
        while True:
            known = dict(self.sizing.engines)
            plan = self._plan(asked, replace(self.effort, derating=Derating(engines=known)))
            used = self._used(plan)
            # Some carry nothing once longer prompts must keep their promise, too.
            used = {
                key: one
                for key, one in used.items()
                if parse_role(key[0]).model in services and one.throughput_per_s > 0.0
            }
            self._measure({k: one for k, one in used.items() if k not in self.sizing.curves}, used)
            if self.sizing.engines == known:
                return plan

    def _simplify_first(self) -> Plan | None:
        """Return the simplest plan for capacity, if it costs no more than the cheapest and keeps promises."""
        simple = self.simple = self._simplest(self.problem, self.effort, self.first)
        # One that costs more waits until the cheapest was tried: both may be too small.
        dearer = (simple.objective or 0.0) > (self.first.objective or 0.0) * (1.0 + _ROUNDING)
        if dearer or not is_simpler(simple, self.first, self.problem) or self._find_short(simple):
            return None
        return _say_simple(self._kept[_standing(simple)], self.first, self.problem)

    def _simplify_best(self) -> None:
        """Take the simplest plan that costs little more than the best and keeps promises, if there is one."""
        best = self.best
        if best is None:
            return
        capacity_does = _standing(best) == _standing(self.first)
        simple = self.simple if capacity_does else self._simplest_sized(best)
        if is_simpler(simple, best, self.problem) and not self._find_short(simple):
            self.best = _say_simple(self._kept[_standing(simple)], best, self.problem)

    def _simplest_sized(self, best: Plan) -> Plan:
        """Return the simplest plan of templates that were simulated, and simulate those it needs first."""
        sizing = self.sizing
        self._settle()
        for _ in range(_SIMPLE_ROUNDS):
            effort = replace(self.effort, derating=sizing.derating("likely"))
            used = self._used(self._simplest(sizing.problem, effort, best))
            new = {key: one for key, one in used.items() if key not in sizing.curves}
            if not self._measure(new, used):
                break
        effort = replace(self.effort, derating=sizing.derating("nothing"))
        return self._simplest(sizing.problem, effort, best)

    def _simplest(self, problem: Problem, effort: Effort, best: Plan) -> Plan:
        """Plan as simply as can be for what `best` costs and the share that simplicity may cost."""
        self._look_at_time()
        seconds = self.deadline.share(0.5)
        return _find_simplest(
            problem, replace(self.request, effort=effort, deadline_s=seconds), best
        )

    def _settle(self) -> None:
        """Let every phase lose what was enough."""
        for allowance in self.sizing.allowances.values():
            for multiple in allowance.multiples:
                multiple.settle()

    def _note_enough(self, services: Iterable[str]) -> None:
        for name in services:
            for multiple in self.sizing.allowances[name].multiples:
                multiple.note_enough()

    def _saves(self, plan: Plan) -> bool:
        """Whether a plan costs less than the best; any plan does where there is none."""
        return self.best is None or (plan.objective or 0.0) < (self.best.objective or 0.0) * (
            1.0 - _SAME_COST
        )

    def _plan(self, problem: Problem, effort: Effort) -> Plan:
        self._look_at_time()
        return self._solve(problem, effort)

    def _look_at_time(self) -> None:
        """Raise once the deadline has come: many plans follow each other, and each takes a moment."""
        if self.deadline.passed:
            raise SimulationCutShortError("no time is left to plan again")

    def _solve(self, problem: Problem, effort: Effort) -> Plan:
        seconds = self.deadline.share(0.5)
        return solve(problem, replace(self.request, effort=effort, deadline_s=seconds))

    def _say(self, text: str) -> None:
        self.request.say("promises", text)

    def _targets(self) -> dict[str, float]:
        return {name: own.target for name, own in self.sizing.allowances.items()}

    def _try(self, plan: Plan) -> set[str]:
        """Simulate a plan; return the services of which too few requests keep their promises.

        A plan of which all do is the best so far.
        """
        short = self._find_short(plan)
        self._note_enough(name for name in self.sizing.allowances if name not in short)
        return short

    def _find_short(self, plan: Plan) -> set[str]:
        """As `_try`, for plans with more capacity than they were sized for: nothing is learnt from them."""
        key = _standing(plan)
        if key not in self._tried:
            self._tried[key], self._short[key] = self._judge(plan)
        return self._short[key]

    def _judge(self, plan: Plan) -> tuple[dict[str, KeptShares], set[str]]:
        targets = self._targets()
        standing = {name: _standing(plan, name) for name in targets}
        self._say(f"trial {self.trial}: simulating the plan")
        found = sample_kept(
            plan,
            self.problem,
            self.catalog,
            targets,
            first_seed=_TRIAL_SEED,
            min_runs=_TRIAL_RUNS,
            max_runs=_MAX_RUNS,
            until_short=True,
            deadline=self.deadline,
            known={
                name: self._samples[name, own]
                for name, own in standing.items()
                if (name, own) in self._samples
            },
        )
        self._samples |= {(name, standing.get(name)): one for name, one in found.items()}
        if plan.status in ("optimal", "feasible"):
            for name in found:
                instances = [one for one in plan.instances if one.service == name]
                self._stood.setdefault(name, {}).setdefault(standing[name], instances)
        after = kept_after_loss(plan, self.problem, self.catalog, self.deadline)
        kept = {
            name: min(
                (
                    find_worst(each, self.promised[name])
                    for each in (one.mean, after.get(name))
                    if each
                ),
                key=lambda shares: shares.both,
            )
            for name, one in found.items()
        }
        shares = ", ".join(f"{name} {one.both:.1%}" for name, one in kept.items())
        self._say(f"trial {self.trial}: ${plan.usd_per_hour:.2f}, kept: {shares}")
        self.trial += 1
        short = {name for name, one in kept.items() if one.both < targets[name]}
        if not short:
            self._say("simulating fresh arrivals")
            stamped = self._stamp(plan)
            own = {p.service: p.lower(targets[p.service]) for p in stamped.promises}
            short = {name for name, promise in own.items() if not promise.is_surely_kept}
            # What fresh arrivals show is what there is to mend.
            kept |= {p.service: worst_of(p) for p in stamped.promises if p.service in short}
            if not short:
                self._find_bound(plan)
                stamped = self._kept[_standing(plan)] = self._prove(stamped)
            if not short and self._saves(plan):
                self.best = stamped
        worst = min((k.both - targets[n] for n, k in kept.items()), default=0.0)
        if self.closest is None or worst > self.closest[0]:
            self.closest = worst, plan
        if plan.status in ("optimal", "feasible"):
            lacks = [kept[name].both - self.promised[name] for name in kept]
            self._whole[_standing(plan)] = min(lacks, default=0.0), plan
        return kept, short

    def _tighten(self, plan: Plan, short: set[str]) -> None:
        """Let services that fall short lose less, in the phase that loses too much."""
        kept = self._tried[_standing(plan)]
        for name in sorted(short):
            together = any(i.phase is Phase.BOTH for i in plan.instances if i.service == name)
            self.sizing.allowances[name].tighten(kept[name], together)

    def _size_tighter(self, plan: Plan, short: set[str]) -> Plan:
        """Plan with less lost by services that fall short."""
        kept = self._tried[_standing(plan)]
        self._tighten(plan, short)
        found = self._size_served()
        while _standing(found) == _standing(plan):
            # Alone instances do well enough: it is together that they lose too many.
            trimmed = [self.sizing.allowances[name].trim(kept[name]) for name in sorted(short)]
            if not any(trimmed):
                break
            found = self._size_served()
        return found

    def _size_served(self) -> Plan:
        """Plan with what simulated templates carry, with less promised where nothing would be served."""
        self._lower_hopeless()
        plan = self._size()
        if self._lower_unkept(plan):
            plan = self._size()
        return plan

    def _size(self) -> Plan:
        """Plan, and simulate what the plan uses and was not simulated, until there is no such thing."""
        sizing = self.sizing
        for number in range(1, _SIZING_ROUNDS + 1):
            # At first kinds of templates are not given up after a few bad ones.
            likely = sizing.derating("likely", hope=_HOPE_PER_ROUND**number)
            hoped = self._plan(
                sizing.problem,
                replace(self.effort, derating=likely, gap=max(self.effort.gap, _SAME_COST)),
            )
            if hoped.status in ("optimal", "feasible"):
                self._on_the_way.setdefault(_standing(hoped), hoped)
            # With more of them simulated it is hardly ever cheaper.
            if not self._saves(hoped):
                return hoped
            used = self._used(hoped)
            new = {key: one for key, one in used.items() if key not in sizing.curves}
            self._say(
                f"trial {self.trial}, round {number}: ${hoped.usd_per_hour:.2f}, "
                f"{self.simulations} simulations"
            )
            if new:
                libraries = self._libraries(sizing.problem)
                roles = sorted({role for role, _ in new if sizing.share(role) > 0.0})
                new |= find_prospects(
                    sizing.problem,
                    self.catalog,
                    libraries,
                    likely,
                    roles,
                    _PROSPECTS,
                    _PROSPECT_SLACK,
                )
            if not self._measure(new, used):
                break
        while True:
            effort = replace(self.effort, derating=sizing.derating("nothing"))
            plan = self._plan(sizing.problem, effort)
            used = self._used(plan)
            # Of a role whose promise is free, templates that nobody has simulated may come in here.
            new = {key: one for key, one in used.items() if key not in sizing.curves}
            if not self._measure(new, used):
                return plan

    def _find_bound(self, plan: Plan) -> None:
        """Find what any plan costs at least that keeps its promises, if no instance carries more than alone.

        Where not all demand is met a plan with other capacities would serve more: that is no bound.
        """
        if self.bound is not None or plan.status == "partial":
            return
        self._say("looking for a bound")

        def plan_with(problem: Problem, derating: Derating) -> Plan:
            # The bound only has to be as close as plans count as equal.
            return self._plan(problem, replace(self.effort, derating=derating, gap=_SAME_COST))

        targets = self._targets()
        self.bound = SimulatedBound(
            self.problem,
            self.catalog,
            plan_with,
            lambda role: targets[parse_role(role).model],
            watch=keep_deadline(self.deadline),
        ).find((plan.objective or 0.0) * (1.0 - _SAME_COST))

    def _used(self, plan: Plan) -> dict[Key, Instance]:
        """The templates of a plan, with their analytic throughput."""
        from atoll.solve.assembly import keep

        return {
            (i.role, node_set(i)): keep(self.sizing.problem, self.catalog, i)
            for i in plan.instances
        }

    def _measure(self, new: Mapping[Key, Instance], used: Mapping[Key, Instance]) -> bool:
        """Simulate templates until their largest load is known; say whether there were any to simulate."""
        sizing = self.sizing
        for key, instance in new.items():
            sizing.curves[key] = LoadCurve()
            sizing.instances[key] = instance
        measured = find_loads(
            sizing.problem,
            self.catalog,
            {key: sizing.instances[key] for key in {*new, *used}},
            sizing.curves,
            sizing.share,
            seed=self.problem.settings.seed,
            watch=keep_deadline(self.deadline),
        )
        measured += self._compare_engines({*new, *used})
        self.simulations += measured
        return measured > 0

    def _compare_engines(self, keys: Iterable[Key]) -> int:
        """Give templates the engine that carries most in simulation; return how many simulations that took.

        The performance model goes by means. Engines differ in who waits for whom: where prompts go before
        answers, one that carries a little more by the model breaks more promises.
        """
        sizing, problem = self.sizing, self.sizing.problem
        asked = {key for key in keys if sizing.share(key[0]) > 0.0} - sizing.compared
        sizing.compared |= asked
        found = find_rivals(problem, self.catalog, self._libraries(problem), asked)
        keys_of = {(role, nodes): (role, nodes[:-1]) for role, nodes in found}
        # No load above what the model says is simulated here, so others cannot win.
        rivals = {
            rival: one
            for rival, one in found.items()
            if one.throughput_per_s > sizing.carried(keys_of[rival]) * (1.0 + PREFERENCE)
        }
        curves = {rival: LoadCurve() for rival in rivals}
        measured = find_loads(
            problem,
            self.catalog,
            rivals,
            curves,
            sizing.share,
            seed=self.problem.settings.seed,
            watch=keep_deadline(self.deadline),
        )
        # The preferred ones first.
        for rival, one in rivals.items():
            key, share = keys_of[rival], sizing.share(rival[0])
            carried = one.throughput_per_s * curves[rival].load(share)
            if carried > sizing.carried(key) * (1.0 + PREFERENCE):
                sizing.curves[key], sizing.instances[key] = curves[rival], one
                sizing.engines[key] = one.engine
        return measured

    def _libraries(self, problem: Problem) -> Libraries:
        """The templates of a problem, run by the engines that carry most as far as was simulated."""
        from atoll.solve.templates.library import template_libraries

        libraries = template_libraries(problem, self.catalog, cached=self.effort.cached)
        return Derating(engines=self.sizing.engines).choose_engines(libraries)

    def _lower_hopeless(self) -> None:
        """Lower the targets of services whose long prompts no instance answers in time."""
        sizing = self.sizing
        for target in _MIN_TARGETS:
            asked = sizing.problem
            # A problem that was looked at before needs no plan again.
            if asked in self._hopeful:
                return
            # Only whether anything is served at all is asked here: a rough plan says so.
            plan = self._plan(asked, replace(self.effort, gap=0.05))
            lost = {
                name
                for name, share in plan.served_fraction.items()
                if share <= 0.0 < self.first.served_fraction.get(name, 0.0)
            }
            if not lost:
                self._hopeful.append(asked)
                return
            for name in lost:
                own = sizing.allowances[name]
                own.target = min(own.target, target)
                self.causes[name] = "its longest prompts alone take longer than ttft"
                self.hopeless.add(name)

    def _lower_unkept(self, plan: Plan) -> bool:
        """Lower the targets of services that no template simulated so far keeps; say whether any was."""
        sizing = self.sizing
        lost = [
            name
            for name, share in self.first.served_fraction.items()
            if share > 0.0 and plan.served_fraction.get(name, 0.0) <= 0.0
        ]
        for name in lost:
            max_lost = dict.fromkeys(Phase, 0.0)
            for (role, _), curve in sizing.curves.items():
                of_role = parse_role(role)
                if of_role.model == name:
                    max_lost[of_role.phase] = max(max_lost[of_role.phase], curve.most)
            reached = max(max_lost[Phase.BOTH], max_lost[Phase.PREFILL] * max_lost[Phase.DECODE])
            own = sizing.allowances[name]
            # With both phases at their best; a little less can be had with some load.
            own.target = max(0.01, min(own.target, reached - 0.5 * (1.0 - reached)) - 0.01)
            self.causes.setdefault(
                name, "its longest prompts take most of ttft alone, the more so behind others"
            )
        return bool(lost)

    def _stamp(self, plan: Plan) -> Plan:
        """The plan with what requests keep on arrivals that none was sized with."""
        from atoll.plan.validate.check import check

        promises = look_at(
            plan,
            self.problem,
            self.catalog,
            self.deadline,
            self.causes,
            first_seed=self.fresh_seed,
        )
        # A plan that is chosen for what it keeps on these would be flattered by them.
        self.fresh_seed += 100
        stamped = plan.model_copy(
            update={
                "notes": tuple(dict.fromkeys((*plan.notes, *describe_simulated(plan)))),
                "problem_hash": self.problem.content_hash(),
                "promises": promises,
            }
        )
        stamped = self._prove(stamped)
        check(stamped, self.problem)
        return stamped

    def _prove(self, plan: Plan) -> Plan:
        """The plan with its bounds: with simulated capacities, and by the capacity model."""
        objective, capacity, bound = plan.objective or 0.0, self.first.bound, self.bound
        beyond = plan.status == "partial" or any(one.simulated for one in plan.instances)
        if beyond and capacity is not None and capacity > objective:
            # Of the larger share of demand that capacity alone would serve, or of instances that carry less.
            capacity = None
        bound = None if bound is None else min(bound, objective)
        gap = None if bound is None else (1.0 - bound / objective if objective > 0.0 else 0.0)
        # The bound is on plans that keep their promises.
        kept = all(promise.is_kept for promise in plan.promises)
        proven = kept and gap is not None and gap <= PROVEN_GAP
        status = plan.status
        if status in ("optimal", "feasible"):
            status = "optimal" if proven else "feasible"
        return plan.model_copy(
            update={"bound": bound, "gap": gap, "status": status, "capacity_bound": capacity}
        )


class _SpotProver(_Prover):
    """The search for a plan that keeps its promises with spot nodes lost, after one that does without."""

    def __init__(self, problem: Problem, request: PlanRequest, calm: _Prover) -> None:
        super().__init__(problem, request)
        self.calm = calm
        self.first, self.simple, self.bound = calm.first, calm.simple, calm.bound
        self.causes, self.sizing, self._more = calm.causes, calm.sizing, calm._more
        self.simulations, self.fresh_seed = calm.simulations, calm.fresh_seed

    def keep(self, found: Plan) -> Plan:
        """Return the cheapest plan found that keeps its promises, or the one that comes closest."""
        # What it keeps with nodes lost is not known yet.
        known: dict[str, object] = {"problem_hash": self.problem.content_hash(), "promises": ()}
        if found.status == "optimal":
            known["status"] = "feasible"
        if not found.instances or found.cut_short:
            return found.model_copy(update=known)
        late = False
        try:
            verdict = self._see(found)
            # Where promises are broken with all nodes there, spare ones are no remedy.
            if verdict.short and self.calm.best is not None:
                self._add_spare(found, verdict)
            if self.best is None and self.closest is not None:
                return self._stamp(self.closest[1])
        except SimulationCutShortError:
            late = True
        best = self.best
        if best is None:
            return found.model_copy(update={**known, "cut_short": True})
        # What surviving costs was said of the plan that loses nothing else.
        said = [note for note in found.notes if note.startswith(_SURVIVING)]
        notes = tuple(dict.fromkeys((*best.notes, *said)))
        best = best.model_copy(update={"notes": notes})
        more = (best.objective or 0.0) - (found.objective or 0.0)
        if more > 0.0:
            note = f"the price of spot nodes that are lost: ${more:.2f}/h"
            best = best.model_copy(update={"notes": (*best.notes, note)})
        return best.model_copy(update={"cut_short": True}) if late else best

    def _see(self, plan: Plan) -> TrialOutcome:
        """Simulate a plan with losses."""
        short = self._find_short(plan)
        kept = {name: one.both for name, one in self._tried[_standing(plan)].items()}
        return TrialOutcome(frozenset(short), kept)

    def _add_spare(self, found: Plan, verdict: TrialOutcome) -> None:
        """Search for plans with more than is needed, or less of it on spot; then for smaller ones."""
        self._settle()
        self._sized = any(self.sizing.share(one.role) > 0.0 for one in found.instances)
        search = Redundancy(self.problem, self.catalog, found, verdict, self._plan_spare, self._see)
        if search.find() is not None:
            self._shrink()
            return
        said = f"spot nodes are lost too often: of {search.trials + 1} plans simulated, with more "
        said += "nodes than are needed or with fewer on spot, none keeps more"
        self.causes |= dict.fromkeys(sorted(verdict.short), said)

    def _plan_spare(self, spare: Spare, services: frozenset[str]) -> Plan:
        """Plan with something to spare, of templates that were simulated where others were."""
        gap = max(self.effort.gap, _SAME_COST)
        if not self._sized:
            asked = spare.ask(self.calm.problem, services)
            return self._plan(asked, replace(self.effort, gap=gap))
        sizing = self.sizing
        asked = spare.ask(sizing.problem, services)
        for _ in range(_SIMPLE_ROUNDS):
            effort = replace(self.effort, derating=sizing.derating("likely"), gap=gap)
            used = self._used(self._plan(asked, effort))
            new = {key: one for key, one in used.items() if key not in sizing.curves}
            if not self._measure(new, used):
                break
        return self._plan(asked, replace(self.effort, derating=sizing.derating("nothing"), gap=gap))


def _standing(plan: Plan, service: str | None = None) -> object:
    """Return the identity of a plan or a service for simulation: its instances and routes."""
    own = [i for i in plan.instances if service is None or i.service == service]
    stand = tuple(sorted((i.id, i.placement_key) for i in own))
    routes = [r for r in plan.routes if service is None or r.service == service]
    return stand, tuple((r.instances, round(r.share, 6)) for r in routes)
