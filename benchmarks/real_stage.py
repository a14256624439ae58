"""The stage engine on this machine: SmolLM2 cut unevenly over two nodes, behind the gateway.

Each node has a core of its own, as in a fleet every node is a machine of its own; instance, gateway and
clients run beside them. Step times are those that the nodes themselves count while clients probe the engine,
before and after what is compared: what shares their caches, their cores and the memory is in them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from atoll.plan.cluster_profiles import at
from atoll.runtime.local.profile import RangeTable
from benchmarks.node_meter import LAG_S, Counted, NodeMeter
from benchmarks.report import ROOT
from benchmarks.streaming import Latency, StreamedAnswer, replay, stream_answer

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
_SEQUENCES = {1: 24, 2: 24, 4: 20, 8: 14}
"""Streams that decode together, and the tokens each of them gets."""
_MIXED = (96, 3)
"""A prompt beside so many streams."""
_BATCHES = (1, 2, 3, 4, 6, 8)
_TIMES = 3
Tables = tuple[RangeTable, ...]
Points = tuple[tuple[float, float], ...]


def build_problem(
    ranges: Sequence[tuple[str, int, int]] = RANGES,
    profiles: Mapping[str, NodeProfile] | None = None,
    hop_s: float = 0.0,
) -> tuple[Problem, Plan]:
    """Return the demo's fleet with a node for each range, measured or not yet, and the plan of those."""
    from atoll.perf.engines import EngineLaunch
    from atoll.plan.cluster import ClusterLink, ClusterNode
    from atoll.plan.files.fleet import load_fleet
    from atoll.plan.plan import Flow, Instance, Node, Plan, Route

    demo = load_fleet(ROOT / "examples" / "demo-local.yaml")
    assert demo.cluster is not None
    names = [f"machine-{number}" for number in range(len(ranges))]
    known = demo.cluster.profiles if profiles is None else {SERVICE: dict(profiles)}
    cluster = demo.cluster.model_copy(
        update={
            "profiles": known,
            "nodes": tuple(
                ClusterNode(name=name, node_type=kind, region="here")
                for name, (kind, _, _) in zip(names, ranges, strict=True)
            ),
            "links": (ClusterLink(src="*", dst="*", bytes_per_s=1.25e9, latency_s=hop_s),),
        }
    )
    nodes = tuple(
        Node(id=f"n{i}", node_type=kind, market="owned", start=a, end=b, tp=1, host=names[i])
        for i, (kind, a, b) in enumerate(ranges)
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
        if offer.node_type in {kind for kind, _, _ in ranges}
    )
    problem = demo.replace(cluster=cluster, offers=offers)
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
    """What probes of the engine in place have shown: a table of steps per node, and what is beside them.

    A hop takes `hop_s` beside the steps, and a request `request_s` until its first one. `closed` are, for so
    many streams that decode together, rows of a step on each node and seconds per token of a stream.
    """

    tables: Tables
    hop_s: float
    request_s: float
    closed: dict[int, tuple[tuple[float, ...], float]]


@dataclass(frozen=True, slots=True)
class StageRound:
    """A stretch of the trace as it was served, with what was measured before and after it."""

    requests: Requests
    served: tuple[Latency, ...]
    looks: tuple[StageLook, StageLook]


@asynccontextmanager
async def serve(
    plan: Plan, folder: Path, cores: Sequence[int]
) -> AsyncIterator[tuple[str, NodeMeter]]:
    """Run the plan behind the gateway; yields its address, and what hears its nodes."""
    from atoll.cli.serving import local_fleet
    from atoll.engine.weights.sources import DEFAULT_MODEL
    from atoll.runtime.instance.config import engine_name
    from atoll.runtime.local.build import LocalModel, LocalOptions

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


