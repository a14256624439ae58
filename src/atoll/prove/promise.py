"""The cheapest plan whose promises a share of requests keeps: capacities found by simulation.

Templates are planned with a share of their analytic throughput: the largest at which enough requests keep the
promise of that phase, found by simulating one instance alone (`loads`). Only templates that a plan uses are
simulated, with a few that it would use next; the others count in full, which is an upper bound. So when a
plan uses none of those any more it is the cheapest for the *simulated* capacities, and its bound holds for
them. Then the whole plan is simulated, and how many requests each phase may lose is adjusted until the
target is met with little to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from atoll.core.ids import Phase
from atoll.core.rng import stream
from atoll.plan.plan import KeptPromise
from atoll.prove.deadline import SimulationCutShortError, keep_deadline
from atoll.prove.loads import LoadCurve, LoadJob, STEPS, measure_loads
from atoll.prove.prospects import Key, find_prospects
from atoll.solve.derating import Derating, node_set
from atoll.solve.effort import Countdown, Effort

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem, Service

Solve = Callable[["Problem", Effort, float], "Plan"]
Say = Callable[[str], None]

_FOR_PROMPTS = 0.85
"""Of the requests that may break a promise where phases run apart, the share that may wait too long for their
first token. Queues grow smoothly with load and decoding has a cliff, so little is left for it."""
_ROUNDS = 80
_AHEAD = 6
"""Templates of each role that are simulated before a plan uses them, in a round."""
_SLACK = 0.10
_ROUGH_GAP = 0.01
"""How close to the cheapest plans are that only tell which templates to simulate."""
_ENOUGH, _ABOVE = 6, 1.15
"""After so many templates of a role with so many nodes, others of them count with so many times the best."""
_TRIALS = 6
_MARGIN = 0.2
"""A plan is taken where so much of what may be lost is to spare, in simulation."""
_PLENTY = 0.5
"""With more than this to spare, more may be lost by each phase."""
_SEEDS = 5
_PER_SERVICE = 8_000
_T95 = 2.776
"""Student's t for 95 % and `_SEEDS` - 1 degrees of freedom."""
_TAIL_DRAWS = 20_000
_LEAST_TARGETS = (0.9, 0.75, 0.5, 0.25, 0.1)


