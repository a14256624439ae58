"""Promises kept by requests of a plan: simulated on several arrivals, until it is sure enough."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from atoll.plan.kept_groups import KeptGroup, enough_requests, pool_groups
from atoll.plan.plan import SOURCE, KeptPromise
from atoll.plan.request_groups import DECILES, list_groups
from atoll.prove.equal_parts import equal_part
from atoll.prove.losses import loss_failures, lost_nodes, spot_losses
from atoll.prove.simulation_deadline import SimulationCutShortError, keep_deadline
from atoll.solve.loss_routes import with_loss_routes

if TYPE_CHECKING:
    from atoll.catalog.catalog import Catalog
    from atoll.perf.constants import ConstantTable
    from atoll.plan.losses import Loss
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem, Service
    from atoll.sim.sim_options import Failure
    from atoll.sim.sim_result import ServiceSummary
    from atoll.solve.deadline import Deadline

FRESH_SEED = 101
"""The first seed of arrivals that no plan was sized with."""
_FRESH_RUNS = 5
"""Simulations of a plan with fresh arrivals, at least."""
_MAX_FRESH = 30
"""The same at most, while it is not sure what is kept."""
_HOPELESS_MARGIN = 0.2
"""A share that is so much below its target needs no second simulation."""
_LOSSES = 4.0
"""Losses of spot nodes to be expected in all simulations of a plan: none come in one of fifty cases."""
_LOSS_STRETCH = 2.0
"""By what simulations are longer at most where spot nodes are lost."""
_DAY_S = 86_400.0
_DAY_REQUESTS = 400_000
"""Requests of all services in a day of losses, at most: the rest of the day is not simulated."""
_MAX_DAYS = 3
"""Such days that are simulated while it is not sure what is kept."""
_LOST_S = 60.0
"""Seconds into a simulation at which a node is lost."""
_LOSS_SEED = 91
"""The arrivals it is lost among."""
_LOSS_RUNS = 4
"""Simulations of a loss where spot nodes are lost beside it."""
_REQUESTS = 6_000
"""Requests simulated per seed of the service that is asked least often, within limits."""
_MIN_S = 300.0
"""Seconds that are simulated at least, whatever the limits below say."""
_MAX_REQUESTS = 120_000
"""Requests of all services in one simulation, about: memory and time grow with them."""
_MAX_TOKENS = 6e6
"""Tokens of all services in one simulation, about."""
_MAX_PASSES = 1e7
"""Tokens times the nodes they pass, in one simulation of a large cluster, about: some CPU-seconds."""
_STAYS = 2.0
"""As many times as a request may take is simulated of a large cluster at least: it is full after one."""
_FAR_BELOW = 0.75
"""Share of the demand below which what is carried leaves no doubt that hardly any promise is kept."""
_LARGE_RUNS = 2
"""Simulations of a large cluster with fresh arrivals, at least: over many pipelines arrivals even out."""
_MAX_LARGE = 4
"""The same at most, while it is not sure what is kept."""


@dataclass(frozen=True)
class KeptShares:
    """The shares of a service's requests that kept both promises, and each of them.

    `groups` are what groups of them kept that have a target of their own (`plan.request_groups`).
    """

    both: float
    ttft: float
    tpot: float
    groups: tuple[KeptGroup, ...] = ()


@dataclass(frozen=True)
class KeptSample:
    """Promises that requests of a service kept in several simulations, each with arrivals of its own."""

    runs: tuple[KeptShares, ...]

    @cached_property
    def mean(self) -> KeptShares:
        """The mean shares."""
        both, ttft, tpot = (
            float(np.mean([getattr(r, name) for r in self.runs])) for name in _SHARES
        )
        return KeptShares(both, ttft, tpot, pool_groups([run.groups for run in self.runs]))

    @cached_property
    def error(self) -> float:
        """The standard error of the mean share that kept both promises."""
        if len(self.runs) < 2:
            return math.inf
        spread = float(np.std([run.both for run in self.runs], ddof=1))
        return spread / math.sqrt(len(self.runs))

    @cached_property
    def half(self) -> float:
        """Half the width of the 95 % confidence interval of that mean, by Student's t."""
        from scipy.special import stdtrit

        if len(self.runs) < 2:
            return math.inf
        return float(stdtrit(len(self.runs) - 1, 0.975)) * self.error

    def is_sure(self, target: float) -> bool:
        """Whether intervals lie on one side of the targets: all above, or one of them below."""
        below, above = self._sides(target)
        return below or above

    def is_surely_short(self, target: float) -> bool:
        """Whether the interval of all requests, or of a group of them, lies below the target."""
        return self._sides(target)[0]

    def _sides(self, target: float) -> tuple[bool, bool]:
        groups = self.mean.groups
        sure = abs(self.mean.both - target) >= self.half
        below = (sure and self.mean.both < target) or any(g.high < g.target for g in groups)
        return below, sure and all(group.low >= group.target for group in groups)

    def is_hopeless(self, target: float) -> bool:
        """Whether the target is missed by so much that no further simulation is needed."""
        return self.worst(target).both < target - _HOPELESS_MARGIN

    def worst(self, target: float) -> KeptShares:
        """Return the shares of all requests or of the group that falls shortest, as of one that promises it.

        Groups count where enough of their requests came to tell.
        """
        return find_worst(self.mean, target)


