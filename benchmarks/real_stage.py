"""The stage engine on this machine: SmolLM2 cut unevenly over two nodes, behind the gateway.

Each node has a core of its own, as in a fleet every node is a machine of its own; instance, gateway and
clients run beside them. Profiles are taken by processes that hold the same layers on the same cores, both at
once, since cores share caches and memory.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import ROOT
from benchmarks.streaming import Latency, answer, replay

if TYPE_CHECKING:
    from atoll.plan.cluster import NodeProfile
    from atoll.plan.plan import Plan
    from atoll.plan.problem import Problem
    from atoll.runtime.local.profile import ProfileOptions, RangeTable
    from atoll.workload.requests import Requests

SERVICE = "smollm2"
RANGES = (("CORE-L:1", 0, 18), ("CORE-S:1", 18, 30))
LENGTHS = "normal:96/0.4x40/0.3"
RATE_PER_S = 0.9
CONTEXT = 120
KV_BYTES = 128 * 2**20
_SHORT, _LONG = 32, 192
_ANSWER = 24
"""Prompts and answer of single streams."""
Tables = tuple["RangeTable", ...]
Alone = tuple[Latency, Latency]


def profile_options() -> ProfileOptions:
    """What is measured in a round: sizes that the trace has."""
    from atoll.runtime.local.profile import ProfileOptions

    return ProfileOptions(
        repeats=3,
        prompts=(16, 32, 64, 96, 128, 192),
        sequences=(1, 2, 4, 8),
        mixed=((96, 2), (96, 4)),
        context=CONTEXT,
    )


def _profile(pipe: Connection, folder: Path, start: int, end: int, core: int) -> None:
    """Hold a range on a core and measure it whenever asked."""
    from atoll.runtime.local.profile import RangeTimer

    os.sched_setaffinity(0, {core})
    timer = RangeTimer(folder, start, end, profile_options())
    timer.measure()
    pipe.send(None)
    while pipe.recv():
        pipe.send(timer.measure())


@contextmanager
def profilers(folder: Path, cores: Sequence[int]) -> Iterator[list[Connection]]:
    """Processes that profile the ranges, each on its core."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    with ExitStack() as stack:
        for (_, start, end), core in zip(RANGES, cores, strict=True):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=_profile, args=(theirs, folder, start, end, core), daemon=True
            )
            process.start()
            theirs.close()
            stack.callback(process.join, 10.0)
            stack.callback(ours.send, False)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        yield pipes


def measure(pipes: Sequence[Connection]) -> Tables:
    """Let all measure at the same time."""
    for pipe in pipes:
        pipe.send(True)
    return tuple(pipe.recv() for pipe in pipes)


def build_problem(
    ranges: Sequence[tuple[str, int, int]] = RANGES,
    profiles: Mapping[str, NodeProfile] | None = None,
    hop_s: float = 0.0,
) -> tuple[Problem, Plan]:
    """Return the demo's fleet with a node for each range, measured or not yet, and the plan of those."""
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
    )
    return problem, plan


@dataclass(frozen=True, slots=True)
class StageRound:
    """A stretch of the trace as it was served, with what was measured before and after it.

    `alone` are answers to a single client, to a short and to a long prompt, before and after.
    """

    requests: Requests
    served: tuple[Latency, ...]
    tables: tuple[Tables, Tables]
    alone: tuple[Alone, Alone]


@asynccontextmanager
async def serve(plan: Plan, folder: Path, cores: Sequence[int]) -> AsyncIterator[str]:
    """Run the plan behind the gateway; yields its address."""
    from atoll.cli.serving import local_fleet
    from atoll.engine.weights.sources import DEFAULT_MODEL
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
        try:
            yield fleet.url
        finally:
            await fleet.stop(5.0)


async def run_rounds(plan: Plan, folder: Path, traces: Sequence[Requests]) -> list[StageRound]:
    """Serve every trace, and measure the machine before, between and after them."""
    from atoll.runtime.local.cores import usable_cores

    cores = usable_cores()[: len(RANGES)]
    if len(cores) < len(RANGES):
        raise SystemExit(f"{len(RANGES)} nodes need as many cores")
    rounds = []
    async with serve(plan, folder, cores) as url:
        with profilers(folder, cores) as pipes:
            await answer(url, SERVICE, 10**6, 64, 48)
            before = await _look(url, pipes, 0)
            for number, requests in enumerate(traces):
                served = await replay(url, SERVICE, requests, number)
                after = await _look(url, pipes, number + 1)
                tables, alone = (before[0], after[0]), (before[1], after[1])
                rounds.append(StageRound(requests, tuple(served), tables, alone))
                before = after
    return rounds


