"""The stage engine on this machine: SmolLM2 cut unevenly over two nodes, behind the gateway.

Each node has a core of its own, as in a fleet every node is a machine of its own; instance, gateway and
clients run beside them. Step times are those that the nodes themselves count while clients probe the engine,
before and after what is compared: what shares their caches, their cores and the memory is in them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.plan.cluster_profiles import at
from atoll.runtime.local.layer_profile import RangeTable
from atoll.runtime.local.server_profile import mean_gap
from benchmarks.report import ROOT
from benchmarks.simulation.node_meter import LAG_S, Counted, NodeMeter
from benchmarks.simulation.streaming import Latency, StreamedAnswer, replay, stream_answer

if TYPE_CHECKING:
    from atoll.plan.cluster import NodeProfile
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.workload.requests import Requests

SERVICE = "smollm2"
RANGES = (("CORE-L:1", 0, 18), ("CORE-S:1", 18, 30))
HOPS = len(RANGES) + 1
"""From the front to the first node, between nodes, and back."""
LENGTHS = "normal:96/0.4x40/0.3"
RATE_PER_S = 0.9
CONTEXT = 120
KV_BYTES = 128 * 2**20
_PROMPTS = (16, 48, 96, 144, 192)
STREAMS = {1: 24, 2: 24, 4: 24, 8: 20}
"""Streams that decode together, and the tokens each of them gets."""
_MIXED = (96, 2)
"""A prompt beside so many sequences."""
_BATCHES = (1, 2, 3, 4, 6, 8)
_TIMES = 3
Tables = tuple[RangeTable, ...]
Points = tuple[tuple[float, float], ...]
Array = NDArray[np.float64]


def build_problem(
    profiles: Mapping[str, NodeProfile] | None = None, hop_s: float = 0.0
) -> tuple[Problem, Plan]:
    """Return the demo's fleet with a node for each range, measured or not yet, and the plan of those."""
    from atoll.engines.limits import EngineLaunch
    from atoll.plan.cluster import ClusterLink, ClusterNode
    from atoll.plan.files.fleet_file import load_fleet
    from atoll.plan.plan import Flow, Instance, Node, Plan, Route

    demo = load_fleet(ROOT / "examples" / "demo-local.yaml")
    assert demo.cluster is not None
    names = [f"machine-{number}" for number in range(len(RANGES))]
    known = demo.cluster.profiles if profiles is None else {SERVICE: dict(profiles)}
    cluster = demo.cluster.model_copy(
        update={
            "profiles": known,
            "nodes": tuple(
                ClusterNode(name=name, node_type=kind, region="here")
                for name, (kind, _, _) in zip(names, RANGES, strict=True)
            ),
            "links": (ClusterLink(src="*", dst="*", bytes_per_s=1.25e9, latency_s=hop_s),),
        }
    )
    nodes = tuple(
        Node(id=f"n{i}", node_type=kind, market="owned", start=a, end=b, tp=1, host=names[i])
        for i, (kind, a, b) in enumerate(RANGES)
    )
    ways = ("source", *(node.id for node in nodes), "sink")
    instance = Instance(
        id="smollm2-both-0",
        service=SERVICE,
        role=f"{SERVICE}/llm/both",
        region="here",
        stages=len(nodes),
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=1.0) for a, b in pairwise(ways)),
        throughput_per_s=1.0,
        usd_per_hour=0.0,
    )
    offers = tuple(
        offer.model_copy(update={"available": 1})
        for offer in demo.offers
        if offer.node_type in {kind for kind, _, _ in RANGES}
    )
    settings = demo.settings.model_copy(update={"engine": "atoll"})
    problem = demo.replace(cluster=cluster, offers=offers, settings=settings)
    plan = Plan(
        problem_hash=problem.content_hash(),
        problem_name=problem.name,
        instances=(instance,),
        routes=(Route(service=SERVICE, instances=(instance.id,), share=1.0),),
        usd_per_hour=0.0,
        status="feasible",
        solver="by hand",
        engines={SERVICE: EngineLaunch(promised_ttft_s=problem.services[0].ttft_s)},
    )
    return problem, plan