_SHARES = ("both", "ttft", "tpot")


def find_worst(kept: KeptShares, target: float) -> KeptShares:
    """Return `kept`, or what the group keeps that falls shortest of its own target, scaled to this one."""
    told = [group for group in kept.groups if group.kept is not None and group.is_kept is not None]
    found = [KeptShares(kept.both, kept.ttft, kept.tpot)]
    for group in told:
        shares = (group.kept or 0.0, group.each.get("ttft", 1.0), group.each.get("tpot", 1.0))
        both, ttft, tpot = (group.scale_to(target, share) for share in shares)
        found.append(KeptShares(both, ttft, tpot))
    return min(found, key=lambda shares: shares.both)


def are_surely_kept(promises: Iterable[KeptPromise]) -> bool:
    """Whether a plan is one to take: the whole interval of every promise, and of its groups, is above."""
    return all(promise.is_surely_kept for promise in promises)


def are_hopeless(promises: Iterable[KeptPromise]) -> bool:
    """Whether one is missed by so much that no placement of the same kind will keep it."""
    return any(worst_of(promise).both < promise.target - _HOPELESS_MARGIN for promise in promises)


def worst_of(promise: KeptPromise) -> KeptShares:
    """Return the shares of a promise, or of the group of requests that falls shortest (`find_worst`)."""
    shares = KeptShares(promise.kept, promise.kept_ttft, promise.kept_tpot, promise.groups)
    return find_worst(shares, promise.target)


def sample_kept(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    targets: Mapping[str, float],
    *,
    first_seed: int,
    min_runs: int,
    max_runs: int,
    until_short: bool = False,
    deadline: Deadline | None = None,
    known: Mapping[str, KeptSample] | None = None,
) -> dict[str, KeptSample]:
    """Return by service what requests keep, from `min_runs` to `max_runs` simulations with seeds in a row.

    Services of which it is not sure whether they are above or below their target are simulated more often;
    with `until_short` only as long as none is sure to be below. `min_runs` are more where spot nodes are lost
    now and then. `known` is what was simulated before of
    services whose instances are the same: the first seeds' runs. On a cluster, where services share machines
    and links, nothing is known of one alone.
    """
    runs: dict[str, list[KeptShares]] = {
        service.name: [] for service in problem.services if service.rate_per_s > 0
    }
    lossy = bool(runs) and bool(lost_nodes(plan, problem))
    if lossy:
        min_runs = max(min_runs, _runs_for_losses(plan, problem))
        max_runs = max(max_runs, min_runs)
    if not problem.hosts:
        runs |= {name: list(one.runs) for name, one in (known or {}).items() if name in runs}
    while True:
        found = {name: KeptSample(tuple(some)) for name, some in runs.items() if some}
        short = until_short and any(
            len(one.runs) >= min_runs and one.is_surely_short(targets[name])
            for name, one in found.items()
        )
        wanted = [
            name
            for name, some in runs.items()
            # One loss early on is no sign of what is kept in the long run.
            if not (not lossy and some and until_short and found[name].is_hopeless(targets[name]))
            and (
                len(some) < max(1, min_runs)
                or (len(some) < max_runs and not short and not found[name].is_sure(targets[name]))
            )
        ]
        if not wanted:
            return found
        if deadline is not None and deadline.passed:
            # Short simulations end before they look at the time themselves, and one alone tells nothing.
            raise SimulationCutShortError("the deadline came before a simulation")
        # All go on from the same seed, so that services meet the same arrivals in the same run.
        number = min(len(runs[name]) for name in wanted)
        now = None if problem.hosts else [name for name in wanted if len(runs[name]) == number]
        wanted = list(runs) if now is None else now
        seen = simulate_kept(plan, problem, catalog, first_seed + number, deadline, services=now)
        for name in wanted:
            if name in seen:
                runs[name].append(seen[name])
            else:
                del runs[name]  # nobody serves it


