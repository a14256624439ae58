"""What is said of promised plans, held against everything small that could be done instead.

Random small fleets (`promise_fleets`: rented machines, a limit on spot, choices between models, any-to-any
models, clusters) are planned as `atoll plan` does. Cheaper plans are written down one by one without any
solver (`promise_rivals`), and the simulator judges the plan and them on arrivals that no plan was sized with.

cheaper_keeps       a plan more than 2 % cheaper surely keeps all promises
bound_false         a plan that keeps all promises, or one that capacities allow, costs less than a bound says
class_below_target  a class of requests is surely below its target, in a plan said to keep its promises
spot_false          more requests are served on spot than the limit allows, or an instance serves none
fast_silent         a heuristic's plan that is shown without a word on what is known of its price
mutants_missed      a broken plan that the validator lets pass
deadline_overrun_s_max   seconds by which planning took longer than its deadline
kept_denied         no plan, or one said to miss its promises, where one of three instances keeps them all
cut_short           plans that the deadline ended: they claim nothing about cheaper ones, so no fault is seen

What is sure: the 95 % confidence interval over seeds, of 900 s each, lies on one side of the target.
With `--results FILE` a case is written there as it ends and not run again.
"""

from __future__ import annotations

import io
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from scipy.special import stdtrit

from atoll.catalog.catalog import Catalog
from atoll.core.errors import AtollError, InputError
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem
from atoll.plan.proof import NO_BOUND
from atoll.plan.request_groups import list_groups
from atoll.plan.validate.check import validate
from atoll.prove.losses import spot_losses
from atoll.prove.planning import plan as make_plan
from atoll.report.plan.show import draw_plan, render_plan_page
from atoll.sim.api import simulate
from atoll.sim.problem_demand import demand_of
from atoll.sim.sim_options import SimOptions
from atoll.sim.sim_result import SimReport
from atoll.sim.tasks.from_plan import simulate_plan
from atoll.solve.family import family_of, solvers
from atoll.solve.plan_request import PlanRequest
from atoll.workload.requests import collect
from benchmarks.report import Figure
from tests.plan.validate.mutants import EVERY, OWN, families, stated
from tests.slow.plans.case_runs import CaseCounts, CaseOutcome, case_options, run_cases
from tests.slow.plans.promise_executors import list_executor_rivals
from tests.slow.plans.promise_fleets import kind_of, make_fleet
from tests.slow.plans.promise_rivals import CAPACITY_RULES, Rival, Yard
from tests.slow.verdict import conclude

COUNTS = CaseCounts(full=200, quick=5, quick_s=140.0)
CHEAPER = 0.02
"""Share by which a plan must be cheaper to count."""
DEADLINE_S = 240.0
SHORT_DEADLINES_S = (3.0, 6.0, 10.0)
SEED = 7_001
WINDOW_S = 900.0
_GLANCE_S = 240.0
_GLANCE_SLACK, _TRIAL_SLACK = 0.06, 0.01
"""Shares below the target at which a short simulation, and then a trial of two seeds, rules a plan out."""
_RUNS, _MANY_RUNS = 6, 16
"""Seeds that decide, and those where it is close."""
_SPOT_SLACK = 0.02
"""Share by which requests that find an instance full may add to those on spot."""
LIKELY, BELOW, OTHERS = 30, 15, 15
"""Rivals that are simulated: those that carry most by the model, of all and below the bound, and others."""
_SAME = 1e-6

FAULTS = (
    "cheaper_keeps",
    "bound_false",
    "class_below_target",
    "spot_false",
    "fast_silent",
    "mutants_missed",
    "kept_denied",
)
Shares = dict[str, list[float]]
"""By class (a service, or one of its classes) the shares of requests that kept their promises, run by run."""


@dataclass
class Outcome(CaseOutcome):
    """What was found of one case."""

    rivals: int = 0
    simulated: int = 0
    mutants: int = 0
    overrun_s: float = 0.0
    cut_short: bool = False
    cpu_s: float = 0.0


# Simulating