@dataclass(frozen=True, slots=True)
class StageLook:
    """What probes of the engine in place have shown, once. Rows of arrays are nodes.

    Single prompts: seconds of the step of each size, and `beside_s`, those that a first token takes beside
    steps. Streams that decode together, for each number of them: rows and seconds of a mean step, and seconds
    per token of a stream.
    """

    prompts_s: Array
    rows: Array
    steps_s: Array
    tokens_s: Array
    beside_s: float

    @property
    def times_s(self) -> Array:
        """All times that tell how fast the machine was."""
        return np.concatenate([self.prompts_s.ravel(), self.steps_s.ravel(), self.tokens_s])

    @property
    def hop_s(self) -> float:
        """What a single stream's token takes beside its steps, per hop."""
        return max(0.0, float(self.tokens_s[0] - self.steps_s[:, 0].sum())) / HOPS

    @property
    def late_s(self) -> Array:
        """Seconds by which steps are late, for each number of streams.

        Steps are not equally long. Where a group of sequences is on each node, the longest step sets the
        pace, and simulated with their means it would be too fast: it is what tokens take beyond steps and
        hops, over the groups that are out. A single stream has none: all it takes beside steps are hops.
        """
        groups = np.maximum(1.0, np.array(list(STREAMS)) / self.rows.mean(axis=0))
        even_s = np.maximum(
            self.steps_s.sum(axis=0) + HOPS * self.hop_s, groups * self.steps_s.max(axis=0)
        )
        return np.asarray(np.maximum(0.0, (self.tokens_s - even_s) / groups))


def find_levels(looks: Sequence[StageLook]) -> list[float]:
    """Return how slow the machine was at each look, 1 being usual.

    It is a median over probes: one that something held up says nothing about the others.
    """
    usual_s = np.median([look.times_s for look in looks], axis=0)
    return [float(np.median(look.times_s / usual_s)) for look in looks]


def usual_look(looks: Sequence[StageLook], level: float = 1.0) -> StageLook:
    """Return what all looks say together, for a time at which the machine was so slow."""
    levels = find_levels(looks)

    def middle(name: str) -> Array:
        some = [getattr(look, name) / slow for look, slow in zip(looks, levels, strict=True)]
        return np.asarray(level * np.median(some, axis=0))

    return StageLook(
        middle("prompts_s"),
        np.median([look.rows for look in looks], axis=0),
        middle("steps_s"),
        middle("tokens_s"),
        float(np.median([look.beside_s for look in looks])),
    )


@dataclass(frozen=True, slots=True)
class StageRun:
    """Stretches of the trace as they were served, and the looks before, between and after them.

    `shares` are what a prompt and sequences share in one step on each node, in steps of one sequence.
    """

    shares: tuple[float, ...]
    looks: tuple[StageLook, ...]
    stretches: tuple[tuple[Requests, tuple[Latency, ...]], ...]


@asynccontextmanager
async def serve(
    plan: Plan, folder: Path, cores: Sequence[int]
) -> AsyncIterator[tuple[str, NodeMeter]]:
    """Run the plan behind the gateway; yields its address, and what hears its nodes."""
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.runtime.instance.instance_config import engine_name
    from atoll.runtime.local.local_endpoints import LocalModel, LocalOptions
    from atoll.runtime.local.serving import local_fleet

    with local_fleet(
        plan,
        {SERVICE: LocalModel(DEFAULT_MODEL, folder)},
        LocalOptions(kv_bytes=KV_BYTES, cores=tuple(cores)),
        host="127.0.0.1",
        port=0,
        log=None,
        on_progress=lambda _name, _state, _reason: None,
    ) as fleet:
        await fleet.start()
        one = plan.instances[0]
        inboxes = [fleet.home.inbox(engine_name(one.id, node.id)) for node in one.nodes]
        try:
            async with NodeMeter(inboxes).listen() as meter:
                yield fleet.url, meter
        finally:
            await fleet.stop(5.0)


