"""The cheapest plan whose promises a share of requests keeps: capacities found by simulation.

Templates are planned with a share of their analytic throughput: the largest at which enough requests keep the
promise of that phase, found by simulating one instance alone (`loads`). Only templates that a plan uses are
simulated, with a few that it would use next. Others count as those like them on average, until a plan uses
none of them; then they count with nothing, which gives the plan, and at last with all of their analytic
throughput, which gives a bound for the *simulated* capacities. In between the whole plan is simulated, and
how many requests each phase may lose is adjusted until the target is met with little to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from atoll.core.ids import Phase, parse_role
from atoll.plan.plan import PROVEN_GAP, KeptPromise
from atoll.prove.deadline import SimulationCutShortError, keep_deadline
from atoll.prove.loads import LoadCurve, LoadJob, measure_loads
from atoll.prove.losses import reserves, single_losses, spot_losses
from atoll.prove.prospects import Key, find_prospects
from atoll.solve.derating import Derating, node_set
from atoll.solve.effort import Countdown, Effort

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.perf.constants import ConstantTable
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem, Service
    from atoll.sim.options import Failure
    from atoll.sim.result import ServiceSummary

Unknown = Literal["all", "likely", "nothing"]
Solve = Callable[["Problem", Effort, float], "Plan"]
Say = Callable[[str], None]

_FOR_PROMPTS = 0.85
"""Of the requests that may break a promise where phases run apart, the share that may wait too long for their
first token. Queues grow smoothly with load and decoding has a cliff, so little is left for it."""
_ROUNDS = 24
_AHEAD = 6
"""Templates of each role that are simulated before a plan uses them, in a round."""
_SLACK = 0.10
_CLOSE = 5e-3
"""A plan of simulated templates so close to the bound is taken, as a share."""
_ENOUGH = 3
"""After so many templates of a role with so many nodes others of them are taken to be like them."""
_TRIALS = 6
_MARGIN = 0.3
"""A plan is taken where so much of what may be lost is to spare, in simulation."""
_PLENTY = 0.5
"""With more than this to spare, more may be lost."""
_TRIAL_SEEDS = (1, 2, 3)
_FRESH_SEEDS = (101, 102, 103, 104, 105)
_PLACEMENTS, _TIGHTER = 4, 0.85
"""How often layers are placed anew on a cluster, and how much tighter promises are each time."""
_LOST_S, _LOSS_SEED = 60.0, 111
"""When a node is lost in a simulation, and the arrivals it is lost among."""
_T95 = 2.776
"""Student's t for 95 % and as many fresh seeds."""
_REQUESTS = 6_000
"""Requests simulated per seed of the service that is asked least often, within limits."""
_LEAST_S, _MOST_REQUESTS, _MOST_TOKENS = 300.0, 120_000, 6e6
_LEAST_TARGETS = (0.9, 0.75, 0.5, 0.25, 0.1)
_MOST_LOST = 0.9


def see_promises(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    *,
    deadline: Countdown | None = None,
    say: Say = lambda _text: None,
) -> Plan:
    """Return a plan with what requests keep of its promises, in simulation, when it meets its demand.

    Where too few do, it also says at which share of the demand enough of them would.
    """
    if not plan.instances:
        return plan
    say("simulating arrivals")
    try:
        promises = look_at(plan, problem, catalog, deadline)
        if all(promise.is_kept for promise in promises):
            return plan.model_copy(update={"promises": promises})
        share = _largest_share(plan, problem, catalog, deadline, say)
    except SimulationCutShortError:
        return plan.model_copy(update={"cut_short": True})
    helps = (
        f"would keep it at {share:.0%} of the demand" if share > 0 else "at no share of the demand"
    )
    return plan.model_copy(
        update={
            "promises": tuple(
                p if p.is_kept else p.model_copy(update={"cause": f"{p.cause}; {helps}"})
                for p in promises
            )
        }
    )