async def _look(url: str, pipes: Sequence[Connection], number: int) -> tuple[Tables, Alone]:
    """Measure the ranges, and single streams before and after that."""
    short = await answer(url, SERVICE, 10**6 + 2 * number + 1, _SHORT, _ANSWER)
    tables = await asyncio.to_thread(measure, pipes)
    return tables, (short, await answer(url, SERVICE, 10**6 + 2 * number + 2, _LONG, _ANSWER))


def mean_table(some: Sequence[RangeTable]) -> RangeTable:
    """Return the mean of tables of one range."""
    first = some[0]

    def mean(name: str) -> tuple[tuple[float, ...], ...]:
        rows = np.mean([getattr(table, name) for table in some], axis=0)
        return tuple((*map(int, row[:-1]), float(row[-1])) for row in rows)

    fields = {name: mean(name) for name in ("prefill_s", "decode_s", "mixed_s")}
    return first.model_copy(update=fields)


@dataclass(frozen=True, slots=True)
class InPlace:
    """How the nodes of the engine differ from ranges that run by themselves.

    Their steps take `factor` as long: between steps they wait, and others use their caches and cores. A hop
    takes `hop_s` beside the steps, and a request `request_s` until its first one.
    """

    factor: float
    hop_s: float
    request_s: float


def look_in_place(rounds: Sequence[StageRound]) -> InPlace:
    """Find it from single streams, apart from what is compared.

    What a long prompt takes more than a short one is steps alone, and gives the factor; what is left of a
    token's time is hops, and what is left of the first one's is the request's.
    """
    from atoll.plan.cluster_profiles import at

    looks = [(rounds[0].tables[0], rounds[0].alone[0])]
    looks += [(each.tables[1], each.alone[1]) for each in rounds]
    prompts = {
        size: float(np.mean([sum(at(t.prefill_s, float(size)) for t in some) for some, _ in looks]))
        for size in (_SHORT, _LONG)
    }
    token_s = float(np.mean([sum(at(t.decode_s, 1.0) for t in some) for some, _ in looks]))
    short_s = float(np.mean([short.ttft_s for _, (short, _) in looks]))
    long_s = float(np.mean([long.ttft_s for _, (_, long) in looks]))
    each_s = float(np.mean([one.tpot_s for _, some in looks for one in some]))
    factor = max(1.0, (long_s - short_s) / (prompts[_LONG] - prompts[_SHORT]))
    # Nor do tokens of a single stream take longer than they did.
    factor = min(factor, each_s / token_s) if each_s > token_s else 1.0
    hops = len(RANGES) + 1
    hop_s = max(0.0, each_s - factor * token_s) / hops
    return InPlace(factor, hop_s, max(0.0, short_s - factor * prompts[_SHORT] - hops * hop_s))


def slow_down(table: RangeTable, factor: float) -> RangeTable:
    """Return a table whose steps take so many times as long."""
    return table.model_copy(
        update={
            name: tuple((*row[:-1], factor * row[-1]) for row in getattr(table, name))
            for name in ("prefill_s", "decode_s", "mixed_s")
        }
    )


def simulate_round(one: StageRound, there: InPlace) -> tuple[list[float], list[float]]:
    """Simulate a stretch with what was measured around it; returns TTFT and TPOT of its requests."""
    from atoll.runtime.local.profile import profile_of
    from atoll.sim.api import simulate
    from atoll.sim.options import SimComponent, SimOptions

    profiles = {}
    for i, (kind, start, end) in enumerate(RANGES):
        table = slow_down(mean_table([tables[i] for tables in one.tables]), there.factor)
        profiles[kind] = profile_of(table, None, (1e5,) * (end - start))
    problem, plan = build_problem(profiles=profiles, hop_s=there.hop_s)
    front = SimComponent("front", servers=64, item_s=max(there.request_s, 1e-9))
    options = SimOptions(
        token_budget=512,
        order="arrival",
        components=(front,),
        classes=dict.fromkeys(one.requests.classes, (("front",), ("llm",))),
    )
    found = simulate(plan, problem, problem.catalog(), one.requests, options).requests
    return found.ttft_s.tolist(), found.tpot_s.tolist()