def look_at(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    deadline: Deadline | None = None,
    causes: Mapping[str, str] | None = None,
    *,
    first_seed: int = FRESH_SEED,
) -> tuple[KeptPromise, ...]:
    """Return what requests of each service keep on arrivals that no plan was sized with.

    Where spot nodes are lost, a day of losses, or as much of it as `_DAY_REQUESTS` are: that two of them are
    away at once is rare, and may be all that breaks promises. Where a day does not tell, several do.
    """
    targets = {service.name: service.target for service in problem.services}
    found: dict[str, KeptSample] = {}
    day = _runs_for_a_day(plan, problem)
    large = is_large(problem)
    least, most = (_LARGE_RUNS, _MAX_LARGE) if large else (_FRESH_RUNS, _MAX_FRESH)
    for runs in (least, day, _MAX_DAYS * day):
        if found and runs <= least:
            break
        if any(one.is_surely_short(targets[name]) for name, one in found.items()):
            break
        if found and runs > day and all(one.is_sure(targets[name]) for name, one in found.items()):
            break
        found = sample_kept(
            plan,
            problem,
            catalog,
            targets,
            first_seed=first_seed,
            min_runs=runs,
            max_runs=max(runs, most),
            deadline=deadline,
            known=found,
        )
    after = kept_after_loss(plan, problem, catalog, deadline)
    return tuple(
        _promise(
            service,
            found[service.name],
            (causes or {}).get(service.name),
            after.get(service.name),
        )
        for service in problem.services
        if service.name in found
    )


def _promise(
    service: Service, sample: KeptSample, cause: str | None, after: KeptShares | None
) -> KeptPromise:
    mean, half = sample.mean, sample.half
    worst = sample.worst(service.target)
    # The worse of the two counts: with all nodes, and with the one lost that hurts most.
    left = None if after is None else find_worst(after, service.target).both
    kept_share = worst.both if left is None else min(worst.both, left)
    if cause is None and worst.both >= service.target:
        cause = "too little is left with a node lost"
    elif cause is None:
        cause = "prompts wait too long" if worst.ttft < worst.tpot else "tokens come too slowly"
    return KeptPromise(
        service=service.name,
        target=service.target,
        kept=mean.both,
        low=max(0.0, mean.both - half),
        high=min(1.0, mean.both + half),
        kept_ttft=mean.ttft,
        kept_tpot=mean.tpot,
        kept_after_loss=None if after is None else after.both,
        cause=cause if kept_share < service.target else None,
        groups=mean.groups,
        groups_after_loss=() if after is None else after.groups,
    )


def kept_after_loss(
    plan: Plan, problem: Problem, catalog: Catalog, deadline: Deadline | None = None
) -> dict[str, KeptShares]:
    """Return by service what requests keep after the loss that hurts it most; nothing if not asked.

    And what each group of them does after the one that hurts that group most.
    """
    found: dict[str, list[KeptShares]] = {}
    for _, kept in simulate_losses(plan, problem, catalog, deadline):
        for name, one in kept.items():
            found.setdefault(name, []).append(one)
    return {
        name: replace(min(some, key=lambda one: one.both), groups=_worst_groups(some))
        for name, some in found.items()
    }


def _worst_groups(losses: Iterable[KeptShares]) -> tuple[KeptGroup, ...]:
    """Of every group what it keeps after the loss that hurts it most, of those that say something of it."""
    found: dict[str, KeptGroup] = {}
    for group in (group for one in losses for group in one.groups):
        best = found.get(group.name, group)
        found[group.name] = min(best, group, key=lambda each: (each.kept is None, each.kept or 0.0))
    return tuple(found.values())


