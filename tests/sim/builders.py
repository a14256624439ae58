"""Small problems, plans and workloads for the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np

from atoll.catalog import Catalog
from atoll.core.ids import Phase
from atoll.perf.layers import default_tp
from atoll.plan.cluster import Cluster, ClusterLink, ClusterNode, NodeProfile
from atoll.plan.plan import Flow, Instance, Node, Plan, Route
from atoll.plan.problem import Lengths, Offer, Problem, Service, Settings
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import Requests

CATALOG = Catalog.default()
REGION = "here"
LAYERS = 80
"""Layers of the model that clusters run."""
READ_S = 6.5e-3
"""What vLLM takes for a request beside steps, on every instance that is asked."""
TOKENIZE_S = 3e-6
"""What it takes for each token of a prompt, where that is computed."""


def service(name: str = "m", model: str = "llama-3.1-8b", *, apart: bool = False) -> Service:
    """Return a service with generous promises and mean lengths of 512 and 64 tokens."""
    return Service(
        name=name,
        model=model,
        ttft_s=5.0,
        tpot_s=0.2,
        rate_per_s=1.0,
        lengths=Lengths.of(LengthMix.fixed(512.0, 64.0)),
        phases="apart" if apart else "together",
    )


def problem(
    *services: Service, nodes: Sequence[str] = ("A100-80:1",), engine: str = "vllm"
) -> Problem:
    """Return a problem with plenty of some node types in one region."""
    return Problem(
        name="test",
        services=services or (service(),),
        offers=tuple(
            Offer(region=REGION, node_type=kind, available=64, usd_per_hour=2.0) for kind in nodes
        ),
        settings=Settings(engine=engine),
    )


def placed(
    own: Problem,
    name: str,
    phase: Phase,
    *stages: tuple[int, int, tuple[str, ...]],
    region: str = REGION,
    tp: int | None = None,
    gpus: int | None = None,
    mine: Service | None = None,
) -> Instance:
    """Return an instance with these layers on these machines, whole or so many GPUs of each.

    It is of the first service unless another is given.
    """
    mine = mine or own.services[0]
    spec = CATALOG.model(mine.model).llm
    layers: list[list[Node]] = []
    for start, end, kinds in stages:
        layers.append([])
        for kind in kinds:
            number = sum(map(len, layers))
            cut = None if gpus is None else tuple(range(gpus))
            bare = Node(
                id=f"n{number}", node_type=kind, market="on-demand", start=start, end=end, tp=1
            ).model_copy(update={"gpu_ids": cut, "slot": None if cut is None else number})
            widest = default_tp(spec, CATALOG.node(bare.kind))
            layers[-1].append(bare.model_copy(update={"tp": tp or widest}))
    ends = [[("source", 1)], *([(n.id, n.gpus) for n in some] for some in layers), [("sink", 1)]]
    flows = [
        Flow(src=a, dst=b, per_s=x * y / sum(g for _, g in here) / sum(g for _, g in there))
        for here, there in pairwise(ends)
        for a, x in here
        for b, y in there
    ]
    return Instance(
        id=name,
        service=mine.name,
        role=f"{mine.name}/llm/{phase}",
        region=region,
        stages=len(stages),
        nodes=tuple(node for some in layers for node in some),
        flows=tuple(flows),
        throughput_per_s=1.0,
        usd_per_hour=sum(2.0 * node.share for some in layers for node in some),
    )


def planned(
    own: Problem, instances: Sequence[Instance], ways: dict[tuple[str, ...], float]
) -> Plan:
    """Return a plan with these instances and these ways."""
    service_of = {instance.id: instance.service for instance in instances}
    machines = {
        (i.region_of(node), node.node_type, node.slot if node.gpu_ids else f"{i.id}/{node.id}")
        for i in instances
        for node in i.nodes
    }
    return Plan(
        problem_hash=own.content_hash(),
        problem_name=own.name,
        instances=tuple(instances),
        routes=tuple(
            Route(service=service_of[way[0]], instances=way, share=share)
            for way, share in ways.items()
        ),
        usd_per_hour=2.0 * len(machines),
        status="feasible",
        solver="test",
    )


def laid_out(own: Problem, *stages: tuple[int, int, tuple[str, ...]], copies: int = 1) -> Plan:
    """Return a plan with instances of one layout for every role; apart, each goes with each."""
    instances: list[Instance] = []
    ways: dict[tuple[str, ...], float] = {}
    for mine in own.services:
        by_phase = [
            [
                placed(own, f"{mine.name}-{role.phase}-{k}", role.phase, *stages, mine=mine)
                for k in range(copies)
            ]
            for role in mine.roles
        ]
        instances += [instance for some in by_phase for instance in some]
        for way in product(*by_phase):
            ways[tuple(instance.id for instance in way)] = 1.0 / copies ** len(by_phase)
    return planned(own, instances, ways)


def whole(own: Problem, copies: int = 1, node: str = "A100-80:1") -> Plan:
    """Return a plan with the whole model on each of some nodes."""
    layers = CATALOG.model(own.services[0].model).llm.layers
    return laid_out(own, (0, layers, (node,)), copies=copies)


def requests(
    arrival_s: Sequence[float], prompt: int | Sequence[int], answer: int | Sequence[int]
) -> Requests:
    """Return requests at these times."""
    count = len(arrival_s)
    return Requests.of(
        np.array(arrival_s, np.float64),
        np.broadcast_to(np.array(prompt, np.int32), count).copy(),
        np.broadcast_to(np.array(answer, np.int32), count).copy(),
    )


def poisson(
    count: int, rate: float, seed: int = 0, prompt: int = 512, answer: int = 64
) -> Requests:
    """Return requests with gaps and lengths drawn around means."""
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(1.0 / rate, count))
    lengths = [
        np.maximum(1, random.geometric(1.0 / mean, count)).astype(np.int32)
        for mean in (prompt, answer)
    ]
    return Requests.of(arrival, *lengths)


def linear_profile(second_per_token_layer: float, layers: int, kv_tokens: float) -> NodeProfile:
    """Return a node whose steps take a fixed time per token and layer, whatever the batch."""
    line = ((0.0, 0.0), (1.0, second_per_token_layer), (1e6, 1e6 * second_per_token_layer))
    return NodeProfile(
        max_layers=layers,
        kv_tokens=(kv_tokens,) * layers,
        prefill_s_per_layer=line,
        decode_s_per_layer=line,
        tokens_per_s=tuple(1.0 / (second_per_token_layer * j) for j in range(1, layers + 1)),
        prefill_requests=(1,) * layers,
        decode_sequences=(256,) * layers,
    )


def cluster_problem(
    speeds: Sequence[float],
    *,
    kv_tokens: float = 1e6,
    bytes_per_s: float = 1e9,
    latency_s: float = 1e-3,
    mean: tuple[float, float] = (64.0, 16.0),
) -> Problem:
    """Return a cluster with a node of each speed (token-layers per second) for an 80-layer model.

    There are as many node types with profiles as speeds, so at most eight.
    """
    kinds = ("A100-80:1", "A100-40:1", "L4:1", "T4:1", "L40S:1", "A10G:1", "H100:1", "V100-16:1")
    nodes = tuple(
        ClusterNode(name=f"host-{i}", node_type=kinds[i], region=REGION) for i in range(len(speeds))
    )
    profiles = {
        kinds[i]: linear_profile(1.0 / speed, LAYERS, kv_tokens) for i, speed in enumerate(speeds)
    }
    own = service(model="llama-2-70b").model_copy(
        update={"lengths": Lengths.of(LengthMix.fixed(*mean))}
    )
    return Problem(
        name="cluster",
        services=(own,),
        settings=Settings(engine="none"),
        cluster=Cluster(
            nodes=nodes,
            links=(ClusterLink(src="*", dst="*", bytes_per_s=bytes_per_s, latency_s=latency_s),),
            profiles={"m": profiles},
            kv_fill=1.0,
        ),
    )


def cluster_plan(
    own: Problem,
    ranges: Sequence[tuple[int, int]],
    flows: Sequence[tuple[str, str, float]],
    *,
    partial: bool = False,
) -> Plan:
    """Return a plan with layers [start, end) on each host and flows in requests/s between n0, n1, ..."""
    assert own.cluster is not None
    nodes = tuple(
        Node(
            id=f"n{i}",
            node_type=host.node_type,
            market="owned",
            start=start,
            end=end,
            tp=1,
            host=host.name,
        )
        for i, (host, (start, end)) in enumerate(zip(own.cluster.nodes, ranges, strict=True))
    )
    rate = sum(flow for src, _, flow in flows if src == "source")
    instance = Instance(
        id="m-both-0",
        service="m",
        role="m/llm/both",
        region=REGION,
        stages=len(nodes),
        nodes=nodes,
        flows=tuple(Flow(src=a, dst=b, per_s=f) for a, b, f in flows),
        throughput_per_s=rate,
        usd_per_hour=0.0,
        partial=partial,
    )
    return Plan(
        problem_hash=own.content_hash(),
        problem_name=own.name,
        instances=(instance,),
        routes=(Route(service="m", instances=("m-both-0",), share=1.0),),
        usd_per_hour=0.0,
        status="feasible",
        solver="test",
    )