def targets_of(problem: Problem) -> dict[str, float]:
    """Return by class which share of its requests must keep their promises."""
    found: dict[str, float] = {}
    for service in problem.services:
        if service.rate_per_s <= 0.0:
            continue
        groups = list_groups(service)
        found |= {f"{service.name}: {group.name}": group.target for group in groups}
        if not groups:
            found[service.name] = service.target
    return found


def kept_by_class(
    plan: Plan, problem: Problem, catalog: Catalog, seconds: float, seed: int
) -> dict[str, float]:
    """Return by class the share of requests that kept their promises in one simulation."""
    from_s = seconds / 10.0
    if problem.graph_services:
        found = simulate_plan(
            plan, problem, catalog, duration_s=seconds, seed=seed, warm_up_s=from_s
        )
        kept = {f"{c.service}: {c.name}": c.kept_all for c in found.classes}
        lone = {s.name: f"{s.name}: {s.classes[0].name}" for s in problem.services}
        kept |= {name: kept.get(klass) for name, klass in lone.items()}
        return {name: share for name, share in kept.items() if share is not None}
    report = _simulate(plan, problem, catalog, seconds, seed)
    shares = {s.name: s.attainment for s in report.services}
    for service in report.services:
        shares |= {f"{service.name}: {group.name}": group.kept for group in service.groups}
    return {name: share for name, share in shares.items() if share is not None}


def _simulate(
    plan: Plan, problem: Problem, catalog: Catalog, seconds: float, seed: int
) -> SimReport:
    losses = spot_losses(plan, problem, seconds, seed)
    options = SimOptions(seed=seed, from_s=seconds / 10.0, failures=losses)
    return simulate(plan, problem, catalog, collect(demand_of(problem, seconds), seed), options)


def simulated_on_spot(
    plan: Plan, problem: Problem, catalog: Catalog, seed: int
) -> dict[str, float]:
    """Return by service which share of its tokens, of prompts or of answers, was computed on spot.

    What an instance cannot take goes to others, whatever share of requests routes would send there.
    """
    spot = {i.id for i in plan.instances if any(n.market == "spot" for n in i.nodes)}
    work: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    for node in _simulate(plan, problem, catalog, WINDOW_S, seed).nodes:
        # Of a pipeline the first node counts: all of them see the same tokens.
        if node.layers[0] == 0:
            on = node.instance in spot
            work[node.service, "prompts"][on] += node.prompt_tokens
            work[node.service, "answers"][on] += node.decode_tokens
    shares: dict[str, float] = defaultdict(float)
    for (service, _), tokens in work.items():
        share = tokens[True] / max(1, tokens.total())
        shares[service] = max(shares[service], share)
    return shares


class Judge:
    """Simulates plans of a problem on fresh arrivals and says what is sure."""

    def __init__(self, problem: Problem, catalog: Catalog) -> None:
        self.problem, self.catalog, self.simulated = problem, catalog, 0

    def _add(self, shares: Shares, plan: Plan, runs: Iterable[int]) -> None:
        for number in runs:
            found = kept_by_class(plan, self.problem, self.catalog, WINDOW_S, SEED + number)
            for name, share in found.items():
                shares[name].append(share)

    def surely_keeps(self, plan: Plan) -> bool:
        """Whether every class is above its target with its whole interval, and spot within its limit.

        And on other arrivals again: of thousands of rivals some are lucky with those that they are found by.
        """
        targets = targets_of(self.problem)
        self.simulated += 1
        try:
            glance = kept_by_class(plan, self.problem, self.catalog, _GLANCE_S, SEED - 1)
            # Queues that grow for good are short at first: a short run flatters.
            if any(glance.get(name, 1.0) < t - _GLANCE_SLACK for name, t in targets.items()):
                return False
            shares: Shares = defaultdict(list)
            self._add(shares, plan, range(2))
            means = {name: float(np.mean(some)) for name, some in shares.items()}
            if any(means.get(name, 0.0) < t - _TRIAL_SLACK for name, t in targets.items()):
                return False
            self._add(shares, plan, range(2, _RUNS))
            others: Shares = defaultdict(list)
            if _all_above(shares, targets):
                self._add(others, plan, range(_RUNS, _MANY_RUNS))
        except InputError:
            return False
        return _all_above(others, targets) and not self.beyond_spot(plan)

    def beyond_spot(self, plan: Plan) -> dict[str, float]:
        """Return the services of which more is computed on spot in simulation than the limit allows."""
        limit = self.problem.limits.spot_share
        if limit is None or self.problem.graph_services:
            return {}
        found = simulated_on_spot(plan, self.problem, self.catalog, SEED)
        return {name: share for name, share in found.items() if share > limit + _SPOT_SLACK}

    def find_below(self, plan: Plan) -> dict[str, tuple[float, float]]:
        """Return the classes that are surely below their targets: what they keep, and the target."""
        shares: Shares = defaultdict(list)
        self._add(shares, plan, range(_RUNS))
        targets = targets_of(self.problem)
        doubtful = any(np.mean(shares[name] or [0.0]) < t for name, t in targets.items())
        if doubtful:
            self._add(shares, plan, range(_RUNS, _MANY_RUNS))
        return {
            name: (float(np.mean(shares[name] or [0.0])), target)
            for name, target in targets.items()
            if _interval(shares[name])[1] < target
        }