def simulate_losses(
    plan: Plan, problem: Problem, catalog: Catalog, deadline: Deadline | None = None
) -> Iterator[tuple[Loss, dict[str, KeptShares]]]:
    """Yield each loss to survive with what requests keep after it, of the services that it hits.

    As many requests come as must be kept, and take the ways that are left to them. Of services that need not
    be kept nothing is said.
    """
    survival = problem.limits.survival
    if not survival.lost:
        return
    covered = {service.name for service in problem.services if survival.covers(service.name)}
    fewer = problem
    if survival.keep < 1.0:
        # Those that need not be kept are turned away, so that the others are served in time.
        fewer = problem.scale_demand(survival.keep)
    owners = {instance.id: instance.service for instance in plan.instances}
    for loss, failures in loss_failures(plan, problem, _LOST_S):
        hit = covered & {owners[name] for name in loss.instances}
        if not hit:
            continue
        ready = with_loss_routes(plan, problem, catalog, [loss])
        runs: dict[str, list[KeptShares]] = {}
        # The same arrivals for every loss: only what is lost differs. Spot nodes are lost by luck beside it.
        for number in range(_LOSS_RUNS if lost_nodes(plan, problem) else 1):
            one = simulate_kept(
                ready,
                fewer,
                catalog,
                _LOSS_SEED + number,
                deadline,
                failures,
                services=None if problem.hosts else hit,
            )
            for name, shares in one.items():
                runs.setdefault(name, []).append(shares)
        kept = {name: KeptSample(tuple(some)).mean for name, some in runs.items()}
        # Nobody serves those of whom nothing is said.
        gone = KeptShares(0.0, 0.0, 0.0)
        yield loss, {name: kept.get(name, gone) for name in covered if problem.hosts or name in hit}


def simulate_kept(
    plan: Plan,
    problem: Problem,
    catalog: Catalog,
    seed: int,
    deadline: Deadline | None = None,
    losses: tuple[Failure, ...] = (),
    *,
    constants: ConstantTable | None = None,
    requests: int = _REQUESTS,
    services: Collection[str] | None = None,
) -> dict[str, KeptShares]:
    """Return by service what requests keep when the plan meets its demand and loses nodes.

    Spot nodes are lost as often as the problem says. There are so many `requests` of the service that is
    asked least often, and more where its rarest class takes more to be judged, within limits; `constants` are
    those of the performance model unless given. Only `services` are asked for anything, where given: in a
    plan of their own nodes they are on their own. A large cluster is simulated for as long as fills it, one
    of its equal parts (`equal_parts`), and not to the end of a queue where far more arrive than it carries.
    """
    from atoll.sim.api import simulate
    from atoll.sim.problem_demand import demand_of
    from atoll.sim.sim_options import SimOptions
    from atoll.workload.requests import collect

    asked = [
        service
        for service in problem.services
        if service.rate_per_s > 0 and (services is None or service.name in services)
    ]
    if not asked:
        return {}
    # As long as all would be simulated, so that what one keeps does not depend on which others are.
    seconds = _seconds(plan, problem, requests)
    warm_s, until_s = seconds / 10.0, math.inf
    if is_large(problem):
        warm_s = max(warm_s, _stay_s(problem))
        carried = sum(instance.throughput_per_s for instance in plan.instances)
        if carried < _FAR_BELOW * sum(service.demand_per_s for service in asked):
            until_s = seconds + _stay_s(problem)
        if not losses:
            part = equal_part(plan, problem)
            plan, problem = part.plan, part.problem
            asked = [problem.service(service.name) for service in asked]
    arrivals = collect(demand_of(problem.replace(services=tuple(asked)), seconds), seed)
    options = SimOptions(
        seed=seed,
        # Requests count after a tenth of the time, when queues have filled, and after every loss that is
        # asked for.
        from_s=max(warm_s, *(loss.time_s for loss in losses), 0.0),
        failures=(*losses, *_beside(spot_losses(plan, problem, seconds, seed), losses)),
        until_s=until_s,
        constants=constants,
        # Neighbours on a GPU may be of services that are not asked.
        turns=False,
    )
    found = simulate(plan, problem, catalog, arrivals, options, progress=keep_deadline(deadline))
    names = {service.name for service in asked}
    return {
        one.name: _shares(one)
        for one in found.services
        if one.attainment is not None and one.name in names
    }