def keep_on_cluster(
    problem: Problem,
    catalog: Catalog,
    place: Callable[[Problem], Plan],
    *,
    deadline: Countdown,
    say: Say = lambda _text: None,
) -> Plan:
    """Return a placement that keeps its promises for enough requests, or the one that comes closest.

    Machines are given, so there is no more to rent: where too few requests keep a promise, `place` is asked
    for pipelines that would keep a tighter one, shorter or less loaded.
    """
    from atoll.plan.validate.check import check

    say("placing")
    first = plan = place(problem)
    tighter = problem
    best: tuple[float, Plan] | None = None
    for number in range(1, _PLACEMENTS + 1):
        if not plan.instances or (number > 1 and plan.status == "partial"):
            break
        plan = plan.model_copy(update={"problem_hash": problem.content_hash()})
        check(plan, problem, catalog)
        say("simulating arrivals")
        try:
            promises = look_at(plan, problem, catalog, deadline)
        except SimulationCutShortError:
            break
        plan = plan.model_copy(update={"promises": promises})
        worst = min((p.kept - p.target for p in promises), default=0.0)
        if best is None or worst > best[0]:
            best = worst, plan
        if worst >= 0.0 or number == _PLACEMENTS or deadline.left < 0.3 * deadline.seconds:
            break
        tighter = _tighten(tighter, promises)
        say(f"placing with tighter promises, try {number + 1}")
        plan = place(tighter)
    if best is None:
        return first.model_copy(update={"cut_short": True}) if first.instances else first
    if best[0] >= 0.0:
        return best[1]
    return see_promises(best[1], problem, catalog, deadline=deadline, say=say)


def _tighten(problem: Problem, promises: tuple[KeptPromise, ...]) -> Problem:
    """The problem with tighter promises where too few requests keep them."""
    seen = {promise.service: promise for promise in promises}
    services = []
    for service in problem.services:
        found = seen.get(service.name)
        if found is not None and not found.is_kept:
            update = {
                "ttft_s": service.ttft_s * (_TIGHTER if found.kept_ttft < found.target else 1.0),
                "tpot_s": service.tpot_s * (_TIGHTER if found.kept_tpot < found.target else 1.0),
            }
            service = service.model_copy(update=update)
        services.append(service)
    return problem.replace(services=tuple(services))


def _largest_share(
    plan: Plan, problem: Problem, catalog: Catalog, deadline: Countdown | None, say: Say
) -> float:
    """The largest share of the demand, in sixteenths, at which every service keeps enough promises."""
    low, high = 0, 16
    while high - low > 1:
        middle = (low + high) // 2
        say(f"simulating {middle / 16:.0%} of the demand")
        less = problem.replace(
            services=tuple(
                s.model_copy(update={"rate_per_s": s.rate_per_s * middle / 16})
                for s in problem.services
            )
        )
        kept = mean_kept(
            simulate_kept(plan, less, catalog, seed, deadline) for seed in _TRIAL_SEEDS
        )
        good = all(one.both >= problem.service(name).attainment for name, one in kept.items())
        low, high = (middle, high) if good else (low, middle)
    return low / 16


def look_at(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    deadline: Countdown | None = None,
    causes: Mapping[str, str] | None = None,
) -> tuple[KeptPromise, ...]:
    """Return what requests of each service keep on arrivals that no plan was sized with."""
    runs = [simulate_kept(plan, problem, catalog, seed, deadline) for seed in _FRESH_SEEDS]
    after = kept_after_loss(plan, problem, catalog, deadline)
    return tuple(
        _promise(
            service,
            [run[service.name] for run in runs],
            (causes or {}).get(service.name),
            after.get(service.name),
        )
        for service in problem.services
        if all(service.name in run for run in runs)
    )


def kept_after_loss(
    plan: Plan, problem: Problem, catalog: Catalog, deadline: Countdown | None = None
) -> dict[str, KeptShares]:
    """Return by service what requests keep with the node lost that hurts it most; nothing if not asked."""
    if not problem.limits.survive:
        return {}
    worst: dict[str, KeptShares] = {}
    for loss in single_losses(plan, _LOST_S):
        kept = simulate_kept(plan, problem, catalog, _LOSS_SEED, deadline, (loss,))
        for name, one in kept.items():
            worst[name] = min(worst.get(name, one), one, key=lambda shares: shares.both)
    return worst


@dataclass(frozen=True)
class KeptShares:
    """The shares of a service's requests that kept both promises, and each of them."""

    both: float
    ttft: float
    tpot: float


@dataclass
class _Allowance:
    """How many requests of a service may be lost by its phases, as multiples of their due.

    `good` and `bad` are the largest multiple for prompts that was enough and the least that was not.
    """

    target: float
    prompts: float = 1.0
    answers: float = 1.0
    good: float = 0.0
    bad: float = math.inf

    def share(self, phase: Phase) -> float:
        """The share of requests that must keep the promise of a phase."""
        lost = 1.0 - self.target
        if phase is Phase.PREFILL:
            lost *= _FOR_PROMPTS * self.prompts
        elif phase is Phase.DECODE:
            lost *= (1.0 - _FOR_PROMPTS) * self.answers
        else:
            lost *= self.prompts
        return 1.0 - min(_MOST_LOST, lost)


