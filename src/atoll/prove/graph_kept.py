"""Promises kept by requests of any-to-any services: simulated on several arrivals, and of executors alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from atoll.perf.components.class_loads import component_of
from atoll.plan.component_sharing import group_services
from atoll.plan.kept_groups import KeptGroup, pool_groups
from atoll.plan.plan import KeptPromise
from atoll.prove.kept import KeptSample, KeptShares, requests_to_judge
from atoll.prove.simulation_deadline import SimulationCutShortError, keep_deadline

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.perf.constants import ConstantTable
    from atoll.plan.plan import Instance, Plan
    from atoll.plan.problem import Problem, Service
    from atoll.sim.api import Progress
    from atoll.sim.sim_options import SimOptions
    from atoll.sim.tasks.mixed_report import MixedReport
    from atoll.sim.tasks.simulate_tasks import Routing
    from atoll.sim.tasks.task_fleet import Promises
    from atoll.sim.tasks.task_result import ClassResult, TaskResult
    from atoll.solve.deadline import Deadline

TTFT = "ttft"
TPOT = "tpot"
AHEAD = "ahead"
IMAGE = "image"
_REQUESTS = 4_000
_TRIAL_SEED = 1
_MAX_REQUESTS = 40_000
"""Requests in one simulation, at most, whatever it takes to judge the rarest class."""
_ALONE = 1_500
"""Requests in a simulation of one executor alone."""
_LOADS = (
    1.0,
    0.92,
    0.85,
    0.78,
    0.7,
    0.62,
    0.54,
    0.46,
    0.38,
    0.3,
    0.23,
    0.17,
    0.12,
    0.08,
    0.05,
    0.03,
)
"""How busy executors may be planned to be."""


@dataclass(frozen=True)
class GraphShares:
    """Shares of a service's requests that kept all promises, and each of them.

    `busy` is by executor the share of time that it worked; `groups` are what its classes kept.
    """

    all: float
    each: Mapping[str, float] = field(hash=False)
    busy: Mapping[str, float] = field(hash=False)
    groups: tuple[KeptGroup, ...] = ()

    def margin(self, target: float) -> float:
        """Return by how much the targets are exceeded: that of all requests, and those of classes.

        Classes count as far as enough of their requests came to tell.
        """
        own = [(g.kept or 0.0) - g.target for g in self.groups if g.is_kept is not None]
        return min(self.all - target, *own, 1.0)


def sample_graphs(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    *,
    first_seed: int,
    min_runs: int,
    max_runs: int,
    constants: ConstantTable | None = None,
    requests: int = _REQUESTS,
    deadline: Deadline | None = None,
    services: Collection[str] | None = None,
) -> dict[str, list[GraphShares]]:
    """Return by any-to-any service what requests keep, in `min_runs` to `max_runs` simulations.

    With `services` of those only, and of those that they share executors with. Services of which it is not
    sure whether they are above their target, with every class, are simulated more often. Where a class is
    rare there are more `requests` in a simulation, so that it can be judged. The deadline ends that;
    SimulationCutShortError if it comes before every service has been simulated once.
    """
    from atoll.sim.tasks.from_plan import simulate_services

    found: dict[str, list[GraphShares]] = {}
    watch = keep_deadline(deadline)
    for group in served_groups(plan, problem):
        if services is not None and not set(services) & {service.name for service in group}:
            continue
        runs: list[dict[str, GraphShares]] = []
        number = min(_MAX_REQUESTS, _requests_of(group, requests))
        while len(runs) < min_runs or (
            len(runs) < max_runs
            and not all(_sure([run[s.name] for run in runs], s.target) for s in group)
        ):
            try:
                # Most runs are over before they tell how far they are.
                watch(0, number, 0.0)
                result = simulate_services(
                    plan,
                    problem,
                    catalog,
                    [service.name for service in group],
                    requests=number,
                    seed=first_seed + len(runs),
                    constants=constants,
                    progress=watch,
                )
            except SimulationCutShortError:
                if not runs:
                    raise
                break
            runs.append({service.name: _shares(result, service) for service in group})
        found |= {s.name: [run[s.name] for run in runs] for s in group}
    return found


def served_groups(plan: Plan, problem: Problem) -> list[tuple[Service, ...]]:
    """Return the any-to-any services that a plan serves, in groups that share no executors."""
    served = [
        service.name
        for service in problem.graph_services
        if service.rate_per_s > 0.0 and plan.served_fraction.get(service.name, 1.0) > 0.0
    ]
    return [tuple(map(problem.service, names)) for names in group_services(plan, served)]


def _requests_of(group: Sequence[Service], least: int) -> int:
    """Return how many requests of all services of a group bring enough of each to judge it."""
    if len(group) == 1:
        return max(least, requests_to_judge(group[0]))
    total = sum(service.rate_per_s for service in group)
    return max(
        math.ceil(max(least, requests_to_judge(service)) * total / service.rate_per_s)
        for service in group
    )


def _shares(result: TaskResult, service: Service) -> GraphShares:
    """Shares over all classes of a service, each with as many requests as were judged of it, and of each."""
    own = [c for c in result.classes if c.service == service.name]
    promised = [c for c in own if c.kept_all is not None]
    each: dict[str, float] = {}
    for name in (TTFT, TPOT, AHEAD, IMAGE):
        if any(name in c.kept for c in promised):
            # Who is promised nothing of the kind keeps it: fewer can keep all promises than each.
            each[name] = _weigh(promised, [c.kept.get(name, 1.0) for c in promised])
    busy = {executor.name: executor.busy for executor in result.executors}
    kept = _weigh(promised, [c.kept_all or 0.0 for c in promised])
    return GraphShares(kept, each, busy, result.judge_classes(service))


def _weigh(classes: list[ClassResult], shares: list[float]) -> float:
    counts = [max(1, c.arrived) for c in classes]
    return float(np.average(shares, weights=counts)) if classes else 1.0


def mean_of(runs: list[GraphShares]) -> GraphShares:
    """Return the mean of several simulations."""
    # A run may have no request of a rare class, and so of its promise.
    names = sorted({name for run in runs for name in run.each})
    return GraphShares(
        float(np.mean([run.all for run in runs])),
        {
            name: float(np.mean([run.each[name] for run in runs if name in run.each]))
            for name in names
        },
        {name: float(np.mean([run.busy[name] for run in runs])) for name in runs[0].busy},
        pool_groups([run.groups for run in runs]),
    )


def _sample(runs: list[GraphShares]) -> KeptSample:
    """Two promises stand for all: what comes first, and what comes after."""
    return KeptSample(
        tuple(
            KeptShares(
                run.all,
                min(run.each.get(TTFT, 1.0), run.each.get(IMAGE, 1.0)),
                min(run.each.get(TPOT, 1.0), run.each.get(AHEAD, 1.0)),
                run.groups,
            )
            for run in runs
        )
    )


def _sure(runs: list[GraphShares], target: float) -> bool:
    sample = _sample(runs)
    return len(runs) > 1 and (sample.is_sure(target) or sample.is_hopeless(target))


_CAUSES = {
    TTFT: "first texts come too late: encoders and prompts wait",
    TPOT: "tokens come too slowly",
    AHEAD: "speech comes too slowly",
    IMAGE: "images take too long",
}


def promise_of(service: Service, runs: list[GraphShares]) -> KeptPromise:
    """Return what simulations found of a service's promises, and what stands in the way if anything."""
    sample, mean = _sample(runs), mean_of(runs)
    half = sample.half
    cause = None
    if mean.margin(service.target) < 0.0:
        short = [group for group in mean.groups if group.is_kept is False]
        worst = min(short, key=lambda one: (one.kept or 0.0) - one.target, default=mean)
        if worst.each:
            cause = _CAUSES[min(worst.each, key=lambda name: worst.each[name])]
    return KeptPromise(
        service=service.name,
        target=service.target,
        kept=mean.all,
        low=max(0.0, mean.all - half),
        high=min(1.0, mean.all + half),
        kept_ttft=sample.mean.ttft,
        kept_tpot=sample.mean.tpot,
        cause=cause,
        groups=mean.groups,
    )


