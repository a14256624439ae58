"""How many requests keep their promise on an instance, by how much of its capacity is asked of it.

An instance is simulated alone, under arrivals as its service's and with its lengths, at some share of its
analytic throughput: many instances and shares in one run, each with requests of its own. Where a service's
demand needs n such instances, each gets every n-th request, so that gaps vary less than those of the whole.

Prefill alone counts with TTFT, to which handing over KV cache is added as its own interfaces send it, one
after the other. Decode alone counts with TPOT and with a part of TTFT, for KV cache that waits for its
interfaces and for room. An instance that does both counts with both. What happens between the phases is for a
simulation of the whole plan to tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.core.ids import Phase
from atoll.core.rng import stream
from atoll.plan.kept_groups import scale_share
from atoll.plan.plan import MAX_SIMULATED, SimulatedCapacity
from atoll.plan.request_groups import list_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from atoll.catalog.catalog import Catalog
    from atoll.plan.plan import Instance
    from atoll.plan.problem import Problem, Service
    from atoll.solve.derating import NodeSet
    from atoll.workload.requests import Requests

    Key = tuple[str, NodeSet]
    Watch = Callable[[int, int, float], None]

Floats = NDArray[np.float64]
_Small = NDArray[np.int16]

STEPS = 16
"""Loads are multiples of one over this, up to 1 or to `TOP` of them."""
TOP = int(MAX_SIMULATED * STEPS)
"""The largest load that is simulated, in `STEPS`-ths: some instances carry more than the model says."""
_REQUESTS = 2_000
_OVERLOAD_S = 120.0
"""Seconds of arrivals above the analytic throughput, at least: queues have to have time to grow."""
_MOST_REQUESTS = 24_000
"""The most requests that are simulated for that."""
_FIRST_COUNTED = 1 / 8
"""Share of requests after which they count: those before find an empty instance."""
_LAST_COUNTED = 15 / 16
"""Share of requests up to which they count: those after are followed by nobody."""
TAKING_SHARE = 0.25
"""Of TTFT, what may pass from when prefill has ended until an instance that only decodes goes on."""
_SEEDS = 3
"""Runs of an instance that is to carry more than the capacity model says."""
_ROUNDING = 1e-9
_CLASS_REQUESTS = 200
"""Requests of the rarest class of a service that are simulated, so far as `_MOST_CLASSED` allows."""
_MOST_CLASSED = 8_000
"""The most requests that are simulated for that."""
_INSTANCES_AT_ONCE = 48
"""Instances in one run; memory and lookups grow with them."""


@dataclass
class LoadCurve:
    """The shares of requests that keep their promise, by load in `STEPS`-ths of the analytic throughput.

    `top` is the largest load that is asked for.
    """

    kept: dict[int, float] = field(default_factory=dict)
    top: int = STEPS

    def next_step(self, share: float) -> int | None:
        """Return the load to simulate next to find the largest that keeps a share, None where it is known."""
        low, high = self._bracket(share)
        # Nothing is known: begin at three quarters of the load, then halve to either side.
        if low == 0 and high == self.top + 1:
            return (3 * STEPS) // 4
        if high - low <= 1:
            return None
        if high == self.top + 1 and low < STEPS:
            # All loads so far were kept: close to the top the full load is asked directly.
            return STEPS if low >= (7 * STEPS) // 8 else (low + STEPS + 1) // 2
        return (low + high) // 2

    def load(self, share: float) -> float:
        """Return the largest load at which a share of requests keeps its promise, between loads by a line."""
        low, high = self._bracket(share)
        if high > self.top:
            return self.top / STEPS
        if low == 0:
            # What nobody has simulated counts as good: an upper bound.
            return high / STEPS if high > 1 else 0.0
        above, below = self.kept[low], self.kept[high]
        part = (above - share) / (above - below) if above > below else 0.0
        return (low + (high - low) * part) / STEPS

    def max_load(self, share: float) -> float:
        """Return the least load known to be too much for a share, or `top`: no more than that is carried."""
        return min(self._bracket(share)[1], self.top) / STEPS

    @property
    def most(self) -> float:
        """The largest share that was kept at any load."""
        return max(self.kept.values(), default=0.0)

    def _bracket(self, share: float) -> tuple[int, int]:
        """The largest load known to keep a share, and the least above it known not to."""
        low = max((at for at, kept in self.kept.items() if kept >= share), default=0)
        high = min((at for at, kept in self.kept.items() if kept < share and at > low), default=0)
        return low, high or self.top + 1


@dataclass(frozen=True)
class LoadJob:
    """An instance to be simulated at so many `STEPS`-ths of its analytic throughput."""

    instance: Instance
    step: int


def units_per_request(service: Service, phase: Phase) -> float:
    """Return how many units of a phase's throughput a request is: tokens, or one."""
    lengths = service.lengths
    return {Phase.PREFILL: lengths.input_mean, Phase.DECODE: lengths.output_mean}.get(phase, 1.0)


