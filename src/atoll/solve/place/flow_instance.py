"""A fixed cluster and one model as arrays: what every flow solver is given, and what it returns.

Node i holds layers [start_i, end_i), at most `max_layers[i]` of them, and then carries at most
`rate[i, end_i - start_i]` tokens/s. Tokens flow from the source over nodes to the sink: into nodes that
start at layer 0, out of nodes that end at the last layer, and from i to k where a link exists and
end_i = start_k or, with partial inference, start_k <= end_i < end_k. The value of a placement is the
largest flow, in tokens/s, prompt and generated tokens alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from atoll.core.ids import format_node_type, parse_node_type
from atoll.plan.cluster_capacities import PromisedNode
from atoll.plan.problem import Service
from atoll.solve.array_types import Floats, Ints


@dataclass(frozen=True)
class Unit:
    """Unit that layers are placed on: a machine of a cluster, or a slice of its GPUs (`gpu_ids`)."""

    host: str
    machine: str
    region: str
    gpu_ids: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The machine's name, with the GPUs of a slice."""
        if self.gpu_ids is None:
            return self.host
        first, last = self.gpu_ids[0], self.gpu_ids[-1]
        return f"{self.host}[{first}]" if first == last else f"{self.host}[{first}-{last}]"

    @property
    def gpus(self) -> int:
        """How many GPUs it has."""
        return len(self.gpu_ids) if self.gpu_ids else parse_node_type(self.machine).gpu_count

    @property
    def kind(self) -> str:
        """Node type of its part of the machine."""
        return format_node_type(parse_node_type(self.machine).gpu, self.gpus)

    @property
    def share(self) -> float:
        """Which share of the machine, and of its links, it has."""
        return self.gpus / parse_node_type(self.machine).gpu_count


@dataclass(frozen=True)
class ClusterPromise:
    """Promise of a service, and what each node carries within it (`plan.cluster_capacities`)."""

    service: Service
    nodes: tuple[PromisedNode, ...]


@dataclass(frozen=True)
class Timing:
    """How long steps take and what they keep in memory: what `sustained` throughput needs.

    A step of node i on j layers with p prompt tokens and d decoding sequences takes
    `step_s[i] + j * (prefill(p) + decode(d))` seconds, each piecewise linear in its grid: row i of
    `prefill_tokens` / `prefill_s` and of `decode_sequences` / `decode_s` (seconds per layer; grids are padded
    by repeating their last point, and go on with their last slope). `kv_tokens[i, j]` tokens of KV cache fit
    beside j layers; `fill` is the share of them that may be used. Requests have `input_mean` prompt and
    `output_mean` generated tokens; a token is `activation_bytes` between nodes and `token_bytes` to and from
    the coordinator.
    """

    input_mean: float
    output_mean: float
    activation_bytes: float
    token_bytes: float
    kv_tokens: Floats
    fill: float
    prefill_tokens: Floats
    prefill_s: Floats
    decode_sequences: Floats
    decode_s: Floats
    step_s: Floats


@dataclass(frozen=True)
class FlowInstance:
    """One model on the nodes of a cluster. Shapes: n nodes; K is the largest of `max_layers`.

    A node is a unit: a machine, or a slice of one. `kind[i]` is equal for nodes that can be exchanged: same
    type, same links to everything.
    `link[i, k]`, `enter[i]`, `leave[i]` are tokens/s from node to node, from the source and to the sink, 0
    where there is no link; `latency`, `enter_s`, `leave_s` the seconds a byte takes on them.
    """

    layers: int
    names: tuple[str, ...]
    node_types: tuple[str, ...]
    regions: tuple[str, ...]
    kind: Ints
    max_layers: Ints
    rate: Floats
    link: Floats
    enter: Floats
    leave: Floats
    latency: Floats
    enter_s: Floats
    leave_s: Floats
    partial: bool = False
    timing: Timing | None = None
    units: tuple[Unit, ...] = ()
    promise: ClusterPromise | None = None

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.names)


def part_of(instance: FlowInstance, nodes: Ints) -> FlowInstance:
    """Return the instance with some of its nodes only, in the order given."""
    pairs, promise, timing = np.ix_(nodes, nodes), instance.promise, instance.timing
    picked = nodes.tolist()
    if timing is not None:
        rows = (
            "kv_tokens",
            "prefill_tokens",
            "prefill_s",
            "decode_sequences",
            "decode_s",
            "step_s",
        )
        timing = replace(timing, **{name: getattr(timing, name)[nodes] for name in rows})
    if promise is not None:
        promise = replace(promise, nodes=tuple(promise.nodes[i] for i in picked))
    return replace(
        instance,
        names=tuple(instance.names[i] for i in picked),
        node_types=tuple(instance.node_types[i] for i in picked),
        regions=tuple(instance.regions[i] for i in picked),
        kind=np.unique(instance.kind[nodes], return_inverse=True)[1].astype(np.int64),
        max_layers=instance.max_layers[nodes],
        rate=instance.rate[nodes],
        link=instance.link[pairs],
        enter=instance.enter[nodes],
        leave=instance.leave[nodes],
        latency=instance.latency[pairs],
        enter_s=instance.enter_s[nodes],
        leave_s=instance.leave_s[nodes],
        timing=timing,
        units=tuple(instance.units[i] for i in picked) if instance.units else (),
        promise=promise,
    )


@dataclass(frozen=True)
class Placement:
    """Layers [start, end) of every node; start = end = 0 for a node that is not used."""

    start: Ints
    end: Ints


@dataclass(frozen=True)
class Flows:
    """A flow over a placement, in tokens/s: its value, and what each edge carries.

    `edge[i, k]` from node i to node k, `enter[i]` from the source, `leave[i]` to the sink.
    """

    value: float
    edge: Floats
    enter: Floats
    leave: Floats

    @classmethod
    def of_arcs(cls, size: int, tail: Ints, head: Ints, flow: Floats) -> Flows:
        """Return the flow over so many nodes with this much on each arc (tail -1: source, head -1: sink)."""
        edge = np.zeros((size, size))
        enter, leave = np.zeros(size), np.zeros(size)
        inner = (tail >= 0) & (head >= 0)
        np.add.at(edge, (tail[inner], head[inner]), flow[inner])
        np.add.at(enter, head[tail < 0], flow[tail < 0])
        np.add.at(leave, tail[head < 0], flow[head < 0])
        return cls(float(enter.sum()), edge, enter, leave)

    def on_arcs(self, tail: Ints, head: Ints) -> Floats:
        """Return what each arc carries."""
        i, k = np.maximum(tail, 0), np.maximum(head, 0)
        inner = np.where(head < 0, self.leave[i], self.edge[i, k])
        found: Floats = np.where(tail < 0, self.enter[k], inner)
        return found


@dataclass(frozen=True)
class PlacementResult:
    """Result of a placement solver: the best placement, its value and the proven upper bound, tokens/s.

    `cut_short`: the clock came before the counted work was done, so another run may find another.
    """

    placement: Placement
    value: float
    bound: float
    evaluations: int
    seconds: float
    cpu_seconds: float
    cut_short: bool = False