def load_alone(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    executor: Instance,
    deadline: Deadline | None = None,
) -> float:
    """Return how busy an executor may be planned for enough requests to keep what it promises, alone.

    Of every class of its services. The largest of a few loads, found by halving; 1 where it has no promise to
    keep by itself, and the least where none will do. Executors that run only some parts may lose half of what
    all may. The deadline ends it with a SimulationCutShortError.
    """
    from atoll.sim.tasks.from_plan import alone_fleet
    from atoll.sim.tasks.simulate_tasks import simulate_tasks
    from atoll.sim.tasks.task_demand import Arrivals

    services = [problem.service(name) for name in executor.services]
    components = {component_of(part) for part in executor.parts}

    def may_lose(service: Service) -> float:
        whole = len(components) == len(catalog.model(service.model).graph.components)
        return (1.0 if whole else 0.5) * (1.0 - service.target)

    asked = [service for service in services if service.rate_per_s > 0.0]
    requests = min(_MAX_REQUESTS, _requests_of(asked or services[:1], _ALONE))
    watch = keep_deadline(deadline)

    def keeps(load: float) -> bool:
        fleet = alone_fleet(plan, problem, catalog, executor, load)
        if fleet is None or not any(_promised(klass.promises) for klass in fleet.classes):
            return True
        watch(0, requests, 0.0)
        result = simulate_tasks(
            fleet,
            requests=requests,
            seed=_TRIAL_SEED,
            arrivals=Arrivals(cv_of={service.name: service.burstiness for service in services}),
            progress=watch,
            part_times=False,
        )
        # Half of what all may lose, and no class more than it may: the rest is for the whole plan to tell.
        kept = {service.name: _shares(result, service) for service in services}
        return all(1.0 - kept[s.name].all <= may_lose(s) for s in services) and all(
            group.is_kept is not False for shares in kept.values() for group in shares.groups
        )

    low, high = -1, len(_LOADS)
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(_LOADS[middle]):
            high = middle
        else:
            low = middle
    return _LOADS[min(high, len(_LOADS) - 1)]