async def run_trace(plan: Plan, folder: Path, traces: Sequence[Requests]) -> StageRun:
    """Serve every stretch, and probe the engine before, between and after them."""
    from atoll.runtime.local.cores import usable_cores

    cores = usable_cores()[: len(RANGES)]
    if len(cores) < len(RANGES):
        raise SystemExit(f"{len(RANGES)} nodes need as many cores")
    shares = measure_shares(folder, cores)
    stretches = []
    async with serve(plan, folder, cores) as (url, meter):
        probes = StageProbes(url, meter)
        await probes.warm_up()
        looks = [await probes.look()]
        for number, requests in enumerate(traces):
            served = await replay(url, SERVICE, requests, number)
            stretches.append((requests, tuple(served)))
            looks.append(await probes.look())
    return StageRun(tuple(shares), tuple(looks), tuple(stretches))


def measure_shares(folder: Path, cores: Sequence[int]) -> list[float]:
    """Return, per node, what a prompt and sequences share in one step, as a share of a step of one sequence.

    It is a ratio of steps that take turns, so processes of their own can measure it, all at a time.
    """
    jobs = [(folder, start, end, core) for (_, start, end), core in zip(RANGES, cores, strict=True)]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        return pool.starmap(_measure_share, jobs, chunksize=1)


def _measure_share(folder: Path, start: int, end: int, core: int) -> float:
    from atoll.runtime.local.layer_profile import ProfileOptions, RangeTimer, profile_of

    os.sched_setaffinity(0, {core})
    size, beside = _MIXED
    options = ProfileOptions(
        repeats=6, prompts=(size,), sequences=(1, beside), mixed=(_MIXED,), context=CONTEXT
    )
    table = RangeTimer(folder, start, end, options).measure()
    found = profile_of(table, None, (1e5,) * (end - start))
    return found.shared_s_per_layer * table.layers / table.decode_s[0][1]


class StageProbes:
    """Clients that ask for what tells step times apart, while nothing else is asked."""

    def __init__(self, url: str, meter: NodeMeter) -> None:
        self._url, self._meter = url, meter
        self._seed = 10**6

    async def _ask(self, prompt: int, output: int) -> StreamedAnswer:
        self._seed += 1
        return await stream_answer(self._url, SERVICE, self._seed, prompt, output)

    async def warm_up(self) -> None:
        """Let everything have run once, and the engine learn how long its steps take."""
        await self._ask(_PROMPTS[-1], 1)
        await asyncio.gather(*(self._ask(_MIXED[0], 48) for _ in range(max(STREAMS))))

    async def look(self) -> StageLook:
        """Make all probes once."""
        before = await self._meter.settle()
        prompts = []
        for size in _PROMPTS:
            first_s = [(await self._ask(size, 1)).latency.ttft_s for _ in range(_TIMES)]
            after = await self._meter.settle()
            took = [new.since(old) for new, old in zip(after, before, strict=True)]
            steps_s = [counted.busy_s / counted.steps for counted in took]
            prompts.append((steps_s, float(np.mean(first_s)) - sum(steps_s)))
            before = after
        closed = [await self._decode(number, tokens) for number, tokens in STREAMS.items()]
        return StageLook(
            np.array([steps_s for steps_s, _ in prompts]).T,
            np.array([[each.rows / each.steps for each in found] for found, _ in closed]).T,
            np.array([[each.busy_s / each.steps for each in found] for found, _ in closed]).T,
            np.array([token_s for _, token_s in closed]),
            float(np.median([beside_s for _, beside_s in prompts])),
        )

    async def _decode(self, streams: int, tokens: int) -> tuple[tuple[Counted, ...], float]:
        """Let streams decode together; returns steps, and seconds per token, while all of them do."""
        answers = await asyncio.gather(*(self._ask(CONTEXT - 24, tokens) for _ in range(streams)))
        from_s = max(one.came_s[0] for one in answers)
        until_s = min(one.came_s[-1] for one in answers)
        found = self._meter.between(from_s + LAG_S, until_s)
        if min(counted.steps for counted in found) < 1:
            raise SystemExit("a node's heartbeats say of no step: the machine is too busy")
        return found, mean_gap([[one.sent_s, *one.came_s] for one in answers])