@dataclass
class _Sizing:
    """What was found of templates so far, and how many requests may be lost."""

    problem: Problem
    allowances: dict[str, _Allowance]
    reserve: dict[str, float] = field(default_factory=dict)
    """By role, the share of what instances carry that may be used, the rest being held ready for losses."""
    curves: dict[Key, LoadCurve] = field(default_factory=dict)
    instances: dict[Key, Instance] = field(default_factory=dict)

    def share(self, key: Key) -> float:
        """The share of requests that must keep the promise of a template's role."""
        role = parse_role(key[0])
        return self.allowances[role.model].share(role.phase)

    def derating(self, unknown: Unknown) -> Derating:
        """What templates carry; those that nobody has simulated all, nothing, or what others like them do."""
        shares = {
            key: curve.load(self.share(key)) * self.reserve.get(key[0], 1.0)
            for key, curve in self.curves.items()
        }
        if unknown != "likely":
            return Derating(shares, default=0.0 if unknown == "nothing" else 1.0)
        seen: dict[tuple[str, int], list[float]] = {}
        for (role, nodes), share in shares.items():
            seen.setdefault((role, sum(number for _, number in nodes)), []).append(share)
        # Somewhat better than most, so that kinds of templates are not given up after a few bad ones.
        priors = {
            like: min(1.0, max(0.05, 0.5 * (float(np.mean(some)) + max(some))))
            for like, some in seen.items()
            if len(some) >= _ENOUGH
        }
        return Derating(shares, priors)


def keep_promises(
    problem: Problem,
    catalog: Catalog,
    solve: Solve,
    effort: Effort,
    *,
    deadline: Countdown,
    say: Say = lambda _text: None,
) -> Plan:
    """Return the cheapest plan found whose promises enough of every service's requests keep.

    `solve` plans a problem with some effort in so many seconds. Where a target cannot be met the plan comes
    as close as was found, and says why. The deadline ends it with the best plan so far, `cut_short`.
    """
    return _Prover(problem, catalog, solve, effort, deadline, say).run()