def measure_loads(
    problem: Problem,
    catalog: Catalog,
    jobs: Sequence[LoadJob],
    *,
    seed: int = 0,
    watch: Watch | None = None,
    at_best: bool = False,
) -> list[float]:
    """Return the share of requests that keep their promise in each job.

    The instances' throughput must be the analytic one. `at_best`: as many as could in any plan. Then requests
    come as evenly as an instance may get them beside any others, and decode may use all of TTFT.
    """
    kept: list[float] = []
    # In parts, since memory and lookups grow with the instances in one run.
    for begin in range(0, len(jobs), _INSTANCES_AT_ONCE):
        some = jobs[begin : begin + _INSTANCES_AT_ONCE]
        kept += _measure(problem, catalog, some, seed, watch, at_best)
    return kept


def simulate_more(
    problem: Problem,
    catalog: Catalog,
    instance: Instance,
    per_s: float,
    *,
    watch: Watch | None = None,
) -> SimulatedCapacity | None:
    """Return what an instance carries alone if that is as much as `per_s`, above its analytic throughput.

    None where that is too much: on one of some seeds fewer requests keep their promise than the service asks
    for. The instance's throughput must be the analytic one.
    """
    service, model = problem.service(instance.service), instance.throughput_per_s
    step = math.ceil(per_s / model * STEPS * (1.0 - _ROUNDING))
    if step > TOP:
        return None
    job, kept = LoadJob(instance, step), 1.0
    seeds = tuple(problem.settings.seed + number for number in range(_SEEDS))
    for seed in seeds:
        (share,) = measure_loads(problem, catalog, [job], seed=seed, watch=watch)
        kept = min(kept, share)
        if kept < service.target:
            return None
    rate = model / units_per_request(service, instance.phase) * step / STEPS
    return SimulatedCapacity(
        model_per_s=model,
        per_s=model * step / STEPS,
        kept=kept,
        requests=_number(service, rate, step),
        seeds=seeds,
    )


def find_loads(
    problem: Problem,
    catalog: Catalog,
    instances: Mapping[Key, Instance],
    curves: Mapping[Key, LoadCurve],
    share_of: Callable[[str], float],
    *,
    seed: int = 0,
    watch: Watch | None = None,
    at_best: bool = False,
) -> int:
    """Simulate templates until the largest load of each is known; return how many simulations that took.

    Templates are told apart by role and nodes. `share_of` says by role which share of requests must keep its
    promise, and `at_best` is that of `measure_loads`. What is found goes into `curves`.
    """
    simulations = 0
    for key, instance in instances.items():
        # What carries nothing by the model keeps no promise at any load, and no request ever came.
        if instance.throughput_per_s <= 0.0:
            curves[key].kept[1] = 0.0
    while True:
        # In order, so that equal templates are simulated on equal arrivals.
        jobs = [
            (key, LoadJob(instances[key], step))
            for key in sorted(instances)
            if (step := curves[key].next_step(share_of(key[0]))) is not None
        ]
        if not jobs:
            return simulations
        simulations += len(jobs)
        every = [job for _, job in jobs]
        kept = measure_loads(problem, catalog, every, seed=seed, watch=watch, at_best=at_best)
        for (key, job), share in zip(jobs, kept, strict=True):
            curves[key].kept[job.step] = share