async def run_rounds(plan: Plan, folder: Path, traces: Sequence[Requests]) -> list[StageRound]:
    """Serve every trace, and probe the engine before, between and after them."""
    from atoll.runtime.local.cores import usable_cores

    cores = usable_cores()[: len(RANGES)]
    if len(cores) < len(RANGES):
        raise SystemExit(f"{len(RANGES)} nodes need as many cores")
    rounds = []
    async with serve(plan, folder, cores) as (url, meter):
        probes = StageProbes(url, meter)
        await probes.warm_up()
        before = await probes.look()
        for number, requests in enumerate(traces):
            served = await replay(url, SERVICE, requests, number)
            after = await probes.look()
            rounds.append(StageRound(requests, tuple(served), (before, after)))
            before = after
    return rounds


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
        await asyncio.gather(*(self._ask(_MIXED[0], 48) for _ in range(max(_SEQUENCES))))

    async def look(self) -> StageLook:
        """Make all probes once."""
        prompts, beside_s = await self._prompts()
        decodes: list[list[tuple[float, float]]] = [[] for _ in RANGES]
        closed = {}
        for streams, tokens in _SEQUENCES.items():
            found, token_s = await self._decode(streams, tokens)
            for points, counted in zip(decodes, found, strict=True):
                points.append((counted.rows / counted.steps, counted.busy_s / counted.steps))
            closed[streams] = (tuple(each.rows / each.steps for each in found), token_s)
        curves = [merge_points(points) for points in decodes]
        extra_s = await self._mixed(curves)
        tables = tuple(
            RangeTable(
                start=start,
                end=end,
                prefill_s=tuple(prompts[i]),
                decode_s=tuple((n, at(curves[i], float(n))) for n in _BATCHES),
                mixed_s=((*_MIXED, at(curves[i], float(_MIXED[1])) + extra_s[i]),),
            )
            for i, (_, start, end) in enumerate(RANGES)
        )
        hop_s = max(0.0, closed[1][1] - sum(points[0][1] for points in decodes)) / HOPS
        return StageLook(tables, hop_s, max(0.0, beside_s - HOPS * hop_s), closed)

    async def _prompts(self) -> tuple[list[list[tuple[int, float]]], float]:
        """Time single prompts; returns a curve per node, and what the first token takes beside steps."""
        curves: list[list[tuple[int, float]]] = [[] for _ in RANGES]
        beside_s = []
        before = await self._meter.settle()
        for size in _PROMPTS:
            first_s = [(await self._ask(size, 1)).latency.ttft_s for _ in range(_TIMES)]
            after = await self._meter.settle()
            took = [new.since(old) for new, old in zip(after, before, strict=True)]
            for curve, counted in zip(curves, took, strict=True):
                curve.append((size, counted.busy_s / counted.steps))
            steps_s = sum(counted.busy_s / counted.steps for counted in took)
            beside_s.append(float(np.mean(first_s)) - steps_s)
            before = after
        return curves, float(np.median(beside_s))

    async def _decode(self, streams: int, tokens: int) -> tuple[tuple[Counted, ...], float]:
        """Let streams decode together; returns the steps in between, and seconds per token of a stream."""
        answers = await asyncio.gather(*(self._ask(CONTEXT - 24, tokens) for _ in range(streams)))
        from_s = max(one.first_s for one in answers)
        until_s = min(one.last_s for one in answers)
        found = self._meter.between(from_s + LAG_S, until_s)
        return found, float(np.mean([one.latency.tpot_s for one in answers]))

    async def _mixed(self, curves: Sequence[Points]) -> list[float]:
        """Return what a prompt takes more, on each node, beside streams that decode."""
        size, streams = _MIXED
        running = [asyncio.create_task(self._ask(CONTEXT - 24, 44)) for _ in range(streams)]
        await self._ask(16, 4)
        await asyncio.sleep(LAG_S)
        from_s = time.monotonic()
        for _ in range(_TIMES):
            await self._ask(size, 1)
        await asyncio.sleep(LAG_S)
        found = self._meter.between(from_s - 0.3, time.monotonic())
        await asyncio.gather(*running)
        extra_s = []
        for curve, counted in zip(curves, found, strict=True):
            rows = counted.rows - _TIMES * size
            batch = rows / counted.steps
            extra_s.append((counted.busy_s - counted.steps * at(curve, batch)) / _TIMES)
        return extra_s


def merge_points(points: Sequence[tuple[float, float]]) -> Points:
    """Return measured points as a curve, means of those that lie within a tenth of each other."""
    merged: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if merged and point[0] < 1.1 * merged[-1][0][0]:
            merged[-1].append(point)
        else:
            merged.append([point])
    return tuple(
        (float(np.mean([n for n, _ in some])), float(np.mean([s for _, s in some])))
        for some in merged
    )


def mean_table(some: Sequence[RangeTable]) -> RangeTable:
    """Return the mean of tables of one range."""
    first = some[0]

    def mean(name: str) -> tuple[tuple[float, ...], ...]:
        rows = np.mean([getattr(table, name) for table in some], axis=0)
        return tuple((*map(int, row[:-1]), float(row[-1])) for row in rows)

    fields = {name: mean(name) for name in ("prefill_s", "decode_s", "mixed_s")}
    return first.model_copy(update=fields)


def simulate_round(one: StageRound) -> tuple[list[float], list[float]]:
    """Simulate a stretch with what was measured around it; returns TTFT and TPOT of its requests."""
    from atoll.runtime.local.profile import profile_of
    from atoll.sim.api import simulate
    from atoll.sim.options import SimComponent, SimOptions

    profiles = {}
    for i, (kind, start, end) in enumerate(RANGES):
        table = mean_table([look.tables[i] for look in one.looks])
        profiles[kind] = profile_of(table, None, (1e5,) * (end - start))
    hop_s = float(np.mean([look.hop_s for look in one.looks]))
    request_s = float(np.mean([look.request_s for look in one.looks]))
    problem, plan = build_problem(profiles=profiles, hop_s=hop_s)
    front = SimComponent("front", servers=64, item_s=max(request_s, 1e-9))
    options = SimOptions(
        token_budget=512,
        components=(front,),
        classes=dict.fromkeys(one.requests.classes, (("front",), ("llm",))),
    )
    found = simulate(plan, problem, problem.catalog(), one.requests, options).requests
    return found.ttft_s.tolist(), found.tpot_s.tolist()
