"""Helix's clusters, published placements, trace and rules of admission, for the simulator.

Offline, Helix starts with 20 requests and lets one in whenever a prompt or a request ends and at most 80 %
of the fullest layer's KV cache is booked; a request counts with its prompt and a mean answer, a node takes
it up to 85 %. Baselines know no booking: a number of requests is kept in flight that just does not overflow.
Both measure 600 s after 60 s. Online, requests arrive as in the Azure trace, scaled, for 1,800 s.
"""

from __future__ import annotations

import configparser
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from atoll.plan.files.helix import NODE_TYPES, helix_problem, read_solution
from atoll.plan.plan import Plan
from atoll.plan.problem import Problem, Router
from atoll.sim.api import simulate
from atoll.sim.sim_options import SimOptions
from atoll.sim.sim_result import SimReport
from atoll.solve.assembly import assemble
from atoll.solve.place.evaluate import edges, max_flow
from atoll.solve.place.flow_instance import FlowInstance, Flows, Placement
from atoll.solve.place.from_problem import flow_instance, placement_of
from atoll.solve.place.place_to_plan import Placed, instances_of, plan_of
from atoll.workload.requests import Requests

ACTIVATION_BYTES = {"LLaMA-2-70B": 16384.0, "LLaMA-1-30B": 13312.0}
COPY_S_PER_BYTE = 1 / 4e9 + 1 / 5e9
"""Helix gathers the activations of a step on the host and copies them to the GPU, so fast."""
TRICKLE = 0.05
"""Helix's scheduler does not use a way with less than this share of what leaves a node."""
WARM_UP_S, OFFLINE_S, ONLINE_S = 60.0, 600.0, 1800.0
INTERVAL_S = 3


@dataclass(frozen=True)
class Part:
    """A placement on (a part of) a cluster: its files, and for a baseline the requests kept in flight.

    `arrives` is the tokens/s that Helix's files ask of it online. `own_nodes`: its nodes are numbered by
    themselves, and known by their types only.
    """

    cluster: str
    solution: str
    flying: int = 20
    own_nodes: bool = False
    arrives: float = 0.0


@dataclass(frozen=True)
class Ran:
    """Decode tokens/s, prompt latencies and gaps between tokens, in seconds (medians)."""

    tokens_per_s: float
    prompt_s: float
    decode_s: float
    retries: int


@lru_cache(maxsize=4)
def lengths(data: Path) -> np.ndarray:
    """Return (prompt, answer) tokens of the trace."""
    return np.loadtxt(
        data / "helix/trace/azure_conv_lengths.csv", delimiter=",", skiprows=1, dtype=np.int32
    )


def offline_work(data: Path, count: int = 30_000, seed: int = 0) -> Requests:
    """Return requests in the order in which Helix draws their lengths."""
    table = lengths(data)
    draw = random.Random(seed)
    rows = [draw.randint(0, len(table) - 1) for _ in range(count)]
    return Requests.of(np.zeros(count), table[rows, 0], table[rows, 1])