def _measure(
    problem: Problem,
    catalog: Catalog,
    jobs: Sequence[LoadJob],
    seed: int,
    watch: Watch | None,
    at_best: bool,
) -> list[float]:
    from atoll.plan.capacities import asked_again_s
    from atoll.plan.plan import Plan, Route
    from atoll.sim.api import simulate
    from atoll.sim.sim_options import SimOptions
    from atoll.sim.sim_result import promised_s

    names = [f"s{number:03}" for number in range(len(jobs))]
    services, instances, routes = [], [], []
    for name, job in zip(names, jobs, strict=True):
        own = problem.service(job.instance.service)
        # An instance here may do one phase only, whatever the service asks of its phases.
        services.append(own.model_copy(update={"name": name, "phases": "auto"}))
        role = f"{name}/llm/{job.instance.phase}"
        update = {"id": name, "service": name, "role": role}
        instances.append(job.instance.model_copy(update=update))
        routes.append(Route(service=name, instances=(name,), share=1.0))
    # Every instance is alone with its own copy of the service, so they do not disturb each other.
    alone = problem.replace(services=tuple(services), running=())
    plan = Plan(
        problem_hash=alone.content_hash(),
        problem_name=problem.name,
        instances=tuple(instances),
        routes=tuple(routes),
        usd_per_hour=0.0,
        status="feasible",
        solver="loads",
    )
    requests, numbers = _requests(problem, jobs, names, seed, at_best)
    # Its neighbours on a GPU, whoever they will be, are taken to be busy.
    options = SimOptions(seed=seed, turns=False)
    found = simulate(plan, alone, catalog, requests, options, progress=watch)
    columns = found.requests
    kept = []
    for at, job in enumerate(jobs):
        mine = np.flatnonzero(columns.service == at)[
            int(_FIRST_COUNTED * numbers[at]) : int(_LAST_COUNTED * numbers[at])
        ]
        met = np.ones(len(mine), np.bool_)
        service, klass = problem.service(job.instance.service), columns.klass[mine]
        first_s, _ = promised_s(alone, requests.classes, columns.service[mine], klass)
        if job.instance.phase is Phase.BOTH:
            met &= columns.met_ttft[mine]
        elif job.instance.phase is Phase.PREFILL:
            ready_s = columns.arrival_s[mine] + columns.ttft_s[mine]
            moved_s = _move_s(problem, catalog, job.instance, ready_s, columns.input[mine])
            asked_s = asked_again_s(problem.run_by(job.instance.engine), service)
            met &= columns.ttft_s[mine] + moved_s + asked_s <= first_s
        else:
            came_s = columns.arrival_s[mine]
            moved_s = _move_s(problem, catalog, job.instance, came_s, columns.input[mine])
            taking = 1.0 if at_best else TAKING_SHARE
            met &= columns.ttft_s[mine] + moved_s <= taking * first_s
        if job.instance.phase is not Phase.PREFILL:
            met &= columns.met_tpot[mine]
        # A plan may lose more of a class on one instance and less on another: at best all count alike.
        shares = [float(met.mean()) if len(mine) else 0.0]
        classes = [] if at_best else [g for g in list_groups(service) if g.kind == "class"]
        for group in classes:
            own = met[klass == requests.classes.index(group.name)]
            if len(own):
                shares.append(scale_share(float(own.mean()), group.target, service.target))
        kept.append(min(shares))
    return kept


def _move_s(
    problem: Problem,
    catalog: Catalog,
    instance: Instance,
    ready_s: Floats,
    prompts: NDArray[np.int32],
) -> Floats:
    """Seconds from when the KV cache of prompts is ready until the interfaces of an instance have moved it.

    Every node moves that of its own layers, one prompt after the other. Nodes of a stage take turns.
    """
    from atoll.plan.handover import hop_link, kv_bytes

    own = problem.service(instance.service)
    spec = catalog.model(own.model).llm
    order = np.argsort(ready_s, kind="stable")
    taken_s = np.zeros(len(order))
    for stage in instance.layout():
        node = stage.nodes[0]
        nic = hop_link(catalog, node.node_type, instance.region_of(node), node.gpus)
        whole = kv_bytes(spec, node.start, node.end, own.lengths.input_mean)
        per_token = whole / own.lengths.input_mean / nic.bandwidth_bytes_per_s
        moving_s = per_token * prompts[order].astype(np.float64)
        # Work left when a prompt comes: what came before it, less what was done since it last ran out.
        ahead = np.cumsum(moving_s / len(stage.nodes))
        began = ready_s[order] - (ahead - moving_s / len(stage.nodes))
        wait_s = np.maximum.accumulate(began) - began
        np.maximum(taken_s, nic.latency_s + wait_s + moving_s, out=taken_s)
    found = np.empty(len(order))
    found[order] = taken_s
    return found


