"""A small cluster of measured nodes over two sites, and a plan on it made by hand."""

from __future__ import annotations

from pathlib import Path

from atoll.plan.cluster import Cluster, ClusterLink, ClusterNode, NodeProfile
from atoll.plan.plan import Flow, Instance, Node, Plan
from atoll.plan.problem import Lengths, Problem, Service
from atoll.solve.assembly import assemble
from atoll.workload.lengths import LengthMix

HELIX = Path(__file__).resolve().parents[3] / "shared/data/helix"
MODEL = "llama-3.2-1b"
LAYERS = 16
TOKENS = 200.0
"""Tokens of a request."""


def profile(most: int, rate: float, **changes: object) -> NodeProfile:
    """A node that carries rate / j tokens/s with j layers."""
    values: dict[str, object] = {
        "max_layers": most,
        "kv_tokens": tuple(20_000.0 / j for j in range(1, most + 1)),
        "prefill_s_per_layer": ((0.0, 0.0), (1000.0, 1000.0 / rate)),
        "decode_s_per_layer": ((0.0, 0.0), (10.0, 0.001)),
        "tokens_per_s": tuple(rate / j for j in range(1, most + 1)),
    }
    return NodeProfile.model_validate(values | changes)


NODES = (
    ClusterNode(name="a", node_type="L40S:1", region="north"),
    ClusterNode(name="b", node_type="L4:1", region="north"),
    ClusterNode(name="c", node_type="L4:1", region="south"),
    ClusterNode(name="d", node_type="L4:1", region="south"),
)
LINKS = (
    ClusterLink(src="*", dst="*", bytes_per_s=1e9, latency_s=0.001),
    ClusterLink(src="north", dst="south", bytes_per_s=4e6, latency_s=0.05),
)


def cluster(**changes: object) -> Cluster:
    values: dict[str, object] = {
        "nodes": NODES,
        "links": LINKS,
        "profiles": {MODEL: {"L40S:1": profile(12, 12_000.0), "L4:1": profile(8, 4_000.0)}},
    }
    return Cluster.model_validate(values | changes)


def service(name: str = "chat", **changes: object) -> Service:
    values: dict[str, object] = {
        "name": name,
        "model": MODEL,
        "ttft_s": 10.0,
        "tpot_s": 1.0,
        "rate_per_s": 1.0,
        "lengths": Lengths.of(LengthMix.fixed(150.0, 50.0)),
        "phases": "together",
    }
    return Service.model_validate(values | changes)


def problem(**changes: object) -> Problem:
    values: dict[str, object] = {"name": "lab", "services": (service(),), "cluster": cluster()}
    return Problem.model_validate(values | changes)


def _node(index: int, host: str, start: int, end: int) -> Node:
    own = {node.name: node for node in NODES}[host]
    return Node(
        id=f"n{index}",
        node_type=own.node_type,
        market="owned",
        start=start,
        end=end,
        tp=1,
        host=host,
        region=None if own.region == "south" else own.region,
    )


def instance() -> Instance:
    """a holds [0, 8); b, c and d [8, 16): 500 + 450 + 450 tokens/s of what a could carry, 1,500.

    Between the sites a link lets 4e6 / 4096 = 977 tokens/s through, 2048 hidden values of 2 bytes each.
    """
    parts = {"n1": 500.0, "n2": 450.0, "n3": 450.0}
    flows = [Flow(src="source", dst="n0", per_s=sum(parts.values()) / TOKENS)]
    flows += [Flow(src="n0", dst=n, per_s=x / TOKENS) for n, x in parts.items()]
    flows += [Flow(src=n, dst="sink", per_s=x / TOKENS) for n, x in parts.items()]
    return Instance(
        id="chat-both-0",
        service="chat",
        role="chat/llm/both",
        region="south",
        stages=2,
        nodes=(_node(0, "a", 0, 8), *(_node(i, h, 8, 16) for i, h in enumerate("bcd", 1))),
        flows=tuple(flows),
        throughput_per_s=1400.0 / TOKENS,
        usd_per_hour=0.0,
    )


def plan(asked: Problem | None = None, *, bound: float | None = 1500.0) -> Plan:
    return assemble(
        asked or problem(),
        (instance(),),
        status="feasible",
        solver="hand",
        goal="max-flow",
        value=1400.0,
        bound=bound,
    )