class _Prover:
    """Where the search for a plan that keeps its promises stands."""

    def __init__(
        self,
        problem: Problem,
        catalog: Catalog,
        solve: Solve,
        effort: Effort,
        deadline: Countdown,
        say: Say,
    ) -> None:
        self.problem, self.catalog, self.deadline, self.say = problem, catalog, deadline, say
        self._solve, self.effort = solve, effort
        self.causes: dict[str, str] = {}
        allowed = {s.name: _Allowance(s.attainment) for s in problem.services}
        self.sizing = _Sizing(_sized(problem, allowed), allowed)
        self.simulations = 0
        self.unsafe_usd: float | None = None
        self._tried: dict[object, dict[str, KeptShares]] = {}

    def run(self) -> Plan:
        self.say("planning for capacity")
        first = self._plan(self.problem, self.effort)
        if not first.instances:
            return first
        self._lower_hopeless(first)
        good: list[tuple[float, int, Plan]] = []
        closest: tuple[float, Plan] | None = None
        late = False
        try:
            # Nothing is cheaper than capacity for half of all requests; it may do.
            if not self._fall_short(self._try(first, 0)):
                return self._take([first], first, late=False)
            for trial in range(1, _TRIALS + 1):
                plan = self._size(trial)
                if self._lower_unkept(plan, first):
                    plan = self._size(trial)
                if good and (plan.objective or 0.0) >= min(cost for cost, _, _ in good) * (
                    1.0 - _CLOSE
                ):
                    # Letting more be lost saves nothing.
                    break
                kept = self._try(plan, trial)
                short = self._fall_short(kept)
                worst = min((k.both - self._target(n) for n, k in kept.items()), default=0.0)
                if not short:
                    good.append((plan.objective or 0.0, trial, plan))
                if closest is None or worst > closest[0]:
                    closest = worst, plan
                if not self._adjust(kept, short):
                    break
        except SimulationCutShortError:
            late = True
        # The cheapest that also holds on fresh arrivals.
        plans = [plan for _, _, plan in sorted(good, key=lambda one: one[:2])]
        if closest is not None:
            plans.append(closest[1])
        return self._take(plans, first, late=late)

    def _plan(self, problem: Problem, effort: Effort) -> Plan:
        return self._solve(problem, effort, self.deadline.share(0.5))

    def _target(self, service: str) -> float:
        return self.sizing.allowances[service].target

    def _fall_short(self, kept: Mapping[str, KeptShares]) -> set[str]:
        return {n for n, k in kept.items() if k.both < _more(self._target(n), _MARGIN)}

    def _try(self, plan: Plan, trial: int) -> dict[str, KeptShares]:
        """Simulate a plan, unless it was before."""
        key = _standing(plan)
        if key not in self._tried:
            self.say(f"trial {trial}: simulating the plan")
            kept = mean_kept(
                simulate_kept(plan, self.problem, self.catalog, seed, self.deadline)
                for seed in _TRIAL_SEEDS
            )
            after = kept_after_loss(plan, self.problem, self.catalog, self.deadline)
            self._tried[key] = {
                name: min(one, after.get(name, one), key=lambda shares: shares.both)
                for name, one in kept.items()
            }
        kept = self._tried[key]
        shares = ", ".join(f"{name} {one.both:.1%}" for name, one in kept.items())
        self.say(f"trial {trial}: ${plan.usd_per_hour:.2f}, kept: {shares}")
        return kept

    def _adjust(self, kept: Mapping[str, KeptShares], short: set[str]) -> bool:
        """Let services that fall short lose less and those with plenty to spare more; False: leave it."""
        changed = False
        for name, one in kept.items():
            own = self.sizing.allowances[name]
            may = 1.0 - own.target
            if name in short:
                if 1.0 - one.tpot > 0.5 * may:
                    own.answers = max(0.02, own.answers * 0.5)
                    changed = True
                if 1.0 - one.ttft > 0.5 * may or one.tpot >= 1.0 - 0.5 * may:
                    own.bad = min(own.bad, own.prompts)
                    step = float(np.clip(0.7 * may / max(1.0 - one.both, 1e-6), 0.3, 0.85))
                    own.prompts = max(0.02, own.prompts * step)
                    changed = True
            elif not short and one.both > _more(own.target, _PLENTY):
                own.good = max(own.good, own.prompts)
                more = min(6.0, own.prompts * 2.5)
                if more < 0.95 * own.bad and more > own.prompts:
                    own.prompts = more
                    changed = True
        return changed

    def _size(self, trial: int) -> Plan:
        """Plan, and simulate what the plan uses and was not simulated, until there is no such thing."""
        from atoll.solve.templates.library import template_libraries

        sizing = self.sizing
        for number in range(1, _ROUNDS + 1):
            likely = sizing.derating("likely")
            hoped = self._plan(
                sizing.problem,
                replace(self.effort, derating=likely, gap=max(self.effort.gap, _CLOSE)),
            )
            used = self._used(hoped)
            new = {key: one for key, one in used.items() if key not in sizing.curves}
            self.say(
                f"trial {trial}, round {number}: ${hoped.usd_per_hour:.2f}, "
                f"{self.simulations} simulations"
            )
            if new:
                libraries = template_libraries(
                    sizing.problem, self.catalog, cached=self.effort.cached
                )
                roles = sorted({role for role, _ in new})
                new |= find_prospects(
                    sizing.problem, self.catalog, libraries, likely, roles, _AHEAD, _SLACK
                )
            if not self._measure(new, used):
                break
        while True:
            effort = replace(self.effort, derating=sizing.derating("nothing"))
            plan = self._without_reserve(self._plan(sizing.problem, effort))
            if not self._measure({}, self._used(plan)) and not self._hold_ready(plan):
                return plan

    def _hold_ready(self, plan: Plan) -> bool:
        """Have roles hold their largest instance ready for a loss; say whether that asks for more."""
        if not self.problem.limits.survive:
            return False
        self.unsafe_usd = plan.usd_per_hour if self.unsafe_usd is None else self.unsafe_usd
        now = self.sizing.reserve
        wanted = reserves(plan, self.problem)
        less = {role: share for role, share in wanted.items() if share < now.get(role, 1.0) - 1e-3}
        self.sizing.reserve = now | less
        return bool(less)

    def _without_reserve(self, plan: Plan) -> Plan:
        """The plan with all that its instances carry, what is held ready included."""
        held = self.sizing.reserve
        if not held:
            return plan
        instances = []
        for one in plan.instances:
            share = held.get(one.role, 1.0)
            flows = tuple(f.model_copy(update={"per_s": f.per_s / share}) for f in one.flows)
            update = {"flows": flows, "throughput_per_s": one.throughput_per_s / share}
            instances.append(one.model_copy(update=update))
        return plan.model_copy(update={"instances": tuple(instances)})

    def _bound(self) -> float | None:
        """The least that any plan costs, templates that nobody has simulated carrying all they might."""
        effort = replace(self.effort, derating=self.sizing.derating("all"), gap=_CLOSE)
        return self._plan(self.sizing.problem, effort).bound

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
        some = False
        while True:
            jobs: list[tuple[Key, LoadJob]] = []
            for key in sorted({*new, *used}):
                step = sizing.curves[key].next_step(sizing.share(key))
                if step is not None:
                    jobs.append((key, LoadJob(sizing.instances[key], step)))
            if not jobs:
                return some
            some = True
            self.simulations += len(jobs)
            kept = measure_loads(
                sizing.problem,
                self.catalog,
                [job for _, job in jobs],
                seed=self.problem.settings.seed,
                watch=keep_deadline(self.deadline),
            )
            for (key, job), share in zip(jobs, kept, strict=True):
                sizing.curves[key].kept[job.step] = share

    def _lower_hopeless(self, first: Plan) -> None:
        """Lower the targets of services whose long prompts no instance answers in time."""
        sizing = self.sizing
        for target in _LEAST_TARGETS:
            plan = self._plan(sizing.problem, replace(self.effort, gap=0.05))
            lost = {
                name
                for name, share in plan.served_fraction.items()
                if share <= 0.0 < first.served_fraction.get(name, 0.0)
            }
            if not lost:
                return
            for name in lost:
                own = sizing.allowances[name]
                own.target = min(own.target, target)
                self.causes[name] = "its longest prompts alone take longer than ttft"
            sizing.problem = _sized(self.problem, sizing.allowances)

    def _lower_unkept(self, plan: Plan, first: Plan) -> bool:
        """Lower the targets of services that no template simulated so far keeps; say whether any was."""
        sizing = self.sizing
        lost = [
            name
            for name, share in first.served_fraction.items()
            if share > 0.0 and plan.served_fraction.get(name, 0.0) <= 0.0
        ]
        for name in lost:
            most = dict.fromkeys(Phase, 0.0)
            for (role, _), curve in sizing.curves.items():
                of_role = parse_role(role)
                if of_role.model == name:
                    most[of_role.phase] = max(most[of_role.phase], curve.most)
            reached = max(most[Phase.BOTH], most[Phase.PREFILL] * most[Phase.DECODE])
            own = sizing.allowances[name]
            # With both phases at their best; a little less can be had with some load.
            own.target = max(0.01, min(own.target, reached - 0.5 * (1.0 - reached)) - 0.01)
            self.causes.setdefault(
                name, "its longest prompts take most of ttft alone, the more so behind others"
            )
        return bool(lost)

    def _take(self, plans: list[Plan], first: Plan, *, late: bool) -> Plan:
        """Return the first plan that keeps its promises on fresh arrivals, or the one that comes closest."""
        best: tuple[float, Plan] | None = None
        seen: set[object] = set()
        for plan in plans:
            key = _standing(plan)
            if key in seen:
                continue
            seen.add(key)
            self.say("simulating fresh arrivals")
            try:
                stamped = self._stamp(plan, first)
            except SimulationCutShortError:
                break
            worst = min((p.kept - self._target(p.service) for p in stamped.promises), default=0.0)
            if worst >= 0.0:
                best = worst, stamped
                break
            if best is None or worst > best[0]:
                best = worst, stamped
        found = best[1] if best is not None else (plans[0] if plans else first)
        if not late and best is not None:
            return found
        return found.model_copy(
            update={"cut_short": True, "problem_hash": self.problem.content_hash()}
        )

    def _stamp(self, plan: Plan, first: Plan) -> Plan:
        from atoll.plan.validate.check import check

        promises = look_at(plan, self.problem, self.catalog, self.deadline, self.causes)
        objective = plan.objective or 0.0
        bound = first.bound if plan is first else self._bound()
        bound = None if bound is None else min(bound, objective)
        gap = None if bound is None else (1.0 - bound / objective if objective > 0.0 else 0.0)
        status = plan.status
        if status == "optimal" and (gap is None or gap > PROVEN_GAP):
            status = "feasible"
        notes = plan.notes
        if self.unsafe_usd is not None:
            more = plan.usd_per_hour - self.unsafe_usd
            notes = (*notes, f"the price of surviving the loss of a node: ${more:.2f}/h")
        stamped = plan.model_copy(
            update={
                "notes": notes,
                "problem_hash": self.problem.content_hash(),
                "promises": promises,
                "bound": bound,
                "gap": gap,
                "status": status,
                "capacity_bound": first.bound,
            }
        )
        check(stamped, self.problem)
        return stamped