def _number(service: Service, rate: float, step: int) -> int:
    """Return how many requests are simulated at so many a second."""
    rarest = min((klass.share for klass in service.text_classes), default=1.0)
    least = int(np.clip(_CLASS_REQUESTS / rarest, _REQUESTS, _MOST_CLASSED))
    if step <= STEPS:
        return least
    return int(np.clip(rate * _OVERLOAD_S, least, _MOST_REQUESTS))


def _requests(
    problem: Problem, jobs: Sequence[LoadJob], names: Sequence[str], seed: int, at_best: bool
) -> tuple[Requests, list[int]]:
    """Requests of all jobs in order of arrival, and how many each has."""
    from atoll.sim.problem_demand import sample_lengths
    from atoll.workload.lengths import PREFIX_BLOCK
    from atoll.workload.requests import TEXT, PrefixBlocks, Requests
    from atoll.workload.sampling import ClassMix

    columns: list[
        tuple[Floats, _Small, _Small, NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]
    ] = []
    numbers: list[int] = []
    classes = [TEXT]
    for at, job in enumerate(jobs):
        instance = job.instance
        service = problem.service(instance.service)
        # The same luck at every load and for every instance of a role: what differs is what they can do.
        luck = stream(seed, "loads", instance.role)
        capacity = instance.throughput_per_s / units_per_request(service, instance.phase)
        alike = max(1, int(service.demand_per_s / capacity)) if capacity > 0 else 1
        # A power of two: instances whose numbers are close get the same arrivals and compare.
        smooth = 1 << (alike.bit_length() - 1)
        rate = capacity * job.step / STEPS
        if at_best and rate > 0.0:
            # Every so many-th request comes here: a power of two that is not too small.
            smooth = 1 << max(0, math.ceil(service.demand_per_s / rate) - 1).bit_length()
        shape = smooth / service.burstiness**2
        number = _number(service, rate, job.step)
        numbers.append(number)
        gaps = luck.standard_gamma(shape, number) / shape
        lengths = sample_lengths(service)
        klass = np.zeros(number, np.int16)
        if isinstance(lengths, ClassMix):
            prompts, answers, own = lengths.draw_classes(luck, number)
            classes += [name for name in lengths.names if name not in classes]
            klass = np.array([classes.index(name) for name in lengths.names], np.int16)[own]
        else:
            prompts, answers = lengths.draw(luck, number)
        if instance.phase is Phase.PREFILL:
            # Prefill alone ends with the first token.
            answers = np.ones_like(answers)
        arrival = np.cumsum(gaps) / rate
        blocks = np.zeros(number, np.int64)
        if service.prefix is not None:
            begins = stream(seed, "prefixes", instance.role).random(number) < service.prefix.share
            blocks[begins] = service.prefix.shared().blocks
        columns.append((arrival, np.full(number, at, np.int16), klass, prompts, answers, blocks))
    arrival, model, klass, prompts, answers, blocks = (
        np.concatenate(some) for some in zip(*columns, strict=True)
    )
    # Stable, so that requests that arrive together keep the order of jobs.
    order = np.argsort(arrival, kind="stable")
    prefix = None
    if blocks.any():
        # Every instance has the beginnings of its own service.
        firsts = model[order].astype(np.int64) << 32
        prefix = PrefixBlocks.begin(firsts, blocks[order], PREFIX_BLOCK)
    return (
        Requests(
            arrival[order],
            model[order],
            klass[order],
            prompts[order].astype(np.int32),
            answers[order].astype(np.int32),
            tuple(names),
            tuple(classes),
            prefix=prefix,
        ),
        numbers,
    )