def _promised(promises: Promises) -> bool:
    kept = (promises.ttft_s, promises.tpot_s, promises.ahead_s, promises.image_s)
    return any(promise is not None for promise in kept)


def simulate_mixed(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    options: SimOptions,
    *,
    duration_s: float,
    routing: Routing = "dealt",
    query_s: float = 0.0,
    progress: Progress | None = None,
) -> MixedReport:
    """Run a plan with any-to-any services under its own demand, which lasts `duration_s` seconds.

    Of `options`, when to start measuring and when to stop hold for all, the rest for plain services.
    `routing` and `query_s` (seconds) say how requests find executors (`sim.tasks.simulate_tasks`).
    """
    from atoll.sim.api import simulate
    from atoll.sim.problem_demand import demand_of
    from atoll.sim.tasks.from_plan import simulate_plan
    from atoll.sim.tasks.mixed_report import MixedReport
    from atoll.workload.requests import collect

    beside = None
    own, instances = plain_problem(problem), plain_plan(plan)
    if own is not None and instances.instances:
        # Plain services share no GPUs with executors: they have a run of their own.
        arrivals = collect(demand_of(own, duration_s), options.seed)
        beside = simulate(instances, own, own.catalog(), arrivals, options, progress=progress)
    tasks = simulate_plan(
        plan,
        problem,
        catalog,
        duration_s=duration_s,
        seed=options.seed,
        routing=routing,
        query_s=query_s,
        warm_up_s=options.from_s,
        until_s=options.until_s,
        constants=options.constants,
    )
    return MixedReport(
        plan_name=plan.problem_name,
        problem=problem,
        usd_per_hour=plan.usd_per_hour,
        tasks=tasks,
        plain=beside,
        routing=routing,
        query_s=query_s,
        seed=options.seed,
    )


def plain_problem(problem: Problem) -> Problem | None:
    """Return the problem of the plain services alone, None where there are none."""
    plain = problem.plain_services
    if not plain:
        return None
    running = tuple(instance for instance in problem.running if not instance.is_executor)
    return problem.replace(services=plain, running=running)


def plain_plan(plan: Plan) -> Plan:
    """Return a plan without its executors and their paths, as the simulator of plain models takes it."""
    instances = plan.plain_instances
    names = {instance.service for instance in instances}
    served = {name: share for name, share in plan.served_fraction.items() if name in names}
    return plan.model_copy(update={"instances": instances, "paths": (), "served_fraction": served})