def _standing(plan: Plan) -> object:
    """What tells how a plan fares: where its instances stand and which ways requests take."""
    stand = tuple(sorted((i.id, i.placement_key) for i in plan.instances))
    return stand, tuple((r.instances, round(r.share, 6)) for r in plan.routes)


def _more(target: float, margin: float) -> float:
    """A share above a target by some of what may be lost."""
    return target + margin * (1.0 - target)


def simulate_kept(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    seed: int,
    deadline: Countdown | None = None,
    losses: tuple[Failure, ...] = (),
    *,
    constants: ConstantTable | None = None,
    requests: int = _REQUESTS,
) -> dict[str, KeptShares]:
    """Return by service what requests keep when the plan meets its demand and loses nodes.

    Spot nodes are lost as often as the problem says. There are so many `requests` of the service that is
    asked least often, within limits; `constants` are those of the performance model unless given.
    """
    from atoll.sim.api import simulate
    from atoll.sim.demand import demand_of
    from atoll.sim.options import SimOptions
    from atoll.workload.requests import collect

    rates = [service.rate_per_s for service in problem.services if service.rate_per_s > 0]
    if not rates:
        return {}
    tokens_per_s = sum(s.rate_per_s * s.lengths.output_mean for s in problem.services)
    most_s = min(_MOST_REQUESTS / sum(rates), _MOST_TOKENS / max(tokens_per_s, 1e-9))
    seconds = max(_LEAST_S, min(requests / min(rates), most_s))
    arrivals = collect(demand_of(problem, seconds), seed)
    options = SimOptions(
        seed=seed,
        from_s=max(seconds / 10.0, *(loss.time_s for loss in losses), 0.0),
        failures=(*losses, *spot_losses(plan, problem, seconds, seed)),
        constants=constants,
    )
    found = simulate(plan, problem, catalog, arrivals, options, progress=keep_deadline(deadline))
    return {one.name: _shares(one) for one in found.services if one.attainment is not None}