def _beside(at_random: Iterable[Failure], for_good: Collection[Failure]) -> Iterator[Failure]:
    """Yield losses at random but for those of nodes that are lost for good: they would be back after them."""
    gone = {(loss.instance, loss.node) for loss in for_good if loss.back_s is None}
    return (loss for loss in at_random if (loss.instance, loss.node) not in gone)


def _seconds(plan: Plan, problem: Problem, requests: int) -> float:
    """Return how long to simulate: so many requests, and until a spot node is lost once, within limits."""
    everyone = [service for service in problem.services if service.rate_per_s > 0]
    tokens_per_s = sum(s.rate_per_s * s.lengths.output_mean for s in everyone)
    rate = sum(service.rate_per_s for service in everyone)
    max_s = min(_MAX_REQUESTS / rate, _MAX_TOKENS / max(tokens_per_s, 1e-9))
    wanted_s = max(max(requests, requests_to_judge(s)) / s.rate_per_s for s in everyone)
    if lost_nodes(plan, problem):
        stands_s = 3600.0 / problem.limits.spot_loss_per_h
        wanted_s = max(wanted_s, min(stands_s, _LOSS_STRETCH * wanted_s))
    if is_large(problem):
        most_s = _MAX_PASSES / max(tokens_per_s * _passed(plan), 1e-9)
        return max(_STAYS * _stay_s(problem), min(wanted_s, max_s, most_s))
    return max(_MIN_S, min(wanted_s, max_s))


def is_large(problem: Problem) -> bool:
    """Return whether a problem has a cluster of so many machines that simulations of it are kept short."""
    from atoll.solve.place.sites.site_placement import is_large

    return problem.cluster is not None and is_large(problem)


def _stay_s(problem: Problem) -> float:
    """Return how long a request of the mean length may take within its promise, of the slowest service."""
    return max(s.ttft_s + s.tpot_s * s.lengths.output_mean for s in problem.services)


def _passed(plan: Plan) -> float:
    """Return how many nodes a request passes in the mean."""
    flows = [(flow.src, flow.per_s) for one in plan.instances for flow in one.flows]
    entered = sum(per_s for src, per_s in flows if src == SOURCE)
    return sum(per_s for src, per_s in flows if src != SOURCE) / entered if entered > 0.0 else 1.0


def _runs_for_losses(plan: Plan, problem: Problem) -> int:
    """Return in how many simulations about `_LOSSES` spot nodes are lost of the service that has fewest.

    Runs without any agree on a share that says nothing of what the next loss does. No more than of a day.
    """
    nodes = Counter(service for service, _ in lost_nodes(plan, problem))
    per_s = problem.limits.spot_loss_per_h / 3600.0 * min(nodes.values())
    wanted = math.ceil(_LOSSES / (per_s * _seconds(plan, problem, _REQUESTS)))
    return min(wanted, _runs_for_a_day(plan, problem))


def _runs_for_a_day(plan: Plan, problem: Problem) -> int:
    """Return in how many simulations a day passes, or as much of it as is simulated; 0 if nothing is lost."""
    if not lost_nodes(plan, problem):
        return 0
    rate = sum(service.rate_per_s for service in problem.services)
    return math.ceil(min(_DAY_S, _DAY_REQUESTS / rate) / _seconds(plan, problem, _REQUESTS))


def requests_to_judge(service: Service) -> int:
    """Return how many requests a simulation has for the rarest group to be judged after a few of them."""
    groups = list_groups(service)
    shares = {klass.name: klass.share for klass in (*service.classes, *service.text_classes)}
    return max(
        (
            math.ceil(enough_requests(g.target) / _FRESH_RUNS / shares.get(g.name, 1.0 / DECILES))
            for g in groups
        ),
        default=0,
    )


def _shares(one: ServiceSummary) -> KeptShares:
    each = (one.attainment, one.attainment_ttft, one.attainment_tpot)
    both, ttft, tpot = (share or 0.0 for share in each)
    return KeptShares(both, ttft, tpot, one.groups)