@dataclass
class _Sizing:
    """What was found of templates so far, and how much of a service's requests may be lost."""

    problem: Problem
    targets: dict[str, float]
    spare: dict[str, float] = field(default_factory=dict)
    """By service, how much more or less than its due each phase may lose, as a factor."""
    curves: dict[Key, LoadCurve] = field(default_factory=dict)
    instances: dict[Key, Instance] = field(default_factory=dict)

    def share(self, key: Key) -> float:
        """The share of requests that must keep the promise of a role."""
        service, _, phase = key[0].split("/")
        lost = (1.0 - self.targets[service]) * self.spare.get(service, 1.0)
        part = {Phase.PREFILL: _FOR_PROMPTS, Phase.DECODE: 1.0 - _FOR_PROMPTS}.get(Phase(phase), 1.0)
        return 1.0 - min(0.9, lost * part)

    @property
    def derating(self) -> Derating:
        shares = {key: curve.load(self.share(key)) for key, curve in self.curves.items()}
        seen: dict[tuple[str, int], list[float]] = {}
        for (role, nodes), share in shares.items():
            seen.setdefault((role, sum(number for _, number in nodes)), []).append(share)
        priors = {
            like: min(1.0, max(0.1, _ABOVE * max(some)))
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
        targets = {service.name: service.attainment for service in problem.services}
        self.sizing = _Sizing(_sized(problem, targets), targets)
        self.first: Plan | None = None
        self.simulated = 0

    def run(self) -> Plan:
        self.say("planning for capacity")
        self.first = self.solve(self.problem, self.effort)
        if self.first.status == "infeasible":
            return self.first
        self._lower_hopeless()
        best: tuple[Plan, Mapping[str, _Kept]] | None = None
        closest: tuple[float, Plan, Mapping[str, _Kept]] | None = None
        try:
            for trial in range(1, _TRIALS + 1):
                plan = self._size(trial)
                self.say(f"trial {trial}: simulating the plan")
                kept = simulate_kept(plan, self.problem, self.catalog, 1, self.deadline)
                self.say(" ".join(f"{n}: {k.share:.3f} ({k.ttft:.3f}, {k.tpot:.3f}; {self.sizing.spare.get(n,1):.2f})" for n, k in kept.items()))
                short = {n for n, k in kept.items() if k.share < self._wanted(n, _MARGIN)}
                worst = min((k.share - self.sizing.targets[n] for n, k in kept.items()), default=0)
                if not short and (best is None or plan.objective < best[0].objective):
                    best = plan, kept
                if closest is None or worst > closest[0]:
                    closest = worst, plan, kept
                if not self._adjust(kept, short, best is not None):
                    break
        except SimulationCutShortError:
            pass
        if best is None and closest is None:
            return self._late(self.first)
        plan = best[0] if best is not None else closest[1]
        return self._stamp(plan)

    def solve(self, problem: Problem, effort: Effort) -> Plan:
        return self._solve(problem, effort, self.deadline.share(0.5))

    def _wanted(self, service: str, margin: float) -> float:
        target = self.sizing.targets[service]
        return target + margin * (1.0 - target)

    def _adjust(self, kept: Mapping[str, _Kept], short: set[str], found: bool) -> bool:
        """Let services that fall short lose less and those with plenty to spare more; False: leave it."""
        spare = dict(self.sizing.spare)
        for name, one in kept.items():
            now = spare.get(name, 1.0)
            lost, may = 1.0 - one.share, 1.0 - self.sizing.targets[name]
            if name in short:
                # As far as it missed, and no more than half of what it may lose now.
                spare[name] = max(0.02, now * float(np.clip(0.75 * may / max(lost, 1e-6), 0.4, 0.8)))
            elif not short and one.share > self._wanted(name, _PLENTY):
                spare[name] = min(6.0, now * float(np.clip(0.75 * may / max(lost, 1e-3), 1.25, 2.0)))
        changed = spare != self.sizing.spare
        self.sizing.spare = spare
        return changed

    def _size(self, trial: int) -> Plan:
        """Plan until every template in use has been simulated."""
        from atoll.solve.templates.library import template_libraries

        sizing = self.sizing
        plan = None
        for number in range(1, _ROUNDS + 1):
            rough = replace(self.effort, derating=sizing.derating, gap=max(self.effort.gap, _ROUGH_GAP))
            plan = self.solve(sizing.problem, rough)
            used = self._used(plan)
            new = {key: one for key, one in used.items() if key not in sizing.curves}
            self.say(
                f"trial {trial}, round {number}: {len(new)} new of {len(used)} templates, "
                f"{self.simulated} simulations"
            )
            if new:
                libraries = template_libraries(
                    sizing.problem, self.catalog, cached=self.effort.cached
                )
                roles = sorted({role for role, _ in new})
                new |= find_prospects(
                    sizing.problem, self.catalog, libraries, sizing.derating, roles, _AHEAD, _SLACK
                )
            if not self._measure(new, used):
                if self.effort.gap >= _ROUGH_GAP:
                    return plan
                fine = replace(self.effort, derating=sizing.derating)
                plan = self.solve(sizing.problem, fine)
                used = self._used(plan)
                if not self._measure({k: i for k, i in used.items() if k not in sizing.curves}, used):
                    return plan
        assert plan is not None
        return plan

    def _used(self, plan: Plan) -> dict[Key, Instance]:
        """The templates of a plan, with their analytic throughput."""
        from atoll.solve.assembly import keep

        return {
            (i.role, node_set(i)): keep(self.sizing.problem, self.catalog, i) for i in plan.instances
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
            self.simulated += len(jobs)
            kept = measure_loads(
                self.problem,
                self.catalog,
                [job for _, job in jobs],
                seed=self.problem.settings.seed,
                watch=keep_deadline(self.deadline),
            )
            for (key, job), share in zip(jobs, kept, strict=True):
                sizing.curves[key].kept[job.step] = share

    def _lower_hopeless(self) -> None:
        """Lower the targets of services whose long prompts no instance answers in time."""
        sizing = self.sizing
        for target in _LEAST_TARGETS:
            plan = self.solve(sizing.problem, replace(self.effort, gap=_ROUGH_GAP))
            lost = {
                name
                for name, share in plan.served_fraction.items()
                if share <= 0.0 < self.first.served_fraction.get(name, 0.0)
            }
            if not lost:
                return
            for name in lost:
                sizing.targets[name] = min(sizing.targets[name], target)
                self.causes[name] = "its longest prompts alone take longer than ttft"
            sizing.problem = _sized(self.problem, sizing.targets)

    def _stamp(self, plan: Plan) -> Plan:
        from atoll.plan.validate.check import check

        seeds = [100 + k for k in range(_SEEDS)]
        runs = [
            simulate_kept(plan, self.problem, self.catalog, seed, self.deadline) for seed in seeds
        ]
        promises = tuple(
            _promise(service, [run[service.name] for run in runs], self.causes.get(service.name))
            for service in self.problem.services
            if all(service.name in run for run in runs)
        )
        stamped = plan.model_copy(
            update={
                "problem_hash": self.problem.content_hash(),
                "promises": promises,
                "capacity_bound": self.first.bound,
            }
        )
        check(stamped, self.problem)
        return stamped

    def _late(self, plan: Plan) -> Plan:
        return plan.model_copy(update={"cut_short": True})


@dataclass(frozen=True)
class _Kept:
    """The shares of a service's requests that kept both promises, and each of them."""

    share: float
    ttft: float
    tpot: float


def simulate_kept(
    plan: Plan, problem: Problem, catalog: Catalog, seed: int, deadline: Countdown | None = None
) -> dict[str, _Kept]:
    """Return by service what requests keep when the plan meets its demand; served ones only."""
    from atoll.sim.api import simulate
    from atoll.sim.demand import demand_of
    from atoll.sim.options import SimOptions
    from atoll.workload.requests import collect

    rates = [service.rate_per_s for service in problem.services if service.rate_per_s > 0]
    if not rates:
        return {}
    seconds = _PER_SERVICE / min(rates)
    seconds = max(300.0, min(seconds, 20 * _PER_SERVICE / max(rates)))
    requests = collect(demand_of(problem, seconds), seed)
    options = SimOptions(seed=seed, from_s=seconds / 10.0)
    found = simulate(plan, problem, catalog, requests, options, progress=keep_deadline(deadline))
    return {
        one.name: _Kept(one.attainment, one.attainment_ttft or 0.0, one.attainment_tpot or 0.0)
        for one in found.services
        if one.attainment is not None
    }


def _promise(service: Service, runs: list[_Kept], cause: str | None) -> KeptPromise:
    shares = np.array([run.share for run in runs])
    mean = float(shares.mean())
    half = _T95 * float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
    if cause is None and mean < service.attainment:
        cause = "queueing"
    return KeptPromise(
        service=service.name,
        target=service.attainment,
        kept=mean,
        low=max(0.0, mean - half),
        high=min(1.0, mean + half),
        kept_ttft=float(np.mean([run.ttft for run in runs])),
        kept_tpot=float(np.mean([run.tpot for run in runs])),
        cause=cause if mean < service.attainment else None,
    )


def _sized(problem: Problem, targets: Mapping[str, float]) -> Problem:
    """The problem with capacity for about these shares of requests."""
    return problem.replace(
        services=tuple(
            service.model_copy(update={"attainment": targets[service.name]})
            for service in problem.services
        ),
        settings=problem.settings.model_copy(update={"sized_for": "share"}),
    )