def merge_points(points: Sequence[tuple[float, float]]) -> Points:
    """Return measured points as a curve that does not fall: means of those within a tenth of each other."""
    merged: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if merged and point[0] < 1.1 * merged[-1][0][0]:
            merged[-1].append(point)
        else:
            merged.append([point])
    sizes = [float(np.mean([n for n, _ in some])) for some in merged]
    seconds = np.maximum.accumulate([np.mean([s for _, s in some]) for some in merged])
    return tuple(zip(sizes, seconds.tolist(), strict=True))


def tabulate(look: StageLook, shares: Sequence[float]) -> Tables:
    """Return a look as a table of steps for each node."""
    size, beside = _MIXED
    tables = []
    for i, (_, start, end) in enumerate(RANGES):
        points = zip(look.rows[i].tolist(), (look.steps_s[i] + look.late_s).tolist(), strict=True)
        decode = merge_points(list(points))
        sizes = tuple(map(float, _PROMPTS))
        prefill = tuple(zip(sizes, look.prompts_s[i].tolist(), strict=True))
        both_s = at(prefill, float(size)) + at(decode, float(beside))
        tables.append(
            RangeTable(
                start=start,
                end=end,
                prefill_s=tuple((int(n), each_s) for n, each_s in prefill),
                decode_s=tuple((n, at(decode, float(n))) for n in _BATCHES),
                mixed_s=((*_MIXED, both_s - shares[i] * at(decode, 1.0)),),
            )
        )
    return tuple(tables)


def simulate_stretch(run: StageRun, number: int) -> tuple[list[float], list[float]]:
    """Simulate a stretch with what was measured; returns TTFT and TPOT of its requests.

    Step times are those of all looks. The machine is once as slow as it was before the stretch, and once as
    it was after: both are returned.
    """
    ttft_s, tpot_s = [], []
    for level in find_levels(run.looks)[number : number + 2]:
        found = _simulate(run.stretches[number][0], usual_look(run.looks, level), run.shares)
        ttft_s += found[0]
        tpot_s += found[1]
    return ttft_s, tpot_s


def _simulate(
    requests: Requests, look: StageLook, shares: Sequence[float]
) -> tuple[list[float], list[float]]:
    from atoll.runtime.local.layer_profile import profile_of
    from atoll.sim.api import simulate
    from atoll.sim.sim_options import SimComponent, SimOptions

    tables = tabulate(look, shares)
    profiles = {
        kind: profile_of(table, None, (1e5,) * table.layers)
        for (kind, _, _), table in zip(RANGES, tables, strict=True)
    }
    # What steps of one sequence are late by, on the mean of those that are, is no hop.
    late_s = sum(at(table.decode_s, 1.0) for table in tables) - float(look.steps_s[:, 0].sum())
    hop_s = max(0.0, look.hop_s - max(0.0, late_s) / HOPS)
    request_s = max(1e-9, look.beside_s - HOPS * hop_s)
    problem, plan = build_problem(profiles=profiles, hop_s=hop_s)
    options = SimOptions(
        token_budget=512,
        components=(SimComponent("front", servers=64, item_s=request_s),),
        classes=dict.fromkeys(requests.classes, (("front",), ("llm",))),
    )
    found = simulate(plan, problem, problem.catalog(), requests, options).requests
    return found.ttft_s.tolist(), found.tpot_s.tolist()