def _all_above(shares: Shares, targets: Mapping[str, float]) -> bool:
    return all(_interval(shares[name])[0] >= target for name, target in targets.items())


def _interval(runs: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean, by Student's t."""
    if len(runs) < 2:
        return 0.0, 0.0
    spread = float(np.std(runs, ddof=1)) / float(np.sqrt(len(runs)))
    half = float(stdtrit(len(runs) - 1, 0.975)) * spread
    mean = float(np.mean(runs))
    return mean - half, mean + half


# One case


def run_case(seed: int) -> Outcome:
    """Plan the fleet of a seed and hold what is said against what is found."""
    outcome = Outcome(seed, kind_of(seed))
    cpu_s = time.process_time()
    problem = make_fleet(seed)
    catalog = problem.catalog()
    began_s = time.perf_counter()
    plan = make_plan(problem, PlanRequest(catalog=catalog, deadline_s=DEADLINE_S, error_bars=False))
    outcome.overrun_s = time.perf_counter() - began_s - DEADLINE_S
    outcome.status, outcome.usd_per_hour = plan.status, plan.objective
    outcome.bound, outcome.cut_short = plan.bound, plan.cut_short
    whole = plan.status in ("optimal", "feasible")
    kept = whole and all(promise.is_kept for promise in plan.promises)
    if kept:
        _check_classes(plan, problem, catalog, outcome)
        _check_spot(plan, problem, outcome)
        settled = problem.settled(plan.mixes).started_as(plan.engines)
        for name, share in Judge(settled, catalog).beyond_spot(plan).items():
            outcome.fault("spot_false", f"{name}: {share:.2%} on spot in simulation")
    _check_rivals(plan, problem, catalog, outcome, kept=kept)
    _check_fast(problem, catalog, outcome)
    _check_mutants(plan, problem, outcome)
    _check_deadline(problem, catalog, outcome)
    outcome.cpu_s = time.process_time() - cpu_s
    return outcome


def _check_classes(plan: Plan, problem: Problem, catalog: Catalog, outcome: Outcome) -> None:
    settled = problem.settled(plan.mixes).started_as(plan.engines)
    for name, (share, target) in Judge(settled, catalog).find_below(plan).items():
        outcome.fault("class_below_target", f"{name} keeps {share:.2%} of {target:.0%}")


def _check_spot(plan: Plan, problem: Problem, outcome: Outcome) -> None:
    """Count requests on spot by the plan's routes and paths, and see that every instance serves some."""
    limit = problem.limits.spot_share
    spot = {i.id for i in plan.instances if any(n.market == "spot" for n in i.nodes)}
    on: dict[str, float] = defaultdict(float)
    used: dict[str, float] = defaultdict(float)
    for route in plan.routes:
        on[route.service] += route.share if spot & {*route.instances} else 0.0
        for name in route.instances:
            used[name] += route.share
    for path in plan.paths:
        off = 1.0
        for step in path.steps:
            off *= 1.0 - sum(weight for name, weight in step.instances.items() if name in spot)
            for name, weight in step.instances.items():
                used[name] += path.share * weight
        klass = problem.service(path.service).klass(path.klass)
        on[path.service] += klass.share * path.share * (1.0 - off)
    for name, share in on.items():
        if limit is not None and share > limit + 1e-6:
            outcome.fault("spot_false", f"{name}: {share:.2%} on spot, {limit:.0%} allowed")
    for instance in plan.instances:
        if used[instance.id] <= 1e-6:
            outcome.fault("spot_false", f"{instance.id} serves nothing")


def _check_rivals(
    plan: Plan, problem: Problem, catalog: Catalog, outcome: Outcome, *, kept: bool
) -> None:
    objective = plan.objective if kept and plan.goal == "cost" else None
    if objective is not None and problem.cluster is None:
        under = objective * (1.0 - CHEAPER)
    elif kept:
        return  # a cluster that keeps its promises has nothing that is cheaper
    else:
        under = float("inf")
    yard = Yard(problem, catalog)
    if problem.graph_services:
        rivals = list(list_executor_rivals(problem, catalog, plan, under))
    else:
        rivals = list(yard.list_rivals(plan, under))
        if problem.cluster is None:
            _check_capacity_bound(plan, yard, outcome)
    outcome.rivals = len(rivals)
    cheapest: Rival | None = None
    for rival in _some(rivals, outcome.seed, plan.bound):
        if cheapest is not None and rival.usd_per_hour >= cheapest.usd_per_hour:
            continue
        judge = Judge(rival.problem.started_as(plan.engines), catalog)
        keeps = judge.surely_keeps(rival.plan)
        outcome.simulated += 1
        if keeps and not _broken(rival, problem, catalog):
            cheapest = rival
    if cheapest is None:
        return
    said = f"{cheapest.how}, ${cheapest.usd_per_hour:.3f}/h: {cheapest.in_words}"
    if objective is None:
        outcome.fault("kept_denied", f"{plan.status}; {said}")
        return
    if not plan.cut_short:
        outcome.fault("cheaper_keeps", f"${objective:.3f}/h planned, {said}")
    if plan.bound is not None and plan.bound > cheapest.usd_per_hour * (1.0 + _SAME):
        outcome.fault("bound_false", f"bound ${plan.bound:.3f}/h, {said}")


def _check_capacity_bound(plan: Plan, yard: Yard, outcome: Outcome) -> None:
    """Compare the bound by the capacity model with what an integer program of single pieces finds."""
    stated_usd = plan.capacity_bound if plan.promises else plan.bound
    least = None if stated_usd is None or plan.status == "partial" else yard.least_by_capacity()
    if stated_usd is not None and least is not None and stated_usd > least * (1.0 + _SAME) + 1e-9:
        text = f"bound by capacity ${stated_usd:.4f}/h, ${least:.4f}/h carries all by the model"
        outcome.fault("bound_false", text)


def _some(rivals: list[Rival], seed: int, bound: float | None) -> list[Rival]:
    """Those that carry most, of all and of those below the bound, and some of the others at random.

    Of plans on the same slices the one that carries most comes first, and the next only after all others.
    """
    ordered = sorted(rivals, key=lambda rival: (-rival.carries, rival.usd_per_hour))
    seen: Counter[Hashable] = Counter()
    ranks = []
    for rival in ordered:
        ranks.append(seen[rival.stands_on])
        seen[rival.stands_on] += 1
    by_rank = [ordered[n] for n in sorted(range(len(ordered)), key=lambda n: (ranks[n], n))]
    below = [r for r in by_rank if bound is not None and r.usd_per_hour < bound * (1.0 - _SAME)]
    likely = [*by_rank[:LIKELY], *below[:BELOW]]
    taken = {id(rival) for rival in likely}
    rest = [rival for rival in by_rank if id(rival) not in taken]
    chosen = np.random.default_rng([35, seed]).permutation(len(rest))[:OTHERS]
    found = {id(rival): rival for rival in [*likely, *(rest[int(n)] for n in sorted(chosen))]}
    return list(found.values())


def _broken(rival: Rival, problem: Problem, catalog: Catalog) -> bool:
    """Whether it breaks a rule that is not about what the model says that it carries."""
    asked = problem if rival.plan.mixes else rival.problem
    broken = validate(rival.plan, asked, catalog, same_problem=False)
    return any(b.rule not in CAPACITY_RULES for b in broken)


def _check_fast(problem: Problem, catalog: Catalog, outcome: Outcome) -> None:
    """See that plans of heuristics are shown, in the terminal and as a page, with what is known of them."""
    family = family_of(problem)
    for name in (*family.quick, *family.baselines):
        request = PlanRequest(
            solver=name,
            catalog=catalog,
            deadline_s=DEADLINE_S,
            error_bars=False,
            # Whether promises are simulated changes nothing of what is known of the price.
            capacity_only=name not in family.quick,
        )
        with suppress(AtollError):
            plan = make_plan(problem, request)
            silent = plan.instances and plan.bound is None and not _says_no_bound(plan, problem)
            if silent or (plan.bound is not None and name not in solvers(problem)[:1]):
                said = "without a word" if silent else f"with a bound of {plan.bound:g}"
                outcome.fault("fast_silent", f"{name}: shown {said}")


def _says_no_bound(plan: Plan, problem: Problem) -> bool:
    settled = problem.settled(plan.mixes)
    console = Console(width=160, markup=False, file=io.StringIO(), record=True)
    console.print(draw_plan(plan, settled, width=160))
    shown = (console.export_text(), render_plan_page(plan, settled))
    return all(NO_BOUND in text for text in shown)


def _check_mutants(plan: Plan, problem: Problem, outcome: Outcome) -> None:
    """Break the plan in every way that fits any plan."""
    if not plan.instances or plan.status == "partial":
        return
    whole = stated(plan, problem)
    for name, mutant in EVERY.items():
        try:
            broken = mutant.change(whole)
        except (IndexError, KeyError, ValueError, TypeError):
            continue  # it has nothing of the kind
        if broken == whole:
            continue
        outcome.mutants += 1
        if not validate(broken, problem):
            outcome.fault("mutants_missed", name)


def _check_deadline(problem: Problem, catalog: Catalog, outcome: Outcome) -> None:
    """Plan once more with little time."""
    seconds = SHORT_DEADLINES_S[outcome.seed % len(SHORT_DEADLINES_S)]
    began_s = time.perf_counter()
    with suppress(AtollError):
        make_plan(problem, PlanRequest(catalog=catalog, deadline_s=seconds))
    outcome.overrun_s = max(outcome.overrun_s, time.perf_counter() - began_s - seconds)


def count_family_mutants() -> tuple[int, list[str]]:
    """Return how many mutants of plans of all families there are, and which the validator lets pass."""
    number, missed = 0, []
    for family, (problem, plan) in families().items():
        for name, mutant in {**EVERY, **OWN[family]}.items():
            number += 1
            if not validate(mutant.change(plan), problem):
                missed.append(f"{family}: {name}")
    return number, missed


# Running


def _figures(outcomes: Mapping[int, Outcome], missed: int) -> list[Figure]:
    counts = Counter(name for one in outcomes.values() for name in one.faults)
    counts["mutants_missed"] = missed + sum(
        len(one.faults.get("mutants_missed", ())) for one in outcomes.values()
    )
    return [
        Figure("cases", len(outcomes), note="bar: at least 200 in a full run"),
        *(Figure(name, counts[name], 0) for name in FAULTS),
        Figure(
            "deadline_overrun_s_max",
            max(0.0, *(one.overrun_s for one in outcomes.values())) if outcomes else None,
            2,
        ),
        Figure("cut_short", sum(one.cut_short for one in outcomes.values())),
        Figure("rivals_simulated", sum(one.simulated for one in outcomes.values())),
        Figure("cpu_s", sum(one.cpu_s for one in outcomes.values())),
    ]


def main() -> None:
    """Run cases, those that are known left out, and print what was found."""
    chosen = case_options(__doc__ or "").parse_args()
    number, missed = count_family_mutants()
    print(f"  {number} kinds of broken plans, {len(missed)} pass the validator: {missed}")
    print("   seed kind        plan            $/h    bound rivals CPU-s")

    def row(one: Outcome) -> str:
        return f"{one.simulated:3d}/{one.rivals:<5d} {one.cpu_s:.0f}"

    conclude(_figures(run_cases(chosen, COUNTS, Outcome, run_case, row), len(missed)))


if __name__ == "__main__":
    main()