def online_work(data: Path, tokens_per_s: float, seed: int = 0) -> Requests:
    """Return arrivals with the rates of the trace's intervals, scaled to tokens/s, drawn as Helix does."""
    table = lengths(data)
    path = data / "helix/trace/azure_conv_arrivals_per_3s.csv"
    counts = np.loadtxt(path, delimiter=",", skiprows=1)
    scale = INTERVAL_S * tokens_per_s / float(table.sum(axis=1).mean()) / float(counts.mean())
    draw = random.Random(seed)
    rows: list[tuple[float, int, int]] = []
    owed = 0.0
    for interval in range(int(ONLINE_S) // INTERVAL_S):
        wanted = float(counts[draw.randint(0, len(counts) - 1)]) * scale + owed
        number = round(wanted)
        owed = wanted - number
        begin = interval * INTERVAL_S
        times = sorted(begin + INTERVAL_S * draw.random() for _ in range(number))
        for time_s in times:
            row = table[draw.randint(0, len(table) - 1)]
            rows.append((time_s, int(row[0]), int(row[1])))
    columns = np.array(rows)
    return Requests.of(
        columns[:, 0], columns[:, 1].astype(np.int32), columns[:, 2].astype(np.int32)
    )


def load(
    data: Path, part: Part, model: str, *, partial: bool = False
) -> tuple[Problem, FlowInstance, Placement]:
    """Return the problem, the cluster and a published placement on it.

    Where separate pipelines hold more layers than the profile allows, it is stretched: KV room as the
    simulator's cluster file says, batch limits as with the most layers that fit.
    """
    folder = data / "helix"
    problem = helix_problem(folder / f"clusters/{part.cluster}.ini", model=model)
    assert problem.cluster is not None
    nodes = problem.cluster.nodes
    path = folder / "solutions" / part.solution
    ranges: Sequence[tuple[int, int]] = read_solution(path, len(nodes))
    file = _simulated(folder, part)
    room = {i: file.getfloat(name, "kv_cache_capacity") for i, name in _numbered(file)}
    if part.own_nodes:
        kinds = {i: file.get(name, "machine_type").strip('"') for i, name in _numbered(file)}
        ranges, room = _by_type(problem, ranges, room, kinds)
    problem = _stretched(problem, ranges, room)
    instance = flow_instance(problem, problem.catalog(), problem.services[0], partial=partial)
    names = {node.name: held for node, held in zip(nodes, ranges, strict=True)}
    return problem, instance, placement_of(instance, [names[name] for name in instance.names])


def _simulated(folder: Path, part: Part) -> configparser.ConfigParser:
    """The cluster as Helix's simulator was given it for a placement: KV room and type of every node."""
    name = Path(part.solution).name.replace("solution_file", "simulator_cluster")
    if "solution_file" not in part.solution:
        name = "simulator_cluster.ini"
    file = configparser.ConfigParser(interpolation=None)
    file.read(folder / "solutions" / Path(part.solution).parent / name)
    return file


def _numbered(file: configparser.ConfigParser) -> Iterator[tuple[int, str]]:
    for name in file.sections():
        if name.startswith("compute_node_"):
            yield int(name.rsplit("_", 1)[1]) - 2, name


def _by_type(
    problem: Problem,
    ranges: Sequence[tuple[int, int]],
    room: dict[int, float],
    kinds: dict[int, str],
) -> tuple[list[tuple[int, int]], dict[int, float]]:
    """Give the ranges of nodes numbered by themselves to nodes of the cluster of the same types."""
    assert problem.cluster is not None
    free: dict[str, list[int]] = {kind: [] for kind in NODE_TYPES.values()}
    for at, node in enumerate(problem.cluster.nodes):
        free[node.node_type].append(at)
    found, rooms = [(0, 0)] * len(problem.cluster.nodes), {}
    for i, kind in sorted(kinds.items()):
        if ranges[i][1] > ranges[i][0]:
            at = free[NODE_TYPES[kind]].pop(0)
            found[at], rooms[at] = ranges[i], room[i]
    return found, rooms


def _stretched(
    problem: Problem, ranges: Sequence[tuple[int, int]], room: dict[int, float]
) -> Problem:
    cluster = problem.cluster
    assert cluster is not None
    service = problem.services[0]
    own = dict(cluster.profiles[service.model])
    changed = False
    for index, (node, (start, end)) in enumerate(zip(cluster.nodes, ranges, strict=True)):
        profile = own[node.node_type]
        held = end - start
        if held <= profile.max_layers:
            continue
        more = held - profile.max_layers
        tokens = room.get(index, profile.kv_tokens[-1] * held) / held
        limits = {
            name: (*getattr(profile, name), *[getattr(profile, name)[-1]] * more)
            for name in ("prefill_requests", "decode_sequences")
        }
        own[node.node_type] = profile.model_copy(
            update={
                "max_layers": held,
                "kv_tokens": (*profile.kv_tokens, *[tokens] * more),
                **limits,
            }
        )
        changed = True
    if not changed:
        return problem
    wide = cluster.model_copy(update={"profiles": {service.model: own}, "kv_fill": 1.0})
    return problem.model_copy(update={"cluster": wide})


def flow_plan(problem: Problem, instance: FlowInstance, placement: Placement) -> Plan:
    """Return the plan that sends requests along a largest flow, as Helix's scheduler does."""
    flows = _without_trickles(max_flow(instance, placement))
    placed = Placed(problem.services[0], instance, placement, flows)
    return plan_of(
        problem, problem.catalog(), [placed], goal="max-flow", bound=None, solver="helix"
    )


def _without_trickles(flows: Flows) -> Flows:
    edge, leave, enter = flows.edge.copy(), flows.leave.copy(), flows.enter.copy()
    out = edge.sum(axis=1) + leave
    edge[edge < TRICKLE * out[:, None]] = 0.0
    leave[leave < TRICKLE * out] = 0.0
    enter[enter < TRICKLE * enter.sum()] = 0.0
    return Flows(flows.value, edge, enter, leave)


def even_plan(problem: Problem, instance: FlowInstance, placement: Placement) -> Plan:
    """Return the plan in which every way that the layers allow is as good as any other."""
    n = instance.size
    edge = np.zeros((n, n))
    edge[edges(instance, placement)] = 1.0
    used = placement.end > placement.start
    enter = (used & (placement.start == 0)).astype(np.float64)
    leave = (used & (placement.end == instance.layers)).astype(np.float64)
    # Machines that no way through all layers passes are left out.
    reached, leads = enter > 0, leave > 0
    for _ in range(n):
        reached = reached | (edge[reached] > 0).any(axis=0)
        leads = leads | (edge[:, leads] > 0).any(axis=1)
    passed = reached & leads
    edge *= np.outer(passed, passed)
    enter *= passed
    leave *= passed
    flows = Flows(float(enter.sum()), edge, enter, leave)
    catalog = problem.catalog()
    service = problem.services[0]
    own = instances_of(problem, catalog, Placed(service, instance, placement, flows))
    tokens = service.lengths.input_mean + service.lengths.output_mean
    return assemble(
        problem, own, status="feasible", solver="even", goal="max-flow",
        value=tokens * sum(one.throughput_per_s for one in own),
    )  # fmt: skip


def options(model: str, **more: object) -> SimOptions:
    """Return the settings with which the simulator does what Helix's does."""
    return SimOptions(
        batching="best-effort",
        single_messages=True,
        first_token=False,
        handover_s=ACTIVATION_BYTES[model] * COPY_S_PER_BYTE,
        **more,  # type: ignore[arg-type]
    )


def offline(data: Path, problem: Problem, plan: Plan, model: str, router: Router = "plain") -> Ran:
    """Run a plan with as much work as it takes, with Helix's scheduler or Atoll's router."""
    own = options(
        model,
        router=router,
        feed="watermark",
        concurrency=20,
        high_water=0.85,
        until_s=WARM_UP_S + OFFLINE_S,
        from_s=WARM_UP_S,
    )
    return _ran(simulate(plan, problem, problem.catalog(), offline_work(data), own))


def offline_kept(
    data: Path, problem: Problem, plan: Plan, model: str, policy: str, flying: int
) -> Ran:
    """Run a plan with another policy and a number of requests kept in flight."""
    own = options(
        model,
        policy=policy,
        feed="closed",
        concurrency=flying,
        high_water=1.0,
        output_ratio=0.0,
        until_s=WARM_UP_S + OFFLINE_S,
        from_s=WARM_UP_S,
    )
    return _ran(simulate(plan, problem, problem.catalog(), offline_work(data), own))


def kept_without_overflow(data: Path, problem: Problem, plan: Plan, model: str, policy: str) -> Ran:
    """Run a plan with another policy and the most requests in flight, in twenties, that fit the KV caches."""
    best: Ran | None = None
    for flying in range(100, 1000, 20):
        ran = offline_kept(data, problem, plan, model, policy, flying)
        if ran.retries:
            break
        best = ran
    assert best is not None
    return best


def online(
    data: Path,
    problem: Problem,
    plan: Plan,
    model: str,
    tokens_per_s: float,
    policy: str = "iwrr",
    router: Router = "atoll",
) -> Ran:
    """Run a plan under arrivals of so many tokens/s."""
    booked = {"high_water": 0.9, "output_ratio": 0.6}
    if policy != "iwrr":
        booked = {"high_water": 1.0, "output_ratio": 0.0}
    own = options(model, policy=policy, router=router, until_s=ONLINE_S, **booked)
    return _ran(simulate(plan, problem, problem.catalog(), online_work(data, tokens_per_s), own))


def _ran(found: SimReport) -> Ran:
    own = found.services[0]
    return Ran(own.tokens_per_s, own.ttft_s.p50 or 0.0, own.token_gap_s.p50 or 0.0, found.retries)