def _shares(one: ServiceSummary) -> KeptShares:
    return KeptShares(one.attainment or 0.0, one.attainment_ttft or 0.0, one.attainment_tpot or 0.0)


def mean_kept(runs: Iterable[Mapping[str, KeptShares]]) -> dict[str, KeptShares]:
    """Return the mean of several simulations, by service."""
    listed = list(runs)
    return {
        name: KeptShares(
            float(np.mean([run[name].both for run in listed])),
            float(np.mean([run[name].ttft for run in listed])),
            float(np.mean([run[name].tpot for run in listed])),
        )
        for name in listed[0]
        if all(name in run for run in listed)
    }


def _promise(
    service: Service, runs: list[KeptShares], cause: str | None, after: KeptShares | None
) -> KeptPromise:
    shares = np.array([run.both for run in runs])
    mean = float(shares.mean())
    half = _T95 * float(shares.std(ddof=1)) / math.sqrt(len(shares))
    ttft, tpot = (float(np.mean([getattr(run, k) for run in runs])) for k in ("ttft", "tpot"))
    least = mean if after is None else min(mean, after.both)
    if cause is None and mean >= service.attainment:
        cause = "too little is left with a node lost"
    elif cause is None:
        cause = "prompts wait too long" if ttft < tpot else "tokens come too slowly"
    return KeptPromise(
        service=service.name,
        target=service.attainment,
        kept=mean,
        low=max(0.0, mean - half),
        high=min(1.0, mean + half),
        kept_ttft=ttft,
        kept_tpot=tpot,
        kept_after_loss=None if after is None else after.both,
        cause=cause if least < service.attainment else None,
    )


def _sized(problem: Problem, allowed: Mapping[str, _Allowance]) -> Problem:
    """The problem with capacity for about these shares of requests."""
    return problem.replace(
        services=tuple(
            service.model_copy(update={"attainment": allowed[service.name].target})
            for service in problem.services
        ),
        settings=problem.settings.model_copy(update={"sized_for": "share"}),
    )
